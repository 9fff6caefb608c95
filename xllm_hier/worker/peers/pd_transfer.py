"""PdTransfer: device blocks between this worker and the same rank of its PD peers, over the Transfer Engine.

An instance either calls (a PREFILL instance that pushes, a DECODE instance that pulls) or is reached, never both. So an
engine that calls can be thrown away with the remains of a failed call: nobody needs the name it was reached by.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...block import CacheRole
from ...config import EngineConfig
from ...errors import TransferError
from ...plans import LinkPeer, PullBlocks, PullDone, PushBlocks, RemoteBlocks, TransferEndpoint, TransferRegion
from ..platform import Platform
from ..tiers.cache_domain import BlockCache, CacheDomain
from ..tiers.layered_wait import layer_groups
from ..transfer_stats import TransferStats
from .pieces import MovingBlocks, Pieces
from .push import Push, Pushes
from .transfer_calls import LEFT, Peer, PeerCalls, Problem, TransferCall
from .transfer_engine import TransferEngine

log = logging.getLogger("xllm.transfer")

Key = tuple[str, str]  # role and block type


class PdTransfer:
    """Moves of one worker; `answer` sends a message to the engine and may be called from any thread.

    Raises:
        ConfigError: the library is not installed, or the ports asked for cannot be had.
        StartupError: the Transfer Engine does not come up, or does not take the caches.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        domains: Sequence[CacheDomain],
        platform: Platform,
        *,
        stats: TransferStats,
        answer: Callable[[Any], None],
    ) -> None:
        self._rank, self._platform, self._stats, self._answer = rank, platform, stats, answer
        self._caches = {
            (domain.role.value, block_type.value): cache
            for domain in domains
            for block_type, cache in domain.caches.items()
        }
        self._regions = {key: _region(key, cache) for key, cache in self._caches.items()}
        self._groups = layer_groups(domains[0].layout.num_layers, config.layers_wise_copy_batchs)
        memory = [(layer.data_ptr(), layer.nbytes) for cache in self._caches.values() for layer in cache.device]
        self._calls = PeerCalls(lambda: TransferEngine(config, rank, memory), stats)
        self.endpoint = TransferEndpoint(rank, self._calls.session, list(self._regions.values()))
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------- peers

    def link(self, plan: LinkPeer) -> None:
        """Know a peer from now on, or anew after moves with it failed; one that does not fit fails each move."""
        endpoint = next((each for each in plan.endpoints if each.rank == self._rank), None)
        session, regions = (endpoint.session, endpoint.regions) if endpoint is not None else ("", [])
        peer = Peer(plan.peer, session, {(region.role, region.block_type): region for region in regions})
        mismatch = f"has no rank {self._rank}" if endpoint is None else self._mismatch(peer.regions)
        if mismatch:
            log.error("peer %s %s", plan.peer, mismatch)
            peer.problem = Problem("mismatch", f"peer {plan.peer} {mismatch}")
        with self._lock:
            self._peers[plan.peer] = peer

    def unlink(self, name: str) -> None:
        """Begin no move with this peer any more; of one that is under way its present call is the last."""
        with self._lock:
            peer = self._peers.pop(name, None)
        if peer is not None:
            peer.problem = Problem("unlinked", f"peer {name} is gone")

    def _mismatch(self, theirs: dict[Key, TransferRegion]) -> str:
        """How a peer's blocks differ from ours; empty when they do not."""
        for key in {**self._regions, **theirs}:
            pair = (self._regions.get(key), theirs.get(key))
            ours, other = (_shape(region) for region in pair)
            if ours != other:
                return f"has {other} for {key[1]} blocks of the {key[0].lower()} model, this instance {ours}"
        return ""

    def _find(
        self, name: str, target: Sequence[RemoteBlocks], draft: Sequence[RemoteBlocks]
    ) -> tuple[Peer | None, dict[CacheRole, list[MovingBlocks]], Problem | None]:
        """The peer, the blocks of each domain, and why they cannot be moved, if that is so."""
        with self._lock:
            peer = self._peers.get(name)
        blocks: dict[CacheRole, list[MovingBlocks]] = {CacheRole.TARGET: [], CacheRole.DRAFT: []}
        problem = Problem("peer_unknown", f"no peer {name!r} is linked") if peer is None else peer.refusal()
        if peer is None or problem is not None:
            return peer, blocks, problem
        try:
            for role, mappings in ((CacheRole.TARGET, target), (CacheRole.DRAFT, draft)):
                blocks[role] = [self._moving(peer, role, mapping) for mapping in mappings]
        except TransferError as error:
            problem = Problem("blocks", str(error))
        return peer, blocks, problem

    def _moving(self, peer: Peer, role: CacheRole, mapping: RemoteBlocks) -> MovingBlocks:
        key = (role.value, mapping.block_type)
        if key not in self._regions:
            raise TransferError(f"there are no {mapping.block_type} blocks of the {role.value.lower()} model")
        return MovingBlocks.of(mapping, self._regions[key], peer.regions[key], self._caches[key].layout.layers)

    # ------------------------------------------------------------------------------------------------- moves

    def begin(self, plans: Sequence[PushBlocks]) -> Pushes:
        """Start the pushes of a forward, which has to tell the answer how far it is, and to `finish` it."""
        if not plans:
            return Pushes.none()
        pushes = []
        for plan in plans:
            peer, blocks, problem = self._find(plan.peer, plan.target_mappings, plan.draft_mappings)
            if problem is not None:
                log.error("push %d is not begun: %s", plan.push_id, problem.text)
            pushes.append(Push(plan.push_id, peer, blocks, problem))
        begun = Pushes(pushes, self._groups, self._platform.mark, lambda cause: self._stats.fail("push", cause))
        self._calls.submit(begun)
        return begun

    def pull(self, plan: PullBlocks) -> None:
        """Start reading a peer's blocks; answers a PullDone in any case."""
        peer, blocks, problem = self._find(plan.peer, plan.target_mappings, plan.draft_mappings)

        def done(problem: Problem | None) -> None:
            if problem is not None:
                log.error("pull %d failed: %s", plan.pull_id, problem.text)
                self._stats.fail("pull", problem.cause)
            error, certain = (problem.text, problem.certain) if problem is not None else (None, True)
            self._answer(PullDone(plan.pull_id, self._rank, error, certain))

        if peer is None or problem is not None:
            done(problem)
        else:
            self._calls.submit(_Pull(peer, [*blocks[CacheRole.TARGET], *blocks[CacheRole.DRAFT]], done))

    def watch(self) -> None:
        """Leave a call behind that hangs; call it now and then."""
        self._calls.watch()

    def close(self) -> bool:
        """End the thread and the engine; False when the library is stuck in a call (then `os._exit`)."""
        return self._calls.close()


class _Pull:
    """One pull: all layers of all its blocks; `done` gets its problem, None when they are there, once."""

    def __init__(self, peer: Peer, blocks: Sequence[MovingBlocks], done: Callable[[Problem | None], None]) -> None:
        self._peer, self._blocks, self._done = peer, blocks, done
        self._answered = threading.Lock()

    def run(self, call: TransferCall) -> None:
        problem = None
        for part in Pieces.joined([blocks.pieces(range(blocks.layers[-1] + 1)) for blocks in self._blocks]).calls():
            problem = call("pull", self._peer, part)
            if problem is LEFT:
                return
            if problem is not None:
                break
        self._answer(problem)

    def give_up(self, peer: Peer | None, problem: Problem) -> bool:
        self._answer(problem)
        return False

    def _answer(self, problem: Problem | None) -> None:
        if self._answered.acquire(blocking=False):
            self._done(problem)


def _region(key: Key, cache: BlockCache) -> TransferRegion:
    first = cache.device[0]
    return TransferRegion(*key, cache.layout.layer_bytes, first.shape[0], [layer.data_ptr() for layer in cache.device])


def _shape(region: TransferRegion | None) -> str:
    return f"{len(region.addresses)} layers of {region.layer_bytes} bytes" if region is not None else "nothing"
