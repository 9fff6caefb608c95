"""One rank of two dies or stands still before, in and after a transfer: who waits is told which rank, and soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from serving import Server, wait_for, wait_gone
from test_processes import prompt_of
from tiny_models import make

from xllm_hier.config import EngineConfig
from xllm_hier.errors import StartupError
from xllm_hier.launch import run_until_stopped

LIMIT_S = 5.0
FLAGS = ["--tp_size=2", "--block_size=16", "--max_cache_size=8MB", "--enable_kvcache_store=true"]
FLAGS += ["--host_blocks_factor=2", "--store_segment_size=64MB", f"--worker_timeout_s={LIMIT_S:g}"]
PROMPT = prompt_of(1, 400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


class Request:
    """A request on a thread of its own: `begun` with its first token, `failure` is what it ended with."""

    def __init__(self, server: Server, prompt: list[int], max_tokens: int) -> None:
        self.begun = threading.Event()
        self.failure = ""
        self._thread = threading.Thread(target=self._run, args=(server, prompt, max_tokens))
        self._thread.start()

    def _run(self, server: Server, prompt: list[int], max_tokens: int) -> None:
        try:
            stream = server.client.completions.create(
                model=server.model, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in stream:
                self.begun.set()
        except openai.APIStatusError as error:
            self.failure = f"{error.status_code} {error.message}"
        except openai.APIError as error:  # inside a stream that has begun, whose status was sent before
            self.failure = f"503 {error.message}" if error.type == "server_error" else error.message

    def end(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the client hangs"
        return self.failure


def before_a_transfer(server: Server) -> Request | None:
    """Nothing is under way; the request comes afterwards."""
    return None


def in_a_store_read(server: Server) -> Request:
    """The store stands still in the middle of a prefetch."""
    server.ask(PROMPT, 1)
    server.wait_quiet()
    server.clear("device", "host")
    server.child("mooncake_client").suspend()
    request = Request(server, PROMPT, 4)
    wait_for(lambda: server.stats()["prefetching"] == 1)
    return request


def in_forwards_and_write_backs(server: Server) -> Request:
    """A long prompt's blocks are still being copied when the first tokens come."""
    request = Request(server, prompt_of(2, 700), 1000)
    assert request.begun.wait(60)
    return request


def after_a_transfer(server: Server) -> Request | None:
    server.ask(PROMPT, 1)
    server.clear("device")
    server.ask(PROMPT, 1)
    server.wait_quiet()
    return None


MOMENTS: list[Callable[[Server], Request | None]] = [
    before_a_transfer,
    in_a_store_read,
    in_forwards_and_write_backs,
    after_a_transfer,
]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_dies_or_stands_still_is_named_to_who_waits_and_the_instance_ends(
    model: Path, moment: Callable[[Server], Request | None], number: int
) -> None:
    shared = set(os.listdir("/dev/shm"))
    with Server(model, *FLAGS) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        request = moment(server)
        server.child("worker-1").send_signal(number)
        start = time.monotonic()
        if request is None and number == signal.SIGSTOP:
            request = Request(server, PROMPT, 4)
        if request is not None:
            failure = request.end()
            assert failure.startswith("503") and "worker 1" in failure and "worker 0" not in failure, failure
        assert server.process.wait(LIMIT_S + 60) == 1
        # The limit, what ending the others may take, and one more limit for who was asked just before.
        assert time.monotonic() - start < 2 * LIMIT_S + 15
        assert "worker 1" in server.log()
    wait_gone(family, 10)
    wait_for(lambda: set(os.listdir("/dev/shm")) <= shared)


def test_with_restart_on_failure_the_instance_comes_back_with_what_its_store_holds(model: Path) -> None:
    """Twice: a rank that dies, one that stands still. Same port, same bits, from the store and then from the host."""
    with Server(model, *FLAGS, "--restart_on_failure=true") as server:
        cold = server.ask(PROMPT)
        server.wait_quiet()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            worker, api = server.child("worker-1"), server.child("api")
            request = Request(server, prompt_of(3, 50), 1500)
            assert request.begun.wait(60)
            worker.send_signal(number)
            assert "worker 1" in request.end()
            wait_for(lambda worker=worker, api=api: not worker.is_running() and not api.is_running(), 120)
            wait_for(lambda: healthy(server), 120)
            again = server.ask(PROMPT)
            assert again.bits == cold.bits and again.cached == (0, 0, 399)
            server.wait_quiet()
            server.clear("device")
            again = server.ask(PROMPT)
            assert again.bits == cold.bits and again.cached == (0, 399, 0)
        assert server.stop() == 0


def test_a_start_that_fails_for_want_of_processes_is_tried_again_and_a_stop_ends_the_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Flaky:
        config = EngineConfig(model="tiny", restart_on_failure=True)

        def start(self) -> None:
            events.append("start")

        def wait(self) -> int:
            events.append("dies")
            return 1

        def restart(self) -> None:
            events.append("restart")
            if events.count("restart") == 1:
                raise BlockingIOError("no processes left")
            if events.count("restart") == 3:
                raise StartupError("did not come up")

        def stopping(self, timeout_s: float) -> bool:
            return events.count("restart") == 3

        def stop(self, *, graceful: bool) -> None:
            events.append(f"stop {graceful}")

    monkeypatch.setattr("xllm_hier.launch.signal.signal", lambda *_: None)
    assert run_until_stopped(Flaky(), lambda _: events.append("serves")) == 0  # type: ignore[arg-type]
    assert events == ["start", "serves", "dies", "restart", "restart", "serves", "dies", "restart", "stop True"]


def healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False
