"""Our own decoder: one compact layer, whose attention and MLP parts differ by family (see `parts`).

A step's rows lie in two sections that never share a tile of a linear::

    | prompt rows of all sequences | padding | generated rows of all sequences | padding |
    |<----------- prefill tiles ---------->|<------------ decode tiles ------------->|

A section runs in chunks of rows: a chunk goes through all that works row by row (norms, linears, rotary embedding, MLP)
while it is in the CPU's cache; attention alone looks across rows. Elementwise steps are only products and sums, which
round alike wherever a row lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from .delta_rule import DeltaWeights
from .expert_routing import MoeSpec
from .experts import load_experts
from .families import DecoderSpec, RecurrentSpec
from .gated_delta import GatedDelta, load_gated_delta
from .linear import Linear
from .mla import load_latent_attention
from .parallel import TensorParallel
from .parts import AttentionPart, Loader, Mlp, load_mlp, load_self_attention, rms_norm, tiles_of
from .rope import RopeTable
from .row_kernels import RowKernels


class Attention(Protocol):
    """The attention that a model calls in each layer: writes K and V, returns [rows, heads * head_dim]."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, wanted_only: bool = False
    ) -> torch.Tensor: ...


class Recurrence(Protocol):
    """The recurrence of a layer with a state instead of keys and values: takes sequences' states over the rows.

    `projected` [rows, channels + 2 value_heads] come from GatedDelta; returns [rows, value columns].
    """

    def __call__(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: int64 `token_ids` and `positions` [rows], padding included.

    The first `num_prefill` rows are prompt rows (where rows need no tiles, all are), the rest generated ones; each
    section's last `padding` rows belong to no sequence. `wanted` are the rows whose final hidden states are asked for,
    ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_prefill: int
    wanted: torch.Tensor
    padding: tuple[int, int] = (0, 0)


_DECODE_CHUNK_ROWS = 256  # a multiple of every decode tile
_SHARP_TOKENS = 16

WaitForLayer = Callable[[int], None]


@dataclass
class _Chunk:
    """Some rows of one section and their hidden states, which move through the layers; the first `count` are needed."""

    rows: slice
    prefill: bool
    hidden: torch.Tensor
    count: int


@dataclass
class Layer:
    """One layer's norms and parts; the two norms around the MLP only where its output is normed before it is added."""

    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    attention: AttentionPart | GatedDelta
    mlp: Mlp
    before_mlp_norm: torch.Tensor | None = None
    after_mlp_norm: torch.Tensor | None = None


@dataclass
class HiddenJoin:
    """How a multi-token prediction head begins: W [norm(embedding of a token) ; norm(hidden state before it)]."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    linear: Linear


@dataclass
class Decoder:
    """A loaded model; `prefill_unit` and `decode_unit` are what the two sections are padded to.

    `spec` says what this rank has of each layer; `embedding` and `head` are its share of the vocabulary. `chunk_rows`
    bounds how many prompt rows go through a layer's row-wise part at once. `join`: this is a multi-token prediction
    head, whose rows are made of tokens and of another model's hidden states.
    """

    spec: DecoderSpec
    parallel: TensorParallel
    embedding: torch.Tensor
    layers: list[Layer]
    final_norm: torch.Tensor
    head: Linear
    head_rows: torch.Tensor  # the head's weight [share, hidden], mapped from the file: a step touches a few rows
    ropes: dict[str | None, RopeTable]
    prefill_unit: int = 1
    decode_unit: int = 1
    chunk_rows: int = 1024
    join: HiddenJoin | None = None
    kernels: RowKernels | None = None
    _kept: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def rows_invariant(self) -> bool:
        """No row's bits depend on how many rows there are: nothing is padded (see `row_kernels`)."""
        return self.head.rows_invariant

    def linears(self) -> list[Linear]:
        """The layers' linears that run in the sections' tiles; the head, which only sees decode tiles, does not."""
        first = [self.join.linear] if self.join else []
        return first + [
            linear for layer in self.layers for linear in (*layer.attention.linears(), *layer.mlp.linears())
        ]

    def grouped_linears(self) -> list[Linear]:
        """The layers' linears that pad the rows they get by themselves (experts)."""
        return [linear for layer in self.layers for linear in layer.mlp.grouped()]

    def forward(
        self,
        rows: StepRows,
        attention: Attention,
        wait_for_layer: WaitForLayer,
        given: torch.Tensor | None = None,
        recurrence: Recurrence | None = None,
    ) -> torch.Tensor:
        """Hidden states [len(wanted), hidden] before the last norm.

        `wait_for_layer(i)` is called before layer i touches the cache. `given` [rows, hidden], only with a `join`: the
        hidden state before each row's token. `recurrence`: needed where layers have states.
        """
        spec = self.spec
        hidden = self._embed(rows.token_ids)
        if spec.embed_scale != 1.0:
            hidden = hidden * torch.tensor(spec.embed_scale, dtype=hidden.dtype)
        chunks = [_Chunk(part, prefill, hidden[part], count) for part, prefill, count in self._parts(rows)]
        if self.join is not None and given is not None:
            for chunk in chunks:
                chunk.hidden = self._joined(self.join, chunk, given[chunk.rows])
        angles = {kind: table.at(rows.positions) for kind, table in self.ropes.items()}
        heads = spec.heads + spec.kv_heads + spec.value_heads + spec.gate_heads
        qkvg = self._buffer(len(rows.token_ids), heads, spec.head_dim)
        for number, layer in enumerate(self.layers):
            last, part = number == spec.layers - 1, layer.attention
            if isinstance(part, GatedDelta):
                assert recurrence is not None
                projected = self._buffer(len(rows.token_ids), part.width)
                for chunk in chunks:
                    part.project(self._norm(chunk.hidden, layer.input_norm), chunk.prefill, projected[chunk.rows])
                wait_for_layer(number)
                attended = part.gated(recurrence(number, part.for_recurrence(projected), part.weights), projected)
            else:
                cos, sin = angles[spec.rope_types[number]]
                for chunk in chunks:
                    normed = self._norm(chunk.hidden, layer.input_norm)
                    part.project(normed, chunk.prefill, cos[chunk.rows], sin[chunk.rows], qkvg[chunk.rows])
                wait_for_layer(number)
                attended = self._attend(attention, number, qkvg, wanted_only=last)
            if last:
                chunks, attended = self._keep_wanted(chunks, attended, rows)
            for chunk in chunks:
                chunk.hidden = self._finish(layer, chunk, attended[chunk.rows])
        return self._collect_wanted(chunks, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocab] of final hidden states [rows, hidden]; rows run in the head's decode tiles.

        Every rank must ask for them.
        """
        count = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, -count % self.decode_unit))
        normed = self.normed(padded)
        logits = self.head(normed, self.head.decode)[:count].float()
        if self.head_rows.dtype is not torch.float32 and not self.rows_invariant:
            self._sharpen(logits, normed)
        shares = [self._vocab_share(rank) for rank in range(self.parallel.size)]
        return self.parallel.gather_columns(logits, [share.stop - share.start for share in shares])

    def _vocab_share(self, rank: int) -> slice:
        return self.parallel.vocab_part(self.spec.vocab, rank)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens of its share; the sum with the others' zeros is exact."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.embedding)
        share = self._vocab_share(self.parallel.rank)
        inside = (token_ids >= share.start) & (token_ids < share.stop)
        rows = F.embedding(torch.where(inside, token_ids - share.start, 0), self.embedding)
        return self.parallel.sum(rows.masked_fill_(~inside[:, None], 0.0))

    def _sharpen(self, logits: torch.Tensor, normed: torch.Tensor) -> None:
        """Compute the most likely tokens' logits again in fp32: a 16-bit product leaves near ties to chance.

        bfloat16 has steps of 0.125 at 20, and the best two tokens are often closer. Row by row, in one fixed shape.
        """
        for row, ids in enumerate(logits.topk(min(_SHARP_TOKENS, logits.shape[1])).indices):
            logits[row, ids] = torch.mv(self.head_rows[ids].float(), normed[row].float())

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states as the head, and a multi-token prediction head, take them."""
        return self._norm(hidden, self.final_norm)

    def _attend(self, attention: Attention, number: int, qkvg: torch.Tensor, *, wanted_only: bool) -> torch.Tensor:
        spec = self.spec
        q, k, v, gates = torch.split(qkvg, [spec.heads, spec.kv_heads, spec.value_heads, spec.gate_heads], dim=1)
        attended = attention(number, q, k, v, spec.scale, wanted_only=wanted_only)
        return attended * gates.flatten(1) if spec.attention_gate else attended

    # --------------------------------------------------------------------------------------- row-wise parts

    def _joined(self, join: HiddenJoin, chunk: _Chunk, given: torch.Tensor) -> torch.Tensor:
        parts = [self._norm(chunk.hidden, join.embedding_norm), self._norm(given, join.hidden_norm)]
        return join.linear(torch.cat(parts, dim=1), tiles_of(join.linear, chunk.prefill))

    def _finish(self, layer: Layer, chunk: _Chunk, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention; the sums with the residual run inside the linears unless a norm lies between."""
        hidden = chunk.hidden
        if layer.before_mlp_norm is None or layer.after_mlp_norm is None:
            hidden = layer.attention.output(attended, chunk.prefill, hidden)
            return layer.mlp(self._norm(hidden, layer.post_attention_norm), chunk.prefill, hidden, chunk.count)
        attended = layer.attention.output(attended, chunk.prefill, None)
        hidden = hidden + self._norm(attended, layer.post_attention_norm)
        normed = self._norm(hidden, layer.before_mlp_norm)
        return hidden + self._norm(layer.mlp(normed, chunk.prefill, None, chunk.count), layer.after_mlp_norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.spec.eps, self.kernels)

    # --------------------------------------------------------------------------------------- rows and chunks

    def _parts(self, rows: StepRows) -> Iterator[tuple[slice, bool, int]]:
        """Rows of a chunk, their section, and how many of them are no padding."""
        prefill, total = rows.num_prefill, len(rows.token_ids)
        sections = ((True, 0, prefill, self.chunk_rows), (False, prefill, total, _DECODE_CHUNK_ROWS))
        for (is_prefill, first, end, size), padding in zip(sections, rows.padding, strict=True):
            for start in range(first, end, size):
                stop = min(start + size, end)
                yield slice(start, stop), is_prefill, min(stop, end - padding) - start

    def _keep_wanted(
        self, chunks: list[_Chunk], attended: torch.Tensor, rows: StepRows
    ) -> tuple[list[_Chunk], torch.Tensor]:
        """In the last layer only prompt rows that are asked for go on, packed anew; generated rows all do."""
        prefill = [chunk for chunk in chunks if chunk.prefill]
        if not prefill:
            return chunks, attended
        wanted = rows.wanted[rows.wanted < rows.num_prefill]
        index = F.pad(wanted, (0, -len(wanted) % self.prefill_unit))
        hidden = torch.cat([chunk.hidden for chunk in prefill])[index]
        shift = len(index) - rows.num_prefill
        kept = [
            _Chunk(slice(start, start + len(part)), True, part, min(len(part), len(wanted) - start))
            for start in range(0, len(index), self.chunk_rows)
            for part in [hidden[start : start + self.chunk_rows]]
        ]
        for chunk in chunks[len(prefill) :]:
            moved = slice(chunk.rows.start + shift, chunk.rows.stop + shift)
            kept.append(_Chunk(moved, False, chunk.hidden, chunk.count))
        return kept, torch.cat([attended[index], attended[rows.num_prefill :]])

    def _collect_wanted(self, chunks: list[_Chunk], rows: StepRows) -> torch.Tensor:
        """`wanted` rows after `_keep_wanted` has moved them: prompt rows lead, generated rows follow their padding."""
        if not len(rows.wanted):
            return self.embedding.new_empty(0, self.spec.hidden)
        count = int((rows.wanted < rows.num_prefill).sum())
        kept = sum(len(chunk.hidden) for chunk in chunks if chunk.prefill)
        moved = torch.cat(
            [torch.arange(count, device=rows.wanted.device), rows.wanted[count:] - rows.num_prefill + kept]
        )
        return torch.cat([chunk.hidden for chunk in chunks])[moved]

    def _buffer(self, num_rows: int, *shape: int) -> torch.Tensor:
        """A buffer of rows of `shape`, kept over layers and steps."""
        if shape not in self._kept or len(self._kept[shape]) < num_rows:
            self._kept[shape] = self.embedding.new_zeros(num_rows, *shape)
        return self._kept[shape][:num_rows]


# ------------------------------------------------------------------------------------------------- loading


def load_decoder(loader: Loader, ropes: dict[str | None, RopeTable]) -> Decoder:
    """Read and pack this rank's weights; each tensor is packed and dropped before the next layer is read.

    Raises:
        ConfigError: a tensor is missing or has an unexpected shape.
    """
    spec, checkpoint, dtype, device = loader.spec, loader.checkpoint, loader.dtype, loader.device
    parallel = loader.parallel
    layers = [
        load_layer(loader, f"model.layers.{number}.", experts, net)
        for number, (experts, net) in enumerate(zip(spec.experts, spec.recurrent or [None] * spec.layers, strict=True))
    ]
    name, shape, share = "model.embed_tokens.weight", (spec.vocab, spec.hidden), parallel.vocab_part(spec.vocab)
    head_name = name if spec.tied else "lm_head.weight"
    head_weight = checkpoint.tensor(head_name, shape, dtype, rows=share).to(device)
    # Logits in fp32, not rounded to 16 bits: near ties need not be computed again.
    out = torch.float32 if loader.kernels is not None else None
    head = Linear(head_weight, kernels=loader.kernels, out_dtype=out)
    # A tied head is packed, which makes it 1.6 times faster at decode; the embedding is then read from a mapping of the
    # file, where a step touches a few rows and the page cache may drop the rest: memory holds the matrix once.
    read = checkpoint.mapped if spec.tied else checkpoint.tensor
    embedding = read(name, shape, dtype, rows=share)
    on_cpu = device.type == "cpu"
    return Decoder(
        spec=spec.share(parallel.size),
        parallel=parallel,
        embedding=embedding.to(device) if spec.tied else embedding.clone().to(device),
        layers=layers,
        final_norm=loader.norm("model.norm.weight"),
        head=head,
        head_rows=checkpoint.mapped(head_name, shape, dtype, rows=share) if on_cpu else head_weight,
        ropes=ropes,
        kernels=loader.kernels,
    )


def load_layer(loader: Loader, prefix: str, experts: MoeSpec | None, net: RecurrentSpec | None = None) -> Layer:
    """The layer whose tensors begin with `prefix`; `net`: its gated delta net. Raises ConfigError as `load_decoder`."""
    post_norms = loader.spec.post_norms
    return Layer(
        input_norm=loader.norm(f"{prefix}input_layernorm.weight"),
        post_attention_norm=loader.norm(f"{prefix}post_attention_layernorm.weight"),
        attention=load_gated_delta(loader, prefix, net) if net else _load_attention(loader, prefix),
        mlp=load_experts(loader, prefix, experts) if experts else load_mlp(loader, prefix),
        before_mlp_norm=loader.norm(f"{prefix}pre_feedforward_layernorm.weight") if post_norms else None,
        after_mlp_norm=loader.norm(f"{prefix}post_feedforward_layernorm.weight") if post_norms else None,
    )


def _load_attention(loader: Loader, prefix: str) -> AttentionPart:
    latent = loader.spec.latent
    return load_latent_attention(loader, prefix, latent) if latent else load_self_attention(loader, prefix)
