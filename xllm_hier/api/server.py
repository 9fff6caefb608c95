"""The API process: loads the tokenizer, connects to the engine, serves HTTP until told to stop or the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from ..config import EngineConfig
from ..errors import ConfigError, EngineDeadError, RequestError, StartupError
from ..wire import Deadline
from .app import create_app
from .engine_client import EngineClient
from .service import Service
from .tokenizer import load_tokenizer

_log = logging.getLogger(__name__)
_CLOSE_S = 1  # for answers already written to reach their clients


async def serve_api(
    config: EngineConfig, engine_address: str, on_ready: Callable[[int], None], stop: asyncio.Event | None = None
) -> int:
    """Serve until SIGTERM, SIGINT or `stop` (0, open requests get `drain_timeout_s`) or the engine's end (1).

    `on_ready` gets the port when it listens. Signal handlers are set in the main thread only.

    Raises:
        ConfigError: the tokenizer does not load, or the address cannot be bound.
        StartupError, EngineDeadError: the engine did not come up.
    """
    deadline = Deadline(config.startup_timeout_s)
    with _listen(config.host, config.port) as listener:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.tokenizer_folder)
        async with await EngineClient.connect(engine_address, deadline.remaining()) as client:
            app = create_app(client, tokenizer, config)
            server = _server(app, config)
            stop = stop or asyncio.Event()
            with _signals(stop):
                return await _run(server, app.state.service, listener, stop, on_ready)


async def _run(
    server: _Server, service: Service, listener: socket.socket, stop: asyncio.Event, on_ready: Callable[[int], None]
) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waits = [asyncio.create_task(item.wait()) for item in (server.listening, stop, service.client.dead)]
    listening, stopping, dying = waits
    try:
        await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not server.listening.is_set():
            raise StartupError("the HTTP server ended while it came up")
        on_ready(listener.getsockname()[1])
        await asyncio.wait({stopping, dying, serving}, return_when=asyncio.FIRST_COMPLETED)
        if service.client.dead.is_set():
            return 1
        await _drain(service, dying)
        return 0
    finally:
        server.should_exit = True
        for wait in waits:
            wait.cancel()
        await asyncio.gather(serving, *waits, return_exceptions=True)


async def _drain(service: Service, dying: asyncio.Task[object]) -> None:
    """Refuse new requests and let the open ones end, within the time the settings give them."""
    service.admission.draining = True
    limit_s = service.config.drain_timeout_s
    _log.info("draining: %d open requests, at most %g s", service.admission.num_open, limit_s)
    try:
        await service.client.call("drain", limit_s)
    except (TimeoutError, RequestError, EngineDeadError) as error:
        _log.warning("the engine did not drain: %s", error or f"no answer in {limit_s:g} s")
    end = Deadline(_CLOSE_S)
    while service.admission.num_open and not dying.done() and not end.passed():
        await asyncio.sleep(0.01)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without it every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"{host}:{port}", f"an address that can be bound ({error.strerror})") from None
    return listener


class _Server(uvicorn.Server):
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


def _server(app: object, config: EngineConfig) -> _Server:
    return _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="debug" if config.log_level == "debug" else "info" if config.log_requests else "warning",
            access_log=config.log_requests,
            timeout_graceful_shutdown=_CLOSE_S,
            timeout_keep_alive=30,
        )
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
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
