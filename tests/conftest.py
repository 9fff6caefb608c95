"""How the tests run: which of them start no process (`unit`), which share a worker, and which begin first."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is loaded: see xllm_hier/launch.py

# Names behind which a process is started; who uses them, however indirectly, is no unit test.
_STARTERS = {"subprocess", "fork_server", "start_program", "EmbeddedStore", "Instance", "LLM", "shared_library"}
_EVENTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.forkpty"}
_unit_test: str | None = None  # that is running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the unit tests, keep together what shares a running fixture, and let the slow ones begin."""
    for item in items:
        if not _starts_a_process(item):
            item.add_marker("unit")
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _fixtures(item: pytest.Item) -> dict[str, pytest.FixtureDef[object]]:
    found = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - pytest has no public way
    return {name: definitions[-1] for name, definitions in found.items()}


def _group(item: pytest.Item) -> str:
    """Tests of one module that use the same running thing (a fixture of the module that ends what it started), or the
    same parameter of a module's fixture, run on one worker; all others run wherever there is room."""
    params = getattr(item, "callspec", None)
    shared, names = False, []
    for name, fixture in _fixtures(item).items():
        if fixture.scope not in ("module", "class", "session") or fixture.baseid == "":
            continue
        if params is not None and name in params.params:
            names.append(f"{name}={params.indices[name]}")
        spread = getattr(getattr(item, "module", None), "SPREAD", False)
        shared |= not spread and inspect.isgeneratorfunction(inspect.unwrap(fixture.func))
    return " ".join([item.path.name, *sorted(names)]) if shared or names else ""


# ---------------------------------------------------------------------------------------------- unit tests


@functools.cache
def _names_in(path: Path) -> tuple[dict[str, set[str]], list[ast.ImportFrom]]:
    """The names that each function, class and assignment of a file of tests uses, and those it imports from others;
    and its imports, those in functions too. One walk: all workers do this for all files."""
    found: dict[str, set[str]] = {}
    imports = []
    for node in ast.parse(path.read_text()).body:
        used = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                used.add(part.id)
            elif isinstance(part, ast.arg):  # fixtures
                used.add(part.arg)
            elif isinstance(part, ast.ImportFrom):
                imports.append(part)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = used
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = {alias.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found |= {name.id: used for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found, imports


@functools.cache
def _starters_in(path: Path) -> set[str]:
    """Names of a file behind which a process is started, also by way of what it imports from other files of tests."""
    uses, imports = _names_in(path)
    starters = set(_STARTERS)
    for node in imports:
        other = TESTS / f"{(node.module or '').replace('.', '/')}.py"
        if not node.level and other.exists() and other != path:
            starters |= {alias.asname or alias.name for alias in node.names} & _starters_in(other)
    while more := {name for name, used in uses.items() if used & starters} - starters:
        starters |= more
    return starters


def _starts_a_process(item: pytest.Item) -> bool:
    starters = _starters_in(item.path)
    function = getattr(item, "originalname", item.name)
    fixtures = (fixture.func.__name__ for fixture in _fixtures(item).values())
    return function in starters or not starters.isdisjoint(fixtures)


def _notice(event: str, _arguments: tuple[object, ...]) -> None:
    if _unit_test is not None and event in _EVENTS:
        raise AssertionError(f"{_unit_test} is marked as a unit test and starts a process: {event}")


sys.addaudithook(_notice)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    global _unit_test
    _unit_test = item.nodeid if item.get_closest_marker("unit") else None
    try:
        return (yield)
    finally:
        _unit_test = None
