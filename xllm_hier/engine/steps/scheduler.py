"""What each step computes: continuous batching with chunked prefill under a token budget, preemption, abort.

`schedule` builds one Forward, `finish` takes its answer. Decode rows come first, then running prefills, then waiting
requests in order of (priority, arrival), then the blocks that finished sequences want recomputed (`decode_kv_reuse`);
a step that would be empty goes to the audit of restored blocks.

On a prefill instance a sequence leaves after its first token (`outbound`), on a decode instance it comes with it
(`adopt`).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ...plans import (
    AddRequest,
    Forward,
    ForwardOutput,
    PushBlocks,
    RequestOutput,
    SamplingSpec,
    SequenceRows,
    TokenLogprob,
    ints,
)
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence, SequenceState
from .audit import Auditor
from .drafts import DraftCounts, lookup

log = logging.getLogger("xllm.engine")

MATCHED_REQUESTS = 64  # whose hits are looked up for a heartbeat: the rest counts in full
RECENT = 32  # of what is told as a recent median
CANONICAL_CHUNK = 256  # one prefill tile per step: what finished sequences may cost those still running


@dataclass(eq=False)
class Step:
    """A Forward under way: which sequences its rows belong to, in plan order, and how far each will have got.

    `audit`: its one row belongs to no sequence.
    """

    plan: Forward
    audit: bool = False
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    decode: list[tuple[Sequence, int]] = field(default_factory=list)


class Outbound(Protocol):
    """Who hands sequences over to decode instances."""

    def takes(self, sequence: Sequence) -> bool:
        """The sequence is not to be computed before a place for it is found; `Scheduler.admit` then brings it back."""

    def push(self, sequence: Sequence, end: int) -> PushBlocks | None:
        """What is to be sent of a step over its tokens up to `end`."""

    def computed(self, sequence: Sequence, *, drawn: bool) -> None:
        """A step of it has ended well; its next token was `drawn`, or not yet."""

    def released(self, sequence: Sequence) -> None:
        """It is over, with whatever end."""


class Scheduler:
    """Queues of one instance; used by one thread.

    `max_seqs` sequences and `max_tokens` tokens per step, at most `chunk_tokens` of one prompt per step, and drafts as
    the `manager` has it.
    """

    def __init__(
        self,
        manager: HierarchyBlockManagerPool,
        *,
        max_tokens: int,
        max_seqs: int,
        chunk_tokens: int,
        auditor: Auditor | None = None,
    ) -> None:
        self.manager = manager
        self.auditor = auditor or Auditor(manager)
        self.drafting = manager.drafting
        self._distrusted = False
        self.drafts = DraftCounts()
        self.propose: Callable[[Sequence, int], list[int]] = self._proposed
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.chunk_tokens = chunk_tokens
        self.sequences: dict[str, Sequence] = {}
        self.prefetching: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.arriving: list[Sequence] = []
        self.outbound: Outbound | None = None
        self.canonical: list[Sequence] = []
        self._prompt_logprobs: dict[Sequence, list[TokenLogprob | None]] = {}
        self._outputs: list[RequestOutput] = []
        self._next_step = 0
        self._next_arrival = 0
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.first_token_s: deque[float] = deque(maxlen=RECENT)

    # ------------------------------------------------------------------------------------------- admission

    def add_request(self, request: AddRequest) -> None:
        """Admit a checked request: its prefetch starts now, it is scheduled when that has ended."""
        manager = self.manager
        sequence = Sequence(request, manager.block_size, manager.decode_kv_reuse != "as_is", manager.types)
        sequence.arrival = self.new_arrival()
        self.sequences[request.request_id] = sequence
        self.readmit(sequence)

    def new_arrival(self) -> int:
        """The next number in the order of arrival."""
        self._next_arrival += 1
        return self._next_arrival

    def readmit(self, sequence: Sequence) -> None:
        """Begin with a sequence that holds no blocks, from its prefetch on."""
        sequence.state = SequenceState.PREFETCHING
        if self.manager.prefetch_from_storage(sequence):
            self.prefetching.append(sequence)
        else:
            self._enqueue_ready(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Go on with a sequence whose prompt and first token another instance has computed."""
        sequence.state = SequenceState.WAITING
        self.sequences[sequence.request.request_id] = sequence
        self.arriving.append(sequence)

    def abort(self, request_id: str) -> None:
        """Stop a request in whatever state it is; its blocks return as soon as no transfer needs them."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            sequence.aborted = True

    def poll_prefetches(self) -> None:
        """Move the requests whose prefetch has ended to the waiting queue; aborted ones leave."""
        for sequence in list(self.prefetching):
            if self.manager.update_prefetch_result(sequence):
                self.prefetching.remove(sequence)
                self._enqueue_ready(sequence)

    def _enqueue_ready(self, sequence: Sequence) -> None:
        if self.outbound is not None and self.outbound.takes(sequence):
            sequence.state = SequenceState.REMOTE
        else:
            self.admit(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn to be computed."""
        sequence.state = SequenceState.WAITING
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    # ------------------------------------------------------------------------------------------ scheduling

    @property
    def has_work(self) -> bool:
        """Something can be computed, or a queue must be looked at, without a new message."""
        return bool(self.waiting or self.running or self.arriving or self.canonical or self.auditor.has_work)

    def backlog_tokens(self) -> int:
        """Prompt tokens of open requests that are still to be computed, as far as caches do not have them."""
        known = sum(max(0, sequence.prompt_length - sequence.num_computed) for sequence in self.running)
        for number, sequence in enumerate([*self.waiting, *self.prefetching]):
            hit = self.manager.match(sequence) if number < MATCHED_REQUESTS else 0
            known += max(0, sequence.prompt_length - hit)
        return known

    @property
    def num_open(self) -> int:
        """Requests somebody still waits for."""
        return sum(not sequence.aborted for sequence in self.sequences.values())

    def schedule(self) -> Step | None:
        """The next step with all its blocks allocated and its load sent; None when nothing can run now."""
        if self.auditor.alarm and not self._distrusted:
            self._drop_what_was_restored()
        self._distrusted = self.auditor.alarm
        self.manager.policy.settle()
        self._drop_aborted()
        step = Step(Forward(self._next_step, [], [], []))
        preempted = self.num_preemptions
        budget = self._schedule_running(step, self.max_tokens)
        if self.num_preemptions == preempted:  # else the victim would come straight back
            self._schedule_waiting(step, budget)
        self._schedule_canonical(step)
        if not step.prefill and not step.decode and not self._schedule_audit(step):
            return None
        self._next_step += 1
        step.plan.batch_ids.extend(self.manager.transfer_blocks())
        return step

    def _drop_what_was_restored(self) -> None:
        """An audit found a wrong block: whoever may have computed from it must not go on, nor leave blocks behind."""
        for sequence in list(self.canonical):
            self._end_canonical(sequence)
        for sequence in self.arriving:  # none of them stays: what they hold came from elsewhere
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
                self.manager.store_reads.unmount(sequence)
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
            counts[sequence] = self._next_count(sequence, budget)
            budget -= counts[sequence]
            kept[sequence] = min(len(sequence.drafts), budget)
            budget -= kept[sequence]
        for sequence in sorted(self.running, key=lambda member: member.order):
            count = counts[sequence]
            budget += kept[sequence]
            if sequence.state is not SequenceState.RUNNING or not count:
                continue  # preempted for one before it in this very loop, or beyond the budget
            while not self.manager.allocate(sequence, sequence.num_computed + count + self.drafting.ahead):
                if not self._make_room(sequence, step):
                    count = 0
                    break
            if count:
                drafts = self._draft(sequence, count, budget)
                budget -= len(drafts)
                self._add(step, sequence, count, drafts)
        return budget

    def _draft(self, sequence: Sequence, count: int, budget: int) -> list[int]:
        """Tokens to verify behind the sequence's last one; none that it could not use, or that would cost another one's
        blocks."""
        start, request = sequence.num_computed, sequence.request
        if self.outbound is not None or sequence.in_prefill or start + count < len(sequence.tokens):
            return []
        limit = min(self.drafting.num_tokens, budget, request.max_tokens - sequence.num_generated - 1)
        drafts = self.propose(sequence, limit)
        if drafts and not self.manager.allocate(sequence, start + count + len(drafts) + self.drafting.ahead):
            return []
        return drafts

    def _proposed(self, sequence: Sequence, most: int) -> list[int]:
        return sequence.drafts[: max(0, most)] if self.drafting.by_model else lookup(sequence.tokens, most)

    def _num_proposals(self, sequence: Sequence, end: int) -> int:
        """Drafts to ask the draft model for behind a step over tokens up to `end`, drafts included: as many as the next
        step can verify, with blocks for them if there are any, without which it makes fewer."""
        request, shared = sequence.request, self.max_tokens // max(1, len(self.running)) - 1
        most = min(self.drafting.num_tokens, request.max_tokens - sequence.num_generated - 2, shared)
        if not self.drafting.by_model or most <= 0:
            return 0
        last = sequence.prompt_length + request.max_tokens
        self.manager.allocate(sequence, min(end + self.drafting.ahead + most - 1, last))
        return most

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Free device blocks for a running sequence; False when it has to sit this step out."""
        if self.let_go():
            return True
        if self.manager.write_back.pins_device:
            return False  # blocks come back by themselves: nobody has to lose work
        placed = {member for member, _ in (*step.prefill, *step.decode)}
        victims = [other for other in self.running if other not in placed]
        victim = max(victims, key=lambda other: other.order)
        self._preempt(victim)
        return victim is not sequence

    def _preempt(self, sequence: Sequence) -> None:
        log.info("preempted %s after %d tokens", sequence.request.request_id, sequence.num_computed)
        self.running.remove(sequence)
        self.manager.deallocate(sequence, resume=True)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._prompt_logprobs.pop(sequence, None)
        self._enqueue_ready(sequence)

    def _next_count(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk: rest of the prompt, or the generated tokens without KV (one, or a replay)."""
        return self._chunk(sequence, sequence.num_computed, budget)

    def _chunk(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of a chunk that begins at `start`; one that leaves some of the prompt ends on the scan's grid."""
        prompt = start < sequence.prompt_length
        end = sequence.prompt_length if prompt else len(sequence.tokens)
        count = min(end - start, budget, self.chunk_tokens)
        if prompt and start + count < end:
            count -= self.manager.beyond_grid(start, start + count)
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
                break  # first come, first served: nobody overtakes for want of blocks
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            self._add(step, sequence, count)
            budget -= count

    def leaves_room(self) -> bool:
        """There are blocks beyond the one that each running sequence will ask for next."""
        while (room := self.manager.num_available - len(self.running) - len(self.arriving)) < 0 and self.let_go():
            pass
        return room >= 0

    def _place(self, sequence: Sequence, budget: int) -> int:
        """Allocate a waiting sequence's cached prefix and first chunk; returns the chunk's tokens, 0 without room."""
        while True:
            hit = self.manager.match(sequence)  # anew each time: ending a canonical one may evict what was matched
            count = self._chunk(sequence, hit, budget)
            if not count:
                return 0
            if self.manager.allocate(sequence, hit + count + self.drafting.ahead):
                return count
            if not self.let_go():
                return 0

    def _schedule_canonical(self, step: Step) -> None:
        """One tile of the oldest finished sequence; even in a full step, because others may wait for its blocks."""
        for sequence in self.canonical[:1]:
            count = min(sequence.canonical_end - sequence.num_computed, CANONICAL_CHUNK)
            end = sequence.num_computed + count
            if not self.manager.allocate(sequence, end):
                self._end_canonical(sequence)
                return
            next_token = sequence.tokens[end] if end < sequence.canonical_end else None
            step.plan.prefill.append(self._rows(sequence, end, next_token, []))
            step.prefill.append((sequence, count))

    def _schedule_audit(self, step: Step) -> bool:
        tile = self.auditor.next_tile()
        if tile is not None:
            step.audit = True
            step.plan.prefill.append(tile)
        return step.audit

    def let_go(self) -> bool:
        """Free device blocks that nobody waits for; False when there are none."""
        if self.auditor.give_up():
            return True
        if self.canonical:
            self._end_canonical(self.canonical[-1])
            return True
        return False

    def _add(self, step: Step, sequence: Sequence, count: int, drafts: list[int] | None = None) -> None:
        end, drafts = sequence.num_computed + count, drafts or []
        known, request = sequence.tokens, sequence.request
        sampling = request.sampling if end == len(known) else None
        rows = self._rows(
            sequence,
            end,
            known[end] if end < len(known) else None,
            drafts,
            sampling=sampling,
            num_proposals=self._num_proposals(sequence, end + len(drafts)) if sampling is not None else 0,
            prompt_logprobs=request.prompt_logprobs if sequence.in_prefill and not sequence.num_generated else None,
            next_generated=end >= sequence.prompt_length,
        )
        push = self.outbound.push(sequence, end) if self.outbound is not None else None
        if push is not None:
            step.plan.pushes.append(push)
        plans, members = (step.plan.prefill, step.prefill) if sequence.in_prefill else (step.plan.decode, step.decode)
        plans.append(rows)
        members.append((sequence, count))

    def _rows(
        self,
        sequence: Sequence,
        end: int,
        next_token: int | None,
        drafts: list[int],
        *,
        sampling: SamplingSpec | None = None,
        num_proposals: int = 0,
        prompt_logprobs: int | None = None,
        next_generated: bool = False,
    ) -> SequenceRows:
        """The plan of a sequence's tokens up to `end` and of `drafts` behind them, with its blocks of all types."""
        start = sequence.num_computed
        return SequenceRows(
            start,
            ints([*sequence.tokens[start:end], *drafts]),
            sequence.block_table(),
            sequence.write_from,
            sampling,
            sequence.num_generated,
            len(drafts),
            prompt_logprobs,
            next_token,
            next_generated,
            sequence.draft_from if self.drafting.by_model else None,
            num_proposals,
            sequence.window_table(),
            self.manager.move_states(sequence, end, len(drafts)),
        )

    # -------------------------------------------------------------------------------------------- results

    def finish(self, step: Step, output: ForwardOutput) -> None:
        """Take the answer to a step: advance every sequence, publish what is complete, end what is done."""
        bad = self.manager.loads.finish(step.plan.batch_ids, output.failed_batches)
        if step.audit:
            self.auditor.computed()
            return
        drawn = _by_sequence(output)
        proposals = iter(output.proposals)
        prompt_logprobs = iter(output.prompt_logprobs)
        rows: list[tuple[SequenceRows, tuple[Sequence, int]]] = [
            *zip(step.plan.prefill, step.prefill, strict=True),
            *zip(step.plan.decode, step.decode, strict=True),
        ]
        for row, (sequence, count) in rows:
            sampled = next(drawn) if row.sampling is not None else []
            drafts = next(proposals, None) if row.sampling is not None else None
            logprobs = next(prompt_logprobs) if row.prompt_logprobs is not None else None
            if self.manager.holds_any(sequence, bad):
                self._roll_back(sequence)
                continue
            sequence.num_computed += count
            sequence.draft_from = sequence.num_computed + 1
            self.manager.publish_computed(sequence)
            if logprobs is not None:
                self._prompt_logprobs.setdefault(sequence, [None]).extend(logprobs)
            if sequence.state is SequenceState.CANONICAL:
                if sequence.num_computed >= sequence.canonical_end:
                    self._end_canonical(sequence)
            elif sampled and not sequence.aborted:
                self._append_all(sequence, sampled, row.num_drafts)
                sequence.drafts = drafts.tolist() if drafts is not None else []
            if self.outbound is not None and sequence.state is SequenceState.RUNNING:
                self.outbound.computed(sequence, drawn=bool(sampled) and not sequence.aborted)

    def _append_all(self, sequence: Sequence, sampled: list[tuple[int, TokenLogprob | None]], num_drafts: int) -> None:
        """Take the tokens of a step one by one, as if each had had a step of its own: the row of an accepted draft
        counts as computed only once its token is the sequence's."""
        if num_drafts:
            self.drafts.add(_origin(sequence), num_drafts, len(sampled) - 1)
        for number, (token, logprob) in enumerate(sampled):
            if number:
                sequence.num_computed += 1
                sequence.draft_from += 1
                self.manager.publish_computed(sequence)
            self._append(sequence, token, logprob)
            if sequence.state is not SequenceState.RUNNING:
                return  # a stop, or the last token it may have, within what was accepted

    def _roll_back(self, sequence: Sequence, why: str = "a load failed") -> None:
        """Its blocks hold nothing: compute again from what other tiers have."""
        log.warning("recomputing %s: %s", sequence.request.request_id, why)
        if sequence.state is SequenceState.CANONICAL:
            self._end_canonical(sequence)
            return
        self.running.remove(sequence)
        self.manager.account.forget(sequence)
        self.manager.deallocate(sequence)
        self._prompt_logprobs.pop(sequence, None)
        self._enqueue_ready(sequence)

    def fail_step(self, step: Step, message: str) -> None:
        """The forward itself failed: its requests end with an error, what it was to load is not relied on."""
        self.manager.loads.finish(step.plan.batch_ids, step.plan.batch_ids)
        if step.audit:
            self.auditor.give_up()
        for sequence, _ in (*step.prefill, *step.decode):
            queue = self.canonical if sequence.state is SequenceState.CANONICAL else self.running
            queue.remove(sequence)
            self.end(sequence, "error", message)

    def take_out(self, sequence: Sequence) -> None:
        """Compute it no further for now; it keeps its blocks."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.state = SequenceState.REMOTE

    def hand_over(self, sequence: Sequence) -> None:
        """Another instance goes on with a sequence that was taken out: its blocks are let go of as at an end."""
        self.auditor.consider(sequence)
        self._prompt_logprobs.pop(sequence, None)
        self.manager.deallocate(sequence)

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        request = sequence.request
        sequence.tokens.append(token)
        self.num_generated_tokens += 1
        reason, stop_reason = None, None
        if sequence.num_generated >= request.min_tokens:
            if token in request.stop_token_ids:
                reason, stop_reason = "stop", token
            elif token in request.eos_token_ids and not request.ignore_eos:
                reason = "stop"
        if reason is None and sequence.num_generated >= request.max_tokens:
            reason = "length"
        first = not sequence.usage_sent
        sequence.usage_sent = True
        if first:
            self.first_token_s.append(time.monotonic() - sequence.arrived_at)
        self._outputs.append(
            RequestOutput(
                request.request_id,
                [token],
                logprobs=None if logprob is None else [logprob],
                prompt_logprobs=self._prompt_logprobs.pop(sequence, None),
                usage=sequence.usage if first else None,
                finish_reason=reason,
                stop_reason=stop_reason,
            )
        )
        if reason is not None:
            self.running.remove(sequence)
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        del self.sequences[sequence.request.request_id]
        if self.manager.begin_canonical(sequence):
            sequence.state = SequenceState.CANONICAL
            self.canonical.append(sequence)
        else:
            self._release(sequence)

    def _end_canonical(self, sequence: Sequence) -> None:
        self.canonical.remove(sequence)
        self._release(sequence)

    def end(self, sequence: Sequence, reason: str, error: str | None = None, status: int = 500) -> None:
        """End an unfinished request that stands in no queue; a canonical one has been answered long ago."""
        sequence.num_restored = 0  # what it holds may be what made it fail: nothing to audit
        if sequence.state is not SequenceState.CANONICAL:
            del self.sequences[sequence.request.request_id]
            self._outputs.append(
                RequestOutput(
                    sequence.request.request_id,
                    [],
                    usage=sequence.usage,
                    finish_reason=reason,
                    error=error,
                    error_status=status,
                )
            )
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        if self.outbound is not None:
            self.outbound.released(sequence)
        self.auditor.consider(sequence)
        self._prompt_logprobs.pop(sequence, None)
        self.manager.deallocate(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Another instance has answered it in full."""
        sequence.state = SequenceState.FINISHED
        del self.sequences[sequence.request.request_id]

    def output(self, output: RequestOutput) -> None:
        """Send this with the outputs of the step."""
        self._outputs.append(output)

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs since the last call; the caller sends them."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, message: str, status: int) -> None:
        """Answer every open request with an error; the blocks are not looked at any more."""
        for request_id in self.sequences:
            self._outputs.append(
                RequestOutput(request_id, [], finish_reason="error", error=message, error_status=status)
            )
        self.sequences.clear()

    def refuse(self, request_id: str, message: str, status: int) -> None:
        """Answer a request that is not admitted."""
        self._outputs.append(RequestOutput(request_id, [], finish_reason="error", error=message, error_status=status))


def _by_sequence(output: ForwardOutput) -> Iterator[list[tuple[int, TokenLogprob | None]]]:
    """The tokens of each sequence that was sampled from, in plan order."""
    pairs = list(zip(output.token_ids.tolist(), output.logprobs, strict=True))
    counts = output.num_tokens.tolist() if output.num_tokens is not None else [1] * len(pairs)
    start = 0
    for count in counts:
        yield pairs[start : start + count]
        start += count


def _origin(sequence: Sequence) -> str:
    """Where most of the restored part of the prompt came from."""
    usage = sequence.usage
    if usage is None or not (usage.device or usage.host or usage.store):
        return "cold"
    return max(("device", "host", "store"), key=lambda tier: int(getattr(usage, tier)))
