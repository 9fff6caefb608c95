"""The key that callers of `/v1/*` must bring, where one is set."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .refusals import ErrorAnswer, error_body

_GUARDED = "/v1/"


class ApiKeyGate:
    """Answers 401 to requests for `/v1/*` without `Authorization: Bearer <api_key>`, before their body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                body = error_body("the API key is missing or wrong", 401, code="invalid_api_key")
                await ErrorAnswer(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)
