"""The states of a model's recurrent layers: kept in blocks, taken over the rows of a step, saved where they are wanted.

A block holds the state of one sequence after a number of its tokens: of each layer the heads' matrices, in fp32, and
the last inputs of the convolution. Nothing else is carried from token to token, so to go on from a block is to go on.

Bits do not depend on chunking, batch or restored states:

- prompt rows run in cells of `scan_tokens` tokens on the absolute grid of the sequence, the last one filled up with
  tokens that change nothing; every cell is one computation of one shape;
- a generated row runs alone.

    positions     0          64         128        192
    prompt span   |          |start     |     stop |         a state can be saved at 128 and at stop
    cells         |          |----------|-----00000|
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...block import TensorSpec
from ...errors import InvariantError
from ...models.delta_rule import DeltaWeights, Mixed, advance_cell, advance_token, convolve, shares_and_logs
from ...models.families import RecurrentSpec


@dataclass(frozen=True)
class StateSpan:
    """Rows row .. row + count of one step are the tokens start .. start + count of one sequence.

    `source`: the block that holds the state before `start`, -1: the state of no tokens (start 0). `saved`: the state
    after `position` tokens of the sequence goes to `block`, for each (position, block), ascending. A block that is the
    source too is read first; no other source is written, and no span reads what another one of its step saves.
    """

    row: int
    count: int
    start: int
    source: int
    saved: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Run:
    """Rows that are one computation; then the state goes to `block` (-1: nowhere)."""

    rows: slice
    block: int


@dataclass(frozen=True)
class _Work:
    """The work of one sequence in one layer."""

    source: int
    runs: list[_Run]


@dataclass(frozen=True)
class _Blocks:
    """One layer's blocks: `states` fp32 [num_blocks, value_heads, key_dim, value_dim], and the last `inputs`."""

    states: torch.Tensor
    inputs: torch.Tensor


class _Inputs:
    """Kept buffers of what `tokens` tokens bring to the recurrence, in fp32, and the inputs before them."""

    def __init__(self, spec: RecurrentSpec, tokens: int, device: torch.device) -> None:
        self._channels, self._lead = spec.channels, spec.conv_size - 1
        self._mixing = torch.zeros(self._lead + tokens, spec.channels, device=device)
        self._gates = torch.zeros(tokens, 2 * spec.value_heads, device=device)
        self.before = self._mixing[: self._lead]

    def take(self, rows: torch.Tensor, weights: DeltaWeights) -> Mixed:
        """The inputs of `rows`, filled up with tokens that change nothing."""
        count, lead = len(rows), self._lead
        self._mixing[lead : lead + count] = rows[:, : self._channels]
        self._gates[:count] = rows[:, self._channels :]
        self._mixing[lead + count :].zero_()  # a share of 0 does not undo what is no number
        channels = convolve(self._mixing, weights.conv)
        shares, logs = shares_and_logs(self._gates, weights)
        shares[:, count:].zero_()
        logs[:, count:].zero_()
        self.before.copy_(self._mixing[count : count + lead].clone())
        return Mixed(channels, shares, logs)


class RecurrentStates:
    """States of the model's recurrent layers, for `spec`'s heads of this rank; implements models.decoder.Recurrence.

    `layers` are the model's numbers of these layers. `dtype` is the model's.
    """

    def __init__(
        self,
        *,
        spec: RecurrentSpec,
        layers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        scan_tokens: int,
    ) -> None:
        self.spec, self.layers, self.dtype, self.device = spec, tuple(layers), dtype, device
        self.scan_tokens = scan_tokens
        kind = str(dtype).removeprefix("torch.")
        self.tensors: tuple[TensorSpec, ...] = (
            TensorSpec("state", "float32", (spec.value_heads, spec.key_dim, spec.value_dim)),
            TensorSpec("conv", kind, (spec.conv_size - 1, spec.channels)),
        )
        self._blocks: dict[int, _Blocks] = {}
        self._state, self._nothing = (torch.zeros(self.tensors[0].shape, device=device) for _ in range(2))
        self._cell, self._token = (_Inputs(spec, tokens, device) for tokens in (scan_tokens, 1))
        self._output = self._new_output(0)
        self._rows = 0
        self._prefill: list[_Work] = []
        self._decode: list[_Work] = []

    def bind(self, caches: Sequence[torch.Tensor]) -> None:
        """Use these caches, one per layer: uint8 [num_blocks, layer_bytes], `tensors` one behind the other."""
        self._blocks = {layer: self._views(cache) for layer, cache in zip(self.layers, caches, strict=True)}

    def prepare(self, prefill: Sequence[StateSpan], decode: Sequence[StateSpan], num_rows: int) -> None:
        """Lay out one step of `num_rows` rows (padding included); rows that belong to no span keep finite output.

        Raises:
            InvariantError: a prompt span begins beside the grid, or a state is asked for where none will be.
        """
        self._prefill = [_work(span, self.scan_tokens) for span in prefill]
        self._decode = [_work(span, 1) for span in decode]
        self._rows = num_rows
        if len(self._output) < num_rows:
            self._output = self._new_output(num_rows)

    def __call__(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        """Output [rows, value_heads * value_dim] for projected rows, in a buffer that the next call overwrites."""
        blocks = self._blocks[layer]
        for work in self._prefill:
            self._scan(blocks, work, projected, weights)
        for work in self._decode:
            self._walk(blocks, work, projected, weights)
        return self._output[: self._rows].flatten(1)

    def _scan(self, blocks: _Blocks, work: _Work, projected: torch.Tensor, weights: DeltaWeights) -> None:
        self._state.copy_(self._begin(blocks, work.source, self._cell))
        for run in work.runs:
            mixed = self._cell.take(projected[run.rows], weights)
            values = advance_cell(self.spec, self._state, mixed)
            self._output[run.rows] = values[: run.rows.stop - run.rows.start]
            self._save(blocks, run.block, self._cell)

    def _walk(self, blocks: _Blocks, work: _Work, projected: torch.Tensor, weights: DeltaWeights) -> None:
        state = self._begin(blocks, work.source, self._token)
        for run in work.runs:
            mixed = self._token.take(projected[run.rows], weights)
            self._output[run.rows] = advance_token(self.spec, state, self._state, mixed)
            self._save(blocks, run.block, self._token)
            state = self._state

    def _begin(self, blocks: _Blocks, source: int, inputs: _Inputs) -> torch.Tensor:
        """The state to begin with, to be read only; the inputs before go to their place."""
        if source < 0:
            inputs.before.zero_()
            return self._nothing
        inputs.before.copy_(blocks.inputs[source])
        return blocks.states[source]

    def _save(self, blocks: _Blocks, block: int, inputs: _Inputs) -> None:
        if block >= 0:
            blocks.states[block] = self._state
            blocks.inputs[block] = inputs.before

    def _views(self, cache: torch.Tensor) -> _Blocks:
        state, conv = self.tensors
        states = cache[:, : state.nbytes].view(torch.float32)
        inputs = cache[:, state.nbytes : state.nbytes + conv.nbytes].view(self.dtype)
        return _Blocks(states.view(len(cache), *state.shape), inputs.view(len(cache), *conv.shape))

    def _new_output(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, self.spec.value_heads, self.spec.value_dim, dtype=self.dtype, device=self.device)


def _work(span: StateSpan, step: int) -> _Work:
    """The runs of a span, which end where the tokens divide by `step`, and at its end."""
    stop, wanted = span.start + span.count, dict(span.saved)
    ends = [*range(span.start + step, stop, step), stop]
    _check(span, step, ends)
    shift = span.row - span.start
    pairs = itertools.pairwise([span.start, *ends])
    return _Work(span.source, [_Run(slice(a + shift, b + shift), wanted.get(b, -1)) for a, b in pairs])


def _check(span: StateSpan, step: int, ends: list[int]) -> None:
    positions = [position for position, _ in span.saved]
    if span.count < 1 or span.start % step:
        raise InvariantError(f"{span} does not begin a cell of {step} tokens")
    if (span.source < 0) != (span.start == 0):
        raise InvariantError(f"{span}: the state before token 0, and no other, has no block")
    if not set(ends).issuperset(positions) or any(a >= b for a, b in itertools.pairwise(positions)):
        raise InvariantError(f"{span} has no states to save there, or not in that order")
