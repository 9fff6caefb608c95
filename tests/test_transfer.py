"""The transfer of one worker, without a model: bytes, layer groups, stalls and failures, for both copiers."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.errors import InvariantError, TransferError
from xllm_hier.figures import TransferFailures
from xllm_hier.ints import ints
from xllm_hier.plans import BlockMapping, OffloadCopied, OffloadStored, TransferBlocks, TransferKvBlocks
from xllm_hier.store_key import draft_component
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, Part, allocate_device_cache, as_bytes
from xllm_hier.worker.tiers.kv_cache_transfer import HierarchyKVCacheTransfer
from xllm_hier.worker.tiers.layer_copy import Copier, NativeCopier, TorchCopier
from xllm_hier.worker.tiers.layered_wait import LoadWaiter, layer_groups
from xllm_hier.worker.tiers.proof import trailer_mismatch, write_trailer
from xllm_hier.worker.transfer_stats import TransferStats

LIMIT_S = 60.0
NUM_DEVICE, NUM_HOST = 12, 20


def native() -> NativeCopier:
    return NativeCopier("cpu", threads=2, device=0, stream=lambda: None)


@dataclass
class World:
    """A transfer over small caches; `answers` is what the engine would receive. With `draft_layers` a draft model's
    blocks, of another shape and dtype, go along with those of the same number."""

    copier: Copier
    layers: int = 7
    dtype: str = "bfloat16"
    draft_layers: int = 0
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        tensors = tuple(TensorSpec(role, self.dtype, (16, 3, 20)) for role in ("key", "value"))
        domains = [domain_of(CacheRole.TARGET, "main", self.layers, tensors)]
        if self.draft_layers:
            latent = (TensorSpec("latent", "float32", (16, 9)),)
            domains.append(domain_of(CacheRole.DRAFT, draft_component("mtp"), self.draft_layers, latent))
        self.caches = [domain.caches[BlockType.KV] for domain in domains]
        self.cache = self.caches[0]
        config = EngineConfig(model="tiny", host_blocks_factor=2.0, layers_wise_copy_batchs=3, worker_timeout_s=LIMIT_S)
        self.stats = TransferStats()
        self.transfer = HierarchyKVCacheTransfer(config, 0, self.stats, self.answers.append, copier=self.copier)
        for domain in domains:
            self.transfer.register(domain)
        self.transfer.build({BlockType.KV: NUM_HOST})
        for cache in self.caches:
            assert cache.host is not None
            cache.host.fill_(0xFF)  # NaN in every float type: what nobody wrote must not pass for KV
        self.fill(1)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            for layer in cache.device:
                layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))

    def bytes_of(self, blocks: Sequence[int], cache: BlockCache | None = None) -> torch.Tensor:
        return torch.stack([layer[list(blocks)] for layer in (cache or self.cache).device])

    def prove(self) -> None:
        """Give every host block the trailer of its place, as if a write-back had filled it."""
        for cache in self.caches:
            for block in range(NUM_HOST):
                write_trailer(cache, block, bytes([block]) * 16)

    def answer(self, kind: type) -> Any:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for message in self.answers:
                if isinstance(message, kind):
                    self.answers.remove(message)
                    return message
            time.sleep(0.001)
        raise AssertionError(f"no {kind.__name__}")

    def offload(self, device: Sequence[int], host: Sequence[int], transfer_id: int = 1) -> OffloadCopied:
        moved = [mapping(device, host)]
        self.transfer.offload(TransferKvBlocks(transfer_id, moved, moved if self.draft_layers else []))
        copied: OffloadCopied = self.answer(OffloadCopied)
        self.answer(OffloadStored)
        return copied

    def load(self, device: Sequence[int], host: Sequence[int], batch_id: int = 1) -> LoadWaiter:
        moved = [mapping(device, host)]
        plan = TransferBlocks(batch_id, moved, moved if self.draft_layers else [])
        assert self.transfer.load_from_host(plan) == len(device), "logical blocks, however many domains they have"
        return LoadWaiter(self.transfer.attach_loads(), LIMIT_S)


def domain_of(role: CacheRole, component: str, layers: int, tensors: tuple[TensorSpec, ...]) -> CacheDomain:
    layout = BlockLayout(BlockType.KV, 16, tuple(range(layers)), tensors)
    device = allocate_device_cache(layout, NUM_DEVICE, torch.device("cpu"))
    cache = BlockCache(layout, [as_bytes(layer) for layer in device])
    return CacheDomain(role, component, CacheLayout(role, (layout,)), {BlockType.KV: cache})


def mapping(device: Sequence[int], host: Sequence[int]) -> BlockMapping:
    """Blocks to move; a block's hash is made of its place on the host."""
    hashes = b"".join(bytes([block]) * 16 for block in host)
    return BlockMapping("KV", ints(device), ints(host), hashes)


@pytest.fixture(params=[TorchCopier, native], ids=["torch", "native"])
def make_copier(request: pytest.FixtureRequest) -> Callable[[], Copier]:
    return request.param


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(copier: Copier, **changes: Any) -> World:
        made.append(World(copier, **changes))
        return made[-1]

    yield make
    for world in made:
        assert world.transfer.close()


# ------------------------------------------------------------------------------------------------- groups


def test_layer_groups_are_those_of_the_flag() -> None:
    assert [len(group) for group in layer_groups(30, 4)] == [7, 7, 7, 7, 2]
    assert [len(group) for group in layer_groups(3, 2)] == [1, 1, 1]
    assert [len(group) for group in layer_groups(5, 0)] == [5]
    assert [len(group) for group in layer_groups(2, 4)] == [1, 1]


# -------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_block_written_back_and_restored_elsewhere_has_its_bytes_in_every_layer(
    worlds: Callable[..., World], make_copier: Callable[[], Copier], dtype: str
) -> None:
    world = worlds(make_copier(), dtype=dtype)
    dice = random.Random(3)
    for round_number in range(5):
        count = dice.randrange(1, 6)
        device, host = dice.sample(range(NUM_DEVICE), count), dice.sample(range(NUM_HOST), count)
        expected = world.bytes_of(device)
        assert world.offload(device, host).num_blocks == count
        world.fill(10 + round_number)
        target = dice.sample(range(NUM_DEVICE), count)
        untouched = [block for block in range(NUM_DEVICE) if block not in target]
        before = world.bytes_of(untouched)
        waiter = world.load(target, host, batch_id=round_number)
        assert waiter.finish() == []
        assert torch.equal(world.bytes_of(target), expected)
        assert torch.equal(world.bytes_of(untouched), before)


def test_a_written_back_block_proves_itself(worlds: Callable[..., World], make_copier: Callable[[], Copier]) -> None:
    world = worlds(make_copier())
    world.offload([4], [9])
    assert trailer_mismatch(world.cache, 9, bytes([9]) * 16) is None
    assert trailer_mismatch(world.cache, 9, bytes([5]) * 16) == "block_hash"
    world.cache.payload(9)[17] ^= 1
    assert trailer_mismatch(world.cache, 9, bytes([9]) * 16) == "checksum"


def test_a_host_block_that_holds_something_else_is_not_loaded(
    worlds: Callable[..., World], make_copier: Callable[[], Copier]
) -> None:
    """As after a store read that was given up and wrote late."""
    world = worlds(make_copier())
    world.offload([4, 5], [8, 9])
    world.cache.host[9] = world.cache.host[8]
    before = world.bytes_of([0, 1])
    assert world.load([0, 1], [8, 9], batch_id=6).finish() == [6]
    assert torch.equal(world.bytes_of([0, 1]), before)
    assert world.load([2], [7], batch_id=7).finish() == [7], "a block nobody has written proves nothing"


def test_overlapping_loads_and_write_backs_keep_their_bytes_apart(
    worlds: Callable[..., World], make_copier: Callable[[], Copier]
) -> None:
    world = worlds(make_copier())
    world.offload(range(6), range(6))
    expected = world.bytes_of(range(6))
    moved = world.bytes_of([6, 7])
    for batch, start in enumerate((0, 2, 4)):
        world.transfer.load_from_host(TransferBlocks(batch, [mapping([start, start + 1], [start, start + 1])]))
    world.transfer.offload(TransferKvBlocks(9, [mapping([6, 7], [10, 11])]))
    assert LoadWaiter(world.transfer.attach_loads(), LIMIT_S).finish() == []
    assert world.answer(OffloadCopied).num_blocks == 2
    assert torch.equal(world.bytes_of(range(6)), expected)
    assert world.load([0, 1], [10, 11], 10).finish() == [] and torch.equal(world.bytes_of([0, 1]), moved)


# ------------------------------------------------------------------------------- registration and waiting


def test_registration_does_not_wait_and_a_live_batch_id_is_refused(worlds: Callable[..., World]) -> None:
    slow = SlowCopier(groups_open=0)
    world = worlds(slow)
    world.prove()
    world.transfer.load_from_host(TransferBlocks(1, [mapping([0], [0])]))
    with pytest.raises(InvariantError, match="batch id 1"):
        world.transfer.load_from_host(TransferBlocks(1, [mapping([1], [1])]))
    slow.open(4)
    assert LoadWaiter(world.transfer.attach_loads(), LIMIT_S).finish() == []


class SlowCopier(TorchCopier):
    """Copies group g only once `open(g + 1)` was called: a stall at a chosen place."""

    def __init__(self, groups_open: int) -> None:
        super().__init__()
        self._open = groups_open
        self._changed = threading.Condition()
        self._copied = 0

    def open(self, groups: int) -> None:
        with self._changed:
            self._open = groups
            self._changed.notify_all()

    def load_layers(self, domain: CacheDomain, mapping: BlockMapping, layers: range) -> None:
        group = layers.start // max(1, len(domain.layout.blocks[0].layers) // 3)
        with self._changed:
            assert self._changed.wait_for(lambda: self._open > group, LIMIT_S)
        super().load_layers(domain, mapping, layers)


def reached(waiter: LoadWaiter, layers: int) -> tuple[list[int], threading.Thread]:
    """A forward that notes each layer it gets to."""
    done: list[int] = []

    def forward() -> None:
        for layer in range(layers):
            waiter(layer)
            done.append(layer)

    thread = threading.Thread(target=forward)
    thread.start()
    return done, thread


def test_a_stalled_load_blocks_the_forward_exactly_at_the_first_layer_that_needs_it(
    worlds: Callable[..., World],
) -> None:
    slow = SlowCopier(groups_open=1)
    world = worlds(slow)  # 7 layers, 3 asked for: groups of 2, 2, 2, 1
    world.prove()
    done, thread = reached(world.load([0, 1], [0, 1]), 7)
    for groups, layers in ((1, 2), (2, 4), (3, 6)):
        slow.open(groups)
        end = time.monotonic() + LIMIT_S
        while len(done) < layers and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(0.05)
        assert done == list(range(layers))
    slow.open(4)
    thread.join(LIMIT_S)
    assert done == list(range(7))


def test_a_throttled_native_load_brings_its_groups_one_by_one(worlds: Callable[..., World]) -> None:
    copier = native()
    world = worlds(copier)
    world.offload(range(8), range(8))
    payload = 8 * world.cache.layout.payload_bytes
    copier._copier.bytes_per_second = payload / 2.1  # the whole load takes 2.1 s
    start = time.perf_counter()
    waiter = world.load(range(8), range(8))
    times = []
    for layer in range(7):
        waiter(layer)
        times.append(time.perf_counter() - start)
    assert times[0] < times[2] < times[4] < times[6]
    assert times[1] - times[0] < 0.3 and times[6] - times[1] > 0.6, times


def test_a_wait_has_a_limit(worlds: Callable[..., World]) -> None:
    slow = SlowCopier(groups_open=0)
    world = worlds(slow)
    world.prove()
    world.transfer.load_from_host(TransferBlocks(1, [mapping([0], [0])]))
    (load,) = world.transfer.attach_loads()
    with pytest.raises(TransferError, match=r"did not bring layer group 0 within 0\.05 s"):
        load.wait(0, 0.05)
    slow.open(4)
    load.wait_all(LIMIT_S)


# ------------------------------------------------------------------------------------------------ failures


class FailingCopier(TorchCopier):
    """Fails loads at layer 4 and write-backs at once."""

    def load_layers(self, domain: CacheDomain, mapping: BlockMapping, layers: range) -> None:
        if 4 in layers:
            raise OSError("the link is down")
        super().load_layers(domain, mapping, layers)

    def offload(self, parts: Sequence[Part]) -> Callable[[float], None]:
        def fail(_timeout_s: float) -> None:
            raise TransferError("the link is down")

        return fail


class FailingNativeCopier(NativeCopier):
    """The native copier with an error injected at piece 3 of every transfer."""

    def __init__(self) -> None:
        super().__init__("cpu", threads=1, device=0, stream=lambda: None)

    def _submit(self, direction: str, parts: Sequence[Part], groups: Sequence[range], stream: int | None) -> Any:
        tables = [
            (self._tables[domain, mapping.block_type], mapping.device.astype("int64"), mapping.host.astype("int64"))
            for domain, mapping in parts
        ]
        spans = [(group.start, group.stop) for group in groups]
        return self._copier.submit(direction, tables, spans, owners=self, fail_at_piece=3)


@pytest.mark.parametrize("make", [FailingCopier, FailingNativeCopier])
def test_a_failed_group_fails_its_batch_and_lets_the_forward_go_on(
    worlds: Callable[..., World], make: Callable[[], Copier]
) -> None:
    world = worlds(make())
    world.prove()
    waiter = world.load([0, 1], [0, 1], batch_id=5)
    for layer in range(7):
        waiter(layer)
    assert waiter.finish() == [5]
    deadline = time.monotonic() + LIMIT_S
    while not world.stats.snapshot().transfer_failures and time.monotonic() < deadline:
        time.sleep(0.005)
    assert TransferFailures("h2d", "copy", 1) in world.stats.snapshot().transfer_failures


@pytest.mark.parametrize("make", [FailingCopier, FailingNativeCopier])
def test_a_failed_write_back_answers_with_a_short_count(
    worlds: Callable[..., World], make: Callable[[], Copier]
) -> None:
    world = worlds(make())
    assert world.offload([0, 1], [0, 1]).num_blocks == 0
    assert TransferFailures("d2h", "copy", 1) in world.stats.snapshot().transfer_failures


def test_a_copy_outside_the_caches_is_refused_and_counted(worlds: Callable[..., World]) -> None:
    world = worlds(native())
    assert world.offload([NUM_DEVICE], [0]).num_blocks == 0
    assert world.offload([0], [NUM_HOST]).num_blocks == 0
    assert world.load([NUM_DEVICE], [0], batch_id=3).finish() == [3]


@pytest.mark.parametrize(("layers", "draft_layers"), [(7, 1), (7, 7), (2, 5), (1, 9)])
def test_a_drafts_blocks_travel_with_the_targets_whichever_has_more_layers(
    worlds: Callable[..., World], make_copier: Callable[[], Copier], layers: int, draft_layers: int
) -> None:
    """Once the target's last layer is there, so is all of the draft: it runs behind it and waits for nothing."""
    world = worlds(make_copier(), layers=layers, draft_layers=draft_layers)
    device, host, target = [3, 0, 7], [5, 11, 2], [1, 8, 4]
    expected = [world.bytes_of(device, cache) for cache in world.caches]
    assert world.offload(device, host).num_blocks == 3
    world.fill(2)
    waiter = world.load(target, host)
    waiter(layers - 1)
    for cache, before in zip(world.caches, expected, strict=True):
        assert torch.equal(world.bytes_of(target, cache), before)
    assert waiter.finish() == []


@pytest.mark.parametrize("wrong", ["payload", "name"])
@pytest.mark.parametrize("half", [0, 1], ids=["the target's", "the draft's"])
def test_one_half_of_a_host_block_that_is_not_what_was_written_fails_the_load_of_both(
    worlds: Callable[..., World], make_copier: Callable[[], Copier], half: int, wrong: str
) -> None:
    world = worlds(make_copier(), draft_layers=2)
    world.offload([3, 0], [5, 11])
    cache = world.caches[half]
    if wrong == "payload":
        cache.payload(11)[77] ^= 1
    else:
        write_trailer(cache, 11, b"another block's!")
    before = [world.bytes_of([1, 8], each) for each in world.caches]
    waiter = world.load([1, 8], [5, 11])
    assert waiter.finish() == [1]
    if wrong == "name":  # seen before anything is copied, also where payloads are not verified
        assert all(torch.equal(world.bytes_of([1, 8], c), b) for c, b in zip(world.caches, before, strict=True))
    causes = {one.cause for one in world.stats.snapshot().transfer_failures if one.kind == "h2d" and one.count}
    assert causes == {"checksum" if wrong == "payload" else "block_hash"}


def test_draft_mappings_without_a_draft_domain_are_refused(worlds: Callable[..., World]) -> None:
    world = worlds(TorchCopier())
    with pytest.raises(TransferError, match="no draft domain"):
        world.transfer.load_from_host(TransferBlocks(1, [], [mapping([0], [0])]))


# --------------------------------------------------------------------------------------------------- leaks


def test_a_thousand_loads_and_write_backs_leave_no_thread_and_no_descriptor(worlds: Callable[..., World]) -> None:
    world = worlds(native())
    world.offload([0, 1], [0, 1])
    gc.collect()  # whatever others have left
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        assert world.load([2, 3], [0, 1], batch_id=number).finish() == []
        if number % 10 == 0:
            world.offload([0, 1], [0, 1], transfer_id=number)
    assert threading.active_count() <= threads + 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert world.transfer.attach_loads() == []
