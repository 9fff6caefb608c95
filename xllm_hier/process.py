"""The things a process does for itself: its name, its log lines, its end with its parent, its exit code."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

from .errors import ConfigError, XllmError

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PRCTL = ctypes.CDLL(None).prctl  # looked up here: between fork and exec nothing may allocate


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; in the child, before it execs."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show of this process (the kernel keeps 15 characters)."""
    _PRCTL(_PR_SET_NAME, name.encode(), 0, 0, 0)


def configure_logging(level: str, name: str) -> None:
    """Write one line per event to stderr, with the name of the process."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S", force=True
    )


def exit_code(program: str, body: Callable[[], int]) -> int:
    """The code of `body`; an error goes to stderr and gives 2 for a setting that cannot be used, 1 for all others."""
    try:
        return body()
    except XllmError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
