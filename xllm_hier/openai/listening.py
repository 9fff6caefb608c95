"""An HTTP server inside a process that decides by itself when to start and to stop it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence

import uvicorn

from ..errors import StartupError
from ..machine import take_port

CLOSE_S = 1  # for answers already written to reach their clients


def listen(host: str, port: int, setting: str = "port") -> socket.socket:
    """A bound socket on which an HTTP server can listen. Raises ConfigError naming `setting` for a taken address."""
    return take_port(setting, host, port, reuse=True)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, telling when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def http_server(app: object, *, log_level: str, log_requests: bool = False) -> HttpServer:
    """A server for `app` that leaves signals alone."""
    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="debug" if log_level == "debug" else "info" if log_requests else "warning",
            access_log=log_requests,
            timeout_graceful_shutdown=CLOSE_S,
            timeout_keep_alive=30,
        )
    )


@contextlib.asynccontextmanager
async def serving(server: HttpServer, sockets: Sequence[socket.socket]) -> AsyncIterator[asyncio.Task[None]]:
    """Serve on `sockets` inside the block, which begins when the server listens; the block gets the serving task.

    Raises:
        StartupError: the server ended while it came up.
    """
    task = asyncio.create_task(server.serve(sockets=list(sockets)))
    try:
        await any_of(task, server.listening)
        if not server.listening.is_set():
            raise StartupError("the HTTP server ended while it came up")
        yield task
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


async def any_of(task: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Wait until one of `events` is set or `task` has ended."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` inside the block."""
    loop = asyncio.get_running_loop()
    # A launcher that stops its children in order lets them ignore Ctrl-C, which reaches the whole process group.
    names = [name for name in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(name) is not signal.SIG_IGN]
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller has its own way to stop
        for name in names:
            loop.add_signal_handler(name, stop.set)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            for name in names:
                loop.remove_signal_handler(name)
