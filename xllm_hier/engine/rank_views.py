"""The answers of all ranks of an instance as one: sizes, facts that a peer must share, figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ..config import EngineConfig
from ..figures import DraftDetails, Histogram, TransferFailures, TypeSizes, WorkerReady, WorkerStats
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
        for ours in zip(*(answer.types for answer in ready), strict=True)
    ]


def drafting_of(num_tokens: int, draft: DraftDetails | None) -> Drafting:
    """The engine's view of `draft`, the draft model of the workers; None without one."""
    if draft is None:
        return Drafting(num_tokens)
    return Drafting(num_tokens, True, draft.needs_hidden, tuple(draft.types))


def pd_facts(config: EngineConfig, ready: list[WorkerReady]) -> dict[str, str | int | None]:
    """The facts that two instances must share to work on one request, by a name for people."""
    first, draft = ready[0], ready[0].draft
    facts: dict[str, str | int | None] = {
        "model_id": config.name_space,
        "weights": first.identity or None,
        "draft_weights": (draft.identity or None) if draft is not None else None,
        "draft": draft.component if draft is not None else None,
        "block_size": first.block_size,
        "tp_size": config.tp_size,
        "kv_cache_transfer_mode": config.kv_cache_transfer_mode,
    }
    regions = first.endpoint.regions if first.endpoint is not None else []
    return facts | {f"schema_hash of {one.role} {one.block_type} blocks": one.schema_hash for one in regions}


def store_keys(ready: list[WorkerReady]) -> dict[str, list[str]]:
    """By block type, the prefixes of the keys of all objects of one block, on all ranks and in all domains."""
    keys: dict[str, list[str]] = {}
    for answer in ready:
        for kind, prefixes in answer.store_keys.items():
            keys[kind] = list(dict.fromkeys([*keys.get(kind, []), *prefixes]))
    return keys


def worst_state(states: Sequence[str]) -> str:
    """Of the store's states on the ranks the one to worry about most; `detached` without any."""
    return max(states, key=_STATE_ORDER.index, default="detached")


def merge_worker_stats(stats: Sequence[WorkerStats]) -> WorkerStats:
    """The figures of all ranks as one: amounts add up, the store's state is the worst one's."""
    moved, failures = Counter[str](), Counter[tuple[str, str]]()
    seconds: dict[str, Histogram] = {}
    store: dict[str, int] = {}
    for one in stats:
        for kind, amount in one.transfer_bytes.items():
            moved[kind] += amount
        for failure in one.transfer_failures:
            failures[failure.kind, failure.cause] += failure.count
        for kind, histogram in one.transfer_seconds.items():
            seconds[kind] = _added(seconds[kind], histogram) if kind in seconds else histogram
        for name, amount in one.store.items():
            have = store.get(name, 0)
            # A logical block is hit or missed once, however many ranks have a part of it.
            store[name] = max(have, amount) if name.endswith("_blocks") else have + amount
    refused = next((one.store_refused for one in stats if one.store_refused), "")
    return WorkerStats(
        dict(moved),
        seconds,
        [TransferFailures(kind, cause, count) for (kind, cause), count in sorted(failures.items())],
        store,
        # A rank that has nothing of its own in the store does not know that the store is refused.
        "detached" if refused else worst_state([one.store_state for one in stats]),
        refused,
    )


def _added(first: Histogram, second: Histogram) -> Histogram:
    buckets = [(border, have + more) for (border, have), (_, more) in zip(first.buckets, second.buckets, strict=True)]
    return Histogram(buckets, first.sum + second.sum, first.count + second.count)
