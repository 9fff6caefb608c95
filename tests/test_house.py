"""Laws of the house: imports go down only, the engine knows no torch, every module says what it is."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xllm_hier"

# One floor a line, the lowest first; a module may import modules of lower floors, and of its own floor within a folder.
FLOORS = [
    ["errors"],
    ["machine", "settings"],
    ["block", "hashing", "config", "registry"],
    ["store_key", "plans", "host_memory", "kv_events"],
    ["peer_plans"],
    ["wire", "embedded_store"],
    [
        "models",
        "engine.block_pool",
        "engine.type_blocks",
        "engine.prefetch",
        "engine.sequence",
        "engine.checkpoints",
        "engine.cache_journal",
        "engine.write_back",
        "engine.restore_policy",
        "engine.audit",
        "engine.drafts",
        "engine.store_reads",
        "engine.loads",
        "engine.account",
        "engine.block_manager",
        "engine.scheduler",
        "engine.handover",
        "engine.peer_links",
        "engine.kv_publisher",
        "engine.prefill_role",
        "engine.decode_role",
    ],
    ["engine.rank_views", "engine.remote_worker", "engine.report", "engine.calls", "engine.core"],
    ["worker"],
    ["api.engine_client", "api.sampling", "api.output", "api.tokenizer", "api.refusal"],
    ["api"],
    ["launch"],
    ["service"],
    ["llm"],
    ["serve", "__init__"],
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def floor_of(name: str) -> int:
    for depth in range(name.count(".") + 1, 0, -1):
        prefix = ".".join(name.split(".")[:depth])
        for number, floor in enumerate(FLOORS):
            if prefix in floor:
                return number
    raise AssertionError(f"{name} stands on no floor")


@functools.cache
def imports_of(name: str) -> set[str]:
    """Own modules that `name` imports anywhere: lazily, for types only, in functions."""
    found = set()
    package = name.split(".")[:-1] if MODULES[name].name != "__init__.py" else name.split(".")
    if name == "__init__":
        package = []
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        targets: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            targets = [".".join([*base, alias.name]) for alias in node.names] + [".".join(base)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xllm_hier"):
            base = (node.module or "").split(".")[1:]
            targets = [".".join([*base, alias.name]) for alias in node.names] + [".".join(base)]
        found |= {target for target in targets if target in MODULES}
    return found - {name, ""}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down_only(name: str) -> None:
    for target in imports_of(name):
        if target in ("__init__", "engine", "worker", "api", "models"):
            continue  # packages hold a docstring only, checked below
        same_folder = "." in name and name.partition(".")[0] == target.partition(".")[0]
        assert floor_of(target) < floor_of(name) or (same_folder and floor_of(target) == floor_of(name)), target


@pytest.mark.parametrize("folder", ["engine", "worker", "api", "models"])
def test_a_package_holds_nothing_but_its_docstring(folder: str) -> None:
    assert len(ast.parse((PACKAGE / folder / "__init__.py").read_text()).body) == 1


def test_within_a_folder_no_two_modules_import_each_other() -> None:
    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        return any(
            target == goal or (target not in seen and reaches(target, goal, seen | {target}))
            for target in imports_of(start)
        )

    assert [name for name in MODULES if reaches(name, name, {name})] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("xllm_hier", ["torch", "transformers", "zmq", "fastapi"]),
        ("xllm_hier.engine.core", ["torch", "transformers"]),
        ("xllm_hier.launch", ["torch", "transformers", "fastapi"]),
        ("xllm_hier.serve", ["torch", "transformers", "fastapi"]),
        ("xllm_hier.api.server", ["torch"]),
    ],
)
def test_processes_load_only_what_is_theirs(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_is(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[name].read_text()))
    assert docstring and len(docstring) > 20


def test_no_drawers_for_leftovers() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}
