"""Which models our own decoder runs, and how the families differ: one spec, filled from transformers' configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .linear import Fused
from .rope import SUPPORTED_ROPE, check_rope, rope_parameters

OWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_ACTIVATIONS = {
    "silu": Fused.SILU,
    "swish": Fused.SILU,
    "gelu": Fused.GELU,
    "gelu_pytorch_tanh": Fused.GELU_TANH,
}


@dataclass(frozen=True)
class DecoderSpec:
    """Everything the decoder needs to know of a model.

    `windows[i]`: sliding window of layer i in tokens, None = full attention. `rope_types[i]`: its rope table.
    `norm_offset`: norms store weight - offset.
    `post_norms`: attention and MLP outputs are normed before they are added.
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
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0


def decoder_spec(config: Any) -> DecoderSpec:
    """The spec of a transformers configuration.

    Raises:
        ConfigError: our decoder does not run this family, or not with one of the features the configuration asks for.
    """
    family = config.model_type
    if family not in OWN_FAMILIES:
        raise _refused(f"family {family!r} has no own decoder, which knows {', '.join(OWN_FAMILIES)}")
    _check_features(config)
    gemma = family == "gemma3_text"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
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
        windows=layer_windows(config),
        rope_types=_rope_types(config),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied=bool(config.tie_word_embeddings),
        qk_norm=family in ("qwen3", "gemma3_text"),
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
    )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None = full attention.

    Raises:
        ConfigError: a layer is neither full nor sliding attention.
    """
    window = getattr(config, "sliding_window", None)
    default = "sliding_attention" if window and config.model_type in ("mistral", "mixtral") else "full_attention"
    types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError("model", config.model_type, f"models with full or sliding attention only (not {kind})")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_features(config: Any) -> None:
    check_rope(config)
    for layer_type in set(_rope_types(config)):
        parameters = rope_parameters(config, layer_type)
        if parameters.get("rope_type", "default") not in SUPPORTED_ROPE:
            raise _refused(f"rope type {parameters['rope_type']!r}, where it knows {', '.join(SUPPORTED_ROPE)}")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refused("a partial rotary factor")
    if _activation(config) not in _ACTIVATIONS:
        raise _refused(f"activation {_activation(config)!r}, where it knows {', '.join(_ACTIVATIONS)}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise _refused(name)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _rope_types(config: Any) -> tuple[str | None, ...]:
    """The layer types name the rope tables where a family has one for each; else one table serves all layers."""
    types: list[str] | None = getattr(config, "layer_types", None)
    if not types or types[0] not in config.rope_parameters:
        return (None,) * int(config.num_hidden_layers)
    return tuple(types)


def _refused(reason: str) -> ConfigError:
    return ConfigError("model_impl", "own", f"hf for this model (the own decoder was asked for {reason})")
