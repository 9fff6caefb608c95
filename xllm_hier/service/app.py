"""The HTTP application of the service: OpenAI's endpoints in front of all instances, and what operators ask for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..openai.auth import ApiKeyGate
from ..openai.body_limit import BodyLimit
from ..openai.chat_prompt import encode_chat
from ..openai.error_answers import add_error_answers
from ..openai.protocol import ChatRequest, CompletionRequest, describe
from ..openai.refusals import Refusal
from ..openai.sampling import check_token_ids
from ..openai.streaming import ClientGoneError, until_disconnected
from ..openai.tokenizer import Tokenizer
from ..version import __version__
from .cluster import Cluster
from .metrics import ServiceMetrics
from .policies import Prompt
from .relay import Answer, Relay

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CHARACTERS_PER_TOKEN = 4  # of texts that nobody tokenises here: for their cost, a guess will do
_Body = TypeVar("_Body", bound=BaseModel)

router = APIRouter()


class Front:
    """The state that all routes share; nothing here needs closing."""

    def __init__(self, cluster: Cluster, tokenizer: Tokenizer | None) -> None:
        self.cluster, self.tokenizer = cluster, tokenizer
        self.relay = Relay(cluster)
        self.metrics = ServiceMetrics(cluster, self.relay)
        self.draining = False
        self.started = int(time.time())

    def admit(self, model: str) -> str:
        """The model that is meant. Raises Refusal: too many requests, shutting down, unknown model, nobody there."""
        limit, models = self.cluster.config.max_open_requests, self.cluster.models()
        if self.draining:
            raise Refusal("the service is shutting down", status=503, code="shutting_down")
        if self.metrics.num_open >= limit:
            message = f"{self.metrics.num_open} requests are open; the limit is {limit}"
            raise Refusal(message, status=429, code="too_many_requests")
        if not models:
            raise Refusal("no instance is there", status=503, code="no_instance")
        if model and model not in models:
            known = ", ".join(sorted(models))
            message = f"the model {model!r} is not served here; there is {known}"
            raise Refusal(message, param="model", status=404, code="model_not_found")
        if not model and len(models) > 1:
            raise Refusal(f"say which model: {', '.join(sorted(models))}", param="model")
        return model or next(iter(models))

    async def completion_prompts(self, body: CompletionRequest) -> list[list[int]] | None:
        """Token ids of each prompt; None when some cannot be had here."""
        found: list[list[int]] = []
        for prompt in body.prompts:
            if isinstance(prompt, list):
                check_token_ids("prompt", prompt, 1 << 31)
                found.append(prompt)
            elif self.tokenizer is None:
                return None
            else:
                ids = await self.tokenizer.encode_async(prompt, add_special_tokens=body.add_special_tokens)
                found.append(ids)
        return found

    async def chat_prompt(self, body: ChatRequest) -> list[list[int]] | None:
        """Token ids of a chat; None when they cannot be had here."""
        if self.tokenizer is None:
            return None
        _, token_ids = await encode_chat(self.tokenizer, body)
        return [token_ids]

    async def relay_request(
        self,
        request: Request,
        path: str,
        raw: dict[str, Any],
        tokenised: Awaitable[list[list[int]] | None],
        started: float,
    ) -> Response:
        """Send a checked request on, once it is tokenised; its answer comes back as it comes.

        Raises:
            RequestError, ClientGoneError: it cannot be tokenised, nobody takes it, or nobody waits for it.
        """
        self.metrics.num_open += 1
        handed_over = False
        try:
            ids = await tokenised
            relayed = _Relayed(await self._send(request, path, raw, ids, started), self.metrics)
            handed_over = True
            return relayed
        finally:
            if not handed_over:
                self.metrics.num_open -= 1

    async def _send(
        self, request: Request, path: str, raw: dict[str, Any], ids: list[list[int]] | None, started: float
    ) -> Answer:
        if ids is None:
            length = len(str(raw.get("prompt") or raw.get("messages"))) // _CHARACTERS_PER_TOKEN
            prompt = Prompt([0] * length, known=False)
        else:
            tokens = ids[0] if len(ids) == 1 else [token for one in ids for token in one]
            prompt = Prompt(tokens, str(raw.get("cache_salt") or ""))
        kind = "chatcmpl" if path.startswith("/v1/chat") else "cmpl"
        given = raw.get("prompt")
        texts = (
            path.startswith("/v1/chat") or isinstance(given, str) or any(isinstance(one, str) for one in given or ())
        )
        work = self.relay.send(
            path,
            raw,
            prompt,
            f"{kind}-{secrets.token_hex(12)}",
            token_ids=ids if texts else None,
            on_chosen=lambda: self.metrics.routing_s.observe(time.perf_counter() - started),
        )
        return await until_disconnected(request.receive, work)


class _Relayed(Response):
    """Passes an answer on as it comes; ends it, and counts it out, whatever happens."""

    def __init__(self, answer: Answer, metrics: ServiceMetrics) -> None:
        self.status_code, self.background = answer.status, None
        self.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
        self._answer, self._metrics = answer, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                await until_disconnected(receive, self._send_all(send))
        finally:
            self._metrics.num_open -= 1
            await self._answer.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._answer.body():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def front_of(request: Request) -> Front:
    """The front of the application that got `request`."""
    found: Front = request.app.state.front
    return found


def create_app(cluster: Cluster, tokenizer: Tokenizer | None) -> FastAPI:
    """The application over a running `cluster`, which stays the caller's; `app.state.front` holds the state."""
    app = FastAPI(title="xllm_hier service", version=__version__, redoc_url=None)
    app.state.front = Front(cluster, tokenizer)
    app.include_router(router)
    app.add_middleware(BodyLimit)
    if cluster.config.api_key:
        app.add_middleware(ApiKeyGate, api_key=cluster.config.api_key)
    add_error_answers(app)
    return app


async def _parse(request: Request, kind: type[_Body]) -> tuple[dict[str, Any], _Body]:
    """The body as it came and as it is meant. Raises Refusal as an instance would."""
    try:
        raw = await request.json()
        if isinstance(raw, dict):
            raw.pop("routing", None)  # that is said here
        return raw, kind.model_validate(raw)
    except ValidationError as error:
        message, param = describe(list(error.errors()))
        raise Refusal(message, param=param) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    except (ValueError, RecursionError):
        raise Refusal("the body is no JSON") from None


@router.post("/v1/completions", tags=["openai"])
async def completions(request: Request) -> Response:
    """Continue a prompt: text or token ids."""
    front, started = front_of(request), time.perf_counter()
    raw, body = await _parse(request, CompletionRequest)
    body.sampling_params()
    raw["model"] = front.admit(body.model)
    return await front.relay_request(request, "/v1/completions", raw, front.completion_prompts(body), started)


@router.post("/v1/chat/completions", tags=["openai"])
async def chat_completions(request: Request) -> Response:
    """Answer a chat by the model's own template."""
    front, started = front_of(request), time.perf_counter()
    raw, body = await _parse(request, ChatRequest)
    body.sampling_params()
    raw["model"] = front.admit(body.model)
    return await front.relay_request(request, "/v1/chat/completions", raw, front.chat_prompt(body), started)


@router.get("/v1/models", tags=["openai"])
async def models(request: Request) -> dict[str, Any]:
    """The models of all instances, with the longest request that all of a model's instances take."""
    front = front_of(request)
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": front.started,
                "owned_by": "xllm_hier",
                "root": name,
                "parent": None,
                "max_model_len": length,
            }
            for name, length in sorted(front.cluster.models().items())
        ],
    }


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while some instance can be sent requests, also without the registry; else 503."""
    front = front_of(request)
    cluster = front.cluster
    roles = {one.role for one in cluster.candidates("")}
    served = bool(roles & {"DEFAULT", "MIX"}) or {"PREFILL", "DECODE"} <= roles
    ready = served and not front.draining
    registry = cluster.membership.why
    suspects = sum(not one.schedulable for one in cluster.instances.by_name.values())
    status = "draining" if front.draining else "no_instance" if not served else "degraded"
    body = {
        "status": "ok" if ready and not registry and not suspects else status,
        "role": "master" if cluster.is_master else "replica",
        "name": cluster.rpc_address,
        "registry": registry or "reachable",
        "instances": len(cluster.instances.by_name),
        "suspects": suspects,
        "open": front.metrics.num_open,
        "version": __version__,
    }
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(front_of(request).metrics.render(), media_type=_METRICS_TYPE)


@router.get("/instances", tags=["operation"])
async def instances(request: Request) -> dict[str, Any]:
    """Every instance with its state, its load and its index; the stores; the router's books."""
    cluster = front_of(request).cluster
    known = cluster.index.describe()
    now = time.monotonic()
    return {
        "instances": [
            {
                "name": one.info.name,
                "role": one.info.role,
                "model": one.info.model,
                "state": one.state.value,
                "incarnation": one.info.incarnation_id,
                "registered": one.leased,
                "silent_s": round(now - one.heard, 3),
                "load": vars(one.load) if one.load is not None else None,
                "index": known["instances"].get(one.info.name),
            }
            for one in cluster.instances.by_name.values()
        ],
        "stores": known["stores"],
        "routing": cluster.router.describe(),
    }


async def wait_idle(front: Front, timeout_s: float) -> None:
    """Until no request is open, or the time is over."""
    end = time.monotonic() + timeout_s
    while front.metrics.num_open and time.monotonic() < end:
        await asyncio.sleep(0.02)
