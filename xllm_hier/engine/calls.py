"""What the api asks of an engine besides requests: facts, figures, clears, another store, peers, the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..plans import Call, CallResult, WorkerCall, WorkerResult
from ..wire import Channel, Deadline
from .build import EngineParts
from .rank_views import merge_worker_stats, worst_state
from .remote_worker import RemoteWorkers
from .report import EngineReport

CALL_LIMIT_S = 30.0
SETTLE_LIMIT_S = 5.0  # a clear waits so long for transfers to end before it takes what there is

_TIERS = ["device", "host", "store"]


@dataclass(eq=False)
class _WorkerQuestion:
    """A WorkerCall on its way round; `done` gets one value per rank, or what there is when the time is over."""

    done: Callable[[dict[int, dict[str, Any]]], None]
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    deadline: Deadline = field(default_factory=lambda: Deadline(CALL_LIMIT_S))


class EngineCalls:
    """Answers every Call, at once or when the state it waits for is there: the engine's loop calls `settle` each
    turn."""

    def __init__(self, api: Channel, workers: RemoteWorkers, parts: EngineParts, report: EngineReport) -> None:
        self._api, self._workers, self._report = api, workers, report
        self._scheduler, self._manager = parts.scheduler, parts.manager
        self._role, self._limits = parts.role, parts.limits
        self.questions: dict[int, _WorkerQuestion] = {}
        self.clears: list[tuple[Call, Deadline]] = []
        self._next_question = 0
        self._drains: list[Call] = []

    def on_call(self, call: Call) -> None:
        if call.method == "info":
            self._answer(call, self._report.info())
        elif call.method == "stats":
            self._ask_workers("stats", lambda values: self._answer_stats(call, values))
        elif call.method == "clear_cache":
            unknown = [tier for tier in call.args.get("tiers", _TIERS) if tier not in _TIERS]
            if unknown:
                self._answer(call, {}, f"no tier {unknown[0]!r}; allowed: device, host, store")
            else:
                self.clears.append((call, Deadline(SETTLE_LIMIT_S)))
        elif call.method in ("attach_store", "detach_store"):
            self._switch_store(call)
        elif call.method == "decode_instances":
            self._role.use_decode_instances(call.args["instances"])
            self._answer(call, {})
        elif call.method == "drain":
            self._limits.draining = True
            self._drains.append(call)
        else:
            self._answer(call, {}, f"no method {call.method!r}")

    def on_result(self, result: WorkerResult) -> None:
        """A rank has answered a question; one that nobody waits for any more is dropped."""
        if (question := self.questions.get(result.call_id)) is not None:
            question.values[result.rank] = result.value

    def settle(self) -> None:
        """Answer what waited for a state that is here now: worker questions, clears, drains."""
        for call_id, question in list(self.questions.items()):
            if len(question.values) == self._workers.num_workers or question.deadline.passed():
                del self.questions[call_id]
                question.done(question.values)
        quiet = not self._manager.busy and not self._scheduler.canonical
        for call, deadline in list(self.clears):
            if quiet or deadline.passed():
                self.clears.remove((call, deadline))
                self._clear(call)
        if self._drains and not self._scheduler.sequences and quiet and not self._role.num_elsewhere:
            for call in self._drains:
                self._answer(call, {})
            self._drains.clear()

    def _answer(self, call: Call, value: dict[str, Any], error: str | None = None) -> None:
        self._api.send(CallResult(call.call_id, value, error))

    def _ask_workers(
        self, method: str, done: Callable[[dict[int, dict[str, Any]]], None], args: dict[str, Any] | None = None
    ) -> None:
        self._next_question += 1
        self.questions[self._next_question] = _WorkerQuestion(done)
        self._workers.broadcast(WorkerCall(self._next_question, method, args or {}))

    def _answer_stats(self, call: Call, values: dict[int, dict[str, Any]]) -> None:
        if values:
            self._report.worker_stats = merge_worker_stats([values[rank] for rank in sorted(values)])
        self._answer(call, self._report.stats())

    def _clear(self, call: Call) -> None:
        tiers = call.args.get("tiers", _TIERS)
        cleared = {tier: self._manager.clear(tier) for tier in tiers if tier != "store"}
        if "store" not in tiers:
            self._answer(call, {"cleared": cleared})
            return

        def done(values: dict[int, dict[str, Any]]) -> None:
            cleared["store"] = sum(value.get("removed", 0) for value in values.values())
            errors = [value["error"] for value in values.values() if value.get("error")]
            if len(values) < self._workers.num_workers:
                errors.append("not every worker has answered: the store may still hold what it held")
            if not errors and set(tiers) == set(_TIERS):
                self._scheduler.auditor.reset()
                self._scheduler.drafts.forget()
            self._answer(call, {"cleared": cleared}, errors[0] if errors else None)

        self._ask_workers("clear_store", done)

    def _switch_store(self, call: Call) -> None:
        """Attach or detach the store on all ranks; the state told is that of the worst one."""
        attach = call.method == "attach_store"
        if attach and not self._manager.has_host:
            self._answer(call, {}, "this instance has no host tier: start it with --host_blocks_factor above 1")
            return
        self._manager.use_store(attach)

        def done(values: dict[int, dict[str, Any]]) -> None:
            states = [value.get("state", "open") for value in values.values()]
            states += ["open"] * (self._workers.num_workers - len(values))
            errors = [value["error"] for value in values.values() if value.get("error")]
            refused = any(value.get("refused") for value in values.values())
            state = "detached" if refused else worst_state(states)
            self._report.worker_stats["store_state"] = state
            self._answer(call, {"state": state, **({"why": errors[0]} if errors else {})})

        self._ask_workers(call.method, done, call.args)
