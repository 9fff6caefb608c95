"""Facts of a model that its folder and the settings decide: config, dtype, lengths, ends of text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ...config import EngineConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one model. `hf_config` is transformers' config object; lengths are in tokens."""

    hf_config: Any
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]

    @classmethod
    def read(cls, config: EngineConfig, block_size: int) -> ModelFacts:
        """The facts of the folder `config.model`.

        Raises:
            ConfigError: the folder holds no model that can run as asked.
        """
        hf_config = _model_config(config)
        return cls(
            hf_config,
            _dtype(config, hf_config),
            block_size,
            _max_model_len(config, hf_config),
            int(hf_config.vocab_size),
            _eos_token_ids(Path(config.model), hf_config),
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_experts(self) -> bool:
        """The model routes tokens to experts."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return any((getattr(self.hf_config, name, 0) or 0) > 1 for name in names)


def _model_config(config: EngineConfig) -> Any:
    try:
        hf_config = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model", config.model, f"a folder with a config.json of a known model ({error})") from error
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError("model", config.model, "models without quantization_config")
    if not hasattr(hf_config, "num_hidden_layers"):
        raise ConfigError("model", config.model, f"text models with a causal head (not {hf_config.model_type})")
    return hf_config


def _dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else (hf_config.dtype or torch.float32)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError("dtype", config.dtype, f"float32 | bfloat16 | float16 for this checkpoint (it is {dtype})")
    return dtype


def _max_model_len(config: EngineConfig, hf_config: Any) -> int:
    limit = int(getattr(hf_config, "max_position_embeddings", 0)) or config.max_model_len
    if not limit:
        raise ConfigError("max_model_len", 0, "a number of tokens, as this model names no longest length")
    if config.max_model_len > limit:
        raise ConfigError("max_model_len", config.max_model_len, f"at most {limit} (tokens) with this model")
    return config.max_model_len or limit


def _eos_token_ids(folder: Path, hf_config: Any) -> list[int]:
    """generation_config.json first: chat models often name more end tokens there."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = getattr(hf_config, "eos_token_id", None)
    return [] if found is None else [int(item) for item in (found if isinstance(found, list) else [found])]
