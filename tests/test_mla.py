"""Multi-head Latent Attention: what transformers computes, from one cached row a token, the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from ranks import RankedDriver
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table
from transformers import AutoConfig, AutoModelForCausalLM

from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.models.families import LatentSpec, decoder_spec
from xllm_hier.models.linear import DECODE_TILE_COST, PREFILL_TILE_COST, TileSizes, choose_tiles
from xllm_hier.models.mla import HeadLinear, LatentSelfAttention, load_latent_attention
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.models.parts import Loader, rms_norm
from xllm_hier.models.rope import RopeTable
from xllm_hier.models.weights import Checkpoint
from xllm_hier.worker.compute.attention import SMALL_TILE, Span, find_query_tiles
from xllm_hier.worker.compute.latent_attention import LatentAttention
from xllm_hier.worker.compute.model_runner import ModelRunner
from xllm_hier.worker.platform import Platform

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
MODELS = {
    "v2": ("deepseek_v2", {"v_head_dim": 16}),
    "v2, queries from a latent": ("deepseek_v2", {"q_lora_rank": 36}),
    "v2, stretched": ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v3": ("deepseek_v3", {"v_head_dim": 16}),
    "v3, queries from the hidden rows": ("deepseek_v3", {"q_lora_rank": None}),
    "v3, halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3, stretched": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3, two factors": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6}}),
    "v3, one factor": ("deepseek_v3", {"rope_parameters": YARN}),
}


def reference(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits at every position, from one plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor(token_ids)[None]).logits[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_in_whole_prompts_chunks_and_decode(tmp_path, name):
    family, changes = MODELS[name]
    driver = Driver(tiny_models.make(tmp_path, family, **changes), model_impl="own")
    tokens = random_prompt(150, seed=1)
    theirs = reference(tmp_path, tokens)
    table, other = random_table(20)[:10], random_table(20)[10:]
    driver.step([prompt_part(tokens, table)])
    assert error(driver.logits[0], theirs[149]) < 1e-5
    driver.step([prompt_part(tokens[:147], other, 0, 70)])
    driver.step([prompt_part(tokens[:147], other, 70)])
    assert error(driver.logits[0], theirs[146]) < 1e-5
    for position in (147, 148, 149):
        driver.step([], [generated(tokens[: position + 1], other, position)])
        assert error(driver.logits[0], theirs[position]) < 1e-5


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_bfloat16_stays_near_float32(tmp_path, family):
    driver = Driver(tiny_models.make(tmp_path, family, torch.bfloat16))
    prompt = random_prompt(100)
    driver.step([prompt_part(prompt, random_table(7))])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(torch.tensor(prompt)[None]).logits[0, -1]
    assert error(driver.logits[0], theirs) < 0.05


def test_a_published_configuration_is_read_as_it_was_meant(tmp_path):
    """DeepSeek-V2-Lite's, which writes the stretched rope the old way and names remote code."""
    published = {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "vocab_size": 102400,
        "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "seq_aux": True,
        "attention_bias": False, "max_position_embeddings": 163840, "rope_theta": 10000, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = AutoConfig.from_pretrained(tmp_path)
    spec = decoder_spec(config)
    assert spec.latent == LatentSpec(None, 512, 128, 64, 128, rope_pairs=True)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.value_heads, spec.rope_dim) == (16, 1, 576, 0, 64)
    assert spec.scale == pytest.approx(0.114721, abs=1e-6)  # 192^-0.5 (1 + 0.0707 ln 40)^2
    table = RopeTable(config, None, 64, max_len=8192, dtype=torch.float32, device=torch.device("cpu"))
    # The fastest pair turns as ever, the slowest forty times slower, and neither grows.
    assert table.cos[1, 0] == pytest.approx(math.cos(1.0), abs=1e-6)
    assert table.sin[8191, 31] == pytest.approx(math.sin(8191 * 10000.0 ** (-62 / 64) / 40), abs=1e-5)


# ------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("heads", [2, 6, 18])
def test_a_token_takes_one_row_a_layer_however_many_heads(tmp_path, heads):
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    driver = Driver(tiny_models.make(tmp_path, "deepseek_v3", torch.bfloat16, **changes), block_size=16)
    (layout,) = driver.runner.layout.blocks
    assert [tensor.role for tensor in layout.tensors] == ["latent"]
    assert layout.payload_bytes == 16 * (28 + 8) * 2 * 2  # tokens, columns, layers, bytes
    assert layout.replicated


def test_families_with_heads_in_the_cache_are_not_replicated(tmp_path):
    (layout,) = Driver(tiny_models.make(tmp_path, "llama")).runner.layout.blocks
    assert [tensor.role for tensor in layout.tensors] == ["key", "value"]
    assert not layout.replicated


def paged_latents(tokens: int, block_size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Random latents [tokens, width], a NaN cache with room for them, and their scattered blocks."""
    count = -(-tokens // block_size)
    table = np.array(random_table(count, pool=range(2 * count)), dtype=np.int32)
    cache = torch.full((2 * count, 1, block_size, width), float("nan"))
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)), cache, table


def test_values_are_the_first_columns_of_the_keys_and_unused_slots_never_show():
    heads, rank, width, tokens = 4, 28, 36, 100
    latents, cache, table = paged_latents(tokens, 16, width)
    attention = LatentAttention(
        heads=heads, kv_heads=1, head_dim=width, dtype=torch.float32, device=torch.device("cpu"), block_size=16,
        windows=(None,), tiles=(SMALL_TILE,)
    )  # fmt: skip
    attention.bind([cache])
    q = torch.randn(tokens, heads, width)
    none = q.new_empty(tokens, 0, width)
    attention.prepare([Span(0, 90, 0, table, 0, 0)], [Span(90, 100, 90, table, 90, 90)], tokens)
    output = attention(0, q, latents[:, None], none, 0.2).view(tokens, heads, width)[..., :rank]
    scores = torch.einsum("qhw,kw->hqk", q.double(), latents.double()) * 0.2
    scores.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    expected = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latents[:, :rank].double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    written = cache[table.tolist()].view(-1, width)
    assert torch.equal(written[:tokens], latents)
    assert written[tokens:].isnan().all()


def test_tiles_are_tried_with_latents():
    tiles = find_query_tiles(
        LatentAttention, heads=4, kv_heads=1, head_dim=72, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert tiles[0] == SMALL_TILE


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_latents_are_gathered_on_every_device_and_equal_bits_are_claimed_where_they_were_found(name):
    platform = Platform(name, torch.device("cpu"))
    attention = platform.latent_attention(heads=4, width=36, dtype=torch.float32, block_size=16, windows=(None,))
    assert attention.kernel == "latent gather"
    assert attention.batch_invariant == (name == "cpu")


# ------------------------------------------------------------------------------------------- per-head products


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


# heads, in, out: a tiny model's, one head alone, and the two of DeepSeek-V2-Lite
HEAD_SHAPES = [(6, 12, 28), (1, 28, 20), (16, 128, 512), (16, 512, 128)]


@pytest.mark.parametrize("shape", HEAD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_is_multiplied_by_its_own_matrix(shape, dtype):
    heads, inputs, outputs = shape
    torch.manual_seed(0)
    weight = (torch.randn(heads, outputs, inputs) * inputs**-0.5).to(dtype)
    # Columns behind a head's inputs belong to something else.
    x = torch.randn(64, heads, inputs + 4).to(dtype)[..., :inputs]
    y = HeadLinear(weight)(x, TileSizes((32,)))
    expected = torch.einsum("rhi,hoi->rho", x.double(), weight.double())
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", HEAD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_products_do_not_depend_on_place_neighbours_or_their_number(shape, dtype, num_threads):
    heads, inputs, outputs = shape
    torch.manual_seed(0)
    linear = HeadLinear((torch.randn(heads, outputs, inputs) * inputs**-0.5).to(dtype))
    with threads(num_threads):
        choose_tiles([linear], PREFILL_TILE_COST, DECODE_TILE_COST)
        for tiles in (linear.prefill, linear.decode):
            assert tiles is not None
            x = torch.randn(2 * tiles.sizes[-1] + tiles.unit, heads, inputs).to(dtype)
            whole = linear(x, tiles)
            order = torch.randperm(len(x))
            assert torch.equal(linear(x[order], tiles), whole[order])
            for start, count in ((0, 1), (5, 3), (tiles.unit, tiles.unit)):
                rows = x.new_zeros(tiles.unit, heads, inputs)
                rows[:count] = x[start : start + count]
                assert torch.equal(linear(rows, tiles)[:count], whole[start : start + count])


def test_equal_sizes_do_not_make_a_product_per_head_a_plain_one():
    """Tiles are found once for linears with equal keys."""
    one, two = HeadLinear(torch.zeros(1, 8, 12)), HeadLinear(torch.zeros(2, 4, 6))
    assert (one.in_features, one.out_features) == (two.in_features, two.out_features)
    assert one.shape_key != two.shape_key


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_latent_does_not_depend_on_the_number_of_rows(dtype, num_threads):
    torch.manual_seed(0)
    down, weight = torch.randn(256, 1, 576).to(dtype), torch.randn(512)
    with threads(num_threads):
        whole = rms_norm(down[..., :512], weight, 1e-6)
        for rows in (1, 3, 8, 40):
            assert torch.equal(rms_norm(down[7 : 7 + rows, :, :512], weight, 1e-6), whole[7 : 7 + rows])


# ------------------------------------------------------------------------------------------- tensor parallel


class Apart(TensorParallel):
    """One of several ranks in one process; the test adds up what each of them has."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


def load_part(folder: Path, rank: int = 0, size: int = 1) -> LatentSelfAttention:
    spec = decoder_spec(AutoConfig.from_pretrained(folder))
    assert spec.latent is not None
    with Checkpoint(folder) as checkpoint:
        loader = Loader(spec, checkpoint, torch.float32, torch.device("cpu"), Apart(rank, size))
        return load_latent_attention(loader, "model.layers.1.", spec.latent)


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_ranks_split_the_heads_and_share_every_bit_of_the_cache(tmp_path, family, size):
    folder = tiny_models.make(tmp_path, family, v_head_dim=16)
    config = AutoConfig.from_pretrained(folder)
    table = RopeTable(config, None, 8, max_len=64, dtype=torch.float32, device=torch.device("cpu"))
    cos, sin = table.at(torch.arange(32))
    x, residual, attended = torch.randn(32, 72), torch.randn(32, 72), torch.randn(32, 6, 36)

    def run(part: LatentSelfAttention, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        target = torch.full((32, part.heads + 1, 36), float("nan"))
        part.project(x, True, cos, sin, target)
        return target, part.output(attended[:, heads].flatten(1), True, residual)

    whole, output = run(load_part(folder), slice(0, 6))
    parts = [run(load_part(folder, rank, size), Apart(rank, size).part(6)) for rank in range(size)]
    for target, _ in parts:
        assert torch.equal(target[:, -1], whole[:, -1])
    assert error(torch.cat([target[:, :-1] for target, _ in parts], dim=1), whole[:, :-1]) < 1e-5
    assert error(torch.stack([summand for _, summand in parts]).sum(0), output) < 1e-5


def test_two_ranks_give_the_logits_of_one_and_equal_caches(tmp_path):
    folder = tiny_models.make(tmp_path, "deepseek_v3")
    prompt, table = random_prompt(90), random_table(6)
    alone = Driver(folder)
    alone.step([prompt_part(prompt, table)])
    ranks = RankedDriver(folder, 2)
    try:
        ranks.step([prompt_part(prompt, table)])
        assert error(ranks.logits, alone.logits) < 1e-5
        first, second = ranks.blocks(table, 90).chunk(2)
        assert not first.isnan().any()
        assert torch.equal(first, second)
        ranks.step([], [generated([*prompt, 7], table, 90)])
        alone.step([], [generated([*prompt, 7], table, 90)])
        assert error(ranks.logits, alone.logits) < 1e-5
    finally:
        ranks.close()


def test_only_the_heads_and_the_mlp_must_divide_by_the_ranks(tmp_path):
    spec = decoder_spec(AutoConfig.from_pretrained(tiny_models.make(tmp_path, "deepseek_v3")))
    spec.check_tp_size(2)
    with pytest.raises(ConfigError, match="6 heads") as caught:
        spec.check_tp_size(4)
    assert caught.value.name == "tp_size"


# ------------------------------------------------------------------------------------------- what is refused


def test_biases_are_refused(tmp_path):
    folder = tiny_models.make(tmp_path, "deepseek_v3", attention_bias=True)
    with pytest.raises(ConfigError, match="latent attention with biases") as caught:
        ModelRunner(EngineConfig(model=str(folder), model_impl="own"), progress=False)
    assert caught.value.name == "model_impl"
