"""run.sh bench pd: prefill and decode on separate instances, against bare transfers and against instances that do both.

1. Transfer: 64 scattered blocks of 8 layers pushed to another process, as a worker pushes them, against bare calls of
   the Transfer Engine with the same pieces; both take turns.
2. Hidden: how much of the time that pushes take goes by while the prompt is computed (PUSH), and the time to the second
   token of a prompt, pushed or pulled.
3. Mixed: short requests beside long prompts, at a prefill and a decode instance and at two instances that do both, all
   with one thread; time to first token, and gaps between tokens of the short ones.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from xllm_hier.config import EngineConfig
from xllm_hier.ints import ints
from xllm_hier.plans import LinkPeer, PushBlocks, RemoteBlocks, TransferEndpoint
from xllm_hier.wire import pack, unpack

from .bench_model import bench_model
from .serving import Client, arguments, random_prompt, serving, show

LAYERS, MOVED, HELD = 8, 64, 192
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
PD: dict[str, Any] = {"enable_disagg_pd": True, "disagg_pd_port": 0, "transfer_listen_port": 0}
ONE: dict[str, Any] = {"num_threads": 1, "max_cache_size": 256 << 20, "max_tokens_per_batch": 512, "block_size": 64}
SHARED = {"max_tokens_per_chunk_for_prefill": 384}  # a long prompt leaves some of each step to short ones

# ------------------------------------------------------------------------------------------- 1. transfer


def worker_half(layer_bytes: int) -> Any:
    """The transfers of a worker whose device cache has blocks of `layer_bytes` in each of LAYERS layers."""
    import torch

    from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
    from xllm_hier.worker.peers.pd_transfer import PdTransfer
    from xllm_hier.worker.platform import Platform
    from xllm_hier.worker.store.mooncake_client import set_environment
    from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
    from xllm_hier.worker.transfer_stats import KINDS, PD_KINDS, TransferStats

    set_environment("error")
    config = EngineConfig(
        model="bench", instance_role="PREFILL", decode_instances="127.0.0.1:1", log_level="error", device="cpu", **PD
    )
    key, value = (TensorSpec(name, "bfloat16", (layer_bytes // 4,)) for name in ("key", "value"))
    layout = BlockLayout(BlockType.KV, 16, tuple(range(LAYERS)), (key, value))
    domain = CacheDomain(CacheRole.TARGET, "main", CacheLayout(CacheRole.TARGET, (layout,)))
    caches = allocate_device_cache(layout, HELD, torch.device("cpu"))
    for cache in caches:
        cache.random_(0, 100)
    domain.caches[BlockType.KV] = BlockCache(layout, [as_bytes(cache) for cache in caches])
    stats = TransferStats((*KINDS, *PD_KINDS))
    transfer = PdTransfer(config, 0, [domain], Platform.choose(config), stats=stats, answer=lambda _: None)
    return config, domain.caches[BlockType.KV].device, transfer


def receive(layer_bytes: int) -> int:
    """Body of the process that is pushed to: tells where it is reached, and waits for the end of its stdin."""
    *_, transfer = worker_half(layer_bytes)
    sys.stdout.write(pack(transfer.endpoint).hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


@contextlib.contextmanager
def receiver(layer_bytes: int) -> Iterator[TransferEndpoint]:
    command = [sys.executable, "-m", "bench.pd", f"--receive={layer_bytes}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield unpack(bytes.fromhex(process.stdout.readline()))
        process.stdin.close()


def transfer_rates(layer_bytes: int, repetitions: int) -> dict[str, float]:
    """GB/s as a worker pushes, and of bare calls: medians of alternating runs."""
    from xllm_hier.worker.peers.transfer_engine import TransferEngine

    config, device, transfer = worker_half(layer_bytes)
    dice = random.Random(layer_bytes)
    rates: dict[str, list[float]] = {"push": [], "bare": []}
    with receiver(layer_bytes) as endpoint:
        transfer.link(LinkPeer("peer", [endpoint]))
        bare = TransferEngine(config, 0, [(layer.data_ptr(), layer.nbytes) for layer in device])
        bare.greet(endpoint.session, endpoint.regions[0].addresses[0])
        for repetition in range(repetitions + 1):
            local, remote = (dice.sample(range(HELD), MOVED) for _ in range(2))
            start = time.perf_counter()
            plan = PushBlocks(repetition, "peer", [RemoteBlocks("KV", ints(local), ints(remote))])
            pushes = transfer.begin([plan])
            pushes.target_computed()
            pushes.drafted()
            if failures := pushes.finish(60.0):
                raise RuntimeError(failures[0].error)
            middle = time.perf_counter()
            ours = [layer.data_ptr() + block * layer_bytes for layer in device for block in local]
            theirs = [base + block * layer_bytes for base in endpoint.regions[0].addresses for block in remote]
            code, _ = bare.write(endpoint.session, ours, theirs, [layer_bytes] * len(ours))
            if code:
                raise RuntimeError(f"a bare call failed with code {code}")
            nbytes, end = MOVED * LAYERS * layer_bytes / 1e9, time.perf_counter()
            if repetition:  # the first one touches memory and makes connections
                rates["push"].append(nbytes / (middle - start))
                rates["bare"].append(nbytes / (end - middle))
        bare.close()
    transfer.close()
    return {name: statistics.median(found) for name, found in rates.items()}


# ----------------------------------------------------------------------------------------------- instances


@contextlib.contextmanager
def pair(model: Path, mode: str, **settings: Any) -> Iterator[tuple[Client, Client]]:
    """A prefill and a decode instance."""
    both = {**PD, "kv_cache_transfer_mode": mode, **settings}
    with serving(model, instance_role="DECODE", **both) as decode:
        address = decode.instance.info.pd_address
        with serving(model, instance_role="PREFILL", decode_instances=address, **both) as prefill:
            while "linked" not in prefill.stats()["pd"]["peers"].values():
                time.sleep(0.05)
            yield prefill, decode


def hidden(model: Path, length: int, repetitions: int) -> dict[str, Any]:
    """Seconds of pushes and pulls, how much of the pushes' was waited for, and until the second token of a prompt."""
    found: dict[str, Any] = {}
    for mode in ("PUSH", "PULL"):
        with pair(model, mode, **ONE) as (prefill, decode):
            prefill.ask(random_prompt("warm", length, 8000), 2)
            seconds, waits, totals = [], [], []
            for repetition in range(repetitions):
                before = _transfer_seconds(prefill, decode)
                totals.append(prefill.ask(random_prompt((mode, repetition), length, 8000), 2).total_s)
                prefill.settle()
                after = _transfer_seconds(prefill, decode)
                seconds.append(after[0] - before[0])
                waits.append(after[1] - before[1])
        found[mode] = {"transfer_s": statistics.median(seconds), "second_token_s": statistics.median(totals)}
        if mode == "PUSH":
            found[mode]["waited_s"] = statistics.median(waits)
            found["hidden_share"] = 1.0 - sum(waits) / sum(seconds)
    return found


def _transfer_seconds(prefill: Client, decode: Client) -> tuple[float, float]:
    one, other = prefill.stats(), decode.stats()
    moved = one["transfer_seconds"]["push"]["sum"] + other["transfer_seconds"]["pull"]["sum"]
    return float(moved), float(one["pd"]["push_wait_s"])


# --------------------------------------------------------------------------------------------------- 3. mixed


class Load:
    """Clients that ask again and again for a while: three short ones and one with long prompts, over `clients`."""

    def __init__(self, clients: list[Client], seconds: float, long_tokens: int, seed: str) -> None:
        self.first: dict[str, list[float]] = {"short": [], "long": []}
        self.gaps: list[float] = []
        self.tokens = 0
        self._end = time.monotonic() + seconds
        turns = itertools.cycle(clients)
        jobs = [("short", 64, 48, next(turns), (seed, number)) for number in range(3)]
        jobs.append(("long", long_tokens, 4, next(turns), (seed, "long")))
        threads = [threading.Thread(target=self._go_on, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _go_on(self, kind: str, length: int, max_tokens: int, client: Client, seed: object) -> None:
        for number in itertools.count():
            if time.monotonic() >= self._end:
                return
            prompt = random_prompt((seed, number), length, 8000)
            body = {"model": client.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            body |= {"stream": True, "ignore_eos": True}
            url = f"http://127.0.0.1:{client.instance.port}/v1/completions"
            times = [time.perf_counter()]
            with httpx.stream("POST", url, json=body, timeout=600) as answer:
                times += [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
            self.first[kind].append(times[1] - times[0])
            self.tokens += len(times) - 1
            if kind == "short":
                self.gaps += [later - sooner for sooner, later in itertools.pairwise(times[1:])]

    def figures(self) -> dict[str, float]:
        gaps = sorted(self.gaps)
        return {
            "short_ttft_s": statistics.median(self.first["short"]),
            "long_ttft_s": statistics.median(self.first["long"] or [float("nan")]),
            "gap_p50_s": statistics.median(gaps),
            "gap_p99_s": gaps[int(len(gaps) * 0.99)],
            "tokens": float(self.tokens),
        }


def mixed(model: Path, seconds: float, long_tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds in which a pair and two instances that do both take turns."""
    runs: dict[str, list[dict[str, float]]] = {"prefill + decode": [], "two that do both": []}
    with contextlib.ExitStack() as stack:
        prefill, _ = stack.enter_context(pair(model, "PUSH", **ONE, **SHARED))
        fused = [stack.enter_context(serving(model, **ONE, **SHARED)) for _ in range(2)]
        for number in range(rounds):
            for name, clients in (("prefill + decode", [prefill]), ("two that do both", fused)):
                runs[name].append(Load(clients, seconds, long_tokens, f"{name} {number}").figures())
    return {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }


def main() -> int:
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--receive", type=int, default=0)
    asked, _ = early.parse_known_args()
    if asked.receive:
        return receive(asked.receive)
    options = arguments(__doc__ or "")
    sizes = SIZES[1:3] if options.quick else SIZES
    rates = {size: transfer_rates(size, 3 if options.quick else 11) for size in sizes}
    show(
        f"{MOVED} scattered blocks of {LAYERS} layers, loopback tcp",
        ["bytes of a layer", "pushed GB/s", "bare calls GB/s", "ratio"],
        [
            [f"{size >> 10} KiB", f"{one['push']:.2f}", f"{one['bare']:.2f}", f"{one['push'] / one['bare']:.2f}"]
            for size, one in rates.items()
        ],
    )
    model = bench_model(**SMALL)
    length = 1024 if options.quick else 4096
    shares = hidden(model, length, 1 if options.quick else 5)
    show(
        f"a prompt of {length} tokens",
        ["", "transfer ms", "waited for ms", "second token ms"],
        [
            [
                mode,
                f"{shares[mode]['transfer_s'] * 1e3:.0f}",
                f"{shares[mode].get('waited_s', shares[mode]['transfer_s']) * 1e3:.0f}",
                f"{shares[mode]['second_token_s'] * 1e3:.0f}",
            ]
            for mode in ("PUSH", "PULL")
        ],
    )
    print(f"hidden behind the prompt's computation (PUSH): {shares['hidden_share']:.0%}")
    loads = mixed(model, 8.0 if options.quick else 30.0, length, 1 if options.quick else 3)
    show(
        f"three short requests at a time beside prompts of {length} tokens",
        ["", "short: first token ms", "gap p50 ms", "gap p99 ms", "long: first token ms", "tokens"],
        [
            [
                name,
                f"{one['short_ttft_s'] * 1e3:.0f}",
                f"{one['gap_p50_s'] * 1e3:.1f}",
                f"{one['gap_p99_s'] * 1e3:.1f}",
                f"{one['long_ttft_s'] * 1e3:.0f}",
                f"{one['tokens']:.0f}",
            ]
            for name, one in loads.items()
        ],
    )
    if options.json:
        print(json.dumps({"bench": "pd", "transfer": rates, "hidden": shares, "mixed": loads}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
