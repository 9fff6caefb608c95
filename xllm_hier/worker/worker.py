"""The worker process: takes plans in order, runs forwards, and answers while its other threads move blocks.

The receiving thread hands store reads on at once. Loads, forwards and write-backs must keep their order: they go
through one queue to the main thread, which alone computes.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zmq
from tqdm import tqdm

from ..block import BlockType
from ..calls import (
    ClearStore,
    GetWorkerStats,
    Ping,
    Stop,
    StoreCleared,
    StoreState,
    SwitchStore,
    WorkerCall,
    WorkerResult,
)
from ..config import EngineConfig
from ..errors import XllmError
from ..figures import DraftDetails, WorkerReady, WorkerState, WorkerStats
from ..ints import Ints, ints
from ..models.parallel import TensorParallel
from ..plans import (
    BlocksCompared,
    CompareBlocks,
    Forward,
    ForwardOutput,
    LinkPeer,
    PrefetchFromStorage,
    ProbeStorage,
    PullBlocks,
    TransferAck,
    TransferBlocks,
    TransferKvBlocks,
    UnlinkPeer,
)
from ..store_key import MAIN
from ..wire import Channel
from .caches import WorkerCaches
from .compute.block_compare import compare_blocks
from .compute.model_runner import ModelOutput, ModelRunner
from .compute.plan_digest import PlanDigest
from .compute.speculation import DraftModel
from .peers.pd_transfer import PdTransfer
from .peers.push import Pushes
from .peers.transfer_engine import transfer_ports
from .platform import Platform
from .store.mooncake_client import set_environment
from .tiers.kv_cache_transfer import HierarchyKVCacheTransfer
from .tiers.layered_wait import LoadWaiter
from .transfer_stats import KINDS, PD_KINDS, TransferStats

log = logging.getLogger("xllm.worker")

POLL_S = 0.2
STUCK_EXIT_CODE = 3
_PATIENCE_S = 30.0


class Worker:
    """One rank: model runner, transfers, and the two channels to the engine."""

    def __init__(
        self, config: EngineConfig, parallel: TensorParallel, plans: Channel, answers: Channel, meeting: Path
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.rank = rank = parallel.rank
        self._plans = plans
        self._answers = answers
        self._answer_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.stats = TransferStats((*KINDS, *PD_KINDS) if config.enable_disagg_pd else KINDS)
        self.platform = Platform.choose(config, rank)
        self.runner = ModelRunner(config, progress=rank == 0, platform=self.platform, parallel=parallel)
        self.draft = DraftModel.load(config, self.runner, progress=rank == 0)
        runners = {MAIN: self.runner} | ({self.draft.component: self.draft.runner} if self.draft else {})
        self._caches = WorkerCaches(config, runners, self.platform, parallel)
        identities = {MAIN: self.runner.identity}
        if self.draft is not None:
            identities[self.draft.component] = self.draft.identity
        self.transfer = HierarchyKVCacheTransfer(
            config,
            rank,
            self.stats,
            self.answer,
            numerics_id=self.runner.details.numerics_id if rank == 0 else "",  # one mark per instance
            identities=identities,
            copier=self.platform.copier(config),
            meeting=meeting,
        )
        for domain in self._caches.domains:
            self.transfer.register(domain)
        self.transfer.build(self._caches.num_host_blocks)
        self.pd: PdTransfer | None = None
        if config.enable_disagg_pd:
            domains = self._caches.domains
            self.pd = PdTransfer(config, rank, domains, self.platform, stats=self.stats, answer=self.answer)
        self._digest = PlanDigest()
        self._doing = "nothing"
        self._receiver = threading.Thread(target=self._receive, name="plans", daemon=True)

    def answer(self, message: Any) -> None:
        """Send to the engine; a socket may change threads under a lock."""
        with self._answer_lock:
            self._answers.send(message)

    # ------------------------------------------------------------------------------------------------ loops

    def run(self) -> None:
        """Announce readiness and compute until the engine says stop or is gone."""
        self.answer(self._ready())
        self._receiver.start()
        while not self._stop.is_set():
            try:
                plan = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            self._execute(plan)

    def _ready(self) -> WorkerReady:
        runner, caches = self.runner, self._caches
        return WorkerReady(
            rank=self.rank,
            types=caches.sizes,
            block_size=runner.facts.block_size,
            max_model_len=runner.facts.max_model_len,
            vocab_size=runner.facts.vocab_size,
            eos_token_ids=list(runner.facts.eos_token_ids),
            model=runner.details,
            draft=self._draft_details(),
            strides={kind.value: tokens for kind, tokens in caches.strides.items()},
            store_keys=caches.store_keys(self.rank),
            store_state=self.transfer.store_state,
            host_bytes=self.transfer.host_bytes,
            identity=runner.identity.text if self.pd is not None else "",
            endpoint=self.pd.endpoint if self.pd is not None else None,
        )

    def _draft_details(self) -> DraftDetails | None:
        if self.draft is None:
            return None
        blocks = self.draft.runner.layout.blocks
        return DraftDetails(
            self.draft.component,
            [block.block_type.value for block in blocks],
            needs_hidden=self.draft.is_head and len(blocks) == 1,
            identity=self.draft.identity.text if self.pd is not None else "",
            model=self.draft.runner.details,
        )

    def stop(self) -> None:
        """End `run` soon; safe in a signal handler."""
        self._stop.set()

    def close(self) -> bool:
        """End all transfers after `run`; False when a library is stuck in a call (the process then ends at once)."""
        ended = all([self.transfer.close(), self.pd is None or self.pd.close()])
        if ended:
            self._receiver.join(2 * POLL_S)
        return ended

    def _receive(self) -> None:
        while not self._stop.is_set():
            message = self._plans.receive(POLL_S)
            self.transfer.watch_store()
            if self.pd is not None:
                self.pd.watch()
            if message is None:
                if self._plans.peer_gone():
                    log.info("the engine is gone: stopping")
                    self._stop.set()
            elif isinstance(message, PrefetchFromStorage):
                self.transfer.prefetch(message)
            elif isinstance(message, ProbeStorage):
                self.transfer.probe(message)
            elif isinstance(message, WorkerCall):
                self._on_call(message)
            elif self.pd is not None and isinstance(message, (LinkPeer, UnlinkPeer, PullBlocks)):
                self._on_peer(self.pd, message)
            else:
                self._queue.put(message)

    @staticmethod
    def _on_peer(pd: PdTransfer, message: LinkPeer | UnlinkPeer | PullBlocks) -> None:
        if isinstance(message, LinkPeer):
            pd.link(message)
        elif isinstance(message, UnlinkPeer):
            pd.unlink(message.peer)
        else:
            pd.pull(message)

    def _on_call(self, call: WorkerCall) -> None:
        def answer(value: WorkerState | WorkerStats | StoreState | StoreCleared) -> None:
            self.answer(WorkerResult(call.call_id, self.rank, value))

        match call.question:
            case Stop():
                self._stop.set()
            case Ping():
                answer(self._state())
            case GetWorkerStats():
                state, refused = self.transfer.store_state, self.transfer.store_refused
                answer(replace(self.stats.snapshot(), store_state=state, store_refused=refused))
            case SwitchStore(place):
                self.transfer.switch_store(place, answer)
            case ClearStore():
                self.transfer.clear_store(answer)
            case other:
                log.error("the engine asked for %s", type(other).__name__)

    def _state(self) -> WorkerState:
        loaded_bytes, load_s = self.stats.total("h2d")
        return WorkerState(
            self._doing,
            self.parallel.calls,
            loaded_bytes,
            load_s,
            self.transfer.mixed_numerics,
            self.transfer.store_state,
        )

    # ------------------------------------------------------------------------------------------------ plans

    def _execute(self, plan: Any) -> None:
        if isinstance(plan, CompareBlocks):
            self._compare(plan)
            return
        if not isinstance(plan, (Forward, TransferBlocks, TransferKvBlocks)):
            log.error("the engine sent a %s", type(plan).__name__)
            return
        self._digest.add(plan)
        if isinstance(plan, Forward):
            self._doing = f"step {plan.step_id}"
            self.answer(self._forward(plan))
            self._doing = "nothing"
        elif isinstance(plan, TransferBlocks):
            scheduled = self.transfer.load_from_host(plan)
            self.answer(TransferAck(plan.batch_id, self.rank, scheduled))
        else:
            self.transfer.offload(plan)

    def _compare(self, plan: CompareBlocks) -> None:
        cache = self._caches.domains[0].caches[BlockType(plan.block_type)]
        verdicts = compare_blocks(cache, plan.first.tolist(), plan.second.tolist())
        self.answer(BlocksCompared(plan.compare_id, self.rank, verdicts))

    def _forward(self, plan: Forward) -> ForwardOutput:
        loads = self.transfer.attach_loads()
        waiter = LoadWaiter(loads, self.config.worker_timeout_s)
        pushes = self.pd.begin(plan.pushes) if self.pd is not None else Pushes.none()
        start = time.perf_counter()
        error: str | None = None
        output, proposals = ModelOutput([], [], []), list[Ints]()
        try:
            output = self.runner.forward(plan, pushes.following(waiter))
            pushes.target_computed()
            proposals = self.draft.propose(plan, output) if self.draft is not None else []
            pushes.drafted()
        except Exception as failure:  # the step's requests fail, the instance lives on
            log.exception("step %d failed", plan.step_id)
            error = f"{type(failure).__name__}: {failure}"
            pushes.fail()
        draft_s = self.draft.going_on_s if self.draft is not None and error is None else 0.0
        failed = waiter.finish()
        unknown = set(plan.batch_ids) - {load.batch_id for load in loads}
        compute_s = time.perf_counter() - start - waiter.waited_s - draft_s
        # Half of what the engine waits for an answer: a peer that hangs must not look like a worker that does.
        failures = pushes.finish(self.config.worker_timeout_s / 2)
        return ForwardOutput(
            plan.step_id,
            self.rank,
            ints(output.token_ids),
            output.logprobs,
            output.prompt_logprobs,
            sorted({*failed, *unknown}),
            compute_s,
            waiter.waited_s,
            error,
            self._digest.view(plan, [load.batch_id for load in loads], self.parallel.calls),
            None if output.num_tokens is None else ints(output.num_tokens),
            proposals,
            draft_s,
            failures,
            pushes.waited_s,
        )


def run_worker(
    config: EngineConfig,
    rank: int,
    addresses: tuple[str, str],
    ready: Callable[[], None],
    meeting: Path,
) -> int:
    """Body of a worker process; `meeting` is a folder that the ranks of this instance, and no others, see.

    Returns the exit code; ends the process at once when a store call is stuck.
    """
    set_environment(config.log_level, transfer_ports(config, rank))
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which SIGKILL would leave in /dev/shm
    context: zmq.Context[Any] = zmq.Context()
    plans = Channel(context, addresses[0], bind=False)
    answers = Channel(context, addresses[1], bind=False)
    torch.set_grad_enabled(False)
    try:
        parallel = _join(config, rank, meeting)
        worker = Worker(config, parallel, plans, answers, meeting)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        ready()
        worker.run()
    except XllmError as error:
        log.error("worker %d ends: %s", rank, error)
        raise
    if not worker.close():
        os._exit(STUCK_EXIT_CODE)
    parallel.leave()
    plans.close()
    answers.close()
    context.term()
    return 0


def _join(config: EngineConfig, rank: int, meeting: Path) -> TensorParallel:
    """Meet the other ranks. Collectives outlast the engine's patience, so that it is the engine who says who hangs."""
    platform = Platform.choose(config, rank)
    limit_s = max(config.worker_timeout_s, config.startup_timeout_s) + _PATIENCE_S
    return TensorParallel.join(
        rank, config.tp_size, meeting, platform.distributed_backend, limit_s, fixed_order=config.batch_invariant
    )
