"""What a block must hold: the value of each position is a hash over all tokens before it, its path, salt and rank.

A block that is taken for another one, of another rank, salt, prompt or path, therefore shows as soon as it is looked
at, and the next token is a function of the last value, so that a wrong context shows in the answer too.

A draft model's blocks hold values of their own over the same tokens, whatever path computed them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from xllm_hier.hashing import block_hash, decode_tag, prompt_hashes, root_hash

VOCABULARY = 50
POISON = b"poison"  # a position that nobody wrote, or that is being written
TARGET, DRAFT = "target", "draft"  # whose blocks
MODEL, HEAD = "model", "head"  # kinds of drafts: by a model of its own, by a head that never computes position 0
ANY = b""  # at position 0 of a head: nobody looks at it

Values = tuple[bytes, ...]


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


def is_right(held: Sequence[bytes], expected: Values) -> bool:
    """A block holds what it must."""
    held = tuple(held)
    return held == expected or (expected[0] == ANY and held[1:] == expected[1:])


class Contents:
    """What every block of every request that was asked must hold on each rank.

    `replicated`: all ranks hold the same (latents), of a head too, but not of a draft model. `decode_path` "P" makes
    decoded blocks equal to those of a prompt. `draft`: its kind, empty without one.
    """

    def __init__(
        self, block_size: int, num_ranks: int, *, replicated: bool, decode_path: str = "D", draft: str = ""
    ) -> None:
        self.block_size = block_size
        self.decode_path = decode_path
        self.draft = draft
        self.roles = (TARGET, DRAFT) if draft else (TARGET,)
        self.shared = {role for role in self.roles if replicated and (role == TARGET or draft == HEAD)}
        self._replicated = replicated
        self._values: dict[tuple[bytes, int, str], bytes] = {}
        self._before: dict[bytes, bytes] = {}
        self._drafts: dict[bytes, bytes] = {}  # by the target's value at the position
        self._marks = [b"" if DRAFT in self.shared else bytes([rank]) for rank in range(num_ranks)]
        self._of_hash: dict[str, list[dict[bytes, Values]]] = {
            role: [{} for _ in range(num_ranks)] for role in self.roles
        }

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

    def answer(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        """What rank 0, which samples, answers without any cache; all blocks on the way are remembered."""
        answer = reference(prompt, max_tokens, self.root(0, salt), self.decode_path)
        tokens = [*prompt, *answer]
        for rank in range(len(self._marks)):
            root = self.root(rank, salt)
            for prompt_length in (len(tokens), len(prompt)):
                blocks = self._blocks(tokens, prompt_length, root, root_hash(salt))
                self._of_hash[TARGET][rank].update(blocks)
                if self.draft:
                    self._of_hash[DRAFT][rank].update(self._draft_blocks(blocks, rank))
        return answer

    def _draft_blocks(self, blocks: list[tuple[bytes, Values]], rank: int) -> Iterable[tuple[bytes, Values]]:
        for number, (name, values) in enumerate(blocks):
            held = [self.draft_value(known, rank) for known in values]
            if self.draft == HEAD and not number:
                held[0] = ANY
            yield name, tuple(held)

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

    def of(self, block_hash: bytes, rank: int, role: str = TARGET) -> Values:
        return self._of_hash[role][rank][block_hash]

    def before(self, known: bytes) -> bytes | None:
        """The value of the position before the one of value `known`; None when nothing has such a value."""
        return self._before.get(known)
