"""Which models our own decoder runs, and how the families differ: one spec, filled from transformers' configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from .expert_routing import MoeSpec, moe_spec, refused
from .linear import Fused
from .rope import SUPPORTED_ROPE, check_rope, rope_parameters

OWN_FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
)
_ACTIVATIONS = {
    "silu": Fused.SILU,
    "swish": Fused.SILU,
    "gelu": Fused.GELU,
    "gelu_pytorch_tanh": Fused.GELU_TANH,
}


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of Multi-head Latent Attention, of one head where they are a head's; `q_lora_rank` None: queries have none.

    `rope_pairs`: the checkpoint has the two coordinates that turn together side by side, not half a head apart.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_pairs: bool

    @property
    def width(self) -> int:
        """Elements that a token has in a layer's cache: the latent and the rotated key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes of a layer whose attention is a gated delta net: a state of one size instead of keys and values.

    Each key head serves as many value heads as all others; `conv_size` tokens take part in a token's convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

    @property
    def channels(self) -> int:
        """Columns that the convolution mixes: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def inputs(self) -> int:
        """Columns that the recurrence takes: the channels, and two numbers for each value head."""
        return self.channels + 2 * self.value_heads

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.value_heads * self.value_dim

    def share(self, tp_size: int) -> RecurrentSpec:
        """The share of one of `tp_size` ranks."""
        return replace(self, key_heads=self.key_heads // tp_size, value_heads=self.value_heads // tp_size)


@dataclass(frozen=True)
class DecoderSpec:
    """Everything the decoder needs to know of a model.

    `windows[i]`: sliding window of layer i in tokens, None = full attention. `rope_types[i]`: its rope table.
    `norm_offset`: norms store weight - offset.
    `post_norms`: attention and MLP outputs are normed before they are added.
    `experts[i]`: the experts of layer i, None = its MLP is a dense one of `ffn` inner columns.
    `latent`: the cache holds latents of head_dim columns, keys and values at once, as one KV head for all heads.
    `recurrent[i]`: layer i is a gated delta net, None = it has attention; () = all have.
    `attention_gate`: what a head attends to is multiplied by the sigmoid of a gate of its own.
    `turned`: columns of a head that turn with its position, the first ones; 0 = all of them.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    activation: Fused
    scale: float
    windows: tuple[int | None, ...]
    rope_types: tuple[str | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    experts: tuple[MoeSpec | None, ...]
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    latent: LatentSpec | None = None
    recurrent: tuple[RecurrentSpec | None, ...] = ()
    attention_gate: bool = False
    turned: int = 0

    @property
    def rope_dim(self) -> int:
        """Columns of a head that turn with its position."""
        return self.latent.rope_dim if self.latent else self.turned or self.head_dim

    @property
    def value_heads(self) -> int:
        """Heads of values beside the keys; none where the keys are the values too."""
        return 0 if self.latent else self.kv_heads

    @property
    def gate_heads(self) -> int:
        """Heads of gates beside queries, keys and values."""
        return self.heads if self.attention_gate else 0

    def share(self, tp_size: int) -> DecoderSpec:
        """The share of one of `tp_size` ranks of each layer; KV heads are replicated when there are fewer of them."""
        return replace(
            self,
            heads=self.heads // tp_size,
            kv_heads=max(1, self.kv_heads // tp_size),
            ffn=self.ffn // tp_size,
            recurrent=tuple(net.share(tp_size) if net else None for net in self.recurrent),
        )

    def check_tp_size(self, tp_size: int) -> None:
        """Raise ConfigError, with all sizes that can be, when the model does not divide by `tp_size`."""
        allowed = [size for size in range(1, self.heads + 1) if self._divides_by(size)]
        if tp_size not in allowed:
            sizes = ", ".join(str(size) for size in allowed)
            heads = [f"{self.heads} heads, {self.kv_heads} KV heads"]
            heads += sorted({f"{net.key_heads} key heads with states" for net in self.recurrent if net})
            raise ConfigError("tp_size", tp_size, f"one of {sizes} for this model ({', '.join(heads)})")

    def _divides_by(self, size: int) -> bool:
        whole_kv_heads = self.kv_heads % size == 0 or size % self.kv_heads == 0
        inner = {self.ffn} | {width for moe in self.experts if moe for width in (moe.ffn, moe.shared_ffn)}
        split = {self.heads} | inner | {net.key_heads for net in self.recurrent if net}
        return whole_kv_heads and all(width % size == 0 for width in split)


def decoder_spec(config: Any) -> DecoderSpec:
    """The spec of a transformers configuration.

    Raises:
        ConfigError: our decoder does not run this family, or not with one of the features the configuration asks for.
    """
    family = config.model_type
    if family not in OWN_FAMILIES:
        raise refused(f"family {family!r} has no own decoder, which knows {', '.join(OWN_FAMILIES)}")
    _check_features(config)
    gemma, hybrid = family == "gemma3_text", family == "qwen3_next"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    spec = DecoderSpec(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[_activation(config)],
        scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        windows=layer_windows(config, recurrent=hybrid),
        rope_types=_rope_types(config),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied=bool(config.tie_word_embeddings),
        experts=tuple(moe_spec(config, layer) for layer in range(config.num_hidden_layers)),
        qk_norm=family in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"),
        norm_offset=1.0 if gemma or hybrid else 0.0,
        post_norms=gemma,
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
    )
    if hybrid:
        return _with_recurrence(spec, config)
    return _with_latents(spec, config) if family.startswith("deepseek") else spec


def _with_latents(spec: DecoderSpec, config: Any) -> DecoderSpec:
    if config.attention_bias:
        raise refused("latent attention with biases")
    latent = LatentSpec(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        rope_pairs=bool(getattr(config, "rope_interleave", True)),
    )
    scale = _latent_scale(config.rope_parameters, latent.nope_dim + latent.rope_dim)
    return replace(spec, latent=latent, kv_heads=1, head_dim=latent.width, scale=scale)


def _with_recurrence(spec: DecoderSpec, config: Any) -> DecoderSpec:
    net = RecurrentSpec(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_size=config.linear_conv_kernel_dim,
    )
    turned = int(spec.head_dim * rope_parameters(config, None).get("partial_rotary_factor", 1.0))
    kinds: list[str] = config.layer_types
    recurrent = tuple(net if kind == "linear_attention" else None for kind in kinds)
    reasons = {
        "attention biases beside gates": spec.qkv_bias,
        "a convolution with another activation than silu": spec.activation is not Fused.SILU,
        "a convolution of one token": net.conv_size < 2,
        f"{net.value_heads} value heads for {net.key_heads} key heads": net.value_heads % net.key_heads != 0,
        "values of an odd width": net.value_dim % 2 != 0,
        f"{turned} turning columns of a head": turned % 2 != 0 or not 0 < turned <= spec.head_dim,
        "no layer with full attention": all(recurrent),
    }
    for reason, found in reasons.items():
        if found:
            raise refused(reason)
    return replace(spec, recurrent=recurrent, attention_gate=True, turned=turned)


def _latent_scale(rope: dict[str, Any], head_dim: int) -> float:
    """The factor of the attention scores.

    With a stretched context queries and keys grow: all their columns by a factor made of `mscale_all_dim`, which is
    here, the turned ones by what `mscale` asks for beyond it, which is in the rope tables.
    """
    all_dim = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else 0.0
    growth = 0.1 * all_dim * math.log(rope["factor"]) if all_dim and rope["factor"] > 1 else 0.0
    return float(head_dim**-0.5 * (1.0 + growth) ** 2)


def layer_windows(config: Any, *, recurrent: bool = False) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None = full attention, or none at all.

    `recurrent`: layers have full attention or a state, instead of full or sliding attention.

    Raises:
        ConfigError: a layer is of another kind.
    """
    window = getattr(config, "sliding_window", None)
    sliding = window and config.model_type in ("mistral", "mixtral", "qwen3_moe")
    default = "sliding_attention" if sliding else "full_attention"
    types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    other = "linear" if recurrent else "sliding"
    for kind in types:
        if kind not in ("full_attention", f"{other}_attention"):
            raise ConfigError("model", config.model_type, f"models with full or {other} attention only (not {kind})")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_features(config: Any) -> None:
    check_rope(config)
    for layer_type in set(_rope_types(config)):
        parameters = rope_parameters(config, layer_type)
        if parameters.get("rope_type", "default") not in SUPPORTED_ROPE:
            raise refused(f"rope type {parameters['rope_type']!r}, where it knows {', '.join(SUPPORTED_ROPE)}")
        if config.model_type != "qwen3_next" and parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise refused("a partial rotary factor")
    if _activation(config) not in _ACTIVATIONS:
        raise refused(f"activation {_activation(config)!r}, where it knows {', '.join(_ACTIVATIONS)}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise refused(name)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _rope_types(config: Any) -> tuple[str | None, ...]:
    """The layer types name the rope tables where a family has one for each; else one table serves all layers."""
    types: list[str] | None = getattr(config, "layer_types", None)
    if not types or types[0] not in config.rope_parameters:
        return (None,) * int(config.num_hidden_layers)
    return tuple(types)
