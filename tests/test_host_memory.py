"""Host memory has no name, cannot shrink under its holders, and is gone with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from serving import wait_for

from xllm_hier.errors import ConfigError, StartupError
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
        ours.settimeout(120)
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
    wait_for(lambda: set(os.listdir("/dev/shm")) <= names)
    wait_for(lambda: shared_memory_bytes() < held - size // 4)  # others on this machine may take some meanwhile


def test_an_offered_memory_reaches_every_worker_that_asks_and_its_path_is_gone(tmp_path: Path) -> None:
    """Three ranks, one copy: two of them ask before the memory is there, and nobody else's pages grow."""
    path = tmp_path / "host"
    code = (
        "import sys; from pathlib import Path; from xllm_hier.host_memory import HostMemory;"
        f"m = HostMemory.receive(Path({str(path)!r}), {MIB}, 120); m.array[int(sys.argv[1])] = m.array[0] + 1"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(place)]) for place in (1, 2)]
    memory = HostMemory.create(MIB)
    memory.array[0] = 41
    memory.offer(path, 2, 120)
    assert [child.wait(120) for child in children] == [0, 0]
    assert memory.array[:3].tolist() == [41, 42, 42]
    assert not path.exists()
    memory.close()


def test_memory_of_a_store_client_is_offered_by_the_descriptor_it_keeps(tmp_path: Path) -> None:
    """A pool is an unsealed file that somebody else has mapped; ours begins two pages into it."""
    pool = os.memfd_create("pool")
    os.ftruncate(pool, 4 * mmap.PAGESIZE)
    mapped = mmap.mmap(pool, 4 * mmap.PAGESIZE)
    start = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    ours = HostMemory.at(start + 2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    offering = threading.Thread(target=ours.offer, args=(tmp_path / "host", 1, 30))
    offering.start()
    theirs = HostMemory.receive(tmp_path / "host", 2 * mmap.PAGESIZE, 30)
    offering.join()
    theirs.array[5] = 7
    assert mapped[2 * mmap.PAGESIZE + 5] == 7 and theirs.address != ours.address
    theirs.close()


def test_nobody_waits_for_ever_for_shared_memory(tmp_path: Path) -> None:
    memory = HostMemory.create(MIB)
    with pytest.raises(StartupError, match=r"1 workers did not fetch the host memory in 0.1 s"):
        memory.offer(tmp_path / "host", 1, 0.1)
    with pytest.raises(StartupError, match=r"nobody offered the host memory within 0.1 s"):
        HostMemory.receive(tmp_path / "host", MIB, 0.1)
    with pytest.raises(LookupError, match="no descriptor"):
        HostMemory.at(memory.array[:1].copy().ctypes.data, 1).offer(tmp_path / "host", 1, 0.1)
    memory.close()
