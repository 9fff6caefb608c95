"""What a block must hold: the value of each position is a hash over all tokens before it, its path, salt and rank.

A block that is taken for another one, of another rank, salt, prompt or path, therefore shows as soon as it is looked
at, and the next token is a function of the last value, so that a wrong context shows in the answer too.

A block of a sliding window holds the same values under another mark: it is never right in the other's place. A state
is a hash over all tokens before it, and over which of them were computed as a prompt, whatever is made of decoded
blocks. A draft model's blocks hold values of their own over the same tokens, whatever path computed them; a head keeps
with each state the target's hidden state of the same token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from xllm_hier.block import BlockType
from xllm_hier.hashing import block_hash, decode_tag, prompt_hashes, root_hash

VOCABULARY = 50
POISON = b"poison"  # a position that nobody wrote, or that is being written
TARGET, DRAFT = "target", "draft"  # whose blocks
MODEL, HEAD = "model", "head"  # kinds of drafts: by a model of its own, by a head that never computes position 0
ANY = b""  # at position 0 of a head: nobody looks at it

HIDDEN = b"hidden "  # marks what a head keeps with a state
WINDOW = b"window "  # marks what holds the same as KV, and is not KV

Values = tuple[bytes, ...]


class Part(NamedTuple):
    """Blocks of one type in one domain: they have pools, or copies of their own."""

    role: str
    type: BlockType

    def __str__(self) -> str:
        return f"{self.role} {self.type.value}"


def value(before: bytes, token: int, path: str) -> bytes:
    """The KV of a position; `path` is P for what prefill computes, D for what decode computes."""
    return hashlib.blake2b(before + token.to_bytes(4, "little") + path.encode(), digest_size=8).digest()


def next_token(last: bytes) -> int:
    return int.from_bytes(last[:4], "little") % VOCABULARY


def reference(prompt: Sequence[int], max_tokens: int, before: bytes = b"", decode_path: str = "D") -> list[int]:
    """What a run without any cache answers."""
    last = before
    for token in prompt:
        last = value(last, token, "P")
    answer = [next_token(last)]
    while len(answer) < max_tokens:
        last = value(last, answer[-1], decode_path)
        answer.append(next_token(last))
    return answer


def root_value(rank: int, salt: str, *, replicated: bool) -> bytes:
    """What stands before the first position of a prompt."""
    return f"{'' if replicated else f'rank {rank}'}/{salt}".encode()


def no_state(rank: int, salt: str) -> bytes:
    """What stands before the first token of a recurrent model."""
    return f"state of rank {rank}/{salt}".encode()


def is_right(held: Sequence[bytes], expected: Values) -> bool:
    """A block holds what it must."""
    held = tuple(held)
    return held == expected or (expected[0] == ANY and held[1:] == expected[1:])


class Contents:
    """What every block of every request that was asked must hold on each rank.

    `replicated`: all ranks hold the same (latents), of a head too, but neither of a draft model nor of states.
    `decode_path` "P" makes decoded blocks equal to those of a prompt. `draft`: its kind, empty without one. `types`
    are the target's BlockTypes; a draft has KV blocks, and a head those of states too.
    """

    def __init__(
        self,
        block_size: int,
        num_ranks: int,
        *,
        replicated: bool,
        decode_path: str = "D",
        draft: str = "",
        types: Sequence[BlockType] = (BlockType.KV,),
    ) -> None:
        self.block_size = block_size
        self.decode_path = decode_path
        self.draft = draft
        followed = [BlockType.KV, BlockType.LINEAR] if draft == HEAD else [BlockType.KV] if draft else []
        self.draft_types = [kind for kind in types if kind in followed]
        self.parts = (
            *(Part(TARGET, kind) for kind in types),
            *(Part(DRAFT, kind) for kind in self.draft_types),
        )
        self.shared = {part for part in self.parts if replicated and self._is_alike(part)}
        self._replicated = replicated
        self._values: dict[tuple[bytes, int, str], bytes] = {}
        self._before: dict[bytes, bytes] = {}
        self._drafts: dict[bytes, bytes] = {}  # by the target's value at the position
        self._marks = [b"" if Part(DRAFT, BlockType.KV) in self.shared else bytes([rank]) for rank in range(num_ranks)]
        self._of_hash: list[dict[bytes, tuple[int, Values]]] = [{} for _ in range(num_ranks)]  # (number, values)
        self._states: list[dict[bytes, bytes]] = [{} for _ in range(num_ranks)]
        self._of_part: dict[tuple[Part, int, bytes], Values] = {}

    def _is_alike(self, part: Part) -> bool:
        return part.type is not BlockType.LINEAR and (part.role == TARGET or self.draft == HEAD)

    @property
    def needs_hidden(self) -> bool:
        """The draft needs the target's hidden state of the token before, which nothing keeps."""
        return self.draft == HEAD and BlockType.LINEAR not in self.draft_types

    def size(self, part: Part) -> int:
        """Values in one of its blocks."""
        return 1 if part.type is BlockType.LINEAR else self.block_size

    def root(self, rank: int, salt: str) -> bytes:
        found = root_value(rank, salt, replicated=self._replicated)
        self._drafts[found] = f"draft/{salt}".encode()
        return found

    def value(self, before: bytes, token: int, path: str) -> bytes:
        key = before, token, path
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = value(*key)
            self._before[found] = before
            if self.draft:
                self._drafts[found] = value(self._drafts.get(before, POISON), token, "draft")
        return found

    def draft_value(self, known: bytes, rank: int) -> bytes:
        """What the draft must hold where the target must hold `known`."""
        return self._drafts.get(known, POISON) + self._marks[rank]

    def state(self, tokens: Sequence[int], prompt_length: int, rank: int, salt: str) -> bytes:
        """The state of one rank behind `tokens`, of which the first `prompt_length` are computed as a prompt."""
        state = no_state(rank, salt)
        for position, token in enumerate(tokens):
            state = self.value(state, token, "P" if position < prompt_length else "D")
        return state

    def answer(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        """What rank 0, which samples, answers without any cache; all blocks on the way are remembered."""
        answer = reference(prompt, max_tokens, self.root(0, salt), self.decode_path)
        tokens = [*prompt, *answer]
        for rank, of_hash in enumerate(self._of_hash):
            root = self.root(rank, salt)
            for prompt_length in (len(tokens), len(prompt)):
                blocks = self._blocks(tokens, prompt_length, root, root_hash(salt))
                of_hash.update((name, (number, values)) for number, (name, values) in enumerate(blocks))
                if Part(TARGET, BlockType.LINEAR) in self.parts:
                    self._add_states(tokens, prompt_length, rank, salt, [name for name, _ in blocks])
        return answer

    def _add_states(self, tokens: list[int], prompt_length: int, rank: int, salt: str, names: Sequence[bytes]) -> None:
        """Those behind the blocks. Where decoded blocks are named as a prompt's are, a prompt's states come first."""
        state = no_state(rank, salt)
        for position, token in enumerate(tokens, 1):
            state = self.value(state, token, "P" if position <= prompt_length else "D")
            number, is_end = divmod(position, self.block_size)
            if not is_end and number <= len(names):
                self._states[rank].setdefault(names[number - 1], state)

    def _blocks(
        self, tokens: list[int], prompt_length: int, root: bytes, hash_root: bytes
    ) -> list[tuple[bytes, Values]]:
        """(hash, values) of all full blocks when the first `prompt_length` tokens are a prompt, the others decoded."""
        size, values, last = self.block_size, [], root
        for position, token in enumerate(tokens):
            last = self.value(last, token, "P" if position < prompt_length else self.decode_path)
            values.append(last)
        hashes = prompt_hashes(tokens[:prompt_length], size, hash_root)
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = hashes[-1] if hashes else hash_root
            tag = decode_tag(prompt_length) if self.decode_path == "D" else b""
            hashes.append(block_hash(parent, tokens[start : start + size], tag))
        return [(name, tuple(values[i * size : (i + 1) * size])) for i, name in enumerate(hashes)]

    def of(self, block_hash: bytes, rank: int, part: Part) -> Values:
        """What block `block_hash` of this part holds on `rank`."""
        key = part, rank, block_hash
        found = self._of_part.get(key)
        if part.type is BlockType.LINEAR:
            return ((HIDDEN if part.role == DRAFT else b"") + self._states[rank][block_hash],)
        if found is None:
            found = self._of_part[key] = self._held(*self._of_hash[rank][block_hash], rank, part)
        return found

    def _held(self, number: int, values: Values, rank: int, part: Part) -> Values:
        if part.role == DRAFT:
            held = [self.draft_value(known, rank) for known in values]
            return (ANY, *held[1:]) if self.draft == HEAD and not number else tuple(held)
        return tuple(WINDOW + known for known in values) if part.type is BlockType.SWA else values

    def before(self, known: bytes) -> bytes | None:
        """The value of the position before the one of value `known`; None when nothing has such a value."""
        return self._before.get(known)
