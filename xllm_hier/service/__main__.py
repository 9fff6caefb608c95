"""python -m xllm_hier.service: one replica of the service in front of all instances of a cluster."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..errors import ConfigError
from ..machine import check_port_free
from ..openai.listening import any_of, http_server, listen, serving, stop_signals
from ..openai.tokenizer import Tokenizer, load_tokenizer
from ..process import configure_logging, exit_code, set_process_name
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
            async with serving(server, [clients, rpc]) as task:
                print(f"xllm_hier service listens at http://{config.host}:{port}, rpc port {rpc_port}", flush=True)
                await any_of(task, stop)
                front.draining = True
                await cluster.leave()
                await wait_idle(front, config.drain_timeout_s)
            return 0


def _tokenizer(config: ServiceConfig) -> Tokenizer | None:
    if not config.tokenizer_path:
        return None
    found = load_tokenizer(Path(config.tokenizer_path))
    if found is None:
        raise ConfigError("tokenizer_path", config.tokenizer_path, "a folder with a tokenizer")
    return found


def _check_environment(config: ServiceConfig) -> None:
    if config.tokenizer_path and not Path(config.tokenizer_path).is_dir():
        raise ConfigError("tokenizer_path", config.tokenizer_path, "a folder")
    for name in ("http_server_port", "rpc_server_port"):
        if port := getattr(config, name):
            check_port_free(name, config.host, port)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after an ordered stop, 1 when it did not come up, 2 for a setting that cannot be."""

    def body() -> int:
        config = ServiceConfig.from_sources(sys.argv[1:] if argv is None else argv)
        _check_environment(config)
        configure_logging(config.log_level, "service")
        set_process_name("xllm-service")
        return asyncio.run(serve(config))

    return exit_code("xllm_hier.service", body)


if __name__ == "__main__":
    sys.exit(main())
