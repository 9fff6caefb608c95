"""Requests and their outputs: the messages between api and engine, packed by `wire`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ints import Ints

# ------------------------------------------------------------------------------------------ api -> engine


@dataclass(frozen=True)
class SamplingSpec:
    """How the next token of a request is chosen.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch those filters off. `seed` is always set:
    draw i of a request depends on (seed, i) only, so a resumed request draws the same tokens as an undisturbed one.
    `num_logprobs`: None = none, 0 = of the chosen token only, n = of the n most likely too; of the distribution before
    temperature and filters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None


@dataclass(frozen=True)
class AddRequest:
    """A tokenised request. `stop_token_ids` end it (the token is part of the output); `ignore_eos` disables
    `eos_token_ids`. `prompt_logprobs` None = none, else as `num_logprobs`, for every prompt token but the first: such a
    request computes its whole prompt. Smaller `priority` runs first. `cache_salt` separates name spaces of prefixes.
    `decode_instance` is the name of the one a prefill instance is to hand it to, if that can be; empty: whichever.
    """

    request_id: str
    token_ids: Ints
    sampling: SamplingSpec
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    decode_instance: str = ""


@dataclass(frozen=True)
class AbortRequest:
    """The client is gone or has enough; legal in every state, unknown ids are ignored."""

    request_id: str


# ------------------------------------------------------------------------------------------ engine -> api


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of the chosen token and of the most likely ones, most likely first (ids and values in step)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class PromptUsage:
    """Which tier paid for each prompt token: the four sum to the prompt's length (xLLM law A, DESIGN section 6)."""

    device: int
    host: int
    store: int
    computed: int


@dataclass(frozen=True)
class RequestOutput:
    """New tokens of one request, in order. `usage` comes with the first output; `prompt_logprobs` too when asked for.

    `finish_reason`: None while running, else `stop` | `length` | `abort` | `error`. `stop_reason` is the stop token's
    id when one of `stop_token_ids` ended it. `error` is a text for the user, with `error_status` as its HTTP status.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: PromptUsage | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_status: int = 500


@dataclass(frozen=True)
class StepOutputs:
    """All outputs of one engine step in one message."""

    outputs: list[RequestOutput]
