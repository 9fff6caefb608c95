"""What a block must hold: the value of each position is a hash over all tokens before it, its path, salt and rank.

A block that is taken for another one, of another rank, salt, prompt or path, therefore shows as soon as it is looked
at, and the next token is a function of the last value, so that a wrong context shows in the answer too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from xllm_hier.hashing import block_hash, decode_tag, prompt_hashes, root_hash

VOCABULARY = 50
POISON = b"poison"  # a position that nobody wrote, or that is being written

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


class Contents:
    """What every block of every request that was asked must hold on each rank.

    `replicated`: all ranks hold the same (latents). `decode_path` "P" makes decoded blocks equal to those of a prompt.
    """

    def __init__(self, block_size: int, num_ranks: int, *, replicated: bool, decode_path: str = "D") -> None:
        self.block_size = block_size
        self.decode_path = decode_path
        self._replicated = replicated
        self._values: dict[tuple[bytes, int, str], bytes] = {}
        self._before: dict[bytes, bytes] = {}
        self._of_hash: list[dict[bytes, Values]] = [{} for _ in range(num_ranks)]

    def root(self, rank: int, salt: str) -> bytes:
        return root_value(rank, salt, replicated=self._replicated)

    def value(self, before: bytes, token: int, path: str) -> bytes:
        key = before, token, path
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = value(*key)
            self._before[found] = before
        return found

    def answer(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        """What rank 0, which samples, answers without any cache; all blocks on the way are remembered."""
        answer = reference(prompt, max_tokens, self.root(0, salt), self.decode_path)
        tokens = [*prompt, *answer]
        for rank, known in enumerate(self._of_hash):
            root = self.root(rank, salt)
            known.update(self._blocks(tokens, len(tokens), root, root_hash(salt)))
            known.update(self._blocks(tokens, len(prompt), root, root_hash(salt)))
        return answer

    def _blocks(
        self, tokens: list[int], prompt_length: int, root: bytes, hash_root: bytes
    ) -> Iterable[tuple[bytes, Values]]:
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

    def of(self, block_hash: bytes, rank: int) -> Values:
        return self._of_hash[rank][block_hash]

    def before(self, known: bytes) -> bytes | None:
        """The value of the position before the one of value `known`; None when nothing has such a value."""
        return self._before.get(known)
