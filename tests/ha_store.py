"""A highly available Mooncake Store for tests: a real etcd, several masters with a replicated log, several clients."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from etcd import EtcdServer, running_etcd
from serving import wait_for

from xllm_hier.embedded_store import binary, free_ports
from xllm_hier.process import die_with_parent

CLUSTER_ID = "xllm-test"
CLIENT_TTL_S = 30  # as in scripts/kvcache_store
START_S = 90.0


def spawn(command: list[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """A process that dies with this one and writes to `log`."""
    parent = os.getpid()
    with open(log, "ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "MC_LOG_LEVEL": "WARNING", **environ},
            preexec_fn=lambda: die_with_parent(parent),
        )


@dataclass
class Master:
    """One `mooncake_master` that stands for election; its ports stay the same when it is started again."""

    number: int
    command: list[str]
    http: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = spawn(self.command, self.log)

    def ask(self, path: str) -> str:
        """Text of an HTTP route; empty when it does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.http + path, timeout=1.0).text
        return ""

    @property
    def serves(self) -> bool:
        """It leads, and its warm-up is over."""
        return '"service_ready":true' in self.ask("/health").replace(" ", "")

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None


class HaStore:
    """Made by `running_ha_store`."""

    def __init__(self, folder: Path, etcd: EtcdServer, masters: int, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self.etcd = etcd
        self.cluster_id = CLUSTER_ID
        self.masters = [self._master(number) for number in range(masters)]
        self.clients: list[subprocess.Popen[bytes]] = []
        self._client_ports: list[tuple[int, int]] = []

    @property
    def etcd_address(self) -> str:
        """What an instance takes as the master's address."""
        return f"etcd://{self.etcd.address}"

    @property
    def environ(self) -> dict[str, str]:
        """What an instance needs in its environment."""
        return {"MC_STORE_CLUSTER_ID": self.cluster_id}

    @property
    def client_address(self) -> str:
        return f"127.0.0.1:{self._client_ports[0][0]}"

    def flags(self, *, direct: bool = False) -> list[str]:
        """Of an instance that uses this store; two direct ones at a time need other endpoints."""
        common = ["--enable_kvcache_store=true", "--host_blocks_factor=3"]
        common.append(f"--store_master_server_address={self.etcd_address}")
        own = f"--store_local_hostname=127.0.0.1:{free_ports(1)[0]}"
        return [*common, own if direct else f"--store_client_address={self.client_address}"]

    def _master(self, number: int) -> Master:
        rpc, http = free_ports(2)
        command = [binary("mooncake_master"), "--enable_ha=true", "--ha_backend_type=etcd", "--enable_oplog=true"]
        command += [f"--ha_backend_connstring={self.etcd.address}", f"--cluster_id={self.cluster_id}"]
        command += ["--rpc_address=127.0.0.1", f"--rpc_port={rpc}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={http}", f"--client_ttl={CLIENT_TTL_S}"]
        return Master(number, command, f"http://127.0.0.1:{http}", self._folder / f"master{number}.log")

    def start_masters(self) -> None:
        for master in self.masters:
            if master.process is None:
                master.start()

    def start_client(self) -> None:
        """One more `mooncake_client` with a segment; a leader must serve, or it ends at once."""
        number, (port, endpoint) = len(self.clients), free_ports(2)
        self._client_ports.append((port, endpoint))
        command = [binary("mooncake_client"), f"--host=127.0.0.1:{endpoint}", f"--port={port}"]
        command += [f"--global_segment_size={self._segment_bytes}", f"--master_server_address={self.etcd_address}"]
        command += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--threads=3"]
        mounted = self.segments()
        self.clients.append(spawn(command, self._folder / f"client{number}.log", **self.environ))
        wait_for(lambda: self.segments() > mounted, START_S)

    def leader(self) -> Master | None:
        """The master that serves, if one does now."""
        return next((master for master in self.masters if master.process is not None and master.serves), None)

    def wait_leader(self, timeout_s: float = START_S) -> Master:
        found = wait_for(self.leader, timeout_s, 0.1)
        assert isinstance(found, Master)
        return found

    def kill_leader(self) -> Master:
        """SIGKILL the master that serves; it stays down until `start_masters`."""
        victim = self.wait_leader()
        victim.kill()
        return victim

    @contextlib.contextmanager
    def stopped_leader(self) -> Iterator[Master]:
        """The leader stands still, and goes on afterwards."""
        victim = self.wait_leader()
        victim.send(signal.SIGSTOP)
        try:
            yield victim
        finally:
            victim.send(signal.SIGCONT)

    def keys(self) -> set[str]:
        """Every key whose object the leader would let one read; empty without a leader.

        Mooncake lists those as well of which a put was begun and broke off: nobody loses them.
        """
        if (leader := self.leader()) is None:
            return set()
        with httpx.Client(base_url=leader.http, timeout=2.0) as http, contextlib.suppress(httpx.HTTPError):
            listed = http.get("/get_all_keys").text.split()
            return {key for key in listed if http.get(f"/query_key?key={key}").is_success}
        return set()

    def segments(self) -> int:
        leader = self.leader()
        return len(leader.ask("/get_all_segments").split()) if leader is not None else 0

    def stop(self) -> None:
        for master in self.masters:
            master.kill()
        for client in self.clients:
            client.kill()
            client.wait(60)


@contextlib.contextmanager
def running_ha_store(
    folder: Path, masters: int = 2, clients: int = 1, segment_bytes: int = 128 << 20
) -> Iterator[HaStore]:
    """etcd, `masters` candidates of which one serves, and `clients` with a segment each, all of the test's own."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_etcd(folder / "etcd") as etcd:
        store = HaStore(folder, etcd, masters, segment_bytes)
        try:
            store.start_masters()
            store.wait_leader()
            for _ in range(clients):
                store.start_client()
            yield store
        finally:
            store.stop()
