"""The role of an instance in the engine's loop: its work besides computing its own requests.

`Role` itself is that of a fused instance, which does nothing besides; `PrefillRole` and `DecodeRole` work in pairs. The
loop calls a role's methods in this order, and nothing below the role calls it back:

    on_event, on_pull_done (whenever something comes) -> poll -> (schedule) -> begin_step -> (the forward)
    -> pushes_ended -> (finish) -> step_ended -> deliver
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...peer_plans import Heartbeat
from ...plans import PullDone, PushFailure
from ...request_messages import RequestOutput
from ..steps.step import Advanced, Step
from .links import PeerEvent


class Role:
    """A fused instance: it computes its clients' requests from their first token to their last."""

    @property
    def refuses_clients(self) -> str:
        """Why clients' requests are refused here; empty when they are not."""
        return ""

    @property
    def busy(self) -> bool:
        """Some request waits for something that only time brings."""
        return False

    @property
    def num_elsewhere(self) -> int:
        """Requests of other instances that the scheduler does not have yet."""
        return 0

    def load(self) -> Heartbeat:
        """The load that this instance's heartbeats tell its peers."""
        return Heartbeat(0, 0, 0)

    def stats(self) -> dict[str, Any]:
        """Figures for the metrics."""
        return {}

    def use_decode_instances(self, instances: Mapping[str, str]) -> None:
        """The decode instances that a registry has now: address by name."""

    def on_event(self, event: PeerEvent) -> None:
        """Take something that a link brought; a step may be under way."""

    def on_pull_done(self, done: PullDone) -> None:
        """Take one rank's answer to a pull; a step may be under way."""

    def poll(self, *, settled: bool) -> None:
        """Go on with whatever can go on; no step is under way. Not `settled`: this process, or a worker, stood still
        a moment ago, so that bytes that were on the wire then may come only now."""

    def begin_step(self, step: Step) -> None:
        """Add the blocks for peers to a step's plan."""

    def pushes_ended(self, failures: list[PushFailure], *, void: bool) -> None:
        """The answer to the step has come, `void` if its forward failed; called before the scheduler takes it."""

    def step_ended(self, advanced: list[Advanced]) -> None:
        """The scheduler has taken the answer: these sequences were brought forward."""

    def deliver(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Send the outputs that belong to peers' requests; returns the others, which are the api's."""
        return outputs
