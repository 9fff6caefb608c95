"""Laws of the native copier, on the cpu and over stand-ins for the CUDA driver and the Ascend runtime."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from standins.world import BACKENDS, Domain, World

from xllm_hier._native import Copier, NativeError, TransferCancelled, TransferTimeout

BOTH_WAYS = pytest.mark.parametrize("direction", ["load", "offload"])


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each backend in turn."""
    found = World(request.param)
    yield found
    found.end()


@pytest.fixture
def cpu() -> Iterator[World]:
    found = World("cpu")
    yield found
    found.end()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ------------------------------------------------------------------------------------------------- bytes


@BOTH_WAYS
@pytest.mark.parametrize(
    ("piece", "shift", "gap"),
    [(1, 0, 0), (63, 1, 0), (2048, 3, 0), (2049, 0, 5), (4096, 0, 64), (5000, 17, 1), (65536, 0, 0), (100_003, 33, 13)],
)
def test_a_transfer_copies_the_named_blocks_and_nothing_else(
    world: World, rng: np.random.Generator, direction: str, piece: int, shift: int, gap: int
) -> None:
    domain = Domain(world, world.copier(), rng, layers=3, piece=piece, shift=shift, gap=gap)
    expected = domain.snapshot()
    for count in (1, 7, 20):
        device_ids, host_ids = domain.ids(rng, count)
        domain.apply(expected, direction, device_ids, host_ids)
        transfer = domain.submit(direction, device_ids, host_ids)
        transfer.wait_all(30)
        assert (transfer.num_pieces, transfer.nbytes) == (3 * count, 3 * count * piece)
        assert domain.equals(expected)


@BOTH_WAYS
def test_neighbours_on_both_sides_travel_as_one_and_arrive_alike(
    world: World, rng: np.random.Generator, direction: str
) -> None:
    domain = Domain(world, world.copier(), rng, layers=1, piece=960, gap=64)  # strides of 1024 and 1024
    packed = domain.copier.table(
        [domain.device[0].ctypes.data],
        device_stride=1024,
        device_blocks=20,
        host_base=domain.host.ctypes.data,
        host_stride=1024,
        host_blocks=30,
        piece_bytes=1024,
    )
    ids = np.array([3, 4, 5, 9, 10, 0])
    before = domain.snapshot()
    domain.copier.submit(direction, [(packed, ids, ids + 2)], [(0, 1)], owners=domain.owners).wait_all(30)
    if direction == "load":
        assert np.array_equal(domain.device[0][ids], before.host[ids + 2])
    else:
        assert np.array_equal(domain.host[ids + 2], before.device[0][ids])
    if world.device is not None and not world.name.endswith("loop"):
        assert world.device.calls()["largest"] == 3


def test_more_pieces_than_one_batch_takes_arrive_too(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng, layers=3, device_blocks=2000, host_blocks=2000, piece=16)
    device_ids, host_ids = domain.ids(rng, 2000)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids)
    domain.submit("load", device_ids, host_ids).wait_all(30)
    assert domain.equals(expected)


def test_a_group_that_was_waited_for_is_there_and_the_last_may_be_ragged(
    world: World, rng: np.random.Generator
) -> None:
    domain = Domain(world, world.copier(), rng, layers=5)
    device_ids, host_ids = domain.ids(rng, 12)
    groups = [(0, 2), (2, 4), (4, 5)]
    expected = domain.snapshot()
    transfer = domain.submit("load", device_ids, host_ids, groups)
    for number, (first, end) in enumerate(groups):
        transfer.wait_group(number, 30)
        assert transfer.done(number)
        domain.apply(expected, "load", device_ids, host_ids, range(first, end))
        for row in range(first, end):
            assert np.array_equal(domain.device[row], expected.device[row])
    transfer.wait_all(30)
    assert domain.equals(expected)


def test_layers_of_no_group_stay_and_a_group_without_layers_is_done(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng, layers=3, layer_numbers=[1, 4, 9])
    device_ids, host_ids = domain.ids(rng, 6)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids, range(1, 2))
    transfer = domain.submit("load", device_ids, host_ids, [(2, 4), (4, 6), (6, 8)])
    assert transfer.done(0) and transfer.done(2)
    for group in range(3):
        transfer.wait_group(group, 30)
    transfer.wait_all(30)
    assert domain.equals(expected)
    domain.submit("load", device_ids, host_ids, [(20, 30)]).wait_all(30)  # nothing at all


def test_target_and_draft_advance_the_same_groups(world: World, rng: np.random.Generator) -> None:
    copier = world.copier()
    target, draft = Domain(world, copier, rng, layers=4), Domain(world, copier, rng, layers=2, piece=333)
    target_ids, draft_ids = target.ids(rng, 9), draft.ids(rng, 9)
    expected = target.snapshot(), draft.snapshot()
    target.apply(expected[0], "load", *target_ids)
    draft.apply(expected[1], "load", *draft_ids)
    parts = [(target.table, *target_ids), (draft.table, *draft_ids)]
    transfer = copier.submit("load", parts, [(0, 2), (2, 4)], owners=(target.owners, draft.owners))
    transfer.wait_group(0, 30)
    assert all(np.array_equal(draft.device[row], expected[1].device[row]) for row in range(2))
    assert all(np.array_equal(target.device[row], expected[0].device[row]) for row in range(2))
    transfer.wait_all(30)
    assert target.equals(expected[0]) and draft.equals(expected[1])


def test_many_threads_and_two_copiers_at_once_lose_nothing(world: World, rng: np.random.Generator) -> None:
    copiers = [world.copier(), world.copier()]
    domains = [Domain(world, copier, rng, layers=3) for copier in copiers for _ in range(2)]
    failures: list[BaseException] = []

    def work(domain: Domain, seed: int) -> None:
        mine = np.random.default_rng(seed)
        try:
            expected = domain.snapshot()
            for number in range(40):
                direction = "load" if number % 2 else "offload"
                first, second = domain.ids(mine, 20), domain.ids(mine, 30)
                halves = [(first[0][:10], second[1][:10]), (first[0][10:], second[1][10:20])]
                transfers = [domain.submit(direction, *half, [(0, 2), (2, 3)]) for half in halves]
                for half, transfer in zip(halves, transfers, strict=True):
                    domain.apply(expected, direction, *half)
                    transfer.wait_group(0, 30)
                for transfer in transfers:
                    transfer.wait_all(30)
                assert domain.equals(expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(domain, seed)) for seed, domain in enumerate(domains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ----------------------------------------------------------------------------------------------- waiting


def test_a_stalled_copy_blocks_exactly_at_the_first_group_that_is_not_there(
    cpu: World, rng: np.random.Generator
) -> None:
    domain = Domain(cpu, cpu.copier(bytes_per_second=8_000), rng, layers=4, piece=1000)
    device_ids, host_ids = domain.ids(rng, 4)  # 4,000 bytes a layer: 0.5 s
    start = time.perf_counter()
    transfer = domain.submit("load", device_ids, host_ids, [(0, 1), (1, 2), (2, 3), (3, 4)])
    for group in range(4):
        assert not transfer.done(group)
        transfer.wait_group(group, 30)
        assert time.perf_counter() - start > 0.48 * (group + 1)
    assert time.perf_counter() - start < 5


def test_a_wait_ends_at_its_limit_and_the_transfer_goes_on(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    device_ids, host_ids = domain.ids(rng, 5)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids)
    world.stall(domain.copier)
    transfer = domain.submit("load", device_ids, host_ids)
    start = time.perf_counter()
    with pytest.raises(TransferTimeout, match=r"layer group 0 did not come within 0\.15 s") as caught:
        transfer.wait_group(0, 0.15)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, NativeError)
    assert 0.15 <= time.perf_counter() - start < 2
    with pytest.raises(TransferTimeout):
        transfer.wait_all(0)
    assert not transfer.done(0) and not transfer.ended and transfer.error is None
    world.stall(domain.copier, False)
    transfer.wait_all(30)
    assert domain.equals(expected)


def test_waiting_leaves_the_interpreter_to_others(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    world.stall(domain.copier)
    transfer = domain.submit("load", *domain.ids(rng, 5))

    def wait() -> None:
        with pytest.raises(TransferTimeout):
            transfer.wait_all(0.3)

    waiter = threading.Thread(target=wait)
    waiter.start()
    steps = 0
    while waiter.is_alive():
        steps += 1
    assert steps > 1000
    world.stall(domain.copier, False)


def test_ctrl_c_ends_a_wait_at_once(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    world.stall(domain.copier)
    transfer = domain.submit("load", *domain.ids(rng, 5))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background may ignore it
    try:
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            transfer.wait_all(60)
        assert time.perf_counter() - start < 5
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    world.stall(domain.copier, False)


def test_loads_go_before_offloads(cpu: World, rng: np.random.Generator) -> None:
    domain = Domain(cpu, cpu.copier(), rng, device_blocks=20, piece=50_000)
    cpu.stall(domain.copier)
    offloads = [domain.submit("offload", *domain.ids(rng, 20)) for _ in range(3)]
    load = domain.submit("load", *domain.ids(rng, 1))
    domain.copier.bytes_per_second = 1e7  # 0.5 s for each offload
    load.wait_all(30)
    assert not offloads[-1].ended
    for transfer in offloads:
        transfer.wait_all(30)


# ------------------------------------------------------------------------------------- errors and the end


def test_the_first_error_is_told_to_every_wait_and_the_copier_works_on(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng, layers=4)
    device_ids, host_ids = domain.ids(rng, 5)
    transfer = domain.submit("load", device_ids, host_ids, [(0, 2), (2, 4)], fail_at_piece=13)
    for _ in range(2):
        with pytest.raises(NativeError, match="injected error at piece 13"):
            transfer.wait_group(1, 30)
        with pytest.raises(NativeError, match="injected error"):
            transfer.wait_all(30)
    assert transfer.ended and "piece 13" in transfer.error and not transfer.done(1)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids)
    domain.submit("load", device_ids, host_ids).wait_all(30)
    assert domain.equals(expected)


def test_cancel_stops_what_has_not_started_and_ends_the_waits(cpu: World, rng: np.random.Generator) -> None:
    domain = Domain(cpu, cpu.copier(bytes_per_second=4_000), rng, layers=5)
    device_ids, host_ids = domain.ids(rng, 2)  # 0.5 s a layer
    transfer = domain.submit("load", device_ids, host_ids, [(row, row + 1) for row in range(5)])
    transfer.wait_group(0, 30)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.wait_group(1, 30)
    assert transfer.ended and transfer.error == "the transfer was cancelled" and not transfer.done(4)
    transfer.cancel()


def test_a_finished_transfer_cannot_be_cancelled_any_more(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    transfer = domain.submit("load", *domain.ids(rng, 5))
    transfer.wait_all(30)
    transfer.cancel()
    transfer.wait_all(0)
    assert transfer.error is None


def test_a_dropped_transfer_keeps_its_memory_until_the_last_copy_has_ended(
    world: World, rng: np.random.Generator
) -> None:
    class Owner:
        pass

    domain = Domain(world, world.copier(), rng)
    world.stall(domain.copier)
    owner = Owner()
    gone = weakref.ref(owner)
    parts = [(domain.table, *domain.ids(rng, 5))]
    transfer = domain.copier.submit("load", parts, [(0, 5)], owners=owner)
    del owner
    end = time.monotonic() + 30
    while world.device is not None and not any(world.device.calls().values()) and time.monotonic() < end:
        time.sleep(0.005)  # until its first copy is under way
    assert gone() is not None
    release = threading.Timer(0.2, world.stall, (domain.copier, False))
    start = time.perf_counter()
    release.start()
    del transfer
    assert gone() is None
    if world.device is not None:  # the group was under way and could not be recalled
        assert time.perf_counter() - start > 0.1
    release.join()
    for region in domain.regions:
        domain.copier.unregister_region(region)


def test_close_cancels_what_waits_and_refuses_more(world: World, rng: np.random.Generator) -> None:
    copier = world.copier()
    domain = Domain(world, copier, rng)
    done = domain.submit("load", *domain.ids(rng, 5))
    done.wait_all(30)
    copier.close()
    copier.close()
    done.wait_all(0)
    with pytest.raises(NativeError, match="closed"):
        domain.submit("load", *domain.ids(rng, 5))
    with pytest.raises(NativeError, match="closed"):
        copier.register_region(domain.host.ctypes.data, 64, kind="host", owner=domain)


def test_close_in_mid_transfer_ends_it(cpu: World, rng: np.random.Generator) -> None:
    domain = Domain(cpu, cpu.copier(), rng)
    cpu.stall(domain.copier)
    transfers = [domain.submit(direction, *domain.ids(rng, 5)) for direction in ("load", "offload")]
    domain.copier.close()
    for transfer in transfers:
        with pytest.raises(TransferCancelled):
            transfer.wait_all(0)


# ---------------------------------------------------------------------------------------------- refusals


def test_memory_that_is_not_registered_is_refused(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    good = {
        "device_stride": 1000,
        "device_blocks": 20,
        "host_base": domain.host.ctypes.data,
        "host_stride": domain.object_bytes,
        "host_blocks": 30,
        "piece_bytes": 1000,
    }
    device = domain.device[0].ctypes.data
    copier = domain.copier
    copier.table([device], **good)
    for bases, change, message in [
        ([device], {"device_blocks": 21}, "do not lie within a registered device region"),
        ([device + 1], {}, "do not lie within a registered device region"),
        ([domain.host.ctypes.data], {}, "do not lie within a registered device region"),
        ([device], {"host_blocks": 31}, "do not lie within a registered host region"),
        ([device], {"host_base": device}, "do not lie within a registered host region"),
        ([device], {"piece_bytes": 1001}, "device blocks of stride 1000 overlap"),
        ([device], {"host_stride": 999}, "ends outside its host block"),
        ([device], {"host_offsets": [domain.object_bytes - 999]}, "ends outside its host block"),
        ([device], {"host_offsets": [0, 0]}, "2 host offsets"),
        ([device], {"piece_bytes": 0}, "0 bytes"),
        ([device], {"device_blocks": 0}, "at least one device block"),
        ([device], {"device_blocks": 2**62}, "exceed the address space"),
        ([device], {"layers": [-1]}, "layer numbers"),
        ([device, device], {"layers": [1, 1]}, "layer numbers"),
        ([], {}, "at least one layer"),
    ]:
        with pytest.raises(ValueError, match=message):
            copier.table(bases, **{**good, **change})
    region = domain.regions[0]
    copier.unregister_region(region)
    copier.unregister_region(region)
    with pytest.raises(ValueError, match="not registered with this copier"):
        domain.submit("load", *domain.ids(rng, 3))
    other = Domain(world, world.copier(), rng)
    with pytest.raises(ValueError, match="not registered with this copier"):
        copier.submit("load", [(other.table, *other.ids(rng, 3))], [(0, 1)], owners=other)


def test_regions_do_not_overlap_and_stay_while_they_are_used(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    copier, host = domain.copier, domain.regions[-1]
    assert (host.address, host.pinned) == (domain.owners[-1].ctypes.data, world.device is not None)
    for address, nbytes in [(host.address, 1), (host.address + host.nbytes - 1, 4096), (host.address - 64, 65)]:
        with pytest.raises(ValueError, match="overlaps a registered host region"):
            copier.register_region(address, nbytes, kind="device", owner=domain)
    for address, nbytes in [(0, 10), (10, 0), (10, 2**64 - 5), (2**64 - 10, 100)]:
        with pytest.raises(ValueError, match="region"):
            copier.register_region(address, nbytes, kind="host", owner=domain)
    with pytest.raises(ValueError, match="kind must be"):
        copier.register_region(10, 10, kind="disk", owner=domain)
    with pytest.raises(TypeError, match="owner is required"):
        copier.register_region(10, 10, kind="host", owner=None)
    world.stall(copier)
    transfer = domain.submit("load", *domain.ids(rng, 3))
    with pytest.raises(NativeError, match="in use by a transfer"):
        copier.unregister_region(host)
    world.stall(copier, False)
    transfer.wait_all(30)
    copier.unregister_region(host)


def test_wrong_blocks_groups_and_owners_are_refused_before_anything_moves(
    world: World, rng: np.random.Generator
) -> None:
    domain = Domain(world, world.copier(), rng)
    before = domain.snapshot()
    good = np.arange(3)
    for device_ids, host_ids, message in [
        (np.array([0, 1, 20]), good, "device block 20 is out of range"),
        (good, np.array([0, -1, 2]), "host block -1 is out of range"),
        (good, np.array([0, 2**62, 2]), "out of range"),
        (good, np.arange(4), "got 3 and 4"),
        (good[:0], good[:0], "at least one"),
        (np.array([1, 2, 1]), good, "block 1 is the target of two copies"),
    ]:
        with pytest.raises(ValueError, match=message):
            domain.submit("load", device_ids, host_ids)
    for ids in (good.astype(np.int32), good.astype(np.uint64), good.astype(np.float64), good.reshape(1, 3)):
        with pytest.raises(TypeError, match="buffer of int64"):
            domain.submit("load", ids, good)
    for groups in [[(0, 0)], [(2, 1)], [(0, 2), (1, 3)], [(-1, 2)]]:
        with pytest.raises(ValueError, match="empty or out of order"):
            domain.submit("load", good, good, groups)
    submit, part = domain.copier.submit, (domain.table, good, good)
    with pytest.raises(ValueError, match="at least one part"):
        submit("load", [], [(0, 1)], owners=domain)
    with pytest.raises(ValueError, match="at least one part and one layer group"):
        submit("load", [part], [], owners=domain)
    with pytest.raises(ValueError, match="target of two copies"):
        submit("load", [part, part], [(0, 1)], owners=domain)
    with pytest.raises(ValueError, match="direction must be"):
        submit("store", [part], [(0, 1)], owners=domain)
    with pytest.raises(TypeError, match="owner is required"):
        submit("load", [part], [(0, 1)], owners=None)
    transfer = domain.submit("load", good, good)
    for group in (-1, 1):
        with pytest.raises(IndexError, match="has 1 groups"):
            transfer.wait_group(group, 1)
    with pytest.raises(ValueError, match="not a number"):
        transfer.wait_all(float("nan"))
    transfer.wait_all(30)
    domain.apply(before, "load", good, good)
    assert domain.equals(before)


def test_ids_may_come_from_any_int64_buffer(cpu: World, rng: np.random.Generator) -> None:
    domain = Domain(cpu, cpu.copier(), rng)
    ids = np.arange(8, dtype=np.int64)
    for buffer in (ids[::2], ids[::-2], memoryview(ids)[:4], memoryview(ids[:4].tobytes()).cast("q")):
        expected = domain.snapshot()
        domain.apply(expected, "load", np.array(buffer), np.array(buffer))
        domain.submit("load", buffer, buffer).wait_all(30)
        assert domain.equals(expected)


def test_the_cpu_has_no_streams_and_says_so(cpu: World, rng: np.random.Generator) -> None:
    domain = Domain(cpu, cpu.copier(), rng)
    with pytest.raises(ValueError, match="no streams"):
        domain.submit("load", *domain.ids(rng, 3), after_stream=5)
    transfer = domain.submit("load", *domain.ids(rng, 3), after_stream=0)
    with pytest.raises(NativeError, match="no streams"):
        transfer.stream_wait_group(0, 0, 1)
    transfer.wait_all(30)
    for region in domain.regions:
        domain.copier.unregister_region(region)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tpu"}, "there are: cpu, cuda, ascend"),
        ({"backend": "cpu", "threads": 0}, "threads"),
        ({"backend": "cpu", "method": "magic"}, "cpu has: auto, memcpy, streaming"),
        ({"backend": "cpu", "bytes_per_second": -1.0}, "bytes_per_second"),
        ({"backend": "cpu", "library": "libc.so.6"}, "no library"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Copier(**options)


# ------------------------------------------------------------------------------------------------- leaks


def test_a_thousand_cycles_leak_nothing(world: World, rng: np.random.Generator) -> None:
    copier = world.copier()
    domain = Domain(world, copier, rng, layers=2, piece=4096)

    def cycles(count: int) -> None:
        for number in range(count):
            transfer = domain.submit("offload" if number % 3 else "load", *domain.ids(rng, 10), [(0, 1), (1, 2)])
            if number % 5:
                transfer.wait_all(30)
        transfer.wait_all(30)

    def footprint() -> tuple[int, int, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        kilobytes = int(status.split("VmRSS:")[1].split()[0])
        threads = int(status.split("Threads:")[1].split()[0])
        return kilobytes, len(os.listdir("/proc/self/fd")), threads

    cycles(600)  # pools of events and allocators fill up
    before, references = footprint(), sys.getrefcount(domain.owners)
    cycles(1000)
    after, references_after = footprint(), sys.getrefcount(domain.owners)
    assert after[1:] == before[1:] and references_after == references
    sanitized = "asan" in os.environ.get("LD_PRELOAD", "")  # its quarantine grows by design
    assert sanitized or after[0] - before[0] < 1500
    if world.device is not None:
        assert world.device.live()["events"] < 600


def test_copiers_come_and_go_without_a_trace(world: World, rng: np.random.Generator) -> None:
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        copier = world.copier()
        domain = Domain(world, copier, rng)
        domain.submit("load", *domain.ids(rng, 3)).wait_all(30)
        world.copiers.clear()
        gone = weakref.ref(domain.owners[0])
        del copier, domain
        assert gone() is None
    end = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < end:
        time.sleep(0.01)  # a thread that was joined is listed for a moment more
    assert len(os.listdir("/proc/self/task")) <= threads
