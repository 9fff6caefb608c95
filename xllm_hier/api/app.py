"""The HTTP application: routes, and every error as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import EngineConfig
from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError
from ..openai.auth import ApiKeyGate
from ..openai.protocol import ChatRequest, CompletionRequest, describe
from ..openai.refusals import ErrorAnswer, Refusal, body_of, error_body
from ..openai.streaming import ClientGoneError
from ..openai.tokenizer import Tokenizer
from ..version import __version__
from . import admin
from .handlers import Service, service_of

MAX_BODY_BYTES = 16 << 20
_STATS_S = 1.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


def create_app(client: EngineClient, tokenizer: Tokenizer | None, config: EngineConfig) -> FastAPI:
    """The application over a connected `client`, which stays the caller's; `app.state.service` holds the state."""
    app = FastAPI(title="xllm_hier", version=__version__, redoc_url=None)
    app.state.service = Service(client, tokenizer, config)
    app.include_router(router)
    app.include_router(admin.router)
    app.add_middleware(BodyLimit)
    if config.api_key:
        app.add_middleware(ApiKeyGate, api_key=config.api_key)
    add_error_answers(app)
    return app


def add_error_answers(app: FastAPI) -> None:
    """Answer every error of a route in OpenAI's words."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(TimeoutError, _timeout)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _own_fault)


@router.post("/v1/completions", tags=["openai"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt: text or token ids."""
    return await service_of(request).complete(body, request)


@router.post("/v1/chat/completions", tags=["openai"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat by the model's own template."""
    return await service_of(request).chat(body, request)


@router.get("/v1/models", tags=["openai"])
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served, with its limit in tokens."""
    return {"object": "list", "data": [_model_card(service_of(request))]}


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    service = service_of(request)
    if name != service.model.name:
        raise Refusal(f"the model {name!r} is not served here", param="model", status=404, code="model_not_found")
    return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "xllm_hier",
        "root": service.client.info.get("model_id", service.model.name),
        "parent": None,
        "max_model_len": service.model.max_model_len,
    }


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while requests are served, also without the store; 503 when the engine is gone or the instance drains."""
    service = service_of(request)
    if service.client.dead.is_set():
        return JSONResponse({"status": "dead", "store": service.stats.store_state}, 503)
    if service.admission.draining:
        return JSONResponse({"status": "draining", "store": service.stats.store_state}, 503)
    values = await service.stats.refresh(_STATS_S)
    store = service.stats.store_state
    alarm = bool(values.get("cache_alarm"))
    pair = values.get("pd", {})
    alone = pair.get("role") == "PREFILL" and "linked" not in pair["peers"].values()
    wrong = alarm or alone or store in ("degraded", "open")
    return JSONResponse(
        {
            "status": "degraded" if wrong or not service.stats.fresh else "ok",
            "store": store,
            "cache_alarm": alarm,
            "engine_answers": service.stats.fresh,
            "running": values.get("running", 0),
            "waiting": values.get("waiting", 0),
            "version": __version__,
            **({"role": pair["role"], "peers": pair["peers"]} if pair else {}),
            **({"registry": service.registration.state} if service.registration is not None else {}),
        }
    )


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format; a silent engine's figures are the last known."""
    service = service_of(request)
    await service.stats.refresh(_STATS_S)
    return Response(service.metrics.render(), media_type=_METRICS_TYPE)


# ------------------------------------------------------------------------------------------------ errors


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return ErrorAnswer(body_of(error), error.status, headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = describe(list(error.errors()))
    return ErrorAnswer(error_body(message, 400, param=param), 400)


async def _engine_dead(request: Request, error: Exception) -> Response:
    return ErrorAnswer(error_body(f"the engine is gone: {error}", 503, code="engine_dead"), 503)


async def _timeout(request: Request, error: Exception) -> Response:
    return ErrorAnswer(error_body("the engine did not answer in time", 504, code="engine_timeout"), 504)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ErrorAnswer(error_body(str(error.detail), error.status_code), error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; access logs do


async def _own_fault(request: Request, error: Exception) -> Response:
    return ErrorAnswer(error_body("the server has a fault; its log tells more", 500), 500)


class BodyLimit:
    """Refuses bodies above MAX_BODY_BYTES before they are whole in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, counted, send)
