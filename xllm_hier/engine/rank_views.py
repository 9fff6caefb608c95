"""What the ranks of an instance tell, made one: sizes, what a peer must have in common with them, figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import EngineConfig
from ..plans import TypeSizes, WorkerReady
from .blocks.settings import Drafting

_STATE_ORDER = ("detached", "attached", "degraded", "open")  # from no worry to most


def common_sizes(ready: list[WorkerReady]) -> list[TypeSizes]:
    """Of each type as many blocks as every rank has."""
    return [
        dataclasses.replace(
            ours[0],
            num_device_blocks=min(sizes.num_device_blocks for sizes in ours),
            num_host_blocks=min(sizes.num_host_blocks for sizes in ours),
        )
        for ours in zip(*(answer.all_types for answer in ready), strict=True)
    ]


def drafting_of(num_tokens: int, draft: dict[str, Any] | None) -> Drafting:
    """`draft` is what a worker tells of its draft model, None without one."""
    if draft is None:
        return Drafting(num_tokens)
    return Drafting(num_tokens, True, draft["needs_hidden"], tuple(draft["types"]))


def pd_facts(config: EngineConfig, ready: list[WorkerReady]) -> dict[str, Any]:
    """What two instances must have in common to work on one request."""
    details = ready[0].details
    draft = details.get("draft") or {}
    facts: dict[str, Any] = {
        "model_id": config.name_space,
        "weights": details.get("identity"),
        "draft_weights": draft.get("identity"),
        "draft": draft.get("component"),
        "block_size": details["block_size"],
        "tp_size": config.tp_size,
        "kv_cache_transfer_mode": config.kv_cache_transfer_mode,
    }
    regions = ready[0].endpoint.regions if ready[0].endpoint is not None else []
    return facts | {f"schema_hash of {one.role} {one.block_type} blocks": one.schema_hash for one in regions}


def store_keys(ready: list[WorkerReady]) -> dict[str, list[str]]:
    """By block type, the prefixes of the keys of all objects of one block, on all ranks and in all domains."""
    keys: dict[str, list[str]] = {}
    for answer in ready:
        for kind, prefixes in answer.details.get("store_keys", {}).items():
            keys[kind] = list(dict.fromkeys([*keys.get(kind, []), *prefixes]))
    return keys


def worst_state(states: list[str]) -> str:
    """Of the store's states on the ranks the one to worry about most; `detached` without any."""
    return max(states, key=_STATE_ORDER.index, default="detached")


def merge_worker_stats(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """One view of all ranks: amounts add up, the store's state is the worst."""
    merged: dict[str, Any] = {"transfer_bytes": {}, "transfer_seconds": {}, "transfer_failures": [], "store": {}}
    failures: dict[tuple[str, str], int] = {}
    for one in stats:
        for kind, amount in one.get("transfer_bytes", {}).items():
            merged["transfer_bytes"][kind] = merged["transfer_bytes"].get(kind, 0) + amount
        for kind, cause, count in one.get("transfer_failures", []):
            failures[kind, cause] = failures.get((kind, cause), 0) + count
        for kind, histogram in one.get("transfer_seconds", {}).items():
            into = merged["transfer_seconds"].setdefault(
                kind, {"buckets": [[le, 0] for le, _ in histogram["buckets"]], "sum": 0.0, "count": 0}
            )
            into["buckets"] = [
                [le, have + new] for (le, have), (_, new) in zip(into["buckets"], histogram["buckets"], strict=True)
            ]
            into["sum"] += histogram["sum"]
            into["count"] += histogram["count"]
        for name, amount in one.get("store", {}).items():
            have = merged["store"].get(name, 0)
            # A logical block is hit or missed once, however many ranks have a part of it.
            merged["store"][name] = max(have, amount) if name.endswith("_blocks") else have + amount
    states = [one.get("store_state", "detached") for one in stats]
    merged["store_state"] = worst_state(states)
    merged["store_refused"] = next((text for one in stats if (text := one.get("store_refused"))), "")
    if merged["store_refused"]:  # a rank that has nothing of its own in the store does not know
        merged["store_state"] = "detached"
    merged["transfer_failures"] = [[kind, cause, count] for (kind, cause), count in sorted(failures.items())]
    return merged
