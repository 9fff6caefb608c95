"""The API's only door to the engine: requests and calls over one ZeroMQ PAIR socket, outputs sorted to their requests.

One reader task takes every message from the socket and puts it into the queue of its request or the future of its
call; one monitor task notices the engine's end. After that end all waits fail with EngineDeadError, old and new alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio

from .calls import Call, CallResult, GetInfo, Question
from .errors import EngineDeadError, RequestError, StartupError, WireError
from .figures import EngineInfo
from .request_messages import AbortRequest, AddRequest, RequestOutput, StepOutputs
from .wire import open_socket, pack, unpack

A = TypeVar("A")
_log = logging.getLogger(__name__)
_DRAIN_S = 0.05  # the engine's last words may still wait in the socket when its end is noticed


class EngineClient:
    """Speaks to one engine from one event loop; make it with `connect`, end it with `close`.

    `dead` is set when the engine is gone. `info` is the engine's answer to `GetInfo`, which `connect` asks once.
    """

    def __init__(self, address: str) -> None:
        self.info: EngineInfo
        self.dead = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket: Any = open_socket(self._context, address, bind=False)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._open: dict[str, asyncio.Queue[RequestOutput | EngineDeadError]] = {}
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._call_ids = itertools.count(1)
        self._why_dead = ""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @classmethod
    async def connect(cls, address: str, timeout_s: float) -> EngineClient:
        """A client whose engine has answered; the engine may still be on its way up when this is called.

        Raises:
            StartupError: no answer within `timeout_s` seconds.
            EngineDeadError: the engine ended meanwhile.
        """
        client = cls(address)
        try:
            client.info = await client.call(GetInfo(), timeout_s)
        except TimeoutError:
            await client.close()
            raise StartupError(f"the engine at {address} did not answer within {timeout_s:g} s") from None
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def num_open(self) -> int:
        """Requests that the engine has and that have not ended."""
        return len(self._open)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of `request` up to the one with a finish reason; closing it earlier aborts the request, once.

        Raises:
            RequestError: another request has this id.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use")
        queue: asyncio.Queue[RequestOutput | EngineDeadError] = asyncio.Queue()
        self._open[request.request_id] = queue
        ended = False
        try:
            self._send(request)
            while not ended:
                output = await queue.get()
                if isinstance(output, EngineDeadError):
                    ended = True
                    raise output
                ended = output.finish_reason is not None
                yield output
        finally:
            del self._open[request.request_id]
            if not ended and not self.dead.is_set():
                self._send(AbortRequest(request.request_id))

    async def call(self, question: Question[A], timeout_s: float) -> A:
        """The engine's answer to `question`.

        Raises:
            RequestError: the engine refused.
            TimeoutError: no answer within `timeout_s` seconds; a late one is dropped.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(Call(call_id, question))
            result = await asyncio.wait_for(future, timeout_s)
        finally:
            del self._calls[call_id]
        if result.error is not None:
            raise RequestError(result.error)
        return cast(A, result.answer)

    async def close(self) -> None:
        """Ends both tasks and the socket; open requests fail as if the engine had gone."""
        was_dead = self.dead.is_set()
        self._die("the client was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0 if was_dead else None)  # to a live engine, aborts may still be on their way
            self._context.term()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------- inside

    def _check_alive(self) -> None:
        if self.dead.is_set():
            raise EngineDeadError(self._why_dead)

    def _send(self, message: Any) -> None:
        """Queue `message`; ZeroMQ keeps the order, and no caller waits (also not one that is being cancelled)."""
        sent = self._socket.send(pack(message))
        sent.add_done_callback(_forget)

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                self._take(unpack(data))
            except WireError as error:
                _log.error("a message of the engine does not decode: %s", error)
                self._die(f"a message of the engine does not decode: {error}")
                return

    def _take(self, message: Any) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                queue = self._open.get(output.request_id)
                if queue is not None:  # else: aborted while the step ran
                    queue.put_nowait(output)
        elif isinstance(message, CallResult):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            raise WireError(f"the engine does not send {type(message).__name__}")

    async def _watch(self) -> None:
        await self._monitor.recv_multipart()
        await asyncio.sleep(_DRAIN_S)
        self._die("the engine process is gone")

    def _die(self, why: str) -> None:
        if self.dead.is_set():
            return
        self._why_dead = why
        self.dead.set()
        for queue in self._open.values():
            queue.put_nowait(EngineDeadError(why))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))


def _forget(sent: asyncio.Future[Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        sent.exception()
