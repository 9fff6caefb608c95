"""When the store may be asked, and that nobody waits for a call that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from serving import wait_for

from xllm_hier.worker.store.circuit import GOOD, MAX_BAD, StoreCircuit
from xllm_hier.worker.store.queue import StoreQueue

LIMIT_S = 5.0


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that only passes when the test says so."""
    now = [100.0]
    monkeypatch.setattr("xllm_hier.worker.store.circuit.time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def attached(opened: list[str] | None = None) -> StoreCircuit:
    circuit = StoreCircuit(LIMIT_S, [].append if opened is None else opened.append)
    circuit.wanted()
    circuit.works(at_start=True)
    return circuit


def test_what_nobody_wants_is_detached_and_what_is_wanted_is_open_until_it_works() -> None:
    circuit = StoreCircuit(LIMIT_S)
    circuit.works()
    assert circuit.state == "detached" and not circuit.closed
    circuit.wanted()
    assert circuit.state == "open" and not circuit.closed
    circuit.works(at_start=True)
    assert circuit.state == "attached" and circuit.closed
    circuit.detach()
    for event in (lambda: circuit.fail("late"), lambda: circuit.judge(good=True), circuit.works):
        event()
        assert circuit.state == "detached"


def test_a_call_that_fails_as_a_whole_opens_at_once_and_says_so_once() -> None:
    opened: list[str] = []
    circuit = attached(opened)
    assert circuit.fail("no answer") and not circuit.fail("again")
    assert circuit.state == "open" and opened == ["no answer"]


def test_calls_that_go_badly_degrade_and_several_in_a_row_open() -> None:
    circuit = attached()
    for _ in range(MAX_BAD - 1):
        circuit.judge(good=False)
        assert circuit.state == "degraded" and circuit.closed
    circuit.judge(good=True)
    for _ in range(MAX_BAD - 1):
        circuit.judge(good=False)
    assert circuit.state == "degraded"
    circuit.judge(good=False)
    assert circuit.state == "open"


def test_a_probe_that_works_is_not_yet_trust() -> None:
    circuit = attached()
    circuit.fail("no answer")
    circuit.works()
    for _ in range(GOOD):
        assert circuit.state == "degraded"
        circuit.judge(good=True)
    assert circuit.state == "attached"


def test_a_call_that_hangs_opens_while_it_hangs_and_a_slow_one_is_a_bad_one(wait: Callable[[float], None]) -> None:
    circuit = attached()
    with circuit.call():
        wait(LIMIT_S)
        circuit.check()
        assert circuit.state == "attached" and circuit.busy
        wait(0.1)
        circuit.check()
        assert circuit.state == "open"
    circuit = attached()
    with circuit.call():
        wait(LIMIT_S + 1)
    assert circuit.state == "degraded" and not circuit.busy


def test_a_store_in_use_that_is_wanted_once_more_stays_in_use() -> None:
    circuit = attached()
    circuit.wanted()
    assert circuit.state == "attached"


@pytest.fixture
def queue() -> Iterator[StoreQueue]:
    made = StoreQueue("calls")
    yield made
    made.close()


def test_calls_run_in_order_and_are_answered_with_what_they_return(queue: StoreQueue) -> None:
    answers: list[int] = []
    for number in range(5):
        queue.submit(lambda number=number: number, answers.append)
    wait_for(lambda: len(answers) == 5)
    assert answers == [0, 1, 2, 3, 4]


def test_what_is_given_up_is_answered_once_whether_it_waits_or_hangs(queue: StoreQueue) -> None:
    begun, go_on = threading.Event(), threading.Event()
    answers: list[object] = []

    def hang() -> str:
        begun.set()
        go_on.wait(20)
        return "late"

    queue.submit(hang, answers.append, lambda running: answers.append(("hangs", running)))
    queue.submit(lambda: "never", answers.append, lambda running: answers.append(("waits", running)))
    assert begun.wait(20)
    queue.give_up(running_s=60)
    assert answers == [("waits", False)], "what has not run for long is left to end"
    queue.give_up(running_s=0)
    queue.give_up(running_s=0)
    assert answers[1:] == [("hangs", True)]
    go_on.set()
    queue.submit(lambda: "next", answers.append)
    wait_for(lambda: "next" in answers)
    assert answers[2:] == ["next"]
