"""Every exception of a route becomes an answer in OpenAI's words; api and service register the same handlers."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ..errors import EngineDeadError, RequestError
from .protocol import describe
from .refusals import ErrorAnswer, body_of, error_body
from .streaming import ClientGoneError


def add_error_answers(app: FastAPI) -> None:
    """Register a handler for each exception that a route of `app` may raise."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(TimeoutError, _timeout)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _own_fault)


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
