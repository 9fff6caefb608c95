"""What only devices have, over stand-ins: streams, events, pinning, missing functions, errors of the runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from standins.world import BACKENDS, Domain, StandIn, Stream, World, page_aligned, stand_in_library

from xllm_hier import _native
from xllm_hier._native import BackendUnavailable, Copier, DeviceError, NativeError, TransferTimeout

DEVICES = [name for name, (backend, _) in BACKENDS.items() if backend != "cpu"]


@pytest.fixture(params=DEVICES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each device backend and method in turn."""
    found = World(request.param)
    yield found
    found.end()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture
def device(world: World) -> StandIn:
    assert world.device is not None
    return world.device


@pytest.fixture
def compute(world: World, device: StandIn) -> Iterator[Stream]:
    """The stream of the forward."""
    stream = Stream(device)
    yield stream
    device.close_gate(False)
    stream.destroy()


# ----------------------------------------------------------------------------------------------- streams


def test_an_offload_waits_for_the_stream_that_writes_its_blocks(
    world: World, rng: np.random.Generator, device: StandIn, compute: Stream
) -> None:
    domain = Domain(world, world.copier(), rng, layers=2)
    device_ids, host_ids = domain.ids(rng, 5)
    fresh = rng.integers(0, 256, domain.device[0].shape, np.uint8)
    device.close_gate(True)
    compute.gate()
    for layer in domain.device:
        compute.copy(layer, fresh)
    transfer = domain.submit("offload", device_ids, host_ids, after_stream=compute.handle)
    with pytest.raises(TransferTimeout):
        transfer.wait_all(0.1)
    device.close_gate(False)
    transfer.wait_all(30)
    assert np.array_equal(domain.host[host_ids, :1000], fresh[device_ids])
    assert np.array_equal(domain.host[host_ids, 1000:2000], fresh[device_ids])


def test_a_transfer_does_not_wait_for_what_is_launched_after_it(
    world: World, rng: np.random.Generator, device: StandIn, compute: Stream
) -> None:
    domain = Domain(world, world.copier(), rng)
    transfer = domain.submit("offload", *domain.ids(rng, 5), after_stream=compute.handle)
    device.close_gate(True)
    compute.gate()
    transfer.wait_all(30)


def test_the_forward_waits_on_the_device_while_the_host_goes_on(
    world: World, rng: np.random.Generator, device: StandIn, compute: Stream
) -> None:
    domain = Domain(world, world.copier(), rng, layers=2)
    device_ids, host_ids = domain.ids(rng, 5)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids)
    seen = [page_aligned(layer.nbytes).reshape(layer.shape) for layer in domain.device]
    device.hold(True)
    transfer = domain.submit("load", device_ids, host_ids, [(0, 1), (1, 2)])
    if world.name == "ascend-sync-batch":  # its copies are issued one by one, so the host has to wait for each
        with pytest.raises(TransferTimeout, match="the event of layer group 0"):
            transfer.stream_wait_group(0, compute.handle, 0.05)
        device.hold(False)
    for layer in range(2):
        transfer.stream_wait_group(layer, compute.handle, 30)
        compute.copy(seen[layer], domain.device[layer])
    if world.name != "ascend-sync-batch":
        time.sleep(0.05)
        assert not compute.idle()
        assert not transfer.done(0)
        device.hold(False)
    compute.synchronize()
    assert all(np.array_equal(mine, its) for mine, its in zip(seen, expected.device, strict=True))
    transfer.wait_all(30)
    transfer.stream_wait_group(1, compute.handle, 0)  # there already: nothing to wait for


def test_a_forward_on_another_thread_may_wait_too(world: World, rng: np.random.Generator, compute: Stream) -> None:
    domain = Domain(world, world.copier(), rng)
    failures: list[BaseException] = []

    def forward() -> None:
        try:
            for _ in range(50):
                transfer = domain.submit("load", *domain.ids(rng, 5), after_stream=compute.handle)
                transfer.stream_wait_group(0, compute.handle, 30)
                transfer.wait_all(30)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert failures == []


def test_the_default_stream_is_a_stream_like_others(world: World, rng: np.random.Generator) -> None:
    domain = Domain(world, world.copier(), rng)
    transfer = domain.submit("load", *domain.ids(rng, 5), after_stream=0)
    transfer.stream_wait_group(0, 0, 30)
    transfer.wait_all(30)


def test_both_directions_move_at_once(world: World, rng: np.random.Generator, device: StandIn, compute: Stream) -> None:
    domain = Domain(world, world.copier(), rng)
    device.close_gate(True)
    compute.gate()
    offload = domain.submit("offload", *domain.ids(rng, 5), after_stream=compute.handle)
    domain.submit("load", *domain.ids(rng, 5)).wait_all(30)
    assert not offload.ended
    device.close_gate(False)
    offload.wait_all(30)


# ------------------------------------------------------------------------------------------------ methods


def test_the_method_that_was_asked_for_is_used(world: World, rng: np.random.Generator, device: StandIn) -> None:
    domain = Domain(world, world.copier(), rng, layers=5)
    domain.submit("load", np.arange(0, 20, 2), np.arange(0, 20, 2), [(0, 2), (2, 5)]).wait_all(30)
    calls = device.calls()
    if world.name.endswith("loop"):
        assert (calls["batches"], calls["singles"]) == (0, 50)
    else:
        assert calls == {"batches": 2, "singles": 0, "largest": 30}
    assert domain.copier.method == world.name.split("-", 1)[1].replace("-", "_")


def test_a_batch_that_the_driver_refuses_becomes_a_loop(
    world: World, rng: np.random.Generator, device: StandIn
) -> None:
    device.refuse_batches()
    domain = Domain(world, world.copier(), rng)
    device_ids, host_ids = domain.ids(rng, 5)
    expected = domain.snapshot()
    domain.apply(expected, "load", device_ids, host_ids)
    domain.submit("load", device_ids, host_ids).wait_all(30)
    assert domain.equals(expected) and domain.copier.method == "loop"


def test_an_older_cuda_driver_is_served_by_a_loop(rng: np.random.Generator) -> None:
    world = World("cuda-loop")
    assert world.device is not None
    world.device.hide("cuMemcpyBatchAsync")
    domain = Domain(world, world.copier(method="auto"), rng)
    assert domain.copier.method == "loop"
    domain.submit("load", *domain.ids(rng, 5)).wait_all(30)
    with pytest.raises(BackendUnavailable, match="no cuMemcpyBatchAsync"):
        world.copier(method="batch")
    world.end()


def test_an_older_cann_is_served_by_a_loop(rng: np.random.Generator) -> None:
    world = World("ascend-loop")
    library = stand_in_library("ascend", "WITHOUT_BATCH")
    world.device = StandIn(library)
    domain = Domain(world, world.copier(method="auto"), rng)
    assert domain.copier.method == "loop"
    expected = domain.snapshot()
    ids = domain.ids(rng, 5)
    domain.apply(expected, "load", *ids)
    domain.submit("load", *ids).wait_all(30)
    assert domain.equals(expected)
    for method in ("batch", "sync_batch"):
        with pytest.raises(BackendUnavailable, match="no batch copy"):
            world.copier(method=method)
    world.end()


def test_auto_takes_the_batch() -> None:
    for name in ("cuda-batch", "ascend-batch"):
        world = World(name)
        assert world.copier(method="auto").method == "batch"
        with pytest.raises(ValueError, match="is unknown"):
            world.copier(method="streaming")
        with pytest.raises(ValueError, match="only the cpu backend can be throttled"):
            world.copiers[0].bytes_per_second = 1.0
        world.end()


# ------------------------------------------------------------------------------------------------- errors


def test_an_error_of_the_device_reaches_every_wait(world: World, rng: np.random.Generator, device: StandIn) -> None:
    domain = Domain(world, world.copier(), rng, layers=4)
    for arm in (lambda: device.fail(1, 700), lambda: device.break_events(700)):
        arm()
        transfer = domain.submit("load", *domain.ids(rng, 5), [(0, 2), (2, 4)])
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"700.*an error of the stand-in") as caught:
                transfer.wait_all(30)
            assert caught.value.code == 700
            with pytest.raises(DeviceError):
                transfer.stream_wait_group(1, 0, 30)
        assert transfer.ended
        device.fail(-1, 0)
        device.break_events(0)
    domain.submit("load", *domain.ids(rng, 5)).wait_all(30)


def test_a_stream_that_does_not_exist_is_an_error_of_submit(
    world: World, rng: np.random.Generator, device: StandIn
) -> None:
    domain = Domain(world, world.copier(), rng)
    with pytest.raises(DeviceError, match="Record"):
        domain.submit("offload", *domain.ids(rng, 5), after_stream=12345)
    assert device.problem() == "a stream that does not exist"
    for region in domain.regions:
        domain.copier.unregister_region(region)  # not in use


def test_a_device_that_does_not_exist_is_an_error(world: World) -> None:
    with pytest.raises(NativeError, match=r"cuDeviceGet|aclrtSetDevice"):
        world.copier(device=3)


def test_a_missing_library_says_which() -> None:
    for backend, name in (("cuda", "libcuda.so.1"), ("ascend", "libascendcl.so")):
        with pytest.raises(BackendUnavailable, match="cannot open shared object file"):
            Copier(backend, library=f"/nowhere/{name}")
        try:
            Copier(backend).close()
        except NativeError as error:  # this machine has no such device
            assert isinstance(error, BackendUnavailable | DeviceError)
    with pytest.raises(BackendUnavailable, match="no cuGetProcAddress_v2"):
        Copier("cuda", library="libm.so.6")


def test_a_missing_function_says_which() -> None:
    library = stand_in_library("ascend", "WITHOUT_SYMBOL")
    with pytest.raises(BackendUnavailable, match="no aclrtSynchronizeEventWithTimeout"):
        Copier("ascend", library=str(library))
    world = World("cuda-loop")
    assert world.device is not None
    world.device.hide("cuStreamWaitEvent")
    with pytest.raises(BackendUnavailable, match="no cuStreamWaitEvent"):
        world.copier()
    world.end()


# ------------------------------------------------------------------------------------------------- memory


def test_memory_pinned_by_somebody_else_is_taken_as_it_is_on_cuda() -> None:
    world = World("cuda-batch")
    memory = page_aligned(8192)
    first, second = world.copier(), world.copier()
    region = first.register_region(memory.ctypes.data, 8192, kind="host", owner=memory)
    again = second.register_region(memory.ctypes.data, 8192, kind="host", owner=memory)
    assert region.pinned and not again.pinned
    second.unregister_region(again)
    assert world.device is not None and world.device.live()["pins"] == 1
    world.end()


def test_memory_pinned_in_part_is_refused_on_cuda() -> None:
    world = World("cuda-batch")
    memory = page_aligned(8192)
    copier = world.copier()
    copier.register_region(memory.ctypes.data, 4000, kind="host", owner=memory)
    with pytest.raises(DeviceError, match="712"):
        world.copier().register_region(memory.ctypes.data, 8192, kind="host", owner=memory)
    world.end()


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    world = World("ascend-batch")
    memory = page_aligned(8192)
    copier = world.copier()
    with pytest.raises(DeviceError, match="aclrtHostRegister"):
        copier.register_region(memory.ctypes.data + 64, 4096, kind="host", owner=memory)
    region = copier.register_region(memory.ctypes.data, 8192, kind="host", owner=memory)
    assert region.pinned
    world.end()


def test_a_process_may_end_in_mid_transfer() -> None:
    code = """
import sys
import numpy as np
from standins.world import Domain, World
world = World(sys.argv[1])
domain = Domain(world, world.copier(), np.random.default_rng(0))
transfers = [domain.submit(way, *domain.ids(np.random.default_rng(1), 5)) for way in ("load", "offload") * 50]
print("end")
"""
    package = Path(_native.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{package}:{Path(__file__).parent}"}
    for name in ("cpu", "cuda-batch", "ascend-batch"):
        command = [sys.executable, "-c", code, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", ""), name
