"""Chained 128-bit block hashes over all facts of a block's KV, and nothing of process, machine or PYTHONHASHSEED.

hash_0 = H(root, tokens), hash_i = H(hash_{i-1}, tokens); root = H(cache_salt and all else that changes the KV of a
request). H is BLAKE2b cut to 16 bytes: cryptographic, because a made collision would serve one user's KV to another
(vLLM GHSA-rm76-4mrf-v9r8).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .errors import TransferError

HASH_BYTES = 16
_PERSON = b"xllm-kv-v3"


def root_hash(cache_salt: str = "", extra: Sequence[bytes] = ()) -> bytes:
    """Parent of a request's first block; `extra` names all else that changes the KV (adapter, multimodal hashes)."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=_PERSON)
    for part in (cache_salt.encode(), *extra):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: np.ndarray | Sequence[int], tag: bytes = b"") -> bytes:
    """16 bytes for one full block behind `parent`; `tag` marks KV that other code than prefill has computed."""
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=_PERSON)
    digest.update(np.asarray(token_ids, dtype="<i4").tobytes())
    digest.update(tag)
    return digest.digest()


def prompt_hashes(token_ids: np.ndarray | Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Hashes of all full blocks of a prompt, in order."""
    raw = np.asarray(token_ids, dtype="<i4").tobytes()
    step = block_size * 4
    hashes, parent = [], root
    for end in range(step, len(raw) + 1, step):
        parent = hashlib.blake2b(parent + raw[end - step : end], digest_size=HASH_BYTES, person=_PERSON).digest()
        hashes.append(parent)
    return hashes


def decode_tag(prompt_tokens: int) -> bytes:
    """Tag of blocks that hold KV of the decode path: bits depend on where the prompt ended (DESIGN section 6)."""
    return b"decode" + prompt_tokens.to_bytes(8, "little")


def split_hashes(raw: bytes) -> list[bytes]:
    """The 16-byte hashes that a plan carries as one text of bytes. Raises TransferError when it is cut short."""
    if len(raw) % HASH_BYTES:
        raise TransferError(f"{len(raw)} bytes are no list of {HASH_BYTES}-byte hashes")
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]
