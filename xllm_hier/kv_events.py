"""The cache events of an instance: blocks stored, removed, cleared, by tier, in numbered batches.

The wire is vLLM's (its `kv_events.py` since 0.26), so that routers made for it read ours: three frames, topic, number
(8 bytes, big endian) and a msgpack array `[time, events, 0]` of events that are maps with a `type`. A consumer that
decodes it by position ignores our fields behind: the incarnation, so that a restart is seen, and the load, so that one
stream is enough. `medium` says the tier; `group_idx` the block type, by its number among the model's.

A second socket answers questions: 8 bytes, the number from which on batches are sent once more, as in vLLM, or the
word `snapshot`, for everything there is, as if it was stored just now. Each answer is `number, batch`; the last one's
number is -1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from .block import BlockType
from .errors import WireError

MEDIUM = {"device": "GPU", "host": "CPU", "store": "STORE"}
_TIER = {medium: tier for tier, medium in MEDIUM.items()}
_KIND = {BlockType.KV: "full_attention", BlockType.SWA: "sliding_window", BlockType.LINEAR: "mamba"}
_TYPE = {kind: block_type for block_type, kind in _KIND.items()}
SNAPSHOT = b"snapshot"
END = (-1).to_bytes(8, "big", signed=True)
TOPIC = "kv-events"


@dataclass(frozen=True)
class Stored:
    """Blocks of one type that can be had from a tier now, each the child of the one before, the first of `parent`
    (None: it begins a prompt). `token_ids` are those of all blocks, or empty where they are not known. `extra` tells
    apart name spaces in which equal tokens have other hashes (a digest, not the salt itself); empty: none."""

    tier: str
    block_type: BlockType
    hashes: list[bytes]
    parent: bytes | None = None
    token_ids: list[int] = field(default_factory=list)
    block_size: int = 0
    extra: str = ""


@dataclass(frozen=True)
class Removed:
    """Blocks of one type that cannot be had from a tier any more."""

    tier: str
    block_type: BlockType
    hashes: list[bytes]


@dataclass(frozen=True)
class Cleared:
    """Nothing of this instance can be had from device and host any more, in any type: it begins anew."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True)
class InstanceLoad:
    """The work and the speed of an instance, which its heartbeats tell a router; None where it has measured nothing.

    ===================  ===========================================================================================
    num_open             requests that clients wait for; some are `num_waiting`, some `num_running`
    backlog_tokens       prompt tokens of its open requests that are still to be computed
    compute_s            of one prompt token
    load_s, read_s       of one block from host to device, from store to host
    step_s               between two tokens of a running answer
    ttft_s               recent median from arrival to first token
    store_state          `detached`: it reads nothing of its store; empty: not told
    ===================  ===========================================================================================
    """

    num_open: int = 0
    num_waiting: int = 0
    num_running: int = 0
    backlog_tokens: int = 0
    compute_s: float | None = None
    load_s: float | None = None
    read_s: float | None = None
    step_s: float | None = None
    ttft_s: float | None = None
    store_state: str = ""

    @classmethod
    def from_dict(cls, raw: object) -> InstanceLoad:
        """The usable part of `raw`: unknown names, wrong types and impossible numbers count as not told."""
        told: dict[str, Any] = raw if isinstance(raw, dict) else {}
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = told.get(item.name)
            if isinstance(item.default, str):
                good = isinstance(value, str)
            elif item.default is None:
                good = isinstance(value, int | float) and math.isfinite(value) and value > 0
            else:
                good = isinstance(value, int) and value >= 0
            if good and not isinstance(value, bool):
                values[item.name] = value
        return cls(**values)


@dataclass(frozen=True)
class EventBatch:
    """The events of one process's caches since the batch before; without any, a sign of life.

    `load` comes with heartbeats; None in other batches and in answers to questions.
    """

    ts: float
    events: list[Event]
    incarnation: str = ""
    load: InstanceLoad | None = None


def pack_batch(batch: EventBatch, groups: Sequence[BlockType]) -> bytes:
    """Bytes of a batch; `groups` are the model's block types in order."""
    events = [_to_map(event, groups) for event in batch.events]
    packed: bytes = msgpack.packb([batch.ts, events, 0, batch.incarnation, batch.load and vars(batch.load)])
    return packed


def unpack_batch(data: bytes) -> EventBatch:
    """The batch in `data`. Raises WireError when it is none, or does not name its sender."""
    try:
        ts, events, _rank, incarnation, load = msgpack.unpackb(data, strict_map_key=False)[:5]
        if not isinstance(incarnation, str) or not isinstance(load, (dict, type(None))):
            raise WireError("a batch of events without an incarnation")
        told = InstanceLoad.from_dict(load) if load is not None else None
        return EventBatch(float(ts), [_from_map(event) for event in events], incarnation, told)
    except WireError:
        raise
    except Exception as error:  # msgpack has several kinds for broken bytes; so have wrong shapes
        raise WireError(f"no batch of events: {type(error).__name__}: {error}") from error


def _to_map(event: Event, groups: Sequence[BlockType]) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    where = {"medium": MEDIUM[event.tier], "group_idx": groups.index(event.block_type)}
    if isinstance(event, Removed):
        kind = _KIND[event.block_type]
        return {"type": "BlockRemoved", "block_hashes": event.hashes, **where, "kv_cache_spec_kind": kind}
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None,
        "lora_name": None,
        "extra_keys": [[event.extra]] * len(event.hashes) if event.extra else None,
        "kv_cache_spec_kind": _KIND[event.block_type],
        **where,
    }


def _from_map(event: Mapping[str, Any]) -> Event:
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    tier, block_type = _TIER[event["medium"]], _TYPE[event["kv_cache_spec_kind"]]
    hashes = [bytes(one) for one in event["block_hashes"]]
    if event["type"] == "BlockRemoved":
        return Removed(tier, block_type, hashes)
    if event["type"] != "BlockStored":
        raise WireError(f"unknown event {event['type']!r}")
    extra = event["extra_keys"]
    return Stored(
        tier,
        block_type,
        hashes,
        event["parent_block_hash"],
        list(event["token_ids"]),
        int(event["block_size"]),
        str(extra[0][0]) if extra else "",
    )
