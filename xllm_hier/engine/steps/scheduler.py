"""The scheduler: continuous batching with chunked prefill under a token budget, preemption, abort.

`schedule` builds one Forward, `finish` takes its answer. Decode rows come first, then running prefills, then waiting
requests in order of (priority, arrival), then the blocks that finished sequences want recomputed (`decode_kv_reuse`);
a step that would be empty goes to the audit of restored blocks.

On a prefill instance (`hands_over`) a sequence is computed once a decode instance has room for it, and leaves after its
first token; on a decode instance it arrives with that token (`adopt`).
"""

from __future__ import annotations

import logging

from ...plans import Forward, ForwardOutput
from ...request_messages import RequestOutput
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence, SequenceState
from .audit import Auditor
from .canonical import CanonicalQueue
from .drafts import DraftCounts, Drafter
from .queues import Queues
from .replies import Replies
from .step import Advanced, Drawn, Step

log = logging.getLogger("xllm.engine")


class Scheduler(Queues):
    """Steps of one instance; used by one thread.

    `max_seqs` sequences and `max_tokens` tokens per step, at most `chunk_tokens` of one prompt per step. `hands_over`:
    other instances generate the tokens of requests that want more than one.
    """

    def __init__(
        self,
        manager: HierarchyBlockManagerPool,
        *,
        max_tokens: int,
        max_seqs: int,
        chunk_tokens: int,
        auditor: Auditor | None = None,
        hands_over: bool = False,
    ) -> None:
        super().__init__(manager, hands_over=hands_over)
        self.auditor = auditor or Auditor(manager)
        self.drafter = Drafter(manager)
        self.replies = Replies()
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.chunk_tokens = chunk_tokens
        self._canonical = CanonicalQueue(manager, self.auditor)
        self._ahead = manager.settings.drafting.ahead
        self._distrusted = False
        self._next_step = 0
        self.num_preemptions = 0

    @property
    def canonical(self) -> list[Sequence]:
        """Finished sequences whose decoded blocks wait to be recomputed."""
        return self._canonical.sequences

    @property
    def drafts(self) -> DraftCounts:
        """Drafted and accepted tokens so far."""
        return self.drafter.counts

    # ------------------------------------------------------------------------------------------ scheduling

    @property
    def has_work(self) -> bool:
        """Something can be computed, or a queue must be looked at, without a new message."""
        return bool(self.waiting or self.running or self.arriving or self.canonical or self.auditor.has_work)

    def schedule(self) -> Step | None:
        """The next step with all its blocks allocated and its load sent; None when nothing can run now."""
        if self.auditor.alarm and not self._distrusted:
            self._drop_restored()
        self._distrusted = self.auditor.alarm
        self.manager.begin_step()
        self._drop_aborted()
        step = Step(Forward(self._next_step, [], [], []))
        preempted = self.num_preemptions
        budget = self._schedule_running(step, self.max_tokens)
        if self.num_preemptions == preempted:  # else the victim would come straight back
            self._schedule_waiting(step, budget)
        self._canonical.add_tile(step)
        if not step.rows and not self._schedule_audit(step):
            return None
        self._next_step += 1
        step.plan.batch_ids.extend(self.manager.transfer_blocks())
        return step

    def _drop_restored(self) -> None:
        """An audit found a wrong block: sequences that may have computed from it end, or begin anew, and leave no
        blocks behind."""
        for sequence in list(self.canonical):
            self._canonical.end(sequence)
        for sequence in self.arriving:  # none of them stays: their blocks came from elsewhere
            sequence.state = SequenceState.RUNNING
        self.running += self.arriving
        self.arriving.clear()
        for sequence in [*self.running, *self.waiting]:
            queue = self.running if sequence in self.running else self.waiting
            if sequence.num_generated and (sequence.usage is None or sequence.usage.computed < sequence.prompt_length):
                queue.remove(sequence)
                self.end(sequence, "error", "an audit found that cached blocks were wrong: ask again")
            elif sequence in self.running and sequence.write_from:
                self._roll_back(sequence, "its cached blocks may be wrong")
            else:
                self.manager.unmount(sequence)
        for tier in ("device", "host"):  # once more: a step was under way, and has published since
            self.manager.clear(tier)

    def _drop_aborted(self) -> None:
        for queue in (self.waiting, self.running, self.arriving, self.canonical):
            for sequence in [sequence for sequence in queue if sequence.aborted]:
                queue.remove(sequence)
                self.end(sequence, "abort")

    def _schedule_running(self, step: Step, budget: int) -> int:
        """Decode rows come first in the budget, since users wait for them token by token, with the drafts that a model
        has made for them; blocks go by age alone.

        Were a younger decode row placed before an older prefill, the two could preempt each other for ever.
        """
        while self.arriving and len(self.running) < self.max_seqs:
            self.running.append(self.arriving.pop(0))
            self.running[-1].state = SequenceState.RUNNING
        counts: dict[Sequence, int] = {}
        kept: dict[Sequence, int] = {}
        for sequence in sorted(self.running, key=lambda member: (member.in_prefill, member.order)):
            counts[sequence] = self._chunk(sequence, sequence.num_computed, budget)
            budget -= counts[sequence]
            kept[sequence] = min(len(sequence.drafts), budget)
            budget -= kept[sequence]
        for sequence in sorted(self.running, key=lambda member: member.order):
            count = counts[sequence]
            budget += kept[sequence]
            if sequence.state is not SequenceState.RUNNING or not count:
                continue  # preempted for one before it in this very loop, or beyond the budget
            while not self.manager.allocate(sequence, sequence.num_computed + count + self._ahead):
                if not self._make_room(sequence, step):
                    count = 0
                    break
            if count:
                drafts = [] if self.hands_over else self.drafter.drafts(sequence, count, budget)
                budget -= len(drafts)
                self._add(step, sequence, count, drafts)
        return budget

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Free device blocks for a running sequence; False when it has to sit this step out."""
        if self.free_spare_blocks():
            return True
        if self.manager.pins_device:
            return False  # blocks come back by themselves: no sequence has to lose work
        placed = {member for member, _ in step.rows}
        victims = [other for other in self.running if other not in placed]
        victim = max(victims, key=lambda other: other.order)
        self.preempt(victim)
        return victim is not sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it goes on later from the blocks that are kept of it."""
        log.info("preempted %s after %d tokens", sequence.request.request_id, sequence.num_computed)
        self.running.remove(sequence)
        self.manager.deallocate(sequence, resume=True)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.replies.forget(sequence)
        self.enqueue(sequence)

    def _chunk(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of a chunk that begins at `start`: of the prompt, or generated ones without KV (one, or a replay). A
        chunk that leaves some of the prompt ends on the scan's grid."""
        prompt = start < sequence.prompt_length
        end = sequence.prompt_length if prompt else len(sequence.tokens)
        count = min(end - start, budget, self.chunk_tokens)
        if prompt and start + count < end:
            count -= self.manager.settings.beyond_grid(start, start + count)
        return count

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_seqs:
                break
            if not self.leaves_room():
                break
            if self.manager.is_being_computed(sequence):
                continue  # it will share those blocks; others behind it may go first
            count = self._place(sequence, budget)
            if not count:
                break  # first come, first served: no request overtakes for want of blocks
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            self._add(step, sequence, count, [])
            budget -= count

    def leaves_room(self) -> bool:
        """There are blocks beyond the one that each running sequence will ask for next."""
        wanted = len(self.running) + len(self.arriving)
        while (room := self.manager.num_available - wanted) < 0 and self.free_spare_blocks():
            pass
        return room >= 0

    def _place(self, sequence: Sequence, budget: int) -> int:
        """Allocate a waiting sequence's cached prefix and first chunk; returns the chunk's tokens, 0 without room."""
        while True:
            hit = self.manager.hit(sequence).tokens  # anew each time: ending a canonical one may evict part of it
            count = self._chunk(sequence, hit, budget)
            if not count:
                return 0
            if self.manager.allocate(sequence, hit + count + self._ahead):
                return count
            if not self.free_spare_blocks():
                return 0

    def _schedule_audit(self, step: Step) -> bool:
        tile = self.auditor.next_tile()
        if tile is not None:
            step.audit = True
            step.plan.prefill.append(tile)
        return step.audit

    def free_spare_blocks(self) -> bool:
        """Free device blocks that no request waits for; False when there are none."""
        return self.auditor.give_up() or self._canonical.end_newest()

    def _add(self, step: Step, sequence: Sequence, count: int, drafts: list[int]) -> None:
        end, num_proposals = sequence.num_computed + count, 0
        if end == len(sequence.tokens):  # the row is sampled from
            share = self.max_tokens // max(1, len(self.running)) - 1
            num_proposals = self.drafter.num_proposals(sequence, end + len(drafts), share)
        step.add(self.manager, sequence, count, drafts, num_proposals)

    # -------------------------------------------------------------------------------------------- results

    def finish(self, step: Step, output: ForwardOutput) -> list[Advanced]:
        """Take the answer to a step: advance every sequence, publish complete blocks, end finished requests. Returns
        the sequences that run on, or have just ended, with the step's result for them."""
        bad = self.manager.finish_loads(step.plan.batch_ids, output.failed_batches)
        if step.audit:
            self.auditor.computed()
            return []
        advanced = []
        for result in step.results(output):
            sequence = result.sequence
            if sequence.holds_any(bad):
                self._roll_back(sequence)
                continue
            sequence.num_computed += result.num_tokens
            sequence.draft_from = sequence.num_computed + 1
            self.manager.publish_computed(sequence)
            if result.prompt_logprobs is not None:
                self.replies.note_prompt(sequence, result.prompt_logprobs)
            drawn = bool(result.drawn) and not sequence.aborted
            if sequence.state is SequenceState.CANONICAL:
                self._canonical.computed(sequence)
            elif drawn:
                self._append_all(sequence, result.drawn, result.num_drafts)
                sequence.drafts = result.drafts.tolist() if result.drafts is not None else []
            if sequence.state is SequenceState.RUNNING:
                advanced.append(Advanced(sequence, drawn))
        return advanced

    def _append_all(self, sequence: Sequence, drawn: Drawn, num_drafts: int) -> None:
        """Take the tokens of a step one by one, as if each had had a step of its own: the row of an accepted draft
        counts as computed only once its token is the sequence's."""
        self.drafter.note(sequence, num_drafts, len(drawn) - 1)
        for number, (token, logprob) in enumerate(drawn):
            if number:
                sequence.num_computed += 1
                sequence.draft_from += 1
                self.manager.publish_computed(sequence)
            if self.replies.append(sequence, token, logprob):
                self._finish(sequence)  # a stop, or the last token it may have, perhaps within the accepted ones
                return

    def _finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        del self.sequences[sequence.request.request_id]
        if not self._canonical.offer(sequence):
            self._release(sequence)

    def _roll_back(self, sequence: Sequence, why: str = "a load failed") -> None:
        """Its blocks hold nothing: compute again from the blocks that other tiers have."""
        log.warning("recomputing %s: %s", sequence.request.request_id, why)
        if sequence.state is SequenceState.CANONICAL:
            self._canonical.end(sequence)
            return
        self.running.remove(sequence)
        self.manager.forget_prefix(sequence)
        self.manager.deallocate(sequence)
        self.replies.forget(sequence)
        self.enqueue(sequence)

    def fail_step(self, step: Step, message: str) -> None:
        """The forward itself failed: its requests end with an error, and its loads are not relied on."""
        self.manager.finish_loads(step.plan.batch_ids, step.plan.batch_ids)
        if step.audit:
            self.auditor.give_up()
        for sequence, _ in step.rows:
            queue = self.canonical if sequence.state is SequenceState.CANONICAL else self.running
            queue.remove(sequence)
            self.end(sequence, "error", message)

    # ------------------------------------------------------------------------------------------------ ends

    def hand_over(self, sequence: Sequence) -> None:
        """Another instance goes on with a sequence that was taken out: its blocks are released as at an end."""
        self.auditor.consider(sequence)
        self.replies.forget(sequence)
        self.manager.deallocate(sequence)

    def end(self, sequence: Sequence, reason: str, error: str | None = None, status: int = 500) -> None:
        """End an unfinished request that stands in no queue; a canonical one has been answered long ago."""
        sequence.num_restored = 0  # its blocks may have made it fail: nothing to audit
        if sequence.state is not SequenceState.CANONICAL:
            del self.sequences[sequence.request.request_id]
            self.replies.end(sequence, reason, error, status)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        self.hand_over(sequence)

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs since the last call; the caller sends them."""
        return self.replies.take()

    def fail_all(self, message: str, status: int) -> None:
        """Answer every open request with an error; the blocks are not looked at any more."""
        for request_id in self.sequences:
            self.replies.refuse(request_id, message, status)
        self.sequences.clear()
