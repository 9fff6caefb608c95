"""Choices as JSON: what has come since the last look is a chunk of a stream, or the whole answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from ..openai.output import TokenEvent
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.tokenizer import Tokenizer
from .generation import Choice, Generation
from .logprobs import CompletionLogprobs, aligned, chat_logprob, prompt_logprobs


class ChoiceView(Protocol):
    """Collects the events of one choice and gives them away as JSON."""

    def opening(self) -> dict[str, Any] | None:
        """The chunk that comes before the first token of a stream."""

    def add(self, event: TokenEvent) -> None:
        """Collect one event."""

    def take(self, *, stream: bool) -> dict[str, Any]:
        """What was added since the last `take`."""


class CompletionView:
    """A choice of /v1/completions."""

    def __init__(self, body: CompletionRequest, choice: Choice, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._choice = choice
        self._tokenizer = tokenizer
        self._fresh = True
        self._text: list[str] = []
        self._ids: list[int] = []
        self._base = 0
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer, body.logprobs)
        self._end: TokenEvent | None = None

    def opening(self) -> dict[str, Any] | None:
        return None

    def add(self, event: TokenEvent) -> None:
        if self._fresh and not self._text and self._body.echo:
            self._echo()
        self._text.append(event.text)
        if event.token_id is not None:
            self._ids.append(event.token_id)
            if self._logprobs is not None:
                self._logprobs.add(event.token_id, event.logprob, self._base + event.offset)
        if event.finish_reason is not None:
            self._end = event

    def _echo(self) -> None:
        prompt = self._choice.prompt
        self._text.append(prompt.text or "")
        self._base = len(prompt.text or "")
        if self._logprobs is not None:
            known = aligned(self._choice.decoder.prompt_logprobs, len(prompt.token_ids))
            self._logprobs.add_prompt(prompt.token_ids, known)

    def take(self, *, stream: bool) -> dict[str, Any]:
        taken: dict[str, Any] = {
            "index": self._choice.index,
            "text": "".join(self._text),
            "logprobs": self._logprobs.take() if self._logprobs is not None else None,
            "finish_reason": self._end.finish_reason if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
        }
        if self._body.return_token_ids:
            taken["token_ids"] = self._ids
            if self._fresh:
                taken["prompt_token_ids"] = self._choice.prompt.token_ids
        if self._body.prompt_logprobs is not None:
            taken["prompt_logprobs"] = _prompt_logprobs(self._choice, self._tokenizer)
        self._fresh, self._text, self._ids = False, [], []
        return taken


class ChatView:
    """A choice of /v1/chat/completions."""

    def __init__(self, body: ChatRequest, choice: Choice, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._choice = choice
        self._tokenizer = tokenizer
        self._fresh = True
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._end: TokenEvent | None = None

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": self._choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def add(self, event: TokenEvent) -> None:
        self._text.append(event.text)
        if event.token_id is not None:
            self._ids.append(event.token_id)
            if self._body.logprobs and event.logprob is not None:
                top = self._body.top_logprobs or 0
                self._logprobs.append(chat_logprob(self._tokenizer, event.token_id, event.logprob, top))
        if event.finish_reason is not None:
            self._end = event

    def take(self, *, stream: bool) -> dict[str, Any]:
        text = "".join(self._text)
        message = {"content": text} if stream else {"role": "assistant", "content": text, "refusal": None}
        taken: dict[str, Any] = {
            "index": self._choice.index,
            "delta" if stream else "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._end.finish_reason if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
        }
        if self._body.return_token_ids:
            taken["token_ids"] = self._ids
            if self._fresh:
                taken["prompt_token_ids"] = self._choice.prompt.token_ids
        if self._body.prompt_logprobs is not None:
            taken["prompt_logprobs"] = _prompt_logprobs(self._choice, self._tokenizer)
        self._fresh, self._text, self._ids, self._logprobs = False, [], [], []
        return taken


def _prompt_logprobs(choice: Choice, tokenizer: Tokenizer | None) -> list[dict[str, Any] | None]:
    ids = choice.prompt.token_ids
    return prompt_logprobs(tokenizer, ids, aligned(choice.decoder.prompt_logprobs, len(ids)))


async def whole_answer(generation: Generation, views: Sequence[ChoiceView], head: dict[str, Any]) -> dict[str, Any]:
    """The answer when all choices have ended; `head` holds id, object, created and model.

    Raises:
        RequestError, EngineDeadError: as `Generation.events`.
    """
    async with generation:
        async for choice, event in generation.events():
            views[choice.index].add(event)
    return head | {"choices": [view.take(stream=False) for view in views], "usage": generation.usage()}


async def stream_chunks(
    generation: Generation, views: Sequence[ChoiceView], head: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """One chunk per token, with `include_usage` a last one for the usage; closing it early aborts the rest.

    Raises:
        RequestError, EngineDeadError: as `Generation.events`.
    """
    more: dict[str, Any] = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    async with generation:
        async for choice, event in generation.events():
            view = views[choice.index]
            if choice.index not in opened:
                opened.add(choice.index)
                opening = view.opening()
                if opening is not None:
                    yield head | {"choices": [opening]} | more
            view.add(event)
            yield head | {"choices": [view.take(stream=True)]} | more
    if include_usage:
        yield head | {"choices": [], "usage": generation.usage()}
