"""A Mooncake Store of the instance's own: one master and one segment on free ports, gone with the instance.

The processes are the wheel's binaries; they die with their parent, write to log files of the run directory, and are
started again on the same ports when they die alone. Objects in memory alone are lost then: misses. With a `Disk` the
client writes every object to a folder as well, within about a second, where the next instance finds them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .config import EngineConfig
from .errors import ConfigError, StartupError
from .machine import take_folder
from .process import die_with_parent

log = logging.getLogger("xllm.launch")

_START_S = 15.0
_STOP_S = 5.0
_TRIES = 3
_RESTART_PAUSE_S = 1.0
_CLIENT_TTL_S = 5
_CATCH_UP_S = 5.0
_HEARTBEAT_S = 1
_WRITE_BUFFER_BYTES, _READ_BUFFER_BYTES = 256 << 20, 64 << 20  # of one bucket, and of a call of each worker


def free_ports(count: int) -> list[int]:
    """`count` distinct TCP ports of 127.0.0.1 that were free a moment ago; where there is room, below those that
    connections are given, so that none takes one of them before its owner does (not even one that tries to reach that
    owner: it may be given the very port it asks for, and then has itself at the other end)."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in [*random.sample(_quiet_ports(), len(_quiet_ports())), *[0] * count]:
            one = stack.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(one.getsockname()[1])
            if len(found) == count:
                break
        return found


def _quiet_ports() -> range:
    """Ports that neither the system nor Mooncake (15000 to 17000) gives away."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32768
    return range(20000, min(lowest, 32768))


def binary(name: str) -> str:
    """Path of a program of the installed Mooncake wheel. Raises ConfigError naming the extra when there is none."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / name
        if path.is_file():
            return str(path)
    extras = "xllm_hier[cpu], xllm_hier[cuda], xllm_hier[npu]"
    raise ConfigError("enable_kvcache_store", True, f"with the Mooncake wheel installed: one of {extras}")


@dataclass(frozen=True)
class Disk:
    """Where an embedded store keeps its objects, in `nbytes` at most; 0 = nine tenths of the disk."""

    folder: str
    nbytes: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> Disk | None:
        """The disk that the settings ask for; None: memory only."""
        if not config.embedded_store_dir:
            return None
        return cls(config.embedded_store_dir, config.embedded_store_disk_size)

    def environment(self, num_workers: int) -> dict[str, str]:
        """The settings of the client, as environment variables.

        A bucket is a file, written when it is full; with one object in each, none waits for others to come. Whatever
        the limit, Mooncake also makes room when less than a bucket's default size (256 MiB) is free on the disk.
        """
        settings = {
            "FILE_STORAGE_PATH": str(Path(self.folder).resolve()),  # it takes no links
            "STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "BUCKET_KEYS_LIMIT": 1,
            "BUCKET_MAX_TOTAL_SIZE": self.nbytes,
            "BUCKET_EVICTION_POLICY": "lru",
            "TOTAL_SIZE_LIMIT_BYTES": 1 << 50,  # once it is reached nothing is ever written again
            "LOCAL_BUFFER_SIZE_BYTES": _WRITE_BUFFER_BYTES + num_workers * _READ_BUFFER_BYTES,
            "HEARTBEAT_INTERVAL_SECONDS": _HEARTBEAT_S,
            "USE_URING": 0,
        }
        return {f"MOONCAKE_OFFLOAD_{name}": str(value) for name, value in settings.items()}

    def discard_torn(self) -> int:
        """Remove buckets that are shorter than they should be, as a loss of power leaves them; returns how many.

        Mooncake would find their objects at each start and fail at each read, and nobody could write them anew.
        """
        torn = 0
        for meta in Path(self.folder).rglob("*.meta"):
            bucket, nbytes = meta.with_suffix(".bucket"), _bucket_bytes(meta.read_bytes())
            if bucket.exists() and bucket.stat().st_size < nbytes:
                meta.unlink()
                bucket.unlink()
                torn += 1
        return torn


def _bucket_bytes(meta: bytes) -> int:
    """Size of a bucket by its metadata, a protobuf message: a varint, the first field. 0 when it is something else."""
    if not meta.startswith(b"\x08"):
        return 0
    value = 0
    for place, byte in enumerate(meta[1:10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value
    return 0


class EmbeddedStore:
    """One `mooncake_master` and one `mooncake_client` with `segment_bytes` of memory; `start` picks the ports."""

    def __init__(
        self,
        run_dir: Path,
        segment_bytes: int,
        num_workers: int = 1,
        log_level: str = "info",
        disk: Disk | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._disk = disk
        self._lock: int | None = None
        self._segment_bytes = segment_bytes
        self._num_workers = num_workers
        self._environment = {**os.environ, "MC_LOG_LEVEL": "INFO" if log_level == "debug" else "WARNING"}
        self._environment.pop("MC_LOG_DIR", None)  # the client aborts with it
        if disk is not None:
            self._environment |= disk.environment(num_workers)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._died_at: dict[str, float] = {}
        self.master_address = ""
        self.client_address = ""

    def start(self) -> None:
        """Bring both up.

        Raises:
            StartupError: they do not come up; with the end of their logs.
            ConfigError: the folder cannot be used, or another instance uses it.
        """
        if self._disk is not None:
            self._lock = take_folder("embedded_store_dir", self._disk.folder)
            if torn := self._disk.discard_torn():
                log.warning("%d files in %s were cut short, and are removed", torn, self._disk.folder)
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
                self._end_children()
                if attempt == _TRIES - 1:
                    self.stop()
                    raise

    def _command(self, which: str) -> list[str]:
        offload = ["--enable_offload=true"] if self._disk is not None else []
        if offload and which == "master":  # writing to the disk takes a lease; until it ends the memory stays taken
            offload.append("--default_kv_lease_ttl=5000")
        if which == "master":
            return [
                binary("mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self._rpc}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics}",
                f"--client_ttl={_CLIENT_TTL_S}",
                *offload,
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
            *offload,
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
        """Start dead children again after a pause, on their old ports; returns their names. Call it now and then."""
        restarted = []
        for which, child in list(self._children.items()):
            if child.poll() is None:
                continue
            died_at = self._died_at.setdefault(which, time.monotonic())
            pause = _RESTART_PAUSE_S
            if which == "client" and self._disk is not None:
                pause += _CLIENT_TTL_S  # its first report from the disk would be forgotten together with its forerunner
            if time.monotonic() - died_at >= pause:
                log.warning("the embedded store's %s ended with code %s: starting it again", which, child.returncode)
                del self._died_at[which]
                self._spawn(which)
                restarted.append(which)
        return restarted

    @property
    def pids(self) -> dict[str, int]:
        return {which: child.pid for which, child in self._children.items()}

    def objects(self) -> tuple[int, int]:
        """How many the store has, and how many of them are on the disk; zeros when the master does not say."""
        text = self._http("/metrics")
        found = [re.search(rf"^{name} (\d+)", text, re.MULTILINE) for name in ("master_key_count", "file_cache_nums_")]
        return int(found[0][1]) if found[0] else 0, int(found[1][1]) if found[1] else 0

    def _catch_up(self) -> None:
        """Wait until the disk has all objects of the memory, but no longer than it makes progress."""
        end = time.monotonic() + _CATCH_UP_S
        on_disk, stalled_at = -1, 0.0
        while (now := time.monotonic()) < end:
            total, written = self.objects()
            if written >= total:
                return
            if written != on_disk:
                on_disk, stalled_at = written, now + 2 * _HEARTBEAT_S
            elif now > stalled_at:
                return  # the missing objects were pushed off the disk, or do not fit
            time.sleep(0.05)
        log.warning("the embedded store ends with %d of %d objects on its disk", *reversed(self.objects()))

    def stop(self) -> None:
        """End both, by force after a while; with a disk once it has all objects, for which it may take 5 s."""
        alive = [child for child in self._children.values() if child.poll() is None]
        if self._disk is not None and len(alive) == 2:
            self._catch_up()
        self._end_children()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_children(self) -> None:
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
