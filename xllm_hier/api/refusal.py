"""Refused requests in OpenAI's words: the error body, its type and its code."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(RequestError):
    """A request that is refused with a machine-readable `code` of OpenAI's, for instance `model_not_found`."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message, param=param, status=status)
        self.code = code


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body of an error answer; clients read `error.message`, `type`, `param` and `code`."""
    message = message.encode(errors="replace").decode()  # it may quote half a surrogate pair of the request
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RequestError) -> dict[str, Any]:
    """The error body of `error`."""
    return error_body(str(error), error.status, param=error.param, code=getattr(error, "code", None))
