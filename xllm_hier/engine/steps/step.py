"""A step under way: its plan, and the sequences that the rows of the plan belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ints import Ints, ints
from ...plans import Forward, ForwardOutput, SequenceRows
from ...request_messages import SamplingSpec, TokenLogprob
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence

Drawn = list[tuple[int, TokenLogprob | None]]


class StepResult(NamedTuple):
    """The outcome of one sequence's rows: the tokens drawn for it, drafts that a model made behind them, and the log
    probabilities of its prompt where they were asked for."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int
    drawn: Drawn
    drafts: Ints | None
    prompt_logprobs: list[TokenLogprob] | None


class Advanced(NamedTuple):
    """A step has brought this sequence forward; `drawn`: it has a new token."""

    sequence: Sequence
    drawn: bool


@dataclass(eq=False)
class Step:
    """A Forward under way. `prefill` and `decode` are the sequences of the plan's rows, in its order, each with the
    number of its tokens that count as computed afterwards.

    `audit`: the plan's one row belongs to no sequence.
    """

    plan: Forward
    audit: bool = False
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    decode: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[Sequence, int]]:
        """All sequences of the step with their counts, in the order of the plan's rows."""
        return [*self.prefill, *self.decode]

    def add(
        self, manager: HierarchyBlockManagerPool, sequence: Sequence, count: int, drafts: list[int], num_proposals: int
    ) -> None:
        """Add the next `count` tokens of a sequence and `drafts` behind them; `num_proposals` drafts are to be made for
        the step after this one."""
        end, known, request = sequence.num_computed + count, sequence.tokens, sequence.request
        row = _row(
            manager,
            sequence,
            end,
            known[end] if end < len(known) else None,
            drafts,
            sampling=request.sampling if end == len(known) else None,
            num_proposals=num_proposals,
            prompt_logprobs=request.prompt_logprobs if sequence.in_prefill and not sequence.num_generated else None,
            next_generated=end >= sequence.prompt_length,
        )
        rows, members = (self.plan.prefill, self.prefill) if sequence.in_prefill else (self.plan.decode, self.decode)
        rows.append(row)
        members.append((sequence, count))

    def add_recomputed(self, manager: HierarchyBlockManagerPool, sequence: Sequence, end: int) -> None:
        """Add generated tokens of a finished sequence, up to `end`, to be computed as those of a prompt."""
        next_token = sequence.tokens[end] if end < sequence.canonical_end else None
        self.prefill.append((sequence, end - sequence.num_computed))
        self.plan.prefill.append(_row(manager, sequence, end, next_token, []))

    def results(self, output: ForwardOutput) -> Iterator[StepResult]:
        """The outcome of each row, in plan order."""
        drawn = _drawn(output)
        proposals = iter(output.proposals)
        prompt_logprobs = iter(output.prompt_logprobs)
        for row, (sequence, count) in zip([*self.plan.prefill, *self.plan.decode], self.rows, strict=True):
            sampled = row.sampling is not None
            wanted = row.prompt_logprobs is not None
            yield StepResult(
                sequence,
                count,
                row.num_drafts,
                next(drawn) if sampled else [],
                next(proposals, None) if sampled else None,
                next(prompt_logprobs) if wanted else None,
            )


def _row(
    manager: HierarchyBlockManagerPool,
    sequence: Sequence,
    end: int,
    next_token: int | None,
    drafts: list[int],
    *,
    sampling: SamplingSpec | None = None,
    num_proposals: int = 0,
    prompt_logprobs: int | None = None,
    next_generated: bool = False,
) -> SequenceRows:
    """The plan of a sequence's tokens up to `end` and of `drafts` behind them, with its blocks of all types."""
    start = sequence.num_computed
    return SequenceRows(
        start,
        ints([*sequence.tokens[start:end], *drafts]),
        sequence.block_table(),
        sequence.write_from,
        sampling,
        sequence.num_generated,
        len(drafts),
        prompt_logprobs,
        next_token,
        next_generated,
        sequence.draft_from if manager.settings.drafting.by_model else None,
        num_proposals,
        sequence.window_table(),
        manager.move_states(sequence, end, len(drafts)),
    )


def _drawn(output: ForwardOutput) -> Iterator[Drawn]:
    """The tokens of each sequence that was sampled from, in plan order."""
    pairs = list(zip(output.token_ids.tolist(), output.logprobs, strict=True))
    counts = output.num_tokens.tolist() if output.num_tokens is not None else [1] * len(pairs)
    start = 0
    for count in counts:
        yield pairs[start : start + count]
        start += count
