"""Brings a request to an instance and its answer back; a request of which the client has seen nothing is tried again.

An instance sends the head of its answer together with the first token, so until then another one may answer instead:
when the connection fails, when the instance says that it cannot (429, 5xx), or when the answer breaks off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..openai.refusals import Refusal, error_body
from .cluster import Cluster
from .policies import Prompt, Route

log = logging.getLogger("xllm.service")

_ELSEWHERE = frozenset((429, 500, 502, 503, 504))
_KEPT_HEADERS = ("content-type", "retry-after", "cache-control")


@dataclass(eq=False)
class Answer:
    """An answer on its way to the client: its head, and the first part of its body. Iterate `body` once, or `close`."""

    status: int
    headers: dict[str, str]
    first: bytes
    route: Route | None
    _response: aiohttp.ClientResponse | None = None
    connection: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def body(self) -> AsyncIterator[bytes]:
        """The rest as it comes; one that breaks off ends with an error event, as an instance's own would."""
        try:
            if self._response is None:
                yield self.first
            else:
                whole, end, rest = self.first.rpartition(b"\n\n")
                yield whole + end
                try:
                    async for chunk in self._response.content.iter_any():
                        whole, end, rest = (rest + chunk).rpartition(b"\n\n")
                        if end:
                            yield whole + end
                    yield rest
                except (aiohttp.ClientError, TimeoutError) as error:
                    log.warning("an answer of %s broke off: %s", self.route and self.route.prefill, _text(error))
                    message = "the instance that was answering is gone; ask again"
                    yield f"data: {json.dumps(error_body(message, 503, code='instance_lost'))}\n\n".encode()
                    yield b"data: [DONE]\n\n"
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection to the instance, which then aborts this request."""
        await self.connection.aclose()


class Relay:
    """Sends requests where the router says; counts what became of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        config = cluster.config
        self._limit = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.answer_timeout_s
        )
        self._headers = {"content-type": "application/json"}
        if config.api_key:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        self.answers: Counter[tuple[str, int]] = Counter()  # by instance and status
        self.retries: Counter[str] = Counter()  # by reason

    async def send(
        self,
        path: str,
        body: dict[str, Any],
        prompt: Prompt,
        request_id: str,
        *,
        token_ids: list[list[int]] | None = None,
        on_chosen: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The answer of the first instance that has one for the client; `token_ids` are those of the body's
        texts. `on_chosen` is called when the first instance is chosen.

        Raises:
            Refusal: there is no instance for it, or the one there is says nothing for too long.
        """
        avoid: set[str] = set()
        head, ids = json.dumps(body).encode()[:-1], json.dumps(token_ids)  # once: they may be long
        last: Answer | None = None
        for attempt in range(self._cluster.config.max_attempts):
            route = self._cluster.router.choose(prompt, self._cluster.candidates(str(body.get("model") or "")), avoid)
            if route is None:
                break
            avoid.add(route.prefill)
            if not attempt:
                on_chosen()
            routing = {
                "prefill_name": route.prefill,
                "decode_name": route.decode or "",
                "service_request_id": f"{request_id}.{attempt}" if attempt else request_id,
            }
            tail = f', "routing": {json.dumps(routing)[:-1]}, "token_ids": {ids}}}}}'
            answer, why = await self._try(path, head + tail.encode(), route)
            if answer is not None and answer.status not in _ELSEWHERE:
                return answer
            last = answer or last
            self.retries[why] += 1
            log.warning("%s: %s cannot answer: %s", request_id, route.prefill, why)
        if last is not None:
            return last
        tried = f"; {len(avoid)} did not answer" if avoid else ""
        raise Refusal(f"no instance can take the request now{tried}", status=503, code="no_instance")

    async def _try(self, path: str, body: bytes, route: Route) -> tuple[Answer | None, str]:
        """One attempt: an answer, or why there is none."""
        router, started = self._cluster.router, time.monotonic()
        async with AsyncExitStack() as stack:
            router.begin(route)
            stack.callback(router.end, route)
            try:
                response, first = await self._begin(stack, path, body, route)
            except aiohttp.SocketTimeoutError:  # it lives, and has its reasons: another one would have them, too
                limit_s = self._cluster.config.answer_timeout_s
                message = f"there was nothing of an answer within {limit_s:g} s"
                raise Refusal(message, status=504, code="answer_timeout") from None
            except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:
                self._cluster.instances.unreachable(route.prefill, time.monotonic())
                return None, type(error).__name__
            streams = response.content_type == "text/event-stream"
            self.answers[route.prefill, response.status] += 1
            if response.status == 503:  # it may drain
                self._cluster.instances.unreachable(route.prefill, time.monotonic())
            router.first_token(route, time.monotonic() - started if streams else None)
            headers = {name: value for name in _KEPT_HEADERS if (value := response.headers.get(name)) is not None}
            answer = Answer(response.status, headers, first, route, response if streams else None)
            if streams:
                stack.enter_context(self._cluster.while_streaming(route.incarnation, response))
                answer.connection = stack.pop_all()
            return answer, f"HTTP {response.status}"
        raise AssertionError("not reached")

    async def _begin(
        self, stack: AsyncExitStack, path: str, body: bytes, route: Route
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The head of an answer with its whole body, or with the first part of a stream.

        Raises:
            aiohttp.ClientError, TimeoutError: the instance is not reached, breaks off, or does not answer any more.
        """

        async def ask() -> tuple[aiohttp.ClientResponse, bytes]:
            response = await self._cluster.session.post(
                f"http://{route.prefill}{path}", data=body, headers=self._headers, timeout=self._limit
            )
            stack.callback(response.close)
            streams = response.content_type == "text/event-stream"
            return response, await response.content.readany() if streams else await response.read()

        with self._cluster.until_suspected(route.incarnation) as lost:
            task = asyncio.create_task(ask())
            try:
                either: list[asyncio.Future[Any]] = [task, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise aiohttp.ServerTimeoutError("the instance does not answer any more")
                return task.result()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
