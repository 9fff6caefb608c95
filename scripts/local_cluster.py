"""A whole cluster on this machine: etcd, masters and a client of a highly available store, instances, the service.

    bash run.sh cluster --instances 2 --masters 2 [--services 1] [flags of the instances]

For trying it out and for seeing what happens when a process is killed. All ports are free ones but those of the
service; everything ends with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from xllm_hier.embedded_store import binary, free_ports
from xllm_hier.process import die_with_parent

CLUSTER_ID = "xllm-mooncake"
_START_S, _STOP_S = 300.0, 60.0


class Processes:
    """The processes of the cluster, each with a log file in `folder`; the last started is the first to be stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], **environ: str) -> None:
        parent = os.getpid()
        with open(self.folder / f"{name}.log", "ab") as log:
            self._all[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
                start_new_session=True,  # Ctrl-C is for this process, which stops the others in order
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - only system calls in there
            )

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Until it is ready. Raises SystemExit with the end of its log when it ends before, or takes too long."""
        end = time.monotonic() + _START_S
        while not ready():
            if self._all[name].poll() is not None or time.monotonic() > end:
                tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"cluster: {name} did not come up\n{tail}")
            time.sleep(0.1)

    def says(self, name: str, text: str) -> str:
        """The line of its log that contains `text`; empty when there is none yet."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return next((line for line in lines if text in line), "")

    def ended(self) -> list[str]:
        """Names of those that have ended since the last call."""
        gone = [name for name, process in self._all.items() if process.poll() is not None]
        for name in gone:
            del self._all[name]
        return gone

    def stop(self) -> None:
        for process in reversed(self._all.values()):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
            process.wait()

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._all.items()}


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def start_etcd(processes: Processes) -> str:
    """Address of an etcd."""
    port, peer = free_ports(2)
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = ["etcd", "--name=e0", f"--data-dir={processes.folder / 'etcd'}", f"--listen-client-urls={url}"]
    command += [f"--advertise-client-urls={url}", f"--listen-peer-urls={peer_url}"]
    command += [f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=e0={peer_url}"]
    processes.start("etcd", command)
    processes.wait("etcd", lambda: '"health":"true"' in _get(f"{url}/health"))
    return f"127.0.0.1:{port}"


def start_store(processes: Processes, etcd: str, masters: int, segment: str) -> tuple[list[str], str]:
    """HTTP addresses of the masters, and the address of the client."""
    metrics = []
    for number in range(masters):
        rpc, http = free_ports(2)
        command = [binary("mooncake_master"), "--enable_ha=true", "--ha_backend_type=etcd", "--enable_oplog=true"]
        command += [f"--ha_backend_connstring={etcd}", f"--cluster_id={CLUSTER_ID}", "--rpc_address=127.0.0.1"]
        command += [f"--rpc_port={rpc}", "--metrics_host=127.0.0.1", f"--metrics_port={http}", "--client_ttl=30"]
        processes.start(f"master-{number}", command, MC_LOG_LEVEL="WARNING")
        metrics.append(f"127.0.0.1:{http}")
    processes.wait("master-0", lambda: any('"service_ready":true' in _get(f"http://{one}/health") for one in metrics))
    port, endpoint = free_ports(2)
    command = [binary("mooncake_client"), f"--host=127.0.0.1:{endpoint}", f"--port={port}", "--protocol=tcp"]
    command += [f"--global_segment_size={segment}", f"--master_server_address=etcd://{etcd}"]
    command += ["--metadata_server=P2PHANDSHAKE", "--threads=4"]
    processes.start("client", command, MC_STORE_CLUSTER_ID=CLUSTER_ID, MC_LOG_LEVEL="WARNING")
    processes.wait("client", lambda: any(_get(f"http://{one}/get_all_segments").strip() for one in metrics))
    return metrics, f"127.0.0.1:{port}"


def start_instance(processes: Processes, name: str, etcd: str, flags: list[str]) -> str:
    """URL of an instance that registers."""
    command = [sys.executable, "-m", "xllm_hier.serve", f"--etcd_addr={etcd}", "--port=0", *flags]
    processes.start(name, command, MC_STORE_CLUSTER_ID=CLUSTER_ID)
    processes.wait(name, lambda: bool(processes.says(name, " at http://")))
    return processes.says(name, " at http://").split()[-1]


def start_service(processes: Processes, name: str, etcd: str, flags: list[str], ports: tuple[int, int] = (0, 0)) -> str:
    """URL of a replica of the service."""
    command = [sys.executable, "-m", "xllm_hier.service", f"--etcd_addr={etcd}", *flags]
    processes.start(name, [*command, f"--http_server_port={ports[0]}", f"--rpc_server_port={ports[1]}"])
    processes.wait(name, lambda: bool(processes.says(name, "listens at")))
    return processes.says(name, "listens at").split("listens at ")[1].split(",")[0]


def _start_all(processes: Processes, args: argparse.Namespace, flags: list[str]) -> None:
    etcd = start_etcd(processes)
    metrics, client = start_store(processes, etcd, args.masters, args.segment_size)
    print(f"etcd {etcd}, masters' HTTP {', '.join(metrics)}, store client {client}", flush=True)
    common = ["--enable_kvcache_store=true", "--host_blocks_factor=2"]
    common += [f"--store_master_server_address=etcd://{etcd}", f"--store_client_address={client}"]
    names = [f"instance-{number}" for number in range(args.instances)]
    for name in names:  # one after the other: the demo model is unpacked once
        start_instance(processes, name, etcd, [*common, *flags])
        print(f"{name}: {processes.says(name, ' at http://')}", flush=True)
    for number in range(args.services):
        name, ports = f"service-{number}", [args.port + 2 * number, args.port + 2 * number + 1] if args.port else [0, 0]
        more = [f"--store_metrics_address={','.join(metrics)}", f"--load_balance_policy={args.policy}"]
        more += [f"--tokenizer_path={args.tokenizer_path}"] if args.tokenizer_path else []
        start_service(processes, name, etcd, more, (ports[0], ports[1]))
        print(f"{name}: {processes.says(name, 'listens at')}", flush=True)
    print(f"logs in {processes.folder}; pids {processes.pids}; Ctrl-C ends all", flush=True)


def main() -> int:
    """Runs until SIGTERM or Ctrl-C; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--masters", type=int, default=2)
    parser.add_argument("--services", type=int, default=1)
    parser.add_argument("--port", type=int, default=8888, help="of the first service; 0 = free ones")
    parser.add_argument("--policy", default="CAR", help="load_balance_policy of the service")
    parser.add_argument("--segment_size", default="1GB", help="memory of the store")
    parser.add_argument("--tokenizer_path", default="", help="of the service; without it and --model, the demo model's")
    args, flags = parser.parse_known_args()
    if not args.tokenizer_path and not any(flag.startswith("--model") for flag in flags):
        from xllm_hier.models.demo import demo_model_folder

        args.tokenizer_path = str(demo_model_folder())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="xllm-cluster-") as folder:
        processes = Processes(Path(folder))
        try:
            _start_all(processes, args, flags)
            while not stop.wait(0.5):
                for name in processes.ended():
                    print(f"{name} has ended", flush=True)
        finally:
            processes.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
