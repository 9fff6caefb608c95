"""Experts: who is chosen and with what weight, and that a row's bits are its own whoever else was sent where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_models import close, reference
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from xllm_hier.errors import ConfigError
from xllm_hier.models.expert_routing import GroupScore, MoeSpec, Scoring, choose_experts, moe_spec
from xllm_hier.models.experts import Expert, MoeMlp, load_experts, sort_to_experts
from xllm_hier.models.families import decoder_spec
from xllm_hier.models.linear import DECODE_TILE_COST, PREFILL_TILE_COST, Fused, Linear, choose_tiles
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.models.parts import Loader
from xllm_hier.models.weights import Checkpoint

# Layer 1 of each has experts. Sizes are not multiples of 16: vector tails must not show.
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v2, groups": (
        "deepseek_v2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
    "deepseek_v3, one group": ("deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
}


@dataclass
class Layer:
    """transformers' module of a layer with experts, and ours from the checkpoint that transformers wrote."""

    folder: Path
    theirs: Any

    @property
    def spec(self) -> MoeSpec:
        spec = moe_spec(AutoConfig.from_pretrained(self.folder), 1)
        assert spec is not None
        return spec

    def ours(self, parallel: TensorParallel | None = None, dtype: torch.dtype = torch.float32) -> MoeMlp:
        spec = decoder_spec(AutoConfig.from_pretrained(self.folder))
        with Checkpoint(self.folder) as checkpoint:
            loader = Loader(spec, checkpoint, dtype, torch.device("cpu"), parallel or TensorParallel())
            return load_experts(loader, "model.layers.1.", self.spec)


@pytest.fixture(scope="module", params=LAYERS)
def layer(request, tmp_path_factory) -> Layer:
    family, changes = LAYERS[request.param]
    folder = tiny_models.make(tmp_path_factory.mktemp("layer"), family, **changes)
    if family == "deepseek_v3":  # transformers makes the bias that only takes part in the choice 0
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        tensors[name] = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 0.2
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Layer(folder, AutoModelForCausalLM.from_pretrained(folder).eval().model.layers[1].mlp)


def rows_of(count: int, width: int = 72, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------- against transformers


@torch.inference_mode()
def test_the_router_chooses_and_weighs_as_transformers_does(layer):
    x = rows_of(200)
    _, their_weights, their_choice = layer.theirs.gate(x)
    gate = layer.theirs.gate
    choice, weights = choose_experts(
        F.linear(x, gate.weight), layer.spec, getattr(gate, "e_score_correction_bias", None)
    )
    spread = torch.zeros(200, layer.spec.num_experts)
    ours, theirs = (spread.scatter(1, ids, w) for ids, w in ((choice, weights), (their_choice, their_weights)))
    assert torch.equal(ours != 0, theirs != 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_the_whole_layer_agrees_with_transformers(layer):
    x, residual = rows_of(200), rows_of(200, seed=1)
    theirs = layer.theirs(x[None])[0]
    for prefill in (True, False):
        assert (layer.ours()(x, prefill, None) - theirs).abs().max() <= 1e-5
        assert (layer.ours()(x, prefill, residual) - theirs - residual).abs().max() <= 1e-5


@torch.inference_mode()
def test_bfloat16_stays_near_transformers(layer):
    """Of most rows: where two experts are all but equal, the lower precision may choose the other one."""
    x = rows_of(200).bfloat16()
    exact = layer.theirs(x[None].float())[0]
    error = (layer.ours(dtype=torch.bfloat16)(x, True, None).float() - exact).abs().amax(dim=1)
    assert error.quantile(0.9) < 0.03 * exact.abs().max()


class Rank(TensorParallel):
    """A rank that keeps its summand; the test adds them up."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("size", [2, 4])
@torch.inference_mode()
def test_the_ranks_summands_add_up_to_the_whole(layer, size):
    x, residual = rows_of(50), rows_of(50, seed=1)
    whole = layer.ours()(x, True, residual)
    parts = [layer.ours(Rank(rank, size))(x, True, residual) for rank in range(size)]
    assert (sum(parts) - whole).abs().max() <= 1e-5


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24, "mlp_only_layers": []}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    ("qwen3_moe", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("deepseek_v2", DEEPSEEK),
    ("deepseek_v3", DEEPSEEK | {"n_group": 4, "topk_group": 2}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_models_with_experts_agree_with_transformers(tmp_path, family, changes):
    driver = Driver(tiny_models.make(tmp_path, family, **changes), model_impl="own")
    prompt = random_prompt(101)
    table = random_table(7)
    driver.step([prompt_part(prompt[:100], table)])
    assert close(driver.logits[0], reference(tmp_path, prompt)[-2])
    driver.step([], [generated(prompt, table, 100)])
    assert close(driver.logits[0], reference(tmp_path, prompt)[-1])


# ------------------------------------------------------------------------------------------- bits


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random_moe(hidden: int, ffn: int, dtype: torch.dtype, spec: MoeSpec) -> MoeMlp:
    """Random weights, and tiles as the model's loader chooses them."""
    generator = torch.Generator().manual_seed(hidden)

    def linear(outputs: int, inputs: int, fused: Fused = Fused.NONE, kind: torch.dtype = dtype) -> Linear:
        return Linear((torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(kind), None, fused)

    def expert(width: int) -> Expert:
        return Expert(linear(width, hidden, Fused.SILU), linear(width, hidden, Fused.MUL), linear(hidden, width))

    moe = MoeMlp(
        spec=replace(spec, ffn=ffn),
        parallel=TensorParallel(),
        router=linear(spec.num_experts, hidden, kind=torch.float32 if spec.fp32_router else dtype),
        correction=torch.randn(spec.num_experts, generator=generator) * 0.1 if spec.correction else None,
        experts=[expert(ffn) for _ in range(spec.num_experts)],
        shared=expert(spec.shared_ffn) if spec.shared_ffn else None,
    )
    choose_tiles([*moe.linears(), *moe.grouped()], PREFILL_TILE_COST, DECODE_TILE_COST)
    return moe


def run(moe: MoeMlp, x: torch.Tensor, prefill: bool, *, garbage: int = 0, count_rows: bool = False) -> torch.Tensor:
    """What comes out for the rows `x`, padded with other rows; each row is its own residual."""
    unit = max(tiles.unit for i in moe.linears() if (tiles := i.prefill if prefill else i.decode))
    padding = rows_of(-len(x) % unit, x.shape[1], seed=100 + garbage).to(x.dtype)
    padded = torch.cat([x, padding])
    return moe(padded, prefill, padded, len(x) if count_rows else None)[: len(x)]


SOFTMAX = MoeSpec(num_experts=10, top_k=3, ffn=0, renormalise=True)
SIGMOID = MoeSpec(
    num_experts=12,
    top_k=4,
    ffn=0,
    shared_ffn=56,
    scoring=Scoring.SIGMOID,
    renormalise=True,
    factor=2.5,
    groups=4,
    top_groups=2,
    group_score=GroupScore.BEST_TWO,
    correction=True,
    fp32_router=True,
)


@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "generated"])
@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "ffn"), [(72, 40), (1024, 384)])
@pytest.mark.usefixtures("threads")
@torch.inference_mode()
def test_company_does_not_change_a_rows_bits(hidden, ffn, dtype, spec, prefill):
    moe = random_moe(hidden, ffn, dtype, spec)
    x = rows_of(257, hidden).to(dtype)
    whole = run(moe, x, prefill)
    for rows in ([0], [256], [7, 3, 200], [*range(100, 140)], [*range(256, -1, -1)]):
        for count_rows in (True, False):
            assert torch.equal(run(moe, x[rows], prefill, garbage=len(rows), count_rows=count_rows), whole[rows])


@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [8, 12, 36, 128, 256])
@pytest.mark.usefixtures("threads")
def test_the_choice_reads_one_row_at_a_time(spec, num_experts):
    spec = replace(spec, num_experts=num_experts)
    bias = rows_of(1, num_experts, seed=1)[0] * 0.1 if spec.correction else None
    logits = rows_of(1024, num_experts) * 3
    choice, weights = choose_experts(logits, spec, bias)
    alone = [[row] for row in range(100)]  # many, as few elements round otherwise in the tail of a vector loop
    for rows in (*alone, [1, 2, 3], [*range(8)], [*range(300, 340)], [*range(255, -1, -1)], [*range(1, 1024)]):
        some_choice, some_weights = choose_experts(logits[rows], spec, bias)
        assert torch.equal(some_choice, choice[rows])
        assert torch.equal(some_weights, weights[rows])


def test_of_equal_scores_the_lower_expert_is_taken():
    for count in (1, 3, 64, 1000):
        logits = torch.zeros(count, 12)
        logits[:, [2, 5, 11]] = 1.0
        choice, weights = choose_experts(logits, replace(SOFTMAX, num_experts=12, top_k=5), None)
        assert torch.equal(choice, torch.tensor([2, 5, 11, 0, 1]).expand(count, 5))
        assert torch.equal(weights[:, 0], weights[:, 2])
        groups = replace(SIGMOID, top_k=3)  # of four equal groups the first two
        assert torch.equal(
            choose_experts(torch.zeros(count, 12), groups, torch.zeros(12))[0], torch.arange(3).expand(count, 3)
        )


# ------------------------------------------------------------------------------------------- rows and experts


def test_rows_are_sorted_to_their_experts_and_padded_to_the_unit():
    rows, place, sizes = sort_to_experts(torch.tensor([[2, 0], [2, 1], [0, 2]]), 4, 4)
    assert sizes == [4, 4, 4, 0]
    assert rows.tolist() == [0, 2, 0, 0, 1, 0, 0, 0, 0, 1, 2, 0]
    assert place.tolist() == [[8, 0], [9, 4], [1, 10]]
    assert sort_to_experts(torch.tensor([[1], [1], [1]]), 2, 1)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_all_rows_may_go_to_the_same_experts(dtype):
    """The bias sends every row to experts 3 and 1; the other two see none."""
    moe = random_moe(72, 40, dtype, replace(SIGMOID, num_experts=4, top_k=2, groups=1, top_groups=1, shared_ffn=0))
    moe.correction = torch.tensor([0.0, 9.0, 0.0, 99.0])
    x = rows_of(256).to(dtype)
    scores = moe.router(x.float(), moe.router.prefill).sigmoid()[:, [3, 1]]
    weights = 2.5 * scores / scores.sum(dim=1, keepdim=True)
    summands = [moe.experts[number](x, True).float() * weights[:, i : i + 1] for i, number in enumerate((3, 1))]
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(moe(x, True, None).float(), sum(summands), **tolerance)


class Counted(Expert):
    """Remembers how many rows it was given."""

    def __call__(self, x: torch.Tensor, prefill: bool) -> torch.Tensor:
        self.num_rows = len(x)
        return super().__call__(x, prefill)


@torch.inference_mode()
def test_padding_rows_reach_no_expert_and_come_back_as_zeros():
    moe = random_moe(72, 40, torch.bfloat16, SOFTMAX)
    moe.experts = counted = [Counted(*expert.linears()) for expert in moe.experts]
    x = rows_of(8).bfloat16()
    y = moe(x, False, x, 1)
    assert [expert.num_rows for expert in counted if hasattr(expert, "num_rows")] == [8, 8, 8]
    assert not y[1:].any()
    assert torch.equal(y[:1], moe(x, False, x)[:1])


# ------------------------------------------------------------------------------------------- what a folder says


def test_the_configuration_says_which_layers_have_experts():
    def layers(**changes: Any) -> list[int]:
        config = Qwen3MoeConfig(num_hidden_layers=6, **changes)
        return [layer for layer in range(6) if moe_spec(config, layer)]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(mlp_only_layers=[0, 3]) == [1, 2, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(num_experts=0) == []
    assert moe_spec(MixtralConfig(), 0) == MoeSpec(8, 2, 14336, renormalise=True)
    assert moe_spec(AutoConfig.for_model("llama"), 0) is None
    third = AutoConfig.for_model("deepseek_v3")
    assert [layer for layer in range(6) if moe_spec(third, layer)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"n_group": 7}, "256 experts in 7 groups"),
        ("deepseek_v3", {"n_group": 128, "topk_group": 3}, "8 experts a token out of 3 groups of 2"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts a token"),
    ],
)
def test_other_ways_to_choose_are_refused(family, changes, reason):
    config = AutoConfig.for_model(family, **{"num_experts_per_tok": 8} | changes)
    with pytest.raises(ConfigError, match=reason) as caught:
        moe_spec(config, 5)
    assert caught.value.name == "model_impl"


def test_a_missing_expert_is_named(tmp_path):
    folder = tiny_models.make(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.4\.w2"):
        Driver(folder)


def test_an_inner_size_that_does_not_divide_by_the_ranks_is_refused():
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96}
    spec = decoder_spec(Qwen3MoeConfig(**sizes, moe_intermediate_size=44))
    spec.check_tp_size(4)
    with pytest.raises(ConfigError, match=r"one of 1, 2, 4 for this model"):
        spec.check_tp_size(8)
