"""An embedded store with a folder: what was computed survives a restart of everything, and the disk is not believed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, wait_for
from tiny_models import VOCAB, make

from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import Disk, EmbeddedStore
from xllm_hier.environment import check_environment
from xllm_hier.errors import ConfigError

COMMON = ["--block_size=16", "--max_cache_size=4MB", "--check_invariants", "--enable_kvcache_store=true"]
COMMON += ["--host_blocks_factor=3", "--store_segment_size=64MB"]
LENGTH = 150  # nine blocks, and some
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


def prompts() -> list[list[int]]:
    dice = random.Random(11)
    return [[dice.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(3)]


def serve(model: Path, folder: Path) -> Server:
    """An instance whose store is attached: with a disk it may come up after the instance."""
    server = Server(model, *COMMON, f"--embedded_store_dir={folder}")
    wait_for(lambda: server.health()["store"] == "attached")
    return server


def on_disk(server: Server) -> tuple[int, int]:
    """Objects that the instance's store has, and those of them on its disk."""
    command = server.child("mooncake_master").cmdline()
    port = next(word.partition("=")[2] for word in command if word.startswith("--metrics_port="))
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    found = [re.search(rf"^{name} (\d+)", text, re.MULTILINE) for name in ("master_key_count", "file_cache_nums_")]
    assert found[0] and found[1]
    return int(found[0][1]), int(found[1][1])


def buckets(folder: Path) -> list[Path]:
    """Files of a store's folder, one for each object."""
    return sorted(folder.rglob("*.bucket"))


def fill(server: Server) -> list[Any]:
    """Bits of the answers to all prompts, whose blocks then are in the store's memory."""
    bits = [server.ask(prompt).bits for prompt in prompts()]
    server.wait_quiet()
    return bits


def test_what_was_written_just_before_an_orderly_stop_comes_from_the_store_after_a_restart(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "when absent"
    with serve(model, folder) as server:
        expected = fill(server)
        assert server.stop() == 0
    num_objects = len(buckets(folder))
    assert num_objects >= 3 * (LENGTH // 16)
    with serve(model, folder) as server:
        wait_for(lambda: on_disk(server)[1] >= num_objects)
        answers = [server.ask(prompt) for prompt in prompts()]
        assert [answer.bits for answer in answers] == expected
        assert [answer.cached for answer in answers] == [(0, 0, LENGTH // 16 * 16)] * 3
        second = [f"--model={model}", *COMMON, "--port=0", f"--embedded_store_dir={folder}"]
        with pytest.raises(ConfigError, match=r"embedded_store_dir.*no other running instance"):
            check_environment(EngineConfig.from_sources(second, {}))


def test_after_sigkill_of_everything_what_had_reached_the_disk_is_there(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as server:
        expected = fill(server)
        wait_for(lambda: len(set(on_disk(server))) == 1)  # a heartbeat of one second
        server.kill()
    num_objects = len(buckets(tmp_path))
    with serve(model, tmp_path) as server:
        wait_for(lambda: on_disk(server)[1] >= num_objects)
        answers = [server.ask(prompt) for prompt in prompts()]
        assert [answer.bits for answer in answers] == expected
        assert [answer.tiers["store"] for answer in answers] == [LENGTH // 16 * 16] * 3


def test_damaged_files_are_misses_and_never_a_wrong_token(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as server:
        expected = fill(server)
    files = buckets(tmp_path)
    blocks = [file for file in files if file.stat().st_size > 1000]
    mark = next(file for file in files if b"xllm-identity" in file.read_bytes()[:200])
    dice = random.Random(3)
    for file in blocks:
        raw = bytearray(file.read_bytes())
        for _ in range(8):
            raw[dice.randrange(200, len(raw))] ^= 1 << dice.randrange(8)  # behind the key
        file.write_bytes(raw)
    for file in (mark, blocks[-1]):
        os.truncate(file, file.stat().st_size // 2)
    with serve(model, tmp_path) as server:
        assert server.health()["store"] == "attached", "a mark that cannot be read keeps nobody out for good"
        wait_for(lambda: on_disk(server)[1] >= len(files) - 2)
        answers = [server.ask(prompt) for prompt in prompts()]
        assert [answer.bits for answer in answers] == expected
        assert [answer.tiers["store"] for answer in answers] == [0, 0, 0]
        told = (server.health(), server.stats(), server.log()[-2000:])
        causes = {cause for kind, cause, count in server.stats()["transfer_failures"] if kind == "g2h" and count}
        assert causes & {"checksum", "block_hash", "magic"}, told
        server.wait_quiet()
        assert server.health()["store"] in ("attached", "degraded")


# -------------------------------------------------------------------------------------- the store alone


@contextlib.contextmanager
def running(run_dir: Path, disk: Disk) -> Iterator[EmbeddedStore]:
    run_dir.mkdir(exist_ok=True)
    store = EmbeddedStore(run_dir, 64 * MIB, disk=disk)
    store.start()
    try:
        yield store
    finally:
        store.stop()


class Writer:
    """A client of the store that knows what object `number` must hold."""

    def __init__(self, store: EmbeddedStore) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        assert self._client.setup_dummy(2 * MIB, 16 * MIB, store.client_address) == 0
        self._address = self._client.alloc_from_mem_pool(MIB)
        assert self._client.register_buffer(self._address, MIB) == 0

    def put(self, number: int) -> int:
        ctypes.memset(self._address, number, MIB)
        return int(self._client.batch_put_from([f"k{number}"], [self._address], [MIB])[0])

    def good(self, number: int) -> bool:
        ctypes.memset(self._address, 255, MIB)
        if self._client.batch_get_into([f"k{number}"], [self._address], [MIB]) != [MIB]:
            return False
        return ctypes.string_at(self._address, MIB) == bytes([number]) * MIB

    def close(self) -> None:
        self._client.close()


def test_the_disk_holds_no_more_than_it_is_given_and_what_stays_is_readable(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path / "disk"), 16 * MIB)

    def used() -> int:
        total = 0
        for file in Path(disk.folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the store has made room meanwhile
                total += file.stat().st_size if file.is_file() else 0
        return total

    with running(tmp_path / "first", disk) as store:
        writer = Writer(store)
        for number in range(40):
            wait_for(lambda number=number: writer.put(number) == 0)
            assert used() <= 17 * MIB
        wait_for(lambda: writer.good(39))
        writer.close()
    assert 12 * MIB < used() <= 16 * MIB
    num_objects = len(buckets(Path(disk.folder)))
    with running(tmp_path / "second", disk) as store:
        writer = Writer(store)
        wait_for(lambda: store.objects()[1] >= max(12, num_objects))
        assert sum(writer.good(number) for number in range(40)) == store.objects()[1]
        writer.close()


def test_a_stop_waits_for_the_disk_to_have_what_the_memory_has(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path / "disk"))
    with running(tmp_path / "run", disk) as store:
        writer = Writer(store)
        for number in range(24):
            assert writer.put(number) == 0
            time.sleep(0.05)  # over more than one heartbeat, so that none sees all
        store.stop()
        writer.close()
    assert len(buckets(Path(disk.folder))) == 24


@pytest.mark.parametrize("victim", ["master", "client"])
def test_a_store_process_that_dies_alone_finds_the_objects_on_the_disk_again(tmp_path: Path, victim: str) -> None:
    with running(tmp_path / "run", Disk(str(tmp_path / "disk"))) as store:
        writer = Writer(store)
        assert [writer.put(number) for number in range(10)] == [0] * 10
        wait_for(lambda: store.objects() == (10, 10))
        os.kill(store.pids[victim], signal.SIGKILL)
        wait_for(lambda: store.restart_dead())
        wait_for(lambda: all(writer.good(number) for number in range(10)), 60, 0.5)
        wait_for(lambda: store.objects() == (10, 10))
        writer.close()


# --------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("where", ["a file", "below a file", "/proc/nothing/is/made/here"])
def test_a_folder_that_cannot_be_made_or_written_to_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, where: str
) -> None:
    (tmp_path / "a file").write_text("")
    folder = {"a file": tmp_path / "a file", "below a file": tmp_path / "a file" / "x"}.get(where, Path(where))
    flags = [f"--model={model}", *COMMON, "--port=0", f"--embedded_store_dir={folder}"]
    with pytest.raises(ConfigError, match=r"embedded_store_dir.*can be written to"):
        check_environment(EngineConfig.from_sources(flags, {}))


@pytest.mark.parametrize(
    ("flags", "at_fault"),
    [
        (["--embedded_store_dir=/tmp/x"], "embedded_store_dir"),
        ([*COMMON, "--embedded_store_dir=/tmp/x", "--store_master_server_address=h:1"], "embedded_store_dir"),
        ([*COMMON, "--embedded_store_disk_size=1GB"], "embedded_store_disk_size"),
        ([*COMMON, "--embedded_store_dir=/tmp/x", "--embedded_store_disk_size=1MB"], "embedded_store_disk_size"),
    ],
)
def test_settings_of_the_folder_that_would_be_ignored_are_refused(flags: list[str], at_fault: str) -> None:
    with pytest.raises(ConfigError, match=at_fault):
        EngineConfig.from_sources(flags, {})
