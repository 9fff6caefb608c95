"""The bodies of /v1/completions and /v1/chat/completions: OpenAI's fields, vLLM's extras, and the refused ones.

A field is served, or refused by name: unknown ones always, known but unsupported ones when they ask for something.
`null` means the default everywhere. Ranges are checked by `sampling`, once for HTTP and Python.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    field_validator,
    model_validator,
)

from ..errors import RequestError
from .sampling import SamplingParams

_PENALTIES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}
_Number = Annotated[float, Field(strict=True)]


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the usage."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Routing(BaseModel):
    """The service's addition: the instances it chose, the prompts as it tokenised them, the id it gave the request."""

    model_config = ConfigDict(extra="forbid")
    prefill_name: str = ""
    decode_name: str = ""
    token_ids: list[list[StrictInt]] | None = None
    service_request_id: str = Field(default="", pattern=r"^[A-Za-z0-9._:-]{0,128}$")


class _Request(BaseModel):
    """The fields of both endpoints."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = _PENALTIES

    model: str = ""
    n: StrictInt = 1
    temperature: _Number = 1.0
    top_p: _Number = 1.0
    stop: str | list[str] = Field(default_factory=list)
    seed: StrictInt | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str = Field(default="", description="accepted; has no effect on the answer")
    safety_identifier: str = Field(default="", description="accepted; has no effect on the answer")
    prompt_cache_key: str = Field(default="", description="accepted; prefixes are found by content")

    top_k: StrictInt = Field(default=0, description="0 or -1 = off")
    min_p: _Number = 0.0
    min_tokens: StrictInt = 0
    stop_token_ids: list[StrictInt] = Field(default_factory=list)
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    prompt_logprobs: StrictInt | None = None
    return_token_ids: StrictBool = Field(default=False, description="adds token_ids to each choice")
    cache_salt: str = Field(default="", description="prefixes are shared only between equal salts")
    routing: Routing = Field(default_factory=Routing, description="set by the service in front")
    priority: StrictInt = Field(default=0, ge=-(1 << 31), lt=1 << 31, description="smaller runs first")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.unsupported:
                if value is not None and value not in cls.unsupported[name]:
                    raise RequestError(f"{name} is not supported", param=name)
            elif value is not None or name not in cls.model_fields:
                kept[name] = value
        return kept

    @model_validator(mode="before")
    @classmethod
    def _refuse_broken_text(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            if not (_is_utf8(name) and _is_utf8(value)):
                raise RequestError(
                    f"{name}: text must be valid Unicode, without halves of surrogate pairs", param=str(name)
                )
        return data

    @model_validator(mode="after")
    def _check_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


def _kind_of_prompt(value: Any) -> str:
    """Which of its forms a prompt is to be checked as, told by its first element: trying them all takes as long as
    computing some of a long prompt."""
    if not isinstance(value, list) or not value:
        return "ids" if isinstance(value, list) else "text"
    return "texts" if isinstance(value[0], str) else "lists" if isinstance(value[0], list) else "ids"


_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[StrictInt], Tag("ids")]
    | Annotated[list[list[StrictInt]], Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(_Request):
    """Body of /v1/completions: `prompt` is a text, token ids, or a list of either."""

    unsupported = _PENALTIES | {"suffix": ("",)}

    prompt: _Prompt
    max_tokens: StrictInt | None = Field(default=None, description="default 16")
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictInt | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    add_special_tokens: StrictBool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(f"best_of is supported only when it equals n ({self.n})", param="best_of")
        if self.tokens_asked == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 without echo", param="max_tokens")
        return self

    @property
    def tokens_asked(self) -> int | None:
        return _one_of(self.max_tokens, self.max_completion_tokens)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # a list of ids is one prompt
        return list(self.prompt)

    def sampling_params(self) -> SamplingParams:
        """The checked parameters; echo with logprobs needs the prompt's too. Raises RequestError."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        asked = self.tokens_asked
        return self._sampling(
            max_tokens=16 if asked is None else asked, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )


class TextPart(BaseModel):
    """One part of a message's content; other kinds than text are refused."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; `developer` is OpenAI's newer word for `system` and treated as that."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    tool_calls: list[Any] | None = Field(default=None, max_length=0)
    function_call: None = None
    reasoning_content: None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: text parts joined by line ends."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text or ""}
        return plain | ({"name": self.name} if self.name is not None else {})


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    unsupported = _PENALTIES | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = None
    add_generation_prompt: StrictBool | None = Field(default=None, description="default true")
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("messages", mode="before")
    @classmethod
    def _refuse_media(cls, messages: Any) -> Any:
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise RequestError(f"content of type {kind!r} is not supported, only text", param="messages")
        return messages

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise RequestError(f"top_logprobs must be from 0 to 20, not {self.top_logprobs}", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if _one_of(self.max_tokens, self.max_completion_tokens) == 0:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        return self

    @property
    def generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def sampling_params(self) -> SamplingParams:
        """The checked parameters; without a limit of its own a chat may fill the model's context."""
        return self._sampling(
            max_tokens=_one_of(self.max_tokens, self.max_completion_tokens),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


def _is_utf8(value: Any) -> bool:
    """Whether UTF-8 can hold every text in `value`, keys too; not recursive, as a body may be nested deeply."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += (each for each in item if not isinstance(each, int))  # token ids, of which there may be many
    return True


def _one_of(old: int | None, new: int | None) -> int | None:
    """`max_completion_tokens` is the newer name of `max_tokens`; given both, they must agree."""
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    return old if new is None else new


def describe(errors: list[Any]) -> tuple[str, str | None]:
    """Message and field of what pydantic found first; `errors` is its own list."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", None
    if not where:
        return f"the body must be a JSON object with Content-Type application/json ({first['msg']})", None
    name = where[0]
    if first["type"] == "extra_forbidden":
        return f"unknown field: {'.'.join(where)}", name
    if first["type"] == "missing":
        return f"missing field: {'.'.join(where)}", name
    if name == "prompt":
        return "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids", name
    return f"{'.'.join(where)}: {first['msg']}", name
