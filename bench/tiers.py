"""run.sh bench tiers: time to first token of a prompt computed cold and served from each tier.

Each repetition takes a fresh random prompt through all four states in turn, so that the ratios come from one run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from .bench_model import SHAPE, bench_model
from .serving import Client, arguments, memory_of, random_prompt, serving, show

STATES = ("cold", "device", "host", "store")


def measure(client: Client, length: int, repetition: int) -> dict[str, float]:
    """Seconds to the first token in each state; fails if the tier named is not the one that paid."""
    prompt = random_prompt((length, repetition), length, SHAPE["vocab_size"])
    times, tokens = {}, set()
    for state, forget in zip(STATES, ((), (), ("device",), ("device", "host")), strict=True):
        client.settle()
        if forget:
            client.clear(*forget)
        answer = client.ask(prompt)
        times[state] = answer.ttft_s
        tokens.add(answer.token_ids)
        paid = max(answer.tiers, key=lambda tier: answer.tiers[tier]) if any(answer.tiers.values()) else "cold"
        if paid != state:
            raise RuntimeError(f"{state} was served from {answer.tiers}")
    if len(tokens) != 1:
        raise RuntimeError(f"the tiers do not agree: {tokens}")
    return times


def main() -> int:
    options = arguments(__doc__ or "")
    lengths = (512, 2048) if options.quick else (512, 2048, 8192)
    repetitions = 1 if options.quick else 5
    folder = bench_model()
    start = time.perf_counter()
    settings = {
        "enable_kvcache_store": True,
        "host_blocks_factor": 2.0,
        "max_cache_size": 512 << 20,
        "store_segment_size": 2 << 30,
    }
    with serving(folder, **settings) as client:
        start_s = time.perf_counter() - start
        measure(client, 512, -1)  # first touch of caches, threads and pages
        results: dict[int, dict[str, float]] = {}
        for length in lengths:
            runs = [measure(client, length, repetition) for repetition in range(repetitions)]
            results[length] = {state: statistics.median(run[state] for run in runs) for state in STATES}
        memory = memory_of(client.instance.pids)
        details = client.instance.info.details
    rows = []
    for length, times in results.items():
        rows.append(
            [f"{length}", *(f"{times[s] * 1000:.0f} ms" for s in STATES)]
            + [f"{times[s] / times['cold'] * 100:.0f} %" for s in STATES[1:]]
        )
    columns = ["prompt", *STATES, "device/cold", "host/cold", "store/cold"]
    show(f"time to first token, median of {repetitions}, {details.dtype}", columns, rows)
    show(
        f"memory after the run; up after {start_s:.1f} s",
        ["process", "RSS MiB", "PSS MiB"],
        [[name, f"{m['rss_mib']:.0f}", f"{m['pss_mib']:.0f}"] for name, m in memory.items()],
    )
    if options.json:
        print(json.dumps({"bench": "tiers", "ttft_s": results, "start_s": start_s, "memory": memory}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
