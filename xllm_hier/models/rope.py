"""Rotary position embedding: tables made once at load, so that cos and sin of a position never depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ConfigError
from .row_kernels import RowKernels

# `dynamic` and `longrope` change the frequencies with the length of the sequence: KV cached early would be wrong later.
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
_TABLE_STEP = 256


def rope_parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The rope settings of one layer type; of the whole model where the family does not tell types apart."""
    parameters: dict[str | None, Any] = config.rope_parameters
    chosen: dict[str, Any] = parameters.get(layer_type, parameters)
    return chosen


def check_rope(config: Any) -> None:
    """Refuse rope types whose frequencies move with the sequence length.

    Raises:
        ConfigError: naming the rope type.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    for entry in nested or [parameters]:
        kind = entry.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ConfigError(
                "model", config.model_type, f"models whose rope type is one of {', '.join(SUPPORTED_ROPE)} (not {kind})"
            )


class RopeTable:
    """cos and sin of every position a model may use, each [max_len, width / 2] in the model's dtype.

    `width`: the columns of a head that turn.

    Computed in fp32 and rounded once, as transformers does. Made in steps of fixed shape, because a vectorised cosine
    may round its last few elements differently.
    """

    def __init__(
        self,
        config: Any,
        layer_type: str | None,
        width: int,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies, factor = _frequencies(config, layer_type, width)
        length = -(-max_len // _TABLE_STEP) * _TABLE_STEP
        self.cos = torch.empty(length, width // 2, dtype=dtype)
        self.sin = torch.empty_like(self.cos)
        for start in range(0, length, _TABLE_STEP):
            positions = torch.arange(start, start + _TABLE_STEP, dtype=torch.float32)
            angles = positions[:, None] * frequencies[None, :]
            self.cos[start : start + _TABLE_STEP] = angles.cos() * factor
            self.sin[start : start + _TABLE_STEP] = angles.sin() * factor
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `positions` (int64 [rows]), each [rows, 1, width / 2], to be broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, kernels: RowKernels | None = None
) -> None:
    """Write x [rows, heads, head_dim], rotated by its position's angles, to `out`; columns without an angle stay.

    Products and sums are rounded one by one: a fused multiply-add would not round the same in vector and tail code.
    """
    if kernels is not None:
        return kernels.rotate(x, cos, sin, out)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]


def _frequencies(config: Any, layer_type: str | None, width: int) -> tuple[torch.Tensor, float]:
    parameters = rope_parameters(config, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    nested = layer_type if layer_type in config.rope_parameters else None
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=nested)
    return frequencies.float(), float(factor)
