"""The sequences of a Forward as simulated ranks take them, and what is drawn from them."""

from __future__ import annotations

from typing import NamedTuple

from xllm_hier.hashing import HASH_BYTES
from xllm_hier.plans import Forward, StateMoves
from xllm_hier.request_messages import SamplingSpec

from .contents import POISON, next_token


class Moves(NamedTuple):
    """Where the state of a row comes from, and {tokens: block} it is saved to."""

    source: int
    saved: dict[int, int]


class Row(NamedTuple):
    """One sequence of a Forward as it was when it was sent."""

    start: int
    tokens: list[int]
    table: list[int]
    path: str
    write_from: int
    sampling: SamplingSpec | None
    prompt_logprobs: int | None
    next_token: int | None
    num_drafts: int
    draft_from: int | None
    num_proposals: int
    window: list[int]
    moves: Moves | None
    is_prompt: bool
    ends_prompt: bool

    @property
    def end(self) -> int:
        """Position behind its last token, drafts included."""
        return self.start + len(self.tokens)

    @property
    def given(self) -> list[int]:
        """Its tokens without the drafts."""
        return self.tokens[: len(self.tokens) - self.num_drafts]


def rows_of(plan: Forward, decode_path: str) -> list[Row]:
    count = len(plan.prefill)
    return [
        Row(
            row.start,
            row.token_ids.tolist(),
            row.block_table.tolist(),
            "P" if place < count else decode_path,
            row.write_from,
            row.sampling,
            row.prompt_logprobs,
            row.next_token,
            row.num_drafts,
            row.draft_from,
            row.num_proposals,
            row.window_table.tolist() if row.window_table is not None else [],
            _moves(row.states),
            place < count,
            place < count and row.next_generated,
        )
        for place, row in enumerate([*plan.prefill, *plan.decode])
    ]


def _moves(states: StateMoves | None) -> Moves | None:
    if states is None:
        return None
    positions, blocks = states.positions.tolist(), states.blocks.tolist()
    assert positions == sorted(set(positions)), f"states are saved at {positions}, which do not ascend"
    assert len(set(blocks)) == len(blocks), f"two states go to one block: {blocks}"
    return Moves(states.source, dict(zip(positions, blocks, strict=True)))


class Origin(NamedTuple):
    """Whose a row is: which a worker is not told; in the simulation a block shows it."""

    salt: str
    tokens: list[int]
    prompt_length: int


class Drawn(NamedTuple):
    """The tokens drawn for a row, as many as count, and the target's value that gave the last one."""

    tokens: list[int]
    last: bytes


def drawn_from(row: Row, values: list[bytes]) -> Drawn:
    if row.sampling is None:
        return Drawn([], POISON)
    candidates = values[len(row.given) - 1 :]
    tokens = verified([next_token(value) for value in candidates], row)
    return Drawn(tokens, candidates[len(tokens) - 1])


def verified(drawn: list[int], row: Row) -> list[int]:
    """What was drawn, up to the first token that is not the draft in its place."""
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    for place, draft in enumerate(drafts):
        if drawn[place] != draft:
            return drawn[: place + 1]
    return drawn


def hashes_of(raw: bytes) -> list[bytes]:
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]
