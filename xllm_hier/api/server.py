"""The API process: loads the tokenizer, connects to the engine, serves HTTP until told to stop or the engine dies."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..calls import Drain
from ..config import EngineConfig
from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError
from ..openai.listening import CLOSE_S, HttpServer, any_of, http_server, listen, serving, stop_signals
from ..openai.tokenizer import load_tokenizer
from ..wire import Deadline
from .app import create_app
from .handlers import RequestHandlers
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
                handlers: RequestHandlers = app.state.handlers
                if config.etcd_addr:
                    handlers.registration = Registration(client, config, listener.getsockname()[1])
                return await _run(server, handlers, listener, stop, on_ready)


async def _run(
    server: HttpServer,
    handlers: RequestHandlers,
    listener: socket.socket,
    stop: asyncio.Event,
    on_ready: Callable[[int], None],
) -> int:
    registration, dead = handlers.registration, handlers.client.dead
    async with serving(server, [listener]) as task:
        try:
            on_ready(listener.getsockname()[1])
            if registration is not None:
                registration.start()
            await any_of(task, stop, dead)
            if dead.is_set():
                return 1
            await _drain(handlers)
            return 0
        finally:
            server.should_exit = True
            if registration is not None:
                await registration.stop()


async def _drain(handlers: RequestHandlers) -> None:
    """Refuse new requests and let the open ones end, within the time the settings give them."""
    handlers.admission.draining = True  # first: a client that asks from now on is refused, and asks another instance
    if handlers.registration is not None:
        await handlers.registration.stop()
    limit_s = handlers.config.drain_timeout_s
    _log.info("draining: %d open requests, at most %g s", handlers.admission.num_open, limit_s)
    try:
        await handlers.client.call(Drain(), limit_s)
    except (TimeoutError, RequestError, EngineDeadError) as error:
        _log.warning("the engine did not drain: %s", error or f"no answer in {limit_s:g} s")
    end = Deadline(CLOSE_S)
    while handlers.admission.num_open and not handlers.client.dead.is_set() and not end.passed():
        await asyncio.sleep(0.01)
