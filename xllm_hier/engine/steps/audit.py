"""The truth audit: now and then a restored prefix is computed again, in idle time, and compared with the restored
blocks.

Checksums prove that a block holds the bytes once written. Only computing it again proves that these were right:
that nobody changed the weights under one name, copied a layer too few, or mixed up two ranks.

    restored   | 0 | 1 | 2 | 3 |     the request's device blocks, kept after its end
    fresh      | 0'| 1'| 2'| 3'|     computed tile by tile when nothing else is to be done, then compared on each rank

KV blocks are compared. A fault in a model's other blocks shows in them, as the layers follow one another; a model of
sliding windows alone keeps no prefix that could be compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...block import BlockType
from ...ints import ints
from ...plans import DIFFERENT, EQUAL, BlocksCompared, CompareBlocks, SequenceRows
from ...request_messages import AddRequest, PromptUsage, SamplingSpec
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.moves import RankAnswers
from ..blocks.sequence import Sequence

log = logging.getLogger("xllm.engine")

TILE = 256  # tokens per step: how long a request that comes meanwhile may have to wait


@dataclass(eq=False)
class Audit:
    """One prefix under audit: the audit holds the `restored` blocks, `again` the fresh ones; `worst` are the ranks'
    worst verdicts."""

    request_id: str
    restored: list[int]
    again: Sequence
    worst: RankAnswers[int]
    compare_id: int = 0

    @property
    def fresh(self) -> list[int]:
        return self.again.held[BlockType.KV].blocks


class Auditor:
    """Audits one in `rate` requests that were served from host or store (0: none), one at a time.

    `exact`: restored blocks must have the very bits of computed ones; else only a difference beyond rounding counts,
    and nothing for a model with `experts`. `results` counts the audits by how they ended.
    """

    def __init__(
        self, manager: HierarchyBlockManagerPool, rate: int = 0, *, exact: bool = True, experts: bool = False
    ) -> None:
        self._manager = manager
        self._rate = rate
        self._seen = 0
        self.audit: Audit | None = None
        self.exact = exact
        self._experts = experts
        self.alarm = False
        self.results = {"equal": 0, "rounding": 0, "different": 0, "given_up": 0}

    # ---------------------------------------------------------------------------------------------- begin

    def consider(self, sequence: Sequence) -> None:
        """A request has ended and still holds its blocks: perhaps keep those that were restored for it."""
        manager = self._manager
        if not self._rate or not sequence.num_restored or sequence.aborted or self.alarm:
            return
        if BlockType.KV not in sequence.held:
            return
        self._seen += 1
        if self._seen % self._rate or self.audit is not None:
            return
        blocks = sequence.held[BlockType.KV].blocks[: sequence.num_restored]
        manager.hold(blocks)
        tokens = sequence.tokens[: len(blocks) * sequence.block_size]
        request = AddRequest(sequence.request.request_id, ints(tokens), SamplingSpec(), 0)
        again = manager.new_sequence(request, private=True)
        again.usage = PromptUsage(0, 0, 0, 0)  # no client asked for it
        self.audit = Audit(request.request_id, blocks, again, RankAnswers(manager.num_workers))

    @property
    def has_work(self) -> bool:
        """A tile is to be computed when there is time."""
        return self.audit is not None and not self.audit.compare_id

    @property
    def comparing(self) -> bool:
        """The ranks have been asked and not all have answered."""
        return self.audit is not None and bool(self.audit.compare_id)

    def next_tile(self) -> SequenceRows | None:
        """The next rows of the audit, for a step that has nothing else to do; None without any."""
        audit = self.audit
        if audit is None or audit.compare_id:
            return None
        again = audit.again
        start = again.num_computed
        end = min(start + TILE, again.prompt_length)
        if not self._manager.allocate(again, end):
            self.give_up()
            return None
        return SequenceRows(
            start,
            ints(again.tokens[start:end]),
            again.block_table(),
            start,
            window_table=again.window_table(),
            states=self._manager.move_states(again, end),
        )

    def give_up(self) -> bool:
        """Release the blocks of the audit; True when there were any. Those being compared stay until the answer."""
        audit = self.audit
        if audit is None or audit.compare_id:
            return False
        self.results["given_up"] += 1
        self._release(audit)
        return True

    # ------------------------------------------------------------------------------------------------ end

    def computed(self) -> None:
        """The step with the last tile has ended; with the end of the prefix the comparison begins."""
        audit = self.audit
        assert audit is not None
        again = audit.again
        again.num_computed = min(again.num_computed + TILE, again.prompt_length)
        self._manager.publish_computed(again)
        if not again.in_prefill:
            audit.compare_id = self._manager.new_id()
            first, second = ints(audit.restored), ints(audit.fresh)
            self._manager.send(CompareBlocks(audit.compare_id, BlockType.KV.value, first, second))

    def on_compared(self, answer: BlocksCompared) -> None:
        """One rank's verdict; with the last one the audit ends."""
        audit = self.audit
        if audit is None or audit.compare_id != answer.compare_id or not answer.verdicts:
            log.warning("ignored a comparison of rank %d", answer.rank)
            return
        audit.worst.add(answer.rank, max(answer.verdicts))
        if not audit.worst.complete:
            return
        worst = max(audit.worst.by_rank.values())
        self.results["equal" if worst == EQUAL else "different" if worst == DIFFERENT else "rounding"] += 1
        self._release(audit)
        # Rounding can send a row to other experts, whose result is no rounding any more.
        if (self.exact and worst != EQUAL) or (worst == DIFFERENT and not self._experts):
            self._sound_alarm(audit)

    def _sound_alarm(self, audit: Audit) -> None:
        self.alarm = True
        log.error(
            "AUDIT: the blocks restored for %s are not those that computing gives (by rank: %s; 1 = beyond the last "
            "bit, 2 = other content). Nothing is restored any more, neither from host nor from store, until all three "
            "tiers are emptied (POST /cache/clear); other instances of this name space may be reading the same blocks.",
            audit.request_id,
            audit.worst.by_rank,
        )
        self._manager.distrust()

    def reset(self) -> None:
        """Everything was emptied: begin anew."""
        self.alarm = False
        self._manager.trust()

    def _release(self, audit: Audit) -> None:
        self._manager.release(audit.restored)
        self._manager.deallocate(audit.again)
        self.audit = None
