"""Mixture of experts, the choice: what each family's configuration asks for, and which experts a row goes to.

The choice reads one row at a time, bit for bit. So exponentials are a softmax's, whose kernel walks all rows alike: an
elementwise kernel rounds the tail of its loop in another way, and where that lies depends on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import torch

from ..errors import ConfigError


class Scoring(Enum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """The score of a group of experts, where only experts of the best groups are chosen."""

    BEST = "best"
    BEST_TWO = "best_two"


@dataclass(frozen=True)
class MoeSpec:
    """The experts of one layer.

    `ffn` is the inner size of an expert, `shared_ffn` that of all shared experts together, which run as one.
    `renormalise`: the weights of a row's experts are made to add up to 1, before they are multiplied by `factor`.
    `groups` > 1: a row's experts come out of its best `top_groups` groups of neighbours.
    `correction`: a bias per expert takes part in the choice, and not in the weights.
    `shared_gate`: what the shared experts give counts by the sigmoid of one more of the router's logits.
    `fp32_router`: logits are computed in fp32 whatever the model's dtype.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = False
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.BEST
    correction: bool = False
    fp32_router: bool = False


def choose_experts(logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, int64 [rows, top_k], best first, and their weights [rows, top_k].

    `logits` [rows, experts] and the correction `bias` [experts] are fp32. Of equal scores the lower expert is taken.
    """
    scores = _scores(logits, spec.scoring)
    ranked = scores if bias is None else scores + bias
    if spec.groups > 1:
        ranked = ranked.masked_fill(~_in_best_groups(ranked, spec), float("-inf"))
    chosen = _best(ranked, spec.top_k)
    weights = scores.gather(1, chosen)
    if spec.renormalise:
        # A sum over columns one by one: a reduction kernel may add in another order for another number of rows. The
        # summand is DeepSeek's, for scores that are all 0.
        weights = weights / (reduce(torch.add, weights.unbind(dim=1))[:, None] + 1e-20)
    return chosen, weights * spec.factor if spec.factor != 1.0 else weights


def _scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(dim=-1)
    return sigmoid(logits)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The first of the softmax over (x, 0), for the reason above."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1).softmax(dim=-1)[..., 0]


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` highest scores of each row; of equal ones the first, which topk does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(ranked: torch.Tensor, spec: MoeSpec) -> torch.Tensor:
    """Which experts are in the row's best groups, bool [rows, experts]."""
    grouped = ranked.view(len(ranked), spec.groups, spec.num_experts // spec.groups)
    if spec.group_score is GroupScore.BEST:
        totals = grouped.amax(dim=-1)
    else:
        first, second = grouped.topk(2, dim=-1).values.unbind(dim=-1)
        totals = first + second
    allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, _best(totals, spec.top_groups), True)
    return allowed[..., None].expand_as(grouped).flatten(1)


# ------------------------------------------------------------------------------------------- families


def moe_spec(config: Any, layer: int) -> MoeSpec | None:
    """The experts of a layer by transformers' configuration, None: its MLP is a dense one.

    Raises:
        ConfigError: experts are to be chosen in a way that our decoder does not know.
    """
    match config.model_type:
        case "mixtral":
            spec = MoeSpec(
                config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, renormalise=True
            )
        case "qwen3_moe" | "qwen3_next" if config.num_experts and layer not in config.mlp_only_layers:
            if (layer + 1) % config.decoder_sparse_step:
                return None
            shared = getattr(config, "shared_expert_intermediate_size", 0)
            spec = MoeSpec(
                config.num_experts,
                config.num_experts_per_tok,
                config.moe_intermediate_size,
                shared_ffn=shared,
                shared_gate=shared > 0,
                renormalise=bool(config.norm_topk_prob),
            )
        case "deepseek_v2" | "deepseek_v3" if layer >= config.first_k_dense_replace:
            spec = _deepseek(config)
        case _:
            return None
    return _checked(spec)


def _deepseek(config: Any) -> MoeSpec:
    """DeepSeek's two routers; what their configurations can name beyond them was never published with a model."""
    second = config.model_type == "deepseek_v2"
    scoring, methods = ("softmax", ("greedy", "group_limited_greedy")) if second else ("sigmoid", ("noaux_tc",))
    method = getattr(config, "topk_method", None) or methods[0]
    if getattr(config, "scoring_func", scoring) != scoring:
        raise refused(f"scoring_func {config.scoring_func!r}")
    if method not in methods:
        raise refused(f"topk_method {method!r}")
    if getattr(config, "moe_layer_freq", 1) != 1:
        raise refused("moe_layer_freq")
    if second and config.norm_topk_prob:
        # transformers' model leaves it out, DeepSeek's own drops the scaling factor for it.
        raise refused("norm_topk_prob, on which implementations of this family disagree")
    grouped = method != "greedy"
    return MoeSpec(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        shared_ffn=config.moe_intermediate_size * (config.n_shared_experts or 0),
        scoring=Scoring(scoring),
        renormalise=bool(config.norm_topk_prob),
        factor=float(config.routed_scaling_factor),
        groups=(config.n_group or 1) if grouped else 1,
        top_groups=(config.topk_group or 1) if grouped else 1,
        group_score=GroupScore.BEST if second else GroupScore.BEST_TWO,
        correction=not second,
        fp32_router=True,
    )


def _checked(spec: MoeSpec) -> MoeSpec:
    size, rest = divmod(spec.num_experts, spec.groups)
    if rest or (spec.groups > 1 and size < 2):
        raise refused(f"{spec.num_experts} experts in {spec.groups} groups")
    if not spec.top_groups <= spec.groups or not 1 <= spec.top_k <= size * spec.top_groups:
        raise refused(f"{spec.top_k} experts a token out of {spec.top_groups} groups of {size}")
    return spec


def refused(reason: str) -> ConfigError:
    """The error for a configuration that our decoder cannot run, and why."""
    return ConfigError("model_impl", "own", f"hf for this model (the own decoder was asked for {reason})")
