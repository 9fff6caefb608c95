"""Memory of the host tier: a sealed, populated memfd without a name, or a region of the node's store client.

One host pool, block first (see `block`)::

    | block 0: payload | trailer | block 1: payload | trailer | ...
    |<---- object_bytes ------->|

Nothing has a name, so nothing is left behind: when every holder is gone, SIGKILL included, the kernel frees it. Ranks
that share one copy (MLA) get it from the rank that made it, as a descriptor over a socket: `offer` and `receive`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, StartupError

log = logging.getLogger("xllm.worker")

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MFD_HUGETLB = 0x0004
_HUGE_PAGE = 2 << 20
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_OFFER = struct.Struct("<Q?")  # where the offered bytes begin in the file, and whether it is sealed
_LOOK_S = 0.02
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL | SHRINK | GROW: no peer can make our pages vanish


class HostMemory:
    """`nbytes` of host memory as one uint8 array at `address`; `array` stays valid until `close`, and views of it keep
    the mapping alive. `fd` is what `attach` takes in another process; None for memory of another owner.

    Raises:
        ConfigError: the machine cannot give that much, with the figures.
    """

    def __init__(
        self, array: NDArray[np.uint8], address: int, mapping: mmap.mmap | None, fd: int | None, page_bytes: int
    ) -> None:
        self.array = array
        self.address = address
        self._mapping = mapping
        self.fd = fd
        self.page_bytes = page_bytes

    @classmethod
    def create(cls, nbytes: int, setting: str = "host_blocks_factor", *, huge_pages: bool = False) -> HostMemory:
        """Own memfd memory, all pages present; `setting` is named when it does not fit.

        `huge_pages` asks for reserved pages of 2 MiB (/proc/sys/vm/nr_hugepages) and takes small ones where there are
        not enough; `page_bytes` says which it got.
        """
        available = available_memory_bytes()
        if huge_pages:
            try:
                return cls._create(nbytes, _HUGE_PAGE, _MFD_HUGETLB)
            except OSError as error:
                log.warning("no huge pages for %d bytes of host blocks (%s): taking small ones", nbytes, error.strerror)
        if nbytes > available:
            raise ConfigError(setting, nbytes, f"a host cache of at most {available} bytes, what is free here")
        try:
            return cls._create(nbytes, mmap.PAGESIZE, 0)
        except OSError as error:
            raise ConfigError(setting, nbytes, f"a host cache that fits ({error.strerror})") from error

    @classmethod
    def _create(cls, nbytes: int, page_bytes: int, flags: int) -> HostMemory:
        size = -(-nbytes // page_bytes) * page_bytes
        fd = os.memfd_create("xllm-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
            _populate(mapping, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls._over(mapping, nbytes, fd, page_bytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, offset: int = 0, sealed: bool = True) -> HostMemory:
        """Another process's memory by its descriptor (passed over a socket or by inheritance), which is taken over.

        `sealed` False trusts its owner not to shrink it, as one must with the pool of a store client.

        Raises:
            ValueError: the memory behind the descriptor is smaller, or can still shrink under us.
        """
        if sealed and not _is_sealed(fd):
            raise ValueError("the host memory is not sealed: its owner could take pages away")
        size = os.fstat(fd).st_size - offset
        if size < nbytes:
            raise ValueError(f"the host memory has {size} bytes, {nbytes} are needed")
        mapping = mmap.mmap(fd, size, offset=offset)
        _populate(mapping, 0)
        return cls._over(mapping, nbytes, fd, mmap.PAGESIZE)

    # ------------------------------------------------------------------------------------------- sharing

    def offer(self, path: Path, count: int, timeout_s: float) -> None:
        """Let `count` other processes `receive` this memory at `path`, a socket that is gone afterwards.

        Raises:
            StartupError: not all of them came within `timeout_s`, or the socket cannot be made.
            LookupError: memory that somebody else owns has no descriptor in this process.
        """
        fd, offset = (self.fd, 0) if self.fd is not None else _descriptor_of(self.address)
        deadline = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen(count)
                for number in range(count):
                    listener.settimeout(max(0.01, deadline - time.monotonic()))
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        raise StartupError(
                            f"{count - number} workers did not fetch the host memory in {timeout_s:g} s"
                        ) from None
                    with connection:
                        socket.send_fds(connection, [_OFFER.pack(offset, _is_sealed(fd))], [fd])
        except OSError as error:
            raise StartupError(f"the host memory cannot be handed to the other workers: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    @classmethod
    def receive(cls, path: Path, nbytes: int, timeout_s: float) -> HostMemory:
        """The memory of `nbytes` that another process offers, or will offer, at `path`: the same pages, mapped here.

        Raises:
            StartupError: nobody offered any within `timeout_s`, or it is smaller.
        """
        deadline = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            while True:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection.connect(str(path))
                    header, fds, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if time.monotonic() > deadline:
                        raise StartupError(f"nobody offered the host memory within {timeout_s:g} s") from None
                    time.sleep(_LOOK_S)
                except TimeoutError:
                    raise StartupError(f"the host memory did not come within {timeout_s:g} s") from None
        if len(header) < _OFFER.size or len(fds) != 1:
            raise StartupError("the worker that makes the host memory ended")
        offset, sealed = _OFFER.unpack(header)
        try:
            return cls.attach(fds[0], nbytes, offset=offset, sealed=sealed)
        except ValueError as error:
            os.close(fds[0])
            raise StartupError(f"the host memory of another worker cannot be used: {error}") from error

    @classmethod
    def _over(cls, mapping: mmap.mmap, nbytes: int, fd: int, page_bytes: int) -> HostMemory:
        array = np.frombuffer(mapping, dtype=np.uint8)[:nbytes]
        return cls(array, array.ctypes.data, mapping, fd, page_bytes)

    @classmethod
    def at(cls, address: int, nbytes: int) -> HostMemory:
        """A view of memory that somebody else owns and keeps mapped (the pool of a store client)."""
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return cls(array, address, None, None, mmap.PAGESIZE)

    def close(self) -> None:
        """Release the memory; views of `array` keep the mapping alive, so that none can dangle."""
        self.array = np.empty(0, dtype=np.uint8)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self._mapping = None


def _descriptor_of(address: int) -> tuple[int, int]:
    """Our descriptor of the shared file that is mapped at `address`, and where in it `address` lies.

    A store client keeps the one of its pool open for as long as it is mapped. Raises LookupError when there is none.
    """
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        span, _, offset, _, inode, *_ = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if int(inode) and os.fstat(int(name)).st_ino == int(inode) and _is_memory(int(name)):
                        return int(name), int(offset, 16) + address - start
    raise LookupError(f"no descriptor in this process holds the memory at {address:#x}")


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no file of a kind that has seals
        return False


def _is_memory(fd: int) -> bool:
    return "/memfd:" in os.readlink(f"/proc/self/fd/{fd}")


def _populate(mapping: mmap.mmap, size: int) -> None:
    """Touch every page now: a first touch inside a copy costs 2 us per page, and a lack of memory is an error here.

    `size` 0: only map the pages, which somebody else has made.
    """
    for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        try:
            mapping.madvise(advice)
        except OSError:
            if advice == _MADV_POPULATE_WRITE:  # kernels before 5.14
                for offset in range(0, size, mmap.PAGESIZE):
                    mapping[offset] = 0


def available_memory_bytes() -> int:
    """Bytes that can still be allocated: MemAvailable, cut to the rest of the memory cgroup."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines: dict[str, Any] = dict(line.split(":", 1) for line in file)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            current = int(file.read())
        if limit != "max":
            available = min(available, int(limit) - current)
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return max(0, available)
