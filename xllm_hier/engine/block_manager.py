"""HierarchyBlockManagerPool: who holds which block in which tier, and every plan that moves blocks between tiers.

The three phases of the specification are `prefetch_from_storage` / `update_prefetch_result` (G2H), `allocate` /
`transfer_blocks` (H2D), and `deallocate` / `transfer_offload_blocks` (D2H2G). Every transfer begins with its blocks
pinned and ends in one method that commits or rolls back: `StoreReads._finish`, `finish_step`, `_finish_copy`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ..block import BlockType, common_boundary
from ..plans import PromptUsage, TransferAck, TransferBlocks
from .block_pool import BlockPool
from .drafts import Drafting
from .restore_policy import RestorePolicy
from .sequence import Sequence
from .store_reads import ReadLimits, StoreReads
from .write_back import WorkerLink, WriteBack, block_mapping

log = logging.getLogger("xllm.engine")


@dataclass(frozen=True)
class _Load:
    """One H2D block of a registered batch; the host block is pinned until the forward that waits for it returns."""

    host: int
    device: int
    block_hash: bytes


class HierarchyBlockManagerPool:
    """Device and host blocks of one instance.

    `num_host_blocks` 0 switches the host tier off, `store_enabled` False the store, `enable_prefix_cache` False all
    reuse. `policy` decides what is restored; None: whatever can be. A draft model's blocks (`drafting`) have the
    numbers of the target's and move with them.
    """

    def __init__(
        self,
        link: WorkerLink,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        store_enabled: bool = False,
        decode_kv_reuse: str = "canonical",
        limits: ReadLimits | None = None,
        policy: RestorePolicy | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.drafting = drafting or Drafting()
        self.link = link
        self.block_size = block_size
        self.device = BlockPool(num_device_blocks)
        self.host = BlockPool(num_host_blocks)
        self.prefix_cache = enable_prefix_cache
        self.store_enabled = self._store_wanted = store_enabled and num_host_blocks > 0
        self.decode_kv_reuse = decode_kv_reuse
        self.policy = policy or RestorePolicy(block_size, measured=False)
        self._next_id = 1
        self._filling: dict[bytes, Sequence] = {}
        self._planned_loads: list[_Load] = []
        self._batches: dict[int, list[_Load]] = {}
        self._failed_acks: set[int] = set()
        self.write_back = WriteBack(
            link,
            self.device,
            self.host,
            self.new_id,
            store_enabled=self.store_enabled,
            draft_domain=self.drafting.by_model,
        )
        self.store_reads = StoreReads(
            link,
            self.device,
            self.host,
            self.new_id,
            limits=limits or ReadLimits(),
            policy=self.policy,
            candidates=self._num_candidates,
            restorable=self._num_restorable,
            on_found=self.write_back.store_answers,
        )
        self.num_failed_loads = 0
        self.prefix_tokens = {"device": 0, "host": 0, "store": 0, "computed": 0}

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

    def _num_candidates(self, sequence: Sequence) -> int:
        """Full blocks of the known tokens that could spare computing anything."""
        if not self.prefix_cache:
            return 0
        limit = sequence.reuse_limit
        if sequence.num_generated:
            return limit // self.block_size  # the decode path writes its last row: not into a shared block
        return min(len(sequence.tokens) // self.block_size, -(-limit // self.block_size))

    def _host_block(self, sequence: Sequence, index: int) -> int | None:
        if not self.policy.loading_pays():
            return None
        mounted = sequence.mounted.get(index)
        return mounted if mounted is not None else self.host.find(sequence.hash_of(index))

    def _num_restorable(self, sequence: Sequence) -> int:
        """Blocks up to the boundary that device and host can provide together."""
        present = []
        for index in range(self._num_candidates(sequence)):
            here = (
                self.device.find(sequence.hash_of(index)) is not None or self._host_block(sequence, index) is not None
            )
            present.append(here)
            if not here:
                break
        return common_boundary({BlockType.KV: present}, {BlockType.KV: self.block_size}) // self.block_size

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
        index, end = self._num_restorable(sequence), self._num_candidates(sequence)
        owner = self._filling.get(sequence.hash_of(index)) if index < end else None
        if owner is None or owner is sequence:
            return False
        while index < end and self._filling.get(sequence.hash_of(index)) is owner:
            sequence.waits_for = sequence.hash_of(index)
            index += 1
        return True

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
        nothing changed when the device has not enough blocks.
        """
        restored: list[tuple[int | None, int | None]] = []
        if not sequence.probed:
            restored = self._pin_prefix(sequence)
        held = len(sequence.device_blocks) + len(restored)
        num_loads = sum(device is None for device, _ in restored)
        num_new = max(0, -(-num_tokens // self.block_size) - held)
        blocks = self.device.allocate(num_loads + num_new)
        if blocks is None:
            self._unpin_prefix(restored)
            return False
        if not sequence.probed:
            self._join_prefix(sequence, restored, blocks[:num_loads])
        sequence.device_blocks.extend(blocks[num_loads:])
        self._reserve_host_targets(sequence, num_tokens)
        return True

    def _pin_prefix(self, sequence: Sequence) -> list[tuple[int | None, int | None]]:
        """(device block, None) or (None, host block) for each restorable block, each with one more reference."""
        found: list[tuple[int | None, int | None]] = []
        for index in range(self._num_restorable(sequence)):
            device = self.device.find(sequence.hash_of(index))
            host = self._host_block(sequence, index) if device is None else None
            if device is not None:
                self.device.pin(device)
            elif host is not None:
                self.host.pin(host)
            found.append((device, host))
        return found

    def _unpin_prefix(self, restored: Iterable[tuple[int | None, int | None]]) -> None:
        restored = list(restored)
        self.device.unpin(device for device, _ in restored if device is not None)
        self.host.unpin(host for _, host in restored if host is not None)

    def _join_prefix(
        self, sequence: Sequence, restored: list[tuple[int | None, int | None]], targets: list[int]
    ) -> None:
        free_targets = iter(targets)
        for index, (device, host) in enumerate(restored):
            block = next(free_targets) if device is None else device
            if host is not None:
                self._planned_loads.append(_Load(host, block, sequence.hash_of(index)))
                self.device.publish(block, sequence.hash_of(index), sequence.parent_of(index))
            sequence.device_blocks.append(block)
        self.store_reads.unmount(sequence)
        num_hit_tokens = self._num_hit_tokens(sequence, len(restored))
        sequence.num_computed = num_hit_tokens
        sequence.write_from = sequence.draft_from = len(restored) * self.block_size
        sequence.num_published = len(restored)
        sequence.probed = True
        self._account(sequence, restored, num_hit_tokens)
        if targets:
            # Decoded blocks, which a preempted request gets back, have bits that no prompt gives.
            sequence.num_restored = min(len(restored), sequence.prompt_length // self.block_size)
            self.policy.count("host", "restored")
        elif not self.policy.loading_pays() and self._host_has(sequence, len(restored)):
            self.policy.count("host", "recomputed")
        if self.prefix_cache:
            for index in range(len(restored), sequence.prompt_length // self.block_size):
                self._filling.setdefault(sequence.hash_of(index), sequence)

    def _host_has(self, sequence: Sequence, index: int) -> bool:
        return index < self._num_candidates(sequence) and self.host.find(sequence.hash_of(index)) is not None

    def _account(self, sequence: Sequence, restored: list[tuple[int | None, int | None]], num_hit_tokens: int) -> None:
        """Which tier pays for which prompt token; once per request, a resumed one keeps its first account."""
        if sequence.usage is not None:
            return
        paid = {"device": 0, "host": 0, "store": 0}
        for index, (device, _) in enumerate(restored):
            tokens = max(0, min(self.block_size, num_hit_tokens - index * self.block_size))
            tier = "device" if device is not None else "store" if index in sequence.from_store else "host"
            paid[tier] += tokens
        computed = sequence.prompt_length - num_hit_tokens
        sequence.usage = PromptUsage(paid["device"], paid["host"], paid["store"], computed)
        self._count(sequence.usage, +1)

    def _count(self, usage: PromptUsage, sign: int) -> None:
        for tier in self.prefix_tokens:
            self.prefix_tokens[tier] += sign * int(getattr(usage, tier))

    def forget_account(self, sequence: Sequence) -> None:
        """What a failed load brought was not there after all; the next admission accounts anew."""
        if sequence.usage is not None and not sequence.usage_sent:
            self._count(sequence.usage, -1)
            sequence.usage = None
            sequence.from_store.clear()

    def _reserve_host_targets(self, sequence: Sequence, num_tokens: int) -> None:
        last = min(num_tokens, sequence.prompt_length) // self.block_size
        wanted = [
            index
            for index in range(sequence.num_published, last if self.prefix_cache and self.host.num_blocks else 0)
            if index not in sequence.host_targets and self.write_back.is_missing(sequence.hash_of(index))
        ]
        targets = self.host.allocate(len(wanted))
        if targets is not None:
            sequence.host_targets.update(zip(wanted, targets, strict=True))

    def transfer_blocks(self) -> list[int]:
        """Send the load planned since the last call; its batch ids (none or one) go into the next Forward."""
        if not self._planned_loads:
            return []
        batch_id, loads = self.new_id(), self._planned_loads
        self._planned_loads = []
        self._batches[batch_id] = loads
        target = [block_mapping((load.device, load.host, load.block_hash) for load in loads)]
        self.link.broadcast(TransferBlocks(batch_id, target, target if self.drafting.by_model else []))
        return [batch_id]

    def on_transfer_ack(self, ack: TransferAck) -> None:
        """A worker registered a load; a wrong block count makes the batch a failed one."""
        loads = self._batches.get(ack.batch_id)
        if loads is not None and ack.num_blocks != len(loads):
            log.error("rank %d registered %d of %d blocks to load", ack.rank, ack.num_blocks, len(loads))
            self._failed_acks.add(ack.batch_id)

    def finish_step(self, batch_ids: Iterable[int], failed: Iterable[int]) -> set[int]:
        """The forward that waited for these loads has returned. Returns the device blocks whose load failed: they and
        their host sources are withdrawn from the prefix, and who holds them must compute again."""
        bad: set[int] = set()
        failed = set(failed)
        for batch_id in batch_ids:
            loads = self._batches.pop(batch_id)
            if batch_id in failed or batch_id in self._failed_acks:
                self.num_failed_loads += 1
                bad.update(load.device for load in loads)
                for load in loads:
                    self.host.withdraw(load.host)
            self.host.unpin(load.host for load in loads)
        self._failed_acks.clear()
        for block in bad:
            self.device.withdraw(block)
        return bad

    # ----------------------------------------------------------------------------- phase 3: D2H2G write-back

    def publish_computed(self, sequence: Sequence) -> None:
        """Offer the blocks completed by the last forward to the device prefix and queue their write-back."""
        self._publish(sequence, self._num_publishable(sequence), put=True)

    def _num_publishable(self, sequence: Sequence) -> int:
        complete = sequence.num_computed // self.block_size
        if sequence.tag_decoded:  # decoded blocks are not what a prompt of these tokens would compute
            complete = min(complete, sequence.prompt_length // self.block_size)
        return complete

    def _publish(self, sequence: Sequence, end: int, *, put: bool) -> None:
        if not self.prefix_cache:
            return
        for index in range(sequence.num_published, end):
            block, block_hash = sequence.device_blocks[index], sequence.hash_of(index)
            if not self.device.publish(block, block_hash, sequence.parent_of(index)):
                same = self.device.find(block_hash)  # go on from the block others find: two copies help nobody
                if same is not None and same != block:
                    self.device.pin(same)
                    self.device.unpin([block])
                    sequence.replace_block(index, same)
            if self._filling.get(block_hash) is sequence:
                del self._filling[block_hash]
            self._write_back(sequence, index, put)
        sequence.num_published = max(sequence.num_published, end)

    def _write_back(self, sequence: Sequence, index: int, put: bool) -> None:
        target = sequence.host_targets.pop(index, None)
        block, block_hash = sequence.device_blocks[index], sequence.hash_of(index)
        self.write_back.queue(block, block_hash, sequence.parent_of(index), target, put=put)

    def begin_canonical(self, sequence: Sequence) -> bool:
        """Prepare a finished sequence to have its decoded blocks computed once more as a prompt; False when none is
        worth it. The sequence keeps its blocks; positions before `canonical_end` will be computed."""
        first = sequence.prompt_length // self.block_size
        end = len(sequence.tokens) // self.block_size
        if (
            not self.prefix_cache
            or self.decode_kv_reuse != "canonical"
            or end <= first
            or sequence.num_published < first
        ):
            return False
        if not self._own_blocks(sequence, first, end):
            return False
        sequence.use_canonical_hashes()
        while first < end and (same := self.device.find(sequence.hash_of(first))) is not None:
            self.device.pin(same)  # somebody had the same conversation: go on from their block
            self.device.unpin([sequence.device_blocks[first]])
            sequence.replace_block(first, same)
            first += 1
        if first == end:
            return False
        sequence.num_published = first
        sequence.num_computed = max(0, first * self.block_size - self.drafting.needs_hidden)
        sequence.write_from = sequence.draft_from = first * self.block_size
        sequence.canonical_end = end * self.block_size
        for index in range(first, end):
            self._filling.setdefault(sequence.hash_of(index), sequence)
        return True

    def _own_blocks(self, sequence: Sequence, first: int, end: int) -> bool:
        """Give the sequence blocks `first` to `end` that nobody else holds or finds; False when there is no room."""
        held = sequence.device_blocks[first:end]
        shared = [index for index, block in enumerate(held, first) if self.device.references(block) > 1]
        blocks = self.device.allocate(len(shared) + max(0, end - len(sequence.device_blocks)))
        if blocks is None:
            return False
        for index in shared:
            self.device.unpin([sequence.device_blocks[index]])
            sequence.replace_block(index, blocks.pop())
        sequence.device_blocks.extend(blocks)
        for block in sequence.device_blocks[first:end]:
            self.device.withdraw(block)
        return True

    def deallocate(self, sequence: Sequence, *, resume: bool = False) -> None:
        """Give back all blocks of a sequence; queued write-backs keep their own references.

        `resume`: the sequence was preempted, so its complete decoded blocks are offloaded too, to the host only.
        """
        if resume:
            self._publish(sequence, sequence.num_computed // self.block_size, put=not sequence.tag_decoded)
        else:
            self._write_back_rest(sequence)
        if self.store_reads.concerns(sequence):
            raise RuntimeError("a sequence is deallocated only after its prefetch ended")
        for block_hash in sequence.hashes:
            if self._filling.get(block_hash) is sequence:
                del self._filling[block_hash]
        self.device.unpin(sequence.device_blocks)
        self.store_reads.unmount(sequence)
        self.host.unpin(sequence.host_targets.values())
        sequence.forget_blocks()

    def _write_back_rest(self, sequence: Sequence) -> None:
        """Queue the blocks whose write-back was skipped when they were completed, or did not reach the store."""
        if not self.host.num_blocks:
            return
        end = min(sequence.num_published, len(sequence.device_blocks))
        if sequence.tag_decoded:
            end = min(end, sequence.prompt_length // self.block_size)
        for index in range(end):
            if self.device.find(sequence.hash_of(index)) == sequence.device_blocks[index]:
                self._write_back(sequence, index, put=True)

    def transfer_offload_blocks(self) -> None:
        """Send the write-backs queued since the last call."""
        self.write_back.send()

    # ---------------------------------------------------------------------------------------- the whole

    @property
    def busy(self) -> bool:
        """Some transfer is planned or under way."""
        return bool(self.store_reads.busy or self._batches or self._planned_loads or self.write_back.busy)

    def clear(self, tier: str) -> int:
        """Forget what `tier` (device | host) could serve; blocks in use stay until released. Returns how many."""
        return {"device": self.device, "host": self.host}[tier].clear()

    def check(self) -> None:
        """Raise InvariantError unless every pool's books balance."""
        self.device.check()
        self.host.check()

    def block_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """{tier: {type: {free, pinned, evictable, and for the host quarantined}}} for metrics."""
        device, host, left_alone = self.device, self.host, self.store_reads.num_left_alone
        return {
            "device": {
                BlockType.KV.value: {
                    "free": device.num_free,
                    "pinned": device.num_pinned,
                    "evictable": device.num_evictable,
                }
            },
            "host": {
                BlockType.KV.value: {
                    "free": host.num_free,
                    "pinned": host.num_pinned - left_alone,
                    "evictable": host.num_evictable,
                    "quarantined": left_alone,
                }
            },
        }
