"""The store client, and with `transfer_engine` the only code that touches the Mooncake library: both make its sharp
edges unreachable.

Known of wheel 0.3.13 (measured): calls before a successful setup or after close are segmentation faults, close during
a call is one too; more than 2048 slices in flight to one peer wedge a TCP client for good; rdma without a NIC silently
runs over TCP; `health_check` stays 0 with a dead master; a call to a dead master blocks 4.3 s; a failed setup leaves an
object that must not be used. Put returns 0 for "stored or already there", so only `exist` says readable.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...errors import ConfigError, StoreError
from ...machine import split_address

MAX_KEYS = 256  # per call; two threads at most call at once, far below the 1024 slices a peer can take
_LOCAL_BUFFER = 16 << 20
_CONNECT_S = 1.0
_MISSING = -704
_PROBE_POOL = 1 << 20
_PROBE_LIMIT_S = 5.0
_PROBE = f"""
import json, os, signal, sys
signal.alarm({int(_PROBE_LIMIT_S) + 1})
from mooncake.store import MooncakeDistributedStore
method, arguments = json.loads(sys.argv[1])
store = MooncakeDistributedStore()
os._exit(getattr(store, method)(*arguments) != 0 or store.is_exist("probe") < 0)
"""
_LEFT_OPEN: list[Any] = []  # clients that are never closed; losing the last reference would close them
# Codes of a read that has not touched, and will not touch, its buffer: no such key, not ready, bad arguments.
ENDED_READS = frozenset({_MISSING, -703, -600})


def set_environment(log_level: str, ports: range = range(0)) -> None:
    """Limits and log level of the library; must run before its first import. Values that the user has set stay, but for
    the `ports` that its listeners may take; empty: those it likes."""
    defaults = {
        "MC_LOG_LEVEL": "WARNING" if log_level in ("debug", "info") else "ERROR",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_RPC_TIMEOUT_MS": "5000",
        "MC_TCP_STATUS_TIMEOUT_SEC": "5",
        "MC_TRANSFER_TIMEOUT": "5",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if ports:
        os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = str(ports[0]), str(ports[-1])


def library(name: str, setting: str = "enable_kvcache_store") -> Any:
    """`mooncake.<name>`, which `setting` asks for.

    Raises:
        ConfigError: names the extra, or the system library, that is missing.
    """
    try:
        return importlib.import_module(f"mooncake.{name}")
    except ModuleNotFoundError as error:
        extras = ", ".join(f"xllm_hier[{extra}]" for extra in ("cpu", "cuda", "npu"))
        raise ConfigError(setting, True, f"with the Mooncake wheel installed: one of {extras}") from error
    except ImportError as error:
        what = f"with its system libraries (apt-get install libibverbs1 libcurl4 libnuma1): {error}"
        raise ConfigError(setting, True, what) from error


def reachable(address: str, timeout_s: float = _CONNECT_S) -> bool:
    """Something accepts TCP connections at host:port."""
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s):
            return True
    except OSError:
        return False


class MooncakeClient:
    """One connection to the store: through this node's `mooncake_client` (shared memory) or direct.

    All methods may be called from any thread; after `close`, and before `connect` succeeded, they raise StoreError.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self.through_node = bool(config.store_client_address)
        self._store: Any = None
        self._former: list[Any] = []  # clients set up before: memory they have lent stays mapped
        self._condition = threading.Condition()
        self._calls = 0
        self._closing = False

    # --------------------------------------------------------------------------------------------- life

    def connect(self, pool_bytes: int) -> None:
        """Set up a fresh client, also in place of one; `pool_bytes` is what `allocate` will be asked for in all.

        Raises:
            StoreError: nobody answers, or the library refuses.
        """
        if not self.reachable():
            raise StoreError(f"no store at {self._endpoint()}")
        self._check_rdma()
        store = library("store").MooncakeDistributedStore()
        method, arguments = self._set_up(pool_bytes)
        code = getattr(store, method)(*arguments)
        if code != 0:
            why = f"failed with code {code}{self.hint}"
            raise StoreError(f"set-up of the store client at {self._endpoint()} {why}")
        with self._condition:
            if self._closing:
                self._end(store)
                raise StoreError("the store client is closed")
            if self._store is not None:
                self._former.append(self._store)
            self._store = store

    def _set_up(self, pool_bytes: int) -> tuple[str, list[Any]]:
        """The library's call that sets a client up, and its arguments."""
        config = self._config
        if self.through_node:
            return "setup_dummy", [pool_bytes, _LOCAL_BUFFER, config.store_client_address]
        host, port = split_address(config.store_local_hostname)
        devices = config.store_rdma_devices if config.store_protocol == "rdma" else ""
        addresses = [config.store_protocol, devices, config.store_master_server_address]
        return "setup", [f"{host}:{port + self._rank}", config.store_metadata_server, 0, 0, *addresses]

    def answers(self) -> bool:
        """Whether a set-up would go through; tried by a process that is thrown away.

        A set-up holds the interpreter's lock, and takes 30 s when the other side accepts connections and says nothing:
        in this process that would stop forwards and signs of life.
        """
        call = json.dumps(self._set_up(_PROBE_POOL))
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE, call],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PROBE_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _endpoint(self) -> str:
        return self._config.store_client_address or self._config.store_master_server_address

    @property
    def _follows_leader(self) -> bool:
        """A direct client of one of several masters, which it finds by etcd."""
        return not self.through_node and self._config.store_master_server_address.startswith("etcd://")

    @property
    def hint(self) -> str:
        """A likely reason of a failed set-up beside the obvious ones; empty or the end of a sentence."""
        return " (is MC_STORE_CLUSTER_ID the masters' cluster id, and does one lead?)" if self._follows_leader else ""

    def _check_rdma(self) -> None:
        folder = Path("/sys/class/infiniband")
        if self._config.store_protocol == "rdma" and not (folder.is_dir() and any(folder.iterdir())):
            raise StoreError("rdma was asked for and this machine has no RDMA device; tcp is not taken in its place")

    def reachable(self) -> bool:
        """The process we talk to accepts connections; says nothing of the master behind a node client."""
        master = self._config.store_master_server_address
        if self.through_node:
            return reachable(self._config.store_client_address)
        if master.startswith("etcd://"):
            return any(reachable(part) for part in re.split("[;,]", master.removeprefix("etcd://")))
        return reachable(master)

    @property
    def connected(self) -> bool:
        return self._store is not None and not self._closing

    @contextmanager
    def _call(self) -> Iterator[Any]:
        with self._condition:
            if self._store is None or self._closing:
                raise StoreError("the store client is not connected")
            self._calls += 1
        try:
            yield self._store
        finally:
            with self._condition:
                self._calls -= 1
                self._condition.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Disconnect once no call is under way; False when one still is after `timeout_s`: the process must then end
        by `os._exit`, since closing under a call is a segmentation fault."""
        with self._condition:
            self._closing = True
            if not self._condition.wait_for(lambda: self._calls == 0, timeout_s):
                return False
            store, self._store = self._store, None
        for former in [*self._former, *([] if store is None else [store])]:
            self._end(former)
        return True

    def _end(self, store: Any) -> None:
        """Close a client, but for a direct one that follows a leader: it takes 15 to 30 s under the interpreter's lock,
        to close as to lose it. Such a one goes with the process; it owns nothing that others would wait for."""
        if self._follows_leader:
            _LEFT_OPEN.append(store)
        else:
            store.close()

    # ------------------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int) -> int:
        """Address of `nbytes` of memory shared with the node's client and registered; stays mapped for good."""
        with self._call() as store:
            address = int(store.alloc_from_mem_pool(nbytes))
            if not address:
                raise StoreError(f"the store client's pool cannot give {nbytes} bytes")
            if store.register_buffer(address, nbytes) != 0:
                raise StoreError(f"the store client does not register its own {nbytes} bytes")
            return address

    def register(self, address: int, nbytes: int) -> None:
        """Make own memory usable in `get` and `put` of a direct client."""
        with self._call() as store:
            code = store.register_buffer(address, nbytes)
        if code != 0:
            raise StoreError(f"registering {nbytes} bytes with the store client failed with code {code}")

    # --------------------------------------------------------------------------------------------- calls

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are readable now; takes a lease on them. Raises StoreError when the store does not answer."""
        found: list[bool] = []
        for start in range(0, len(keys), MAX_KEYS):
            part = list(keys[start : start + MAX_KEYS])
            with self._call() as store:
                codes = list(store.batch_is_exist(part))
            if len(codes) != len(part) or any(code < 0 for code in codes):
                raise StoreError(f"the store does not list its objects: code {min(codes, default=None)}")
            found.extend(code == 1 for code in codes)
        return found

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Bytes read into each address, negative for an error of that key (missing, lease ended, owner gone...)."""
        codes: list[int] = []
        for start in range(0, len(keys), MAX_KEYS):
            end = start + MAX_KEYS
            part = list(keys[start:end])
            with self._call() as store:
                answer = list(store.batch_get_into(part, list(addresses[start:end]), list(sizes[start:end])))
            codes.extend(answer if len(answer) == len(part) else [_MISSING] * len(part))
        return codes

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], groups: Sequence[str]
    ) -> list[int]:
        """0 = stored or there already, negative = error, per key. Objects of one of `groups` live and go together."""
        codes: list[int] = []
        for start in range(0, len(keys), MAX_KEYS):
            end = start + MAX_KEYS
            part = list(keys[start:end])
            replicate = library("store").ReplicateConfig()
            replicate.group_ids = list(groups[start:end])
            with self._call() as store:
                answer = list(store.batch_put_from(part, list(addresses[start:end]), list(sizes[start:end]), replicate))
            codes.extend(answer if len(answer) == len(part) else [-1] * len(part))
        return codes

    def remove(self, key: str) -> None:
        """Remove one key, leased or not; one that is not there is no error. Raises StoreError otherwise."""
        with self._call() as store:
            code = int(store.remove(key, True))
        if code not in (0, _MISSING):
            raise StoreError(f"removing a key failed with code {code}")

    def remove_matching(self, regex: str) -> int:
        """Remove every key that `regex` matches, leased or not; returns how many."""
        with self._call() as store:
            count = int(store.remove_by_regex(regex, True))
        if count < 0:
            raise StoreError(f"removing keys failed with code {count}")
        return count
