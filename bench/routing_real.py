"""The parts of `run.sh bench routing` with real processes: a trace through the service, and what the service costs.

1. Two instances of a small model over a real etcd and a real store answer a slice of a trace through the service, some
   requests at a time in the order of the trace, in turn (RR) and where they cost least (CAR).
2. What the service adds to a request, against the same instance asked directly, in turns; and how much of a core one
   request takes there, in front of a stand-in that answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from scripts.local_cluster import Processes, start_etcd, start_instance, start_service
from xllm_hier.embedded_store import EmbeddedStore, free_ports
from xllm_hier.registry import Etcd, InstanceInfo, Membership

from .bench_model import bench_model
from .routing_simulated import END_OF_TOKENS, Request
from .serving import random_prompt, show

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": END_OF_TOKENS}
BLOCK = 16
BLOCK_BYTES = BLOCK * 4 * 2 * 2 * 64 * 2  # layers, key and value, heads, head size, bfloat16
DEVICE_BLOCKS, HOST_FACTOR = 192, 4
AT_A_TIME = 4
MOST_APART = 0.03
LIMIT_S = 600.0


@contextlib.contextmanager
def cluster(store: bool, policy: str) -> Iterator[tuple[str, list[str], Processes]]:
    """Address of the service and of its two instances."""
    with tempfile.TemporaryDirectory(prefix="xllm-bench-") as folder, contextlib.ExitStack() as stack:
        processes = Processes(Path(folder))
        stack.callback(processes.stop)
        etcd = start_etcd(processes)
        flags = [f"--model={bench_model(**SHAPE)}", f"--block_size={BLOCK}", "--num_threads=1", "--log_level=warning"]
        flags += [f"--max_cache_size={DEVICE_BLOCKS * BLOCK_BYTES}", f"--host_blocks_factor={HOST_FACTOR}"]
        flags += ["--restore_policy=always", "--etcd_ttl=5", "--max_tokens_per_batch=512", "--max_model_len=2600"]
        if store:
            shared = EmbeddedStore(Path(folder), 1 << 30, num_workers=2)
            shared.start()
            stack.callback(shared.stop)
            flags += ["--enable_kvcache_store=true", f"--store_master_server_address={shared.master_address}"]
            flags += [f"--store_client_address={shared.client_address}"]
        urls = [start_instance(processes, f"instance-{number}", etcd, flags) for number in range(2)]
        yield start_service(processes, "service-0", etcd, [f"--load_balance_policy={policy}"]), urls, processes


def wait_known(service: str, count: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = httpx.get(f"{service}/instances").json()["instances"]
        if len(found) == count and all(one["load"] for one in found):
            return
        time.sleep(0.1)
    raise RuntimeError("the service does not find its instances")


def replay(service: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Hits by tier, as shares of all prompt tokens, when AT_A_TIME requests are open at a time."""
    with httpx.Client(base_url=service, timeout=LIMIT_S, limits=httpx.Limits(max_connections=AT_A_TIME)) as client:

        def ask(request: Request) -> tuple[dict[str, int], int]:
            body = {"prompt": request.tokens, "max_tokens": request.max_tokens, "ignore_eos": True, "temperature": 0}
            usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens_by_tier"], usage["prompt_tokens"]

        started = time.perf_counter()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            answers = list(pool.map(ask, requests))
        seconds = time.perf_counter() - started
    paid: Counter[str] = Counter()
    for tiers, _ in answers:
        paid.update(tiers)
    total = sum(length for _, length in answers)
    found = httpx.get(f"{service}/metrics").text.splitlines()
    counts = [float(line.split()[-1]) for line in found if line.startswith("xllm_service_answers_total")]
    return {tier: paid[tier] / total for tier in ("device", "host", "store")} | {
        "hit": paid.total() / total,
        "seconds": seconds,
        "spread_of_requests": max(counts) / statistics.mean(counts),
    }


def traces(slices: dict[str, Sequence[Request]], reference: dict[tuple[str, int, str], tuple[float, ...]]) -> Any:
    """Each slice through two real instances, RR and CAR, without and with a store."""
    rows, results = [], []
    for name, requests in slices.items():
        for store in (False, True):
            for policy in ("RR", "CAR"):
                with cluster(store, policy) as (service, _, _):
                    wait_known(service, 2)
                    got = replay(service, requests)
                table = reference[name, 2, policy][2 if store else 1]
                cells = [f"{name} {policy}{' with store' if store else ''}"]
                cells += [f"{got[tier]:.3f}" for tier in ("device", "host", "store", "hit")]
                rows.append([*cells, f"{table:.3f}", f"{got['seconds']:.0f} s", f"{got['spread_of_requests']:.2f}"])
                results.append({"slice": name, "policy": policy, "with_store": store, "reference": table, **got})
    columns = ["slice, policy", "device", "host", "store", "all", "reference", "took", "spread"]
    show(f"two real instances, {AT_A_TIME} requests at a time: share of the prompts' tokens hit", columns, rows)
    worst = max(abs(one["hit"] - one["reference"]) for one in results)
    verdict = "PASS" if worst <= MOST_APART else "FAIL"
    show("", ["demand", "at worst", ""], [["real instances and reference at most 0.03 apart", f"{worst:.3f}", verdict]])
    return results


# ------------------------------------------------------------------------------------------ what the service costs


def added_latency(pairs: int) -> Any:
    """Time to the whole answer of one token, directly and through the service, taking turns."""
    rows, results = [], []
    with cluster(False, "CAR") as (service, urls, _):
        wait_known(service, 2)
        for length in (16, 2048):
            prompt = random_prompt(length, length, SHAPE["vocab_size"])
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            with httpx.Client(timeout=LIMIT_S) as client:

                def ask(url: str, client: httpx.Client = client, body: dict[str, Any] = body) -> float:
                    started = time.perf_counter()
                    client.post(f"{url}/v1/completions", json=body).raise_for_status()
                    return (time.perf_counter() - started) * 1000

                for _ in range(10):
                    for url in (service, *urls):
                        ask(url)
                times = [(ask(urls[0]), ask(service)) for _ in range(pairs)]
            direct, through = (statistics.median(column) for column in zip(*times, strict=True))
            added = statistics.median(b - a for a, b in times)
            rows.append([f"{length} tokens", f"{direct:.1f} ms", f"{through:.1f} ms", f"{added:.1f} ms"])
            results.append({"prompt_tokens": length, "direct_ms": direct, "service_ms": through, "added_ms": added})
    show("a hit, one token: directly and through the service, medians", ["prompt", "direct", "service", "added"], rows)
    return results


def stand_in(etcd: str) -> None:
    """An instance that answers every completion at once; runs until it is killed."""
    from aiohttp import web

    (port,) = free_ports(1)
    name = f"127.0.0.1:{port}"
    answer = json.dumps({"id": "x", "object": "text_completion", "choices": [{"text": " a"}], "usage": {}}).encode()

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    info = InstanceInfo(
        name=name, rpc_address=name, incarnation_id="stand-in", register_ts_ms=1, type=0,
        model="stand-in", block_size=BLOCK, max_model_len=4096, types=[["KV", 0]],
    )  # fmt: skip
    membership = Membership(Etcd(etcd), 5, {info.key: info.to_json()})
    membership.start()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def _load(url: str, body: dict[str, Any], count: int, at_a_time: int) -> float:
    """Requests a second."""
    import aiohttp

    left = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for _ in left:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_a_time)))
        return count / (time.perf_counter() - started)


def throughput(count: int) -> Any:
    """Requests a second through the service, and what one takes of a core there."""
    rows, results = [], []
    with tempfile.TemporaryDirectory(prefix="xllm-bench-") as folder:
        processes = Processes(Path(folder))
        try:
            etcd = start_etcd(processes)
            for number in range(2):
                processes.start(f"stand-in-{number}", [sys.executable, "-m", "bench.routing_real", etcd])
            service = start_service(processes, "service-0", etcd, ["--load_balance_policy=CAR"])
            end = time.monotonic() + 60
            while len(httpx.get(f"{service}/instances").json()["instances"]) < 2 and time.monotonic() < end:
                time.sleep(0.1)
            process = psutil.Process(processes.pids["service-0"])
            for length in (16, 2048):
                body = {"prompt": random_prompt(length, length, 8192), "max_tokens": 1}
                asyncio.run(_load(service, body, count // 10, 32))
                before = sum(process.cpu_times()[:2])
                rate = asyncio.run(_load(service, body, count, 32))
                cpu_ms = (sum(process.cpu_times()[:2]) - before) / count * 1000
                rows.append([f"{length} tokens", f"{rate:.0f}", f"{cpu_ms:.2f} ms", f"{1000 / cpu_ms:.0f}"])
                results.append({"prompt_tokens": length, "requests_per_s": rate, "cpu_ms": cpu_ms})
        finally:
            processes.stop()
    columns = ["prompt", "requests/s, all on two cores", "of a core for each", "so a core gives, requests/s"]
    show("the service before stand-ins that answer at once, 32 requests at a time", columns, rows)
    return results


if __name__ == "__main__":
    stand_in(sys.argv[1])
