"""The API process: loads the tokenizer, connects to the engine, serves HTTP until told to stop or the engine dies."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..config import EngineConfig
from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError, StartupError
from ..openai.listening import CLOSE_S, HttpServer, http_server, listen, stop_signals
from ..openai.tokenizer import load_tokenizer
from ..wire import Deadline
from .app import create_app
from .handlers import Service
from .registration import Registration

_log = logging.getLogger(__name__)


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
    with listen(config.host, config.port) as listener:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.tokenizer_folder)
        async with await EngineClient.connect(engine_address, deadline.remaining()) as client:
            app = create_app(client, tokenizer, config)
            server = http_server(app, log_level=config.log_level, log_requests=config.log_requests)
            stop = stop or asyncio.Event()
            with stop_signals(stop):
                service: Service = app.state.service
                if config.etcd_addr:
                    service.registration = Registration(client, config, listener.getsockname()[1])
                return await _run(server, service, listener, stop, on_ready)


async def _run(
    server: HttpServer, service: Service, listener: socket.socket, stop: asyncio.Event, on_ready: Callable[[int], None]
) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waits = [asyncio.create_task(item.wait()) for item in (server.listening, stop, service.client.dead)]
    listening, stopping, dying = waits
    try:
        await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not server.listening.is_set():
            raise StartupError("the HTTP server ended while it came up")
        on_ready(listener.getsockname()[1])
        if service.registration is not None:
            service.registration.start()
        await asyncio.wait({stopping, dying, serving}, return_when=asyncio.FIRST_COMPLETED)
        if service.client.dead.is_set():
            return 1
        await _drain(service, dying)
        return 0
    finally:
        server.should_exit = True
        for wait in waits:
            wait.cancel()
        if service.registration is not None:
            await service.registration.stop()
        await asyncio.gather(serving, *waits, return_exceptions=True)


async def _drain(service: Service, dying: asyncio.Task[object]) -> None:
    """Refuse new requests and let the open ones end, within the time the settings give them."""
    service.admission.draining = True  # first: who asks from now on is told, and asks another one
    if service.registration is not None:
        await service.registration.stop()
    limit_s = service.config.drain_timeout_s
    _log.info("draining: %d open requests, at most %g s", service.admission.num_open, limit_s)
    try:
        await service.client.call("drain", limit_s)
    except (TimeoutError, RequestError, EngineDeadError) as error:
        _log.warning("the engine did not drain: %s", error or f"no answer in {limit_s:g} s")
    end = Deadline(CLOSE_S)
    while service.admission.num_open and not dying.done() and not end.passed():
        await asyncio.sleep(0.01)
