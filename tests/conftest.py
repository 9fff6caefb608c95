"""Shared fixtures; what a test starts, its fixture ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is loaded: see xllm_hier/launch.py

# Tests of several processes at once by name of the module that starts them; see `pytest_collection_modifyitems`.
_STARTERS = {"serving", "pairs", "service", "etcd", "ha_store", "pd_sides", "ranks"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` (pytest-xdist) tests that start processes run one after the other, beside the rest:
    two such tests at a time would ask each other's ports and time limits too much."""
    for item in items:
        names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
        starts = any(getattr(value, "__module__", "") in _STARTERS for value in names)
        if starts or "subprocess" in vars(getattr(item, "module", object)):
            item.add_marker(pytest.mark.xdist_group("processes"))
