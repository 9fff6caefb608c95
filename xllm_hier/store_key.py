"""The one place that builds a store key: engine, worker, service and tools all call this.

Non-MLA: `xllm-kv-v3:<model_id>:<key_component>:<tp_size>:<block_type>:<tp_rank>:<schema_hash>:<block_hash>`.
Free texts (model_id, key_component) are `<length>.<text>`, percent-encoded where not plain printable ASCII, so that no
choice of names makes two keys equal.
"""

from __future__ import annotations

import hashlib
import os
from urllib.parse import quote

from .block import BlockType

NAME_SPACE = "xllm-kv-v3"
NUMERICS = "xllm-numerics"
IDENTITY = "xllm-identity"
MAIN = "main"


def _text(value: str) -> str:
    encoded = quote(value, safe="/:.-_+@= ").replace(" ", "%20")
    return f"{len(encoded)}.{encoded}"


def draft_component(algorithm: str, draft_path: str = "", identity: str = "") -> str:
    """`key_component` of a draft's caches: embedded without a path, else folder name and a digest of the real path, to
    which links are followed, and of the `identity` of the weights there: a draft that was trained anew is another."""
    if not draft_path:
        return f"spec_draft::{algorithm}::embedded"
    path = os.path.realpath(draft_path)
    digest = hashlib.blake2b(f"{path}\0{identity}".encode() if identity else path.encode(), digest_size=8).hexdigest()
    return f"spec_draft::{algorithm}::{os.path.basename(path)}::{digest}"


def key_prefix(
    model_id: str,
    key_component: str,
    block_type: BlockType,
    schema_hash: str,
    *,
    tp_size: int,
    tp_rank: int,
    mla: bool = False,
) -> str:
    """All of a key but its last field; append `block_hash.hex()`. MLA keys carry no topology: all ranks share them."""
    topology = f"mla:{block_type.value}" if mla else f"{tp_size}:{block_type.value}:{tp_rank}"
    return f"{NAME_SPACE}:{_text(model_id)}:{_text(key_component)}:{topology}:{schema_hash}:"


def origin(prefix: str, identity: str) -> int:
    """32 bits for a block's trailer: whose it is, by the prefix of its key and the identity of its model's weights."""
    digest = hashlib.blake2b(f"{len(prefix)}.{prefix}{identity}".encode(), digest_size=4, person=b"xllm-origin-v1")
    return int.from_bytes(digest.digest(), "little")


def numerics_key(model_id: str, readers: str, numerics_id: str) -> str:
    """Object whose existence says that instances with this numerics id write to the name space; no block's key.

    `readers` tells apart those that cannot read each other's blocks anyway.
    """
    return f"{NUMERICS}:{_text(model_id)}:{_text(readers)}:{_text(numerics_id)}"


def identity_key(model_id: str, key_component: str) -> str:
    """Object that holds the identity of the one model whose blocks are kept under `model_id` and `key_component`."""
    return f"{IDENTITY}:{_text(model_id)}:{_text(key_component)}"


def name_space_regex(model_id: str) -> str:
    """Regular expression that matches every key of one model, marks included, for removing them from the store."""
    special = set(".^$*+?()[]{}|\\")
    name = "".join(f"\\{char}" if char in special else char for char in _text(model_id))
    return f"^({NAME_SPACE}|{NUMERICS}|{IDENTITY}):{name}:.*"


def group_id(model_id: str, block_type: BlockType, block_hash: bytes) -> str:
    """Mooncake group of all physical objects of one logical block: they are leased and evicted together."""
    return f"{NAME_SPACE}:{_text(model_id)}:{block_type.value}:{block_hash.hex()}"
