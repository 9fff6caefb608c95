"""Real instances for tests: `python -m xllm_hier.serve` as users start it, and stores that outlive them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from fork_server import start_program
from openai import OpenAI

from xllm_hier.embedded_store import EmbeddedStore

START_S = 240.0
QUIET_S = 60.0


def wait_for(what: Callable[[], Any], timeout_s: float = QUIET_S, every_s: float = 0.05) -> Any:
    """The first true value of `what()`; fails the test when there is none in time."""
    end = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < end, f"waited {timeout_s:g} s in vain"
        time.sleep(every_s)
    return found


def runs(pid: int) -> bool:
    """There is such a process. A zombie that nobody has fetched yet is none, unless some of its threads still end: they
    keep its ports and files."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float = 5.0) -> None:
    """Until none of them runs: multiprocessing's resource tracker ends a moment after the last who used it."""
    wait_for(lambda: not [process for process in processes if runs(process.pid)], timeout_s)


class Server:
    """One serving instance in a process of its own; `stop` or the context manager ends it.

    It restores whatever can be, unless told otherwise: tiny models compute faster than a busy machine reads. One thread
    computes them: several instances share the cores, and a second thread would wait for a core at every product.
    """

    def __init__(self, model: Path | str, *flags: str, environ: dict[str, str] | None = None) -> None:
        flags = (f"--model={model}", "--port=0", "--restore_policy=always", "--num_threads=1", *flags)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        self.process = start_program("xllm_hier.serve", flags, self._log.fileno(), environ)
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if found := re.search(r"serves (\S+) at (http://\S+)", line):
                self.model, self.url = found.groups()
                break
        watchdog.cancel()
        if not self.url:
            self.process.wait()
            text = self.log()
            self._close()
            raise AssertionError(f"the instance did not come up:\n{text[-3000:]}")
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def log(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def child(self, name: str) -> psutil.Process:
        """The worker, engine, api, mooncake_master or mooncake_client process."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.name().startswith(f"xllm-{name}") or f"/{name}" in child.cmdline()[0]:
                    return child
        raise AssertionError(f"no process {name}")

    def ask(self, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Answer:
        """One greedy completion with the log probabilities of its tokens."""
        body = {"return_token_ids": True, "ignore_eos": True, **more.pop("extra_body", {})}
        got = self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=3, extra_body=body, **more
        )
        return Answer.of(got.choices[0].model_dump(), got.usage.model_dump())

    def clear(self, *tiers: str) -> dict[str, int]:
        if not tiers:
            return {}
        answer = httpx.post(f"{self.url}/cache/clear", json={"tiers": list(tiers)}, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["cleared"])

    def admin(self, method: str, route: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        """The JSON answer of `/cache/<route>`."""
        answer = httpx.request(
            method, f"{self.url}/cache/{route}", timeout=60, **({"json": body or {}} if method == "PUT" else {})
        )
        assert answer.status_code == status, answer.text
        return answer.json()

    def stats(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/cache/stats", timeout=60).json())

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def wait_quiet(self) -> dict[str, Any]:
        """Until no request is open, nothing is pinned and no write-back runs; returns the stats then."""

        def quiet() -> dict[str, Any] | None:
            stats = self.stats()
            pinned = sum(kind["pinned"] for tier in stats["blocks"].values() for kind in tier.values())
            open_now = stats["running"] + stats["waiting"] + stats["prefetching"] + stats["canonical"]
            return None if pinned or open_now else stats

        wait_for(quiet)
        return self.stats()  # workers say theirs before the engine does: what ended between lacks in the first ones

    def kill(self) -> None:
        """SIGKILL to all of its processes at once; returns when there are none, and their ports are free."""
        everybody = [psutil.Process(self.process.pid), *self.children]
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):  # they die with their parent
                process.kill()
        self.process.wait(60)
        wait_gone(everybody, 30)

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        with contextlib.suppress(AttributeError):
            self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._close()
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._log.closed:
            self.stop()


@dataclass(frozen=True)
class Answer:
    """Tokens and their log probabilities, which are equal exactly if the logits were, and who paid for the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tiers: dict[str, int]
    prompt_tokens: int

    @classmethod
    def of(cls, choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
        details = usage["prompt_tokens_details"]
        tiers = dict(details["cached_tokens_by_tier"])
        assert sum(tiers.values()) == details["cached_tokens"] <= usage["prompt_tokens"]
        return cls(
            tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), tiers, usage["prompt_tokens"]
        )

    @property
    def bits(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.token_ids, self.logprobs

    @property
    def cached(self) -> tuple[int, int, int]:
        return self.tiers["device"], self.tiers["host"], self.tiers["store"]


@contextlib.contextmanager
def running_store(folder: Path, segment_bytes: int = 256 << 20) -> Iterator[EmbeddedStore]:
    """A Mooncake Store of the test's own, which instances come to and leave."""
    store = EmbeddedStore(folder, segment_bytes)
    store.start()
    try:
        yield store
    finally:
        store.stop()


def store_flags(store: EmbeddedStore, *, direct: bool = False) -> list[str]:
    flags = [
        "--enable_kvcache_store=true",
        "--host_blocks_factor=3",
        f"--store_master_server_address={store.master_address}",
    ]
    if direct:  # the tests of other workers have direct clients, too
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        flags.append(f"--store_local_hostname=127.0.0.1:{12345 + 50 * worker}")
    else:
        flags.append(f"--store_client_address={store.client_address}")
    return flags
