"""The HTTP application of one instance: its routes, and the middleware around them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ..config import EngineConfig
from ..engine_client import EngineClient
from ..openai.auth import ApiKeyGate
from ..openai.body_limit import BodyLimit
from ..openai.error_answers import add_error_answers
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.refusals import Refusal
from ..openai.tokenizer import Tokenizer
from ..version import __version__
from . import admin
from .handlers import RequestHandlers, handlers_of

_STATS_S = 1.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


def create_app(client: EngineClient, tokenizer: Tokenizer | None, config: EngineConfig) -> FastAPI:
    """The application over a connected `client`, which stays the caller's; `app.state.handlers` answers."""
    app = FastAPI(title="xllm_hier", version=__version__, redoc_url=None)
    app.state.handlers = RequestHandlers(client, tokenizer, config)
    app.include_router(router)
    app.include_router(admin.router)
    app.add_middleware(BodyLimit)
    if config.api_key:
        app.add_middleware(ApiKeyGate, api_key=config.api_key)
    add_error_answers(app)
    return app


@router.post("/v1/completions", tags=["openai"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt: text or token ids."""
    return await handlers_of(request).complete(body, request)


@router.post("/v1/chat/completions", tags=["openai"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat by the model's own template."""
    return await handlers_of(request).chat(body, request)


@router.get("/v1/models", tags=["openai"])
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served, with its limit in tokens."""
    return {"object": "list", "data": [_model_card(handlers_of(request))]}


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    handlers = handlers_of(request)
    if name != handlers.model.name:
        raise Refusal(f"the model {name!r} is not served here", param="model", status=404, code="model_not_found")
    return _model_card(handlers)


def _model_card(handlers: RequestHandlers) -> dict[str, Any]:
    return {
        "id": handlers.model.name,
        "object": "model",
        "created": handlers.created,
        "owned_by": "xllm_hier",
        "root": handlers.client.info.model_id,
        "parent": None,
        "max_model_len": handlers.model.max_model_len,
    }


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while requests are served, also without the store; 503 when the engine is gone or the instance drains."""
    handlers = handlers_of(request)
    if handlers.client.dead.is_set():
        return JSONResponse({"status": "dead", "store": handlers.stats.store_state}, 503)
    if handlers.admission.draining:
        return JSONResponse({"status": "draining", "store": handlers.stats.store_state}, 503)
    values = await handlers.stats.refresh(_STATS_S)
    store = handlers.stats.store_state
    alarm, pair = values.cache_alarm, values.pd
    alone = pair is not None and pair.role == "PREFILL" and "linked" not in pair.peers.values()
    wrong = alarm or alone or store in ("degraded", "open")
    return JSONResponse(
        {
            "status": "degraded" if wrong or not handlers.stats.fresh else "ok",
            "store": store,
            "cache_alarm": alarm,
            "engine_answers": handlers.stats.fresh,
            "running": values.running,
            "waiting": values.waiting,
            "version": __version__,
            **({"role": pair.role, "peers": pair.peers} if pair is not None else {}),
            **({"registry": handlers.registration.state} if handlers.registration is not None else {}),
        }
    )


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format; a silent engine's figures are the last known."""
    handlers = handlers_of(request)
    await handlers.stats.refresh(_STATS_S)
    return Response(handlers.metrics.render(), media_type=_METRICS_TYPE)
