"""A prompt's blocks go to another instance, which goes on from them with the bits of one that does both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from pd_sides import KV, LIMIT_S, LINEAR, NUM_BLOCKS, SWA, Side, settings
from tiny_models import random_prompt

from xllm_hier.block import BlockType
from xllm_hier.ints import ints
from xllm_hier.plans import HOLE, Forward, PullBlocks, PushBlocks, RemoteBlocks, SequenceRows, StateMoves
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.worker.compute.model_runner import ModelRunner
from xllm_hier.worker.compute.speculation import DraftModel
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes


class Instance(Side):
    """A tiny model, and perhaps a draft, whose prompts it computes and whose tokens it goes on with."""

    def __init__(self, folder: Path, tables: dict[BlockType, list[int]], **changes: Any) -> None:
        more: dict[str, Any] = {"block_size": 16, "num_threads": 1, **changes}
        config = settings(model=str(folder), **more)
        self.tables = tables
        self.target = ModelRunner(config, progress=False)
        self.draft = DraftModel.load(config, self.target, progress=False)
        runners = [self.target, *([self.draft.runner] if self.draft else [])]
        super().__init__([self._domain(runner) for runner in runners], **{"model": str(folder), **more})

    @staticmethod
    def _domain(runner: ModelRunner) -> CacheDomain:
        domain = CacheDomain(runner.layout.role, runner.layout.role.value, runner.layout)
        layers: dict[int, torch.Tensor] = {}
        for layout in runner.layout.blocks:
            caches = allocate_device_cache(layout, NUM_BLOCKS, torch.device("cpu"))
            for layer, cache in zip(layout.layers, caches, strict=True):
                layers[layer] = cache.fill_(255 if cache.dtype is torch.uint8 else float("nan"))
            domain.caches[layout.block_type] = BlockCache(layout, [as_bytes(cache) for cache in caches])
        runner.bind_cache([layers[layer] for layer in sorted(layers)])
        return domain

    def _places(self, end: int) -> dict[str, Any]:
        states = StateMoves(self.tables[LINEAR][0], ints([end]), ints(self.tables[LINEAR]))
        tables = {"block_table": ints(self.tables[KV]), "window_table": ints(self.tables[SWA])}
        return {**tables, "states": states if self.target.is_recurrent else None}

    def compute(self, prompt: list[int], pushes: Sequence[PushBlocks] = ()) -> tuple[list[int], list[list[int]]]:
        """The token behind the prompt, and drafts behind that one."""
        more: dict[str, Any] = {**self._places(len(prompt)), "sampling": SamplingSpec(), "write_from": 0}
        if self.target.is_recurrent:
            more["states"] = StateMoves(HOLE, ints([len(prompt)]), ints(self.tables[LINEAR]))
        if self.draft is not None:
            more |= {"draft_from": 0, "num_proposals": 2}
        return self._step(Forward(0, [], [SequenceRows(0, ints(prompt), **more)], [], list(pushes)))

    def go_on(self, token: int, start: int) -> tuple[list[int], list[list[int]]]:
        more: dict[str, Any] = {**self._places(start + 1), "sampling": SamplingSpec(), "draw": 1}
        if self.draft is not None:
            more |= {"draft_from": start + 1, "num_proposals": 2}
        return self._step(Forward(0, [], [], [SequenceRows(start, ints([token]), **more)]))

    def _step(self, plan: Forward) -> tuple[list[int], list[list[int]]]:
        pushes = self.pd.begin(plan.pushes)
        output = self.target.forward(plan, pushes.following(lambda layer: None))
        pushes.target_computed()
        drafts = self.draft.propose(plan, output) if self.draft is not None else []
        pushes.drafted()
        assert pushes.finish(LIMIT_S) == []
        return output.token_ids, [drafted.tolist() for drafted in drafts]


def mappings_to(peer: Instance, here: Instance) -> list[list[RemoteBlocks]]:
    """All blocks of a sequence, by domain."""
    return [
        [RemoteBlocks(kind.value, ints(here.tables[kind]), ints(peer.tables[kind])) for kind in domain.caches]
        for domain in here.domains
    ]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},
    "qwen3_next": {"num_speculative_tokens": 2, "speculative_algorithm": "mtp"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_instance_generates_behind_a_prompt_has_the_bits_of_one_that_does_both(
    tmp_path: Path, family: str
) -> None:
    """Keys and values, windows, recurrent states, a head with the hidden state it goes on from; pushed, then pulled."""
    folder = tiny_models.make(tmp_path, family)
    if family == "qwen3_next":
        tiny_models.add_head(folder, qwen_names=True)
    prefill = Instance(folder, {KV: [1, 2, 3, 4], SWA: [5, 6, 7, 8], LINEAR: [9]}, **FAMILIES[family])
    decode = Instance(folder, {KV: [7, 3, 9, 0], SWA: [2, 1, 5, 11], LINEAR: [4]}, **FAMILIES[family])
    prefill.know(decode)
    decode.know(prefill, "p")
    prompt = random_prompt(50)
    for pulled in (False, True):
        if pulled:
            (token,), drafts = prefill.compute(prompt)
            for layer in decode.layers:
                layer.fill_(255)
            assert decode.pull(PullBlocks(1, "p", *mappings_to(prefill, decode))).error is None
        else:
            (token,), drafts = prefill.compute(prompt, [PushBlocks(1, "d", *mappings_to(decode, prefill))])
        assert len(drafts) == (1 if FAMILIES[family] else 0)
        for start in range(len(prompt), len(prompt) + 5):
            expected, actual = (instance.go_on(token, start) for instance in (prefill, decode))
            assert actual == expected and torch.equal(decode.target.last_logits, prefill.target.last_logits)
            assert not decode.target.last_logits.isnan().any()
            (token,), _ = expected
    for instance in (prefill, decode):
        assert instance.pd.close()
