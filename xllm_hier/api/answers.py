"""Choices as JSON: the events since the last look become a chunk of a stream, or the whole answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ..openai.output import TokenEvent
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.tokenizer import Tokenizer
from ..request_messages import TokenLogprob
from .generation import Choice, Generation
from .logprobs import CompletionLogprobs, aligned, chat_logprob, prompt_logprobs


class ChoiceView:
    """Collects the events of one choice and gives them away as JSON; an endpoint adds its own fields."""

    def __init__(self, body: CompletionRequest | ChatRequest, choice: Choice, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._choice = choice
        self._tokenizer = tokenizer
        self._fresh = True  # nothing was taken yet
        self._text: list[str] = []
        self._ids: list[int] = []
        self._end: TokenEvent | None = None

    def opening(self) -> dict[str, Any] | None:
        """The chunk that comes before the first token of a stream; None for an endpoint without one."""
        return None

    def add(self, event: TokenEvent) -> None:
        """Collect one event."""
        self._text.append(event.text)
        if event.token_id is not None:
            self._ids.append(event.token_id)
            self._add_logprob(event.token_id, event)
        if event.finish_reason is not None:
            self._end = event

    def take(self, *, stream: bool) -> dict[str, Any]:
        """The events that were added since the last `take`, as a chunk of a stream or as the whole answer."""
        taken: dict[str, Any] = {
            "index": self._choice.index,
            **self._content("".join(self._text), stream=stream),
            "finish_reason": self._end.finish_reason if self._end else None,
            "stop_reason": self._end.stop_reason if self._end else None,
        }
        if self._body.return_token_ids:
            taken["token_ids"] = self._ids
            if self._fresh:
                taken["prompt_token_ids"] = self._choice.prompt.token_ids
        if self._body.prompt_logprobs is not None:
            taken["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._choice.prompt.token_ids, self._prompt_logprobs()
            )
        self._fresh, self._text, self._ids = False, [], []
        return taken

    def _prompt_logprobs(self) -> list[TokenLogprob | None]:
        return aligned(self._choice.decoder.prompt_logprobs, len(self._choice.prompt.token_ids))

    def _add_logprob(self, token_id: int, event: TokenEvent) -> None:
        raise NotImplementedError

    def _content(self, text: str, *, stream: bool) -> dict[str, Any]:
        """The fields for `text` and for the log probabilities since the last call."""
        raise NotImplementedError


class CompletionView(ChoiceView):
    """A choice of /v1/completions."""

    def __init__(self, body: CompletionRequest, choice: Choice, tokenizer: Tokenizer | None) -> None:
        super().__init__(body, choice, tokenizer)
        self._echo = body.echo  # the prompt is still to be shown before the first token
        self._base = 0
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer, body.logprobs)

    def add(self, event: TokenEvent) -> None:
        if self._echo:
            self._echo = False
            self._add_prompt()
        super().add(event)

    def _add_prompt(self) -> None:
        prompt = self._choice.prompt
        self._text.append(prompt.text or "")
        self._base = len(prompt.text or "")
        if self._logprobs is not None:
            self._logprobs.add_prompt(prompt.token_ids, self._prompt_logprobs())

    def _add_logprob(self, token_id: int, event: TokenEvent) -> None:
        if self._logprobs is not None:
            self._logprobs.add(token_id, event.logprob, self._base + event.offset)

    def _content(self, text: str, *, stream: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs.take() if self._logprobs is not None else None}


class ChatView(ChoiceView):
    """A choice of /v1/chat/completions."""

    def __init__(self, body: ChatRequest, choice: Choice, tokenizer: Tokenizer | None) -> None:
        super().__init__(body, choice, tokenizer)
        self._num_top = body.top_logprobs or 0 if body.logprobs else None
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": self._choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _add_logprob(self, token_id: int, event: TokenEvent) -> None:
        if self._num_top is not None and event.logprob is not None:
            self._logprobs.append(chat_logprob(self._tokenizer, token_id, event.logprob, self._num_top))

    def _content(self, text: str, *, stream: bool) -> dict[str, Any]:
        message = {"content": text} if stream else {"role": "assistant", "content": text, "refusal": None}
        logprobs, self._logprobs = self._logprobs, []
        return {
            "delta" if stream else "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self._num_top is not None else None,
        }


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
