"""run.sh bench soak --minutes N: random traffic with faults; nothing may grow, and every answer must be the right one.

Two instances of one small model run side by side: one with all tiers and an embedded store, whose processes are killed
and stopped at random, whose tiers are emptied and whose store is detached; one without any cache. Each greedy answer of
the first is compared, log probabilities included, with the second's. What the first takes (memory, file descriptors,
threads, shared memory, pinned blocks) is sampled at rest and compared between the first and the last quarter.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .bench_model import bench_model
from .serving import Client, arguments, serving, show
from .tp import TINY

CLIENTS = 4
QUIET_EVERY_S = 20.0
GROWTH = {"rss_mib": 0.10, "fds": 0.05, "threads": 0.05, "shm": 0.0}  # shares that count as noise


@dataclass
class Soak:
    """The traffic, the faults, and what came of them."""

    tiered: Client
    plain: Client
    seed: int
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._go = threading.Event()
        self._done = threading.Event()
        self._idle = [threading.Event() for _ in range(CLIENTS)]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.tiered.instance.port}", timeout=120)

    def run(self, seconds: float) -> None:
        """Traffic and faults for so long, with a rest now and then to look at what is left."""
        threads = [threading.Thread(target=self._ask_on_and_on, args=(number,)) for number in range(CLIENTS)]
        threads.append(threading.Thread(target=self._break_things))
        end = time.monotonic() + seconds
        self._go.set()
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            time.sleep(min(QUIET_EVERY_S, max(0.0, end - time.monotonic())))
            self._rest()
        self._done.set()
        self._go.set()
        for thread in threads:
            thread.join()

    # ----------------------------------------------------------------------------------------- traffic

    def _prompt(self, dice: random.Random) -> list[int]:
        """One of a few conversations, cut anywhere, with some new tokens behind it."""
        topic = random.Random(dice.randrange(8))
        trunk = [topic.randrange(100, TINY["vocab_size"]) for _ in range(900)]
        return trunk[: dice.randrange(20, 900)] + [dice.randrange(100, TINY["vocab_size"]) for _ in range(5)]

    def _ask_on_and_on(self, number: int) -> None:
        dice = random.Random(f"{self.seed}-{number}")
        while not self._done.is_set():
            if not self._go.is_set():
                self._idle[number].set()
                self._go.wait(1)
                continue
            self._idle[number].clear()
            prompt, kind = self._prompt(dice), dice.choice(["ask"] * 6 + ["leave", "sample"])
            self.asked[kind] += 1
            try:
                getattr(self, f"_{kind}")(prompt, dice)
            except (httpx.HTTPError, RuntimeError) as error:
                self.failed[type(error).__name__ + ": " + str(error)[:80]] += 1
        self._idle[number].set()

    def _post(self, client: Client, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": client.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 2, **more}
        answer = httpx.post(f"http://127.0.0.1:{client.instance.port}/v1/completions", json=body, timeout=120)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text[:60]}")
        return dict(answer.json()["choices"][0])

    def _ask(self, prompt: list[int], dice: random.Random) -> None:
        ours, theirs = (self._post(client, prompt, return_token_ids=True) for client in (self.tiered, self.plain))
        if (ours["token_ids"], ours["logprobs"]) != (theirs["token_ids"], theirs["logprobs"]):
            self.wrong.append(f"{len(prompt)} tokens: {ours['token_ids']} instead of {theirs['token_ids']}")

    def _sample(self, prompt: list[int], dice: random.Random) -> None:
        self._post(self.tiered, prompt, temperature=1.0, n=3, max_tokens=20)

    def _leave(self, prompt: list[int], dice: random.Random) -> None:
        body = {"model": self.tiered.model, "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if count > dice.randrange(20):
                    return

    # ------------------------------------------------------------------------------------------ faults

    def _break_things(self) -> None:
        dice = random.Random(f"{self.seed}-faults")
        while not self._done.wait(dice.uniform(0.5, 4.0)):
            if not self._go.is_set():
                continue
            fault = dice.choice(["clear", "clear", "stop", "stop", "kill", "detach"])
            self.asked[f"fault: {fault}"] += 1
            try:
                getattr(self, f"_fault_{fault}")(dice)
            except (OSError, httpx.HTTPError) as error:
                self.failed[f"{fault}: {type(error).__name__}"] += 1

    def _fault_clear(self, dice: random.Random) -> None:
        tiers = dice.sample(["device", "host", "store"], dice.randrange(1, 3))
        self._http.post("/cache/clear", json={"tiers": tiers})

    def _victim(self, dice: random.Random) -> int:
        return int(self.tiered.instance.pids[dice.choice(["master", "client"])])

    def _fault_stop(self, dice: random.Random) -> None:
        victim = self._victim(dice)
        os.kill(victim, signal.SIGSTOP)
        self._done.wait(dice.choice([0.05, 0.3, 2.0]))
        os.kill(victim, signal.SIGCONT)

    def _fault_kill(self, dice: random.Random) -> None:
        os.kill(self._victim(dice), signal.SIGKILL)

    def _fault_detach(self, dice: random.Random) -> None:
        self._http.delete("/cache/store")
        self._done.wait(dice.uniform(0.1, 1.0))
        self._http.put("/cache/store", json={})

    # ----------------------------------------------------------------------------------------- at rest

    def _rest(self) -> None:
        self._go.clear()
        for idle in self._idle:
            idle.wait(120)
        self.tiered.settle()
        stats = self.tiered.stats()
        pinned = sum(kind["pinned"] for tier in stats["blocks"].values() for kind in tier.values())
        self.samples.append({"pinned": float(pinned), "shm": float(len(os.listdir("/dev/shm"))), **self._processes()})
        self._go.set()

    def _processes(self) -> dict[str, float]:
        """Sums over our own processes; those of the store come and go."""
        total = {"rss_mib": 0.0, "fds": 0.0, "threads": 0.0}
        for name, pid in self.tiered.instance.pids.items():
            if name in ("master", "client"):
                continue
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in status)
            total["rss_mib"] += int(fields["VmRSS"].split()[0]) / 1024
            total["threads"] += int(fields["Threads"])
            total["fds"] += len(os.listdir(f"/proc/{pid}/fd"))
        return total

    def growth(self) -> dict[str, tuple[float, float]]:
        """Medians of the first and of the last quarter of the samples."""
        quarter = max(1, len(self.samples) // 4)
        first, last = self.samples[:quarter], self.samples[-quarter:]
        names = self.samples[0] if self.samples else {}
        return {name: tuple(statistics.median(s[name] for s in part) for part in (first, last)) for name in names}  # type: ignore[misc]


def main() -> int:
    options = arguments(__doc__ or "", minutes={"type": float, "default": 0.0}, seed={"type": int, "default": 1})
    minutes = options.minutes or (1.0 if options.quick else 10.0)
    settings: dict[str, Any] = {"max_cache_size": 8 << 20, "worker_timeout_s": 120.0}
    tiers = {"enable_kvcache_store": True, "host_blocks_factor": 2.0, "store_segment_size": 64 << 20, "audit_rate": 10}
    folder = bench_model(**TINY)
    watch_over = threading.Event()
    with (
        serving(folder, **settings, **tiers, check_invariants=True) as tiered,
        serving(folder, **settings, enable_prefix_cache=False) as plain,
    ):
        watching = threading.Thread(target=_look_after, args=(tiered, watch_over))
        watching.start()
        soak = Soak(tiered, plain, options.seed)
        soak.run(minutes * 60)
        watch_over.set()
        watching.join()
        stats = tiered.stats()
    growth = soak.growth()
    grown = [name for name, (before, after) in growth.items() if after > before * (1 + GROWTH.get(name, 0.0)) + 1]
    show(
        f"{minutes:g} minutes, seed {options.seed}",
        ["what", "count"],
        [[name, str(count)] for name, count in sorted((soak.asked + soak.failed).items())]
        + [["wrong answers", str(len(soak.wrong))]]
        + [[f"prompt tokens from {tier}", str(count)] for tier, count in stats["prefix_tokens"].items()]
        + [[f"audits: {name}", str(count)] for name, count in stats["audits"].items()],
    )
    show(
        "at rest, first and last quarter",
        ["what", "first", "last"],
        [[name, f"{before:.0f}", f"{after:.0f}"] for name, (before, after) in growth.items()],
    )
    for text in soak.wrong[:5]:
        print("wrong:", text)
    if options.json:
        figures = {"asked": soak.asked, "failed": soak.failed, "wrong": len(soak.wrong), "growth": growth}
        print(json.dumps({"bench": "soak", "minutes": minutes, **figures}))
    return 1 if soak.wrong or soak.failed or grown else 0


def _look_after(client: Client, over: threading.Event) -> None:
    """What the launcher of a served instance does: start the store's dead processes again."""
    while not over.wait(0.2):
        client.instance.poll()


if __name__ == "__main__":
    sys.exit(main())
