"""Tiny random checkpoints in Hugging Face folders, one per family, and a driver that runs a model without an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.utils import logging as transformers_logging

from xllm_hier.config import EngineConfig
from xllm_hier.ints import ints
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.plans import Forward, SequenceRows
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.worker.compute.model_runner import ModelOutput, ModelRunner

VOCAB = 320
WINDOW = 24

# Sizes are not multiples of 64 on purpose: vector tails must not show in the results.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 12} | changes))


def mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE | {"head_dim": 12, "sliding_window": WINDOW} | changes))


def mixtral(**changes: Any) -> PreTrainedModel:
    more = {"head_dim": 12, "sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**SHAPE | more | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 20} | changes))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    """One dense layer, one with experts."""
    more = {"head_dim": 20, "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE | more | {"mlp_only_layers": [0], "norm_topk_prob": True} | changes)
    )


def gemma3(**changes: Any) -> PreTrainedModel:
    """One sliding layer and one full one, with rope bases of their own."""
    types = ["sliding_attention", "full_attention"]
    more = {"head_dim": 20, "sliding_window": WINDOW, "layer_types": types, "query_pre_attn_scalar": 24}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | more | changes))


# Values are as wide as keys, so that the hooked transformers model, which makes both, can be compared too. The first
# layer has a dense MLP, the second one experts.
LATENT_SHAPE = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}


def deepseek_v2(**changes: Any) -> PreTrainedModel:
    """As V2-Lite: queries are made from the hidden rows."""
    more = {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE | LATENT_SHAPE | more | changes))


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE | LATENT_SHAPE | {"q_lora_rank": 44} | changes))


def qwen3_next(**changes: Any) -> PreTrainedModel:
    """States, attention, states, attention; the second layer has a dense MLP. Half of a head's columns turn."""
    more = {
        "num_hidden_layers": 4,
        "head_dim": 20,
        "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE | more | changes))


# Families with a state beside keys and values.
HYBRIDS: dict[str, Callable[..., PreTrainedModel]] = {"qwen3_next": qwen3_next}

FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gemma3": gemma3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}


def make(folder: Path, family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of `family` into `folder`; weights are large enough for attention to matter."""
    torch.manual_seed(seed)
    model = (FAMILIES | HYBRIDS)[family](**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            less_one = family in ("gemma3", "qwen3_next") and not name.endswith("linear_attn.norm.weight")
            centre = 1.0 if parameter.ndim == 1 and not less_one and name.endswith("norm.weight") else 0.0
            if name.endswith("A_log"):
                centre = -4.0  # states outlast some hundred tokens
            parameter.copy_(torch.randn(parameter.shape) * wide + centre)
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder)
    return folder


def add_head(folder: Path, *, qwen_names: bool = False, seed: int = 1, alike: bool = False) -> Path:
    """Give a saved model a multi-token prediction head: one more layer like its last, and what joins both inputs.

    `alike`: it is the last layer, over the token's embedding with a little of the hidden state: of a target of one
    layer and normed embeddings it is often right.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    number = config["num_hidden_layers"]
    last, behind = f"model.layers.{number - 1}.", f"model.layers.{number}."
    layer = "mtp.layers.0." if qwen_names else behind
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if not qwen_names:
        names = tuple(behind + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    hidden = config["hidden_size"]
    shapes = {f"{layer}{name.removeprefix(last)}": tensor.shape for name, tensor in tensors.items() if last in name}
    shapes |= {f"{names[0]}.weight": torch.Size((hidden, 2 * hidden))}
    shapes |= {f"{name}.weight": torch.Size((hidden,)) for name in names[1:]}
    generator = torch.Generator().manual_seed(seed)
    dtype = next(iter(tensors.values())).dtype
    for name, shape in shapes.items():
        wide, centre = (0.3, 1.0) if len(shape) == 1 else (shape[-1] ** -0.5, 0.0)
        tensors[name] = (torch.randn(shape, generator=generator) * wide + centre).to(dtype)
    if alike:
        embedding = tensors["model.embed_tokens.weight"].float()
        normed = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
        tensors["model.embed_tokens.weight"] = normed.to(dtype)
        tensors |= {
            f"{layer}{name.removeprefix(last)}": t.clone() for name, t in tensors.items() if name.startswith(last)
        }
        tensors[f"{names[0]}.weight"] = torch.cat([torch.eye(hidden), 0.05 * torch.eye(hidden)], 1).to(dtype)
        tensors |= {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in names[1:3]}
        tensors[f"{names[3]}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    return folder


def first_layers(folder: Path, target: Path, count: int) -> Path:
    """A draft model of the first layers of a saved one."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:count]
    (target / "config.json").write_text(json.dumps(config))
    return target


def blurred(folder: Path, target: Path, noise: float) -> Path:
    """A draft model that is right now and then: a saved one with noise of that share in its weights."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: tensor + (torch.randn(tensor.shape, generator=generator) * tensor.float().std() * noise).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    return target


class Driver:
    """A runner with a cache of its own, driven by hand; every slot of the cache starts as NaN."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        num_blocks: int = 96,
        parallel: TensorParallel | None = None,
        **settings: Any,
    ) -> None:
        settings = {"num_threads": 2, "cache_layout": "flat", **settings}
        self.config = EngineConfig(model=str(folder), block_size=block_size, **settings)
        self.runner = ModelRunner(self.config, progress=False, parallel=parallel)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caches = self._new_caches(self.runner)
        self.draft_caches: list[torch.Tensor] = []
        self.plan = Forward(0, [], [], [])

    def _new_caches(self, runner: ModelRunner) -> list[torch.Tensor]:
        layout = runner.layout.blocks[0]
        shape = (self.num_blocks, len(layout.tensors), *layout.tensors[0].shape)
        caches = [torch.full(shape, float("nan"), dtype=runner.facts.dtype) for _ in layout.layers]
        runner.bind_cache(caches)
        return caches

    def bind_draft(self, runner: ModelRunner) -> None:
        """Give a draft model of this target caches of its own, of as many blocks."""
        self.draft_caches = self._new_caches(runner)

    def step(
        self,
        prefill: Sequence[SequenceRows] = (),
        decode: Sequence[SequenceRows] = (),
        wait_for_layer: Callable[[int], None] = lambda layer: None,
    ) -> ModelOutput:
        self.plan = Forward(0, [], list(prefill), list(decode))
        return self.runner.forward(self.plan, wait_for_layer)

    @property
    def logits(self) -> torch.Tensor:
        """What the last step sampled from, [sampled sequences, vocab]."""
        return self.runner.last_logits

    def poison(self) -> None:
        for cache in self.caches:
            cache.fill_(float("nan"))

    def blocks(self, table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """The full blocks of a sequence, [layers, blocks, 2, block_size, kv_heads, head_dim]."""
        return torch.stack([cache[list(table[: num_tokens // self.block_size])] for cache in self.caches])

    def restore(self, table: Sequence[int], blocks: torch.Tensor) -> None:
        """Put blocks saved from another table, or another cache, into the first places of this table."""
        for cache, saved in zip(self.caches, blocks, strict=True):
            cache[list(table[: saved.shape[0]])] = saved


def prompt_part(
    token_ids: Sequence[int], table: Sequence[int], start: int = 0, stop: int | None = None, **more: Any
) -> SequenceRows:
    """Tokens `start .. stop` of a prompt; the part that ends the prompt is sampled from."""
    stop = len(token_ids) if stop is None else stop
    sampling = SamplingSpec() if stop == len(token_ids) else None
    return SequenceRows(
        **{
            "start": start,
            "token_ids": ints(token_ids[start:stop]),
            "block_table": ints(table),
            "write_from": start,
            "sampling": sampling,
        }
        | more
    )


def generated(token_ids: Sequence[int], table: Sequence[int], start: int, **more: Any) -> SequenceRows:
    """Generated tokens `start ...`; the last one is sampled from."""
    return SequenceRows(
        **{
            "start": start,
            "token_ids": ints(token_ids[start:]),
            "block_table": ints(table),
            "sampling": SamplingSpec(),
        }
        | more
    )


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def random_table(num_blocks: int, seed: int = 0, pool: range = range(96)) -> list[int]:
    """Scattered device blocks out of `pool`."""
    generator = torch.Generator().manual_seed(seed)
    return [pool[i] for i in torch.randperm(len(pool), generator=generator)[:num_blocks].tolist()]
