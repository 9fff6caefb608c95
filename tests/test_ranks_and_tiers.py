"""Bytes of several ranks through host and store: each rank gets its own back, and what all hold alike exists once."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake.store import MooncakeDistributedStore
from serving import Server, running_store, store_flags, wait_for
from tiny_models import make, random_prompt

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import EmbeddedStore, free_ports
from xllm_hier.engine.blocks.prefetch import PrefetchResult
from xllm_hier.figures import TransferFailures
from xllm_hier.ints import ints
from xllm_hier.plans import (
    HIT,
    MISS,
    BlockMapping,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    ProbeAnswer,
    ProbeStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.store_key import MAIN
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
from xllm_hier.worker.tiers.kv_cache_transfer import HierarchyKVCacheTransfer
from xllm_hier.worker.tiers.layer_copy import NativeCopier
from xllm_hier.worker.transfer_stats import TransferStats

NUM_DEVICE, NUM_HOST, LAYERS = 6, 10, 3
BLOCKS = [4, 0, 2]  # on the device
HOST = [7, 1, 3]
OTHER_HOST = [0, 9, 5]


def layout_of(replicated: bool) -> BlockLayout:
    """Two tensors a layer, or one latent that every rank holds alike."""
    if replicated:
        tensors = (TensorSpec("latent", "bfloat16", (16, 36)),)
    else:
        tensors = tuple(TensorSpec(role, "bfloat16", (16, 2, 20)) for role in ("key", "value"))
    return BlockLayout(BlockType.KV, 16, tuple(range(LAYERS)), tensors, replicated)


class Rank:
    """One rank's caches and transfer; `answers` is what the engine would receive."""

    def __init__(self, config: EngineConfig, rank: int, layout: BlockLayout, meeting: Path) -> None:
        self.answers: list[Any] = []
        self.stats = TransferStats()
        caches = allocate_device_cache(layout, NUM_DEVICE, torch.device("cpu"))
        self.cache = BlockCache(layout, [as_bytes(cache) for cache in caches])
        domain = CacheDomain(
            CacheRole.TARGET, MAIN, CacheLayout(CacheRole.TARGET, (layout,)), {BlockType.KV: self.cache}
        )
        copier = NativeCopier("cpu", threads=1, device=0, stream=lambda: None)
        self.transfer = HierarchyKVCacheTransfer(
            config, rank, self.stats, self.answers.append, copier=copier, meeting=meeting
        )
        self.transfer.register(domain)

    def fill(self, tag: int) -> None:
        """Bytes that name rank, layer and block; no two of them are alike."""
        for number, layer in enumerate(self.cache.device):
            for block in range(NUM_DEVICE):
                generator = torch.Generator().manual_seed(tag * 1000 + number * 100 + block)
                layer[block] = torch.randint(0, 256, layer[block].shape, dtype=torch.uint8, generator=generator)

    def content(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.stack([layer[list(blocks)] for layer in self.cache.device])

    def answer(self, kind: type) -> Any:
        return wait_for(lambda: next((message for message in self.answers if isinstance(message, kind)), None))


class Instance:
    """`tp_size` ranks with a store; plans go to all of them, as the engine sends them."""

    def __init__(self, folder: Path, store: EmbeddedStore, tp_size: int, *, replicated: bool, direct: bool = False):
        meeting = folder / f"{len(os.listdir(folder))}"
        meeting.mkdir()
        config = EngineConfig(
            model="tiny",
            tp_size=tp_size,
            enable_kvcache_store=True,
            host_blocks_factor=2.0,
            store_master_server_address=store.master_address,
            store_client_address="" if direct else store.client_address,
            store_local_hostname=f"127.0.0.1:{free_ports(1)[0]}",
        )
        layout = layout_of(replicated)
        self.ranks = [Rank(config, rank, layout, meeting) for rank in range(tp_size)]
        self.count = 0
        builds = [threading.Thread(target=rank.transfer.build, args=({BlockType.KV: NUM_HOST},)) for rank in self.ranks]
        for build in builds:
            build.start()
        for build in builds:
            build.join(120)
        assert [rank.transfer.store_state for rank in self.ranks] == ["attached"] * tp_size

    def _clear(self) -> None:
        self.count += 1
        for rank in self.ranks:
            rank.answers.clear()

    def offload(self) -> tuple[list[int], list[int]]:
        """Blocks copied and blocks stored, by rank."""
        self._clear()
        for rank in self.ranks:
            rank.transfer.offload(TransferKvBlocks(self.count, [mapping(BLOCKS, HOST)]))
        copied = [rank.answer(OffloadCopied).num_blocks for rank in self.ranks]
        return copied, [rank.answer(OffloadStored).num_stored for rank in self.ranks]

    def prefetch(self, host: Sequence[int] = OTHER_HOST) -> PrefetchResult:
        self._clear()
        result = PrefetchResult(len(self.ranks), len(host), len(host), 0)
        result.next_batch(len(host))
        for rank in reversed(self.ranks):
            rank.transfer.prefetch(PrefetchFromStorage(self.count, 0, "KV", ints(host), mapping(host, host).hashes))
        for rank in self.ranks:
            answer = rank.answer(PrefetchAnswer)
            assert result.record(answer.rank, answer.offset, answer.hits)
        return result

    def load(self, device: Sequence[int], host: Sequence[int]) -> None:
        self._clear()
        for rank in self.ranks:
            rank.transfer.load_from_host(TransferBlocks(self.count, [mapping(device, host)]))
        for rank in self.ranks:
            for load in rank.transfer.attach_loads():
                load.wait_all(60)
                assert load.error is None

    def wipe(self) -> None:
        for rank in self.ranks:
            for layer in rank.cache.device:
                layer.fill_(255)

    def wipe_host(self) -> None:
        for rank in self.ranks:
            assert rank.cache.host is not None
            rank.cache.host.fill_(255)

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.transfer.close()


def mapping(device: Sequence[int], host: Sequence[int]) -> BlockMapping:
    """Block i of any list is always the same logical block."""
    return BlockMapping("KV", ints(device), ints(host), b"".join(bytes([50 + i]) * 16 for i in range(len(host))))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with running_store(tmp_path_factory.mktemp("store"), 64 << 20) as made:
        yield made


@pytest.fixture
def store(running: EmbeddedStore) -> EmbeddedStore:
    """The module's store, with nothing in it."""
    client = MooncakeDistributedStore()
    assert client.setup_dummy(16 << 20, 16 << 20, running.client_address) == 0
    try:
        assert client.remove_by_regex("xllm-.*", True) >= 0
    finally:
        client.close()
    assert not keys(running)
    return running


@pytest.fixture
def meetings(tmp_path: Path) -> Path:
    folder = tmp_path / "meetings"
    folder.mkdir()
    return folder


def keys(store: EmbeddedStore) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{store._metrics}/get_all_keys", timeout=60) as answer:
        found = answer.read().decode().split()
    return sorted(key for key in found if key.startswith("xllm-kv-v3"))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_payloads_that_differ_by_rank_come_back_to_the_right_rank_from_host_and_store(
    store: EmbeddedStore, meetings: Path, tp_size: int, direct: bool
) -> None:
    instance = Instance(meetings, store, tp_size, replicated=False, direct=direct)
    for number, rank in enumerate(instance.ranks):
        rank.fill(number)
    expected = [rank.content(BLOCKS) for rank in instance.ranks]
    assert not torch.equal(expected[0], expected[1])
    assert instance.offload() == ([3] * tp_size, [3] * tp_size)
    instance.wipe()
    instance.load([1, 3, 5], HOST)
    assert all(torch.equal(rank.content([1, 3, 5]), want) for rank, want in zip(instance.ranks, expected, strict=True))
    instance.wipe()
    instance.wipe_host()
    assert instance.prefetch().merged_hits() == [True] * 3
    instance.load(BLOCKS, OTHER_HOST)
    assert all(torch.equal(rank.content(BLOCKS), want) for rank, want in zip(instance.ranks, expected, strict=True))
    found = keys(store)
    assert len(found) == 3 * tp_size and {key.split(":")[3] for key in found} == {str(tp_size)}
    assert {key.split(":")[5] for key in found} == {str(rank) for rank in range(tp_size)}
    instance.close()


def test_a_store_that_lost_one_ranks_object_is_a_miss_for_all_and_one_rank_that_never_hits_too(
    store: EmbeddedStore, meetings: Path
) -> None:
    instance = Instance(meetings, store, 2, replicated=False)
    for number, rank in enumerate(instance.ranks):
        rank.fill(number)
    instance.offload()
    client = instance.ranks[0].transfer.store
    assert client is not None
    lost = [key for key in keys(store) if ":KV:1:" in key]
    client.client.remove(lost[1])
    assert instance.prefetch().merged_hits() == [True, False, True]
    assert [list(rank.answer(PrefetchAnswer).hits) for rank in instance.ranks] == [[1, 1, 1], [1, 0, 1]]
    for key in (lost[0], lost[2]):
        client.client.remove(key)
    result = instance.prefetch()
    assert result.merged_hits() == [False] * 3 and result.completed()
    instance.close()


def test_what_all_ranks_hold_alike_has_one_host_copy_and_one_object(store: EmbeddedStore, meetings: Path) -> None:
    """MLA: rank 0 copies down and writes, both load; K13: the other rank counts all and touches no store."""
    instance = Instance(meetings, store, 2, replicated=True)
    first, second = instance.ranks
    first.fill(0)
    second.fill(0)
    expected = first.content(BLOCKS)
    assert instance.offload() == ([3, 3], [3, 3])
    assert second.transfer.store is None and second.transfer.host_bytes == 0
    assert second.stats.snapshot().transfer_bytes == {"g2h": 0, "h2d": 0, "d2h": 0, "h2g": 0}
    assert first.cache.host is not None and second.cache.host is not None
    assert torch.equal(first.cache.host[HOST], second.cache.host[HOST])
    assert first.cache.host.data_ptr() != second.cache.host.data_ptr()
    first.cache.host[4, 0] = 77
    assert int(second.cache.host[4, 0]) == 77, "the same pages"
    instance.wipe()
    instance.load([1, 3, 5], HOST)
    assert all(torch.equal(rank.content([1, 3, 5]), expected) for rank in instance.ranks)
    found = keys(store)
    assert len(found) == 3 and all(":mla:KV:" in key for key in found)
    asked = ProbeStorage(9, ["KV"], [mapping(BLOCKS, HOST).hashes + bytes(16)])
    for rank, lacking in ((first, MISS), (second, HIT)):  # who has nothing of its own leaves the word to the other
        rank.transfer.probe(asked)
        assert rank.answer(ProbeAnswer).hits == [bytes([HIT] * 3 + [lacking])]
    instance.close()


@pytest.mark.parametrize("direct", [False, True])
def test_one_rank_reads_what_two_wrote_and_the_other_way_round(
    store: EmbeddedStore, meetings: Path, direct: bool
) -> None:
    two = Instance(meetings, store, 2, replicated=True, direct=direct)
    for rank in two.ranks:
        rank.fill(0)
    expected = two.ranks[0].content(BLOCKS)
    two.offload()
    host_bytes = sum(rank.transfer.host_bytes for rank in two.ranks)
    two.close()
    one = Instance(meetings, store, 1, replicated=True, direct=direct)
    assert one.prefetch().merged_hits() == [True] * 3
    one.load(BLOCKS, OTHER_HOST)
    assert torch.equal(one.ranks[0].content(BLOCKS), expected)
    assert one.ranks[0].transfer.host_bytes == host_bytes
    assert one.offload() == ([3], [3]) and len(keys(store)) == 3, "there already"
    one.close()
    again = Instance(meetings, store, 2, replicated=True, direct=direct)
    assert again.prefetch().merged_hits() == [True] * 3
    again.load(BLOCKS, OTHER_HOST)
    assert all(torch.equal(rank.content(BLOCKS), expected) for rank in again.ranks)
    again.close()


def test_a_pool_that_cannot_be_shared_is_replaced_by_memory_that_can(
    store: EmbeddedStore, meetings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store client that has closed its descriptor: the host blocks are our own, and go to the store by staging."""

    def closed(address: int) -> tuple[int, int]:
        raise LookupError("no descriptor")

    monkeypatch.setattr("xllm_hier.host_memory._descriptor_of", closed)
    instance = Instance(meetings, store, 2, replicated=True)
    for rank in instance.ranks:
        rank.fill(0)
    expected = instance.ranks[0].content(BLOCKS)
    assert instance.offload() == ([3, 3], [3, 3])
    instance.wipe()
    instance.wipe_host()
    assert instance.prefetch().merged_hits() == [True] * 3
    instance.load(BLOCKS, OTHER_HOST)
    assert all(torch.equal(rank.content(BLOCKS), expected) for rank in instance.ranks)
    instance.close()


def test_two_ranks_of_a_model_with_latents_take_the_host_memory_and_the_store_of_one(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    """On real processes; one rank finds what two have written, and the other way round."""
    folder = make(tmp_path / "tiny", "deepseek_v2")
    prompt = random_prompt(200)
    flags = ["--block_size=16", "--max_cache_size=4MB", *store_flags(store)]
    seen, tokens = {}, set()
    for tp_size, cached in ((2, 0), (1, 192), (2, 192)):
        with Server(folder, *flags, f"--tp_size={tp_size}") as server:
            answer = server.ask(prompt)
            tokens.add(tuple(answer.token_ids))
            assert answer.cached == (0, 0, cached)
            server.wait_quiet()
            if tp_size in seen:
                continue
            server.clear("device", "host", "store")
            before = server.stats()["transfer_bytes"]
            assert server.ask(prompt, 1).cached == (0, 0, 0)
            stats = server.wait_quiet()
            moved = {kind: stats["transfer_bytes"][kind] - before[kind] for kind in ("d2h", "h2g")}
            seen[tp_size] = (stats["tier_bytes"]["host"], moved, len(keys(store)))
    assert seen[1] == seen[2] and seen[1][2] == 12 and all(seen[1][1].values())
    assert len(tokens) == 1


def test_an_object_of_another_rank_under_this_ranks_key_is_not_this_ranks_block(
    store: EmbeddedStore, meetings: Path
) -> None:
    """Two objects of one logical block change places: hash, layout and checksum are right, the origin is not."""
    instance = Instance(meetings, store, 2, replicated=False)
    for number, rank in enumerate(instance.ranks):
        rank.fill(number)
    instance.offload()
    first, second = instance.ranks
    client = first.transfer.store
    assert client is not None and first.cache.host is not None and second.cache.host is not None
    mine = [key for key in keys(store) if ":KV:0:" in key]
    for key in mine:
        client.client.remove(key)
    first.cache.host[HOST] = second.cache.host[HOST]
    wanted = client.put(BlockType.KV, HOST, [bytes([50 + i]) * 16 for i in range(3)])
    assert wanted == 3
    assert instance.prefetch().merged_hits() == [False] * 3
    assert TransferFailures("g2h", "origin", 3) in first.stats.snapshot().transfer_failures
    instance.close()
