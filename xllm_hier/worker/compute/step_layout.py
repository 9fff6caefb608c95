"""The rows of one step: where each sequence of a plan lies in the model's input, and which rows are sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...models.decoder import StepRows
from ...plans import Forward, SequenceRows
from ...request_messages import SamplingSpec
from .attention import Span
from .recurrent_state import StateSpan


@dataclass(frozen=True)
class StepLayout:
    """A plan as the model computes it: `spans[i]` are the rows of `sequences[i]`, prefill sequences first.

    `place` has, for each row whose final hidden state is asked for, its index among those.
    """

    sequences: list[SequenceRows]
    num_prefill: int
    spans: list[Span]
    rows: StepRows
    place: dict[int, int]

    @classmethod
    def of(
        cls, plan: Forward, *, units: tuple[int, int], device: torch.device, windows_apart: bool, all_rows: bool
    ) -> StepLayout:
        """All prompt rows, padding to their unit, all generated rows, padding to theirs.

        `units` are those of prefill and decode; where both are 1, all rows go through the model as one section.
        `windows_apart`: windows have tables of their own. `all_rows`: all final hidden states are asked for.
        """
        prefill_unit, decode_unit = units
        spans: list[Span] = []
        row = 0
        for sequence in plan.prefill:
            wants_all = all_rows or sequence.prompt_logprobs is not None
            spans.append(_span(sequence, row, windows_apart=windows_apart, all_rows=wants_all))
            row += len(sequence.token_ids)
        num_prefill = -(-row // prefill_unit) * prefill_unit
        prefill_padding, row = num_prefill - row, num_prefill
        for sequence in plan.decode:
            spans.append(_span(sequence, row, windows_apart=windows_apart, all_rows=all_rows))
            row += len(sequence.token_ids)
        total = num_prefill - (num_prefill - row) // decode_unit * decode_unit
        sequences = [*plan.prefill, *plan.decode]
        token_ids, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        wanted: list[int] = []
        for sequence, span in zip(sequences, spans, strict=True):
            count = len(sequence.token_ids)
            token_ids[span.row : span.row + count] = sequence.token_ids
            positions[span.row : span.row + count] = np.arange(span.start, span.stop)
            wanted += range(span.row + span.wanted_from - span.start, span.row + count)
        tensors = (torch.from_numpy(token_ids), torch.from_numpy(positions), torch.tensor(wanted, dtype=torch.int64))
        ids, places, indices = (tensor.to(device) for tensor in tensors)
        num_rows = total if units == (1, 1) else num_prefill
        rows = StepRows(ids, places, num_rows, indices, (prefill_padding, total - row))
        return cls(sequences, len(plan.prefill), spans, rows, {row: index for index, row in enumerate(wanted)})

    @property
    def state_spans(self) -> list[StateSpan]:
        """The moves of recurrent states, of each sequence in order."""
        return [_state_span(sequence, span) for sequence, span in zip(self.sequences, self.spans, strict=True)]

    def hidden_rows(self, index: int) -> slice:
        """The final hidden states of sequence `index`, all of whose rows are asked for."""
        span = self.spans[index]
        start = self.place[span.row]
        return slice(start, start + span.stop - span.start)

    def draws(self) -> tuple[list[SamplingSpec], list[int], list[int]]:
        """For each token to be drawn how, which draw it is, and from which of the final hidden states."""
        specs: list[SamplingSpec] = []
        numbers: list[int] = []
        indices: list[int] = []
        for sequence, span in zip(self.sequences, self.spans, strict=True):
            if sequence.sampling is None:
                continue
            first = span.row + span.stop - span.start - 1 - sequence.num_drafts
            for number in range(sequence.num_drafts + 1):
                specs.append(sequence.sampling)
                numbers.append(sequence.draw + number)
                indices.append(self.place[first + number])
        return specs, numbers, indices

    def scattered(self, given: torch.Tensor) -> torch.Tensor:
        """One row of `given` for each of the plan's tokens, at that token's row; rows of padding are zero."""
        spans = self.spans
        places = np.concatenate([np.arange(span.row, span.row + span.stop - span.start) for span in spans])
        padded = given.new_zeros(len(self.rows.token_ids), given.shape[1])
        padded[torch.from_numpy(places).to(given.device)] = given
        return padded


def _span(sequence: SequenceRows, row: int, *, windows_apart: bool, all_rows: bool) -> Span:
    start, stop = sequence.start, sequence.start + len(sequence.token_ids)
    num_drawn = sequence.num_drafts + 1 if sequence.sampling is not None else 0
    wanted_from = start if all_rows else stop - num_drawn
    window_table = sequence.window_table if windows_apart else None
    return Span(start, stop, row, sequence.block_table, sequence.write_from, wanted_from, window_table)


def _state_span(sequence: SequenceRows, span: Span) -> StateSpan:
    moves = sequence.states
    assert moves is not None, "a sequence of a recurrent model needs its state"
    saved = tuple(zip(moves.positions.tolist(), moves.blocks.tolist(), strict=True))
    return StateSpan(span.row, span.stop - span.start, span.start, moves.source, saved)


def sampled(sequences: Sequence[SequenceRows]) -> list[SequenceRows]:
    """The sequences of which a token is drawn."""
    return [sequence for sequence in sequences if sequence.sampling is not None]
