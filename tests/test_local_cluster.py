"""`run.sh cluster`: everything on one machine, found by the service, and gone afterwards."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
from etcd import needs_etcd
from pairs import COMMON, prompt_of
from serving import wait_for, wait_gone
from tiny_models import make

ROOT = Path(__file__).parent.parent
pytestmark = needs_etcd


def test_a_cluster_comes_up_answers_from_its_store_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = make(tmp_path / "llama", "llama")
    command = [sys.executable, "scripts/local_cluster.py", "--instances=2", "--masters=2", "--port=0"]
    command += ["--segment_size=64MB", f"--model={model}", "--restore_policy=always", *COMMON]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("logs in"):
            break
    watchdog.cancel()
    text = "".join(lines)
    found = re.search(r"service listens at (\S+),", text)
    assert found is not None, text
    url = found[1]
    instances = re.findall(r"serves llama at (\S+)", text)
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        assert len(instances) == 2
        wait_for(lambda: len(httpx.get(f"{url}/instances", timeout=60).json()["instances"]) == 2)
        body = {"prompt": prompt_of(1, 96), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert first["usage"]["prompt_tokens"] == 96
        keys = lambda: list(httpx.get(f"{url}/instances", timeout=60).json()["stores"].values())  # noqa: E731
        wait_for(lambda: keys() and keys()[0].get("KV", 0) >= 6, 60)
        for instance in instances:
            httpx.post(f"{instance}/cache/clear", json={"tiers": ["device", "host"]}, timeout=60)
        again = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["store"] >= 80
    finally:
        process.terminate()
        code = process.wait(120)
        process.stdout.close()
    assert code == 0
    wait_gone(children)


def test_a_cluster_whose_instances_cannot_start_says_why_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/local_cluster.py", "--masters=1", "--port=0", f"--model={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "instance-0 did not come up" in done.stderr and "config.json" in done.stderr
