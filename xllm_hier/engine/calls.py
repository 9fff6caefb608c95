"""The api's questions to an engine beside requests: facts, figures, clears, another store, peers, the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..calls import (
    AttachStore,
    Call,
    CallResult,
    ClearCache,
    Cleared,
    ClearStore,
    DetachStore,
    Done,
    Drain,
    GetInfo,
    GetStats,
    GetWorkerStats,
    Question,
    SetDecodeInstances,
    StoreCleared,
    StorePlace,
    StoreState,
    StoreSwitched,
    SwitchStore,
    WorkerCall,
    WorkerResult,
)
from ..figures import EngineInfo, EngineStats, WorkerStats
from ..wire import Channel, Deadline
from .build import EngineParts
from .rank_views import merge_worker_stats, worst_state
from .remote_worker import RemoteWorkers
from .report import EngineReport

CALL_LIMIT_S = 30.0
SETTLE_LIMIT_S = 5.0  # a clear waits so long for transfers to end before it takes the present state

_TIERS = ("device", "host", "store")


@dataclass(eq=False)
class _WorkerQuestion:
    """A WorkerCall on its way round; `done` gets the answers by rank, those that came before the deadline."""

    done: Callable[[dict[int, Any]], None]
    answers: dict[int, Any] = field(default_factory=dict)
    deadline: Deadline = field(default_factory=lambda: Deadline(CALL_LIMIT_S))


@dataclass(eq=False)
class _Clear:
    """A ClearCache that waits for transfers to end."""

    call: Call
    tiers: list[str]
    deadline: Deadline = field(default_factory=lambda: Deadline(SETTLE_LIMIT_S))


class EngineCalls:
    """Answers every Call, at once or when the state that it waits for is there: the loop calls `settle` each turn."""

    def __init__(self, api: Channel, workers: RemoteWorkers, parts: EngineParts, report: EngineReport) -> None:
        self._api, self._workers, self._report = api, workers, report
        self._scheduler, self._manager = parts.scheduler, parts.manager
        self._role, self._limits = parts.role, parts.limits
        self.questions: dict[int, _WorkerQuestion] = {}
        self.clears: list[_Clear] = []
        self._next_question = 0
        self._drains: list[Call] = []

    def on_call(self, call: Call) -> None:
        """Answer `call`, or begin the work that its answer needs."""
        match call.question:
            case GetInfo():
                self._answer(call, self._report.info())
            case GetStats():
                self._ask_workers(GetWorkerStats(), lambda answers: self._answer_stats(call, answers))
            case ClearCache(tiers):
                unknown = [tier for tier in tiers if tier not in _TIERS]
                if unknown:
                    self._refuse(call, f"no tier {unknown[0]!r}; allowed: device, host, store")
                else:
                    self.clears.append(_Clear(call, tiers))
            case AttachStore(place):
                self._switch_store(call, place)
            case DetachStore():
                self._switch_store(call, None)
            case SetDecodeInstances(instances):
                self._role.use_decode_instances(instances)
                self._answer(call, Done())
            case Drain():
                self._limits.draining = True
                self._drains.append(call)
            case other:
                self._refuse(call, f"the engine does not answer {type(other).__name__}")

    def on_result(self, result: WorkerResult) -> None:
        """A rank has answered a question; an answer that comes too late is dropped."""
        if (question := self.questions.get(result.call_id)) is not None:
            question.answers[result.rank] = result.answer

    def settle(self) -> None:
        """Answer the calls whose state is here now: worker questions, clears, drains."""
        for call_id, question in list(self.questions.items()):
            if len(question.answers) == self._workers.num_workers or question.deadline.passed():
                del self.questions[call_id]
                question.done(question.answers)
        quiet = not self._manager.busy and not self._scheduler.canonical
        for clear in list(self.clears):
            if quiet or clear.deadline.passed():
                self.clears.remove(clear)
                self._clear(clear.call, clear.tiers)
        if self._drains and not self._scheduler.sequences and quiet and not self._role.num_elsewhere:
            for call in self._drains:
                self._answer(call, Done())
            self._drains.clear()

    def _answer(self, call: Call, answer: EngineInfo | EngineStats | Cleared | StoreSwitched | Done) -> None:
        self._api.send(CallResult(call.call_id, answer))

    def _refuse(self, call: Call, error: str) -> None:
        self._api.send(CallResult(call.call_id, None, error))

    def _ask_workers(self, question: Question[Any], done: Callable[[dict[int, Any]], None]) -> None:
        self._next_question += 1
        self.questions[self._next_question] = _WorkerQuestion(done)
        self._workers.broadcast(WorkerCall(self._next_question, question))

    def _answer_stats(self, call: Call, answers: dict[int, WorkerStats]) -> None:
        if answers:
            self._report.worker_stats = merge_worker_stats([answers[rank] for rank in sorted(answers)])
        self._answer(call, self._report.stats())

    def _clear(self, call: Call, tiers: list[str]) -> None:
        cleared = {tier: self._manager.clear(tier) for tier in tiers if tier != "store"}
        if "store" not in tiers:
            self._answer(call, Cleared(cleared))
            return

        def done(answers: dict[int, StoreCleared]) -> None:
            cleared["store"] = sum(answer.removed for answer in answers.values())
            errors = [answer.error for answer in answers.values() if answer.error]
            if len(answers) < self._workers.num_workers:
                errors.append("not every worker has answered: the store may still hold its objects")
            if errors:
                self._refuse(call, errors[0])
                return
            if set(tiers) == set(_TIERS):
                self._scheduler.auditor.reset()
                self._scheduler.drafts.forget()
            self._answer(call, Cleared(cleared))

        self._ask_workers(ClearStore(), done)

    def _switch_store(self, call: Call, place: StorePlace | None) -> None:
        """Attach (`place`) or detach the store on all ranks; the answer's state is that of the worst one."""
        attach = place is not None
        if attach and not self._manager.has_host:
            self._refuse(call, "this instance has no host tier: start it with --host_blocks_factor above 1")
            return
        self._manager.use_store(attach)

        def done(answers: dict[int, StoreState]) -> None:
            states = [answer.state for answer in answers.values()]
            states += ["open"] * (self._workers.num_workers - len(answers))
            errors = [answer.error for answer in answers.values() if answer.error]
            refused = any(answer.refused for answer in answers.values())
            state = "detached" if refused else worst_state(states)
            self._report.worker_stats = dataclasses.replace(self._report.worker_stats, store_state=state)
            self._answer(call, StoreSwitched(state, errors[0] if errors else ""))

        self._ask_workers(SwitchStore(place), done)
