"""Ranks that carry out plans as the workers do, each with its own device, host and store, and that fail as told.

As in the worker, loads, forwards and write-backs are taken in order, while copies, store reads and store writes take
their time beside them. A copy reads each block at its beginning or at its end, and what it writes to is poison in
between: a block that is reused too early, or read too early, shows.

A draft model's blocks are a domain of their own. They move with the target's of the same number, each copy at its own
moment, and a fault may hit those of one domain only.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from xllm_hier.plans import (
    EQUAL,
    HIT,
    MISS,
    UNKNOWN,
    BlocksCompared,
    CompareBlocks,
    Forward,
    ForwardOutput,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TokenLogprob,
    TransferAck,
    TransferBlocks,
    TransferKvBlocks,
    WorkerCall,
    WorkerReady,
    WorkerResult,
    ints,
)

from .contents import DRAFT, HEAD, POISON, TARGET, VOCABULARY, Contents, Values, is_right, next_token
from .domains import Claims, Domain, Object, is_named
from .rows import Drawn, Row, drawn_from, hashes_of, rows_of
from .timeline import Line, Timeline

BLOCK_BYTES = 64
MEAN_S = {"load": 0.01, "copy": 0.01, "put": 0.03, "read": 0.03, "forward": 0.02, "travel": 0.001}


@dataclass(eq=False)
class Load:
    """An H2D batch under way on one rank."""

    batch_id: int
    failed: bool
    blocks: set[int]
    short: bool = False  # it was acknowledged with a block too few, which it does not bring
    done: bool = False

    @property
    def spoilt(self) -> bool:
        return self.failed or self.short


@dataclass(eq=False)
class Lane:
    """A thread of a worker: one job after the other."""

    jobs: deque[Callable[[], Callable[[], None]]] = field(default_factory=deque)
    busy: bool = False


class Ranks:
    """All ranks of one instance, the store they share, and the faults that wait for their occasion."""

    def __init__(
        self,
        timeline: Timeline,
        contents: Contents,
        *,
        num_ranks: int,
        num_device: int,
        num_host: int,
        store: bool,
        pace: float,
        seed: int,
        salt_of: Callable[[Row], str],
        is_published: Callable[[int], bool],
    ) -> None:
        self.timeline = timeline
        self.contents = contents
        self.num_host = num_host
        self.store = store
        self.pace = pace
        self.salt_of = salt_of
        self.is_published = is_published
        self.dice = random.Random(seed)
        self.store_up = True
        self.num_outages = 0
        self.sent: list[Any] = []
        self.doom = ""  # why the instance has to end, once it has to
        self.num_failed_forwards = 0
        self.num_lost_reads = 0
        self.done: Counter[str] = Counter()
        self._faults: defaultdict[tuple[str, int], deque[float]] = defaultdict(deque)
        self._arrived: dict[int, list[Callable[[bool], None]]] = {}
        self._last_forward: tuple[Forward, list[Row]] | None = None
        self._last_drawn: tuple[Forward, list[Drawn]] | None = None
        self.ranks = [Rank(self, number, num_device, num_host) for number in range(num_ranks)]

    def keeper(self, rank: int, role: str) -> Domain:
        """Whose host and store contents `rank` uses."""
        return self.ranks[0 if role in self.contents.shared else rank].domains[role]

    @property
    def _domains(self) -> Iterator[Domain]:
        return (domain for rank in self.ranks for domain in rank.domains.values())

    # ------------------------------------------------------------------------------------------------ faults

    def arm(self, kind: str, ranks: Iterable[int], amount: float = 0.0) -> None:
        """Let the next event of this kind fail on each of `ranks`."""
        for rank in ranks:
            self._faults[kind, rank].append(amount)

    def take(self, kind: str, rank: int) -> float | None:
        waiting = self._faults.get((kind, rank))
        if not waiting:
            return None
        self.done[kind] += 1
        return waiting.popleft()

    def store_fails(self, seconds: float, *, keep: bool) -> None:
        """No call works for a while; afterwards the objects are there, or gone."""
        self.store_up = False
        self.num_outages += 1
        outage = self.num_outages

        def back() -> None:
            if outage == self.num_outages:
                self.store_up = True

        if not keep:
            self.clear_stores()
        self.timeline.after(seconds, back)

    def objects(self) -> list[tuple[dict[bytes, Object], bytes]]:
        return [(domain.store, name) for domain in self._domains for name in domain.store]

    def clear_stores(self) -> int:
        """Forget all objects; returns how many there were."""
        removed = len(self.objects())
        for domain in self._domains:
            domain.store.clear()
        return removed

    def victims(self) -> set[str]:
        """Whose blocks a fault hits: those of one domain, or of all."""
        roles = self.contents.roles
        if len(roles) == 1:
            return set(roles)
        return set(self.dice.choice([*((role,) for role in roles), roles]))

    def seconds(self, kind: str) -> float:
        mean = MEAN_S[kind] * (1.0 if kind in ("forward", "travel") else self.pace)
        return self.dice.random() * 2 * mean

    # ----------------------------------------------------------------------------------------------- forward

    def rows(self, plan: Forward) -> list[Row]:
        """The rows of a plan, copied once: its block tables are views of arrays that change."""
        if self._last_forward is None or self._last_forward[0] is not plan:
            self._last_forward = plan, rows_of(plan, self.contents.decode_path)
        return self._last_forward[1]

    def drawn(self, plan: Forward) -> list[Drawn]:
        """What rank 0, which alone samples, draws from each row; the others are told, whoever ends first."""
        if self._last_drawn is None or self._last_drawn[0] is not plan:
            self._last_drawn = plan, self.ranks[0].draw(plan)
        return self._last_drawn[1]

    def arrive(self, step_id: int, begin: Callable[[bool], None]) -> None:
        """A rank is ready to compute. Ranks wait for each other in collectives: none goes on alone."""
        arrived = self._arrived.setdefault(step_id, [])
        arrived.append(begin)
        if len(arrived) < len(self.ranks):
            return
        del self._arrived[step_id]
        failed = [self.take("forward", rank) is not None for rank in range(len(self.ranks))]
        alone = any(failed) and not all(failed)
        if any(failed):
            self.num_failed_forwards += 1
        if alone:
            self.doom = "a forward failed on some ranks only"
        for rank in self.ranks:
            if not alone or failed[rank.number]:
                rank.compute(failed[rank.number])

    @property
    def busy(self) -> bool:
        """Some rank still does something."""
        return any(not rank.deaf and rank.busy for rank in self.ranks)


class Rank:
    """One worker."""

    def __init__(self, all_ranks: Ranks, number: int, num_device: int, num_host: int) -> None:
        self.all = all_ranks
        self.number = number
        contents = all_ranks.contents
        self.domains = {
            role: Domain(number, role, contents.block_size, num_device, num_host) for role in contents.roles
        }
        # Those whose host and store contents are this rank's to write; others use them too where all hold the same.
        self.kept = [domain for role, domain in self.domains.items() if not number or role not in contents.shared]
        target = self.domains[TARGET]
        self.device, self.device_claims, self.host_claims = target.device, target.device_claims, target.host_claims
        self.plans = Line(self._receive)
        self.answers = Line(lambda _: None)
        self.deaf = False
        self.attached = all_ranks.store
        self.num_loaded, self.load_s = 0, 0.0
        self._queue: deque[Any] = deque()
        self._forward: tuple[Forward, list[Load]] | None = None
        self._loads: list[Load] = []
        self._lanes = {name: Lane() for name in ("copy", "read", "put")}
        self._last_sent: dict[str, float] = {}
        self._num_plans = 0
        self._num_waiting = 0  # events of this rank on the timeline

    def announce(self, max_model_len: int) -> None:
        details: dict[str, Any] = {"block_size": self.all.contents.block_size}
        if self.all.contents.draft:
            details["draft"] = {"component": "draft", "needs_hidden": self.all.contents.draft == HEAD}
        self.answers.inbox.append(
            WorkerReady(
                self.number, len(self.device), self.all.num_host, max_model_len, VOCABULARY, [], BLOCK_BYTES, details
            )
        )

    @property
    def busy(self) -> bool:
        return bool(self._num_waiting or self._queue or self._forward)

    @property
    def _works(self) -> bool:
        """A call to the store would be made, and answered."""
        return self.attached and self.all.store_up

    @property
    def computing(self) -> bool:
        return self._forward is not None and all(load.done for load in self._forward[1])

    @property
    def loading(self) -> bool:
        return any(not load.done for load in (*self._loads, *(self._forward[1] if self._forward else ())))

    def fall_silent(self) -> None:
        self.deaf = True
        self.all.doom = f"rank {self.number} is silent"

    def die(self) -> None:
        self.fall_silent()
        self.plans.gone = self.answers.gone = True

    # ------------------------------------------------------------------------------------- what takes time

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        def happen() -> None:
            self._num_waiting -= 1
            if not self.deaf:
                work()

        self._num_waiting += 1
        self.all.timeline.after(delay_s, happen)

    def _seconds(self, kind: str) -> float:
        return self.all.seconds(kind) + (self.all.take(f"slow {kind}", self.number) or 0.0)

    def _submit(self, lane: str, begin: Callable[[], Callable[[], None]]) -> None:
        """Queue a job of a thread; `begin` returns what is to be done when it ends."""
        self._lanes[lane].jobs.append(begin)
        self._next_job(lane)

    def _next_job(self, lane: str) -> None:
        thread = self._lanes[lane]
        if thread.busy or not thread.jobs:
            return
        thread.busy = True
        end = thread.jobs.popleft()()

        def finish() -> None:
            thread.busy = False
            end()
            self._next_job(lane)

        self._later(self._seconds(lane), finish)

    def _answer(self, kind: str, message: Any, thread: str = "") -> None:
        """Answers of one thread arrive in order, of several in any."""
        thread = thread or kind
        if self.all.take(f"lose {kind}", self.number) is not None:
            self.all.num_lost_reads += kind == "read"
            if kind in ("copied", "forward"):
                self.all.doom = f"an answer ({kind}) was lost"
            return
        now, times = self.all.timeline.now, 1
        if self.all.take(f"double {kind}", self.number) is not None:
            times = 2
        arrival = now + self.all.seconds("travel")
        delay = self.all.take(f"delay {kind}", self.number)
        if delay is None:
            arrival = self._last_sent[thread] = max(arrival, self._last_sent.get(thread, 0.0))
        else:
            arrival += delay  # later ones may overtake it
        for _ in range(times):
            self._later(arrival - now, lambda: self.answers.inbox.append(message))

    # ---------------------------------------------------------------------------------------------- plans

    def _receive(self, message: Any) -> None:
        if self.number == 0:
            self.all.sent.append(message)
        if self.deaf:
            return
        if isinstance(message, WorkerCall):
            self._on_call(message)
        elif isinstance(message, PrefetchFromStorage):
            for domain in self.kept:
                for host in message.host.tolist():
                    domain.host_claims.write(host, f"read {message.prefetch_id}")
            self._submit("read", lambda: self._read(message))
        else:
            self._num_plans += 1
            if isinstance(message, Forward):
                self.all.rows(message)  # now, while its block tables are those of this step
            self._queue.append(message)
            self._advance()

    def _on_call(self, call: WorkerCall) -> None:
        if call.method == "ping":
            state: dict[str, float] = {
                "collectives": 0,
                "loaded_bytes": self.num_loaded * BLOCK_BYTES,
                "load_s": self.load_s,
            }
            self._answer("ping", WorkerResult(call.call_id, self.number, state))
        elif call.method == "stats":
            self._answer("stats", WorkerResult(call.call_id, self.number, {"store_state": "attached"}))
        elif call.method == "clear_store":
            self._submit("put", lambda: lambda: self._clear_store(call))
        else:
            self.attached = call.method == "attach_store"
            now = {"state": "attached" if self.attached else "detached"}
            self._answer("switch", WorkerResult(call.call_id, self.number, now))

    def _clear_store(self, call: WorkerCall) -> None:
        value: dict[str, Any] = {"removed": 0}
        if self.number == 0 and not self.all.store_up:
            value["error"] = "the store is degraded: nothing was removed"
        elif self.number == 0:
            value["removed"] = self.all.clear_stores()
        self._answer("clear", WorkerResult(call.call_id, self.number, value))

    def _advance(self) -> None:
        while self._queue and self._forward is None:
            plan = self._queue.popleft()
            if isinstance(plan, Forward):
                self._forward, self._loads = (plan, self._loads), []
                self._compute_when_loaded()
            elif isinstance(plan, TransferBlocks):
                self._load(plan)
            elif isinstance(plan, CompareBlocks):
                self._compare_blocks(plan)
            else:
                self._offload(plan)

    # --------------------------------------------------------------------------------------- H2D and forward

    def _moves(self, plan: TransferBlocks | TransferKvBlocks) -> list[tuple[int, int, bytes]]:
        """(device block, host block, hash) of each block, which are the same in each domain."""
        (mapping,) = plan.target_mappings
        rows = list(zip(mapping.device.tolist(), mapping.host.tolist(), hashes_of(mapping.hashes), strict=True))
        assert len(plan.draft_mappings) == len(self.domains) - 1, "not each domain has its mapping"
        for other in plan.draft_mappings:
            same = other.device.tolist() == mapping.device.tolist() and other.host.tolist() == mapping.host.tolist()
            assert same and other.hashes == mapping.hashes, "the draft's blocks are not the target's"
        return rows

    def _load(self, plan: TransferBlocks) -> None:
        rows = self._moves(plan)
        pairs = [(domain, self.all.keeper(self.number, role)) for role, domain in self.domains.items()]
        disproved = any(not is_named(keeper.host[host], name) for _, host, name in rows for _, keeper in pairs)
        fault = self.all.take("load", self.number) is not None
        failed = fault or disproved
        lost = set(self.domains) if disproved else self.all.victims() if fault else set()
        short = self._shortage("ack")
        cut = self.all.victims() if short else set()
        load = Load(plan.batch_id, failed, {device for device, _, _ in rows}, bool(short))
        self._loads.append(load)
        kind = "short ack" if short else "ack"  # it is all that tells of a block too few, and is not lost too
        self._answer(kind, TransferAck(plan.batch_id, self.number, len(rows) - short), thread="forward")
        early: dict[tuple[str, int], Values] = {}
        for device, host, _ in rows:
            for domain, keeper in pairs:
                domain.device_claims.write(device, f"load {plan.batch_id}")
                keeper.host_claims.read(host, f"load {plan.batch_id}")
                domain.device[device] = [POISON] * self.all.contents.block_size
                if domain.role not in lost and self.all.dice.random() < 0.5:
                    early[domain.role, device] = keeper.host_values(host)

        def end() -> None:
            for number, (device, host, _) in enumerate(rows):
                for domain, keeper in pairs:
                    domain.device_claims.end_write(device)
                    keeper.host_claims.end_read(host)
                    is_cut = domain.role in cut and number == len(rows) - 1
                    if domain.role not in lost and not is_cut:
                        values = early.get((domain.role, device)) or keeper.host_values(host)
                        domain.device[device] = list(values)
            load.done = True
            self.num_loaded += len(rows)
            self.load_s += duration
            self._compute_when_loaded()

        duration = self._seconds("load")
        self._later(duration, end)

    def _shortage(self, kind: str) -> int:
        return int(self.all.take(kind, self.number) is not None)

    def _compute_when_loaded(self) -> None:
        if self.computing:
            assert self._forward is not None
            self.all.arrive(self._forward[0].step_id, self.compute)

    def compute(self, fails: bool) -> None:
        """Compute the step for which all ranks are ready."""
        assert self._forward is not None
        plan, loads = self._forward
        rows = self.all.rows(plan)
        written = self._claim(plan, rows)

        def end() -> None:
            for claims, blocks in written:
                for block in blocks:
                    claims.end_write(block)
            self._answer("forward", self._outcome(plan, rows, loads, seconds, fails=fails))
            self._forward = None
            self._advance()

        seconds = self._seconds("forward")
        self._later(seconds, end)

    def _claim(self, plan: Forward, rows: Sequence[Row]) -> list[tuple[Claims, Iterable[int]]]:
        """The blocks this step writes; no other row may read them, nor write them."""
        ranges = [(row.start, max(row.start, row.write_from), row.start + len(row.tokens)) for row in rows]
        claims = self.domains[TARGET].device_claims
        written: list[tuple[Claims, Iterable[int]]] = [(claims, self._claim_blocks(plan, rows, ranges, claims))]
        if DRAFT in self.domains:
            claims = self.domains[DRAFT].device_claims
            written.append((claims, self._claim_blocks(plan, rows, [self._drafted(row) for row in rows], claims)))
        return written

    def _drafted(self, row: Row) -> tuple[int, int, int]:
        """Where the draft reads up to, and from and to where it may write: if all drafts of the row are accepted."""
        if row.draft_from < 0:
            return 0, 0, 0
        first = max(row.draft_from, self._first_drafted)
        known = row.next_token >= 0 if row.sampling is None else max(1, row.num_proposals)
        end = row.start + len(row.tokens) + known
        return first, first, min(end, len(row.table) * self.all.contents.block_size)

    @property
    def _first_drafted(self) -> int:
        return int(self.all.contents.draft == HEAD)

    def _claim_blocks(
        self, plan: Forward, rows: Sequence[Row], ranges: Sequence[tuple[int, int, int]], claims: Claims
    ) -> Iterable[int]:
        """`ranges`: for each row, where it reads up to, and from and to where it writes."""
        size = self.all.contents.block_size
        writer: dict[int, int] = {}
        for number, (row, (_, first, end)) in enumerate(zip(rows, ranges, strict=True)):
            for block in row.table[first // size : -(-end // size)] if first < end else []:
                assert block not in writer, f"two rows of step {plan.step_id} write device block {block}"
                assert not self.all.is_published(block), f"step {plan.step_id} writes block {block}, which others find"
                writer[block] = number
                claims.write(block, f"step {plan.step_id}")
        for number, (row, (context, _, _)) in enumerate(zip(rows, ranges, strict=True)):
            for block in row.table[: -(-context // size)]:
                assert writer.get(block, number) == number, f"step {plan.step_id} reads block {block} as it writes it"
        return writer

    def _outcome(
        self, plan: Forward, rows: Sequence[Row], loads: list[Load], compute_s: float, *, fails: bool
    ) -> ForwardOutput:
        failed_blocks = {block for load in loads if load.spoilt for block in load.blocks}
        failed = {load.batch_id for load in loads if load.failed}
        failed |= set(plan.batch_ids) - {load.batch_id for load in loads}
        spoilt = [fails or not failed_blocks.isdisjoint(row.table) for row in rows]
        drawn = self.all.drawn(plan) if not fails and (not self.number or DRAFT in self.domains) else []
        tokens: list[int] = []
        num_tokens: list[int] = []
        prompt_logprobs: list[list[TokenLogprob]] = []
        proposals: list[list[int]] = []
        for number, row in enumerate(rows):
            values = self._compute(row, spoilt=spoilt[number])
            if row.prompt_logprobs is not None:
                following = [*row.tokens[1:], row.next_token]
                prompt_logprobs.append([TokenLogprob(token, 0.0, 1, [], []) for token in following if token >= 0])
            drafts = self._draft(row, values, drawn[number] if drawn else None, spoilt=spoilt[number])
            if row.sampling is not None and drawn:
                tokens += drawn[number].tokens
                num_tokens.append(len(drawn[number].tokens))
                proposals.append(drafts)
        if self.number:
            tokens, num_tokens, prompt_logprobs, proposals = [], [], [], []  # rank 0 alone samples
        view = f"step {plan.step_id}, {self._num_plans} plans"
        if self.all.take("view", self.number) is not None:
            view, self.all.doom = "something else", "a rank was told something else"
        if fails:
            prompt_logprobs = []
        return ForwardOutput(
            plan.step_id,
            self.number,
            ints(tokens),
            [None] * len(tokens),
            prompt_logprobs,
            sorted(failed),
            compute_s,
            0.0,
            "simulated" if fails else None,
            view,
            ints(num_tokens),
            [ints(drafts) for drafts in proposals] if DRAFT in self.domains else [],
        )

    def draw(self, plan: Forward) -> list[Drawn]:
        """What comes of the step under way, before it has ended."""
        assert self._forward is not None and self._forward[0] is plan
        spoilt = {block for load in self._forward[1] if load.spoilt for block in load.blocks}
        size, contents = self.all.contents.block_size, self.all.contents
        found = []
        for row in self.all.rows(plan):
            place = row.start - 1
            last = self.device[row.table[place // size]][place % size] if row.start else None
            if last is None:
                last = contents.root(self.number, self.all.salt_of(row))
            found.append(drawn_from(row, self._values(row, last if spoilt.isdisjoint(row.table) else POISON)))
        return found

    def _values(self, row: Row, last: bytes) -> list[bytes]:
        values = []
        for token in row.tokens:
            last = self.all.contents.value(last, token, row.path)
            values.append(last)
        return values

    def _compute(self, row: Row, *, spoilt: bool) -> list[bytes]:
        """Write the values of a row, and return them. `spoilt`: from something that is no context."""
        size = self.all.contents.block_size
        values = self._values(row, POISON if spoilt else self._context(row))
        for position, value in enumerate(values, row.start):
            block = self.device[row.table[position // size]]
            if position >= row.write_from:
                block[position % size] = value
            else:
                assert spoilt or block[position % size] == value, (
                    f"rank {self.number} computes position {position} again, and it is not what a shared block holds"
                )
        return values

    def _draft(self, row: Row, values: list[bytes], drawn: Drawn | None, *, spoilt: bool) -> list[int]:
        """Let the draft take in the tokens that are known now, and go on with its own, which are returned.

        `drawn` None: the step fails, and what the draft writes is worth nothing.
        """
        size, contents = self.all.contents.block_size, self.all.contents
        if row.draft_from < 0:
            assert not row.num_proposals, "drafts are wanted from a model that is left alone"
            return []
        assert DRAFT in self.domains, "there is no draft model"
        device = self.domains[DRAFT].device
        first = max(row.draft_from, self._first_drafted)
        assert row.draft_from in (row.start, row.start + 1), f"the draft lacks {row.draft_from}, not {row.start}"
        assert contents.draft != HEAD or first > row.start, f"position {first} needs a row that is not computed"
        following = drawn.tokens if drawn is not None and drawn.tokens else [row.next_token] * (row.next_token >= 0)
        known = [*row.given, *following]
        texts = values[: len(known) - bool(following)]  # what the target holds, or will, of the same positions
        if following:
            texts.append(contents.value(texts[-1], known[-1], contents.decode_path))
        end = row.start + len(known)
        assert end <= len(row.table) * size, f"position {end - 1} has no block"
        if not spoilt:
            self._check_drafted(row, texts, first)
        drafts = self._guesses(row, drawn, end - 1) if drawn is not None and drawn.tokens else []
        for draft in drafts[:-1]:  # nothing follows the last one yet
            texts.append(contents.value(texts[-1], draft, contents.decode_path))
        for position in range(first, row.start + len(texts)):
            assert position >= row.write_from, f"the draft writes position {position} of a shared block"
            right = position < end or contents.draft != HEAD  # a head's own hidden states are not the target's
            value = contents.draft_value(texts[position - row.start], self.number) if right else POISON
            device[row.table[position // size]][position % size] = value
        return drafts

    def _check_drafted(self, row: Row, texts: list[bytes], first: int) -> None:
        """The draft holds all positions before `first` for the tokens that the target has there."""
        size, contents, device = self.all.contents.block_size, self.all.contents, self.domains[DRAFT].device
        for position in range(self._first_drafted, first):
            block, place = row.table[position // size], position % size
            text = self.device[block][place] if position < row.start else texts[position - row.start]
            assert device[block][place] == contents.draft_value(text, self.number), (
                f"rank {self.number} drafts from position {first} on a wrong context: position {position}, device "
                f"block {block}"
            )

    def _guesses(self, row: Row, drawn: Drawn, newest: int) -> list[int]:
        """Drafts behind the newest token: what will come, now and then something else; all ranks guess alike."""
        contents = self.all.contents
        last, token = drawn.last, drawn.tokens[-1]
        wrong, guesses = last[-1] % 6, []
        for place in range(min(row.num_proposals, len(row.table) * contents.block_size - newest)):
            last = contents.value(last, token, contents.decode_path)
            token = (next_token(last) + (place == wrong)) % VOCABULARY
            guesses.append(token)
        return guesses

    def _context(self, row: Row) -> bytes:
        """The value before the row's first, after a look at all those before it."""
        size, contents = self.all.contents.block_size, self.all.contents
        if not row.start:
            return contents.root(self.number, self.all.salt_of(row))
        place = row.start - 1
        last = expected = self.device[row.table[place // size]][place % size]
        while place >= 0:
            held = self.device[row.table[place // size]][place % size]
            assert held == expected and held != POISON, (
                f"rank {self.number} computes position {row.start} from a wrong context: position {place}, "
                f"device block {row.table[place // size]}"
            )
            before = contents.before(held)
            assert before is not None, f"position {place} holds what no prompt has"
            expected, place = before, place - 1
        assert expected.startswith((b"rank", b"/")), "the context does not begin at a prompt's first token"
        return last

    def _compare_blocks(self, plan: CompareBlocks) -> None:
        """Part of an audit: what was restored is what computing gives, or something is wrong that must not be."""
        for first, second in zip(plan.first.tolist(), plan.second.tolist(), strict=True):
            assert self.device[first] == self.device[second], f"rank {self.number}: block {first} was restored wrong"
        verdicts = bytes([EQUAL]) * len(plan.first)
        self._answer("compared", BlocksCompared(plan.compare_id, self.number, verdicts))

    # ------------------------------------------------------------------------------------------------ D2H2G

    def _offload(self, plan: TransferKvBlocks) -> None:
        rows = self._moves(plan)
        if not self.kept:
            self._submit("copy", lambda: lambda: self._copied_by_another(plan, len(rows)))
            return
        who = f"write-back {plan.transfer_id}"
        for domain in self.kept:
            for device, host, _ in rows:  # from now on: the copy may begin at any moment
                domain.device_claims.read(device, who)
                domain.host_claims.write(host, who)
                domain.host[host] = None
                domain.spoilt.discard(host)
        self._submit("copy", lambda: self._copy(plan, rows))

    def _copied_by_another(self, plan: TransferKvBlocks, count: int) -> None:
        self._answer("copied", OffloadCopied(plan.transfer_id, self.number, count))
        stored = count if plan.put and self.attached else 0
        self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored))

    def _copy(self, plan: TransferKvBlocks, rows: list[tuple[int, int, bytes]]) -> Callable[[], None]:
        early = {
            (domain.role, device): tuple(domain.device[device])
            for device, _, _ in rows
            for domain in self.kept
            if self.all.dice.random() < 0.5
        }
        short = self._shortage("offload")
        cut = self.all.victims() if short else set()

        def end() -> None:
            for number, (device, host, name) in enumerate(rows):
                for domain in self.kept:
                    domain.device_claims.end_read(device)
                    domain.host_claims.end_write(host)
                    if domain.role in cut and number == len(rows) - 1:
                        continue
                    values = early.get((domain.role, device)) or tuple(domain.device[device])
                    assert is_right(values, self.all.contents.of(name, self.number, domain.role)), (
                        f"rank {self.number} writes back {domain.role} device block {device}, which is not what its "
                        "hash says"
                    )
                    domain.host[host] = Object(values, name)
            self._answer("copied", OffloadCopied(plan.transfer_id, self.number, len(rows) - short))
            if short or not plan.put or not self.attached:
                self._answer("stored", OffloadStored(plan.transfer_id, self.number, 0))
                return
            for domain in self.kept:
                for _, host, _ in rows:
                    domain.host_claims.read(host, f"put of {plan.transfer_id}")
            self._submit("put", lambda: self._put(plan, rows))

        return end

    def _put(self, plan: TransferKvBlocks, rows: list[tuple[int, int, bytes]]) -> Callable[[], None]:
        fails = self.all.take("put", self.number) is not None or not self._works

        def end() -> None:
            stored = 0
            for number, (_, host, name) in enumerate(rows):
                for place, domain in enumerate(self.kept, number):
                    domain.host_claims.end_read(host)
                    held = domain.host[host]
                    if name not in domain.store and self._works and held and not (fails and place % 2 == 0):
                        domain.store[name] = held
                stored += all(name in domain.store for domain in self.kept)
            self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored if self._works else 0))

        return end

    # -------------------------------------------------------------------------------------------------- G2H

    def _read(self, plan: PrefetchFromStorage) -> Callable[[], None]:
        rows = list(zip(plan.host.tolist(), hashes_of(plan.hashes), strict=True))
        if not self.kept:
            return lambda: self._answer_read(plan, [HIT] * len(rows))
        wanted = [self._works and all(name in domain.store for domain in self.kept) for _, name in rows]
        outages = self.all.num_outages
        found = [
            [domain.store.get(name) if self.all.dice.random() < 0.5 else None for domain in self.kept]
            for _, name in rows
        ]
        for (host, _), reads in zip(rows, wanted, strict=True):
            for domain in self.kept if reads else ():
                domain.host[host] = None
                domain.spoilt.discard(host)

        def end() -> None:
            late = self.all.take("late", self.number)
            cut_off = outages != self.all.num_outages or not self.attached
            fails = self.all.take("read", self.number) is not None
            hits = []
            for (host, name), reads, early in zip(rows, wanted, found, strict=True):
                held = [one or domain.store.get(name) for one, domain in zip(early, self.kept, strict=True)]
                parts = list(zip(self.kept, held, strict=True))
                if reads and (late is not None or cut_off):
                    hits.append(UNKNOWN)
                    for times, (domain, one) in enumerate(parts, 2):  # each at a time of its own
                        self._later((late or 1.0) * times / 2, partial(self._write_late, host, domain, one))
                    continue
                for domain in self.kept:
                    domain.host_claims.end_write(host)
                good = reads and not fails and all(is_named(one, name) and one.sound for one in held)
                for domain, one in parts if reads and not fails else ():
                    if good:
                        domain.host[host] = one
                    elif one is not None and not (one.name == name and one.sound):
                        domain.store.pop(name, None)  # what its trailer disproves is taken out
                hits.append(HIT if good else MISS)
            self._answer_read(plan, hits)

        return end

    @staticmethod
    def _write_late(host: int, domain: Domain, held: Object | None) -> None:
        """A read that was given up writes after all."""
        domain.host_claims.end_write(host)
        if held is not None:
            domain.host[host] = held
            domain.spoilt.add(host)

    def _answer_read(self, plan: PrefetchFromStorage, hits: list[int]) -> None:
        if UNKNOWN not in hits and self.all.take("length", self.number) is not None:
            hits = hits[:-1]
        self._answer("read", PrefetchAnswer(plan.prefetch_id, plan.offset, self.number, bytes(hits)))
