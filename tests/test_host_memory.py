"""Host memory has no name, cannot shrink under its holders, and is gone with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import wait_for

from xllm_hier.errors import ConfigError
from xllm_hier.host_memory import HostMemory

MIB = 1 << 20


def shared_memory_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split("Shmem:")[1].split()[0]) * 1024


def test_memory_is_present_and_writable_to_its_last_byte() -> None:
    memory = HostMemory.create(3 * MIB + 5)
    assert memory.array.nbytes == 3 * MIB + 5 and memory.address == memory.array.ctypes.data
    assert memory.address % mmap.PAGESIZE == 0
    memory.array[-1] = 7
    assert memory.array[0] == 0 and memory.array[-1] == 7
    memory.close()


def test_what_does_not_fit_is_a_setting_error_with_figures() -> None:
    with pytest.raises(ConfigError, match=rf"host_blocks_factor={1 << 60}.*at most \d+ bytes"):
        HostMemory.create(1 << 60)


def test_nobody_can_shrink_the_memory_under_its_holders() -> None:
    memory = HostMemory.create(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd or -1, 0)
    memory.close()


def test_a_view_outlives_close() -> None:
    memory = HostMemory.create(MIB)
    view = memory.array[100:200]
    memory.close()
    gc.collect()
    view[:] = 5
    assert int(view.sum()) == 500


def test_another_process_sees_the_same_bytes_through_the_descriptor() -> None:
    memory = HostMemory.create(MIB)
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys; from xllm_hier.host_memory import HostMemory;"
        f"s = socket.socket(fileno={theirs.fileno()}); _, fds, _, _ = socket.recv_fds(s, 1, 1);"
        f"m = HostMemory.attach(fds[0], {MIB}); m.array[-1] = m.array[0] + 1; s.send(b'x')"
    )
    memory.array[0] = 41
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        socket.send_fds(ours, [b"x"], [memory.fd or -1])
        ours.settimeout(30)
        assert ours.recv(1) == b"x"
        assert child.wait(30) == 0
    assert memory.array[-1] == 42
    memory.close()


def test_unsealed_or_short_memory_is_not_attached() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ValueError, match="not sealed"):
        HostMemory.attach(fd, MIB)
    os.close(fd)
    memory = HostMemory.create(MIB)
    with pytest.raises(ValueError, match=f"has {MIB} bytes, {2 * MIB} are needed"):
        HostMemory.attach(os.dup(memory.fd or -1), 2 * MIB)
    memory.close()


def test_huge_pages_are_a_wish_and_the_answer_is_told() -> None:
    memory = HostMemory.create(MIB, huge_pages=True)
    assert memory.page_bytes in (mmap.PAGESIZE, 2 * MIB)
    memory.array[:] = 1
    memory.close()


def test_nothing_survives_sigkill_of_the_holder() -> None:
    names = set(os.listdir("/dev/shm"))
    size = 512 * MIB
    code = (
        f"from xllm_hier.host_memory import HostMemory; m = HostMemory.create({size}); print('up', flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    resident = Path(f"/proc/{child.pid}/status").read_text().split("RssShmem:")[1].split()[0]
    assert int(resident) * 1024 >= size
    held = shared_memory_bytes()
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert set(os.listdir("/dev/shm")) == names
    wait_for(lambda: shared_memory_bytes() < held - size // 2, 10)
