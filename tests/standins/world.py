"""What the tests of the native copier share: its backends, stand-in devices built on demand, and memory to copy."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from xllm_hier._native import Copier, Region, Table, Transfer

HERE = Path(__file__).parent
PAGE = 4096
Groups = list[tuple[int, int]]

# name -> (backend, options); device backends run over stand-ins
BACKENDS: dict[str, tuple[str, dict[str, object]]] = {
    "cpu": ("cpu", {}),
    "cpu-3-threads": ("cpu", {"threads": 3}),
    "cpu-memcpy": ("cpu", {"method": "memcpy"}),
    "cpu-avx2": ("cpu", {"method": "avx2"}),
    "cuda-batch": ("cuda", {"method": "batch"}),
    "cuda-loop": ("cuda", {"method": "loop"}),
    "ascend-batch": ("ascend", {"method": "batch"}),
    "ascend-sync-batch": ("ascend", {"method": "sync_batch"}),
    "ascend-loop": ("ascend", {"method": "loop"}),
}
SOURCES = {"cuda": ("fake_cuda.cpp", "libcuda.so.1"), "ascend": ("fake_acl.cpp", "libascendcl.so")}


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""


@functools.cache
def build_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="xllm-standins-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def stand_in_library(backend: str, *defines: str) -> Path:
    """The stand-in under its real name, in a folder of its own; `defines` leave functions out."""
    if not compiler():
        pytest.skip("no C++ compiler for the stand-in")
    source, name = SOURCES[backend]
    library = build_folder() / "-".join([backend, *defines]) / name
    library.parent.mkdir(exist_ok=True)
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread"]
    extra = shlex.split(os.environ.get("XLLM_NATIVE_FLAGS", ""))
    command = [compiler(), *flags, *extra, *(f"-D{each}" for each in defines), str(HERE / source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


class StandIn:
    """The test's side of a stand-in; see standin.h."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._lib = ctypes.CDLL(str(library))
        self._lib.standin_problem.restype = ctypes.c_char_p
        self._lib.standin_stream_create.restype = ctypes.c_void_p
        self._lib.standin_reset()

    def problem(self) -> str:
        return self._lib.standin_problem().decode()

    def live(self) -> dict[str, int]:
        out = (ctypes.c_int64 * 4)()
        self._lib.standin_live(out)
        return dict(zip(("streams", "events", "pins", "contexts"), out, strict=True))

    def calls(self) -> dict[str, int]:
        out = (ctypes.c_int64 * 3)()
        self._lib.standin_calls(out)
        return dict(zip(("batches", "singles", "largest"), out, strict=True))

    def add_device_memory(self, array: np.ndarray) -> None:
        self._lib.standin_device_memory(ctypes.c_size_t(array.ctypes.data), ctypes.c_size_t(array.nbytes))

    def hold(self, held: bool) -> None:
        self._lib.standin_hold(int(held))

    def close_gate(self, closed: bool) -> None:
        self._lib.standin_close_gate(int(closed))

    def fail(self, calls_before: int, code: int) -> None:
        self._lib.standin_fail(calls_before, code)

    def break_events(self, code: int) -> None:
        self._lib.standin_break(code)

    def refuse_batches(self) -> None:
        self._lib.standin_unsupported(1)

    def hide(self, symbol: str) -> None:
        self._lib.standin_hide(symbol.encode())


class Stream:
    """A stream of the caller on a stand-in device, as the forward has one."""

    def __init__(self, device: StandIn) -> None:
        self._lib = device._lib
        self.handle = int(self._lib.standin_stream_create())

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        assert target.nbytes == source.nbytes
        at = [ctypes.c_void_p(self.handle), ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data)]
        self._lib.standin_stream_copy(*at, ctypes.c_size_t(source.nbytes))

    def gate(self) -> None:
        """What comes later in the stream waits while the device's gate is closed."""
        self._lib.standin_stream_gate(ctypes.c_void_p(self.handle))

    def idle(self) -> bool:
        return bool(self._lib.standin_stream_idle(ctypes.c_void_p(self.handle)))

    def synchronize(self) -> None:
        self._lib.standin_stream_sync(ctypes.c_void_p(self.handle))

    def destroy(self) -> None:
        self._lib.standin_stream_destroy(ctypes.c_void_p(self.handle))


def page_aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


class World:
    """One backend to test; `end` closes the copiers it made and wants a clean device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend, self.options = BACKENDS[name]
        self.device = None if self.backend == "cpu" else StandIn(stand_in_library(self.backend))
        self.copiers: list[Copier] = []

    def copier(self, **options: object) -> Copier:
        arguments = {**self.options, **options}
        if self.device is not None:
            arguments.setdefault("library", str(self.device.library))
        try:
            copier = Copier(self.backend, **arguments)
        except ValueError as error:
            if "not possible on this processor" in str(error):
                pytest.skip(str(error))
            raise
        self.copiers.append(copier)
        return copier

    def stall(self, copier: Copier, stalled: bool = True) -> None:
        """Nothing arrives any more, or again."""
        if self.device is None:
            copier.bytes_per_second = 1.0 if stalled else 0.0
        else:
            self.device.hold(stalled)

    def end(self) -> None:
        for copier in self.copiers:
            self.stall(copier, False)
            copier.close()
        if self.device is not None:
            assert self.device.problem() == ""
            assert self.device.live() == {"streams": 0, "events": 0, "pins": 0, "contexts": 0}


@dataclass
class Snapshot:
    device: list[np.ndarray]
    host: np.ndarray


class Domain:
    """Device and host blocks as a cache domain has them, full of random bytes, registered with a copier.

    `shift` moves all addresses off their alignment, `gap` is what lies between two device blocks.
    """

    def __init__(
        self,
        world: World,
        copier: Copier,
        rng: np.random.Generator,
        *,
        layers: int = 5,
        device_blocks: int = 20,
        host_blocks: int = 30,
        piece: int = 1000,
        shift: int = 0,
        gap: int = 0,
        layer_numbers: list[int] | None = None,
    ) -> None:
        self.copier, self.piece, self.layers = copier, piece, layers
        stride, self.object_bytes = piece + gap, -(-piece * layers // 64) * 64 + 64
        self.regions: list[Region] = []
        self.owners: list[np.ndarray] = []

        def memory(blocks: int, block_bytes: int, kind: str) -> np.ndarray:
            whole = page_aligned(shift + blocks * block_bytes)
            self.owners.append(whole)
            if kind == "device" and world.device is not None:
                world.device.add_device_memory(whole)
            self.regions.append(copier.register_region(whole.ctypes.data, whole.nbytes, kind=kind, owner=whole))
            view = whole[shift:].reshape(blocks, block_bytes)
            view[:] = rng.integers(0, 256, view.shape, np.uint8)
            return view

        self.device = [memory(device_blocks, stride, "device") for _ in range(layers)]
        self.host = memory(host_blocks, self.object_bytes, "host")
        self.table: Table = copier.table(
            [array.ctypes.data for array in self.device],
            device_stride=stride,
            device_blocks=device_blocks,
            host_base=self.host.ctypes.data,
            host_stride=self.object_bytes,
            host_blocks=host_blocks,
            piece_bytes=piece,
            layers=layer_numbers,
        )

    def ids(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.permutation(len(self.device[0]))[:count], rng.permutation(len(self.host))[:count]

    def submit(
        self, direction: str, device_ids: np.ndarray, host_ids: np.ndarray, groups: Groups | None = None, **more: object
    ) -> Transfer:
        parts = [(self.table, device_ids, host_ids)]
        return self.copier.submit(direction, parts, groups or [(0, self.layers)], owners=self.owners, **more)

    def snapshot(self) -> Snapshot:
        return Snapshot([array.copy() for array in self.device], self.host.copy())

    def apply(
        self, before: Snapshot, direction: str, device_ids: np.ndarray, host_ids: np.ndarray, rows: range | None = None
    ) -> None:
        """What a transfer of the layers `rows` does, in numpy."""
        for row in range(self.layers) if rows is None else rows:
            piece = slice(row * self.piece, (row + 1) * self.piece)
            if direction == "load":
                before.device[row][device_ids, : self.piece] = before.host[host_ids, piece]
            else:
                before.host[host_ids, piece] = before.device[row][device_ids, : self.piece]

    def equals(self, other: Snapshot) -> bool:
        same = all(np.array_equal(mine, its) for mine, its in zip(self.device, other.device, strict=True))
        return same and np.array_equal(self.host, other.host)
