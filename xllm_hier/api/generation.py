"""One HTTP request's engine requests, run side by side: admission, merging in order of arrival, usage, clean ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError
from ..openai.output import ChoiceDecoder, TokenEvent, decode_choice
from ..openai.refusals import Refusal
from ..request_messages import AddRequest
from .metrics import RequestTimes


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request, tokenised; `text` is None where ids came and nobody asked for the text."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class Choice:
    """One answer to one prompt: an engine request and the decoder of its outputs."""

    index: int
    prompt: Prompt
    request: AddRequest
    decoder: ChoiceDecoder


class Admission:
    """Counts open engine requests against their limit and closes the door when the instance drains."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_open = 0
        self.draining = False

    def check(self, count: int) -> None:
        """Raises RequestError where `count` more cannot enter: 429 for too many, 503 while the instance drains."""
        if self.draining:
            raise Refusal("the instance is shutting down", status=503, code="shutting_down")
        if self.num_open + count > self._limit:
            raise Refusal(
                f"{self.num_open} requests are open and {count} more came; the limit is {self._limit}",
                status=429,
                code="too_many_requests",
            )

    def enter(self, count: int) -> None:
        """Take `count` places, to be given back by `leave`; raises as `check`."""
        self.check(count)
        self.num_open += count

    def leave(self, count: int) -> None:
        self.num_open -= count


class Generation:
    """Runs `choices` from `async with` on; leaving the block aborts those that have not ended.

    Iterate `events()` once.
    """

    def __init__(self, client: EngineClient, admission: Admission, choices: list[Choice], times: RequestTimes) -> None:
        self.choices = choices
        self._client = client
        self._admission = admission
        self._times = times
        self._queue: asyncio.Queue[tuple[Choice, list[TokenEvent]] | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_ended = 0

    async def __aenter__(self) -> Generation:
        self._admission.enter(len(self.choices))
        self._tasks = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(len(self.choices) - self._num_ended):
            self._times.ended("error" if isinstance(error, (RequestError, EngineDeadError)) else "abort")
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # after the aborts are sent: whoever gets these places is behind them on the way to the engine
            self._admission.leave(len(self.choices))

    async def _pump(self, choice: Choice) -> None:
        try:
            async for events in decode_choice(self._client, choice.request, choice.decoder):
                self._queue.put_nowait((choice, events))
        except Exception as error:  # handed to whoever iterates
            self._queue.put_nowait(error)

    async def events(self) -> AsyncGenerator[tuple[Choice, TokenEvent], None]:
        """Every token of every choice, as they come.

        Raises:
            RequestError: the engine could not serve one of the choices.
            EngineDeadError: the engine is gone.
        """
        while self._num_ended < len(self.choices):
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            choice, events = item
            for event in events:
                if event.token_id is not None:
                    self._times.token(choice.index)
                if event.finish_reason is not None:
                    self._num_ended += 1
                    self._times.ended(event.finish_reason)
                yield choice, event

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt counts once, whatever `n` is; which tier paid is told by its first choice."""
        first = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in first)
        completion_tokens = sum(choice.decoder.num_tokens for choice in self.choices)
        paid = [choice.decoder.usage for choice in first if choice.decoder.usage is not None]
        tiers = {tier: sum(getattr(usage, tier) for usage in paid) for tier in ("device", "host", "store")}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(tiers.values()), "cached_tokens_by_tier": tiers},
        }
