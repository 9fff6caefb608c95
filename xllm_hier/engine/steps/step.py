"""A step under way: its plan, and the sequences that the rows of the plan belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...plans import DecodeSequence, Forward, ForwardOutput, Ints, PrefillSequence, TokenLogprob, ints
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence

Drawn = list[tuple[int, TokenLogprob | None]]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one sequence's rows: the tokens drawn for it, drafts that a model made behind them, and the log
    probabilities of its prompt where they were asked for."""

    sequence: Sequence
    count: int
    num_drafts: int
    drawn: Drawn
    drafts: Ints | None
    prompt_logprobs: list[TokenLogprob] | None


@dataclass(frozen=True)
class Advanced:
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
        start, request = sequence.num_computed, sequence.request
        end = start + count
        tokens = ints([*sequence.tokens[start:end], *drafts])
        sampling = request.sampling if end == len(sequence.tokens) else None
        table, draw, write_from = sequence.block_table(), sequence.num_generated, sequence.write_from
        next_token = sequence.tokens[end] if end < len(sequence.tokens) else -1
        more = _fields(manager, sequence, end, next_token, len(drafts)) | {"num_proposals": num_proposals}
        if not sequence.in_prefill:
            row = DecodeSequence(start, tokens, table, sampling, draw, len(drafts), write_from, **more)
            self.plan.decode.append(row)
            self.decode.append((sequence, count))
            return
        wants = request.prompt_logprobs if not sequence.num_generated else None
        more["next_generated"] = end >= sequence.prompt_length
        self.plan.prefill.append(PrefillSequence(start, tokens, table, write_from, sampling, draw, wants, **more))
        self.prefill.append((sequence, count))

    def add_recomputed(self, manager: HierarchyBlockManagerPool, sequence: Sequence, end: int) -> None:
        """Add generated tokens of a finished sequence, up to `end`, to be computed as those of a prompt."""
        start = sequence.num_computed
        tokens = ints(sequence.tokens[start:end])
        more = _fields(manager, sequence, end, sequence.tokens[end] if end < sequence.canonical_end else -1)
        row = PrefillSequence(start, tokens, sequence.block_table(), sequence.write_from, **more)
        self.plan.prefill.append(row)
        self.prefill.append((sequence, end - start))

    def results(self, output: ForwardOutput) -> Iterator[StepResult]:
        """The outcome of each row, in plan order."""
        drawn = _drawn(output)
        proposals = iter(output.proposals)
        prompt_logprobs = iter(output.prompt_logprobs)
        rows: list[PrefillSequence | DecodeSequence] = [*self.plan.prefill, *self.plan.decode]
        for row, (sequence, count) in zip(rows, self.rows, strict=True):
            sampled = row.sampling is not None
            wanted = isinstance(row, PrefillSequence) and row.prompt_logprobs is not None
            yield StepResult(
                sequence,
                count,
                getattr(row, "num_drafts", 0),
                next(drawn) if sampled else [],
                next(proposals, None) if sampled else None,
                next(prompt_logprobs) if wanted else None,
            )


def _fields(
    manager: HierarchyBlockManagerPool, sequence: Sequence, end: int, next_token: int, num_drafts: int = 0
) -> dict[str, Any]:
    """The fields of a row beside its tokens and KV blocks: the token after them, where the draft model goes on, and
    the blocks of other types."""
    return {
        "next_token": next_token,
        "draft_from": sequence.draft_from if manager.settings.drafting.by_model else -1,
        "window_table": sequence.window_table(),
        "states": manager.move_states(sequence, end, num_drafts),
    }


def _drawn(output: ForwardOutput) -> Iterator[Drawn]:
    """The tokens of each sequence that was sampled from, in plan order."""
    pairs = list(zip(output.token_ids.tolist(), output.logprobs, strict=True))
    counts = output.num_tokens.tolist() if output.num_tokens is not None else [1] * len(pairs)
    start = 0
    for count in counts:
        yield pairs[start : start + count]
        start += count
