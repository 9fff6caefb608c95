"""run.sh bench engine_step: what the deciding side costs per step, without any model: 64 sequences x 256 blocks.

Schedules a decode step of all sequences, packs its plan as it goes over the wire, and takes the answer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from xllm_hier import wire
from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.settings import BookSettings
from xllm_hier.engine.steps.scheduler import Scheduler
from xllm_hier.figures import TypeSizes
from xllm_hier.ints import ints
from xllm_hier.plans import ForwardOutput
from xllm_hier.request_messages import AddRequest, SamplingSpec

from .serving import arguments, show

SEQUENCES, BLOCKS, BLOCK_SIZE = 64, 256, 32


class NoWorkers:
    """Takes plans and does nothing."""

    num_workers = 1

    def broadcast(self, message: Any) -> None:
        wire.pack(message)


def answer(step_id: int, count: int) -> ForwardOutput:
    return ForwardOutput(step_id, 0, ints([5] * count), [None] * count, [], [], 0.0, 0.0)


def main() -> int:
    options = arguments(__doc__ or "")
    manager = HierarchyBlockManagerPool(
        NoWorkers(), [TypeSizes("KV", 0, SEQUENCES * (BLOCKS + 8), 0, 1)], BookSettings(BLOCK_SIZE)
    )
    tokens = SEQUENCES * BLOCKS * BLOCK_SIZE
    scheduler = Scheduler(manager, max_tokens=tokens, max_seqs=SEQUENCES, chunk_tokens=tokens)
    for number in range(SEQUENCES):
        prompt = [number] * (BLOCKS * BLOCK_SIZE)
        scheduler.add_request(AddRequest(f"r{number}", ints(prompt), SamplingSpec(), 10_000, ignore_eos=True))
    times: dict[str, list[float]] = {"schedule": [], "pack": [], "unpack": [], "finish": []}
    for number in range(20 if options.quick else 200):
        moments = [time.perf_counter()]
        step = scheduler.schedule()
        moments.append(time.perf_counter())
        assert step is not None
        data = wire.pack(step.plan)
        moments.append(time.perf_counter())
        wire.unpack(data)
        moments.append(time.perf_counter())
        scheduler.finish(step, answer(step.plan.step_id, len(step.prefill) + len(step.decode)))
        scheduler.take_outputs()
        moments.append(time.perf_counter())
        if number:  # the first step is the prefill of all
            for name, start, end in zip(times, moments, moments[1:], strict=False):
                times[name].append(end - start)
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    rows = [[name, f"{value:.3f} ms"] for name, value in (*medians.items(), ("all", sum(medians.values())))]
    show(f"one decode step of {SEQUENCES} sequences x {BLOCKS} blocks, median", ["part", "time"], rows)
    if options.json:
        print(json.dumps({"bench": "engine_step", "ms": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
