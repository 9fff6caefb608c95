"""Builds the parts of an engine from its settings and its workers' facts."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import zmq

from ..block import BlockType
from ..config import EngineConfig
from ..figures import ModelDetails, WorkerReady
from .blocks.books import HierarchyBlockManagerPool
from .blocks.journal import CacheJournal
from .blocks.moves import WorkerLink
from .blocks.policy import RestorePolicy
from .blocks.settings import BookSettings, ReadLimits
from .pair.decode import DecodeRole
from .pair.links import PeerLinks
from .pair.prefill import PrefillRole
from .pair.role import Role
from .rank_views import common_sizes, drafting_of, pd_facts
from .steps.audit import Auditor
from .steps.limits import RequestLimits
from .steps.scheduler import Scheduler


@dataclass(frozen=True)
class EngineParts:
    """Books, queues and role of one instance.

    `exact`: restored blocks must have the very bits of computed ones, as long as no peer computes with other bits.
    `journal`: None where nobody listens to the caches. `incarnation`: a name that no other process has.
    """

    incarnation: str
    exact: bool
    policy: RestorePolicy
    journal: CacheJournal | None
    manager: HierarchyBlockManagerPool
    scheduler: Scheduler
    limits: RequestLimits
    role: Role


def build_parts(
    config: EngineConfig, workers: WorkerLink, ready: list[WorkerReady], links: PeerLinks | None
) -> EngineParts:
    """The parts of an engine whose ranks have told their facts in `ready`."""
    block_size, model = ready[0].block_size, ready[0].model
    policy = RestorePolicy(block_size, measured=config.restore_policy == "measured")
    journal = CacheJournal(block_size) if config.publishes_events else None
    manager = HierarchyBlockManagerPool(
        workers,
        common_sizes(ready),
        _book_settings(config, ready[0]),
        store_enabled=config.enable_kvcache_store,
        policy=policy,
        journal=journal,
    )
    exact = model.batch_invariant and (model.rows_invariant or config.decode_kv_reuse != "as_is")
    scheduler = Scheduler(
        manager,
        max_tokens=config.max_tokens_per_batch,
        max_seqs=config.max_seqs_per_batch,
        chunk_tokens=config.chunk_tokens,
        auditor=Auditor(manager, config.audit_rate, exact=exact, experts=model.experts),
        hands_over=links is not None and config.instance_role == "PREFILL",
    )
    max_model_len = min(ready[0].max_model_len, manager.most_tokens)
    limits = RequestLimits(scheduler, max_model_len, ready[0].vocab_size, config.max_waiting_requests)
    role = _role(config, scheduler, links, limits)
    incarnation = links.incarnation if links is not None else uuid.uuid4().hex
    return EngineParts(incarnation, exact, policy, journal, manager, scheduler, limits, role)


def _book_settings(config: EngineConfig, first: WorkerReady) -> BookSettings:
    return BookSettings(
        first.block_size,
        strides={BlockType(kind): tokens for kind, tokens in first.strides.items()},
        scan_tokens=first.model.scan_tokens or 1,
        prefix_cache=config.enable_prefix_cache,
        decode_kv_reuse=_decode_reuse(config, first.model),
        limits=ReadLimits(
            config.prefetch_batch_size, config.prefetch_timeout, config.prefetch_deadline_ms, config.worker_timeout_s
        ),
        drafting=drafting_of(config.num_speculative_tokens, first.draft),
    )


def _decode_reuse(config: EngineConfig, model: ModelDetails) -> str:
    """Where generated rows have a prompt's bits, decoded blocks are a prompt's: nothing is computed once more."""
    return "as_is" if model.rows_invariant and config.decode_kv_reuse == "canonical" else config.decode_kv_reuse


def _role(config: EngineConfig, scheduler: Scheduler, links: PeerLinks | None, limits: RequestLimits) -> Role:
    if links is None:
        return Role()
    if config.instance_role == "PREFILL":
        return PrefillRole(config, scheduler, links)
    return DecodeRole(config, scheduler, links, limits)


def new_links(context: zmq.Context[Any], config: EngineConfig, ready: list[WorkerReady]) -> PeerLinks | None:
    """Links to the other half of a pair; None for an instance that does both alone.

    Raises:
        StartupError: the port is taken.
    """
    if not config.enable_disagg_pd:
        return None
    endpoints = [answer.endpoint for answer in ready if answer.endpoint is not None]
    return PeerLinks(context, config, pd_facts(config, ready), endpoints, ready[0].model.numerics_id)
