"""Log probabilities in the three shapes clients know: OpenAI's for completions and chats, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..openai.output import Detokenizer
from ..openai.tokenizer import Tokenizer
from ..request_messages import TokenLogprob

_LOWEST = -9999.0  # JSON has no minus infinity


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """One token for people; without a tokenizer it is told by its id, as vLLM does."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _finite(value: float) -> float:
    return max(value, _LOWEST)


class CompletionLogprobs:
    """Grows OpenAI's four parallel lists, token by token; `take` hands out the entries since the last call."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, logprob: TokenLogprob | None, offset: int) -> None:
        """`logprob` None: the first token of a prompt, which nothing predicts."""
        name = token_text(self._tokenizer, token_id)
        self._tokens.append(name)
        self._offsets.append(offset)
        if logprob is None:
            self._values.append(None)
            self._top.append(None)
            return
        self._values.append(_finite(logprob.logprob))
        pairs = list(zip(logprob.top_ids, logprob.top_logprobs, strict=True))[: self._num_top]
        top = {token_text(self._tokenizer, i): _finite(value) for i, value in pairs}
        if self._num_top:
            top.setdefault(name, _finite(logprob.logprob))
        self._top.append(top)

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> int:
        """Adds an echoed prompt; returns its length in characters, where the completion's offsets begin."""
        text = Detokenizer(self._tokenizer) if self._tokenizer is not None else None
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self.add(token_id, logprob, text.num_characters if text else 0)
            if text:
                text.push(token_id)
        if text:
            text.flush()
        return text.num_characters if text else 0

    def take(self) -> dict[str, Any]:
        taken = {
            "text_offset": self._offsets,
            "token_logprobs": self._values,
            "tokens": self._tokens,
            "top_logprobs": self._top,
        }
        self._clear()
        return taken


def chat_logprob(tokenizer: Tokenizer | None, token_id: int, logprob: TokenLogprob, num_top: int) -> dict[str, Any]:
    """One entry of `choices[].logprobs.content` of a chat."""

    def entry(shown_id: int, value: float) -> dict[str, Any]:
        raw = b"" if tokenizer is None else tokenizer.token_bytes(shown_id)
        return {"token": token_text(tokenizer, shown_id), "logprob": _finite(value), "bytes": list(raw)}

    pairs = list(zip(logprob.top_ids, logprob.top_logprobs, strict=True))[:num_top]
    return entry(token_id, logprob.logprob) | {"top_logprobs": [entry(i, value) for i, value in pairs]}


def prompt_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt token a map from id to value, rank and text; the prompt's own token is always in it."""

    def entry(shown_id: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, shown_id)}

    def position(token_id: int, item: TokenLogprob | None) -> dict[str, Any] | None:
        if item is None:
            return None
        pairs = enumerate(zip(item.top_ids, item.top_logprobs, strict=True), start=1)
        top = {str(i): entry(i, value, rank) for rank, (i, value) in pairs}
        return {str(token_id): entry(token_id, item.logprob, item.rank)} | top

    return [position(token_id, item) for token_id, item in zip(token_ids, logprobs, strict=True)]


def aligned(logprobs: Sequence[TokenLogprob | None] | None, num_prompt: int) -> list[TokenLogprob | None]:
    """One entry per prompt token, None for the first, also when the engine leaves that one out."""
    found = list(logprobs or ())
    return [None] * (num_prompt - len(found)) + found
