"""A Mooncake Store of the instance's own: one master and one segment on free ports, gone with the instance.

The processes are the wheel's binaries; they die with their parent, write to log files of the run directory, and are
started again on the same ports when they die alone (what they held is lost: misses).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from .errors import ConfigError, StartupError

log = logging.getLogger("xllm.launch")

_START_S = 15.0
_STOP_S = 5.0
_TRIES = 3
_RESTART_PAUSE_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PRCTL = ctypes.CDLL(None).prctl  # looked up here: between fork and exec nothing may allocate


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; in the child, before it execs."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_process_name(name: str) -> None:
    """What `ps` and `top` show of this process (the kernel keeps 15 characters)."""
    _PRCTL(_PR_SET_NAME, name.encode(), 0, 0, 0)


def free_ports(count: int) -> list[int]:
    """`count` distinct TCP ports of 127.0.0.1 that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def binary(name: str) -> str:
    """Path of a program of the installed Mooncake wheel. Raises ConfigError naming the extra when there is none."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / name
        if path.is_file():
            return str(path)
    extras = "xllm_hier[cpu], xllm_hier[cuda], xllm_hier[npu]"
    raise ConfigError("enable_kvcache_store", True, f"with the Mooncake wheel installed: one of {extras}")


class EmbeddedStore:
    """One `mooncake_master` and one `mooncake_client` with `segment_bytes` of memory; `start` picks the ports."""

    def __init__(self, run_dir: Path, segment_bytes: int, num_workers: int = 1, log_level: str = "info") -> None:
        self._run_dir = run_dir
        self._segment_bytes = segment_bytes
        self._num_workers = num_workers
        self._environment = {**os.environ, "MC_LOG_LEVEL": "INFO" if log_level == "debug" else "WARNING"}
        self._environment.pop("MC_LOG_DIR", None)  # the client aborts with it
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._died_at: dict[str, float] = {}
        self.master_address = ""
        self.client_address = ""

    def start(self) -> None:
        """Bring both up. Raises StartupError when they do not come up, with the end of their logs."""
        for attempt in range(_TRIES):
            self._rpc, self._metrics, self._client, self._endpoint = free_ports(4)
            self.master_address = f"127.0.0.1:{self._rpc}"
            self.client_address = f"127.0.0.1:{self._client}"
            try:
                self._spawn("master")
                self._wait_until(self._master_serves, "mooncake_master")
                self._spawn("client")
                self._wait_until(self._segment_mounted, "mooncake_client")
                return
            except StartupError:
                self.stop()
                if attempt == _TRIES - 1:
                    raise

    def _command(self, which: str) -> list[str]:
        if which == "master":
            return [
                binary("mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self._rpc}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics}",
                "--client_ttl=5",
            ]
        return [
            binary("mooncake_client"),
            f"--host=127.0.0.1:{self._endpoint}",
            f"--port={self._client}",
            f"--global_segment_size={self._segment_bytes}",
            f"--master_server_address={self.master_address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--threads={self._num_workers + 1}",
        ]

    def _spawn(self, which: str) -> None:
        parent = os.getpid()

        def prepare() -> None:
            os.setsid()
            die_with_parent(parent)

        with open(self._run_dir / f"mooncake_{which}.log", "ab") as logfile:
            self._children[which] = subprocess.Popen(
                self._command(which),
                stdin=subprocess.DEVNULL,
                stdout=logfile,
                stderr=logfile,
                env=self._environment,
                preexec_fn=prepare,  # noqa: PLW1509 - only system calls in there
            )

    def _wait_until(self, ready: object, name: str) -> None:
        assert callable(ready)
        end = time.monotonic() + _START_S
        while not ready():
            dead = [which for which, child in self._children.items() if child.poll() is not None]
            if dead or time.monotonic() > end:
                why = f"{', '.join(dead)} ended" if dead else f"not ready after {_START_S:g} s"
                raise StartupError(f"the embedded store's {name} did not come up: {why}\n{self.log_tail()}")
            time.sleep(0.02)

    def _http(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}{path}", timeout=1.0) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def _master_serves(self) -> bool:
        return '"service_ready":true' in self._http("/health").replace(" ", "")

    def _segment_mounted(self) -> bool:
        return bool(self._http("/get_all_segments").strip())

    def log_tail(self) -> str:
        """The last lines of both logs, for error texts."""
        lines = []
        for which in self._children:
            path = self._run_dir / f"mooncake_{which}.log"
            if path.exists():
                lines += path.read_text(errors="replace").splitlines()[-5:]
        return "\n".join(lines)

    def restart_dead(self) -> list[str]:
        """Start what has died a moment ago again, on its old ports; returns their names. Call now and then."""
        restarted = []
        for which, child in list(self._children.items()):
            if child.poll() is None:
                continue
            died_at = self._died_at.setdefault(which, time.monotonic())
            if time.monotonic() - died_at >= _RESTART_PAUSE_S:
                log.warning("the embedded store's %s ended with code %s: starting it again", which, child.returncode)
                del self._died_at[which]
                self._spawn(which)
                restarted.append(which)
        return restarted

    @property
    def pids(self) -> dict[str, int]:
        return {which: child.pid for which, child in self._children.items()}

    def stop(self) -> None:
        """End both, by force after a while."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
