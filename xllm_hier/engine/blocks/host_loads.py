"""The H2D half of the block books: loads planned, registered with a step, and ended with it, well or not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ...block import BlockType
from ...plans import TransferAck, TransferBlocks
from .ledger import Ledger
from .moves import Orders, block_mappings, draft_part
from .types import DeviceBlocks

log = logging.getLogger("xllm.engine")


@dataclass(frozen=True)
class Load:
    """One H2D block of a batch; the host block is pinned until the forward that waits for it returns."""

    type: BlockType
    host: int
    device: int
    block_hash: bytes


class Loads:
    """Copies of host blocks to device blocks, each batch for one forward; the draft model's blocks of the same numbers
    go along."""

    def __init__(self, orders: Orders, ledger: Ledger) -> None:
        self._orders = orders
        self._pools = ledger.pools
        self._draft_types = ledger.settings.drafting.moved_types
        self.planned: list[Load] = []
        self.batches: dict[int, list[Load]] = {}
        self._failed_acks: set[int] = set()
        self.num_failed = 0

    @property
    def busy(self) -> bool:
        """Some load is planned or under way."""
        return bool(self.planned or self.batches)

    def plan(self, load: Load) -> None:
        """Load with the next step; takes over one reference of the host block."""
        self.planned.append(load)

    def send(self) -> list[int]:
        """Send the load planned since the last call; its batch ids (none or one) go into the next Forward."""
        if not self.planned:
            return []
        batch_id, loads = self._orders.new_id(), self.planned
        self.planned = []
        self.batches[batch_id] = loads
        target = block_mappings(loads)
        self._orders.send(TransferBlocks(batch_id, target, draft_part(target, self._draft_types)))
        return [batch_id]

    def on_ack(self, ack: TransferAck) -> None:
        """A worker registered a load; a wrong block count makes the batch a failed one."""
        loads = self.batches.get(ack.batch_id)
        if loads is not None and ack.num_blocks != len(loads):
            log.error("rank %d registered %d of %d blocks to load", ack.rank, ack.num_blocks, len(loads))
            self._failed_acks.add(ack.batch_id)

    def finish(self, batch_ids: Iterable[int], failed: Iterable[int]) -> DeviceBlocks:
        """The forward that waited for these loads has returned. Returns the device blocks whose load failed: they and
        their host sources are withdrawn from the prefix, and their holders must compute again."""
        bad: DeviceBlocks = set()
        failed = set(failed)
        for batch_id in batch_ids:
            loads = self.batches.pop(batch_id)
            is_bad = batch_id in failed or batch_id in self._failed_acks
            self.num_failed += is_bad
            for load in loads:
                pools = self._pools[load.type]
                if is_bad:
                    bad.add((load.type, load.device))
                    pools.host.withdraw(load.host)
                pools.host.unpin([load.host])
        self._failed_acks.clear()
        for kind, block in bad:
            self._pools[kind].device.withdraw(block)
        return bad
