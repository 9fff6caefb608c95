"""The multi-token prediction head in plain torch and transformers' own layers, to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class Reference:
    """The target and the head's one layer in transformers' modules, the rest in plain torch; batches of equal length.

    `tensors` are the head's own, by their names in the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.config = self.model.config
        stored = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        behind = f"model.layers.{self.config.num_hidden_layers}."
        self.prefix, self.names = behind, [behind + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        if "mtp.fc.weight" in stored:
            self.prefix = "mtp.layers.0."
            self.names = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
        joins = [f"{name}.weight" for name in self.names]
        self.joins = [torch.nn.Parameter(stored.pop(name)) for name in joins]
        self.layer: Any = type(self.model.model.layers[-1])(self.config, layer_idx=self.config.num_hidden_layers - 1)
        self.layer.load_state_dict(_with_packed_experts(stored, self.prefix))
        self.layer.eval()

    @property
    def tensors(self) -> dict[str, torch.nn.Parameter]:
        own = {f"{self.prefix}{name}": parameter for name, parameter in self.layer.named_parameters()}
        return own | {f"{name}.weight": weight for name, weight in zip(self.names, self.joins, strict=True)}

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's final hidden states [batch, n, hidden], normed, at every position."""
        states: torch.Tensor = self.model.model(tokens).last_hidden_state
        return states

    def head(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The head's own final hidden states, normed, of tokens [batch, n] and the states before each of them."""
        join, embedding_norm, hidden_norm, final_norm = self.joins
        embedded = self.model.model.embed_tokens(tokens)
        hidden = F.linear(torch.cat([self._norm(embedded, embedding_norm), self._norm(before, hidden_norm)], -1), join)
        length = tokens.shape[1]
        places = torch.arange(1, length + 1)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(hidden, places)
        return self._norm(
            self.layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=angles), final_norm
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(states)
        return logits

    @torch.no_grad()
    def draft(self, known: Sequence[int], count: int) -> list[torch.Tensor]:
        """Logits [vocab] of each of `count` drafts behind the known tokens, each the most likely one."""
        tokens, states = torch.tensor(known)[None], self.states(torch.tensor(known)[None])[:, :-1]
        found = []
        for _ in range(count):
            own = self.head(tokens[:, 1:], states)[:, -1:]
            found.append(self.logits(own)[0, 0])
            tokens = torch.cat([tokens, found[-1].argmax()[None, None]], dim=1)
            states = torch.cat([states, own], dim=1)
        return found

    @torch.no_grad()
    def go_on(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """The target's greedy continuation of tokens [batch, n], n + count of them."""
        for _ in range(count):
            tokens = torch.cat([tokens, self.logits(self.states(tokens)[:, -1:]).argmax(-1)], dim=1)
        return tokens

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


def _with_packed_experts(stored: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors that begin with `prefix`, as transformers' module has them: all experts in one."""
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}

    def packed(part: str) -> torch.Tensor:
        count = sum(name.startswith("mlp.experts.") and name.endswith(f"{part}.weight") for name in own)
        return torch.stack([own.pop(f"mlp.experts.{number}.{part}.weight") for number in range(count)])

    if any(name.startswith("mlp.experts.") for name in own):
        own["mlp.experts.down_proj"] = packed("down_proj")
        own["mlp.experts.gate_up_proj"] = torch.cat([packed("gate_proj"), packed("up_proj")], dim=1)
    return own
