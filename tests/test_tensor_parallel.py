"""A model split over ranks is the same model: against transformers, with real collectives; and what may be split."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from ranks import RankedDriver
from test_models import close, reference
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table

from xllm_hier.errors import ConfigError
from xllm_hier.models.parallel import TensorParallel

# What differs: biases that only rank 0 may add, tied weights and a vocabulary that does not divide, norms between a
# product and its residual, KV heads that serve two ranks each.
SPLITS = {
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "odd-tied-vocabulary": ("llama", 2, {"tie_word_embeddings": True, "vocab_size": 321}),
    "query-key-bias": ("qwen2", 2, {}),
    "norms-between": ("gemma3", 2, {}),
    "shared-kv-heads": ("qwen3", 4, {"num_attention_heads": 8}),
    "one-kv-head": ("mistral", 2, {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_ranks_agree_with_transformers(tmp_path, name):
    family, tp_size, changes = SPLITS[name]
    ranks = RankedDriver(tiny_models.make(tmp_path, family, **changes), tp_size)
    prompt, table = random_prompt(150, seed=1), random_table(12)
    expected = reference(tmp_path, prompt)
    try:
        ranks.step([prompt_part(prompt, table, 0, 70)])
        ranks.step([prompt_part(prompt[:140], table, 70)])
        assert close(ranks.logits[0], expected[139])
        output = ranks.step([], [generated(prompt, table, 140)])
        assert close(ranks.logits[0], expected[149])
        assert output.token_ids == [int(expected[149].argmax())]
        parts = ranks.step([prompt_part(prompt[:40], random_table(3, seed=3), prompt_logprobs=1)]).prompt_logprobs[0]
        assert [entry.top_ids[0] for entry in parts] == expected[:39].argmax(-1).tolist()
    finally:
        ranks.close()


def test_each_rank_holds_its_share_of_weights_and_cache(tmp_path):
    folder = tiny_models.make(tmp_path, "llama")
    whole = Driver(folder).runner
    halves = [Driver(folder, parallel=_AloneOf(rank, 2)).runner for rank in range(2)]
    for half in halves:
        assert half.layout.blocks[0].payload_bytes * 2 == whole.layout.blocks[0].payload_bytes
        assert half.details.parameter_bytes * 2 == whole.details.parameter_bytes


@pytest.mark.parametrize(("tp_size", "changes"), [(4, {}), (3, {}), (12, {}), (2, {"intermediate_size": 105})])
def test_a_split_the_model_does_not_allow_names_those_it_does(tmp_path, tp_size, changes):
    """6 heads, 2 KV heads, 104 inner columns: 2 divides all of them; 3 is no multiple of the KV heads; 6 not of 104."""
    folder = tiny_models.make(tmp_path, "llama", **changes)
    allowed = "1, 3" if "intermediate_size" in changes else "1, 2"
    allowed = "1" if changes else allowed
    with pytest.raises(ConfigError, match=rf"tp_size={tp_size} .*one of {allowed} for this model \(6 heads, 2 KV"):
        Driver(folder, parallel=_AloneOf(0, tp_size))


def test_transformers_own_code_is_not_split(tmp_path):
    folder = tiny_models.make(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"tp_size=2 .*--model_impl=hf"):
        Driver(folder, model_impl="hf", parallel=_AloneOf(0, 2))


def test_shares_cover_everything_once():
    for size in (1, 2, 4):
        ranks = [TensorParallel(rank, size) for rank in range(size)]
        for total in (8, 104):
            assert [i for rank in ranks for i in range(total)[rank.part(total)]] == list(range(total))
        for vocab in (321, 320, 7, 2):
            assert [i for rank in ranks for i in range(vocab)[rank.vocab_part(vocab)]] == list(range(vocab))
    heads = [TensorParallel(rank, 4).head_part(2, 10) for rank in range(4)]
    assert heads == [slice(0, 10), slice(0, 10), slice(10, 20), slice(10, 20)]


class _AloneOf(TensorParallel):
    """One rank whose peers are not there: it loads its share, and its sums are its own summands."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def agree(self, value: int, **_options: object) -> int:
        return value
