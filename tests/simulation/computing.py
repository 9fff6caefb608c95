"""What one simulated rank computes: the values of a step's rows, after a look at all that they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xllm_hier.block import BlockType

from .contents import DRAFT, HEAD, HIDDEN, POISON, TARGET, VOCABULARY, WINDOW, Contents, Part, next_token, no_state
from .domains import Domain
from .rows import Drawn, Origin, Row
from .touched import check_state, check_window, first_drafted, save_states, states_before, value_before


class Computation:
    """Target and draft of rank `number`, over its device blocks `domains`, of which the first are the target's.

    `window`: tokens that a sliding window has. `scan_tokens`: on whose multiples a recurrent model's prompts are cut.
    """

    def __init__(
        self,
        number: int,
        contents: Contents,
        domains: Mapping[Part, Domain],
        *,
        window: int,
        scan_tokens: int,
        origin_of: Callable[[Row], Origin],
    ) -> None:
        self._number = number
        self._contents = contents
        self._domains = domains
        self._target = domains[contents.parts[0]]
        self._window = window
        self._scan_tokens = scan_tokens
        self._origin_of = origin_of

    @property
    def draft_domain(self) -> Domain | None:
        return self._domains.get(Part(DRAFT, BlockType.KV))

    def last(self, row: Row) -> bytes:
        """The value before the row's first."""
        if row.start:
            return value_before(row, self._target)
        return self._contents.root(self._number, self._origin_of(row).salt)

    def values(self, row: Row, last: bytes) -> list[bytes]:
        values = []
        for token in row.tokens:
            last = self._contents.value(last, token, row.path)
            values.append(last)
        return values

    def compute(self, row: Row, *, spoilt: bool) -> list[bytes]:
        """Write the values of a row, and return them. `spoilt`: from something that is no context."""
        values = self.values(row, POISON if spoilt else self._context(row))
        for part, domain in self._domains.items():
            if part.role != TARGET:
                continue
            if part.type is BlockType.LINEAR:
                before = POISON if spoilt else self._state_before(row, domain)
                save_states(row, domain, before, self._contents, self._scan_tokens)
                if (head := self._domains.get(Part(DRAFT, BlockType.LINEAR))) is not None:
                    for block in row.moves.saved.values() if row.moves is not None else ():
                        (state,) = domain.device[block]
                        head.device[block] = [HIDDEN + state if state != POISON else POISON]
            elif part.type is BlockType.SWA:
                self._write(row, row.window, domain, [WINDOW + value for value in values], spoilt=spoilt)
            else:
                self._write(row, row.table, domain, values, spoilt=spoilt)
        return values

    def _state_before(self, row: Row, domain: Domain) -> bytes:
        assert row.moves is not None
        if row.start:
            return domain.device[row.moves.source][0]
        return no_state(self._number, self._origin_of(row).salt)

    def _write(self, row: Row, table: list[int], domain: Domain, values: list[bytes], *, spoilt: bool) -> None:
        for position, value in enumerate(values, row.start):
            block = domain.device[table[position // domain.size]]
            if position >= row.write_from:
                block[position % domain.size] = value
            else:
                assert spoilt or block[position % domain.size] == value, (
                    f"rank {self._number} computes position {position} again, and it is not what a shared block holds"
                )

    def draft(self, row: Row, values: list[bytes], drawn: Drawn | None, *, spoilt: bool) -> list[int]:
        """Let the draft take in the tokens that are known now, and go on with its own, which are returned.

        `drawn` None: the step fails, and what the draft writes is worth nothing.
        """
        size, contents = self._contents.block_size, self._contents
        if row.draft_from is None:
            assert not row.num_proposals, "drafts are wanted from a model that is left alone"
            return []
        assert self.draft_domain is not None, "there is no draft model"
        device = self.draft_domain.device
        first = max(row.draft_from, first_drafted(contents))
        assert row.draft_from in (row.start, row.start + 1), f"the draft lacks {row.draft_from}, not {row.start}"
        if contents.draft == HEAD and first == row.start and not spoilt:
            self._check_hidden(row)
        next_known = [] if row.next_token is None else [row.next_token]
        following = drawn.tokens if drawn is not None and drawn.tokens else next_known
        known = [*row.given, *following]
        texts = values[: len(known) - bool(following)]  # what the target holds, or will, of the same positions
        if following:
            texts.append(contents.value(texts[-1], known[-1], contents.decode_path))
        end = row.start + len(known)
        assert end <= len(row.table) * size, f"position {end - 1} has no block"
        if not spoilt:
            self._check_drafted(row, texts, first, device)
        drafts = self._guesses(row, drawn, end - 1) if drawn is not None and drawn.tokens else []
        for draft in drafts[:-1]:  # nothing follows the last one yet
            texts.append(contents.value(texts[-1], draft, contents.decode_path))
        for position in range(first, row.start + len(texts)):
            assert position >= row.write_from, f"the draft writes position {position} of a shared block"
            right = position < end or contents.draft != HEAD  # a head's own hidden states are not the target's
            value = contents.draft_value(texts[position - row.start], self._number) if right else POISON
            device[row.table[position // size]][position % size] = value
        return drafts

    def _check_hidden(self, row: Row) -> None:
        """A head begins with the hidden state of the token before the row's first: one was kept with the state."""
        domain = self._domains.get(Part(DRAFT, BlockType.LINEAR))
        assert domain is not None and row.moves is not None, f"position {row.start} needs a row that is not computed"
        origin, contents = self._origin_of(row), self._contents
        (held,) = domain.device[row.moves.source]
        expected = [HIDDEN + state for state in states_before(row, origin, self._number, contents)]
        assert held in expected, f"{domain.device_claims.tier}: a wrong hidden state before position {row.start}"

    def _check_drafted(self, row: Row, texts: list[bytes], first: int, device: list[list[bytes]]) -> None:
        """The draft holds all positions before `first` for the tokens that the target has there."""
        size, contents = self._contents.block_size, self._contents
        for position in range(first_drafted(contents), first):
            block, place = row.table[position // size], position % size
            text = self._target.device[block][place] if position < row.start else texts[position - row.start]
            assert device[block][place] == contents.draft_value(text, self._number), (
                f"rank {self._number} drafts from position {first} on a wrong context: position {position}, device "
                f"block {block}"
            )

    def _guesses(self, row: Row, drawn: Drawn, newest: int) -> list[int]:
        """Drafts behind the newest token: what will come, now and then something else; all ranks guess alike."""
        contents = self._contents
        last, token = drawn.last, drawn.tokens[-1]
        wrong, guesses = last[-1] % 6, []
        for place in range(min(row.num_proposals, len(row.table) * contents.block_size - newest)):
            last = contents.value(last, token, contents.decode_path)
            token = (next_token(last) + (place == wrong)) % VOCABULARY
            guesses.append(token)
        return guesses

    def _context(self, row: Row) -> bytes:
        """The value before the row's first, after a look at all that the row sees."""
        last = self.last(row)
        for part, domain in self._domains.items():
            if part == (TARGET, BlockType.LINEAR):
                check_state(row, domain, self._origin_of(row), self._number, self._contents)
            elif part == (TARGET, BlockType.SWA):
                check_window(row, domain, last, self._contents, self._window)
            elif part == (TARGET, BlockType.KV) and row.start:
                self._check_context(row, last)
        return last

    def _check_context(self, row: Row, last: bytes) -> None:
        size, contents = self._contents.block_size, self._contents
        place, expected = row.start - 1, last
        while place >= 0:
            held = self._target.device[row.table[place // size]][place % size]
            assert held == expected and held != POISON, (
                f"rank {self._number} computes position {row.start} from a wrong context: position {place}, "
                f"device block {row.table[place // size]}"
            )
            before = contents.before(held)
            assert before is not None, f"position {place} holds what no prompt has"
            expected, place = before, place - 1
        assert expected.startswith((b"rank", b"/")), "the context does not begin at a prompt's first token"
