"""Routes for the operator: look into the cache and empty it; guarded by a token, or open to this machine only."""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from ..calls import AttachStore, ClearCache, DetachStore, GetStats, StorePlace, StoreSwitched
from ..config import EngineConfig
from ..errors import ConfigError
from ..openai.refusals import Refusal
from .handlers import handlers_of

_CALL_S = 60.0


def require_admin(request: Request) -> None:
    """Let the operator pass. Raises RequestError: 401 without the right token, 403 from another machine."""
    token = handlers_of(request).config.admin_token
    if token:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise Refusal("this route needs the admin token as bearer token", status=401, code="invalid_api_key")
    elif not _is_loopback(request.client.host if request.client else ""):
        raise Refusal("without an admin token this route answers to the machine itself only", status=403)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


router = APIRouter(prefix="/cache", tags=["cache"], dependencies=[Depends(require_admin)])


class ClearRequest(BaseModel):
    """Which tiers to empty."""

    model_config = ConfigDict(extra="forbid")
    tiers: Annotated[list[Literal["device", "host", "store"]], Field(min_length=1)]


@router.post("/clear")
async def clear(body: ClearRequest, request: Request) -> dict[str, Any]:
    """Empty tiers of the cache; blocks in use stay."""
    tiers: list[str] = list(dict.fromkeys(body.tiers))
    answer = await handlers_of(request).client.call(ClearCache(tiers), _CALL_S)
    return dataclasses.asdict(answer)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """The engine's figures, fresh."""
    found = await handlers_of(request).client.call(GetStats(), _CALL_S)
    values: dict[str, Any] = _json_safe(found.to_json())
    return values


class StoreAddress(BaseModel):
    """Where the store is, by the settings of these names; empty: where it was. A master without a client is direct."""

    model_config = ConfigDict(extra="forbid")
    store_master_server_address: str | None = None
    store_client_address: str | None = None
    store_local_hostname: str | None = None


@router.get("/store")
async def store(request: Request) -> dict[str, Any]:
    """The store's state and addresses."""
    handlers = handlers_of(request)
    found = await handlers.client.call(GetStats(), _CALL_S)
    return _described(handlers.store_config, found.workers.store_state)


@router.put("/store")
async def attach(body: StoreAddress, request: Request) -> dict[str, Any]:
    """Use a store from now on, under load too; one that is not there yet is attached when it comes (state `open`)."""
    handlers = handlers_of(request)
    given = {name: value for name, value in body.model_dump().items() if value is not None}
    if "store_master_server_address" in given:  # another store has other clients
        given.setdefault("store_client_address", "")
    try:
        config = dataclasses.replace(handlers.store_config, enable_kvcache_store=True, **given)
    except ConfigError as error:
        raise Refusal(str(error), param=error.name) from None
    if not config.store_master_server_address:
        raise Refusal("say where the store is", param="store_master_server_address")
    answer = await handlers.client.call(AttachStore(StorePlace(**given)), _CALL_S)
    handlers.store_config = config
    if handlers.registration is not None:
        handlers.registration.renew(config)
    return _switched(config, answer)


@router.delete("/store")
async def detach(request: Request) -> dict[str, Any]:
    """Ask the store for nothing more; device and host tier go on."""
    handlers = handlers_of(request)
    return _switched(handlers.store_config, await handlers.client.call(DetachStore(), _CALL_S))


def _switched(config: EngineConfig, answer: StoreSwitched) -> dict[str, Any]:
    return {**_described(config, answer.state), **({"why": answer.why} if answer.why else {})}


def _described(config: EngineConfig, state: str) -> dict[str, Any]:
    return {
        "state": state,
        "store_master_server_address": config.store_master_server_address,
        "store_client_address": config.store_client_address,
    }


def _json_safe(value: Any) -> Any:
    """JSON knows no infinity, the last border of a histogram: it becomes `+Inf`, Prometheus' word."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value)
    return value
