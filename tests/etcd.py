"""A real etcd for tests, on ports of its own, that can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import wait_for

from xllm_hier.embedded_store import free_ports
from xllm_hier.process import die_with_parent
from xllm_hier.registry import Etcd

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (apt: etcd-server)")


class EtcdServer:
    """One etcd, whose data stay in `folder` while it is down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._peer_port = free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        parent, url, peer = os.getpid(), f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "etcd.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    "etcd",
                    "--name=e0",
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={url}",
                    f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=e0={peer}",
                ],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(parent),
            )
        wait_for(self._healthy)

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return bool(httpx.get(f"http://{self.address}/health", timeout=1.0).json().get("health") == "true")
        return False

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def client(self, name_space: str = "") -> Etcd:
        """For tests that read and write themselves; it waits for longer than processes do."""
        return Etcd(self.address, name_space, timeout_s=30.0)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One call of the JSON gateway, for what tests do by hand."""
        answer = httpx.post(f"http://{self.address}/v3/{path}", json=body, timeout=60.0)
        answer.raise_for_status()
        return dict(answer.json())


@contextlib.contextmanager
def running_etcd(folder: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(folder)
    try:
        yield server
    finally:
        server.stop()
