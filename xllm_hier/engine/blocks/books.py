"""HierarchyBlockManagerPool: who holds which block in which tier, and every plan that moves blocks between tiers.

The three phases of the specification are `prefetch_from_storage` / `update_prefetch_result` (G2H), `allocate` /
`transfer_blocks` (H2D), and `deallocate` / `transfer_offload_blocks` (D2H2G). Every transfer begins with its blocks
pinned and ends in one method that commits or rolls back, which `StoreReads`, `Loads` and `WriteBack` have.

A model's blocks may be of several types, each with pools and a restore rule of its own; all types number their blocks
alike and share one chain of hashes. What is worth keeping of those types that a restore needs only a part of is what
lies before certain boundaries: a multiple of the type's stride, the prompt's end, and where a prompt left another's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Types

from ...block import BlockType, common_boundary
from ...figures import TypeSizes
from ...plans import HOLE, StateMoves
from .account import PrefixAccount
from .checkpoints import Checkpoints
from .drafting import Drafting
from .host_loads import Load, Loads
from .journal import CacheJournal
from .policy import RestorePolicy
from .pool import BlockPool
from .sequence import Sequence
from .store_reads import ReadLimits, StoreReads
from .types import Found, HeldCheckpoints, TypePools
from .write_back import WorkerLink, WriteBack


class HierarchyBlockManagerPool:
    """Device and host blocks of one instance.

    `types` are the model's BlockTypes with their sizes; none: KV blocks, `num_device_blocks` and `num_host_blocks`, of
    which 0 switches the host tier off. `strides[t]` says behind how many tokens each something of type t is kept for
    restores that begin there. Steps over prompt tokens end at multiples of `scan_tokens`, or with the prompt.

    `store_enabled` False switches the store off, `enable_prefix_cache` False all reuse. `policy` decides what is
    restored; None: whatever can be. A draft model's blocks (`drafting`) have the numbers of the target's and move with
    them. `journal`, if there is one, hears of every block that can be had, or no more.
    """

    def __init__(
        self,
        link: WorkerLink,
        *,
        num_device_blocks: int = 0,
        num_host_blocks: int = 0,
        block_size: int,
        types: Types[TypeSizes] = (),
        strides: Mapping[BlockType, int] | None = None,
        scan_tokens: int = 1,
        enable_prefix_cache: bool = True,
        store_enabled: bool = False,
        decode_kv_reuse: str = "canonical",
        limits: ReadLimits | None = None,
        policy: RestorePolicy | None = None,
        drafting: Drafting | None = None,
        journal: CacheJournal | None = None,
    ) -> None:
        self.drafting = drafting or Drafting()
        self.link = link
        self.block_size = block_size
        self.scan_tokens = scan_tokens
        types = types or [TypeSizes(BlockType.KV.value, 0, num_device_blocks, num_host_blocks, 1)]
        unit = types[0].block_bytes or 1
        self.pools = {BlockType(one.block_type): TypePools(one, block_size, one.block_bytes / unit) for one in types}
        self.types = tuple(self.pools)
        self._rules = [pools.rule for pools in self.pools.values()]
        self.tables = [pools for pools in self.pools.values() if pools.type is not BlockType.LINEAR]
        self._stride_blocks = {kind: -(-tokens // block_size) for kind, tokens in (strides or {}).items()}
        self.journal = journal
        if journal is not None:
            journal.watch(self.pools)
        linear = self.pools.get(BlockType.LINEAR)
        self._checkpoints = Checkpoints(linear, self._is_kept) if linear is not None else None
        first = self.pools[self.types[0]]
        self.device, self.host = first.device, first.host
        self.prefix_cache = enable_prefix_cache
        self.store_enabled = self._store_wanted = store_enabled and self.host.num_blocks > 0
        self.decode_kv_reuse = decode_kv_reuse
        self.policy = policy or RestorePolicy(block_size, measured=False)
        self._next_id = 1
        self._filling: dict[bytes, Sequence] = {}
        self.account = PrefixAccount(block_size)
        draft_types = self.drafting.types if self.drafting.by_model else ()
        self.loads = Loads(link, self.pools, self.new_id, draft_types=draft_types)
        self.write_back = WriteBack(
            link,
            self.pools,
            self.new_id,
            store_enabled=self.store_enabled,
            draft_types=draft_types,
            journal=journal,
        )
        self.store_reads = StoreReads(
            link,
            self.pools,
            self.new_id,
            limits=limits or ReadLimits(),
            policy=self.policy,
            candidates=self._num_candidates,
            restorable=self._num_restorable,
            on_found=self.write_back.store_answers,
            journal=journal,
        )

    def use_store(self, enabled: bool) -> None:
        """Read from and write to the store from now on, or no more; what is under way goes on.

        While the cache is distrusted nothing of that happens, but it is remembered.
        """
        self._store_wanted = enabled and self.host.num_blocks > 0
        self.store_enabled = self.write_back.store_enabled = self._store_wanted and self.policy.trusted
        if self.store_enabled:
            self.write_back.begin_anew()

    def distrust(self) -> None:
        """Restore nothing any more, forget what could be, and write nothing to the store."""
        self.policy.trusted = False
        self.use_store(self._store_wanted)
        for tier in ("device", "host"):
            self.clear(tier)

    def trust(self) -> None:
        """Undo `distrust`."""
        if not self.policy.trusted:
            self.policy.trusted = True
            self.use_store(self._store_wanted)

    def new_id(self) -> int:
        """Ids of plans only grow, and none is used twice."""
        self._next_id += 1
        return self._next_id

    # ------------------------------------------------------------------------------------------ the prefix

    def shares(self, sequence: Sequence) -> bool:
        """The sequence takes blocks that others left, and leaves its own."""
        return self.prefix_cache and not sequence.private

    def _num_candidates(self, sequence: Sequence) -> int:
        """Full blocks of the known tokens that could spare computing anything."""
        if not self.shares(sequence):
            return 0
        limit = sequence.reuse_limit
        if sequence.num_generated or BlockType.LINEAR in self.pools:
            # The decode path writes its last row: not into a shared block. And no state lies before a block's end.
            return limit // self.block_size
        return min(len(sequence.tokens) // self.block_size, -(-limit // self.block_size))

    def _host_block(self, sequence: Sequence, pools: TypePools, index: int) -> int | None:
        if sequence.remote or not self.policy.loading_pays():
            return None
        mounted = sequence.held[pools.type].mounted.get(index)
        return mounted if mounted is not None else pools.host.find(sequence.hash_of(index))

    def _num_restorable(self, sequence: Sequence) -> int:
        """Blocks up to the boundary that device and host can provide together."""

        def has(block_type: BlockType, index: int) -> bool:
            pools = self.pools[block_type]
            on_device = pools.device.find(sequence.hash_of(index)) is not None
            return on_device or self._host_block(sequence, pools, index) is not None

        limit = self._num_candidates(sequence) * self.block_size
        return common_boundary(self._rules, has, limit) // self.block_size

    def _num_matched(self, sequence: Sequence, boundary: int) -> int:
        """Blocks that are there of the first type, which may reach beyond the boundary that all types allow."""
        pools, end = self.pools[self.types[0]], self._num_candidates(sequence)
        while (
            len(self.pools) > 1
            and boundary < end
            and (
                pools.device.find(sequence.hash_of(boundary)) is not None
                or self._host_block(sequence, pools, boundary) is not None
            )
        ):
            boundary += 1
        return boundary

    def beyond_grid(self, start: int, end: int) -> int:
        """Tokens of a prompt's step over `start .. end` that lie behind the last place where it may end: behind a
        block, where a state is worth keeping, or at least behind a cell of the scan."""
        if self.scan_tokens == 1:
            return 0
        beyond = end % self.block_size
        return beyond if end - beyond > start else min(end % self.scan_tokens, end - start)

    def match(self, sequence: Sequence) -> int:
        """Tokens that `allocate` would take from device and host now; nothing is changed."""
        return self._num_hit_tokens(sequence, self._num_restorable(sequence))

    def _num_hit_tokens(self, sequence: Sequence, num_restored: int) -> int:
        """Tokens that need not be computed with so many blocks restored."""
        end = num_restored * self.block_size - self.drafting.needs_hidden
        return max(0, min(end, sequence.reuse_limit))

    def is_being_computed(self, sequence: Sequence) -> bool:
        """The first block `sequence` misses is being computed by a running one: waiting for it costs less.

        It then waits for the last block of that owner it can share, so that a crowd behind one prompt is not looked
        through at every step.
        """
        if sequence.waits_for is not None and sequence.waits_for in self._filling:
            return True
        sequence.waits_for = None
        end = self._num_candidates(sequence)
        index = self._num_matched(sequence, self._num_restorable(sequence))
        owner = self._filling.get(sequence.hash_of(index)) if index < end else None
        if owner is None or owner is sequence:
            return False
        while index < end and self._filling.get(sequence.hash_of(index)) is owner:
            sequence.waits_for = sequence.hash_of(index)
            index += 1
        return True

    @property
    def most_tokens(self) -> int:
        """Longest sequence that the device has blocks for."""
        whole = [pools.device.num_blocks * self.block_size for pools in self.tables if not pools.rule.span]
        return min(whole, default=sys.maxsize)

    @property
    def num_available(self) -> int:
        """Device blocks that every type with a block table could still give."""
        return min(pools.device.num_available for pools in self.tables)

    # ------------------------------------------------------------------------------- phase 1: G2H prefetch

    def prefetch_from_storage(self, sequence: Sequence) -> bool:
        """Begin to read what device and host lack of the prompt; False when there is nothing to wait for."""
        return self.store_enabled and self.store_reads.begin(sequence)

    def update_prefetch_result(self, sequence: Sequence) -> bool:
        """True when nothing of the store is pending for this sequence: its hits are mounted, it may be scheduled."""
        return self.store_reads.update(sequence)

    # ------------------------------------------------------------------------ phase 2: allocation and H2D

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Device blocks for the first `num_tokens` tokens; on a sequence without blocks, the cached prefix first.

        Joins device prefix and mounted host prefix, reserves host blocks for the later write-back (best effort, all or
        none), publishes the metadata of restored blocks up to the token cursor, and plans their load. False and
        nothing changed when the device has not enough blocks of some type.
        """
        count = -(-num_tokens // self.block_size)
        if sequence.probed and self._has_blocks(sequence, count):
            self._reserve(sequence, num_tokens)
            return True
        found: list[Found] = []
        boundary = 0
        if not sequence.probed:
            boundary = self._num_restorable(sequence)
            found = self._pin_prefix(sequence, boundary)
        new = {
            pools.type: max(0, count - max(boundary, len(sequence.held[pools.type].blocks))) for pools in self.tables
        }
        if BlockType.LINEAR in self.pools and not sequence.live_states:
            new[BlockType.LINEAR] = 1 + self.drafting.num_tokens
        loads = {kind: sum(item.device is None and item.pools.type is kind for item in found) for kind in new}
        blocks = self.allocate_all({kind: new[kind] + loads[kind] for kind in new})
        if blocks is None:
            self._unpin_prefix(found)
            return False
        if not sequence.probed:
            self._join_prefix(sequence, boundary, found, {kind: blocks[kind][: loads[kind]] for kind in new})
        for kind in new:
            if kind is BlockType.LINEAR:
                sequence.live_states.extend(blocks[kind][loads[kind] :])
            else:
                sequence.held[kind].blocks.extend(blocks[kind][loads[kind] :])
        self._reserve(sequence, num_tokens)
        return True

    def _has_blocks(self, sequence: Sequence, count: int) -> bool:
        """So many blocks of each type that has a table; the common case of a step that decodes."""
        for pools in self.tables:
            if len(sequence.held[pools.type].blocks) < count:
                return False
        return self._checkpoints is None or bool(sequence.live_states)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """What it is well to have for the next tokens, but not needed."""
        if not self.shares(sequence):
            return
        if self._checkpoints is not None:
            self._checkpoints.reserve(sequence, num_tokens)
        last = min(num_tokens, sequence.prompt_length) // self.block_size
        if last > sequence.num_published:
            self._reserve_host_targets(sequence, last)

    def allocate_all(self, counts: Mapping[BlockType, int]) -> dict[BlockType, list[int]] | None:
        """So many device blocks of each type, or None and nothing changed."""
        if any(self.pools[kind].device.num_available < count for kind, count in counts.items()):
            return None
        return {kind: self.pools[kind].device.allocate(count) or [] for kind, count in counts.items()}

    def _pin_prefix(self, sequence: Sequence, boundary: int) -> list[Found]:
        """What must be there to go on from block `boundary`, each with one more reference."""
        found = []
        for pools in self.pools.values():
            for index in pools.rule.needed(boundary * self.block_size):
                device = pools.device.find(sequence.hash_of(index))
                host = self._host_block(sequence, pools, index) if device is None else None
                if device is not None:
                    pools.device.pin(device)
                elif host is not None:
                    pools.host.pin(host)
                found.append(Found(pools, index, device, host))
        return found

    @staticmethod
    def _unpin_prefix(found: Iterable[Found]) -> None:
        for item in found:
            if item.device is not None:
                item.pools.device.unpin([item.device])
            elif item.host is not None:
                item.pools.host.unpin([item.host])

    def _join_prefix(
        self, sequence: Sequence, boundary: int, found: list[Found], targets: dict[BlockType, list[int]]
    ) -> None:
        # Where prompts part others will, too; and where one could go on, others can.
        sequence.boundaries |= {boundary, self._num_matched(sequence, boundary)} - {0}
        free = {kind: iter(blocks) for kind, blocks in targets.items()}
        for item in found:
            pools, block_hash = item.pools, sequence.hash_of(item.index)
            block = next(free[pools.type]) if item.device is None else item.device
            if item.host is not None:
                if self.journal is not None:
                    self.journal.learn(sequence, item.index)
                self.loads.plan(Load(pools.type, item.host, block, block_hash))
                pools.device.publish(block, block_hash, pools.parent(sequence.parent_of(item.index)))
            sequence.held[pools.type].put(item.index, block)
        self.store_reads.unmount(sequence)
        num_hit_tokens = self._num_hit_tokens(sequence, boundary)
        sequence.num_computed = num_hit_tokens
        sequence.write_from = sequence.draft_from = boundary * self.block_size
        sequence.num_published = boundary
        if self._checkpoints is not None:
            self._checkpoints.begin(sequence, boundary)
        sequence.probed = True
        self.account.open(sequence, found, num_hit_tokens)
        if any(targets.values()):
            # Decoded blocks, which a preempted request gets back, have bits that no prompt gives.
            sequence.num_restored = min(boundary, sequence.prompt_length // self.block_size)
            self.policy.count("host", "restored")
        elif not self.policy.loading_pays() and self._host_has(sequence, boundary):
            self.policy.count("host", "recomputed")
        self.claim(sequence, boundary)

    def claim(self, sequence: Sequence, first: int, end: int | None = None) -> None:
        """Others that want full blocks of this prompt from number `first` on do well to wait for it."""
        if self.shares(sequence):
            for index in range(first, sequence.prompt_length // self.block_size if end is None else end):
                self._filling.setdefault(sequence.hash_of(index), sequence)

    def disclaim(self, sequence: Sequence) -> None:
        """Undo `claim`: nobody is to wait for this sequence."""
        for block_hash in sequence.hashes:
            self._unclaim(block_hash, sequence)

    def _host_has(self, sequence: Sequence, index: int) -> bool:
        return index < self._num_candidates(sequence) and self.host.find(sequence.hash_of(index)) is not None

    def _is_kept(self, sequence: Sequence, pools: TypePools, index: int) -> bool:
        """A restore at some boundary worth keeping needs block `index` of this type."""
        if not pools.rule.span:
            return True
        boundaries, stride = pools.rule.needed_at(index), self._stride_blocks.get(pools.type, sys.maxsize)
        on_stride = (boundaries.stop - 1) // stride * stride
        return on_stride >= boundaries.start or any(boundary in boundaries for boundary in sequence.boundaries)

    def _reserve_host_targets(self, sequence: Sequence, last: int) -> None:
        for kind, pools in self.pools.items():
            if not pools.host.num_blocks:
                continue
            held = sequence.held[kind]
            wanted = [
                index
                for index in range(sequence.num_published, last)
                if index not in held.targets
                and held.block(index) != HOLE
                and self._is_kept(sequence, pools, index)
                and self.write_back.is_missing(kind, sequence.hash_of(index))
            ]
            targets = pools.host.allocate(len(wanted))
            if targets is not None:
                held.targets.update(zip(wanted, targets, strict=True))

    def transfer_blocks(self) -> list[int]:
        """Send the load planned since the last call; its batch ids (none or one) go into the next Forward."""
        return self.loads.send()

    @staticmethod
    def holds_any(sequence: Sequence, blocks: set[tuple[BlockType, int]]) -> bool:
        """The sequence holds one of these device blocks."""
        return bool(blocks) and any(
            block in held.blocks for kind, block in blocks if (held := sequence.held.get(kind)) is not None
        )

    def move_states(self, sequence: Sequence, end: int, num_drafts: int = 0) -> StateMoves | None:
        """Where the next step, over the tokens up to `end` and `num_drafts` drafts behind them, takes the sequence's
        recurrent state from and leaves it; None when the model has none."""
        return self._checkpoints.move(sequence, end, num_drafts) if self._checkpoints is not None else None

    # ----------------------------------------------------------------------------- phase 3: D2H2G write-back

    def publish_computed(self, sequence: Sequence) -> None:
        """Offer the blocks completed by the last forward to the device prefix and queue their write-back; let go of
        those that no later token needs."""
        if self._checkpoints is not None:
            self._checkpoints.note_written(sequence)
        self._publish(sequence, self._num_publishable(sequence), put=True)
        for pools in self.pools.values():
            held = sequence.held[pools.type]
            if pools.type is BlockType.SWA:
                boundary = sequence.num_computed - sequence.num_computed % self.block_size
                slid = held.take_before(pools.rule.needed(boundary).start)
                if slid:
                    self._let_go(sequence, pools, slid)
        if self._checkpoints is not None and (needless := self._checkpoints.needless(sequence)):
            self._let_go(sequence, self.pools[BlockType.LINEAR], needless)

    def _let_go(self, sequence: Sequence, pools: TypePools, blocks: Mapping[int, int]) -> None:
        """Hold device blocks no more, by number; those that lie before no boundary worth keeping are evicted first."""
        kept = {number for number in blocks if self._is_kept(sequence, pools, number)}
        pools.device.unpin([block for number, block in blocks.items() if number not in kept], oldest=True)
        pools.let_go([blocks[number] for number in sorted(kept)])

    def _num_publishable(self, sequence: Sequence) -> int:
        complete = sequence.num_computed // self.block_size
        if sequence.tag_decoded:  # decoded blocks are not what a prompt of these tokens would compute
            complete = min(complete, sequence.prompt_length // self.block_size)
        return complete

    def _publish(self, sequence: Sequence, end: int, *, put: bool) -> None:
        if not self.shares(sequence):
            return
        for index in range(sequence.num_published, end):
            for pools in self.pools.values():
                if self._is_written(sequence, pools, index):
                    self._publish_block(sequence, pools, index, put)
            self._unclaim(sequence.hash_of(index), sequence)
        sequence.num_published = max(sequence.num_published, end)

    def _unclaim(self, block_hash: bytes, sequence: Sequence) -> None:
        if self._filling.get(block_hash) is sequence:
            del self._filling[block_hash]

    def publish_filled(self, sequence: Sequence, places: Mapping[BlockType, Iterable[int]]) -> None:
        """As `publish_computed`, of a sequence whose blocks of the numbers `places` another instance has filled; those
        between them were found on the device."""
        end = self._num_publishable(sequence)
        if self.shares(sequence):
            for pools in self.tables:
                for index in sorted(number for number in places[pools.type] if number < end):
                    self._publish_block(sequence, pools, index, put=True)
            for index in range(end):
                self._unclaim(sequence.hash_of(index), sequence)
        sequence.num_published = end

    def _is_written(self, sequence: Sequence, pools: TypePools, index: int) -> bool:
        """The sequence holds block `index`, complete; a checkpoint only if a step was told to write it."""
        held = sequence.held[pools.type]
        return index in held.written if isinstance(held, HeldCheckpoints) else held.block(index) != HOLE

    def _publish_block(self, sequence: Sequence, pools: TypePools, index: int, put: bool) -> None:
        held, block_hash = sequence.held[pools.type], sequence.hash_of(index)
        block = held.block(index)
        if self.journal is not None:
            self.journal.learn(sequence, index)
        if not pools.device.publish(block, block_hash, pools.parent(sequence.parent_of(index))):
            same = pools.device.find(block_hash)  # go on from the block others find: two copies help nobody
            if same is not None and same != block:
                pools.device.pin(same)
                pools.device.unpin([block])
                held.put(index, same)
                if pools.type is BlockType.LINEAR:
                    sequence.states[(index + 1) * self.block_size] = same
        if self._is_kept(sequence, pools, index):
            self._write_back(sequence, pools, index, put)

    def _write_back(self, sequence: Sequence, pools: TypePools, index: int, put: bool) -> None:
        held, block_hash = sequence.held[pools.type], sequence.hash_of(index)
        target = held.targets.pop(index, None)
        self.write_back.queue(pools.type, held.block(index), block_hash, sequence.parent_of(index), target, put=put)

    def begin_canonical(self, sequence: Sequence) -> bool:
        """Prepare a finished sequence to have its decoded blocks computed once more as a prompt; False when none is
        worth it. The sequence keeps its KV blocks, others are allocated step by step; positions before `canonical_end`
        will be computed."""
        first = sequence.prompt_length // self.block_size
        end = len(sequence.tokens) // self.block_size
        if (
            not self.prefix_cache
            or self.decode_kv_reuse != "canonical"
            or end <= first
            or sequence.num_published < first
        ):
            return False
        if not self._hold_again(sequence, first) or not self._own_blocks(sequence, first, end):
            return False
        sequence.use_canonical_hashes()
        alone = len(self.pools) == 1 and not self.pools[self.types[0]].rule.span
        while alone and first < end and (same := self.device.find(sequence.hash_of(first))) is not None:
            self.device.pin(same)  # somebody had the same conversation: go on from their block
            self.device.unpin([sequence.device_blocks[first]])
            sequence.held[self.types[0]].put(first, same)
            first += 1
        if first == end:
            return False
        sequence.num_published = first
        sequence.num_computed = max(0, first * self.block_size - self.drafting.needs_hidden)
        sequence.write_from = sequence.draft_from = first * self.block_size
        sequence.canonical_end = end * self.block_size
        sequence.boundaries.add(end)
        if self._checkpoints is not None:
            self._checkpoints.drop_from(sequence, first)
            self._checkpoints.begin(sequence, first)
        self.claim(sequence, first, end)
        return True

    def _hold_again(self, sequence: Sequence, boundary: int) -> bool:
        """Hold all that going on from block `boundary` needs, also what was let go of; False when some is gone."""
        for pools in self.pools.values():
            held = sequence.held[pools.type]
            for index in pools.rule.needed(boundary * self.block_size):
                if held.block(index) != HOLE:
                    continue
                block = pools.device.find(sequence.hash_of(index))
                if block is None:
                    return False
                pools.device.pin(block)
                held.put(index, block)
        return True

    def _own_blocks(self, sequence: Sequence, first: int, end: int) -> bool:
        """Give the sequence KV blocks `first` to `end` that nobody else holds or finds, and take its SWA blocks from
        `first` on; False when there is no room."""
        for pools in self.tables:
            held, device = sequence.held[pools.type], pools.device
            if pools.rule.span:
                pools.let_go(held.cut(first))
                continue
            lacking = [
                index
                for index in range(first, end)
                if held.block(index) == HOLE or device.references(held.block(index)) > 1
            ]
            blocks = device.allocate(len(lacking))
            if blocks is None:
                return False
            for index, block in zip(lacking, blocks, strict=True):
                pools.let_go([held.block(index)])
                held.put(index, block)
            for block in held.blocks[first:end]:
                device.withdraw(block)
        return True

    def deallocate(self, sequence: Sequence, *, resume: bool = False) -> None:
        """Give back all blocks of a sequence; queued write-backs keep their own references.

        `resume`: the sequence was preempted, so its complete decoded blocks are offloaded too, to the host only.
        """
        if resume and self._checkpoints is not None and self.shares(sequence):
            index = self._checkpoints.keep_live(sequence)
            if index is not None:
                self._publish_block(sequence, self.pools[BlockType.LINEAR], index, put=True)
        if resume or sequence.in_prefill or not sequence.tag_decoded:
            sequence.boundaries.add(self._num_resumable(sequence))
        if resume:
            self._publish(sequence, self._num_resumable(sequence), put=not sequence.tag_decoded)
        self._write_back_rest(sequence)
        if self.store_reads.concerns(sequence):
            raise RuntimeError("a sequence is deallocated only after its prefetch ended")
        self.disclaim(sequence)
        self.store_reads.unmount(sequence)
        for kind, pools in self.pools.items():
            held = sequence.held[kind]
            blocks = {n: held.block(n) for n in held.numbers(sys.maxsize) if held.block(n) != HOLE}
            self._let_go(sequence, pools, blocks)
            pools.host.unpin(held.targets.values())
        if sequence.live_states:
            self.pools[BlockType.LINEAR].device.unpin(sequence.live_states)
        sequence.forget_blocks()

    def _num_resumable(self, sequence: Sequence) -> int:
        """Complete blocks that are of use when the sequence goes on: with recurrent layers it needs a state, too."""
        complete = sequence.num_computed // self.block_size
        return complete if self._checkpoints is None else min(complete, self._checkpoints.num_resumable(sequence))

    def _write_back_rest(self, sequence: Sequence) -> None:
        """Queue the blocks whose write-back was skipped when they were completed, or did not reach the store."""
        if not self.host.num_blocks:
            return
        end = sequence.num_published
        if sequence.tag_decoded:
            end = min(end, sequence.prompt_length // self.block_size)
        for pools in self.pools.values():
            held = sequence.held[pools.type]
            for index in held.numbers(end):
                block = held.block(index)
                if (
                    block != HOLE
                    and pools.device.find(sequence.hash_of(index)) == block
                    and self._is_kept(sequence, pools, index)
                ):
                    self._write_back(sequence, pools, index, put=True)

    def transfer_offload_blocks(self) -> None:
        """Send the write-backs queued since the last call."""
        self.write_back.send()

    # ---------------------------------------------------------------------------------------- the whole

    @property
    def busy(self) -> bool:
        """Some transfer is planned or under way."""
        return self.store_reads.busy or self.loads.busy or self.write_back.busy

    def clear(self, tier: str) -> int:
        """Forget what `tier` (device | host) could serve; blocks in use stay until released. Returns how many."""
        return sum(pools.tiers[tier].clear() for pools in self.pools.values())

    def check(self) -> None:
        """Raise InvariantError unless every pool's books balance."""
        for pools in self.pools.values():
            pools.device.check()
            pools.host.check()

    def block_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """{tier: {type: {free, pinned, evictable, and for the host quarantined}}} for metrics."""
        counts: dict[str, dict[str, dict[str, int]]] = {"device": {}, "host": {}}
        for kind, pools in self.pools.items():
            left_alone = self.store_reads.left_alone(kind)
            counts["device"][kind.value] = _counts(pools.device)
            counts["host"][kind.value] = _counts(pools.host) | {
                "pinned": pools.host.num_pinned - left_alone,
                "quarantined": left_alone,
            }
        return counts


def _counts(pool: BlockPool) -> dict[str, int]:
    return {"free": pool.num_free, "pinned": pool.num_pinned, "evictable": pool.num_evictable}
