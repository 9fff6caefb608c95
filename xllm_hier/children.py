"""The processes of an instance from within: each ties its life to the launcher, runs, and reports how it came up."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import EngineConfig
from .errors import StartupError, XllmError
from .figures import EngineInfo
from .process import configure_logging, die_with_parent, set_process_name

log = logging.getLogger("xllm.launch")

News = EngineInfo | int | None
"""A child that is up tells its facts (the engine), its port (the api), or nothing (a worker)."""


def _engine_body(config: EngineConfig, run_dir: str, _rank: int, ready: Callable[[News], None]) -> int:
    from .engine.core import run_engine

    return run_engine(config, run_dir, ready)


def _worker_body(config: EngineConfig, run_dir: str, rank: int, ready: Callable[[News], None]) -> int:
    from .engine.remote_worker import answer_address, plan_address
    from .worker.worker import run_worker

    addresses = (plan_address(run_dir, rank), answer_address(run_dir, rank))
    return run_worker(config, rank, addresses, lambda: ready(None), Path(run_dir))


def _api_body(config: EngineConfig, run_dir: str, _rank: int, ready: Callable[[News], None]) -> int:
    import asyncio

    from .api.server import serve_api
    from .engine.core import api_address

    return asyncio.run(serve_api(config, api_address(run_dir), ready))


_BODIES = {"engine": _engine_body, "worker": _worker_body, "api": _api_body}


def run_child(kind: str, config: EngineConfig, run_dir: str, rank: int, pipe: Any, *, parent: int) -> None:
    """Entry of every child: tie its life to the parent's, run its body, report how it came up.

    `parent` is the launcher's pid, or 0 when it starts children from a thread whose end must not kill them.
    """
    if parent:
        die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher stops us in order
    name = f"{kind}-{rank}" if kind == "worker" else kind
    set_process_name(f"xllm-{name}")
    configure_logging(config.log_level, name)
    threading.Thread(target=_watch_parent, args=(pipe,), daemon=True, name="parent-watch").start()
    try:
        code = _BODIES[kind](config, run_dir, rank, lambda news: pipe.send(("ready", news)))
    except XllmError as error:
        _report(pipe, error)
        code = 1
    except Exception as error:
        log.exception("%s failed", kind)
        _report(pipe, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown under threads of native libraries


def _report(pipe: Any, error: Exception) -> None:
    try:
        pipe.send(
            ("failed", error if isinstance(error, XllmError) else StartupError(f"{type(error).__name__}: {error}"))
        )
    except OSError:
        log.error("the launcher is gone; could not tell it: %s", error)


def _watch_parent(pipe: Any) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
