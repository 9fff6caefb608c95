"""The way of an OpenAI request from its body to its answer, and the state that all routes share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ..config import EngineConfig
from ..engine_client import EngineClient
from ..errors import RequestError
from ..openai.chat_prompt import encode_chat
from ..openai.output import ChoiceDecoder
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.refusals import Refusal
from ..openai.sampling import SamplingParams, ServedModel, build_requests, check_token_ids
from ..openai.streaming import ServerSentEvents, until_disconnected
from ..openai.tokenizer import Tokenizer
from .answers import ChatView, ChoiceView, CompletionView, stream_chunks, whole_answer
from .generation import Admission, Choice, Generation, Prompt
from .metrics import ApiMetrics, StatsCache
from .registration import Registration


def handlers_of(request: Request) -> RequestHandlers:
    """The handlers of the application that got `request`."""
    found: RequestHandlers = request.app.state.handlers
    return found


class RequestHandlers:
    """Answers the OpenAI requests of one API process and keeps the state of its routes; nothing here needs closing."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.registration: Registration | None = None
        self.store_config = config  # where the store is now: it can be attached elsewhere
        self.stats = StatsCache(client)
        self.metrics = ApiMetrics(self.stats)
        self.admission = Admission(config.max_waiting_requests)
        self.created = int(time.time())
        own_eos = tokenizer.eos_token_id if tokenizer is not None else None
        self.model = ServedModel.from_info(client.info)
        self.chat_model = ServedModel.from_info(client.info, () if own_eos is None else (own_eos,))

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer /v1/completions. Raises RequestError, EngineDeadError, ClientGoneError."""
        times = self.metrics.start_request()
        self._check_model(body.model)
        params = body.sampling_params()
        prompts = await self._prompts(body)
        request_id = body.routing.service_request_id or f"cmpl-{secrets.token_hex(12)}"
        choices = self._choices(self.model, prompts, params, request_id, body)
        views = [CompletionView(body, choice, self.tokenizer) for choice in choices]
        generation = Generation(self.client, self.admission, choices, times)
        head = self._head(request_id, "text_completion")
        return await _answer(body, request, generation, views, head)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer /v1/chat/completions. Raises RequestError, EngineDeadError, ClientGoneError."""
        times = self.metrics.start_request()
        self._check_model(body.model)
        params = body.sampling_params()
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", param="messages")
        given = _given_prompts(body, 1)
        prompt = Prompt(None, given[0]) if given else Prompt(*await encode_chat(self.tokenizer, body))
        request_id = body.routing.service_request_id or f"chatcmpl-{secrets.token_hex(12)}"
        choices = self._choices(self.chat_model, [prompt], params, request_id, body)
        views = [ChatView(body, choice, self.tokenizer) for choice in choices]
        generation = Generation(self.client, self.admission, choices, times)
        head = self._head(request_id, "chat.completion.chunk" if body.stream else "chat.completion")
        return await _answer(body, request, generation, views, head)

    # ------------------------------------------------------------------------------------------- inside

    def _check_model(self, name: str) -> None:
        if name and name != self.model.name:
            raise Refusal(
                f"the model {name!r} is not served here; this is {self.model.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _head(self, request_id: str, kind: str) -> dict[str, Any]:
        return {"id": request_id, "object": kind, "created": int(time.time()), "model": self.model.name}

    async def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        self.admission.check(len(body.prompts) * body.n)  # before any of them costs time
        prompts = body.prompts
        if given := _given_prompts(body, len(prompts)):
            for ids in given:
                check_token_ids("routing.token_ids", ids, self.model.vocab_size)
            return [
                Prompt(prompt, ids) if isinstance(prompt, str) else await self._prompt(ids, body)
                for prompt, ids in zip(prompts, given, strict=True)
            ]
        return [await self._prompt(prompt, body) for prompt in prompts]

    async def _prompt(self, prompt: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; send the prompt as token ids", param="prompt")
            ids = await self.tokenizer.encode_async(prompt, add_special_tokens=body.add_special_tokens)
            return Prompt(prompt, ids)
        check_token_ids("prompt", prompt, self.model.vocab_size)
        if body.echo and self.tokenizer is not None:
            text = await asyncio.to_thread(self.tokenizer.decode, prompt, skip_special_tokens=body.skip_special_tokens)
            return Prompt(text, prompt)
        return Prompt(None, prompt)

    def _choices(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_id: str,
        body: CompletionRequest | ChatRequest,
    ) -> list[Choice]:
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("this model has no tokenizer; stop needs one, stop_token_ids does not", param="stop")
        choices: list[Choice] = []
        for number, prompt in enumerate(prompts):
            requests = build_requests(
                model,
                prompt.token_ids,
                params,
                f"{request_id}-{number}",
                cache_salt=body.cache_salt,
                priority=body.priority,
                decode_instance=body.routing.decode_name,
            )
            for item in requests:
                decoder = ChoiceDecoder(
                    self.tokenizer,
                    prompt.token_ids,
                    stops=params.stop_strings,
                    min_tokens=params.min_tokens,
                    skip_special_tokens=params.skip_special_tokens,
                    drop_tokens=params.max_tokens == 0,
                )
                choices.append(Choice(len(choices), prompt, item, decoder))
        return choices


def _given_prompts(body: CompletionRequest | ChatRequest, count: int) -> list[list[int]]:
    """The prompts as the service in front has tokenised them; empty when it has not. Raises RequestError."""
    given = body.routing.token_ids or []
    if given and len(given) != count:
        raise RequestError(f"{len(given)} lists of token ids for {count} prompts", param="routing.token_ids")
    return given


async def _answer(
    body: CompletionRequest | ChatRequest,
    request: Request,
    generation: Generation,
    views: Sequence[ChoiceView],
    head: dict[str, Any],
) -> Response:
    if body.stream:
        return ServerSentEvents(stream_chunks(generation, views, head, include_usage=body.include_usage))
    return JSONResponse(await until_disconnected(request.receive, whole_answer(generation, views, head)))
