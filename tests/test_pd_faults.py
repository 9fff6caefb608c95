"""Whatever fails between a prefill and a decode instance: tokens are right and go on while anybody can make them,
else the error is clear; and all blocks come back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIStatusError, OpenAIError
from pairs import (
    COMMON,
    address_of,
    decode_server,
    free_port,
    phase_count,
    prefill_server,
    prompt_of,
    running_pair,
    wait_at_rest,
    wait_linked,
)
from serving import Server, running_store, store_flags, wait_for
from tiny_models import make

from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError

SPREAD = True  # each test kills or stops somebody: see conftest.py
MODES = ["PUSH", "PULL"]
LONG = 800  # tokens: an answer that takes some seconds
NUM = 8
SHORT_WAITS = ["--peer_wait_s=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Any]:
    """What one instance that does both answers, asked once for each question."""
    with Server(model, *COMMON, "--enable_prefix_cache=false") as fused:
        known: dict[tuple[int, int, int], Any] = {}

        def ask(seed: int, length: int, max_tokens: int) -> Any:
            key = (seed, length, max_tokens)
            if key not in known:
                known[key] = fused.ask(prompt_of(seed, length), max_tokens).bits
            return known[key]

        yield ask


class Stream:
    """One answer as it comes, read by a thread of its own."""

    def __init__(self, server: Server, prompt: list[int], max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self._stop = False
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._read, server, prompt, max_tokens)

    def _read(self, server: Server, prompt: list[int], max_tokens: int) -> None:
        body = {"return_token_ids": True, "ignore_eos": True}
        try:
            with server.client.completions.create(
                model=server.model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body=body
            ) as chunks:
                for chunk in chunks:
                    for choice in chunk.choices:
                        self.tokens += choice.model_dump()["token_ids"] or []
                    if self._stop:
                        return
        except (OpenAIError, httpx.HTTPError) as error:
            self.error = error

    def wait_tokens(self, count: int) -> None:
        wait_for(lambda: len(self.tokens) >= count or self._done.done(), every_s=0.002)

    def leave(self) -> None:
        self._stop = True
        self.end()

    def end(self) -> list[int]:
        self._done.result(180)
        self._pool.shutdown()
        return self.tokens


@contextlib.contextmanager
def one_prefill_two_decode(model: Path, mode: str, *flags: str) -> Iterator[tuple[Server, list[Server]]]:
    with (
        decode_server(model, mode, *flags) as one,
        decode_server(model, mode, *flags) as two,
        prefill_server(model, mode, [address_of(one), address_of(two)], *flags) as prefill,
    ):
        wait_linked(prefill, 2)
        yield prefill, [one, two]


def generating(servers: list[Server]) -> Server | None:
    """The one that has the only request."""
    return next((server for server in servers if phase_count(server, "generating")), None)


# ------------------------------------------------------------------------------------------ decode is lost


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_decode_instance_costs_no_token_while_another_is_there(model: Path, expected: Any, mode: str) -> None:
    """Also in the middle of answers: what was streamed stays, and the rest is what it would have been."""
    with one_prefill_two_decode(model, mode) as (prefill, decodes):
        streams = [Stream(prefill, prompt_of(seed, 90), LONG) for seed in range(4)]
        for stream in streams:
            stream.wait_tokens(20)
        victim = wait_for(lambda: generating(decodes))
        victim.kill()
        assert [stream.end() for stream in streams] == [list(expected(seed, 90, LONG)[0]) for seed in range(4)]
        assert all(stream.error is None for stream in streams)
        stats = prefill.stats()["pd"]
        assert stats["moved"] >= 1 and sorted(stats["peers"].values()) == ["absent", "linked"]
        wait_at_rest(prefill, *(server for server in decodes if server is not victim))


def test_a_decode_instance_that_starts_itself_again_goes_on_with_what_waits(model: Path, expected: Any) -> None:
    """Its port is a free one, which it keeps."""
    with decode_server(model, "PUSH", "--restart_on_failure") as decode:
        address = address_of(decode)
        with prefill_server(model, "PUSH", [address]) as prefill:
            wait_linked(prefill)
            stream = Stream(prefill, prompt_of(1, 90), LONG)
            stream.wait_tokens(20)
            decode.child("worker-0").kill()
            wait_for(lambda: list(prefill.stats()["pd"]["peers"].values()) == ["absent"])
            assert prefill.health()["status"] == "degraded"
            assert stream.end() == list(expected(1, 90, LONG)[0]) and stream.error is None
            assert prefill.stats()["pd"]["moved"] == 1
            assert address_of(decode) == address
            wait_at_rest(prefill, decode)


def test_without_any_decode_instance_a_request_fails_with_a_clear_error_and_leaves_nothing(model: Path) -> None:
    with prefill_server(model, "PUSH", [f"127.0.0.1:{free_port()}"], *SHORT_WAITS) as prefill:
        with pytest.raises(APIStatusError, match="no decode instance takes the request") as caught:
            prefill.ask(prompt_of(2, 60), 8)
        assert caught.value.status_code == 503
        assert len(prefill.ask(prompt_of(2, 60), 1).token_ids) == 1, "one token needs no decode instance"
        wait_at_rest(prefill)


def test_when_the_only_one_is_lost_in_mid_answer_the_stream_ends_with_an_error(model: Path, expected: Any) -> None:
    with decode_server(model, "PUSH") as decode, contextlib.ExitStack() as stack:
        prefill = stack.enter_context(prefill_server(model, "PUSH", [address_of(decode)], *SHORT_WAITS))
        wait_linked(prefill)
        stream = Stream(prefill, prompt_of(1, 90), LONG)
        stream.wait_tokens(20)
        decode.kill()
        tokens = stream.end()
        assert stream.error is not None and "no decode instance" in str(stream.error)
        assert tokens == list(expected(1, 90, LONG)[0][: len(tokens)])
        wait_at_rest(prefill)


@pytest.mark.parametrize(
    ("whom", "mode"), [("all", "PUSH"), ("all", "PULL"), ("engine", "PUSH"), ("worker-0", "PUSH"), ("worker-0", "PULL")]
)
def test_a_stopped_decode_instance_is_left_and_all_blocks_come_back_when_it_goes_on(
    model: Path, expected: Any, whom: str, mode: str
) -> None:
    limits = ["--worker_timeout_s=120"]
    with one_prefill_two_decode(model, mode, *limits) as (prefill, decodes):
        streams = [Stream(prefill, prompt_of(seed, 90), LONG) for seed in range(4)]
        for stream in streams:
            stream.wait_tokens(20)
        victim = wait_for(lambda: generating(decodes))
        processes = victim.children if whom == "all" else [victim.child(whom)]
        for process in processes:
            process.suspend()
        if whom == "worker-0":  # its engine lives and says so: to others it is slow, not lost
            time.sleep(4)
            for process in processes:
                process.resume()
        late = [Stream(prefill, prompt_of(seed, 90), 30) for seed in range(10, 14)]
        for stream, seed in zip(streams, range(4), strict=True):
            assert stream.end() == list(expected(seed, 90, LONG)[0])
        for stream, seed in zip(late, range(10, 14), strict=True):
            assert stream.end() == list(expected(seed, 90, 30)[0])
        for process in processes:
            process.resume()
        wait_linked(prefill, 2)
        wait_at_rest(prefill, *decodes)
        for seed in range(20, 24):
            assert prefill.ask(prompt_of(seed, 60), 10).bits == expected(seed, 60, 10)


# ----------------------------------------------------------------------------------------- prefill is lost


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["kill", "stop and go on", "stop and kill"])
def test_what_a_lost_prefill_instance_had_at_a_decode_instance_is_free_again(
    model: Path, expected: Any, mode: str, end: str
) -> None:
    """Once with the real time for which it may still be writing."""
    late = ["--peer_late_writes_s=0"] if (mode, end) == ("PUSH", "kill") else []
    with decode_server(model, mode, *late) as decode, contextlib.ExitStack() as stack:
        prefill = stack.enter_context(prefill_server(model, mode, [address_of(decode)], "--max_tokens_per_batch=16"))
        wait_linked(prefill)
        streams = [Stream(prefill, prompt_of(seed, 600), 300) for seed in range(NUM)]
        wait_for(lambda: (phases := decode.stats()["pd"]["phases"])["generating"] and phases["placed"], every_s=0.01)
        everybody = [psutil.Process(prefill.process.pid), *prefill.children]
        if end != "kill":
            for process in everybody:
                process.suspend()
            wait_for(lambda: not phase_count(decode, "generating"))
            time.sleep(1)
        if end == "stop and go on":
            for process in everybody:
                process.resume()
        else:
            prefill.kill()
        for stream in streams:
            stream.end()
        if end == "stop and go on":  # it finds itself given up, and hands everything over anew
            assert [stream.tokens for stream in streams] == [list(expected(seed, 600, 300)[0]) for seed in range(NUM)]
            wait_at_rest(prefill)
        wait_at_rest(decode)
        assert decode.stats()["pd"]["held"] == 0


def test_a_prefill_instance_that_starts_again_on_its_address_is_another_one(model: Path, expected: Any) -> None:
    port = free_port()
    with decode_server(model, "PUSH") as decode:
        for turn in range(2):
            prefill = prefill_server(model, "PUSH", [address_of(decode)], port=port)
            wait_linked(prefill)
            assert prefill.ask(prompt_of(30 + turn, 60), 10).bits == expected(30 + turn, 60, 10)
            stream = Stream(prefill, prompt_of(turn, 90), LONG)
            stream.wait_tokens(20)
            prefill.kill()
            stream.end()
            prefill.stop()
            assert wait_for(lambda: not phase_count(decode, "generating"))
        wait_at_rest(decode)


# ------------------------------------------------------------------------------------------- clients leave


@pytest.mark.parametrize("mode", MODES)
def test_clients_that_leave_at_any_moment_take_their_blocks_with_them_on_both_sides(
    model: Path, expected: Any, mode: str
) -> None:
    with running_pair(model, mode) as (prefill, decode):
        for number, pause_s in enumerate((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)):
            streams = [Stream(prefill, prompt_of(100 * number + seed, 700), LONG) for seed in range(3)]
            time.sleep(pause_s)
            for stream in streams:
                stream._stop = True
            for stream in streams:
                stream.leave()
        wait_at_rest(prefill, decode)
        assert prefill.ask(prompt_of(40, 60), 10).bits == expected(40, 60, 10)


# ---------------------------------------------------------------------------------------- little room, drains


@pytest.mark.parametrize("mode", MODES)
def test_with_little_room_on_both_sides_nothing_changes_but_the_time(model: Path, expected: Any, mode: str) -> None:
    """Requests wait for blocks of the decode side; there and at the prefill side sequences are preempted."""
    small = "--max_cache_size=130KB"
    with running_pair(model, mode, small, "--host_blocks_factor=4") as (prefill, decode):
        jobs = [(seed, 40 + 7 * seed, 60) for seed in range(12)]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for _ in range(4):  # which requests run side by side is a matter of chance
                answers = list(pool.map(lambda job: prefill.ask(prompt_of(job[0], job[1]), job[2]).bits, jobs))
                assert answers == [expected(*job) for job in jobs]
                if decode.stats()["preemptions"]:
                    break
        assert decode.stats()["preemptions"] > 0
        wait_at_rest(prefill, decode)


def test_a_decode_instance_that_stops_in_order_ends_what_it_has_and_takes_no_more(model: Path, expected: Any) -> None:
    with one_prefill_two_decode(model, "PUSH") as (prefill, decodes):
        stream = Stream(prefill, prompt_of(1, 90), LONG)
        stream.wait_tokens(5)
        victim = wait_for(lambda: generating(decodes))
        victim.process.send_signal(signal.SIGTERM)
        later = [prefill.ask(prompt_of(seed, 60), 10).bits for seed in range(20, 24)]
        assert later == [expected(seed, 60, 10) for seed in range(20, 24)]
        assert stream.end() == list(expected(1, 90, LONG)[0])
        assert victim.process.wait(60) == 0
        assert prefill.stats()["pd"]["moved"] == 0


# ------------------------------------------------------------------------------------------------- settings


def test_instances_that_do_not_fit_say_what_does_not_and_requests_say_it_too(model: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "tiny", "llama", seed=7)  # the same name, other weights
    with decode_server(model, "PUSH") as decode:
        for flags, folder, what in (
            (["--block_size=32", "--model_id=x"], model, ["block_size: 32 at prefill, 16", "model_id: 'x' at prefill"]),
            (["--tp_size=2"], model, ["tp_size: 2 at prefill, 1 at decode"]),
            (["--kv_cache_transfer_mode=PULL"], other, ["weights: ", "kv_cache_transfer_mode: 'PULL' at prefill"]),
        ):
            with prefill_server(folder, "PUSH", [address_of(decode)], *SHORT_WAITS, *flags) as prefill:
                wait_for(lambda prefill=prefill: list(prefill.stats()["pd"]["peers"].values()) != ["absent"])
                with pytest.raises(APIStatusError) as caught:
                    prefill.ask(prompt_of(3, 20), 4)
                (peer,) = prefill.health()["peers"].values()
                assert caught.value.status_code == 503 and peer.startswith("refused: ")
                assert all(word in str(caught.value) and word in peer for word in what)
                wait_at_rest(prefill)


@pytest.mark.parametrize(
    ("settings", "name", "allowed"),
    [
        ({"enable_disagg_pd": True}, "instance_role", "PREFILL | DECODE"),
        ({"instance_role": "PREFILL"}, "instance_role", "DEFAULT"),
        ({"enable_disagg_pd": True, "instance_role": "PREFILL"}, "decode_instances", "at least one"),
        ({"enable_disagg_pd": True, "instance_role": "MIX"}, "instance_role", "DEFAULT | PREFILL | DECODE"),
        ({"kv_cache_transfer_mode": "push"}, "kv_cache_transfer_mode", "PUSH | PULL"),
        ({"decode_instances": "a:1"}, "decode_instances", "PREFILL"),
        (
            {"enable_disagg_pd": True, "instance_role": "PREFILL", "decode_instances": "a:1,b"},
            "decode_instances",
            "host:port",
        ),
        (
            {"enable_disagg_pd": True, "instance_role": "PREFILL", "decode_instances": "a:1, a:1"},
            "decode_instances",
            "once",
        ),
        (
            {"enable_disagg_pd": True, "instance_role": "DECODE", "transfer_listen_port": 65530},
            "transfer_listen_port",
            "below 65536",
        ),
        ({"peer_timeout_s": 0.6}, "peer_timeout_s", "heart_beat_interval"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_is_allowed(
    settings: dict[str, Any], name: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(model="tiny", **settings)
    assert allowed in str(caught.value)


def test_two_roles_on_one_host_need_ranges_of_their_own_for_the_store(model: Path, tmp_path: Path) -> None:
    base = free_port()
    with running_store(tmp_path) as store:
        flags = [*store_flags(store, direct=True), f"--store_local_hostname=127.0.0.1:{base}"]
        with decode_server(model, "PUSH", *flags) as decode:
            with pytest.raises(AssertionError, match="store_local_hostname"):
                prefill_server(model, "PUSH", [address_of(decode)], *flags)
            others = [*store_flags(store, direct=True), f"--store_local_hostname=127.0.0.1:{base + 1}"]
            with prefill_server(model, "PUSH", [address_of(decode)], *others) as prefill:
                wait_linked(prefill)
                assert len(prefill.ask(prompt_of(5, 40), 5).token_ids) == 5


def test_an_instance_with_fixed_ports_refuses_those_that_are_taken(model: Path) -> None:
    with decode_server(model, "PUSH", port=free_port()) as decode:
        port = int(address_of(decode).rpartition(":")[2])
        with pytest.raises(AssertionError, match="disagg_pd_port"):
            decode_server(model, "PUSH", port=port)
