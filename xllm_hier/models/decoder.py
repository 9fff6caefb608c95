"""Our own decoder: one compact layer for Llama, Mistral, Qwen2, Qwen3 and Gemma 3 (text).

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

from .families import DecoderSpec
from .linear import Fused, Linear, TileSizes
from .rope import RopeTable, rotate
from .weights import Checkpoint


class Attention(Protocol):
    """What a model calls in each layer: writes K and V, returns [rows, heads * head_dim]."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, wanted_only: bool = False
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: int64 `token_ids` and `positions` [rows], padding included.

    The first `num_prefill` rows are prompt rows, the rest generated ones. `wanted` are the rows whose final hidden
    states are asked for, ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_prefill: int
    wanted: torch.Tensor


_DECODE_CHUNK_ROWS = 256  # a multiple of every decode tile
_SHARP_TOKENS = 16

WaitForLayer = Callable[[int], None]


@dataclass
class _Chunk:
    """Some rows of one section and their hidden states, which move through the layers."""

    rows: slice
    prefill: bool
    hidden: torch.Tensor


@dataclass
class _Layer:
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear
    qk_norm: torch.Tensor | None = None
    before_mlp_norm: torch.Tensor | None = None
    after_mlp_norm: torch.Tensor | None = None

    def linears(self) -> list[Linear]:
        return [self.qkv, self.output, self.gate, self.up, self.down]


@dataclass
class Decoder:
    """A loaded model; `prefill_unit` and `decode_unit` are what the two sections are padded to.

    `chunk_rows` bounds how many prompt rows go through a layer's row-wise part at once.
    """

    spec: DecoderSpec
    embedding: torch.Tensor
    layers: list[_Layer]
    final_norm: torch.Tensor
    head: Linear
    head_rows: torch.Tensor  # the head's weight [vocab, hidden], mapped from the file: a step touches a few rows
    ropes: dict[str | None, RopeTable]
    prefill_unit: int = 1
    decode_unit: int = 1
    chunk_rows: int = 1024
    _qkv: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def linears(self) -> list[Linear]:
        """All linears of the layers; the head, which only sees decode tiles, is not among them."""
        return [linear for layer in self.layers for linear in layer.linears()]

    def forward(self, rows: StepRows, attention: Attention, wait_for_layer: WaitForLayer) -> torch.Tensor:
        """Hidden states [len(wanted), hidden] before the last norm.

        `wait_for_layer(i)` is called before layer i touches the cache.
        """
        spec = self.spec
        hidden = F.embedding(rows.token_ids, self.embedding)
        if spec.embed_scale != 1.0:
            hidden = hidden * torch.tensor(spec.embed_scale, dtype=hidden.dtype)
        chunks = [_Chunk(part, prefill, hidden[part]) for part, prefill in self._parts(rows)]
        angles = {kind: table.at(rows.positions) for kind, table in self.ropes.items()}
        qkv = self._buffer(len(rows.token_ids))
        q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        for number, layer in enumerate(self.layers):
            cos, sin = angles[spec.rope_types[number]]
            for chunk in chunks:
                self._project(layer, chunk, cos[chunk.rows], sin[chunk.rows], qkv[chunk.rows])
            wait_for_layer(number)
            last = number == spec.layers - 1
            attended = attention(number, q, k, v, spec.scale, wanted_only=last)
            if last:
                chunks, attended = self._keep_wanted(chunks, attended, rows)
            for chunk in chunks:
                chunk.hidden = self._finish(layer, chunk, attended[chunk.rows])
        return self._collect_wanted(chunks, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocab] of final hidden states [rows, hidden]; rows run in the head's decode tiles."""
        count = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, -count % self.decode_unit))
        normed = self._norm(padded, self.final_norm)
        logits = self.head(normed, self.head.decode)[:count].float()
        if self.head_rows.dtype is not torch.float32:
            self._sharpen(logits, normed)
        return logits

    def _sharpen(self, logits: torch.Tensor, normed: torch.Tensor) -> None:
        """Compute the most likely tokens' logits again in fp32: a 16-bit product leaves near ties to chance.

        bfloat16 has steps of 0.125 at 20, and the best two tokens are often closer. Row by row, in one fixed shape.
        """
        for row, ids in enumerate(logits.topk(min(_SHARP_TOKENS, logits.shape[1])).indices):
            logits[row, ids] = torch.mv(self.head_rows[ids].float(), normed[row].float())

    # --------------------------------------------------------------------------------------- row-wise parts

    def _project(
        self, layer: _Layer, chunk: _Chunk, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Rotated queries and keys, and values, of a chunk, into `target` [rows, heads + 2 kv_heads, head_dim]."""
        spec = self.spec
        qkv = layer.qkv(self._norm(chunk.hidden, layer.input_norm), _tiles(layer.qkv, chunk))
        qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        turning = spec.heads + spec.kv_heads
        queries_keys = qkv[:, :turning]
        if layer.qk_norm is not None:
            queries_keys = self._norm(queries_keys, layer.qk_norm)
        rotate(queries_keys, cos, sin, target[:, :turning])
        target[:, turning:] = qkv[:, turning:]

    def _finish(self, layer: _Layer, chunk: _Chunk, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention; the sums with the residual run inside the linears unless a norm lies between."""
        hidden = chunk.hidden
        if layer.before_mlp_norm is None or layer.after_mlp_norm is None:
            hidden = layer.output(attended, _tiles(layer.output, chunk), hidden)
            normed = self._norm(hidden, layer.post_attention_norm)
            return self._mlp(layer, chunk, normed, hidden)
        projected = layer.output(attended, _tiles(layer.output, chunk))
        hidden = hidden + self._norm(projected, layer.post_attention_norm)
        normed = self._norm(hidden, layer.before_mlp_norm)
        return hidden + self._norm(self._mlp(layer, chunk, normed, None), layer.after_mlp_norm)

    def _mlp(self, layer: _Layer, chunk: _Chunk, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        gate = layer.gate(x, _tiles(layer.gate, chunk))
        product = layer.up(x, _tiles(layer.up, chunk), gate)
        return layer.down(product, _tiles(layer.down, chunk), residual)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root mean square norm over the last dimension, in fp32, rounded once; `weight` is fp32."""
        wide = x.float() if x.dtype is not torch.float32 else x.clone()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.mul_(torch.rsqrt(length * length / x.shape[-1] + self.spec.eps)).mul_(weight).to(x.dtype)

    # --------------------------------------------------------------------------------------- rows and chunks

    def _parts(self, rows: StepRows) -> Iterator[tuple[slice, bool]]:
        prefill, total = rows.num_prefill, len(rows.token_ids)
        for start in range(0, prefill, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, prefill)), True
        for start in range(prefill, total, _DECODE_CHUNK_ROWS):
            yield slice(start, min(start + _DECODE_CHUNK_ROWS, total)), False

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
            _Chunk(slice(start, start + len(part)), True, part)
            for start in range(0, len(index), self.chunk_rows)
            for part in [hidden[start : start + self.chunk_rows]]
        ]
        for chunk in chunks[len(prefill) :]:
            kept.append(_Chunk(slice(chunk.rows.start + shift, chunk.rows.stop + shift), False, chunk.hidden))
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

    def _buffer(self, num_rows: int) -> torch.Tensor:
        if len(self._qkv) < num_rows:
            spec = self.spec
            self._qkv = self.embedding.new_zeros(num_rows, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        return self._qkv[:num_rows]


def _tiles(linear: Linear, chunk: _Chunk) -> TileSizes | None:
    return linear.prefill if chunk.prefill else linear.decode


# ------------------------------------------------------------------------------------------------- loading


def load_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    ropes: dict[str | None, RopeTable],
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Read and pack the weights; each tensor is packed and dropped before the next layer is read.

    Raises:
        ConfigError: a tensor is missing or has an unexpected shape.
    """
    layers = [_load_layer(spec, checkpoint, f"model.layers.{number}.", dtype, device) for number in range(spec.layers)]
    name, shape = "model.embed_tokens.weight", (spec.vocab, spec.hidden)
    head_name = name if spec.tied else "lm_head.weight"
    head_weight = checkpoint.tensor(head_name, shape, dtype).to(device)
    head = Linear(head_weight)
    # A tied head is packed, which makes it 1.6 times faster at decode; the embedding is then read from a mapping of the
    # file, where a step touches a few rows and the page cache may drop the rest: memory holds the matrix once.
    embedding = checkpoint.mapped(name, shape, dtype) if spec.tied else checkpoint.tensor(name, shape, dtype).clone()
    return Decoder(
        spec=spec,
        embedding=embedding.to(device),
        layers=layers,
        final_norm=_norm_weight(spec, checkpoint, "model.norm.weight", device),
        head=head,
        head_rows=checkpoint.mapped(head_name, shape, dtype) if device.type == "cpu" else head_weight,
        ropes=ropes,
    )


def _load_layer(
    spec: DecoderSpec, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device
) -> _Layer:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def linear(names: dict[str, int], inputs: int, bias: bool, fused: Fused = Fused.NONE) -> Linear:
        weights = [checkpoint.tensor(f"{prefix}{name}.weight", (rows, inputs), dtype) for name, rows in names.items()]
        biases = [checkpoint.tensor(f"{prefix}{name}.bias", (rows,), dtype) for name, rows in names.items() if bias]
        return Linear(torch.cat(weights).to(device), torch.cat(biases).to(device) if bias else None, fused)

    def norm(name: str) -> torch.Tensor:
        return _norm_weight(spec, checkpoint, f"{prefix}{name}.weight", device)

    added = Fused.NONE if spec.post_norms else Fused.ADD
    return _Layer(
        input_norm=norm("input_layernorm"),
        post_attention_norm=norm("post_attention_layernorm"),
        qkv=linear({"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, spec.hidden, spec.qkv_bias),
        output=linear({"self_attn.o_proj": spec.hidden}, q, spec.output_bias, added),
        gate=linear({"mlp.gate_proj": spec.ffn}, spec.hidden, spec.mlp_bias, spec.activation),
        up=linear({"mlp.up_proj": spec.ffn}, spec.hidden, spec.mlp_bias, Fused.MUL),
        down=linear({"mlp.down_proj": spec.hidden}, spec.ffn, spec.mlp_bias, added),
        qk_norm=_query_key_norm(spec, checkpoint, prefix, device) if spec.qk_norm else None,
        before_mlp_norm=norm("pre_feedforward_layernorm") if spec.post_norms else None,
        after_mlp_norm=norm("post_feedforward_layernorm") if spec.post_norms else None,
    )


def _norm_weight(spec: DecoderSpec, checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    return (checkpoint.tensor(name, (spec.hidden,), torch.float32) + spec.norm_offset).to(device)


def _query_key_norm(spec: DecoderSpec, checkpoint: Checkpoint, prefix: str, device: torch.device) -> torch.Tensor:
    """The two head norms as one weight [heads + kv_heads, head_dim], so that queries and keys are normed in one go."""
    q, k = (
        checkpoint.tensor(f"{prefix}self_attn.{name}_norm.weight", (spec.head_dim,), torch.float32) + spec.norm_offset
        for name in ("q", "k")
    )
    return torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)]).to(device)
