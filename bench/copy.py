"""run.sh bench copy: scattered blocks by the cpu copier's streaming stores, by memcpy and by torch indexing.

The three alternate in one run; GB/s of payload and ratios of the medians. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from xllm_hier._native import Copier, Table

from .serving import arguments, show

Way = Callable[[], object]


def arena(nbytes: int) -> np.ndarray:
    """Populated memory with huge pages where the system grants them."""
    mapping = mmap.mmap(-1, nbytes)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = 1
    return array


def native(copier: Copier, table: Table, device: np.ndarray, host: np.ndarray, owners: object) -> Way:
    """One transfer, from submit to the end of its wait."""

    def way() -> None:
        copier.submit("load", [(table, device, host)], [(0, 1)], owners=owners).wait_all(60)

    return way


def ways(source: np.ndarray, target: np.ndarray, piece: int, threads: int, rng: np.random.Generator) -> dict[str, Way]:
    """Each way to copy half of the blocks of `source` to other places in `target`."""
    blocks = len(source) // piece
    count = blocks // 2
    from_ids, to_ids = rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]
    found: dict[str, Way] = {}
    for method in ("streaming", "memcpy"):
        copier = Copier("cpu", threads=threads, method=method)
        copier.register_region(source.ctypes.data, source.nbytes, kind="host", owner=source)
        copier.register_region(target.ctypes.data, target.nbytes, kind="device", owner=target)
        table = copier.table(
            [target.ctypes.data],
            device_stride=piece,
            device_blocks=blocks,
            host_base=source.ctypes.data,
            host_stride=piece,
            host_blocks=blocks,
            piece_bytes=piece,
        )
        found[method] = native(copier, table, to_ids, from_ids, (source, target))
    torch_source, torch_target = (torch.from_numpy(array).view(blocks, piece) for array in (source, target))
    torch_from, torch_to = torch.from_numpy(from_ids), torch.from_numpy(to_ids)
    between = torch.empty(count, piece, dtype=torch.uint8)

    def indexing() -> None:
        torch.index_select(torch_source, 0, torch_from, out=between)
        torch_target.index_copy_(0, torch_to, between)

    found["torch"] = indexing
    return found


def measure(source: np.ndarray, target: np.ndarray, piece: int, threads: int, rounds: int) -> dict[str, float]:
    """Median GB/s of each way, taken in turns."""
    torch.set_num_threads(threads)
    candidates = ways(source, target, piece, threads, np.random.default_rng(0))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):  # the first warms up
        for name, way in candidates.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    nbytes = len(source) // piece // 2 * piece
    return {name: nbytes / statistics.median(taken[1:]) / 1e9 for name, taken in seconds.items()}


def main() -> int:
    options = arguments(__doc__ or "")
    mebibytes, rounds = (128, 3) if options.quick else (512, 9)
    source, target = (arena(mebibytes << 20) for _ in range(2))
    results, rows = [], []
    for piece in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20):
        for threads in (1, 2):
            rate = measure(source, target, piece, threads, rounds)
            results.append({"block_bytes": piece, "threads": threads, **rate})
            rows.append(
                [
                    f"{piece >> 10} KiB",
                    f"{threads}",
                    *(f"{rate[name]:.1f}" for name in ("streaming", "memcpy", "torch")),
                ]
                + [f"{rate['streaming'] / rate[name]:.2f}" for name in ("memcpy", "torch")]
            )
    columns = ["block", "threads", "streaming GB/s", "memcpy", "torch", "streaming/memcpy", "streaming/torch"]
    show(f"scattered blocks of {mebibytes} MiB arenas, medians of {rounds}", columns, rows)
    if options.json:
        print(json.dumps({"bench": "copy", "rows": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
