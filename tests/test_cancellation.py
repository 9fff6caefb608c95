"""Whoever goes away, at whatever moment, leaves nothing behind: no pinned block, no open request, no endless wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Server, running_store, store_flags, wait_for
from test_processes import prompt_of
from tiny_models import make

from xllm_hier.embedded_store import EmbeddedStore

FLAGS = ["--block_size=16", "--max_cache_size=8MB", "--check_invariants", "--store_call_limit_ms=60000"]
PROMPT = prompt_of(1, 400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    with running_store(tmp_path) as running:
        yield running


def leave(server: Server, seconds: float, **body: object) -> None:
    """Ask, and hang up after a while."""
    body = {"model": server.model, "temperature": 0, "ignore_eos": True, **body}
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=seconds)
        ) as got:
            end = time.monotonic() + seconds
            for _ in got.iter_lines():
                if time.monotonic() > end:
                    return
    except httpx.ReadTimeout:
        pass


def stand_still(server: Server, store: EmbeddedStore) -> None:
    """PROMPT lies in the store alone, and the store's client stands still."""
    server.ask(PROMPT, 1)
    server.wait_quiet()
    server.clear("device", "host")
    os.kill(store.pids["client"], signal.SIGSTOP)


def test_a_client_that_leaves_during_a_hanging_prefetch_is_gone_when_the_read_ends(
    model: Path, store: EmbeddedStore
) -> None:
    with Server(model, *FLAGS, *store_flags(store)) as server:
        stand_still(server, store)
        try:
            leaving = threading.Thread(target=leave, args=(server, 1.0), kwargs={"prompt": PROMPT, "max_tokens": 50})
            leaving.start()
            wait_for(lambda: server.stats()["prefetching"] == 1)
            leaving.join()
            assert server.ask(prompt_of(2, 100), 4).prompt_tokens == 100, "others go on"
        finally:
            os.kill(store.pids["client"], signal.SIGCONT)
        stats = server.wait_quiet()
        assert stats["prefetching"] == 0 and stats["generation_tokens"] < 50


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_all_n_answers_of_its_request_with_it(model: Path, stream: bool) -> None:
    with Server(model, *FLAGS, "--host_blocks_factor=2") as server:
        leave(server, 1.0, prompt=PROMPT[:100], max_tokens=1500, n=4, stream=stream, seed=1)
        stats = server.wait_quiet()
        assert 0 < stats["generation_tokens"] < 4 * 1500
        assert server.ask(PROMPT, 2).prompt_tokens == 400


def test_clients_that_leave_before_they_are_scheduled_cost_no_step(model: Path) -> None:
    """One sequence at a time: nine others wait behind four answers to one prompt, and go."""
    with Server(model, *FLAGS, "--host_blocks_factor=2", "--max_seqs_per_batch=1") as server:
        leaving = [
            threading.Thread(target=leave, args=(server, 0.5), kwargs={"prompt": prompt_of(n, 50), "max_tokens": 1900})
            for n in range(1, 10)
        ]
        body = {"prompt": prompt_of(0, 50), "max_tokens": 1900, "n": 4, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # the end of which would close the connection
            next(lines)
            for thread in leaving:
                thread.start()
            for thread in leaving:
                thread.join()
            wait_for(lambda: server.stats()["waiting"] <= 3)  # of the four
            wait_for(lambda: server.stats()["running"] == 1)
        stats = server.wait_quiet()
        computed = stats["prefix_tokens"]["computed"]  # of 50 tokens each other answer finds 48
        assert 50 <= computed <= 50 + 3 * 2, "those that waited were never computed"


def test_a_drain_waits_for_a_hanging_prefetch_no_longer_than_it_may(model: Path, store: EmbeddedStore) -> None:
    with Server(model, *FLAGS, *store_flags(store), "--drain_timeout_s=2") as server:
        stand_still(server, store)
        leaving = threading.Thread(target=leave, args=(server, 30.0), kwargs={"prompt": PROMPT, "max_tokens": 5})
        try:
            leaving.start()
            wait_for(lambda: server.stats()["prefetching"] == 1)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert time.monotonic() - start < 45
        finally:
            os.kill(store.pids["client"], signal.SIGCONT)
            leaving.join()


def test_a_throttled_store_is_left_for_computing(model: Path, store: EmbeddedStore) -> None:
    """Its client runs one tenth of the time, in slices far shorter than a read."""
    flags = [*FLAGS, *store_flags(store), "--restore_policy=measured", "--prefetch_batch_size=2"]
    prompts = [prompt_of(100 + n, 800) for n in range(6)]
    with Server(model, *flags) as server:
        expected = [server.ask(prompt, 2).bits for prompt in prompts]
        server.wait_quiet()
        done = threading.Event()

        def throttle() -> None:
            while not done.is_set():
                os.kill(store.pids["client"], signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(store.pids["client"], signal.SIGCONT)
                time.sleep(0.005)

        throttling = threading.Thread(target=throttle)
        throttling.start()
        try:
            for prompt, bits in zip(prompts, expected, strict=True):
                server.clear("device", "host")
                assert server.ask(prompt, 2).bits == bits
        finally:
            done.set()
            throttling.join()
        decisions = server.stats()["restore_decisions"]["store"]
        assert decisions["partly"] + decisions["recomputed"] > 0, decisions
        assert decisions["restored"] < len(prompts)


def test_half_a_minute_of_random_traffic_and_faults_gives_right_answers_and_leaves_nothing() -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "bench.soak", "--minutes", "0.5", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400, check=False)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0 and figures["wrong"] == 0 and not figures["failed"], done.stdout[-3000:]
    assert figures["asked"]["ask"] > 50
