"""The engine process: one loop that takes messages, schedules a step, awaits it, and sends the outputs.

While a forward runs the loop goes on serving everything that does not need it: new requests begin their prefetch,
prefetch batches follow each other, write-backs end.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq

from ..calls import Call, Stop, WorkerCall, WorkerResult
from ..config import EngineConfig
from ..errors import EngineDeadError, XllmError
from ..figures import EngineInfo, WorkerReady
from ..plans import BlocksCompared, ForwardOutput, PullDone
from ..request_messages import AbortRequest, AddRequest, StepOutputs
from ..wire import Channel, Deadline, HasSocket
from .build import build_parts, new_links
from .calls import EngineCalls
from .forward_join import join_forward
from .pair.links import PeerLinks
from .publisher import KvPublisher
from .remote_worker import POLL_S, RemoteWorkers
from .report import EngineReport
from .steps.step import Step

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
        parts = build_parts(config, workers, ready, links)
        self.config = config
        self.api = api
        self.workers = workers
        self.links = links
        self.incarnation, self.journal = parts.incarnation, parts.journal
        self.manager, self.scheduler, self.role = parts.manager, parts.scheduler, parts.role
        self._policy, self._limits, self._exact = parts.policy, parts.limits, parts.exact
        self.publisher: KvPublisher | None = None
        self._also: list[HasSocket] = [api] if links is None else [api, links]
        self._block_bytes = ready[0].types[0].block_bytes
        self.report = EngineReport(config, ready, parts, links)
        self.calls = EngineCalls(api, workers, parts, self.report)
        self._mixed = False
        self._forward_outputs: dict[int, ForwardOutput] = {}
        self._stop = False
        self._stalled = False  # the last turn found nothing that can run
        self._looked_at = time.monotonic()
        self._back_at = float("-inf")

    def publish_events(self, context: zmq.Context[Any]) -> None:
        """Publish the events of the caches from now on. Raises StartupError when a port is taken."""
        assert self.journal is not None
        types, load = self.manager.types, self.report.load()
        self.publisher = self.report.publisher = KvPublisher(
            context, self.config, self.journal, types, self.incarnation, load=load
        )
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
        """Once round the loop: take messages, schedule a step, await it, send the outputs."""
        self.receive(self._patience())
        self.scheduler.poll_prefetches()
        self.role.poll(settled=self.links is None or (not self._was_away() and self.workers.all_answer(AWAY_S)))
        step = self.scheduler.schedule()
        self._stalled = step is None
        if step is not None:
            self._run_step(step)
        self.manager.transfer_offload_blocks()
        self._send_outputs()
        self.calls.settle()
        if self.config.check_invariants and not self.scheduler.has_work:
            self.manager.check()
        self._tell_of_caches()

    def _tell_of_caches(self) -> None:
        if self.publisher is not None:
            self.publisher.tick(self.report.load() if self.publisher.heartbeat_due else None)

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
        waits = self.scheduler.has_work or self.scheduler.prefetching or self.role.busy
        return STALLED_WAIT_S if waits else IDLE_WAIT_S

    def _run_step(self, step: Step) -> None:
        self.role.begin_step(step)
        self.workers.broadcast(step.plan)
        output = self._await_forward(step.plan.step_id)
        self.report.totals.add(output, decode=bool(step.decode))
        self.role.pushes_ended(output.failed_pushes, void=output.error is not None)
        if output.error is None:
            prompt_tokens = sum(len(row.token_ids) for row in step.plan.prefill)
            generated = sum(len(row.token_ids) for row in step.plan.decode)
            self._policy.computed(prompt_tokens, generated, output.compute_s)
            self.role.step_ended(self.scheduler.finish(step, output))
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
            self.receive(POLL_S)
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
        return join_forward(outputs, step_id)

    def _was_away(self) -> bool:
        """This process itself stood still a moment ago: answers may be on their way that would have been in time."""
        return time.monotonic() - self._back_at < AWAY_S

    # -------------------------------------------------------------------------------------------- messages

    def receive(self, timeout_s: float) -> None:
        """Handle every message that is there; wait up to `timeout_s` for the first."""
        answers = self.workers.receive(timeout_s, also=self._also)
        self._looked_at, before = time.monotonic(), self._looked_at
        if self._looked_at - before > AWAY_S:  # also within this wait
            self._back_at = self._looked_at
            self.workers.forgive()
        for answer in answers:
            self._on_worker(answer)
        self._listen_to_peers()
        self._tell_of_caches()
        for rank, state in self.workers.take_states():
            self._mixed |= state.mixed_numerics
            if state.store_state:
                self.report.store_states[rank] = state.store_state
            self.scheduler.auditor.exact = self._exact and not self._mixed
            self._policy.loaded(rank, state.loaded_bytes / self._block_bytes, state.load_s)
        while (message := self.api.receive(0)) is not None:
            self._on_api(message)
        self.workers.check_alive()
        if self.api.peer_gone():
            log.info("the client of this engine is gone: stopping")
            self._stop = True
        age_s, ranks = self.manager.oldest_copy()
        if age_s > self.config.worker_timeout_s and not self._was_away():
            who = self.workers.blame(ranks)
            raise EngineDeadError(f"{who}: a write-back's copy took longer than {self.config.worker_timeout_s:g} s")

    def _listen_to_peers(self) -> None:
        if self.links is None:
            return
        self.links.tick(away=self._was_away())
        if self.links.heartbeat_due:
            self.links.send_heartbeat(self.role.load())
        self._mixed |= self.links.mixed_numerics
        events = self.links.receive()
        for event in events:
            self.role.on_event(event)
        if events:
            self._send_outputs()  # tokens of decode instances do not wait for the end of a step here

    def _on_worker(self, answer: Any) -> None:
        if isinstance(answer, ForwardOutput):
            self._forward_outputs[answer.rank] = answer
        elif isinstance(answer, PullDone):
            self.role.on_pull_done(answer)
        elif isinstance(answer, BlocksCompared):
            self.scheduler.auditor.on_compared(answer)
        elif isinstance(answer, WorkerResult):
            self.calls.on_result(answer)
        elif not self.manager.on_worker(answer):
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
        problem = self._limits.refusal(request, self.role.num_elsewhere)
        if self.role.refuses_clients:
            problem = self.role.refuses_clients, 400
        if problem is not None:
            self.scheduler.replies.refuse(request.request_id, *problem)
        else:
            self.scheduler.add_request(request)

    def _send_outputs(self) -> None:
        outputs = self.role.deliver(self.scheduler.take_outputs())
        if outputs:
            self.api.send(StepOutputs(outputs))


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
        links = new_links(context, config, answers)
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
