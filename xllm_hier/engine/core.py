"""The engine process: one loop that takes messages, schedules a step, awaits it, and sends what came of it.

While a forward runs the loop goes on serving everything that does not need it: new requests begin their prefetch,
prefetch batches follow each other, write-backs end.
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq

from ..block import BlockType
from ..calls import Call, Stop, WorkerCall, WorkerResult
from ..config import EngineConfig
from ..errors import EngineDeadError, XllmError
from ..figures import EngineInfo, WorkerReady
from ..plans import (
    AbortRequest,
    AddRequest,
    BlocksCompared,
    ForwardOutput,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    ProbeAnswer,
    PullDone,
    StepOutputs,
    TransferAck,
)
from ..wire import Channel, Deadline, HasSocket
from .blocks.books import HierarchyBlockManagerPool
from .blocks.journal import CacheJournal
from .blocks.policy import RestorePolicy
from .blocks.store_reads import ReadLimits
from .calls import EngineCalls
from .pair.decode import DecodeRole
from .pair.links import PeerLinks
from .pair.prefill import PrefillRole
from .publisher import KvPublisher
from .rank_views import common_sizes, drafting_of, pd_facts
from .remote_worker import POLL_S, RemoteWorkers
from .report import EngineReport
from .steps.audit import Auditor
from .steps.scheduler import Scheduler, Step

log = logging.getLogger("xllm.engine")

IDLE_WAIT_S = 0.2
STALLED_WAIT_S = 0.02  # work is queued but waits for blocks or a prefetch: look again soon
AWAY_S = 2.0  # between two looks at the messages: longer than any step of the books, so the process was stopped
ONE_FAILED_S = 5.0  # after one rank's forward failed: for the others to fail alike, or to be found dead


def api_address(run_dir: str) -> str:
    """Where the engine of an instance listens for its one client."""
    return f"ipc://{run_dir}/api"


class EngineCore:
    """Scheduler, block books and channels of one instance, tied together by `run`."""

    def __init__(
        self,
        config: EngineConfig,
        api: Channel,
        workers: RemoteWorkers,
        ready: list[WorkerReady],
        links: PeerLinks | None = None,
    ) -> None:
        self.config = config
        self.api = api
        self.workers = workers
        first = ready[0]
        self.block_size = first.block_size
        self.incarnation = links.incarnation if links is not None else uuid.uuid4().hex
        self.journal = CacheJournal(self.block_size) if config.publishes_events else None
        self.publisher: KvPublisher | None = None
        self.manager = HierarchyBlockManagerPool(
            workers,
            block_size=self.block_size,
            types=common_sizes(ready),
            strides={BlockType(kind): tokens for kind, tokens in first.strides.items()},
            scan_tokens=first.model.scan_tokens or 1,
            enable_prefix_cache=config.enable_prefix_cache,
            store_enabled=config.enable_kvcache_store,
            decode_kv_reuse=config.decode_kv_reuse,
            limits=ReadLimits(
                config.prefetch_batch_size,
                config.prefetch_timeout,
                config.prefetch_deadline_ms,
                config.worker_timeout_s,
            ),
            policy=RestorePolicy(self.block_size, measured=config.restore_policy == "measured"),
            drafting=drafting_of(config.num_speculative_tokens, first.draft),
            journal=self.journal,
        )
        self._exact = first.model.batch_invariant and config.decode_kv_reuse != "as_is"
        auditor = Auditor(self.manager, config.audit_rate, exact=self._exact, experts=first.model.experts)
        self.scheduler = Scheduler(
            self.manager,
            max_tokens=config.max_tokens_per_batch,
            max_seqs=config.max_seqs_per_batch,
            chunk_tokens=config.chunk_tokens,
            auditor=auditor,
        )
        self.links = links
        self.role: PrefillRole | DecodeRole | None = None
        if links is not None and config.instance_role == "PREFILL":
            self.role = PrefillRole(config, self.scheduler, links)
        elif links is not None:
            self.role = DecodeRole(config, self.scheduler, links, self._refusal)
        self._also: list[HasSocket] = [api] if links is None else [api, links]
        self._block_bytes = first.types[0].block_bytes
        self.report = EngineReport(config, ready, self.scheduler, self.incarnation, links=links, role=self.role)
        self.calls = EngineCalls(api, workers, self.scheduler, self.report, links=links, role=self.role)
        self._mixed = False
        self._forward_outputs: dict[int, ForwardOutput] = {}
        self._stop = False
        self._stalled = False  # the last turn found nothing that can run
        self._looked_at = time.monotonic()
        self._back_at = float("-inf")

    def publish_events(self, context: zmq.Context[Any]) -> None:
        """Tell of the caches to whoever listens from now on. Raises StartupError when a port is taken."""
        assert self.journal is not None
        args = (self.config, self.journal, self.manager.types, self.incarnation)
        self.publisher = self.report.publisher = KvPublisher(context, *args, load=self.report.load)
        self._also.append(self.publisher)

    # ------------------------------------------------------------------------------------------------ loop

    def run(self) -> None:
        """Serve until `stop`; raises EngineDeadError when a worker died or hangs, after answering open requests."""
        try:
            while not self._stop:
                self.turn()
        except EngineDeadError as error:
            self.answer_all_open(error)
            raise

    def turn(self) -> None:
        """Once round the loop: take messages, schedule a step, await it, send what came of it."""
        self._receive(self._patience())
        self._poll_role()
        self.scheduler.poll_prefetches()
        step = self.scheduler.schedule()
        self._stalled = step is None
        if step is not None:
            self._run_step(step)
        self.manager.transfer_offload_blocks()
        self._send_outputs()
        self.calls.settle()
        if self.config.check_invariants and not self.scheduler.has_work:
            self.manager.check()
        if self.publisher is not None:
            self.publisher.tick()

    def answer_all_open(self, error: EngineDeadError) -> None:
        """Nothing can be computed any more: every open request gets `error`."""
        log.error("%s: open requests are answered, the instance ends", error)
        if self.links is not None:
            self.links.close()  # prefill instances then go on with their requests elsewhere
        self.scheduler.fail_all(str(error), 503)
        self._send_outputs()

    def stop(self) -> None:
        """End the loop after the current step."""
        self._stop = True

    def _patience(self) -> float:
        if self.publisher is not None and self.publisher.busy:
            return 0.0
        if self.scheduler.has_work and not self._stalled:
            return 0.0
        waits = self.scheduler.has_work or self.scheduler.prefetching or (self.role is not None and self.role.busy)
        return STALLED_WAIT_S if waits else IDLE_WAIT_S

    def _poll_role(self) -> None:
        if isinstance(self.role, PrefillRole):
            self.role.poll()
        elif self.role is not None:
            self.role.poll(settled=not self._was_away() and self.workers.all_answer(AWAY_S))

    def _run_step(self, step: Step) -> None:
        self.workers.broadcast(step.plan)
        output = self._await_forward(step.plan.step_id)
        self.report.totals.add(output, decode=bool(step.decode))
        if isinstance(self.role, PrefillRole):
            self.role.pushes_ended(output.failed_pushes, void=output.error is not None)
        if output.error is None:
            prompt_tokens = sum(len(row.token_ids) for row in step.plan.prefill)
            generated = sum(len(row.token_ids) for row in step.plan.decode)
            self.manager.policy.computed(prompt_tokens, generated, output.compute_s)
            self.scheduler.finish(step, output)
        else:
            log.error("step %d failed: %s", step.plan.step_id, output.error)
            self.scheduler.fail_step(step, f"the model's forward failed: {output.error}")

    def _await_forward(self, step_id: int) -> ForwardOutput:
        """One answer of all ranks; it carries the error of a forward that failed on all of them alike.

        Raises:
            EngineDeadError: a rank is silent, failed alone (the others then wait for it in a collective), or computed
                from something else than the others.
        """
        limit_s = self.config.worker_timeout_s
        deadline = Deadline(limit_s)
        num_workers = self.workers.num_workers
        while len(self._forward_outputs) < num_workers:
            self._receive(POLL_S)
            failed = {rank: out.error for rank, out in self._forward_outputs.items() if out.error is not None}
            if failed and deadline.remaining() > ONE_FAILED_S:
                deadline = Deadline(ONE_FAILED_S)
            if len(self._forward_outputs) < num_workers and deadline.passed():
                if self._was_away():
                    deadline = Deadline(limit_s)
                    continue
                silent = sorted(set(range(num_workers)) - set(self._forward_outputs))
                if failed:
                    errors = "; ".join(f"worker {rank}: {error}" for rank, error in sorted(failed.items()))
                    raise EngineDeadError(
                        f"the forward failed and {self.workers.blame(silent)} did not end it ({errors})"
                    )
                raise EngineDeadError(f"{self.workers.blame(silent)}: no answer within {limit_s:g} s")
        outputs, self._forward_outputs = self._forward_outputs, {}
        if any(output.step_id != step_id for output in outputs.values()):
            raise EngineDeadError(f"a worker answered another step than {step_id}")
        views = {rank: outputs[rank].view for rank in sorted(outputs)}
        if len(set(views.values())) > 1:
            seen = "; ".join(
                f"worker {rank} saw {view}" + (f" and failed: {outputs[rank].error}" if outputs[rank].error else "")
                for rank, view in views.items()
            )
            raise EngineDeadError(f"the ranks' caches have gone apart: {seen}")
        failed_batches = sorted({batch for output in outputs.values() for batch in output.failed_batches})
        outputs[0].failed_batches[:] = failed_batches
        answer = next((output for output in outputs.values() if output.error is not None), outputs[0])
        answer.failed_pushes[:] = [failure for output in outputs.values() for failure in output.failed_pushes]
        return answer

    def _was_away(self) -> bool:
        """This process itself stood still a moment ago: answers may be on their way that would have been in time."""
        return time.monotonic() - self._back_at < AWAY_S

    # -------------------------------------------------------------------------------------------- messages

    def _receive(self, timeout_s: float) -> None:
        """Handle every message that is there; wait up to `timeout_s` for the first."""
        answers = self.workers.receive(timeout_s, also=self._also)
        self._looked_at, before = time.monotonic(), self._looked_at
        if self._looked_at - before > AWAY_S:  # also within this wait
            self._back_at = self._looked_at
            self.workers.forgive()
        for answer in answers:
            self._on_worker(answer)
        self._listen_to_peers()
        if self.publisher is not None:
            self.publisher.tick()
        for rank, state in self.workers.take_states():
            self._mixed |= state.mixed_numerics
            if state.store_state:
                self.report.store_states[rank] = state.store_state
            self.scheduler.auditor.exact = self._exact and not self._mixed
            self.manager.policy.loaded(rank, state.loaded_bytes / self._block_bytes, state.load_s)
        while (message := self.api.receive(0)) is not None:
            self._on_api(message)
        self.workers.check_alive()
        if self.api.peer_gone():
            log.info("the client of this engine is gone: stopping")
            self._stop = True
        age_s, ranks = self.manager.write_back.oldest_copy()
        if age_s > self.config.worker_timeout_s and not self._was_away():
            who = self.workers.blame(ranks)
            raise EngineDeadError(f"{who}: a write-back's copy took longer than {self.config.worker_timeout_s:g} s")
        self.manager.store_reads.release_quarantine()

    def _listen_to_peers(self) -> None:
        if self.links is None or self.role is None:
            return
        self.links.tick(away=self._was_away())
        self._mixed |= self.links.mixed_numerics
        for event in self.links.receive():
            self.role.on_event(event)
        if isinstance(self.role, PrefillRole):
            self._send_outputs()  # tokens of decode instances do not wait for the end of a step here

    def _on_worker(self, answer: Any) -> None:
        if isinstance(answer, ForwardOutput):
            self._forward_outputs[answer.rank] = answer
        elif isinstance(answer, PrefetchAnswer):
            self.manager.store_reads.on_answer(answer)
        elif isinstance(answer, ProbeAnswer):
            self.manager.store_reads.on_probe(answer)
        elif isinstance(answer, TransferAck):
            self.manager.loads.on_ack(answer)
        elif isinstance(answer, OffloadCopied):
            self.manager.write_back.on_copied(answer)
        elif isinstance(answer, OffloadStored):
            self.manager.write_back.on_stored(answer)
        elif isinstance(answer, PullDone) and self.role is not None:
            self.role.on_pull_done(answer)
        elif isinstance(answer, BlocksCompared):
            self.scheduler.auditor.on_compared(answer)
        elif isinstance(answer, WorkerResult):
            self.calls.on_result(answer)
        else:
            log.warning("a worker sent a %s", type(answer).__name__)

    def _on_api(self, message: Any) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            self.scheduler.abort(message.request_id)
        elif isinstance(message, Call):
            self.calls.on_call(message)
        else:
            log.warning("the api sent a %s", type(message).__name__)

    def _add(self, request: AddRequest) -> None:
        problem = self._refusal(request)
        if isinstance(self.role, DecodeRole):
            problem = ("this instance decodes for PREFILL instances: send requests to one of those", 400)
        if problem is not None:
            self.scheduler.refuse(request.request_id, *problem)
        else:
            self.scheduler.add_request(request)

    def _refusal(self, request: AddRequest) -> tuple[str, int] | None:
        """Why a request is not admitted, with its HTTP status; before any prefetch is started."""
        length, limit = len(request.token_ids), self.report.max_model_len
        if self.calls.draining:
            return "the instance is shutting down", 503
        if request.request_id in self.scheduler.sequences:
            return f"request id {request.request_id!r} is in use", 400
        num_open = self.scheduler.num_open + self.report.num_elsewhere
        if num_open >= self.config.max_waiting_requests:
            return f"{num_open} requests are open, the limit is {self.config.max_waiting_requests}", 429
        if not length:
            return "the prompt has no token", 400
        if length + request.max_tokens > limit:
            return f"{length} prompt tokens and {request.max_tokens} new ones are above the limit of {limit}", 400
        if request.token_ids.min() < 0 or request.token_ids.max() >= self.report.vocab_size:
            return f"token ids must be from 0 to {self.report.vocab_size - 1}", 400
        return None

    def _send_outputs(self) -> None:
        outputs = self.scheduler.take_outputs()
        if isinstance(self.role, DecodeRole):
            outputs = self.role.deliver(outputs)
        if outputs:
            self.api.send(StepOutputs(outputs))


def _new_links(context: zmq.Context[Any], config: EngineConfig, ready: list[WorkerReady]) -> PeerLinks | None:
    """Links to the other half of a pair; None for an instance that does both alone."""
    if not config.enable_disagg_pd:
        return None
    endpoints = [answer.endpoint for answer in ready if answer.endpoint is not None]
    return PeerLinks(context, config, pd_facts(config, ready), endpoints, ready[0].model.numerics_id)


def run_engine(config: EngineConfig, run_dir: str, ready: Callable[[EngineInfo], None]) -> int:
    """Body of the engine process: wait for the workers, tell `ready`, serve until SIGTERM. Returns the exit code."""
    context: zmq.Context[Any] = zmq.Context()
    api = Channel(context, api_address(run_dir), bind=True)
    workers = RemoteWorkers(context, run_dir, config.tp_size, config.worker_timeout_s)
    core: EngineCore | None = None
    links: PeerLinks | None = None
    stopped = False

    def on_signal(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        if core is not None:
            core.stop()

    signal.signal(signal.SIGTERM, on_signal)
    try:
        answers = workers.wait_ready(config.startup_timeout_s)
        links = _new_links(context, config, answers)
        core = EngineCore(config, api, workers, answers, links)
        if core.journal is not None:
            core.publish_events(context)
        if stopped:
            return 0
        ready(core.report.info())
        core.run()
        return 0
    except XllmError as error:
        log.error("engine ends: %s", error)
        return 1
    finally:
        if links is not None:
            links.close()
        if core is not None and core.publisher is not None:
            core.publisher.close()
        workers.broadcast(WorkerCall(0, Stop()))
        workers.close()
        api.close()
        context.term()
