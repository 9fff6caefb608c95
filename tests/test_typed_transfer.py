"""What a worker does with blocks of several types: copies by layer number, windows with holes, states and what a head
needs beside them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import random_prompt

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.host_memory import HostMemory
from xllm_hier.ints import ints
from xllm_hier.plans import HOLE, BlockMapping, Forward, SequenceRows, StateMoves
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.store_key import MAIN
from xllm_hier.worker.compute.attention import PagedAttention, Span
from xllm_hier.worker.compute.model_runner import ModelRunner
from xllm_hier.worker.compute.speculation import DraftModel
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
from xllm_hier.worker.tiers.layer_copy import Copier, NativeCopier, TorchCopier, end_of_layers

KV, SWA, LINEAR = BlockType
LAYERS = {KV: (0, 5), SWA: (1, 3), LINEAR: (2, 4)}
PAIR = tuple(TensorSpec(role, "bfloat16", (4, 3)) for role in ("key", "value"))
STATE = (TensorSpec("state", "float32", (5, 2)), TensorSpec("conv", "bfloat16", (3, 4)))


# ------------------------------------------------------------------------------------------------- copies


def domain_with_host(copier: Copier, count: int = 3) -> CacheDomain:
    """Six layers of three types, `count` blocks of each in both tiers, all of them of random bytes."""
    layouts = [BlockLayout(kind, 4, LAYERS[kind], STATE if kind is LINEAR else PAIR) for kind in BlockType]
    domain = CacheDomain(CacheRole.TARGET, MAIN, CacheLayout(CacheRole.TARGET, tuple(layouts)))
    memory = HostMemory.create(count * sum(layout.object_bytes for layout in layouts))
    rest = torch.from_numpy(memory.array)
    generator = torch.Generator().manual_seed(0)
    for layout in layouts:
        device = [as_bytes(cache) for cache in allocate_device_cache(layout, count, torch.device("cpu"))]
        part, rest = rest[: count * layout.object_bytes], rest[count * layout.object_bytes :]
        domain.caches[layout.block_type] = BlockCache(layout, device, part.view(count, layout.object_bytes))
        for layer in (*device, part):
            layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))
    copier.attach([domain], [memory])
    return domain


def mapping(kind: BlockType) -> BlockMapping:
    return BlockMapping(kind.value, ints([0, 2]), ints([1, 0]), bytes(32))


def native() -> NativeCopier:
    return NativeCopier("cpu", threads=1, device=0, stream=lambda: None)


def loaded(domain: CacheDomain) -> dict[int, bool]:
    """Which layers' pieces have come from the host, by the model's number."""
    found = {}
    for cache in domain.caches.values():
        for place, (layer, device) in enumerate(zip(cache.layout.layers, cache.device, strict=True)):
            found[layer] = torch.equal(device[[0, 2]], cache.host_piece(place)[[1, 0]])
    return dict(sorted(found.items()))


def test_pieces_are_loaded_by_the_numbers_that_layers_have_in_the_model() -> None:
    copier = TorchCopier()
    domain = domain_with_host(copier)
    for first in range(0, 6, 2):
        for kind in BlockType:
            copier.load_layers(domain, mapping(kind), range(first, first + 2))
        assert loaded(domain) == {layer: layer < first + 2 for layer in range(6)}
    copier.close()


def test_the_native_copier_counts_layers_likewise() -> None:
    """Its groups are of the model's layers: a group of which a type has none is done at once."""
    copier = native()
    domain = domain_with_host(copier)
    assert {kind: copier._tables[domain, kind.value].layers for kind in BlockType} == LAYERS
    parts = [(domain, mapping(kind)) for kind in BlockType]
    assert end_of_layers(parts) == 6 and end_of_layers(parts[2:]) == 5
    load = copier.load(1, parts, [range(2), range(2, 6)])
    load.wait_all(20)
    assert load.error is None and all(loaded(domain).values())
    copier.close()


@pytest.mark.parametrize("make", [TorchCopier, native])
def test_write_backs_bring_all_layers_of_every_type(make: Any) -> None:
    copier = make()
    domain = domain_with_host(copier)
    copier.offload([(domain, mapping(kind)) for kind in BlockType])(20)
    assert all(loaded(domain).values())
    copier.close()


# ------------------------------------------------------------------------------------------------- windows


def test_what_lies_in_a_hole_changes_no_bit_even_if_it_is_no_number() -> None:
    """A tile of 64 rows of which only the last 14 are at hand reaches back to blocks that none of those sees."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": torch.float32, "tiles": (64,)}
    attention = PagedAttention(**shape, device=torch.device("cpu"), block_size=16, windows=(20,))
    cache = torch.randn(8, 2, 16, 1, 8)
    attention.bind([cache])
    q, kv, table = torch.randn(14, 2, 8), torch.randn(14, 1, 8), ints([3, 1, 4, 6, 0, 2, 5, 7])
    results = []
    for holes in (0, 5):  # rows 114 to 127 see no key before 95, which is the last one of block 5
        attention._workspaces[0].fill_(float("nan"))
        attention._workspaces[1].fill_(float("nan"))
        seen = ints([HOLE] * holes + table.tolist()[holes:])
        attention.prepare([Span(114, 128, 0, ints([]), 114, 114, seen)], [], 14)
        results.append(attention(0, q, kv, kv, 0.3).clone())
    assert torch.equal(*results) and not results[0].isnan().any()


# -------------------------------------------------------------------------------------------------- states


def test_a_head_goes_on_from_a_restored_state_with_the_bits_of_a_cold_run(tmp_path: Path) -> None:
    """Three blocks of 16 and two tokens, a checkpoint behind the second block. Another sequence goes on from there,
    with the hidden state of the token before out of the head's block: its logits, drafts and caches are the first's."""
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = tiny_models.add_head(tiny_models.make(tmp_path, "qwen3_next", **changes), qwen_names=True)
    config = EngineConfig(model=str(folder), block_size=16, num_speculative_tokens=2, num_threads=1)
    target = ModelRunner(config, progress=False)
    head = DraftModel.load(config, target, progress=False)
    assert head is not None
    caches = {}
    for runner in (target, head.runner):
        layers: dict[int, torch.Tensor] = {}
        for layout in runner.layout.blocks:
            made = allocate_device_cache(layout, 10, torch.device("cpu"))
            for layer, cache in zip(layout.layers, made, strict=True):
                layers[layer] = cache.fill_(255 if cache.dtype is torch.uint8 else float("nan"))
        runner.bind_cache([layers[layer] for layer in sorted(layers)])
        caches[runner] = layers
    prompt = random_prompt(50)

    def run(start: int, table: list[int], source: int, moves: dict[int, int]) -> tuple[Any, list[list[int]]]:
        states = StateMoves(source, ints(list(moves)), ints(list(moves.values())))
        more: dict[str, Any] = {"sampling": SamplingSpec(), "draft_from": start, "num_proposals": 2}
        row = SequenceRows(start, ints(prompt[start:]), ints(table), start, states=states, **more)
        plan = Forward(0, [], [row], [])
        output = target.forward(plan, lambda layer: None)
        return output.token_ids, [drafts.tolist() for drafts in head.propose(plan, output)]

    cold = run(0, [1, 2, 3, 4], HOLE, {32: 7, 50: 0})
    logits = target.last_logits.clone()
    for runner, layout in itertools.chain(*([(r, layout) for layout in r.layout.blocks] for r in caches)):
        for layer in layout.layers if layout.block_type is KV else ():
            caches[runner][layer][[5, 6]] = caches[runner][layer][[1, 2]]  # as if restored from another tier
    warm = run(32, [5, 6, 8, 9], 7, {50: 0})
    assert warm == cold and torch.equal(target.last_logits, logits) and len(cold[1][0]) == 2
    head_cache = caches[head.runner][0]
    assert torch.equal(head_cache[8], head_cache[3])
