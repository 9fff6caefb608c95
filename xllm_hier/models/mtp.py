"""Multi-token prediction: the one layer more of a checkpoint that guesses the token after next, as a draft model.

Its row for a token takes the token's embedding and the target's final hidden state of the token before it; embedding
and head are the target's own (https://arxiv.org/abs/2412.19437, section 2.2). Used for more than one draft, its own
final hidden state takes the target's place.

    target   h0   h1   h2   h3          position j of the head holds what it made of h(j-1) and token j, so that it
    token         t1   t2   t3   t4     depends on tokens up to j alone, like every position of a cache; position 0
    head     -    1    2    3    4      holds nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .decoder import Decoder, HiddenJoin, load_layer
from .families import DecoderSpec
from .parts import Loader
from .rope import RopeTable
from .weights import Checkpoint

FIRST_POSITION = 1


@dataclass(frozen=True)
class _Names:
    """Where a kind of checkpoint keeps the head: what each of its tensors' names begins with."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str


def _kinds(spec: DecoderSpec) -> list[_Names]:
    behind = f"model.layers.{spec.layers}."  # DeepSeek: a layer behind the last
    return [
        _Names(behind, f"{behind}enorm", f"{behind}hnorm", f"{behind}eh_proj", f"{behind}shared_head.norm"),
        _Names("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),  # Qwen
    ]


def head_spec(spec: DecoderSpec) -> DecoderSpec:
    """The head's one layer: as the target's last, with attention to all that was before."""
    return replace(
        spec,
        recurrent=(),
        layers=1,
        windows=(None,),
        rope_types=spec.rope_types[-1:],
        experts=spec.experts[-1:],
        post_norms=False,
    )


def load_head(loader: Loader, target: Decoder, ropes: Mapping[str | None, RopeTable]) -> Decoder:
    """The head in the checkpoint of `target`, whose embedding and head it shares; `loader.spec` is `head_spec`.

    Raises:
        ConfigError: the checkpoint has none, or one of its tensors is missing or has an unexpected shape.
    """
    names = _find(loader.checkpoint, target.spec)
    spec, checkpoint = loader.spec, loader.checkpoint
    weight = checkpoint.tensor(f"{names.join}.weight", (spec.hidden, 2 * spec.hidden), loader.dtype)
    return Decoder(
        spec=spec.share(loader.parallel.size),
        parallel=loader.parallel,
        embedding=target.embedding,
        layers=[load_layer(loader, names.layer, spec.experts[0])],
        final_norm=loader.norm(f"{names.final_norm}.weight"),
        head=target.head,
        head_rows=target.head_rows,
        ropes=dict(ropes),
        kernels=loader.kernels,
        join=HiddenJoin(
            loader.norm(f"{names.embedding_norm}.weight"),
            loader.norm(f"{names.hidden_norm}.weight"),
            loader.linear(weight),
        ),
    )


def _find(checkpoint: Checkpoint, spec: DecoderSpec) -> _Names:
    kinds = _kinds(spec)
    for names in kinds:
        if f"{names.join}.weight" in checkpoint:
            return names
    wanted = " or ".join(f"{names.join}.weight" for names in kinds)
    raise ConfigError(
        "speculative_algorithm",
        "mtp",
        f"ngram | draft_model with this checkpoint, which has no multi-token prediction head (no {wanted})",
    )
