"""From sampling parameters to the engine's requests: the one place that checks ranges, lengths and ids.

The HTTP endpoints and `LLM.generate` both come through here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import RequestError
from ..figures import EngineInfo
from ..ints import ints
from ..request_messages import AddRequest, SamplingSpec
from .refusals import Refusal

MAX_LOGPROBS = 20
MAX_CHOICES = 128
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw an answer to one prompt, and when to stop; names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 (or -1), `top_p` 1 and `min_p` 0 switch those filters off. `max_tokens` None =
    up to the model's limit. `logprobs`: None = none, 0 = of the drawn tokens, n = of the n likeliest too.

    Raises:
        RequestError: a value is out of its range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = field(default_factory=list)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _range("n", self.n, 1, MAX_CHOICES)
        _range("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p:g}", param="top_p")
        _range("top_k", self.top_k, -1, (1 << 31) - 1)
        _range("min_p", self.min_p, 0, 1)
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 0, (1 << 31) - 1)
        _range("min_tokens", self.min_tokens, 0, (1 << 31) - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}", param="min_tokens"
            )
        if self.seed is not None:
            _range("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _range(name, value, 0, MAX_LOGPROBS)
        if "" in self.stop_strings:
            raise RequestError("stop must not hold an empty text", param="stop")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list: one text alone means a list of one."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} must be from {low} to {high}, not {value}", param=name)


@dataclass(frozen=True)
class ServedModel:
    """The model as a request sees it: the name clients use, the limits in tokens, the ids that end a text."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_info(cls, info: EngineInfo, extra_eos: Iterable[int] = ()) -> ServedModel:
        """Of the engine's `info`; `extra_eos` are the tokenizer's own ends of text."""
        ends = sorted({*info.eos_token_ids, *extra_eos})
        return cls(info.model, info.max_model_len, info.vocab_size, tuple(ends))


def build_requests(
    model: ServedModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    request_id: str,
    *,
    cache_salt: str = "",
    priority: int = 0,
    decode_instance: str = "",
) -> list[AddRequest]:
    """One engine request for each of the `params.n` choices of one prompt, ids `<request_id>-<i>`.

    Choice i is drawn with seed + i, so that it does not depend on n; without a seed a random one is taken.
    `max_tokens` 0 computes one token all the same, which the caller drops.

    Raises:
        RequestError: ids outside the vocabulary, an empty prompt, or more tokens than the model's limit.
    """
    check_token_ids("prompt", token_ids, model.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)
    max_tokens = _max_tokens(model, len(token_ids), params.max_tokens)
    if not len(token_ids):
        raise RequestError("the prompt must hold at least one token", param="prompt")
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    prompt = ints(token_ids)
    return [
        AddRequest(
            request_id=f"{request_id}-{choice}",
            token_ids=prompt,
            sampling=SamplingSpec(
                temperature=float(params.temperature),
                top_k=max(0, params.top_k),
                top_p=float(params.top_p),
                min_p=float(params.min_p),
                seed=(seed + choice) & _SEED_MASK,
                num_logprobs=params.logprobs,
            ),
            max_tokens=max(1, max_tokens),
            min_tokens=params.min_tokens,
            stop_token_ids=list(params.stop_token_ids),
            eos_token_ids=list(model.eos_token_ids),
            ignore_eos=params.ignore_eos,
            prompt_logprobs=params.prompt_logprobs,
            cache_salt=cache_salt,
            priority=priority,
            decode_instance=decode_instance,
        )
        for choice in range(params.n)
    ]


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError, with `name` as its field, for the first id outside of the vocabulary."""
    if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(f"{name}: token id {bad} is outside of the vocabulary (0 to {vocab_size - 1})", param=name)


def _max_tokens(model: ServedModel, num_prompt: int, asked: int | None) -> int:
    room = model.max_model_len - num_prompt
    wanted = 1 if asked is None else max(1, asked)
    if wanted > room:
        raise Refusal(
            f"this model's maximum context length is {model.max_model_len} tokens; the prompt has {num_prompt} and "
            f"{wanted} more {'is' if wanted == 1 else 'are'} needed for the completion",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return room if asked is None else asked
