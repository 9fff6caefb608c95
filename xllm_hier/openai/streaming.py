"""Answers that end when their client goes: server-sent events, and any other work bound to a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineDeadError, RequestError
from .refusals import body_of, error_body

T = TypeVar("T")
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGoneError(Exception):
    """The client closed its connection before the answer was whole; nobody is left to tell."""


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and awaited, as soon as the client goes.

    Raises:
        ClientGoneError: the client went first.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ServerSentEvents(Response):
    """Sends `chunks` as server-sent events, closed by `[DONE]`.

    The status line waits for the first chunk, so that an error before it is an ordinary HTTP error; a later one is
    an error chunk, and the end.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None]) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._chunks = chunks
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            if not self._started:  # access logs still get their status
                raise

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_event(send, first)
            try:
                async for chunk in chunks:
                    await _send_event(send, chunk)
            except RequestError as error:
                await _send_event(send, body_of(error))
            except EngineDeadError as error:
                await _send_event(send, error_body(str(error), 503))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_event(send: Send, value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
