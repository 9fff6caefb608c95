"""How cache memory is shared out among the types of a model's blocks, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from xllm_hier.block import BlockLayout, BlockType, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.worker.compute.model_runner import ModelRunner
from xllm_hier.worker.compute.speculation import DraftModel
from xllm_hier.worker.tiers.cache_sizes import CacheSizes, strides

KV, SWA, LINEAR = BlockType
SPANS = {KV: 0, SWA: 20, LINEAR: 1}


def sizes(*types: BlockType, **settings: Any) -> CacheSizes:
    """Blocks of four tokens, a window of twenty, steps of eight tokens and three sequences."""
    config = EngineConfig(model="tiny", max_tokens_per_batch=8, max_seqs_per_batch=3, **settings)
    tensor = TensorSpec("key", "float32", (4,))
    return CacheSizes(config, [BlockLayout(kind, 4, (0,), (tensor,), span=SPANS[kind]) for kind in types])


def test_windows_get_a_share_of_the_blocks_but_what_one_sequence_needs_in_a_step() -> None:
    """The window, a chunk, the token ahead, and a block at either edge: 20 + 8 + 1 tokens and two blocks are ten."""
    assert [sizes(KV, SWA).counts(n)[SWA] for n in (4, 10, 16, 40)] == [4, 10, 10, 20]
    assert [sizes(KV, SWA, swa_blocks_factor=factor).counts(40)[SWA] for factor in (0.0, 0.25, 1.0)] == [10, 10, 40]
    drafts = sizes(KV, SWA, num_speculative_tokens=7, speculative_algorithm="ngram")
    assert drafts.counts(16)[SWA] == 11


def test_states_are_those_of_the_sequences_of_a_step_and_a_checkpoint_for_each_stride_of_tokens() -> None:
    """Of 80 blocks of four tokens, one state each 32 tokens: ten, beside those of three sequences."""
    assert sizes(KV, LINEAR, linear_checkpoint_stride=32).counts(80) == {KV: 80, LINEAR: 13}
    half = sizes(KV, LINEAR, linear_checkpoint_stride=32, linear_checkpoints_factor=0.5)
    assert half.counts(80)[LINEAR] == 8 and half.counts(2)[LINEAR] == 4
    drafts = sizes(KV, LINEAR, num_speculative_tokens=2, speculative_algorithm="ngram")
    assert drafts.counts(80)[LINEAR] == 3 * 3 + 2


def test_all_types_together_fill_the_budget_and_never_more() -> None:
    one, nbytes = sizes(KV, SWA, LINEAR), {KV: 10, SWA: 30, LINEAR: 50}

    def total(blocks: int) -> int:
        return sum(count * nbytes[kind] for kind, count in one.counts(blocks).items())

    for budget in (200, 999, 1000, 1001, 5000, 77_777):
        blocks = one.fit(budget, nbytes)
        assert total(blocks) <= budget < total(blocks + 1)


@pytest.mark.parametrize(("types", "least"), [((KV,), 10), ((SWA,), 300), ((KV, LINEAR), 160)])
def test_a_budget_that_one_sequence_does_not_fit_into_is_refused_with_the_least(
    types: tuple[BlockType, ...], least: int
) -> None:
    one, nbytes = sizes(*types), {KV: 10, SWA: 30, LINEAR: 50}
    with pytest.raises(ConfigError, match=rf"max_cache_size={least - 1} .*at least {least} bytes"):
        one.fit(least - 1, nbytes)
    assert one.fit(least, nbytes) >= 1


def test_strides_are_four_windows_and_1024_tokens_unless_set() -> None:
    layouts = sizes(KV, SWA, LINEAR).layouts
    assert strides(EngineConfig(model="tiny"), layouts) == {SWA: 80, LINEAR: 1024}
    own = EngineConfig(model="tiny", swa_checkpoint_stride=12, linear_checkpoint_stride=40)
    assert strides(own, layouts) == {SWA: 12, LINEAR: 40}


@pytest.mark.parametrize("name", ["swa_checkpoint_stride", "linear_checkpoint_stride"])
def test_a_stride_that_ends_within_a_block_is_refused(name: str) -> None:
    """At once where the block size is set, else as soon as the model's is known."""
    with pytest.raises(ConfigError, match=rf"{name}=10 .*a multiple of block_size 4"):
        EngineConfig(model="tiny", block_size=4, **{name: 10})
    with pytest.raises(ConfigError, match=rf"{name}=10 .*a multiple of the block size, 4"):
        strides(EngineConfig(model="tiny", **{name: 10}), sizes(KV, SWA, LINEAR).layouts)


@pytest.mark.parametrize("block_size", [15, 16])
def test_a_draft_model_with_states_is_refused(tmp_path: Path, block_size: int) -> None:
    """Whatever the block size: with an odd one the scan has cells of one token."""
    target, draft = tiny_models.make(tmp_path / "target", "gemma3"), tiny_models.make(tmp_path / "draft", "qwen3_next")
    more: dict[str, Any] = {"num_speculative_tokens": 2, "speculative_algorithm": "draft_model"}
    config = EngineConfig(model=str(target), block_size=block_size, draft_model=str(draft), **more)
    runner = ModelRunner(config, progress=False)
    with pytest.raises(ConfigError, match=r"draft_model.*a model without recurrent layers"):
        DraftModel.load(config, runner, progress=False)
