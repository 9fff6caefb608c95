"""python -m xllm_hier.service: one replica of the service in front of all instances of a cluster."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..embedded_store import set_process_name
from ..errors import ConfigError, StartupError, XllmError
from ..launch import configure_logging
from ..openai.listening import http_server, listen, stop_signals
from ..openai.tokenizer import Tokenizer, load_tokenizer
from .app import Front, create_app, wait_idle
from .cluster import Cluster
from .config import ServiceConfig

log = logging.getLogger("xllm.service")


async def serve(config: ServiceConfig) -> int:
    """Serve until SIGTERM or SIGINT; open requests then get `drain_timeout_s`. Returns the exit code.

    Raises:
        ConfigError: the tokenizer does not load, or an address cannot be bound.
        StartupError: the HTTP server ended while it came up.
    """
    tokenizer = _tokenizer(config)
    stop = asyncio.Event()
    with ExitStack() as stack:
        clients = stack.enter_context(listen(config.host, config.http_server_port, "http_server_port"))
        rpc = stack.enter_context(listen(config.host, config.rpc_server_port, "rpc_server_port"))
        port, rpc_port = (socket.getsockname()[1] for socket in (clients, rpc))
        stack.enter_context(stop_signals(stop))
        async with Cluster(config, f"{config.reachable_host}:{rpc_port}") as cluster:
            app = create_app(cluster, tokenizer)
            front: Front = app.state.front
            server = http_server(app, log_level=config.log_level, log_requests=config.log_requests)
            serving = asyncio.create_task(server.serve(sockets=[clients, rpc]))
            stopping = asyncio.create_task(stop.wait())
            try:
                listening = asyncio.create_task(server.listening.wait())
                await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
                if not server.listening.is_set():
                    raise StartupError("the HTTP server ended while it came up")
                print(f"xllm_hier service listens at http://{config.host}:{port}, rpc port {rpc_port}", flush=True)
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
                front.draining = True
                await cluster.leave()
                await wait_idle(front, config.drain_timeout_s)
                return 0
            finally:
                server.should_exit = True
                stopping.cancel()
                await asyncio.gather(serving, stopping, return_exceptions=True)


def _tokenizer(config: ServiceConfig) -> Tokenizer | None:
    if not config.tokenizer_path:
        return None
    found = load_tokenizer(Path(config.tokenizer_path))
    if found is None:
        raise ConfigError("tokenizer_path", config.tokenizer_path, "a folder with a tokenizer")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after an ordered stop, 1 when it did not come up, 2 for a setting that cannot be."""
    try:
        config = ServiceConfig.from_sources(sys.argv[1:] if argv is None else argv)
        config.check_environment()
        configure_logging(config.log_level, "service")
        set_process_name("xllm-service")
        return asyncio.run(serve(config))
    except ConfigError as error:
        print(f"xllm_hier.service: {error}", file=sys.stderr)
        return 2
    except XllmError as error:
        print(f"xllm_hier.service: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
