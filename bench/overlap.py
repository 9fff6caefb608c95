"""run.sh bench overlap: how much of a restore hides behind the forward that needs it.

A prefix is restored from the host while a suffix is computed, the forward waiting layer group by layer group, with the
copy held to several rates. exposed = (t_with_restore - t_compute) / t_copy; with n groups the first group's copy,
1/n of it, cannot be hidden. Compute, copy and both alternate in one run; medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from .bench_model import bench_model
from .serving import arguments, random_prompt, show

PREFIX, SUFFIX, BLOCK_SIZE = 4096, 256, 32


def measure(threads: int, repetitions: int, rates: list[float], groups: list[int]) -> list[dict[str, float]]:
    """Rows of figures for one number of torch threads, which is fixed for the life of a process."""
    import torch

    from xllm_hier.block import BlockType, CacheRole
    from xllm_hier.config import EngineConfig
    from xllm_hier.host_memory import HostMemory
    from xllm_hier.ints import ints
    from xllm_hier.plans import BlockMapping, Forward, SequenceRows
    from xllm_hier.request_messages import SamplingSpec
    from xllm_hier.worker.compute.model_runner import ModelRunner
    from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
    from xllm_hier.worker.tiers.layer_copy import NativeCopier
    from xllm_hier.worker.tiers.layered_wait import LoadWaiter, layer_groups

    model = str(bench_model(vocab_size=32768))
    runner = ModelRunner(EngineConfig(model=model, block_size=BLOCK_SIZE, num_threads=threads), progress=False)
    layout = runner.layout.of(BlockType.KV)
    blocks = (PREFIX + SUFFIX) // BLOCK_SIZE
    caches = allocate_device_cache(layout, blocks, torch.device("cpu"))
    for cache in caches:
        cache.normal_()
    runner.bind_cache(caches)
    domain = CacheDomain(CacheRole.TARGET, "main", runner.layout)
    memory = HostMemory.create(blocks * layout.object_bytes)
    host = torch.from_numpy(memory.array).view(blocks, layout.object_bytes)
    domain.caches[BlockType.KV] = BlockCache(layout, [as_bytes(cache) for cache in caches], host)
    copier = NativeCopier("cpu", threads=1, device=0, stream=lambda: None)
    copier.attach([domain], [memory])
    restored = ints(range(PREFIX // BLOCK_SIZE))
    mapping = BlockMapping(BlockType.KV.value, restored, restored, b"")
    copier.offload([(domain, mapping)])(60)
    tokens = ints(random_prompt("overlap", SUFFIX, 32768))
    row = SequenceRows(PREFIX, tokens, ints(range(blocks)), PREFIX, SamplingSpec())
    plan = Forward(0, [], [row], [])
    next_batch = iter(range(10**9))

    def load(count: int) -> LoadWaiter:
        spans = layer_groups(len(caches), count)
        return LoadWaiter([copier.load(next(next_batch), [(domain, mapping)], spans)], 120)

    def both(count: int) -> None:
        waiter = load(count)
        runner.forward(plan, waiter)
        assert waiter.finish() == []

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def compute() -> object:
        return runner.forward(plan, lambda layer: None)

    for _ in range(2):
        both(4)
    rows = []
    nbytes = len(restored) * layout.payload_bytes
    for rate in rates:
        copier._copier.bytes_per_second = rate
        for count in groups:
            runs = [
                (
                    timed(compute),
                    timed(lambda count=count: load(count).finish()),
                    timed(lambda count=count: both(count)),
                )
                for _ in range(repetitions)
            ]
            t_compute, t_copy, t_both = (statistics.median(column) for column in zip(*runs, strict=True))
            rows.append(
                {
                    "threads": threads,
                    "rate_gb_s": nbytes / t_copy / 1e9,
                    "groups": len(layer_groups(len(caches), count)),
                    "compute_s": t_compute,
                    "copy_s": t_copy,
                    "both_s": t_both,
                    "exposed": (t_both - t_compute) / t_copy,
                }
            )
    return rows


def main() -> int:
    options = arguments(__doc__ or "", threads={"type": int, "default": 0, "help": "torch threads; 0 = all in turn"})
    repetitions = 3 if options.quick else 9
    rates = [0.0, 1e9] if options.quick else [0.0, 2e9, 1e9, 0.5e9]
    groups = [0, 4] if options.quick else [0, 2, 4, 12]
    if options.threads:
        print(json.dumps(measure(options.threads, repetitions, rates, groups)))
        return 0
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, float]] = []
    for threads in sorted({max(1, cores - 1), cores}):
        command = [sys.executable, "-m", "bench.overlap", f"--threads={threads}"]
        command += ["--quick"] if options.quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
        rows += json.loads(done.stdout.splitlines()[-1])
    table = [
        [
            f"{row['threads']} of {cores}",
            f"{row['rate_gb_s']:.1f}",
            f"{row['groups']}",
            f"{row['compute_s'] * 1000:.0f}",
            f"{row['copy_s'] * 1000:.0f}",
            f"{row['both_s'] * 1000:.0f}",
            f"{row['exposed'] * 100:.0f} %",
            f"{100 / row['groups']:.0f} %",
        ]
        for row in rows
    ]
    columns = ["torch threads", "GB/s", "groups", "compute ms", "copy ms", "both ms", "exposed", "first group"]
    show(f"{PREFIX} tokens restored beside {SUFFIX} computed, medians of {repetitions}", columns, table)
    if options.json:
        print(json.dumps({"bench": "overlap", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
