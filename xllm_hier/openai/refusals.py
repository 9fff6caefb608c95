"""Refused requests in OpenAI's words: the error body, its type and its code."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(RequestError):
    """A request that is refused with a machine-readable `code` of OpenAI's, for instance `model_not_found`."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message, param=param, status=status)
        self.code = code


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body of an error answer; clients read `error.message`, `type`, `param` and `code`."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _utf8(message), "type": kind, "param": param and _utf8(param), "code": code}}


def _utf8(text: str) -> str:
    """`text` with escapes for what UTF-8 cannot hold: it may quote half a surrogate pair of the request."""
    return text.encode(errors="backslashreplace").decode()


class ErrorAnswer(JSONResponse):
    """An error body in plain ASCII, which no text of a request can keep from being sent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def body_of(error: RequestError) -> dict[str, Any]:
    """The error body of `error`."""
    return error_body(str(error), error.status, param=error.param, code=getattr(error, "code", None))
