"""Every process may be killed at any moment: all others end in order, nothing is left behind, the next start works."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
from serving import Server, wait_for, wait_gone
from tiny_models import VOCAB, make

FLAGS = ["--block_size=16", "--max_cache_size=8MB", "--enable_kvcache_store=true", "--host_blocks_factor=2"]
FLAGS += ["--store_segment_size=64MB", "--drain_timeout_s=20"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


def shared_memory() -> set[str]:
    """Names that anybody on this machine has there now."""
    return set(os.listdir("/dev/shm"))


def can_bind(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts.hostname, parts.port))
        except OSError:
            return False
        return True


class Load:
    """Requests that keep all transfers busy, on threads of their own; `outcomes` says how each ended."""

    def __init__(self, server: Server) -> None:
        self.outcomes: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(server, n)) for n in range(3)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.outcomes)

    def _run(self, server: Server, number: int) -> None:
        dice = random.Random(number)
        while not self._stop.is_set():
            try:
                server.ask(prompt_of(dice.randrange(6), 400), 8)
                self.outcomes.append("ok")
            except openai.APIStatusError as error:
                self.outcomes.append(f"{error.status_code} {error.message}")
                return
            except (openai.APIConnectionError, AssertionError) as error:
                self.outcomes.append(type(error).__name__)
                return

    def join(self) -> list[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"
        return self.outcomes


@pytest.mark.parametrize("victim", ["worker", "engine", "api", "launcher"])
def test_sigkill_of_any_process_under_load_leaves_nothing_behind(model: Path, victim: str) -> None:
    before = shared_memory()
    server = Server(model, *FLAGS)
    load = Load(server)
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) >= 5, "worker, engine, api, master, client"
    if victim == "launcher":
        server.process.kill()
    else:
        server.child(victim).kill()
    wait_gone(family, 15)
    outcomes = load.join()
    if victim in ("worker", "engine"):
        assert any(outcome.startswith("503") for outcome in outcomes), outcomes
        assert server.process.wait(60) == 1
    assert server.stop() != 0
    wait_for(lambda: shared_memory() <= before)
    wait_for(lambda: can_bind(server.url))
    with Server(model, *FLAGS) as again:
        assert again.ask(prompt_of(1, 40), 2).prompt_tokens == 40
    assert not list(Path(tempfile.gettempdir()).glob(f"xllm-run-{server.process.pid}-*"))


def test_sigterm_lets_open_requests_end_and_refuses_new_ones(model: Path) -> None:
    server = Server(model, *FLAGS)
    chunks: list[str] = []
    stream = server.client.completions.create(
        model=server.model, prompt=prompt_of(1, 50), max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )

    def refused() -> bool:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 1}, timeout=60)
        return answer.status_code == 503

    for chunk in stream:
        chunks.append(chunk.choices[0].finish_reason or "")
        if len(chunks) == 5:
            server.process.send_signal(signal.SIGTERM)
            wait_for(refused)  # the launcher sees a signal within 0.2 s
    assert len(chunks) == 800 and chunks[-1] == "length"
    assert server.stop() == 0


def test_a_bad_setting_ends_with_code_2_before_any_process_starts(model: Path) -> None:
    for flag, words in (
        ("--nonsense=1", "nonsense"),
        ("--model=/nowhere", "a folder with config.json"),
        ("--port=-1", "from 0 to 65535"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "xllm_hier.serve", f"--model={model}", flag],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_process_that_does_not_come_up_is_named_with_its_reason(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((model / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(b"no weights here")
    before = shared_memory()
    done = subprocess.run(
        [sys.executable, "-m", "xllm_hier.serve", f"--model={broken}", "--port=0", *FLAGS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert "safetensors" in done.stderr or "worker-0" in done.stderr
    wait_for(lambda: shared_memory() <= before)


def test_fifty_clients_that_vanish_at_random_leave_every_block_free(model: Path) -> None:
    with Server(model, *FLAGS, "--check_invariants") as server:

        def vanish(number: int) -> None:
            dice = random.Random(number)
            body = {"prompt": prompt_of(number % 7, dice.randrange(20, 300)), "max_tokens": 200, "ignore_eos": True}
            body["stream"] = number % 2 == 0
            with httpx.Client(timeout=httpx.Timeout(dice.choice([0.05, 0.2, 0.5, 1.0]))) as client:
                try:
                    with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                        for _, _ in zip(range(dice.randrange(1, 5)), answer.iter_lines(), strict=False):
                            pass
                except httpx.TransportError:
                    pass

        threads = [threading.Thread(target=vanish, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = server.wait_quiet()
        for tier in ("device", "host"):
            counts = stats["blocks"][tier]["KV"]
            assert counts["pinned"] == 0
        server.clear("device", "host")
        stats = server.stats()
        assert all(stats["blocks"][tier]["KV"]["evictable"] == 0 for tier in ("device", "host"))
        assert server.ask(prompt_of(1, 40), 2).prompt_tokens == 40
