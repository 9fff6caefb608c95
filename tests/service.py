"""The service as users start it, over a real etcd, and instances that register there."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from etcd import EtcdServer, running_etcd
from fork_server import start_program
from openai import OpenAI
from pairs import COMMON
from serving import START_S, Answer, Server, wait_for

FAST = ["--etcd_ttl=2", "--heart_beat_interval=0.2"]


class Service:
    """One replica in a process of its own; `stop` or the context manager ends it."""

    def __init__(self, etcd: EtcdServer, *flags: str, environ: dict[str, str] | None = None) -> None:
        command = [f"--etcd_addr={etcd.address}", "--etcd_ttl=2"]
        command += ["--http_server_port=0", "--rpc_server_port=0", "--heart_beat_timeout_s=1", *flags]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        self.process = start_program("xllm_hier.service", command, self._log.fileno(), environ)
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        found = re.search(r"listens at (http://\S+), rpc port (\d+)", self.process.stdout.readline())
        watchdog.cancel()
        assert found is not None, f"the service did not come up:\n{self.log()[-3000:]}"
        self.url, self.rpc_port = found[1], int(found[2])
        self.client = self.new_client()

    def new_client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120)

    def log(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def ask(self, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Answer:
        """One greedy completion with the log probabilities of its tokens."""
        body = {"return_token_ids": True, "ignore_eos": True}
        got = self.client.completions.create(
            model="", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=3, extra_body=body, **more
        )
        return Answer.of(got.choices[0].model_dump(), got.usage.model_dump())

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in httpx.get(f"{self.url}/instances", timeout=60).json()["instances"]}

    def stores(self) -> dict[str, dict[str, Any]]:
        return dict(httpx.get(f"{self.url}/instances", timeout=60).json()["stores"])

    def metric(self, name: str) -> float:
        """The sum of all lines of one metric."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def wait_known(self, *servers: Server) -> None:
        """Until all of these, and no others, are scheduled and their caches are known exactly."""
        names = {name_of(server) for server in servers}

        def known() -> bool:
            found = self.instances()
            return set(found) == names and all(
                one["state"] == "ACTIVE" and one["index"]["state"] in ("exact", "stale") and one["load"]
                for one in found.values()
            )

        wait_for(known)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._log.closed:
            self.stop()


def name_of(server: Server) -> str:
    """The name under which an instance registers."""
    return server.url.removeprefix("http://")


def instance(model: Path, etcd: EtcdServer, *flags: str, port: int = 0) -> Server:
    """An instance that registers; its tiers are small, so that what is kept and what goes can be reckoned."""
    return Server(model, *COMMON, *FAST, f"--etcd_addr={etcd.address}", *flags, *([f"--port={port}"] if port else []))


@contextlib.contextmanager
def running_cluster(folder: Path, model: Path, count: int, *flags: str) -> Iterator[tuple[EtcdServer, list[Server]]]:
    """An etcd and `count` instances that are registered there."""
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(folder / "etcd"))
        servers = [stack.enter_context(instance(model, etcd, *flags)) for _ in range(count)]
        yield etcd, servers
