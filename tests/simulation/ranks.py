"""Ranks that carry out plans as the workers do, each with its own device, host and store, and that fail as told.

As in the worker, loads, forwards and write-backs are taken in order, while copies, store reads and store writes take
their time beside them. A copy reads each block at its beginning or at its end, and what it writes to is poison in
between: a block that is reused too early, or read too early, shows.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xllm_hier.hashing import HASH_BYTES
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
    PrefillSequence,
    SamplingSpec,
    TokenLogprob,
    TransferAck,
    TransferBlocks,
    TransferKvBlocks,
    WorkerCall,
    WorkerReady,
    WorkerResult,
    ints,
)

from .contents import POISON, VOCABULARY, Contents, Values, next_token
from .timeline import Line, Timeline

BLOCK_BYTES = 64
MEAN_S = {"load": 0.01, "copy": 0.01, "put": 0.03, "read": 0.03, "forward": 0.02, "travel": 0.001}


class Object(NamedTuple):
    """Payload and trailer of a host block or of a store object; `sound`: the checksum is the payload's."""

    values: Values
    name: bytes
    sound: bool = True


class Claims:
    """Blocks of one tier of one rank that some I/O reads or writes just now."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.readers: Counter[int] = Counter()
        self.writers: dict[int, str] = {}

    def read(self, block: int, who: str) -> None:
        assert block not in self.writers, f"{who} reads {self._tier} {block}, which {self.writers[block]} is writing"
        self.readers[block] += 1

    def write(self, block: int, who: str) -> None:
        assert block not in self.writers, f"{who} writes {self._tier} {block}, so does {self.writers[block]}"
        assert not self.readers[block], f"{who} writes {self._tier} {block} while it is being read"
        self.writers[block] = who

    def end_read(self, block: int) -> None:
        self.readers[block] -= 1

    def end_write(self, block: int) -> None:
        del self.writers[block]

    def busy(self) -> set[int]:
        return {block for block, count in self.readers.items() if count} | set(self.writers)


class Row(NamedTuple):
    """One sequence of a Forward as it was when it was sent."""

    start: int
    tokens: list[int]
    table: list[int]
    path: str
    write_from: int
    sampling: SamplingSpec | None
    prompt_logprobs: int | None
    next_token: int
    num_drafts: int = 0


def rows_of(plan: Forward, decode_path: str) -> list[Row]:
    rows = []
    for row in (*plan.prefill, *plan.decode):
        rest: tuple[str, int, int | None, int] = (decode_path, 0, None, -1)
        if isinstance(row, PrefillSequence):
            rest = ("P", row.write_from, row.prompt_logprobs, row.next_token)
        path, write_from, wants, following = rest
        table = row.block_table.tolist()
        drafts = getattr(row, "num_drafts", 0)
        tokens = row.token_ids.tolist()
        rows.append(Row(row.start, tokens, table, path, write_from, row.sampling, wants, following, drafts))
    return rows


def verified(drawn: list[int], row: Row) -> list[int]:
    """What was drawn, up to the first token that is not the draft in its place."""
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    for place, draft in enumerate(drafts):
        if drawn[place] != draft:
            return drawn[: place + 1]
    return drawn


def hashes_of(raw: bytes) -> list[bytes]:
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]


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
        replicated: bool,
        pace: float,
        seed: int,
        salt_of: Callable[[Row], str],
        is_published: Callable[[int], bool],
    ) -> None:
        self.timeline = timeline
        self.contents = contents
        self.num_host = num_host
        self.store = store
        self.replicated = replicated
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
        self.ranks = [Rank(self, number, num_device, num_host) for number in range(num_ranks)]

    def owner(self, rank: int) -> Rank:
        """Who keeps the host and store contents that `rank` uses."""
        return self.ranks[0 if self.replicated else rank]

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
            for rank in self.ranks:
                rank.store.clear()
        self.timeline.after(seconds, back)

    def objects(self) -> list[tuple[int, bytes]]:
        return [(rank.number, name) for rank in self.ranks for name in rank.store]

    def seconds(self, kind: str) -> float:
        mean = MEAN_S[kind] * (1.0 if kind in ("forward", "travel") else self.pace)
        return self.dice.random() * 2 * mean

    # ----------------------------------------------------------------------------------------------- forward

    def rows(self, plan: Forward) -> list[Row]:
        """The rows of a plan, copied once: its block tables are views of arrays that change."""
        if self._last_forward is None or self._last_forward[0] is not plan:
            self._last_forward = plan, rows_of(plan, self.contents.decode_path)
        return self._last_forward[1]

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
        size = all_ranks.contents.block_size
        self.device: list[list[bytes]] = [[POISON] * size for _ in range(num_device)]
        self.host: list[Object | None] = [None] * num_host
        self.store: dict[bytes, Object] = {}
        self.spoilt: set[int] = set()  # host blocks that a fault has changed since they were written
        self.device_claims, self.host_claims = Claims(f"rank {number} device"), Claims(f"rank {number} host")
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
        details = {"block_size": self.all.contents.block_size}
        self.answers.inbox.append(
            WorkerReady(
                self.number, len(self.device), len(self.host), max_model_len, VOCABULARY, [], BLOCK_BYTES, details
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
            if self.all.owner(self.number) is self:
                for host in message.host.tolist():
                    self.host_claims.write(host, f"read {message.prefetch_id}")
            self._submit("read", lambda: self._read(message))
        else:
            self._num_plans += 1
            if isinstance(message, Forward):
                self.all.rows(message)  # now, while its block tables are those of this step
            self._queue.append(message)
            self._advance()

    def _on_call(self, call: WorkerCall) -> None:
        if call.method == "ping":
            state = {"collectives": 0, "loaded_bytes": self.num_loaded * BLOCK_BYTES, "load_s": self.load_s}
            self._answer("ping", WorkerResult(call.call_id, self.number, state))
        elif call.method == "stats":
            self._answer("stats", WorkerResult(call.call_id, self.number, {"store_state": "attached"}))
        elif call.method == "clear_store":
            self._submit("put", lambda: lambda: self._clear_store(call))
        else:
            self.attached = call.method == "attach_store"
            state = {"state": "attached" if self.attached else "detached"}
            self._answer("switch", WorkerResult(call.call_id, self.number, state))

    def _clear_store(self, call: WorkerCall) -> None:
        value: dict[str, Any] = {"removed": 0}
        if self.number == 0 and not self.all.store_up:
            value["error"] = "the store is degraded: nothing was removed"
        elif self.number == 0:
            for rank in self.all.ranks:
                value["removed"] += len(rank.store)
                rank.store.clear()
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

    def _load(self, plan: TransferBlocks) -> None:
        (mapping,) = plan.target_mappings
        keeper = self.all.owner(self.number)
        rows = list(zip(mapping.device.tolist(), mapping.host.tolist(), hashes_of(mapping.hashes), strict=True))
        disproved = any(keeper.host[host] is None or keeper.host[host].name != name for _, host, name in rows)
        failed = self.all.take("load", self.number) is not None or disproved
        short = self._shortage("ack")
        load = Load(plan.batch_id, failed, {device for device, _, _ in rows}, bool(short))
        self._loads.append(load)
        kind = "short ack" if short else "ack"  # it is all that tells of a block too few, and is not lost too
        self._answer(kind, TransferAck(plan.batch_id, self.number, len(rows) - short), thread="forward")
        early: dict[int, Values] = {}
        for device, host, _ in rows:
            self.device_claims.write(device, f"load {plan.batch_id}")
            keeper.host_claims.read(host, f"load {plan.batch_id}")
            self.device[device] = [POISON] * self.all.contents.block_size
            if not failed and self.all.dice.random() < 0.5:
                early[device] = self._host_values(keeper, host)

        def end() -> None:
            for number, (device, host, _) in enumerate(rows):
                self.device_claims.end_write(device)
                keeper.host_claims.end_read(host)
                if not failed and number < len(rows) - short:
                    self.device[device] = list(early.get(device) or self._host_values(keeper, host))
            load.done = True
            self.num_loaded += len(rows)
            self.load_s += duration
            self._compute_when_loaded()

        duration = self._seconds("load")
        self._later(duration, end)

    @staticmethod
    def _host_values(keeper: Rank, host: int) -> Values:
        found = keeper.host[host]
        assert found is not None, f"host block {host} is loaded and holds nothing"
        return found.values

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
            for block in written:
                self.device_claims.end_write(block)
            self._answer("forward", self._outcome(plan, rows, loads, seconds, fails=fails))
            self._forward = None
            self._advance()

        seconds = self._seconds("forward")
        self._later(seconds, end)

    def _claim(self, plan: Forward, rows: Sequence[Row]) -> set[int]:
        """The blocks this step writes; no other row may read them, nor write them."""
        size = self.all.contents.block_size
        writer: dict[int, int] = {}
        for number, row in enumerate(rows):
            first, end = max(row.start, row.write_from), row.start + len(row.tokens)
            for block in row.table[first // size : -(-end // size)] if first < end else []:
                assert block not in writer, f"two rows of step {plan.step_id} write device block {block}"
                assert not self.all.is_published(block), f"step {plan.step_id} writes block {block}, which others find"
                writer[block] = number
                self.device_claims.write(block, f"step {plan.step_id}")
        for number, row in enumerate(rows):
            for block in row.table[: -(-row.start // size)]:
                assert writer.get(block, number) == number, f"step {plan.step_id} reads block {block} as it writes it"
        return set(writer)

    def _outcome(
        self, plan: Forward, rows: Sequence[Row], loads: list[Load], compute_s: float, *, fails: bool
    ) -> ForwardOutput:
        failed_blocks = {block for load in loads if load.spoilt for block in load.blocks}
        failed = {load.batch_id for load in loads if load.failed}
        failed |= set(plan.batch_ids) - {load.batch_id for load in loads}
        tokens: list[int] = []
        num_tokens: list[int] = []
        prompt_logprobs: list[list[TokenLogprob]] = []
        for row in rows:
            values = self._compute(row, spoilt=fails or not failed_blocks.isdisjoint(row.table))
            if row.prompt_logprobs is not None:
                following = [*row.tokens[1:], row.next_token]
                prompt_logprobs.append([TokenLogprob(token, 0.0, 1, [], []) for token in following if token >= 0])
            if row.sampling is not None:
                accepted = verified([next_token(last) for last in values[-1 - row.num_drafts :]], row)
                tokens += accepted
                num_tokens.append(len(accepted))
        if self.number:
            tokens, num_tokens, prompt_logprobs = [], [], []  # rank 0 alone samples
        view = f"step {plan.step_id}, {self._num_plans} plans"
        if self.all.take("view", self.number) is not None:
            view, self.all.doom = "something else", "a rank was told something else"
        if fails:
            tokens, num_tokens, prompt_logprobs = [], [], []
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
        )

    def _compute(self, row: Row, *, spoilt: bool) -> list[bytes]:
        """Write the values of a row, and return them. `spoilt`: from something that is no context."""
        size, contents = self.all.contents.block_size, self.all.contents
        last = POISON if spoilt else self._context(row)
        values = []
        for position, token in enumerate(row.tokens, row.start):
            last = contents.value(last, token, row.path)
            if position >= row.write_from:
                self.device[row.table[position // size]][position % size] = last
            values.append(last)
        return values

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
        (mapping,) = plan.target_mappings
        rows = list(zip(mapping.device.tolist(), mapping.host.tolist(), hashes_of(mapping.hashes), strict=True))
        if self.all.owner(self.number) is not self:
            self._submit("copy", lambda: lambda: self._copied_by_another(plan, len(rows)))
            return
        who = f"write-back {plan.transfer_id}"
        for device, host, _ in rows:  # from now on: the copy may begin at any moment
            self.device_claims.read(device, who)
            self.host_claims.write(host, who)
            self.host[host] = None
            self.spoilt.discard(host)
        self._submit("copy", lambda: self._copy(plan, rows))

    def _copied_by_another(self, plan: TransferKvBlocks, count: int) -> None:
        self._answer("copied", OffloadCopied(plan.transfer_id, self.number, count))
        stored = count if plan.put and self.attached else 0
        self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored))

    def _copy(self, plan: TransferKvBlocks, rows: list[tuple[int, int, bytes]]) -> Callable[[], None]:
        early = {device: tuple(self.device[device]) for device, _, _ in rows if self.all.dice.random() < 0.5}
        short = self._shortage("offload")

        def end() -> None:
            for number, (device, host, name) in enumerate(rows):
                self.device_claims.end_read(device)
                self.host_claims.end_write(host)
                if number < len(rows) - short:
                    values = early.get(device) or tuple(self.device[device])
                    assert values == self.all.contents.of(name, self.number), (
                        f"rank {self.number} writes back device block {device}, which is not what its hash says"
                    )
                    self.host[host] = Object(values, name)
            self._answer("copied", OffloadCopied(plan.transfer_id, self.number, len(rows) - short))
            if short or not plan.put or not self.attached:
                self._answer("stored", OffloadStored(plan.transfer_id, self.number, 0))
                return
            for _, host, _ in rows:
                self.host_claims.read(host, f"put of {plan.transfer_id}")
            self._submit("put", lambda: self._put(plan, rows))

        return end

    def _put(self, plan: TransferKvBlocks, rows: list[tuple[int, int, bytes]]) -> Callable[[], None]:
        fails = self.all.take("put", self.number) is not None or not self._works

        def end() -> None:
            stored = 0
            for number, (_, host, name) in enumerate(rows):
                self.host_claims.end_read(host)
                held = self.host[host]
                if name not in self.store and self._works and held and not (fails and number % 2 == 0):
                    self.store[name] = held
                stored += name in self.store
            self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored if self._works else 0))

        return end

    # -------------------------------------------------------------------------------------------------- G2H

    def _read(self, plan: PrefetchFromStorage) -> Callable[[], None]:
        rows = list(zip(plan.host.tolist(), hashes_of(plan.hashes), strict=True))
        if self.all.owner(self.number) is not self:
            return lambda: self._answer_read(plan, [HIT] * len(rows))
        wanted = [self._works and name in self.store for _, name in rows]
        outages = self.all.num_outages
        found = [self.store.get(name) if self.all.dice.random() < 0.5 else None for _, name in rows]
        for (host, _), reads in zip(rows, wanted, strict=True):
            if reads:
                self.host[host] = None
                self.spoilt.discard(host)

        def end() -> None:
            late = self.all.take("late", self.number)
            cut_off = outages != self.all.num_outages or not self.attached
            fails = self.all.take("read", self.number) is not None
            hits = []
            for (host, name), reads, early in zip(rows, wanted, found, strict=True):
                held = early or self.store.get(name)
                if reads and (late is not None or cut_off):
                    hits.append(UNKNOWN)
                    self._later(late or 1.0, lambda host=host, held=held: self._write_late(host, held))
                    continue
                self.host_claims.end_write(host)
                good = reads and not fails and held is not None and held.name == name and held.sound
                if good:
                    self.host[host] = held
                elif reads and held is not None and not fails:
                    self.store.pop(name, None)  # what its trailer disproves is taken out
                hits.append(HIT if good else MISS)
            self._answer_read(plan, hits)

        return end

    def _write_late(self, host: int, held: Object | None) -> None:
        """A read that was given up writes after all."""
        self.host_claims.end_write(host)
        if held is not None:
            self.host[host] = held
            self.spoilt.add(host)

    def _answer_read(self, plan: PrefetchFromStorage, hits: list[int]) -> None:
        if UNKNOWN not in hits and self.all.take("length", self.number) is not None:
            hits = hits[:-1]
        self._answer("read", PrefetchAnswer(plan.prefetch_id, plan.offset, self.number, bytes(hits)))
