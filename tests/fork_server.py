"""Processes of tests forked from one that has imported everything: a start costs a second of imports less per process.

`ForkServer` runs this file as a program. That process is single-threaded and imports what instances need, but nothing
that starts threads (Mooncake does); for each request it forks a child with the file descriptors, environment and folder
of the request, and tells when the child has ended. Instances forked from it fork their own processes likewise: see
`_Forks`. How instances really start is what the files in `REAL_STARTS` test.

A child has fresh signal handlers and no descriptors but its own. It dies with this server, and the server dies with the
process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REAL_STARTS = {
    "test_processes.py",
    "test_rank_failures.py",
    "test_llm_and_demo.py",
    "test_local_cluster.py",
}
_START_S = 120.0
# What an instance's own launcher sets before its processes import torch and transformers.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "GOMP_SPINCOUNT": "2000",
    "OPENBLAS_NUM_THREADS": "1",  # else numpy's import starts threads
}
_PRELOAD = (
    "torch.distributed",
    "transformers.models.auto.tokenization_auto",
    "xllm_hier.launch",
    "xllm_hier.engine.core",
    "xllm_hier.worker.worker",
    "xllm_hier.models.hf_model",
    "xllm_hier.api.server",
    "xllm_hier.service.app",
)


class ForkedProcess:
    """A child of the fork server, with the part of Popen's face that tests use."""

    def __init__(self, pid: int, line: socket.socket, stdout: Any = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._line = line

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's. Raises TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            told = self._line.recv(8)
            # Without a word the server has ended, and with it all its children.
            self.returncode = int.from_bytes(told, "big", signed=True) if told else -signal.SIGKILL
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """As multiprocessing's."""
        self._ended(timeout)


class ForkServer:
    """The server of one test process; started with the first use."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xllm-forks-")
        address = f"{self._folder.name}/socket"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), address],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.pid, self._address = self._process.pid, address
        end = time.monotonic() + _START_S
        while not os.path.exists(address):
            assert self._process.poll() is None and time.monotonic() < end, "the fork server did not come up"
            time.sleep(0.02)
        atexit.register(self.close)

    def start(
        self, target: str, arguments: dict[str, Any], fds: Sequence[int], environ: dict[str, str] | None = None
    ) -> ForkedProcess:
        """Fork a child that calls `target` (module:function) with `arguments` and, as `fds`, its copies of these file
        descriptors, which become its stdout and stderr if there are two."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_START_S)
        line.connect(self._address)
        asked = {"target": target, "arguments": arguments, "environ": {**os.environ, **_ENVIRONMENT, **(environ or {})}}
        data = json.dumps(asked).encode()
        socket.send_fds(line, [len(data).to_bytes(8, "big")], list(fds))
        line.sendall(data)
        pid = int.from_bytes(line.recv(8), "big")
        line.settimeout(None)
        return ForkedProcess(pid, line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@functools.cache
def fork_server() -> ForkServer:
    """The one of this test process."""
    return ForkServer()


def start_program(
    module: str, flags: Sequence[str], stderr: int, environ: dict[str, str] | None = None
) -> subprocess.Popen[str] | ForkedProcess:
    """`python -m module flags` with its stdout as a text file; forked unless the present test wants a real start."""
    environ = {"HF_HUB_OFFLINE": "1", **(environ or {})}
    if _present_file() in REAL_STARTS:
        command = [sys.executable, "-m", module, *flags]
        everything = {**os.environ, **environ}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=everything, cwd=ROOT)
    ours, theirs = os.pipe()
    process = fork_server().start(
        "fork_server:run_program", {"module": module, "flags": list(flags)}, [theirs, stderr], environ
    )
    os.close(theirs)
    process.stdout = os.fdopen(ours)
    return process


def _present_file() -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return Path(test.partition("::")[0]).name


# ------------------------------------------------------------------------------------------- in the children


def run_program(module: str, flags: list[str]) -> int:
    """Body of a forked `python -m module`: its processes are forks, too."""
    import xllm_hier.launch

    xllm_hier.launch.CHILDREN = _Forks()  # type: ignore[assignment]
    sys.argv = [module, *flags]
    name = f"{module}.__main__" if module == "xllm_hier.service" else module
    return int(importlib.import_module(name).main())


class _Forks:
    """The part of a multiprocessing context that the launcher uses; a child keeps no descriptor but its own pipe."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self.Pipe = self._context.Pipe

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        before = _open_descriptors()  # the fork's own two pipes come after
        keep = {one.fileno() for one in args if isinstance(one, Connection)}
        return self._context.Process(target=_in_fork, args=(before - keep, target, args, kwargs), name=name)


def _in_fork(close: set[int], target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _close(close - {0, 1, 2})
    _reset_signals()
    target(*args, **kwargs)


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _close(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _child(asked: dict[str, Any], fds: list[int]) -> int:
    from xllm_hier.process import die_with_parent

    _reset_signals()
    _close(_open_descriptors() - {0, 1, 2, *fds})
    die_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(asked["environ"])
    arguments = dict(asked["arguments"])
    if len(fds) == 2:
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        _close(set(fds))
    else:
        arguments["fds"] = fds
    module, _, function = asked["target"].partition(":")
    return int(getattr(importlib.import_module(module), function)(**arguments) or 0)


# ------------------------------------------------------------------------------------------- the server


def _take(listener: socket.socket, lines: dict[int, socket.socket]) -> None:
    line, _ = listener.accept()
    size, fds, _, _ = socket.recv_fds(line, 8, 4)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += line.recv(1 << 16)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = _child(json.loads(data), fds)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    _close(set(fds))
    line.sendall(pid.to_bytes(8, "big"))
    lines[pid] = line


def _reap(lines: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            line = lines.pop(ended[0])
            with contextlib.suppress(OSError):
                line.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(8, "big", signed=True))
            line.close()


def serve(address: str) -> None:
    """Fork on demand until stdin is closed or the parent has ended."""
    from xllm_hier.process import die_with_parent

    die_with_parent(os.getppid())
    for module in _PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # children share these objects' pages as long as no collection touches them
    status = Path("/proc/self/status").read_text()
    assert "Threads:\t1\n" in status, "forks of a process with threads may hang"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waker, wakes = socket.socketpair()
    for one in (waker, wakes):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    lines: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([listener, waker, sys.stdin], [], [])
        if waker in readable:
            waker.recv(4096)
            _reap(lines)
        if listener in readable:
            _take(listener, lines)
        if sys.stdin in readable:
            os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.modules["fork_server"] = sys.modules["__main__"]
    serve(sys.argv[1])
