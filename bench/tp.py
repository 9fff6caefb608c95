"""run.sh bench tp: what tensor parallel ranks cost and share.

Three tables: what a decode step costs beside the model, with 1, 2 and 4 ranks of a tiny model; bytes per tier of one
prompt, for keys and values, which are split, and for latents, of which one copy serves all ranks; and the time to the
first token with 2 ranks of one thread against 1 rank of two, both instances up, prompts in turn.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .bench_model import SHAPE, bench_model, latent_model
from .serving import arguments, random_prompt, serving, show

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 16}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4}
TIERS = {"enable_kvcache_store": True, "host_blocks_factor": 2.0, "store_segment_size": 1 << 30}
STREAMS, TOKENS = 16, 128


def step_overhead(tp_size: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of a decode step of STREAMS sequences, and of it what the model did not take (medians)."""
    steps, besides = [], []
    with serving(bench_model(**TINY), tp_size=tp_size, max_cache_size=64 << 20) as client:
        for repetition in range(repetitions + 1):
            before = client.stats()
            start = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
                prompts = [random_prompt((repetition, n), 32, TINY["vocab_size"]) for n in range(STREAMS)]
                list(pool.map(lambda prompt: client.ask(prompt, TOKENS), prompts))
            elapsed = time.perf_counter() - start
            after = client.stats()
            if repetition:  # the first one touches caches and pages
                count = after["steps"] - before["steps"]
                steps.append(elapsed / count * 1e3)
                besides.append((elapsed - (after["compute_s"] - before["compute_s"])) / count * 1e3)
    return {"step_ms": statistics.median(steps), "besides_ms": statistics.median(besides)}


def bytes_per_tier(folder: Path, tp_size: int, vocabulary: int) -> dict[str, Any]:
    """Bytes one prompt of 1,024 tokens moves, and what a host block takes on this node."""
    prompt = random_prompt(folder, 1024, vocabulary)
    with serving(folder, tp_size=tp_size, max_cache_size=32 << 20, **TIERS) as client:
        client.ask(prompt)
        client.settle()
        client.clear("device", "host")
        if client.ask(prompt).tiers["store"] < 1000:
            raise RuntimeError("the store did not serve the prompt")
        client.settle()
        info = client.instance.info
        moved = client.stats()["transfer_bytes"]
        return {**moved, "host_block": info.tier_bytes["host"] / info.num_host_blocks}


def first_token(length: int, repetitions: int) -> dict[str, float]:
    """Median seconds to the first token of a cold prompt with 1 and with 2 ranks on the same cores."""
    times: dict[int, list[float]] = {1: [], 2: []}
    folder, threads = bench_model(), max(2, len(os.sched_getaffinity(0)))
    settings = {"max_cache_size": 256 << 20, "enable_prefix_cache": False}
    with (
        serving(folder, tp_size=1, num_threads=threads, **settings) as one,
        serving(folder, tp_size=2, num_threads=threads // 2, **settings) as two,
    ):
        for repetition in range(repetitions + 1):
            prompt = random_prompt((length, repetition), length, SHAPE["vocab_size"])
            for tp_size, client in ((1, one), (2, two)):
                elapsed = client.ask(prompt).ttft_s
                if repetition:
                    times[tp_size].append(elapsed)
    return {f"tp{size}": statistics.median(found) for size, found in times.items()}


def main() -> int:
    options = arguments(__doc__ or "")
    sizes, repetitions = ((1, 2), 1) if options.quick else ((1, 2, 4), 5)
    overhead = {size: step_overhead(size, repetitions) for size in sizes}
    show(
        f"decode step of {STREAMS} sequences, tiny model, median of {repetitions}",
        ["ranks", "step", "beside the model"],
        [[str(size), f"{o['step_ms']:.2f} ms", f"{o['besides_ms']:.2f} ms"] for size, o in overhead.items()],
    )
    kinds = {"keys and values": (bench_model(**TINY), TINY["vocab_size"]), "latents": (latent_model(), 1024)}
    moved = {
        kind: {size: bytes_per_tier(folder, size, vocabulary) for size in sizes}
        for kind, (folder, vocabulary) in kinds.items()
    }
    columns = ["host_block", "d2h", "h2g", "g2h", "h2d"]
    show(
        "bytes of one prompt of 1,024 tokens, all ranks together, in KiB",
        ["cache", "ranks", "a host block", "d2h", "h2g", "g2h", "h2d"],
        [
            [kind, str(size), *(f"{found[column] / 1024:.0f}" for column in columns)]
            for kind, by_size in moved.items()
            for size, found in by_size.items()
        ],
    )
    lengths = (512,) if options.quick else (512, 2048)
    prefill = {length: first_token(length, repetitions) for length in lengths}
    show(
        f"cold time to first token, median of {repetitions}",
        ["prompt", "1 rank", "2 ranks", "2 ranks / 1 rank"],
        [
            [str(n), f"{t['tp1'] * 1e3:.0f} ms", f"{t['tp2'] * 1e3:.0f} ms", f"{t['tp2'] / t['tp1']:.2f}"]
            for n, t in prefill.items()
        ],
    )
    if options.json:
        print(json.dumps({"bench": "tp", "steps": overhead, "bytes": moved, "ttft_s": prefill}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
