"""One decision, many ranks: a step is done when all ranks computed the same one; else the engine says which did not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from xllm_hier.block import BlockType
from xllm_hier.calls import Ping, WorkerCall, WorkerResult
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.pool import BlockPool
from xllm_hier.engine.core import AWAY_S, EngineCore, api_address
from xllm_hier.engine.remote_worker import RemoteWorkers, answer_address, plan_address
from xllm_hier.errors import EngineDeadError
from xllm_hier.figures import TypeSizes, WorkerReady, WorkerState
from xllm_hier.ints import ints
from xllm_hier.plans import (
    BlockMapping,
    Forward,
    ForwardOutput,
    OffloadCopied,
    SequenceRows,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.wire import Channel
from xllm_hier.worker.compute.plan_digest import PlanDigest

LIMIT_S = 2.5  # more than AWAY_S: who stands still for less is in time


class Bench:
    """An engine and two ranks played by the test; `answers_pings` says which of them show signs of life."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.workers = RemoteWorkers(self.context, str(folder), 2, LIMIT_S)
        self.engine_api = Channel(self.context, api_address(str(folder)), bind=True)
        self.api = Channel(self.context, api_address(str(folder)), bind=False)
        self.plans = [Channel(self.context, plan_address(str(folder), rank), bind=False) for rank in range(2)]
        self.answers = [Channel(self.context, answer_address(str(folder), rank), bind=False) for rank in range(2)]
        self.answers_pings = {0, 1}
        self.collectives = {0: 5, 1: 5}
        self._stop = threading.Event()
        ready = [WorkerReady(rank, [TypeSizes("KV", 0, 8, 0, 64)], 4, 100, 50, [2]) for rank in range(2)]
        for rank in (1, 0):
            self.answers[rank].send(ready[rank])
        assert [answer.rank for answer in self.workers.wait_ready(60)] == [0, 1]
        config = EngineConfig(model="tiny", tp_size=2, worker_timeout_s=LIMIT_S)
        self.core = EngineCore(config, self.engine_api, self.workers, ready)
        self._thread = threading.Thread(target=self._pong)
        self._thread.start()

    def _pong(self) -> None:
        while not self._stop.is_set():
            for rank, channel in enumerate(self.plans):
                message = channel.receive(0.02)
                if (
                    isinstance(message, WorkerCall)
                    and isinstance(message.question, Ping)
                    and rank in self.answers_pings
                ):
                    state = WorkerState("step 7", self.collectives[rank])
                    self.answers[rank].send(WorkerResult(message.call_id, rank, state))

    def output(self, rank: int, *, step: int = 7, view: str = "all alike", error: str | None = None) -> None:
        batches = [rank + 3]  # each rank's load failed for a batch of its own
        self.answers[rank].send(ForwardOutput(step, rank, ints([9 - rank]), [None], [], batches, 0.1, 0.0, error, view))

    def step(self) -> ForwardOutput:
        return self.core._await_forward(7)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.workers.close()
        for channel in (self.engine_api, self.api, *self.plans, *self.answers):
            channel.close()
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_step_is_done_when_every_rank_says_so_in_any_order_and_all_failed_loads_count(bench: Bench) -> None:
    bench.output(1)
    late = threading.Timer(0.3, bench.output, [0])
    late.start()
    output = bench.step()
    late.join()
    assert output.rank == 0 and output.token_ids.tolist() == [9] and output.failed_batches == [3, 4]


def test_ranks_that_computed_from_different_plans_end_the_instance_with_both_views(bench: Bench) -> None:
    bench.output(0, view="step 7: 3 prompts")
    bench.output(1, view="step 7: 2 prompts")
    with pytest.raises(EngineDeadError, match="worker 0 saw step 7: 3 prompts; worker 1 saw step 7: 2 prompts"):
        bench.step()


def test_a_forward_that_failed_alike_on_all_ranks_fails_its_step_only(bench: Bench) -> None:
    bench.output(0, error="no memory")
    bench.output(1, error="no memory")
    assert bench.step().error == "no memory"


def test_a_rank_that_failed_alone_leaves_the_others_in_a_collective_and_ends_the_instance(bench: Bench) -> None:
    bench.output(1, error="no memory")
    with pytest.raises(EngineDeadError, match=r"worker 0 did not end it \(worker 1: no memory\)"):
        bench.step()


def test_an_answer_to_another_step_ends_the_instance(bench: Bench) -> None:
    bench.output(0)
    bench.output(1, step=6)
    with pytest.raises(EngineDeadError, match="another step than 7"):
        bench.step()


def test_of_two_silent_ranks_the_one_without_a_sign_of_life_is_named(bench: Bench) -> None:
    bench.answers_pings = {0}
    with pytest.raises(EngineDeadError, match=r"^worker 1 stopped or hangs: no answer within 2\.5 s"):
        bench.step()


def test_of_two_silent_ranks_that_live_the_one_with_fewer_collectives_is_named(bench: Bench) -> None:
    bench.collectives = {0: 6, 1: 5}
    with pytest.raises(EngineDeadError, match=r"^worker 1 lags behind .*0: 6, 1: 5\): no answer within 2\.5 s"):
        bench.step()


def test_a_rank_that_shows_no_sign_of_life_is_found_when_nothing_is_asked_of_it(bench: Bench) -> None:
    bench.answers_pings = {1}
    end = time.monotonic() + 20 * LIMIT_S
    with pytest.raises(EngineDeadError, match=r"^worker 0 stopped or hangs: no sign of life for 2\.5 s"):
        while time.monotonic() < end:
            bench.core.receive(0.05)


def test_ranks_that_live_are_left_alone_however_long_nothing_happens(bench: Bench) -> None:
    end = time.monotonic() + 3 * LIMIT_S
    while time.monotonic() < end:
        bench.core.receive(0.05)


def test_a_copy_that_does_not_end_is_blamed_on_the_rank_that_does_not_answer(bench: Bench) -> None:
    pool = bench.core.manager.pools.first.device
    (block,) = pool.allocate(1) or [0]
    bench.core.manager.pools[BlockType.KV].host = BlockPool(4)
    bench.core.manager.write_back.queue(BlockType.KV, block, bytes(16), bytes(16), None, put=False)
    bench.core.manager.transfer_offload_blocks()
    (transfer_id,) = bench.core.manager.write_back._offloads
    bench.answers[0].send(OffloadCopied(transfer_id, 0, 1))
    end = time.monotonic() + 20 * LIMIT_S
    with pytest.raises(EngineDeadError, match=r"^worker 1: a write-back's copy took longer than 2\.5 s"):
        while time.monotonic() < end:
            bench.core.receive(0.05)


def test_an_engine_that_was_stopped_itself_blames_nobody(bench: Bench) -> None:
    """Both ranks have answered long ago; then one has not, and gets the whole limit once more."""
    bench.output(0)
    bench.output(1)
    real, steps = bench.core.receive, iter([AWAY_S + LIMIT_S])

    def away(timeout_s: float) -> None:
        time.sleep(next(steps, 0.0))
        real(timeout_s)

    bench.core.receive = away  # type: ignore[method-assign]
    assert bench.step().token_ids.tolist() == [9]
    late = threading.Timer(AWAY_S + 1.5 * LIMIT_S, bench.output, [0])
    late.start()
    bench.output(1)
    steps = iter([AWAY_S + LIMIT_S])
    assert bench.step().token_ids.tolist() == [9]
    late.join()


def test_views_that_differ_because_ranks_failed_tell_their_errors(bench: Bench) -> None:
    bench.output(0, view="5 collectives", error="no memory")
    bench.output(1, view="6 collectives", error="no memory")
    with pytest.raises(EngineDeadError, match="worker 0 saw 5 collectives and failed: no memory"):
        bench.step()


def mapping(device: int = 1, host: int = 2) -> BlockMapping:
    return BlockMapping("KV", ints([device]), ints([host]), bytes(16))


def forward(**changes: Any) -> Forward:
    row = {"start": 4, "token_ids": ints([5, 6]), "block_table": ints([1, 3]), "write_from": 4} | changes
    return Forward(1, [9], [SequenceRows(**row)], [SequenceRows(3, ints([8]), ints([2]))])


DIFFERENCES: dict[str, Callable[[], list[Any]]] = {
    "another token": lambda: [forward(token_ids=ints([5, 7]))],
    "another block": lambda: [forward(block_table=ints([1, 2]))],
    "another start": lambda: [forward(start=5)],
    "another first slot to write": lambda: [forward(write_from=5)],
    "a load more": lambda: [TransferBlocks(9, [mapping()]), forward()],
    "a write-back before it": lambda: [TransferKvBlocks(9, [mapping()]), forward()],
    "a load for another host block": lambda: [TransferBlocks(9, [mapping(host=3)]), forward()],
    "tokens that moved to the block table": lambda: [forward(token_ids=ints([5]), block_table=ints([6, 1, 3]))],
}


def view_of(plans: list[Any]) -> str:
    digest = PlanDigest()
    for plan in plans:
        digest.add(plan)
    return digest.view(plans[-1], [9], 12)


def test_the_view_of_a_step_tells_all_that_a_cache_depends_on_and_nothing_else() -> None:
    views = {name: view_of(plans()) for name, plans in DIFFERENCES.items()}
    views["nothing"] = view_of([forward()])
    assert len(set(views.values())) == len(views), views
    assert view_of([forward()]) == views["nothing"]
    assert views["nothing"].startswith(
        "step 1: 1 prompts with 2 tokens, 1 generating, loads [9], 12 collectives, 1 plan"
    )
