"""Starts, watches and stops the processes of one instance: workers, engine, api, and the embedded store.

Every child dies with its parent (PR_SET_PDEATHSIG, and a watch on the pipe to it), every start has a limit and says
who did not come up and why, and the death of any one ends the instance in order: open requests are answered first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .children import News, run_child
from .config import EngineConfig
from .embedded_store import Disk, EmbeddedStore
from .environment import take_store_endpoints
from .errors import EngineDeadError, StartupError, XllmError
from .figures import EngineInfo
from .wire import Deadline

log = logging.getLogger("xllm.launch")

_GRACE_S = 3.0  # after a death: for the api to answer open requests
_STOP_S = 15.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0  # before a restart
_WATCH_S = 0.2
_RUN_DIR_PREFIX = "xllm-run-"
# libgomp's threads spin for about a millisecond at each barrier by default; beside any other busy process (a copy, the
# store, another service) that makes a forward ten times slower. Short spins cost a few per cent on a quiet machine.
# An installed torch_npu without its drivers breaks `import torch`, which loads it by itself; platform.py asks for it.
_WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

# torch.multiprocessing.get_context is this very function; taking it from here saves the launcher importing torch.
CHILDREN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """`defaults` in the environment that a child inherits, where the user has not set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@dataclasses.dataclass(eq=False)
class _Child:
    name: str
    process: Any
    pipe: Connection
    up: bool = False
    news: News = None


class Instance:
    """All processes of one instance; `api` False leaves out the HTTP server (offline use).

    Between `start` and `stop` the caller either runs `wait` or calls `poll` now and then.
    """

    def __init__(self, config: EngineConfig, *, api: bool = True) -> None:
        self.config = config
        self._with_api = api
        self._children: list[_Child] = []
        self._store: EmbeddedStore | None = None
        self._run_dir: Path | None = None
        self._meeting: Path | None = None  # of the present processes: sockets and files of those before are not seen
        self._starts = 0
        self._endpoints: list[socket.socket] = []
        self._stopping = False  # a plain word: the lock of an event may be held when a signal comes
        self._poll_lock = threading.Lock()

    @property
    def engine_address(self) -> str:
        """Where an EngineClient connects to."""
        return f"ipc://{self._meeting}/api"

    @property
    def port(self) -> int:
        """Port the HTTP server listens on."""
        return next(child.news for child in self._children if isinstance(child.news, int))

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: engine, worker-0, api, master, client."""
        ids = {child.name: int(child.process.pid) for child in self._children}
        return {**ids, **(self._store.pids if self._store else {})}

    @property
    def info(self) -> EngineInfo:
        """The facts of the instance, as its engine told them when it came up."""
        return next(child.news for child in self._children if isinstance(child.news, EngineInfo))

    def start(self) -> None:
        """Bring everything up; returns when the instance serves.

        Raises:
            StartupError: somebody did not come up in time, or failed; nothing is left behind.
            ConfigError: a child found that a setting cannot be used.
        """
        _sweep_run_dirs()
        self._endpoints = take_store_endpoints(self.config)
        self._run_dir = Path(tempfile.mkdtemp(prefix=f"{_RUN_DIR_PREFIX}{os.getpid()}-"))
        try:
            self._start_processes()
        except BaseException:
            self.stop(graceful=False)
            raise

    def restart(self) -> None:
        """End the remaining processes and bring all up again, on the same ports and around the same store.

        Raises:
            StartupError, ConfigError: as `start`; the embedded store then still runs, for another try or for `stop`.
        """
        if self._with_api and any(child.name == "api" and child.up for child in self._children):
            self.config = dataclasses.replace(self.config, port=self.port)
        engine = next((child.news for child in self._children if isinstance(child.news, EngineInfo)), None)
        if engine is not None and engine.pd_address:
            port = int(engine.pd_address.rpartition(":")[2])
            self.config = dataclasses.replace(self.config, disagg_pd_port=port)
        try:
            self._end_processes(graceful=False)
            self._start_processes()
        except BaseException:
            self._end_processes(graceful=False)
            raise

    def _start_processes(self) -> None:
        assert self._run_dir is not None
        deadline = Deadline(self.config.startup_timeout_s)
        self._starts += 1
        self._meeting = self._run_dir / str(self._starts)
        self._meeting.mkdir()
        config = self._start_store()
        for rank in range(config.tp_size):
            self._spawn("worker", config, rank)
        self._spawn("engine", config)
        if self._with_api:
            self._spawn("api", config)
        self._wait_ready(deadline)

    def _start_store(self) -> EngineConfig:
        if not self.config.embedded_store:
            return self.config
        assert self._run_dir is not None
        if self._store is None:
            segment_bytes, level = self.config.store_segment_size, self.config.log_level
            disk = Disk.of(self.config)
            self._store = EmbeddedStore(self._run_dir, segment_bytes, self.config.tp_size, level, disk)
            self._store.start()
        store = self._store
        return dataclasses.replace(
            self.config,
            store_master_server_address=store.master_address,
            store_client_address=store.client_address,
            embedded_store_dir="",  # to its processes the store is one like any other
            embedded_store_disk_size=0,
        )

    def _spawn(self, kind: str, config: EngineConfig, rank: int = 0) -> None:
        ours, theirs = CHILDREN.Pipe()
        main = threading.current_thread() is threading.main_thread()  # the signal fires at that thread's end
        process = CHILDREN.Process(
            target=run_child,
            args=(kind, config, str(self._meeting), rank, theirs),
            kwargs={"parent": os.getpid() if main else 0},
            name=f"xllm-{kind}-{rank}",
        )
        with _environment(_WORKER_ENVIRONMENT if kind == "worker" else {}):
            process.start()
        theirs.close()
        self._children.append(_Child(f"{kind}-{rank}" if kind == "worker" else kind, process, ours))

    def _wait_ready(self, deadline: Deadline) -> None:
        while waiting := [child for child in self._children if not child.up]:
            if self._stopping:
                raise StartupError("stopped while it came up")
            wait([child.pipe for child in waiting], min(_WATCH_S, deadline.remaining()))
            for child in self._children:
                self._take_news(child)
                if not child.process.is_alive():
                    raise StartupError(f"{child.name} ended with code {child.process.exitcode} while it came up")
            if deadline.passed():
                names = ", ".join(child.name for child in waiting)
                raise StartupError(f"{names} did not come up within {self.config.startup_timeout_s:g} s")

    @staticmethod
    def _take_news(child: _Child) -> None:
        try:
            while not child.up and child.pipe.poll():
                what, value = child.pipe.recv()
                if what == "failed":
                    raise value
                child.up, child.news = True, value
        except (EOFError, OSError):
            child.process.join(1.0)

    # ------------------------------------------------------------------------------------------------ life

    def poll(self) -> None:
        """Look after the instance once. Raises EngineDeadError when one of its processes has ended."""
        with self._poll_lock:
            if self._store is not None:
                self._store.restart_dead()
            dead = [child for child in self._children if not child.process.is_alive()]
        if dead:
            raise EngineDeadError(", ".join(f"{child.name} ended with code {child.process.exitcode}" for child in dead))

    def wait(self) -> int:
        """Watch until `request_stop` (returns 0) or until a process dies (returns 1); the caller then stops."""
        while not self._stopping:
            try:
                self.poll()
            except EngineDeadError as error:
                log.error("%s: the instance ends", error)
                self._let_api_answer()
                return 1
            wait([child.process.sentinel for child in self._children], _WATCH_S)
        return 0

    def request_stop(self) -> None:
        """End `wait`, and a `start` under way; safe in a signal handler."""
        self._stopping = True

    def stopping(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for `request_stop`; True when it came."""
        end = Deadline(timeout_s)
        while not self._stopping and not end.passed():
            time.sleep(min(_WATCH_S, end.remaining()))
        return self._stopping

    def _let_api_answer(self) -> None:
        for child in self._children:
            if child.name == "api":
                child.process.join(_GRACE_S)

    def stop(self, *, graceful: bool = True) -> None:
        """End every process: the api first, which drains when `graceful`; by force when one does not end in time."""
        self._stopping = True
        self._end_processes(graceful=graceful)
        if self._store is not None:
            self._store.stop()
            self._store = None
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        for endpoint in self._endpoints:
            endpoint.close()

    def _end_processes(self, *, graceful: bool) -> None:
        with self._poll_lock:
            children, self._children = self._children, []
        api = [child for child in children if child.name == "api"]
        engine = [child for child in children if child.name == "engine"]
        workers = [child for child in children if child.name not in ("api", "engine")]
        self._end(api, self.config.drain_timeout_s + _GRACE_S if graceful else _GRACE_S)
        for group in (engine, workers):
            self._end(group, _STOP_S if graceful else _GRACE_S)

    @staticmethod
    def _end(children: list[_Child], timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        for child in children:
            if child.process.is_alive():
                child.process.terminate()
        for child in children:
            child.process.join(deadline.remaining())
            if child.process.is_alive():
                log.warning("%s did not end in time and is killed", child.name)
                child.process.kill()
                child.process.join()
            child.pipe.close()
            child.process.close()


def _sweep_run_dirs() -> None:
    """Remove run directories of launchers that are gone (a SIGKILL leaves theirs)."""
    for path in Path(tempfile.gettempdir()).glob(f"{_RUN_DIR_PREFIX}*"):
        pid = path.name.removeprefix(_RUN_DIR_PREFIX).partition("-")[0]
        try:
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def run_until_stopped(instance: Instance, announce: Callable[[Instance], None]) -> int:
    """Start, announce, serve until SIGTERM or SIGINT, or until a process dies, stop. Returns the exit code.

    With `restart_on_failure` the instance comes up again after a death, however often.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: instance.request_stop())
    started = time.monotonic()
    instance.start()
    log.info("all processes are up after %.1f s", time.monotonic() - started)
    pause, code = _FIRST_PAUSE_S, 1
    try:
        while True:
            announce(instance)
            started = time.monotonic()
            code = instance.wait()
            if code == 0 or not instance.config.restart_on_failure:
                break
            lived_s = time.monotonic() - started
            pause = _FIRST_PAUSE_S if lived_s > _LONGEST_PAUSE_S else min(2 * pause, _LONGEST_PAUSE_S)
            if not _restarted(instance, pause):
                code = 0
                break
    finally:
        instance.stop(graceful=code == 0)
    return code


def _restarted(instance: Instance, pause: float) -> bool:
    """Try to bring the instance up until it is; False when it is told to stop meanwhile.

    The pauses before the tries grow, so that an instance that cannot come up, or does not live long, does not burn the
    machine.
    """
    while not instance.stopping(pause):
        try:
            instance.restart()
            return True
        except (XllmError, OSError) as error:  # no memory or no processes left, for a while
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            log.error("the instance did not come up again, the next try is in %g s: %s", pause, error)
    return False
