"""Routes for the operator: look into the cache and empty it; guarded by a token, or open to this machine only."""

from __future__ import annotations

import hmac
import ipaddress
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from .refusal import Refusal
from .service import service_of

_CALL_S = 60.0


def require_admin(request: Request) -> None:
    """Let the operator pass. Raises RequestError: 401 without the right token, 403 from another machine."""
    token = service_of(request).config.admin_token
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
    return await service_of(request).client.call("clear_cache", _CALL_S, tiers=list(dict.fromkeys(body.tiers)))


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """The engine's figures, fresh."""
    values: dict[str, Any] = _json_safe(await service_of(request).client.call("stats", _CALL_S))
    return values


def _json_safe(value: Any) -> Any:
    """JSON knows no infinity, the last border of a histogram: it becomes `+Inf`, Prometheus' word."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value)
    return value
