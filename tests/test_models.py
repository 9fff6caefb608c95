"""Our decoder and the hooked transformers models against plain transformers, and what is refused at load."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table
from transformers import AutoModelForCausalLM

from xllm_hier.block import BlockType
from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.models.linear import Fused, Linear, TileSizes, cheapest_class, choose_tiles, equal_bit_classes
from xllm_hier.models.weights import Checkpoint
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.worker.compute.attention import query_tiles
from xllm_hier.worker.compute.model_runner import ModelRunner

FAMILIES = list(tiny_models.FAMILIES)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def reference(folder, token_ids) -> torch.Tensor:
    """transformers' logits at every position, from one plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.tensor(token_ids)[None]).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["own", "hf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_and_decode_agree_with_transformers(tmp_path, family, implementation):
    """Two sequences: one is prefilled in three chunks while the other already generates; both outgrow the window."""
    driver = Driver(tiny_models.make(tmp_path, family), model_impl=implementation)
    assert driver.runner.details.implementation == implementation
    long, short = random_prompt(150, seed=1), random_prompt(45, seed=2)
    places = random_table(20)
    long_table, short_table = places[:12], places[12:]
    driver.step([prompt_part(long, long_table, 0, 70), prompt_part(short[:40], short_table)])
    assert close(driver.logits[0], reference(tmp_path, short)[39])
    driver.step([prompt_part(long, long_table, 70, 71)], [generated(short[:41], short_table, 40)])
    assert close(driver.logits[0], reference(tmp_path, short)[40])
    driver.step([prompt_part(long[:147], long_table, 71)], [generated(short, short_table, 41)])
    assert close(driver.logits[0], reference(tmp_path, long)[146])
    assert close(driver.logits[1], reference(tmp_path, short)[44])
    driver.step([], [generated(long, long_table, 147)])
    assert close(driver.logits[0], reference(tmp_path, long)[149])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": YARN_ROPE}),
        ("llama", {"rope_parameters": LINEAR_ROPE}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ],
)
def test_variants_of_a_family_agree_with_transformers(tmp_path, family, changes):
    driver = Driver(tiny_models.make(tmp_path, family, **changes), model_impl="own")
    prompt = random_prompt(100)
    table = random_table(7)
    driver.step([prompt_part(prompt, table)])
    assert close(driver.logits[0], reference(tmp_path, prompt)[-1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_stays_near_transformers(tmp_path, family):
    driver = Driver(tiny_models.make(tmp_path, family, torch.bfloat16))
    prompt = random_prompt(100)
    driver.step([prompt_part(prompt, random_table(7))])
    theirs = reference(tmp_path, prompt)[-1].float()
    assert driver.runner.details.dtype == "bfloat16"
    assert (driver.logits[0] - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("implementation", ["own", "hf"])
def test_prompt_logprobs_are_those_of_the_tokens_that_follow(tmp_path, implementation):
    driver = Driver(tiny_models.make(tmp_path, "qwen3"), model_impl=implementation)
    prompt = random_prompt(90)
    table = random_table(6)
    first = driver.step([prompt_part(prompt, table, 0, 50, prompt_logprobs=2, next_token=prompt[50])])
    second = driver.step([prompt_part(prompt, table, 50, prompt_logprobs=2)])
    found = first.prompt_logprobs[0] + second.prompt_logprobs[0]
    expected = reference(tmp_path, prompt).log_softmax(dim=-1)
    assert [entry.token_id for entry in found] == prompt[1:]
    for position, entry in enumerate(found):
        assert abs(entry.logprob - float(expected[position, entry.token_id])) < 1e-4
        assert entry.top_ids == expected[position].topk(2).indices.tolist()
        assert entry.rank == 1 + int((expected[position] > expected[position, entry.token_id]).sum())


def test_outputs_come_in_plan_order_and_only_for_those_who_asked(tmp_path):
    driver = Driver(tiny_models.make(tmp_path, "llama"))
    prompts = [random_prompt(20, seed=seed) for seed in range(3)]
    tables = [random_table(6)[2 * i : 2 * i + 2] for i in range(3)]
    alone = []
    for prompt, table in zip(prompts, tables, strict=True):
        alone += driver.step([prompt_part(prompt, table)]).token_ids
    spec = SamplingSpec(num_logprobs=0)
    together = driver.step(
        [prompt_part(prompts[0], tables[0], sampling=None), prompt_part(prompts[1], tables[1], sampling=spec)],
        [generated([*prompts[2], alone[2]], tables[2], 20, sampling=None)],
    )
    assert together.token_ids == [alone[1]]
    assert [entry.token_id for entry in together.logprobs] == [alone[1]]


def test_every_layer_is_waited_for_in_order_before_it_touches_the_cache(tmp_path):
    driver = Driver(tiny_models.make(tmp_path, "llama", num_hidden_layers=3))
    untouched = []

    def wait(layer: int) -> None:
        untouched.append((layer, bool(driver.caches[layer].isnan().all())))

    driver.step([prompt_part(random_prompt(20), [5, 6])], wait_for_layer=wait)
    assert untouched == [(0, True), (1, True), (2, True)]
    driver.step([], [], wait_for_layer=wait)  # a step without sequences still waits for the loads before it
    assert untouched[3:] == [(0, False), (1, False), (2, False)]


# ------------------------------------------------------------------------------------------- what a folder says


def test_layout_and_limits_come_from_the_model(tmp_path):
    runner = ModelRunner(EngineConfig(model=str(tiny_models.make(tmp_path, "gemma3"))), progress=False)
    full, sliding = runner.layout.blocks
    assert (full.block_type, full.layers, full.span) == (BlockType.KV, (1,), 0)
    assert (sliding.block_type, sliding.layers, sliding.span) == (BlockType.SWA, (0,), tiny_models.WINDOW)
    for layout in (full, sliding):
        assert layout.block_size == 32
        assert [(tensor.role, tensor.dtype, tensor.shape) for tensor in layout.tensors] == [
            ("key", "float32", (32, 2, 20)),
            ("value", "float32", (32, 2, 20)),
        ]
    assert (runner.facts.max_model_len, runner.facts.vocab_size) == (2048, tiny_models.VOCAB)


@pytest.mark.parametrize(
    ("family", "settings", "layers"),
    [
        ("gemma3", {"cache_layout": "flat"}, {"KV": (0, 1)}),
        ("gemma3", {"max_model_len": tiny_models.WINDOW}, {"KV": (0, 1)}),  # no sequence outgrows the window
        ("gemma3", {"model_impl": "hf"}, {"KV": (0, 1)}),
        ("mistral", {}, {"SWA": (0, 1)}),
        ("mistral", {"num_speculative_tokens": 2}, {"KV": (0, 1)}),  # a draft's blocks have the numbers of KV blocks
        ("mistral", {"num_speculative_tokens": 2, "speculative_algorithm": "ngram"}, {"SWA": (0, 1)}),
        ("qwen3_next", {}, {"KV": (1, 3), "LINEAR": (0, 2)}),
    ],
)
def test_layers_are_sorted_into_block_types(tmp_path, family, settings, layers):
    runner = ModelRunner(EngineConfig(model=str(tiny_models.make(tmp_path, family)), **settings), progress=False)
    assert {block.block_type.value: block.layers for block in runner.layout.blocks} == layers


def test_generation_config_names_the_end_tokens_before_config(tmp_path):
    folder = tiny_models.make(tmp_path, "llama", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert ModelRunner(EngineConfig(model=str(folder)), progress=False).facts.eos_token_ids == [5, 7]
    (folder / "generation_config.json").unlink()
    assert ModelRunner(EngineConfig(model=str(folder)), progress=False).facts.eos_token_ids == [2]


def test_sharded_checkpoint_equals_single_file(tmp_path):
    folder = tiny_models.make(tmp_path, "llama")
    prompt = random_prompt(30)
    single = Driver(folder)
    single.step([prompt_part(prompt, [1, 2])])
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part{shard}.safetensors")
    index = {"weight_map": {name: f"part{i % 2}.safetensors" for i, name in enumerate(names)}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = Driver(folder)
    sharded.step([prompt_part(prompt, [1, 2])])
    assert torch.equal(single.logits, sharded.logits)
    (folder / "part1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names part1\.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("wrong", ["missing", "misshapen"])
def test_a_wrong_tensor_is_named(tmp_path, wrong):
    folder = tiny_models.make(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = tensors.pop(name)
    if wrong == "misshapen":
        tensors[name] = tensor[:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=name) as caught:
        ModelRunner(EngineConfig(model=str(folder)), progress=False)
    assert caught.value.name == "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_quantized_checkpoint_is_refused(tmp_path):
    folder = tiny_models.make(tmp_path, "llama")
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantization_config"):
        ModelRunner(EngineConfig(model=str(folder)), progress=False)


def test_frequencies_that_move_with_length_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tiny_models.make(tmp_path, "llama", rope_parameters=rope)
    for implementation in ("own", "hf", "auto"):
        with pytest.raises(ConfigError, match="dynamic"):
            ModelRunner(EngineConfig(model=str(folder), model_impl=implementation), progress=False)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    folder = tiny_models.make(tmp_path, "gemma3")
    edit_config(folder, use_bidirectional_attention=True)
    for implementation in ("own", "hf", "auto"):
        with pytest.raises(ConfigError, match="use_bidirectional_attention"):
            ModelRunner(EngineConfig(model=str(folder), model_impl=implementation), progress=False)


@pytest.mark.parametrize("name", ["max_tokens_per_chunk_for_prefill", "max_tokens_per_batch"])
def test_a_step_that_no_cell_of_the_scan_fits_into_is_refused(tmp_path, name):
    folder = tiny_models.make(tmp_path, "qwen3_next")
    with pytest.raises(ConfigError, match=f"{name}=15.*at least 16, as recurrent layers"):
        ModelRunner(EngineConfig(model=str(folder), block_size=48, **{name: 15}), progress=False)
    ModelRunner(EngineConfig(model=str(folder), block_size=48, **{name: 16}), progress=False)


def test_an_unknown_family_falls_back_and_own_refuses_it(tmp_path):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    Olmo2ForCausalLM(Olmo2Config(**tiny_models.SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="olmo2") as caught:
        Driver(tmp_path, model_impl="own")
    assert caught.value.name == "model_impl"
    driver = Driver(tmp_path)
    assert driver.runner.details.implementation == "hf"
    assert driver.runner.details.batch_invariant is False
    prompt = random_prompt(40)
    driver.step([prompt_part(prompt, [3, 1, 2])])
    assert close(driver.logits[0], reference(tmp_path, prompt)[-1])


def test_a_family_without_the_hook_is_refused_by_name(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BloomForCausalLM") as caught:
        ModelRunner(EngineConfig(model=str(tmp_path), max_model_len=64), progress=False)
    assert caught.value.name == "model_impl"


def test_max_model_len_beyond_the_model_is_refused(tmp_path):
    folder = tiny_models.make(tmp_path, "llama")
    with pytest.raises(ConfigError, match="at most 2048"):
        ModelRunner(EngineConfig(model=str(folder), max_model_len=4096), progress=False)


# ------------------------------------------------------------------------------------------- tiles


def test_rows_are_cut_into_the_largest_tiles_first():
    assert TileSizes((64, 256)).pieces(384) == [(0, 256), (256, 320), (320, 384)]
    assert TileSizes((48,)).pieces(96) == [(0, 48), (48, 96)]
    with pytest.raises(ValueError, match="100 rows"):
        TileSizes((48,)).pieces(100)


def test_the_class_with_a_large_and_a_small_tile_is_preferred():
    cost = {32: 3.0, 64: 1.8, 128: 1.3, 256: 1.0}
    assert cheapest_class([(32,), (64, 128, 256)], cost).sizes == (64, 128, 256)
    assert cheapest_class([(32,), (64, 128), (256,)], cost).sizes == (64, 128)
    assert cheapest_class([(32,), (64,), (128, 256)], cost).sizes == (128, 256)


def test_sizes_with_different_bits_are_never_one_class():
    """A product that depends on the number of rows, as a kernel's does."""
    linear = Linear(torch.eye(8))
    linear._product = lambda x, other: x * (2.0 if len(x) > 40 else 1.0)
    assert equal_bit_classes(linear, (16, 32, 64, 128)) == [(16, 32), (64, 128)]
    choose_tiles([linear], {16: 4.0, 32: 2.0, 64: 1.0, 128: 1.0}, {8: 1.0})
    assert linear.prefill == TileSizes((64, 128))
    assert linear.decode == TileSizes((8,))


@pytest.mark.parametrize("fused", list(Fused))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_computes_what_its_name_says(fused, dtype):
    torch.manual_seed(0)
    weight, bias, x, other = (torch.randn(*shape).to(dtype) for shape in ((40, 24), (40,), (16, 24), (16, 40)))
    y = x.double() @ weight.double().T + bias.double()
    expected = {
        Fused.NONE: lambda: y,
        Fused.SILU: lambda: torch.nn.functional.silu(y),
        Fused.GELU: lambda: torch.nn.functional.gelu(y),
        Fused.SIGMOID: lambda: torch.sigmoid(y),
        Fused.GELU_TANH: lambda: torch.nn.functional.gelu(y, approximate="tanh"),
        Fused.ADD: lambda: y + other.double(),
        Fused.MUL: lambda: y * other.double(),
    }[fused]()
    linear = Linear(weight, bias, fused)
    given = other if fused in (Fused.ADD, Fused.MUL) else None
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(linear(x, TileSizes((8,)), given).double(), expected, **tolerance)


def test_query_tiles_lie_on_the_absolute_grid():
    assert query_tiles(0, 40, (64, 256)) == [(0, 64)]
    assert query_tiles(70, 130, (64, 256)) == [(64, 64), (128, 64)]
    assert query_tiles(192, 600, (64, 256)) == [(192, 64), (256, 256), (512, 64), (576, 64)]
    assert query_tiles(255, 257, (64,)) == [(192, 64), (256, 64)]
