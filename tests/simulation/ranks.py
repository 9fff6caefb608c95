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
from typing import Any, NamedTuple

from xllm_hier.block import BlockType
from xllm_hier.calls import (
    ClearStore,
    GetWorkerStats,
    Ping,
    Stop,
    StoreCleared,
    StoreState,
    SwitchStore,
    WorkerCall,
    WorkerResult,
)
from xllm_hier.figures import DraftDetails, ModelDetails, TypeSizes, WorkerReady, WorkerState, WorkerStats
from xllm_hier.ints import ints
from xllm_hier.plans import (
    EQUAL,
    HIT,
    MISS,
    UNKNOWN,
    BlocksCompared,
    CompareBlocks,
    Forward,
    ForwardOutput,
    LinkPeer,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    ProbeAnswer,
    ProbeStorage,
    PullBlocks,
    PushFailure,
    TransferAck,
    TransferBlocks,
    TransferEndpoint,
    TransferKvBlocks,
    UnlinkPeer,
)
from xllm_hier.request_messages import TokenLogprob

from .computing import Computation
from .contents import (
    POISON,
    TARGET,
    VOCABULARY,
    Contents,
    Part,
    Values,
    is_right,
)
from .domains import Claims, Domain, Object, is_named
from .moving import Mover
from .rows import Drawn, Origin, Row, drawn_from, hashes_of, rows_of
from .timeline import Line, Timeline
from .touched import (
    Block,
    Touch,
    depends_on,
    touched,
)

BLOCK_BYTES = 64
MEAN_S = {"load": 0.01, "copy": 0.01, "put": 0.03, "read": 0.03, "forward": 0.02, "travel": 0.001}


@dataclass(eq=False)
class Load:
    """An H2D batch under way on one rank."""

    batch_id: int
    failed: bool
    blocks: set[Block]
    short: bool = False  # it was acknowledged with a block too few, which it does not bring
    done: bool = False

    @property
    def spoilt(self) -> bool:
        return self.failed or self.short


class Move(NamedTuple):
    """One block of a plan that moves blocks between device and host."""

    type: BlockType
    device: int
    host: int
    name: bytes


@dataclass(frozen=True)
class Model:
    """What the ranks tell of their model's blocks: sizes by type, and on what grid prompts are computed."""

    sizes: tuple[TypeSizes, ...]
    strides: dict[str, int]
    scan_tokens: int
    max_model_len: int

    @property
    def window(self) -> int:
        """Tokens that a sliding window has; 0 where there is none."""
        return next((sizes.span for sizes in self.sizes if sizes.block_type == BlockType.SWA), 0)

    def of(self, part: Part) -> TypeSizes:
        return next(sizes for sizes in self.sizes if sizes.block_type == part.type)


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
        model: Model,
        store: bool,
        pace: float,
        seed: int,
        origin_of: Callable[[Row], Origin],
        is_published: Callable[[BlockType, int], bool],
        name: str = "",
        sessions: dict[str, Rank] | None = None,
    ) -> None:
        """`name` of the instance, and how ranks of all instances are reached; None: there are no others."""
        self.name = name
        self.sessions = sessions
        self.timeline = timeline
        self.contents = contents
        self.model = model
        self.store = store
        self.pace = pace
        self.origin_of = origin_of
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
        self._said: dict[int, list[set[tuple[str, bytes]]]] = {}  # by probe: what each rank said the store has
        self._arrived: dict[int, list[Callable[[bool], None]]] = {}
        self._last_forward: tuple[Forward, list[Row]] | None = None
        self._last_drawn: tuple[Forward, list[Drawn]] | None = None
        self.ranks = [Rank(self, number) for number in range(num_ranks)]

    def keeper(self, rank: int, part: Part) -> Domain:
        """Whose host and store contents `rank` uses."""
        return self.ranks[0 if part in self.contents.shared else rank].domains[part]

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

    def victims(self) -> set[Part]:
        """Whose blocks a fault hits: those of one part, or of all."""
        parts = self.contents.parts
        if len(parts) == 1:
            return set(parts)
        return set(self.dice.choice([*((part,) for part in parts), parts]))

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

    def said(self, prefetch_id: int, found: set[tuple[str, bytes]]) -> None:
        self._said.setdefault(prefetch_id, []).append(found)

    def check_read(self, plan: PrefetchFromStorage) -> None:
        """With several types, only what every rank said is there is read."""
        if len(self.model.sizes) == 1 and not self.model.window:
            return
        for name in hashes_of(plan.hashes):
            words = self._said[plan.prefetch_id]
            agreed = len(words) == len(self.ranks) and all((plan.block_type, name) in found for found in words)
            assert agreed, f"a {plan.block_type} block is read that some rank does not have"

    @property
    def busy(self) -> bool:
        """Some rank still does something."""
        return any(not rank.deaf and rank.busy for rank in self.ranks)


class Rank:
    """One worker."""

    def __init__(self, all_ranks: Ranks, number: int) -> None:
        self.all = all_ranks
        self.number = number
        contents = all_ranks.contents
        self.domains: dict[Part, Domain] = {}
        for part in contents.parts:
            sizes = all_ranks.model.of(part)
            counts = sizes.num_device_blocks, sizes.num_host_blocks
            self.domains[part] = Domain(number, part, contents.size(part), *counts)
        # Those whose host and store contents are this rank's to write; others use them too where all hold the same.
        self.kept = [domain for part, domain in self.domains.items() if not number or part not in contents.shared]
        target = self.domains[contents.parts[0]]  # of the model's first type; with the values of all its positions
        self.device, self.device_claims, self.host_claims = target.device, target.device_claims, target.host_claims
        self._model = Computation(
            number,
            contents,
            self.domains,
            window=all_ranks.model.window,
            scan_tokens=all_ranks.model.scan_tokens,
            origin_of=all_ranks.origin_of,
        )
        self.plans = Line(self._receive)
        self.answers = Line(lambda _: None)
        self.deaf = False
        self.stopped = False
        self.when_continued: list[Callable[[], None]] = []
        self.mover = Mover(self, all_ranks.sessions if all_ranks.sessions is not None else {})
        self.attached = all_ranks.store
        self.num_loaded, self.load_s = 0, 0.0
        self._queue: deque[Any] = deque()
        self._forward: tuple[Forward, list[Load]] | None = None
        self._loads: list[Load] = []
        self._lanes = {name: Lane() for name in ("copy", "read", "put")}
        self._last_sent: dict[str, float] = {}
        self._num_plans = 0
        self._num_waiting = 0  # events of this rank on the timeline

    def announce(self) -> None:
        model = self.all.model
        draft = None
        if self.all.contents.draft:
            types = [kind.value for kind in self.all.contents.draft_types]
            draft = DraftDetails("draft", types, self.all.contents.needs_hidden)
        self.answers.inbox.append(
            WorkerReady(
                self.number,
                list(model.sizes),
                self.all.contents.block_size,
                model.max_model_len,
                VOCABULARY,
                model=ModelDetails(scan_tokens=model.scan_tokens),
                draft=draft,
                strides=model.strides,
                endpoint=self._endpoint(),
            )
        )

    @property
    def name(self) -> str:
        return f"{self.all.name} rank {self.number}"

    def _endpoint(self) -> TransferEndpoint | None:
        if self.all.sessions is None:
            return None
        self.all.sessions[self.name] = self
        return TransferEndpoint(self.number, self.name, [])

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

    def go_on(self) -> None:
        """After `stopped`: all that would have happened since then happens now, in order."""
        self.stopped = False
        waiting, self.when_continued = self.when_continued, []
        for work in waiting:
            work()

    # ------------------------------------------------------------------------------------- what takes time

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a while, unless the process has ended, and not while it is stopped."""
        self._later(delay_s, work)

    def answer(self, kind: str, message: Any) -> None:
        """Send an answer of a thread of its own."""
        self._answer(kind, message)

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        def happen() -> None:
            if self.stopped and not self.deaf:
                self.when_continued.append(happen)
                return
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
        if isinstance(message, Forward) and not self.deaf:
            self.all.rows(message)  # now, while its block tables are those of this step
        self._take(message)

    def _take(self, message: Any) -> None:
        if self.stopped and not self.deaf:
            self.when_continued.append(lambda: self._take(message))
        if self.deaf or self.stopped:
            return
        if isinstance(message, WorkerCall):
            self._on_call(message)
        elif isinstance(message, (LinkPeer, UnlinkPeer, PullBlocks)):
            self.mover.receive(message)
        elif isinstance(message, PrefetchFromStorage):
            self.all.check_read(message)
            for domain in self._kept_of(BlockType(message.block_type)):
                for host in message.host.tolist():
                    domain.host_claims.write(host, f"read {message.prefetch_id}")
            self._submit("read", lambda: self._read(message))
        elif isinstance(message, ProbeStorage):
            self._submit("read", lambda: partial(self._probe, message))
        else:
            self._num_plans += 1
            self._queue.append(message)
            self._advance()

    def _on_call(self, call: WorkerCall) -> None:
        if isinstance(call.question, Ping):
            state = WorkerState(loaded_bytes=self.num_loaded * BLOCK_BYTES, load_s=self.load_s)
            self._answer("ping", WorkerResult(call.call_id, self.number, state))
        elif isinstance(call.question, GetWorkerStats):
            self._answer("stats", WorkerResult(call.call_id, self.number, WorkerStats(store_state="attached")))
        elif isinstance(call.question, ClearStore):
            self._submit("put", lambda: lambda: self._clear_store(call))
        elif isinstance(call.question, SwitchStore):
            self.attached = call.question.place is not None
            now = StoreState("attached" if self.attached else "detached")
            self._answer("switch", WorkerResult(call.call_id, self.number, now))
        else:
            assert isinstance(call.question, Stop), call

    def _clear_store(self, call: WorkerCall) -> None:
        value = StoreCleared(0)
        if self.number == 0 and not self.all.store_up:
            value = StoreCleared(0, "the store is degraded: nothing was removed")
        elif self.number == 0:
            value = StoreCleared(self.all.clear_stores())
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

    def _kept_of(self, kind: BlockType) -> list[Domain]:
        return [domain for domain in self.kept if domain.part.type is kind]

    def _moves(self, plan: TransferBlocks | TransferKvBlocks) -> list[Move]:
        """The blocks of a plan; those of KV are the same in each domain."""
        moves = []
        for mapping in plan.target_mappings:
            ids = zip(mapping.device.tolist(), mapping.host.tolist(), hashes_of(mapping.hashes), strict=True)
            moves += [Move(BlockType(mapping.block_type), *one) for one in ids]
        kinds = [mapping.block_type for mapping in plan.target_mappings]
        assert len(set(kinds)) == len(kinds), "two mappings of one type"
        draft_types = self.all.contents.draft_types
        followed = [mapping for mapping in plan.target_mappings if BlockType(mapping.block_type) in draft_types]
        assert len(plan.draft_mappings) == len(followed), "the draft's mapping is not the target's"
        for mapping, other in zip(followed, plan.draft_mappings, strict=True):
            same = other.device.tolist() == mapping.device.tolist() and other.host.tolist() == mapping.host.tolist()
            same = same and other.block_type == mapping.block_type
            assert same and other.hashes == mapping.hashes, "the draft's blocks are not the target's"
        return moves

    def _load(self, plan: TransferBlocks) -> None:
        moves = self._moves(plan)
        rows = [(move, domain) for move in moves for domain in self.domains.values() if domain.part.type is move.type]
        keepers = {part: self.all.keeper(self.number, part) for part in self.domains}
        disproved = any(not is_named(keepers[domain.part].host[move.host], move.name) for move, domain in rows)
        fault = self.all.take("load", self.number) is not None
        failed = fault or disproved
        lost = set(self.domains) if disproved else self.all.victims() if fault else set()
        short = self._shortage("ack")
        cut = self.all.victims() if short else set()
        load = Load(plan.batch_id, failed, {(move.type, move.device) for move in moves}, bool(short))
        self._loads.append(load)
        kind = "short ack" if short else "ack"  # it is all that tells of a block too few, and is not lost too
        self._answer(kind, TransferAck(plan.batch_id, self.number, len(moves) - short), thread="forward")
        early: dict[tuple[Part, int], Values] = {}
        for move, domain in rows:
            keeper = keepers[domain.part]
            domain.device_claims.write(move.device, f"load {plan.batch_id}")
            keeper.host_claims.read(move.host, f"load {plan.batch_id}")
            domain.device[move.device] = [POISON] * domain.size
            if domain.part not in lost and self.all.dice.random() < 0.5:
                early[domain.part, move.device] = keeper.host_values(move.host)

        def end() -> None:
            for move, domain in rows:
                keeper = keepers[domain.part]
                domain.device_claims.end_write(move.device)
                keeper.host_claims.end_read(move.host)
                is_cut = domain.part in cut and move is moves[-1]
                if domain.part not in lost and not is_cut:
                    values = early.get((domain.part, move.device)) or keeper.host_values(move.host)
                    domain.device[move.device] = list(values)
            load.done = True
            self.num_loaded += len(moves)
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
            outcome = self._outcome(plan, rows, loads, seconds, fails=fails)
            pushed = plan.pushes if not fails or self.all.dice.random() < 0.5 else []
            self.mover.push(pushed, lambda failures: finish(outcome, failures))

        def finish(outcome: ForwardOutput, failures: list[PushFailure]) -> None:
            outcome.failed_pushes.extend(failures)
            self._answer("forward", outcome)
            self._forward = None
            self._advance()

        seconds = self._seconds("forward")
        self._later(seconds, end)

    def _claim(self, plan: Forward, rows: Sequence[Row]) -> list[tuple[Claims, Iterable[int]]]:
        """The blocks this step writes; no other row may read them, nor write them."""
        touches = [touched(row, self.all.contents, self.all.model.window) for row in rows]
        return [
            (domain.device_claims, self._claim_blocks(plan, [touch[part] for touch in touches], domain))
            for part, domain in self.domains.items()
        ]

    def _claim_blocks(self, plan: Forward, touches: Sequence[Touch], domain: Domain) -> Iterable[int]:
        writer: dict[int, int] = {}
        for number, touch in enumerate(touches):
            for block in touch.writes:
                where = f"{domain.part} block {block}"
                assert block not in writer, f"two rows of step {plan.step_id} write {where}"
                published = self.all.is_published(domain.part.type, block)
                assert not published, f"step {plan.step_id} writes {where}, which others find"
                writer[block] = number
                domain.device_claims.write(block, f"step {plan.step_id}")
        for number, touch in enumerate(touches):
            for block in touch.reads:
                alone = writer.get(block, number) == number
                assert alone, f"step {plan.step_id} reads {domain.part} block {block} as it writes it"
        return writer

    def _outcome(
        self, plan: Forward, rows: Sequence[Row], loads: list[Load], compute_s: float, *, fails: bool
    ) -> ForwardOutput:
        failed_blocks = {block for load in loads if load.spoilt for block in load.blocks}
        failed = {load.batch_id for load in loads if load.failed}
        failed |= set(plan.batch_ids) - {load.batch_id for load in loads}
        spoilt = [fails or not failed_blocks.isdisjoint(depends_on(row)) for row in rows]
        drawn = self.all.drawn(plan) if not fails and (not self.number or self._model.draft_domain) else []
        tokens: list[int] = []
        num_tokens: list[int] = []
        prompt_logprobs: list[list[TokenLogprob]] = []
        proposals: list[list[int]] = []
        for number, row in enumerate(rows):
            values = self._model.compute(row, spoilt=spoilt[number])
            if row.prompt_logprobs is not None:
                following = [*row.tokens[1:], row.next_token]
                prompt_logprobs.append(
                    [TokenLogprob(token, 0.0, 1, [], []) for token in following if token is not None]
                )
            drafts = self._model.draft(row, values, drawn[number] if drawn else None, spoilt=spoilt[number])
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
            [ints(drafts) for drafts in proposals] if self._model.draft_domain else [],
        )

    def draw(self, plan: Forward) -> list[Drawn]:
        """What comes of the step under way, before it has ended."""
        assert self._forward is not None and self._forward[0] is plan
        spoilt = {block for load in self._forward[1] if load.spoilt for block in load.blocks}
        found = []
        for row in self.all.rows(plan):
            last = self._model.last(row) if spoilt.isdisjoint(depends_on(row)) else POISON
            found.append(drawn_from(row, self._model.values(row, last)))
        return found

    def _compare_blocks(self, plan: CompareBlocks) -> None:
        """Part of an audit: what was restored is what computing gives, or something is wrong that must not be."""
        device = self.domains[Part(TARGET, BlockType(plan.block_type))].device
        for first, second in zip(plan.first.tolist(), plan.second.tolist(), strict=True):
            assert device[first] == device[second], f"rank {self.number}: block {first} was restored wrong"
        verdicts = bytes([EQUAL]) * len(plan.first)
        self._answer("compared", BlocksCompared(plan.compare_id, self.number, verdicts))

    # ------------------------------------------------------------------------------------------------ D2H2G

    def _offload(self, plan: TransferKvBlocks) -> None:
        moves = self._moves(plan)
        if not self.kept:
            self._submit("copy", lambda: lambda: self._copied_by_another(plan, len(moves)))
            return
        who = f"write-back {plan.transfer_id}"
        rows = [(move, domain) for move in moves for domain in self._kept_of(move.type)]
        for move, domain in rows:  # from now on: the copy may begin at any moment
            domain.device_claims.read(move.device, who)
            domain.host_claims.write(move.host, who)
            domain.host[move.host] = None
            domain.spoilt.discard(move.host)
        self._submit("copy", lambda: self._copy(plan, moves, rows))

    def _copied_by_another(self, plan: TransferKvBlocks, count: int) -> None:
        self._answer("copied", OffloadCopied(plan.transfer_id, self.number, count))
        stored = count if plan.put and self.attached else 0
        self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored))

    def _copy(self, plan: TransferKvBlocks, moves: list[Move], rows: list[tuple[Move, Domain]]) -> Callable[[], None]:
        early = {
            (domain.part, move.device): tuple(domain.device[move.device])
            for move, domain in rows
            if self.all.dice.random() < 0.5
        }
        short = self._shortage("offload")
        cut = self.all.victims() if short else set()

        def end() -> None:
            for move, domain in rows:
                domain.device_claims.end_read(move.device)
                domain.host_claims.end_write(move.host)
                if domain.part in cut and move is moves[-1]:
                    continue
                values = early.get((domain.part, move.device)) or tuple(domain.device[move.device])
                assert is_right(values, self.all.contents.of(move.name, self.number, domain.part)), (
                    f"rank {self.number} writes back {domain.part} device block {move.device}, which is not what its "
                    "hash says"
                )
                domain.host[move.host] = Object(values, move.name)
            self._answer("copied", OffloadCopied(plan.transfer_id, self.number, len(moves) - short))
            if short or not plan.put or not self.attached:
                self._answer("stored", OffloadStored(plan.transfer_id, self.number, 0))
                return
            for move, domain in rows:
                domain.host_claims.read(move.host, f"put of {plan.transfer_id}")
            self._submit("put", lambda: self._put(plan, moves))

        return end

    def _put(self, plan: TransferKvBlocks, moves: list[Move]) -> Callable[[], None]:
        fails = self.all.take("put", self.number) is not None or not self._works

        def end() -> None:
            stored = 0
            for number, move in enumerate(moves):
                kept = self._kept_of(move.type)
                for place, domain in enumerate(kept, number):
                    domain.host_claims.end_read(move.host)
                    held = domain.host[move.host]
                    if move.name not in domain.store and self._works and held and not (fails and place % 2 == 0):
                        domain.store[move.name] = held
                stored += all(move.name in domain.store for domain in kept)
            self._answer("stored", OffloadStored(plan.transfer_id, self.number, stored if self._works else 0))

        return end

    # -------------------------------------------------------------------------------------------------- G2H

    def _probe(self, plan: ProbeStorage) -> None:
        """Say what the store has; an object may be gone by the time it is read."""
        vanishes, answered = self.all.take("vanish", self.number) is not None, []
        found: set[tuple[str, bytes]] = set()
        for kind, raw in zip(plan.block_types, plan.hashes, strict=True):
            kept = self._kept_of(BlockType(kind))
            names = hashes_of(raw)
            assert len(set(names)) == len(names), f"{kind} blocks are asked for twice"
            hits = [(self._works or not kept) and all(name in domain.store for domain in kept) for name in names]
            answered.append(bytes(HIT if hit else MISS for hit in hits))
            found |= {(kind, name) for name, hit in zip(names, hits, strict=True) if hit}
            there = [(domain, name) for name, hit in zip(names, hits, strict=True) for domain in kept if hit]
            if vanishes and there:
                domain, name = self.all.dice.choice(there)
                del domain.store[name]
        if self.all.take("length probe", self.number) is not None:
            answered[-1] = answered[-1][:-1]
        self.all.said(plan.prefetch_id, found)
        self._answer("probe", ProbeAnswer(plan.prefetch_id, self.number, answered), thread="read")

    def _read(self, plan: PrefetchFromStorage) -> Callable[[], None]:
        rows = list(zip(plan.host.tolist(), hashes_of(plan.hashes), strict=True))
        kept = self._kept_of(BlockType(plan.block_type))
        if not kept:
            return lambda: self._answer_read(plan, [HIT] * len(rows))
        wanted = [self._works and all(name in domain.store for domain in kept) for _, name in rows]
        outages = self.all.num_outages
        found = [
            [domain.store.get(name) if self.all.dice.random() < 0.5 else None for domain in kept] for _, name in rows
        ]
        for (host, _), reads in zip(rows, wanted, strict=True):
            for domain in kept if reads else ():
                domain.host[host] = None
                domain.spoilt.discard(host)

        def end() -> None:
            late = self.all.take("late", self.number)
            cut_off = outages != self.all.num_outages or not self.attached
            fails = self.all.take("read", self.number) is not None
            hits = []
            for (host, name), reads, early in zip(rows, wanted, found, strict=True):
                held = [one or domain.store.get(name) for one, domain in zip(early, kept, strict=True)]
                parts = list(zip(kept, held, strict=True))
                if reads and (late is not None or cut_off):
                    hits.append(UNKNOWN)
                    for times, (domain, one) in enumerate(parts, 2):  # each at a time of its own
                        self._later((late or 1.0) * times / 2, partial(self._write_late, host, domain, one))
                    continue
                for domain in kept:
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
