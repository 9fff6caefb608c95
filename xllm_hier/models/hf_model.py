"""Any other causal model: transformers' modelling code with our paged attention hooked in.

Breadth for families without an own decoder, and the oracle of the tests. Its linears run over whatever rows a step has,
so results are equal up to rounding only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ..errors import ConfigError
from .decoder import Attention, StepRows, WaitForLayer
from .families import layer_windows
from .rope import check_rope

_NAME = "xllm_paged"


class HfModel:
    """A transformers model; after construction `kv_heads`, `head_dim`, `heads` and `windows` say what it caches.

    Raises:
        ConfigError: the architecture does not go through transformers' attention interface in every layer, or wants
            something of it that the paged attention does not do.
    """

    prefill_unit = decode_unit = 1

    def __init__(
        self, folder: str | Path, config: Any, dtype: torch.dtype, device: torch.device, *, progress: bool
    ) -> None:
        check_rope(config)
        if getattr(config, "use_bidirectional_attention", None):
            raise ConfigError("model", str(folder), "a causal model (this one has use_bidirectional_attention)")
        self.windows = layer_windows(config)
        self._architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
        self._step = _Step()
        self._model = _load(folder, dtype, progress, self._architecture).to(device).eval()
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_step = self._step
        self.nbytes = sum(parameter.nbytes for parameter in self._model.parameters())
        self.heads, self.kv_heads, self.head_dim = self._probe(config, device)

    def forward(self, rows: StepRows, attention: Attention, wait_for_layer: WaitForLayer) -> torch.Tensor:
        """Logits of the wanted rows, in place of hidden states: families differ in what follows the last layer."""
        self._step.attention, self._step.wait_for_layer = attention, wait_for_layer
        if not len(rows.wanted):
            # At least one row must be asked for; which one does not matter.
            return self._run(rows, rows.positions.new_zeros(1))[:0]
        return self._run(rows, rows.wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocab] of what `forward` returned."""
        return hidden.float()

    def _run(self, rows: StepRows, keep: torch.Tensor) -> torch.Tensor:
        output = self._model(
            rows.token_ids[None], position_ids=rows.positions[None], use_cache=False, logits_to_keep=keep
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _probe(self, config: Any, device: torch.device) -> tuple[int, int, int]:
        """Run one token and see with which shapes every layer calls the attention."""
        seen: dict[int, tuple[int, int, int]] = {}

        def record(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, wanted_only: bool = False
        ) -> torch.Tensor:
            if v.shape != k.shape or q.shape[-1] != k.shape[-1]:
                raise _refused(self._architecture, "its keys and values differ in shape")
            seen[layer] = (q.shape[1], k.shape[1], k.shape[2])
            return q.flatten(1)

        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self.forward(StepRows(zero, zero, 1, zero), record, lambda layer: None)
        if sorted(seen) != list(range(config.num_hidden_layers)):
            raise _refused(self._architecture, "not every layer calls transformers' attention interface")
        if len(set(seen.values())) != 1:
            raise _refused(self._architecture, "its layers differ in heads or head size")
        return seen[0]


class _Step:
    """Where the hook finds the attention of the step that runs."""

    attention: Attention
    wait_for_layer: WaitForLayer


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The hook: query, key, value come as [1, heads, rows, head_dim]."""
    if attention_mask is not None:
        raise _refused(type(module).__name__, "it makes an attention mask of its own")
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if options.get(name) is not None:
            raise _refused(type(module).__name__, f"its attention uses {name}")
    step: _Step = module.paged_step
    layer = module.layer_idx
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    step.wait_for_layer(layer)
    output = step.attention(layer, q, k, v, scaling or q.shape[-1] ** -0.5)
    return output.view(1, len(q), q.shape[1], -1), None


def _load(folder: str | Path, dtype: torch.dtype, progress: bool, architecture: str) -> PreTrainedModel:
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_args, **_options: None)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_NAME)
    except (ValueError, KeyError, ImportError) as error:
        raise _refused(architecture, str(error).splitlines()[0]) from error
    except OSError as error:
        raise ConfigError("model", str(folder), f"a complete checkpoint ({error})") from error


def _refused(architecture: str, reason: str) -> ConfigError:
    return ConfigError(
        "model_impl",
        "hf",
        f"architectures whose layers go through transformers' attention interface; {architecture}: {reason}",
    )
