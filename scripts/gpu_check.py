"""run.sh gpu-check: what a CUDA machine must do right before it may serve; `--device cpu` runs the same checks there.

Needs torch and numpy only: the extension is built here, and small stand-ins take the place of packages that are missing
(`--bare` uses them in any case). One table; every line is ok, FAILED or skipped, with the reason. Exit code 1 when a
check failed, and when all of it took longer than the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib
import importlib.util
import json
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PROMPT_BLOCKS, REST, ANSWER, LIMIT_S = 6, 4, 24, 60.0
TOTAL_LIMIT_S, WATCHDOG_S, BUILD_LIMIT_S = 420, 475, 240
PIECES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SHAPE = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
# For the overlap: a forward and a copy that take about as long as each other on a data centre card.
LARGE = {"vocab_size": 320, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 16384}

Line = tuple[str, bool | str]  # what; True is ok, False is FAILED, a text is ok and says how


def _hashes(host: Any) -> bytes:
    """Block hashes made of the places on the host: what a load names must be what was written there."""
    return b"".join(bytes([int(block) % 256]) * 16 for block in host)


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    device: str

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream if self.cuda else None


# --------------------------------------------------------------------------------------- packages and build


def put_stand_ins(everything: bool) -> list[str]:
    """Stand-ins for packages that the tiny model and the transfer import: as much of them as is used here."""
    stand_ins = {"transformers": _transformers, "safetensors": _safetensors, "tqdm": _tqdm, "xxhash": _xxhash}
    put = []
    for name, make in stand_ins.items():
        if everything or importlib.util.find_spec(name) is None or (name == "transformers" and _old_transformers()):
            sys.modules.update({module.__name__: module for module in make()})
            put.append(name)
    return put


def _old_transformers() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(map(int, version("transformers").split(".")[:2])) < (5, 24)
    except (PackageNotFoundError, ValueError):
        return True


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def _transformers() -> list[types.ModuleType]:
    class AutoConfig:
        @staticmethod
        def from_pretrained(folder: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text()))

    rope = _module("transformers.modeling_rope_utils", ROPE_INIT_FUNCTIONS={})
    return [_module("transformers", AutoConfig=AutoConfig, __path__=[]), rope]


def _safetensors() -> list[types.ModuleType]:
    class Reader:
        def __init__(self, path: Path, **_options: Any) -> None:
            with open(path, "rb") as file:  # by its name torch would take it for what it says it is
                self._tensors = torch.load(file)

        def keys(self) -> list[str]:
            return list(self._tensors)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = self._tensors[name]
            return tensor

    def save_file(tensors: dict[str, torch.Tensor], path: Path, **_options: Any) -> None:
        torch.save(tensors, path)

    error = type("SafetensorError", (Exception,), {})
    package = _module("safetensors", safe_open=Reader, SafetensorError=error, __path__=[])
    return [package, _module("safetensors.torch", save_file=save_file)]


def _tqdm() -> list[types.ModuleType]:
    class Silent:
        def __init__(self, **_options: Any) -> None: ...
        def update(self, amount: int) -> None: ...
        def close(self) -> None: ...

    return [_module("tqdm", tqdm=Silent)]


def _xxhash() -> list[types.ModuleType]:
    def digest(data: Any) -> bytes:
        return hashlib.blake2b(data, digest_size=8).digest()

    return [_module("xxhash", xxh3_64_digest=digest)]


def check_build(place: Place) -> Iterator[Line]:
    """The extension loads; it is built where it does not."""
    name = "xllm_hier._native"
    how = "was built before"
    try:
        importlib.import_module(name)
    except ImportError:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False, errors="replace"
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip()[-600:]}") from None
        importlib.invalidate_caches()
        how = f"built in {time.perf_counter() - start:.0f} s"
    native = importlib.import_module(name)
    copier = native.Copier(place.device)
    how += f"; copies by {copier.method}"
    copier.close()
    yield "native extension", how


# ------------------------------------------------------------------------------------------------- numerics


def check_rows(place: Place, dtype: torch.dtype) -> Iterator[Line]:
    """In a product of fixed size a row's bits must depend neither on its place nor on its neighbours."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 1024, generator=generator).to(place.device, dtype) for _ in range(2))
    whole = x @ w.T
    moved = x.flip(0) @ w.T
    alone = torch.zeros_like(x)
    alone[7] = x[7]
    equal = torch.equal(moved.flip(0), whole) and torch.equal((alone @ w.T)[7], whole[7])
    yield f"{short(dtype)}: rows of a 256-row product", equal


def short(dtype: torch.dtype) -> str:
    """The type's name without torch's."""
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------------------- a tiny model


def make_model(folder: Path, dtype: torch.dtype, shape: dict[str, int]) -> Path:
    """A random Llama."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    hidden, ffn, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    matrices = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    matrices |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
    matrices |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(shape["num_hidden_layers"]):
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        shapes |= {f"model.layers.{layer}.{name}": size for name, size in (matrices | norms).items()}
    weights = {
        f"{name}.weight": (torch.randn(size, generator=generator) * size[-1] ** -0.5 + (len(size) == 1)).to(dtype)
        for name, size in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": short(dtype)}
    config |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (folder / "config.json").write_text(json.dumps(shape | config))
    return folder


class Bench:
    """Runner, device cache and transfers of one worker, without its processes."""

    def __init__(self, folder: Path, place: Place, block_size: int, num_blocks: int) -> None:
        from xllm_hier.block import BlockType, CacheRole
        from xllm_hier.config import EngineConfig
        from xllm_hier.worker.compute.model_runner import ModelRunner
        from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
        from xllm_hier.worker.tiers.kv_cache_transfer import HierarchyKVCacheTransfer
        from xllm_hier.worker.transfer_stats import TransferStats

        sizes = {"block_size": block_size, "host_blocks_factor": 2.0}
        # What is timed here is the copy: verifying runs beside it.
        config = EngineConfig(model=str(folder), device=place.device, verify_host_blocks=False, **sizes)
        self.runner = ModelRunner(config, progress=False)
        self.layout = self.runner.layout.of(BlockType.KV)
        self.caches = allocate_device_cache(self.layout, num_blocks, self.runner.platform.device)
        self.runner.bind_cache(self.caches)
        domain = CacheDomain(CacheRole.TARGET, "main", self.runner.layout)
        domain.caches[BlockType.KV] = BlockCache(self.layout, [as_bytes(cache) for cache in self.caches])
        self.answers: queue.Queue[Any] = queue.Queue()
        self.copier = self.runner.platform.copier(config)
        self.transfer = HierarchyKVCacheTransfer(config, 0, TransferStats(), self.answers.put, copier=self.copier)
        self.transfer.register(domain)
        self.transfer.build({BlockType.KV: num_blocks})

    def forward(self, plan: Any) -> Any:
        """One step that waits, layer by layer, for the loads started before it."""
        loads = self.transfer.attach_loads()

        def wait_for_layer(layer: int) -> None:
            for load in loads:
                load.wait(layer, LIMIT_S)

        output = self.runner.forward(plan, wait_for_layer)
        for load in loads:
            load.wait_all(LIMIT_S)
            if load.error is not None:
                raise RuntimeError(f"the load failed: {load.error}")
        return output

    def greedy(self, prompt: list[int], table: list[int], cuts: list[int]) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens and their logits; the prompt is computed in chunks between `cuts`, the first of which is the hit."""
        from xllm_hier.ints import ints
        from xllm_hier.plans import Forward, SequenceRows
        from xllm_hier.request_messages import SamplingSpec

        logits, tokens = [], list(prompt)
        for start, stop in zip(cuts, [*cuts[1:], len(prompt)], strict=True):
            sampling = SamplingSpec() if stop == len(prompt) else None
            part = SequenceRows(start, ints(prompt[start:stop]), ints(table), start, sampling)
            output = self.forward(Forward(0, [], [part], []))
        while True:
            tokens += output.token_ids
            logits.append(self.runner.last_logits.cpu())
            if len(tokens) == len(prompt) + ANSWER:
                return tokens[len(prompt) :], logits
            row = SequenceRows(len(tokens) - 1, ints(tokens[-1:]), ints(table), 0, SamplingSpec())
            output = self.forward(Forward(0, [], [], [row]))

    def offload(self, device: list[int], host: list[int]) -> bool:
        from xllm_hier.ints import ints
        from xllm_hier.plans import BlockMapping, OffloadCopied, TransferKvBlocks

        hashes = _hashes(host)
        self.transfer.offload(TransferKvBlocks(1, [BlockMapping("KV", ints(device), ints(host), hashes)]))
        copied = self.answers.get(timeout=LIMIT_S)
        self.answers.get(timeout=LIMIT_S)
        return isinstance(copied, OffloadCopied) and copied.num_blocks == len(device)

    def load(self, device: list[int], host: list[int], batch_id: int = 2) -> None:
        from xllm_hier.ints import ints
        from xllm_hier.plans import BlockMapping, TransferBlocks

        self.transfer.load_from_host(
            TransferBlocks(batch_id, [BlockMapping("KV", ints(device), ints(host), _hashes(host))])
        )

    def blocks(self, table: list[int]) -> torch.Tensor:
        return torch.stack([cache[table].cpu() for cache in self.caches])


@contextlib.contextmanager
def bench_of(
    place: Place, dtype: torch.dtype, shape: dict[str, int], block_size: int, num_blocks: int
) -> Iterator[Bench]:
    """A bench over a random model of `shape`, which ends with the block."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(make_model(Path(scratch), dtype, shape), place, block_size, num_blocks)
        try:
            yield bench
        finally:
            bench.transfer.close()


def check_model(place: Place, dtype: torch.dtype, block: int) -> Iterator[Line]:
    """Greedy tokens, logits and KV: cold, in chunks, from device blocks, and from the host into other device blocks."""
    dice = random.Random(2)
    hit = PROMPT_BLOCKS * block
    prompt = [dice.randrange(3, SHAPE["vocab_size"]) for _ in range(hit + REST)]
    used = -(-(len(prompt) + ANSWER) // block)
    places = dice.sample(range(6 * used), 6 * used)
    first, second, third, host, more = (places[start : start + used] for start in range(0, 5 * used, used))
    label = f"{short(dtype)}, block {block}: " if place.cuda else f"{short(dtype)}: "
    with bench_of(place, dtype, SHAPE, block, len(places)) as bench:
        exact = bool(bench.runner.details.batch_invariant)

        def bits(what: str, equal: bool) -> Line:
            promised = equal or exact
            return f"{label}{what}, bit for bit", equal if promised else "no, and not promised (batch_invariant false)"

        if place.cuda:
            details = bench.runner.details
            yield f"{label}attention", f"by {details.attention}, batch_invariant {details.batch_invariant}"
        cold, cold_logits = bench.greedy(prompt, first, [0])
        full = first[:PROMPT_BLOCKS]
        kv = bench.blocks(full)
        chunked, chunked_logits = bench.greedy(prompt, second, [0, 2 * block + 1, 3 * block + 2])
        yield f"{label}chunked prefill: tokens", chunked == cold
        yield bits("chunked prefill: logits", all(map(torch.equal, chunked_logits, cold_logits)))
        again, _ = bench.greedy(prompt, [*full, *more[PROMPT_BLOCKS:]], [hit])
        yield f"{label}hit on the device: tokens", again == cold and f"{hit} of {len(prompt)} from the cache"
        offloaded = bench.offload(full, host[:PROMPT_BLOCKS])
        yield f"{label}offload to the host", offloaded
        # A finite value far from all others: recycled blocks are finite, and a kernel may multiply it by zero.
        for cache in bench.caches:
            cache.fill_(1000.0)
        if offloaded:
            bench.load(third[:PROMPT_BLOCKS], host[:PROMPT_BLOCKS])
            warm, warm_logits = bench.greedy(prompt, third, [hit])
            kept = torch.equal(bench.blocks(third[:PROMPT_BLOCKS]), kv)
            yield f"{label}restored from the host: KV, bit for bit", kept
            yield f"{label}restored from the host: tokens", warm == cold
            yield bits("restored from the host: logits", all(map(torch.equal, warm_logits, cold_logits)))


# --------------------------------------------------------------------------------------------------- copies


class Caches:
    """Host and device blocks of `layers` layers of `piece` bytes under the native copier, without a model."""

    def __init__(self, place: Place, piece: int, layers: int, blocks: int) -> None:
        from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
        from xllm_hier.host_memory import HostMemory
        from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
        from xllm_hier.worker.tiers.layer_copy import NativeCopier

        tensors = tuple(TensorSpec(role, "bfloat16", (piece // 4,)) for role in ("key", "value"))
        layout = BlockLayout(BlockType.KV, 16, tuple(range(layers)), tensors)
        self.place, self.piece, self.layers, self.blocks = place, piece, layers, blocks
        self.device = [as_bytes(c) for c in allocate_device_cache(layout, blocks, torch.device(place.device))]
        self._memory = HostMemory.create(blocks * layout.object_bytes)
        host = torch.from_numpy(self._memory.array).view(blocks, layout.object_bytes)
        self.cache = BlockCache(layout, self.device, host)
        self.domain = CacheDomain(CacheRole.TARGET, "main", CacheLayout(CacheRole.TARGET, (layout,)))
        self.domain.caches[BlockType.KV] = self.cache
        self.copier = NativeCopier(place.device, threads=2, device=0, stream=place.stream)
        self.copier.attach([self.domain], [self._memory])
        self._batches = iter(range(10**9))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.device:
            layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))
        host = self.cache.host
        assert host is not None
        host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, generator=generator))

    def parts(self, device: Any, host: Any) -> Any:
        from xllm_hier.ints import ints
        from xllm_hier.plans import BlockMapping

        return [(self.domain, BlockMapping("KV", ints(device), ints(host), b""))]

    def load(self, device: Any, host: Any, groups: int = 1) -> Any:
        from xllm_hier.worker.tiers.layered_wait import layer_groups

        return self.copier.load(next(self._batches), self.parts(device, host), layer_groups(self.layers, groups))

    def close(self) -> None:
        self.copier.close()


@contextlib.contextmanager
def caches_of(place: Place, piece: int, layers: int, blocks: int) -> Iterator[Caches]:
    """Caches that end with the block."""
    caches = Caches(place, piece, layers, blocks)
    try:
        yield caches
    finally:
        caches.close()


def check_copies(place: Place) -> Iterator[Line]:
    """Bytes of the native copier against torch indexing, everything that was not asked for included."""
    from xllm_hier.worker.tiers.layered_wait import layer_groups

    dice = random.Random(4)
    for piece in (4 << 10, 96 << 10):
        good = True
        with caches_of(place, piece, 5, 16) as caches:
            for round_number in range(4):
                caches.fill(round_number)
                count = dice.randrange(1, 9)
                device, host = (dice.sample(range(caches.blocks), count) for _ in range(2))
                host_memory = caches.cache.host
                assert host_memory is not None
                before, objects = [layer.cpu() for layer in caches.device], host_memory.clone()
                if round_number % 2:
                    for layer in range(caches.layers):
                        before[layer][device] = caches.cache.host_piece(layer)[host]
                    load = caches.load(device, host, groups=2)
                    for layer in range(caches.layers):
                        load.wait(layer, LIMIT_S)
                    load.wait_all(LIMIT_S)
                    good &= load.error is None
                else:
                    for layer in range(caches.layers):
                        start = layer * piece
                        objects[host, start : start + piece] = before[layer][device]
                    caches.copier.offload(caches.parts(device, host))(LIMIT_S)
                good &= torch.equal(host_memory, objects)
                good &= all(torch.equal(layer.cpu(), left) for layer, left in zip(caches.device, before, strict=True))
            groups = len(layer_groups(caches.layers, 2))
        yield f"copies of {size_name(piece)} pieces", good and f"as torch indexing, {groups} groups, {count} blocks"


def check_events(place: Place) -> Iterator[Line]:
    """Order without the host: groups arrive one by one; on a device the compute stream and the copies order themselves.

    The device variant keeps the compute stream busy, so that a copy that did not wait would read the old bytes.
    """
    with caches_of(place, 1 << 20, 4, 24) as caches:
        ids = list(range(caches.blocks))
        caches.fill(1)
        if not place.cuda:
            caches.copier._copier.bytes_per_second = caches.blocks * caches.layers * caches.piece / 0.4
            load = caches.load(ids, ids, groups=4)
            load.wait(0, LIMIT_S)
            early = not load._transfer.done(3)
            load.wait_all(LIMIT_S)
            yield "events: a group is there before the last one", early and "throttled copy"
            return
        host = caches.cache.host
        assert host is not None
        busy = torch.randn(4096, 4096, device="cuda")
        wrong = []
        for _ in range(3):
            for _ in range(30):
                busy = (busy @ busy).clamp_(-1, 1)
            for layer in caches.device:
                layer.fill_(7)
            caches.copier.offload(caches.parts(ids, ids))(LIMIT_S)
            wrong.append(not all(bool((caches.cache.host_piece(layer) == 7).all()) for layer in range(caches.layers)))
            host.fill_(9)
            load = caches.load(ids, ids, groups=4)
            sums = []
            for layer in range(caches.layers):
                load.wait(layer, LIMIT_S)  # returns at once: the stream waits
                sums.append((caches.device[layer] != 9).sum())
            load.wait_all(LIMIT_S)
            wrong.append(any(int(total) for total in sums))
            host.fill_(1)
            for layer in caches.device:
                layer.fill_(0)
        yield (
            "events: offload after, load before the compute stream",
            not any(wrong) and "3 rounds beside a busy stream",
        )


def check_rates(place: Place) -> Iterator[Line]:
    """GB/s of scattered pieces, four layers of each block, against one plain copy between pinned memory and the device.

    In alternation, medians; the plain copy is what the link gives. On cpu it is a memcpy by torch's threads.
    """
    total, rounds, layers = (256 << 20, 7, 4) if place.cuda else (32 << 20, 3, 4)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=place.cuda).fill_(1)
    flat = torch.ones(total, dtype=torch.uint8, device=place.device)
    rng = np.random.default_rng(5)

    def seconds(work: Callable[[], object]) -> float:
        place.synchronize()
        start = time.perf_counter()
        work()
        place.synchronize()
        return time.perf_counter() - start

    for piece in PIECES:
        count = total // (piece * layers)
        with caches_of(place, piece, layers, 2 * count) as caches:

            def native_load(caches: Caches = caches, count: int = count) -> None:
                load = caches.load(*(rng.permutation(caches.blocks)[:count] for _ in range(2)), groups=4)
                load.wait_all(LIMIT_S)
                if load.error is not None:
                    raise RuntimeError(load.error)

            def native_offload(caches: Caches = caches, count: int = count) -> None:
                device, host = (rng.permutation(caches.blocks)[:count] for _ in range(2))
                caches.copier.offload(caches.parts(device, host))(LIMIT_S)

            ways: dict[str, Callable[[], object]] = {
                "H2D": native_load,
                "H2D limit": lambda: flat.copy_(pinned, non_blocking=True),
                "D2H": native_offload,
                "D2H limit": lambda: pinned.copy_(flat, non_blocking=True),
            }
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds + 1):  # the first warms up
                for name, work in ways.items():
                    taken[name].append(seconds(work))
            method = caches.copier._copier.method
        rate = {name: total / statistics.median(times[1:]) / 1e9 for name, times in taken.items()}
        found = ", ".join(
            f"{way} {rate[way]:.1f} of {rate[f'{way} limit']:.1f} ({rate[way] / rate[f'{way} limit']:.0%})"
            for way in ("H2D", "D2H")
        )
        yield f"GB/s at {size_name(piece)} pieces", f"{found} by {method}"


def size_name(nbytes: int) -> str:
    """In KiB or MiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def check_overlap(place: Place) -> Iterator[Line]:
    """How much of a restore shows beside the forward that needs it; with n groups 1/n cannot be hidden.

    On cpu the copy is held to a rate at which it takes 50 ms, as the tiny model's few bytes take no time.
    """
    from xllm_hier.ints import ints
    from xllm_hier.plans import Forward, SequenceRows
    from xllm_hier.request_messages import SamplingSpec
    from xllm_hier.worker.tiers.layered_wait import layer_groups

    shape, prefix, suffix, block = (LARGE, 8192, 1024, 256) if place.cuda else (SHAPE, 1024, 256, 32)
    rounds = 9 if place.cuda else 3
    blocks = (prefix + suffix) // block
    with bench_of(place, torch.bfloat16, shape, block, blocks) as bench:
        for cache in bench.caches:
            cache.normal_()
        hit = list(range(prefix // block))
        bench.offload(hit, hit)
        nbytes = len(hit) * bench.layout.payload_bytes
        if not place.cuda and bench.copier.name == "native-cpu":
            bench.copier._copier.bytes_per_second = nbytes / 0.05
        dice = random.Random(6)
        tokens = ints([dice.randrange(3, shape["vocab_size"]) for _ in range(suffix)])
        row = SequenceRows(prefix, tokens, ints(range(blocks)), prefix, SamplingSpec())
        plan = Forward(0, [], [row], [])

        def both() -> None:
            bench.load(hit, hit)
            bench.forward(plan)

        def copy() -> None:
            bench.load(hit, hit)
            for load in bench.transfer.attach_loads():
                load.wait_all(LIMIT_S)

        taken: dict[str, list[float]] = {"compute": [], "copy": [], "both": []}
        for _ in range(rounds + 2):
            for name, work in (("compute", lambda: bench.forward(plan)), ("copy", copy), ("both", both)):
                place.synchronize()
                start = time.perf_counter()
                work()
                place.synchronize()
                taken[name].append(time.perf_counter() - start)
        compute, alone, together = (statistics.median(times[2:]) for times in taken.values())
        groups = len(layer_groups(shape["num_hidden_layers"], 4))
        yield (
            f"overlap: {prefix} tokens restored beside {suffix}",
            f"exposed {(together - compute) / alone:.0%} of the copy (1/{groups} at best): compute "
            f"{compute * 1e3:.1f}, copy {alone * 1e3:.1f} ({nbytes / alone / 1e9:.1f} GB/s), both "
            f"{together * 1e3:.1f} ms, {bench.copier.name}",
        )


# ----------------------------------------------------------------------------------------------------- main


def checks(place: Place) -> Iterator[tuple[str, Callable[[], Iterator[Line]]]]:
    """Name and body of each check, in order."""
    yield "build", lambda: check_build(place)
    for dtype in (torch.float32, torch.bfloat16):
        yield "rows", lambda dtype=dtype: check_rows(place, dtype)
    models = [(torch.float32, 16), (torch.bfloat16, 16)]
    for dtype, block in [*models, (torch.bfloat16, 256)] if place.cuda else models:
        yield "model", lambda dtype=dtype, block=block: check_model(place, dtype, block)
    yield "copies", lambda: check_copies(place)
    yield "events", lambda: check_events(place)
    yield "rates", lambda: check_rates(place)
    yield "overlap", lambda: check_overlap(place)


def show(what: str, result: str) -> bool:
    """Print one line of the table; whether it tells of a failure."""
    print(f"  {what:58} {result}", flush=True)
    return result.startswith("FAILED")


def run_check(name: str, body: Callable[[], Iterator[Line]]) -> bool:
    """Run one check to its end, whatever happens in it; whether it failed."""
    failed = False
    try:
        for what, outcome in body():
            text = f"ok ({outcome})" if isinstance(outcome, str) else "ok" if outcome else "FAILED"
            failed |= show(what, text)
    except ImportError as error:
        return failed | show(name, f"skipped: needs {error.name} ({error})")
    except Exception as error:
        return failed | show(name, f"FAILED: {type(error).__name__}: {error}")
    return failed


def main() -> int:
    """Run all checks and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--bare", action="store_true", help="use the stand-ins even where the packages are installed")
    parser.add_argument("--only", default="", help="comma list: build rows model copies events rates overlap")
    options = parser.parse_args()
    device = options.device
    if device != "cpu" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device, so nothing was checked; try --device cpu")
        return 1 if device == "cuda" else 0
    place = Place("cuda" if device == "auto" else device)
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    start = time.monotonic()
    stand_ins = put_stand_ins(options.bare)
    name = torch.cuda.get_device_name() if place.cuda else "cpu"
    note = f", with stand-ins for {', '.join(stand_ins)}" if stand_ins else ""
    print(f"gpu-check on {name}, torch {torch.__version__}, Python {sys.version.split()[0]}{note}")
    failed = False
    wanted = set(filter(None, options.only.split(",")))
    for name, body in checks(place):
        if wanted and name not in wanted:
            continue
        if time.monotonic() - start > TOTAL_LIMIT_S:
            show(name, f"skipped: {TOTAL_LIMIT_S} s are over")
        else:
            failed |= run_check(name, body)
    print(f"  {'FAILED' if failed else 'passed'} after {time.monotonic() - start:.0f} s")
    faulthandler.cancel_dump_traceback_later()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
