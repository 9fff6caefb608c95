"""Requests that an engine does not admit, and why: clients' requests and those of prefill instances alike."""

from __future__ import annotations

from ...request_messages import AddRequest
from .scheduler import Scheduler


class RequestLimits:
    """Checks requests before any prefetch is started.

    `max_open` requests may be open at once. `draining` is True from the first drain on: no request is admitted any
    more.
    """

    def __init__(self, scheduler: Scheduler, max_model_len: int, vocab_size: int, max_open: int) -> None:
        self._scheduler = scheduler
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._max_open = max_open
        self.draining = False

    def refusal(self, request: AddRequest, num_elsewhere: int) -> tuple[str, int] | None:
        """The reason for which a request is not admitted, with its HTTP status; None when it is. `num_elsewhere` open
        requests are not in the scheduler."""
        length, limit = len(request.token_ids), self.max_model_len
        if self.draining:
            return "the instance is shutting down", 503
        if request.request_id in self._scheduler.sequences:
            return f"request id {request.request_id!r} is in use", 400
        num_open = self._scheduler.num_open + num_elsewhere
        if num_open >= self._max_open:
            return f"{num_open} requests are open, the limit is {self._max_open}", 429
        if not length:
            return "the prompt has no token", 400
        if length + request.max_tokens > limit:
            return f"{length} prompt tokens and {request.max_tokens} new ones are above the limit of {limit}", 400
        if request.token_ids.min() < 0 or request.token_ids.max() >= self.vocab_size:
            return f"token ids must be from 0 to {self.vocab_size - 1}", 400
        return None
