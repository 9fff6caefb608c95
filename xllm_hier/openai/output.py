"""From token ids to the text a client sees: characters over token borders, stop strings over text borders.

Everything here works token by token and in time linear in the output's length.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ..engine_client import EngineClient
from ..errors import RequestError
from ..request_messages import AddRequest, PromptUsage, RequestOutput, TokenLogprob
from .tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 6  # of the prompt: some decoders drop the space of a text's first token
_MAX_PENDING_TOKENS = 16  # a character has at most 4 bytes: more pending tokens are garbage, shown as it is


class Detokenizer:
    """Turns a growing list of ids into text; holds back the possible first bytes of a longer character.

    Only a window of ids is decoded each time: `_ids[_start:]`, whose first `_shown` characters are already out.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)
        self._shown = len(self._decode().rstrip(_UNFINISHED))
        self.num_characters = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; it may be empty, or hold characters begun by earlier tokens."""
        self._ids.append(token_id)
        text = self._decode()
        settled = text.rstrip(_UNFINISHED)
        if settled == text or len(self._ids) - self._read > _MAX_PENDING_TOKENS:
            return self._settle(text)
        return self._show(settled)

    def flush(self) -> str:
        """The text that is still held back, at the output's end."""
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        fresh = text[self._shown :]
        self._shown = max(self._shown, len(text))
        self.num_characters += len(fresh)
        return fresh

    def _settle(self, text: str) -> str:
        fresh = self._show(text)
        self._start, self._read = self._read, len(self._ids)
        self._shown = len(self._decode())
        if self._start > 1024:  # keeps the list short without moving it each time
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return fresh


class StopFinder:
    """Finds the first stop string in a text that arrives in pieces; holds back the possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was found (then nothing may follow)."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            self._held = ""
            return text[:place], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass
class TokenEvent:
    """One generated token, or the end alone (`token_id` None). `text` may be shown now.

    `offset` is where the token's own text begins, in characters of the generated text.
    """

    text: str
    token_id: int | None
    offset: int
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceDecoder:
    """Turns the outputs of one engine request into TokenEvents and keeps the usage and the prompt's log probabilities.

    Without a tokenizer all texts are empty. `drop_tokens`: the request was for no token at all (`max_tokens` 0).
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        drop_tokens: bool = False,
    ) -> None:
        self.usage: PromptUsage | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.num_tokens = 0
        self._text = (
            Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._stop = StopFinder(stops)
        self._min_tokens = min_tokens
        self._drop = drop_tokens

    def push(self, output: RequestOutput) -> list[TokenEvent]:
        """The events of one output; the last has a finish reason when the choice has ended.

        Raises:
            RequestError: the engine could not serve the request.
        """
        if output.error is not None:
            raise RequestError(output.error, status=output.error_status)
        if output.finish_reason == "error":
            raise RequestError("the engine ended the request with an error", status=500)
        if self.usage is None:
            self.usage = output.usage
        if self.prompt_logprobs is None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._drop:
            return [TokenEvent("", None, 0, finish_reason="length")] if output.finish_reason else []
        events: list[TokenEvent] = []
        for place, token_id in enumerate(output.token_ids):
            # The token that ends a text by its id belongs to the output, its text does not.
            ending = output.finish_reason == "stop" and place == len(output.token_ids) - 1
            event = self._token(token_id, show=not ending)
            event.logprob = output.logprobs[place] if output.logprobs else None
            events.append(event)
            if event.finish_reason is not None:
                return events
        if output.finish_reason is not None:
            self._finish(output, events)
        return events

    def _token(self, token_id: int, *, show: bool) -> TokenEvent:
        self.num_tokens += 1
        if self._text is None:
            return TokenEvent("", token_id, 0)
        offset = self._text.num_characters
        fresh = self._text.push(token_id) if show else ""
        if self.num_tokens <= self._min_tokens:
            return TokenEvent(fresh, token_id, offset)
        return self._checked(TokenEvent(fresh, token_id, offset))

    def _checked(self, event: TokenEvent) -> TokenEvent:
        event.text, stop = self._stop.push(event.text)
        if stop is not None:
            event.finish_reason, event.stop_reason = "stop", stop
        return event

    def _finish(self, output: RequestOutput, events: list[TokenEvent]) -> None:
        if not events:
            events.append(TokenEvent("", None, self._text.num_characters if self._text else 0))
        last = events[-1]
        tail = self._checked(TokenEvent(self._text.flush() if self._text else "", None, 0))
        last.text += tail.text
        if tail.finish_reason is not None:
            last.finish_reason, last.stop_reason = tail.finish_reason, tail.stop_reason
            return
        last.text += self._stop.flush()
        last.finish_reason, last.stop_reason = output.finish_reason, output.stop_reason


async def decode_choice(
    client: EngineClient, request: AddRequest, decoder: ChoiceDecoder
) -> AsyncGenerator[list[TokenEvent], None]:
    """Events of one engine request, one non-empty list per output, until it ends or a stop string ends it.

    Closing it early, as a found stop string does, aborts the engine request.

    Raises:
        RequestError: the engine could not serve the request.
        EngineDeadError: the engine is gone.
    """
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            events = decoder.push(output)
            if events:
                yield events
                if events[-1].finish_reason is not None:
                    return
