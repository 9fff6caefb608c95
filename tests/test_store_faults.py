"""The store may be absent, die and come back: no wrong token, no failed request, and the counters tell."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, running_store, store_flags, wait_for
from test_processes import prompt_of
from tiny_models import VOCAB, make

from xllm_hier.embedded_store import EmbeddedStore, free_ports

COMMON = ["--block_size=16", "--max_cache_size=4MB", "--check_invariants"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    with running_store(tmp_path) as running:
        yield running


def prompts() -> list[list[int]]:
    dice = random.Random(5)
    trunk = [dice.randrange(3, VOCAB) for _ in range(200)]
    return [trunk[: 20 * n] + [dice.randrange(3, VOCAB) for _ in range(9)] for n in range(1, 9)]


@contextlib.contextmanager
def asking(server: Server, asked: list[list[int]], expected: list[Any]) -> Iterator[list[object]]:
    """Two clients that ask on and on, at random; what they find wrong is in the list."""
    wrong: list[object] = []
    done = threading.Event()

    def ask_on_and_on(seed: int) -> None:
        dice = random.Random(seed)
        while not done.is_set():
            number = dice.randrange(len(asked))
            try:
                if server.ask(asked[number]).bits != expected[number]:
                    wrong.append(number)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask_on_and_on, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.parametrize("victim", ["client", "master"])
@pytest.mark.parametrize("direct", [False, True], ids=["through the node's client", "direct"])
def test_a_store_process_killed_under_load_costs_no_request_and_no_token(
    model: Path, store: EmbeddedStore, victim: str, direct: bool
) -> None:
    if direct and victim == "client":
        pytest.skip("a direct client has the same master and loses the segment only: covered by 'master'")
    with Server(model, *COMMON, *store_flags(store, direct=direct)) as server:
        expected = [server.ask(prompt).bits for prompt in prompts()]
        with asking(server, prompts(), expected) as wrong:
            for _ in range(3):
                server.clear("device", "host")
                time.sleep(0.3)
            os.kill(store.pids[victim], signal.SIGKILL)
            for _ in range(5):
                server.clear("device", "host")
                time.sleep(0.3)
            wait_for(lambda: server.health()["store"] == "open")
            assert server.health()["status"] == "degraded"
            wait_for(lambda: store.restart_dead() or server.health()["store"] == "attached", 90, 0.2)
            wait_for(lambda: server.health()["store"] == "attached", 90, 0.2)
            time.sleep(1)
        assert not wrong
        failures = {kind: count for kind, cause, count in server.stats()["transfer_failures"] if cause == "store_error"}
        assert sum(failures.values()) > 0
        server.wait_quiet()

        def stored_again() -> bool:
            server.clear("device", "host")
            answer = server.ask(prompts()[-1])
            server.wait_quiet()
            assert answer.bits == expected[len(expected) - 1]
            return answer.tiers["store"] > 0

        wait_for(stored_again, 90, 0.5)  # objects of the dead owner seem to exist for a while


def test_a_store_that_is_absent_at_start_is_degraded_and_attached_when_it_comes(model: Path, tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, 128 << 20)
    store._rpc, store._metrics, store._client, store._endpoint = free_ports(4)
    store.master_address, store.client_address = f"127.0.0.1:{store._rpc}", f"127.0.0.1:{store._client}"
    with Server(model, *COMMON, *store_flags(store)) as server:
        assert server.health()["store"] == "open" and server.health()["status"] == "degraded"
        expected = [server.ask(prompt).bits for prompt in prompts()]
        store._spawn("master")
        store._wait_until(store._master_serves, "master")
        store._spawn("client")
        try:
            wait_for(lambda: server.health()["store"] == "attached", 90)
            server.clear("device", "host")
            for _ in range(2):
                assert [server.ask(prompt).bits for prompt in prompts()] == expected
                server.wait_quiet()
                server.clear("device", "host")
            last = server.ask(prompts()[-1])
            assert last.bits == expected[-1] and last.tiers["store"] >= 160, "read through staging memory"
        finally:
            store.stop()


def test_a_hung_master_delays_nobody_who_does_not_need_it(model: Path, store: EmbeddedStore) -> None:
    with Server(model, *COMMON, *store_flags(store)) as server:
        expected = server.ask(prompts()[0]).bits
        os.kill(store.pids["master"], signal.SIGSTOP)
        try:
            start = time.monotonic()
            for _ in range(5):
                assert server.ask(prompts()[0]).bits == expected
            assert time.monotonic() - start < 5, "device hits waited for the store"
        finally:
            os.kill(store.pids["master"], signal.SIGCONT)


def test_a_request_waits_for_a_hung_store_no_longer_than_a_call_may_take_and_the_next_ones_not_at_all(
    model: Path, store: EmbeddedStore
) -> None:
    """The node's client stands still in the middle of reads; when it goes on it is found again, and read again."""
    prompt = prompts()[4]
    flags = [*COMMON, *store_flags(store), "--store_call_limit_ms=1000"]
    with Server(model, *flags) as server:
        expected = server.ask(prompt).bits
        server.wait_quiet()
        server.clear("device", "host")
        os.kill(store.pids["client"], signal.SIGSTOP)
        try:
            start = time.monotonic()
            hung = server.ask(prompt)
            assert hung.bits == expected and hung.cached == (0, 0, 0)
            assert time.monotonic() - start < 10, "not the 30 s of the store's own limit"
            assert server.health()["store"] == "open"
            start, before = time.monotonic(), tried_in_vain(server)
            for seed in range(3):  # new ones: what the device has nobody looks for in the store
                server.ask(prompt_of(seed, 100), 1)
            assert time.monotonic() - start < 5
            assert tried_in_vain(server) == before, "a later request has tried a store that hangs"
        finally:
            os.kill(store.pids["client"], signal.SIGCONT)
        wait_for(lambda: server.health()["store"] == "attached", 90)

        def read_again() -> bool:  # the master forgets what a client had that stood still for longer than it waits
            server.clear("device", "host")
            again = server.ask(prompt)
            server.wait_quiet()
            assert again.bits == expected
            return again.tiers["store"] > 0

        wait_for(read_again, 90, 0.5)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_store_is_attached_and_detached_and_exchanged_under_load(
    model: Path, tmp_path_factory: pytest.TempPathFactory, store: EmbeddedStore, tp_size: int
) -> None:
    with (
        running_store(tmp_path_factory.mktemp("other")) as other,
        Server(model, *COMMON, "--host_blocks_factor=3", f"--tp_size={tp_size}") as server,
    ):
        expected = [server.ask(prompt).bits for prompt in prompts()]
        with asking(server, prompts(), expected) as wrong:
            assert server.admin("GET", "store")["state"] == "detached"
            for where, direct in ((store, True), (other, False), (store, False)):
                address = {"store_master_server_address": where.master_address}
                address["store_client_address"] = "" if direct else where.client_address
                told = server.admin("PUT", "store", address)
                assert told["state"] in ("attached", "degraded"), told
                wait_for(lambda: server.admin("GET", "store")["state"] == "attached")
                server.clear("device", "host")
                time.sleep(1)
                wait_for(lambda: server.clear("device", "host") and served_by_the_store(server) > 0)
                assert server.admin("DELETE", "store")["state"] == "detached"
                read = wait_for(lambda: counted_at_rest(server))
                server.clear("device", "host")
                time.sleep(0.5)
                assert served_by_the_store(server) == read["store"] and server.health()["status"] == "ok"
            told = server.admin("PUT", "store")
            assert told["state"] in ("attached", "degraded") and told["store_client_address"] == store.client_address
        assert not wrong
        server.wait_quiet()


@pytest.mark.parametrize("direct", [False, True])
def test_a_store_that_accepts_connections_and_says_nothing_stops_no_forward(
    model: Path, tmp_path: Path, direct: bool
) -> None:
    """It stands still before this instance has ever spoken to it: setting a client up would take 30 s of its life."""
    with running_store(tmp_path) as store, Server(model, *COMMON, "--host_blocks_factor=2") as server:
        expected = server.ask(prompts()[0]).bits
        for pid in store.pids.values():
            os.kill(pid, signal.SIGSTOP)
        try:
            address = {"store_master_server_address": store.master_address}
            told = server.admin(
                "PUT", "store", address | ({} if direct else {"store_client_address": store.client_address})
            )
            assert told["state"] == "open" and "does not answer" in told["why"]
            for _ in range(20):
                start = time.monotonic()
                assert server.ask(prompts()[0]).bits == expected
                assert time.monotonic() - start < 4
                time.sleep(0.3)
        finally:
            for pid in store.pids.values():
                os.kill(pid, signal.SIGCONT)
        wait_for(lambda: server.health()["store"] == "attached", 90)


def test_instances_that_cannot_read_each_others_blocks_do_not_warn_of_each_others_numerics(
    model: Path, store: EmbeddedStore
) -> None:
    for tp_size in (1, 2, 1):
        with Server(model, *COMMON, *store_flags(store), f"--tp_size={tp_size}", "--model_id=one") as server:
            assert server.stats()["store"].get("mixed_numerics", 0) == 0


def counted_at_rest(server: Server) -> dict[str, int] | None:
    """Who paid for prompts, once no request has read what is not counted yet."""
    stats = server.stats()
    return None if stats["waiting"] or stats["prefetching"] else dict(stats["prefix_tokens"])


def tried_in_vain(server: Server) -> list[Any]:
    """Failures of transfers but for those that nobody tried, since the store is known to be away."""
    return [failure for failure in server.stats()["transfer_failures"] if failure[1] != "open"]


def served_by_the_store(server: Server) -> int:
    return int(server.stats()["prefix_tokens"]["store"])


def test_a_store_that_cannot_be_attached_is_an_error_that_says_why(model: Path) -> None:
    with Server(model, *COMMON) as server:
        body = {"store_master_server_address": "127.0.0.1:1"}
        assert "host_blocks_factor" in server.admin("PUT", "store", body, status=400)["error"]["message"]
    with Server(model, *COMMON, "--host_blocks_factor=2") as server:
        for wrong in ({}, {"store_master_server_address": "nowhere"}, {"store_address": "127.0.0.1:1"}):
            assert server.admin("PUT", "store", wrong, status=400)["error"]["message"]
        told = server.admin("PUT", "store", body)
        assert told["state"] == "open" and told["why"]
        assert server.health() | {"store": "open", "status": "degraded"} == server.health()
        assert server.ask(prompts()[0], 2).prompt_tokens == len(prompts()[0])


def test_objects_that_are_not_what_their_key_says_are_misses_and_counted(model: Path, store: EmbeddedStore) -> None:
    from mooncake.store import MooncakeDistributedStore

    prompt = prompts()[3]
    with Server(model, *COMMON, *store_flags(store)) as server:
        expected = server.ask(prompt).bits
        server.wait_quiet()
        writer = MooncakeDistributedStore()
        assert writer.setup_dummy(32 << 20, 16 << 20, store.client_address) == 0
        keys = store._http("/get_all_keys").split()
        assert len(keys) >= 5
        raw = bytearray(writer.get(keys[0]))
        raw[100] ^= 1
        assert writer.remove(keys[0], True) == 0 and writer.put(keys[0], bytes(raw)) == 0
        assert writer.remove(keys[1], True) == 0 and writer.put(keys[1], writer.get(keys[2])) == 0
        writer.close()
        server.clear("device", "host")
        assert server.ask(prompt).bits == expected
        causes = {cause for kind, cause, count in server.stats()["transfer_failures"] if kind == "g2h" and count}
        assert causes & {"checksum", "block_hash"}
