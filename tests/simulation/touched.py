"""Which blocks a row of a step reads and writes, part by part; and that its windows and states are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xllm_hier.block import BlockType
from xllm_hier.plans import HOLE

from .contents import DRAFT, HEAD, POISON, WINDOW, Contents, Part
from .domains import Domain
from .rows import Origin, Row

Block = tuple[BlockType, int]


class Touch(NamedTuple):
    """Device blocks of one part."""

    reads: list[int]
    writes: list[int]


def touched(row: Row, contents: Contents, window: int) -> dict[Part, Touch]:
    """What a row touches while it is computed; `window`: how many tokens a sliding window has."""
    return {part: _touch(row, part, contents, window) for part in contents.parts}


def _touch(row: Row, part: Part, contents: Contents, window: int) -> Touch:
    size = contents.block_size
    if part.type is BlockType.LINEAR:
        assert row.moves is not None, "a row of a recurrent model has no state"
        reads = row.moves.source != HOLE and (part.role != DRAFT or row.draft_from == row.start)
        return Touch([row.moves.source] if reads else [], list(row.moves.saved.values()))
    first, end = max(row.start, row.write_from), row.end
    if part.role == DRAFT:
        first, end = drafted(row, contents)
        return Touch(_blocks(row.table, 0, first, size), _blocks(row.table, first, end, size))
    if part.type is BlockType.SWA:
        seen = _blocks(row.window, max(0, row.start - window + 1), row.start, size)
        touch = Touch(seen, _blocks(row.window, first, end, size))
        holes = HOLE in (*touch.reads, *touch.writes)
        assert not holes, f"a row from {row.start} on needs what is a hole: {row.window}"
        return touch
    return Touch(_blocks(row.table, 0, row.start, size), _blocks(row.table, first, end, size))


def _blocks(table: Sequence[int], first: int, end: int, size: int) -> list[int]:
    """Of positions first .. end."""
    if first >= end:
        return []
    assert len(table) * size >= end, f"position {end - 1} has no block"
    return list(table[first // size : -(-end // size)])


def first_drafted(contents: Contents) -> int:
    return int(contents.draft == HEAD)


def drafted(row: Row, contents: Contents) -> tuple[int, int]:
    """From where to where the draft may write, if all drafts of the row are accepted; it reads what lies before."""
    if row.draft_from is None:
        return 0, 0
    first = max(row.draft_from, first_drafted(contents))
    known = row.next_token is not None if row.sampling is None else max(1, row.num_proposals)
    return first, min(row.end + known, len(row.table) * contents.block_size)


def depends_on(row: Row) -> set[Block]:
    """Device blocks without which the row is worth nothing."""
    found = {(BlockType.KV, block) for block in row.table}
    found |= {(BlockType.SWA, block) for block in row.window if block != HOLE}
    if row.moves is not None and row.moves.source != HOLE:
        found.add((BlockType.LINEAR, row.moves.source))
    return found


def value_before(row: Row, domain: Domain) -> bytes:
    """What the block of the row's last position but its own holds, without the mark of its type."""
    place, size = row.start - 1, domain.size
    table = row.window if domain.part.type is BlockType.SWA else row.table
    held = domain.device[table[place // size]][place % size]
    return held.removeprefix(WINDOW) if domain.part.type is BlockType.SWA else held


def check_window(row: Row, domain: Domain, last: bytes, contents: Contents, window: int) -> None:
    """All that the row's first token sees through the window is there, and follows from what its `last` value says."""
    expected, size = last, domain.size
    for position in range(row.start - 1, max(0, row.start - window + 1) - 1, -1):
        block = row.window[position // size]
        assert block != HOLE, f"position {row.start} sees position {position}, whose block is a hole"
        assert domain.device[block][position % size] == WINDOW + expected, (
            f"{domain.device_claims.tier}: position {row.start} sees a wrong position {position} in block {block}"
        )
        before = contents.before(expected)
        assert before is not None, f"position {position} holds what no prompt has"
        expected = before


def check_state(row: Row, domain: Domain, origin: Origin, rank: int, contents: Contents) -> None:
    """The row begins with the state of exactly the tokens before it.

    Where decoded blocks count as a prompt's, it may have come back from a prompt that went on from this answer.
    """
    assert row.moves is not None
    source = row.moves.source
    assert (source == HOLE) == (row.start == 0), f"position {row.start} begins with the state of block {source}"
    if source != HOLE:
        (held,) = domain.device[source]
        assert held in states_before(row, origin, rank, contents), (
            f"{domain.device_claims.tier}: block {source} is not the state before position {row.start}"
        )


def states_before(row: Row, origin: Origin, rank: int, contents: Contents) -> list[bytes]:
    """The states that the row may begin with: one, unless decoded blocks count as a prompt's."""
    lengths = [origin.prompt_length]
    if contents.decode_path == "P":
        lengths += range(origin.prompt_length + 1, row.start + 1)
    return [contents.state(origin.tokens[: row.start], length, rank, origin.salt) for length in lengths]


def save_states(row: Row, domain: Domain, before: bytes, contents: Contents, scan: int) -> None:
    """Write the states that are wanted, going on from `before`; `scan`: on whose multiples prompt steps begin, and end
    but for the last."""
    assert row.moves is not None
    if row.is_prompt:
        assert row.start % scan == 0, f"a prompt's step begins at {row.start}, beside the grid of {scan}"
        on_grid = row.end % scan == 0
        assert on_grid or row.ends_prompt, f"a prompt's step ends at {row.end}, beside the grid of {scan}"
    saved = dict(row.moves.saved)
    for position, token in enumerate(row.tokens, row.start + 1):
        if before != POISON:
            before = contents.value(before, token, "P" if row.is_prompt else "D")
        if position in saved:
            assert not row.is_prompt or position % scan == 0 or position == row.end, f"no cell ends at {position}"
            domain.device[saved.pop(position)] = [before]
    assert not saved, f"the states behind {list(saved)} are none of step {row.start}..{row.end}"
