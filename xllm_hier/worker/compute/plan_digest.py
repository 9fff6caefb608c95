"""A digest of the plans that a rank has carried out: ranks that got different plans have different digests."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ...ints import Ints
from ...plans import BlockMapping, Forward, PushBlocks, SequenceRows, TransferBlocks, TransferKvBlocks


class PlanDigest:
    """A running digest over every ordered plan, and a few words on the last step for people.

    Two ranks whose views of a step are equal have computed it, and filled their caches, from equal inputs.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._num_plans = 0

    def add(self, plan: Forward | TransferBlocks | TransferKvBlocks) -> None:
        """Take in a plan, in the order in which this rank carries plans out."""
        self._num_plans += 1
        if isinstance(plan, Forward):
            self._numbers(plan.step_id, len(plan.prefill), len(plan.decode), *plan.batch_ids)
            for rows in (*plan.prefill, *plan.decode):
                self._sequence(rows)
            for push in plan.pushes:
                self._push(push)
        else:
            is_load = isinstance(plan, TransferBlocks)
            self._numbers(is_load, plan.batch_id if isinstance(plan, TransferBlocks) else plan.transfer_id)
            for mapping in (*plan.target_mappings, *plan.draft_mappings):
                self._mapping(mapping)

    def view(self, plan: Forward, loads: Sequence[int], collectives: int) -> str:
        """This rank's view of a step it has computed: `loads` it waited for, collectives it has taken part in."""
        tokens = sum(len(sequence.token_ids) for sequence in plan.prefill)
        return (
            f"step {plan.step_id}: {len(plan.prefill)} prompts with {tokens} tokens, {len(plan.decode)} generating, "
            f"loads {sorted(loads)}, {collectives} collectives, {self._num_plans} plans with digest "
            f"{self._digest.hexdigest()}"
        )

    def _sequence(self, sequence: SequenceRows) -> None:
        self._numbers(sequence.start, sequence.write_from, sequence.num_drafts)
        self._numbers(sequence.next_token, sequence.next_generated, sequence.draft_from, sequence.num_proposals)
        self._array(sequence.token_ids)
        self._array(sequence.block_table)
        if sequence.window_table is not None:
            self._array(sequence.window_table)
        if sequence.states is not None:
            self._numbers(sequence.states.source)
            self._array(sequence.states.positions)
            self._array(sequence.states.blocks)

    def _push(self, push: PushBlocks) -> None:
        self._digest.update(push.peer.encode())
        self._numbers(push.push_id, len(push.target_mappings), len(push.draft_mappings))
        for mapping in (*push.target_mappings, *push.draft_mappings):
            self._digest.update(mapping.block_type.encode())
            self._array(mapping.local)
            self._array(mapping.remote)

    def _mapping(self, mapping: BlockMapping) -> None:
        self._digest.update(mapping.block_type.encode())
        self._array(mapping.device)
        self._array(mapping.host)
        self._digest.update(mapping.hashes)

    def _numbers(self, *numbers: int | None) -> None:
        self._digest.update(repr(numbers).encode())

    def _array(self, values: Ints) -> None:
        self._numbers(len(values))
        self._digest.update(values.tobytes())
