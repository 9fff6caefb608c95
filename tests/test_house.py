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

# One floor a line, the lowest first: a module imports modules of lower floors only, also lazily and for types.
FLOORS = """
- block clock engine.blocks.policy errors ints openai.body_limit version worker.store.circuit
  worker.store.key_quarantine
- engine.blocks.pool engine.blocks.settings hashing host_memory kv_events machine models.demo models.expert_routing
  models.row_kernels models.weights openai.refusals openai.tokenizer process request_messages settings store_key
  worker.tiers.layered_wait
- config engine.pair.line models.identity models.linear models.rope openai.auth openai.listening openai.streaming
  plans registry service.config service.prefix_index service.rates worker.compute.sampler
- embedded_store engine.blocks.moves engine.forward_join environment figures models.families models.parallel
  peer_plans service.instances service.kv_event_stream service.policies service.store_watch worker.compute.attention
  worker.compute.model_facts worker.compute.plan_digest worker.store.mooncake_client worker.tiers.cache_domain
  worker.tiers.cache_sizes
- calls engine.blocks.prefetch engine.blocks.types engine.rank_views models.delta_rule models.parts openai.sampling
  service.cluster worker.compute.block_compare worker.compute.device_attention worker.compute.latent_attention
  worker.peers.transfer_engine worker.store.objects worker.tiers.host_tier worker.tiers.layer_copy worker.tiers.proof
  worker.transfer_stats
- engine.blocks.sequence models.experts models.gated_delta models.mla openai.protocol service.relay wire
  worker.compute.native_attention worker.compute.recurrent_state worker.peers.pieces worker.store.marks
  worker.store.queue worker.tiers.d2h worker.tiers.h2d
- engine.blocks.account engine.blocks.journal engine.blocks.keeping engine.blocks.prefix engine.blocks.read_targets
  engine.pair.handover engine.pair.links engine.remote_worker engine.steps.replies engine_client models.decoder
  openai.chat_prompt openai.error_answers service.metrics worker.compute.block_layouts worker.peers.transfer_calls
  worker.platform worker.store.connection
- api.metrics api.registration engine.blocks.checkpoints engine.publisher models.hf_model models.mtp openai.output
  service.app worker.compute.row_check worker.compute.step_layout worker.peers.push worker.store.object_copy
- api.generation api.logprobs engine.blocks.ledger service.__main__ worker.compute.model_loading
  worker.compute.numerics worker.peers.pd_transfer worker.store.kv_cache_store
- api.answers engine.blocks.canonical engine.blocks.host_loads engine.blocks.write_back worker.compute.model_runner
  worker.store.store_tier
- api.handlers engine.blocks.admission engine.blocks.store_reads worker.caches worker.compute.speculation
  worker.tiers.kv_cache_transfer
- api.admin engine.blocks.publishing worker.worker
- api.app engine.blocks.books
- api.server engine.steps.audit engine.steps.drafts engine.steps.queues engine.steps.step
- engine.pair.role engine.steps.canonical
- engine.steps.scheduler
- engine.pair.prefill engine.steps.limits
- engine.pair.decode
- engine.build
- engine.report
- engine.calls
- engine.core
- children
- launch
- llm serve
- __init__
"""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS.split("- ")) for name in floor.split()}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py" and name != "__init__"}


@functools.cache
def imports_of(name: str) -> set[str]:
    """Own modules that `name` imports anywhere: lazily, for types only, in functions."""
    found = set()
    package = name.split(".")[:-1] if MODULES[name].name != "__init__.py" else name.split(".")
    if name == "__init__":
        package = []
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        base: list[str] | None = None
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xllm_hier"):
            base = (node.module or "").split(".")[1:]
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("xllm_hier.") for alias in node.names}
        if base is not None:
            assert isinstance(node, ast.ImportFrom)
            inner = [
                ".".join([*base, alias.name]) for alias in node.names if alias.name not in ("_native", "_cpu_kernels")
            ]
            itself = ".".join(base) or "__init__"
            found |= {target if target in MODULES else itself for target in inner}
    return {target for target in found if target in MODULES} - {name}


def test_every_module_stands_on_one_floor() -> None:
    assert sorted(FLOORS.replace("- ", "").split()) == sorted(set(MODULES) - PACKAGES)


@pytest.mark.parametrize("name", sorted(set(MODULES) - PACKAGES))
def test_imports_go_down_only(name: str) -> None:
    up = [target for target in imports_of(name) - PACKAGES if FLOOR_OF[target] >= FLOOR_OF[name]]
    assert not up, f"{name} imports {up} of its own floor or above"


@pytest.mark.parametrize(
    ("name", "folder"),
    [*((name, "api") for name in MODULES if name.startswith("service.")), ("llm", "api"), ("llm", "service")]
    + [(name, "service") for name in MODULES if name.startswith("api.")],
)
def test_processes_share_packages_of_their_own(name: str, folder: str) -> None:
    """What api, service and `LLM` share stands in openai/ and below: none imports anything of another."""
    assert not [target for target in imports_of(name) if target.split(".")[0] == folder]


BOOKS = "engine.blocks.books"


def verbs_of_the_books() -> set[str]:
    """Public methods and properties of HierarchyBlockManagerPool, and its settings, which never change."""
    (facade,) = (
        node
        for node in ast.parse(MODULES[BOOKS].read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "HierarchyBlockManagerPool"
    )
    return {node.name for node in facade.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"} | {
        "settings"
    }


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("engine.")))
def test_the_engine_uses_the_verbs_of_the_block_books_and_reaches_through_none(name: str) -> None:
    if name.startswith("engine.blocks."):
        return
    used = {
        node.attr
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Attribute)
        and (node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", ""))
        in ("manager", "_manager")
    }
    assert used <= verbs_of_the_books()


@pytest.mark.parametrize("folder", sorted(PACKAGES))
def test_a_package_holds_nothing_but_its_docstring(folder: str) -> None:
    assert len(ast.parse(MODULES[folder].read_text()).body) == 1


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


def words_of_the_tour() -> dict[str, str]:
    """The twelve words at the head of docs/architecture.md, each with the place of its function."""
    lines = (ROOT / "docs" / "architecture.md").read_text().partition("## Files")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {word: place.strip("`") for word, _, place in rows if "::" in place}


def test_the_tour_begins_with_twelve_words() -> None:
    words = "block life, hit rule, restore rule, store key, plan, layered wait, write-back commit, AND over ranks"
    words += ", PD cursor, checksum, circuit breaker, floor"
    assert list(words_of_the_tour()) == words.split(", ")


@pytest.mark.parametrize("word", words_of_the_tour())
def test_each_word_of_the_tour_has_its_function_where_it_says(word: str) -> None:
    file, _, name = words_of_the_tour()[word].partition("::")
    path = PACKAGE / file if (PACKAGE / file).exists() else ROOT / file
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        names = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        constants = {
            target.id
            for node in body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert part in names or part in constants, f"{file} has no {name}"
        body = names[part].body if part in names else []


def test_no_drawers_for_leftovers() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}
