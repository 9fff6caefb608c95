"""Instances of the engine's own scheduler and block books on a virtual clock, with workers that only tell the time.

A trace is replayed against several of them behind the service's index and router. Nothing is computed: a step takes as
long as its tokens, rows and copies say, so that an hour of traffic passes in seconds and every run is the same.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.journal import CacheJournal
from xllm_hier.engine.blocks.settings import BookSettings, ReadLimits
from xllm_hier.engine.steps.scheduler import Scheduler, Step
from xllm_hier.figures import TypeSizes
from xllm_hier.ints import ints
from xllm_hier.plans import (
    HIT,
    MISS,
    ForwardOutput,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferAck,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.request_messages import AddRequest, RequestOutput, SamplingSpec
from xllm_hier.service.policies import Candidate, InstanceLoad, Prompt, Route, Router
from xllm_hier.service.prefix_index import IndexState, PrefixIndex

TRACE_BLOCK, MOST_BLOCKS = 512, 128  # tokens of a trace's block; blocks of a prompt that are used
FIRST_TOKEN, END_OF_TOKENS = 100, 30_000
HASH_BYTES = 16
COMPUTE_S, STEP_S, ROW_S, LOAD_S, READ_S = 1e-3, 2e-3, 0.2e-3, 0.5e-3, 2e-3  # of a token, step, row, block, block
HEARTBEAT_S = 0.5
TIERS = ("device", "host", "store")


@dataclass(frozen=True)
class Request:
    """One line of a trace: when it arrives, its trace blocks, its prompt in tokens, and how much it generates."""

    at_s: float
    ids: Sequence[int]
    tokens: list[int]
    max_tokens: int


def read_trace(path: Path, block_size: int, limit: int | None = None) -> list[Request]:
    """The requests of a slice, a block of the trace being one of `block_size` tokens; `limit` is for tests only, since
    the first requests of a trace have another reuse than all of it."""
    blocks: dict[int, list[int]] = {}
    requests = []
    with path.open() as lines:
        for line in itertools.islice(lines, limit):
            raw = json.loads(line)
            ids = raw["hash_ids"][:MOST_BLOCKS]
            for one in ids:
                if one not in blocks:
                    dice = random.Random(f"0:{one}")
                    blocks[one] = [dice.randrange(FIRST_TOKEN, END_OF_TOKENS) for _ in range(block_size)]
            last = (min(raw["input_length"], MOST_BLOCKS * TRACE_BLOCK) - (len(ids) - 1) * TRACE_BLOCK) * block_size
            tokens = [token for one in ids[:-1] for token in blocks[one]]
            tokens += blocks[ids[-1]][: max(1, last // TRACE_BLOCK)]
            generated = max(2, -(-raw["output_length"] * block_size // TRACE_BLOCK))
            requests.append(Request(raw["timestamp"] / 1000, ids, tokens, generated))
    return requests


def shared_prefix(count: int, rate: float, *, shared_blocks: int, own_blocks: int, block_size: int) -> list[Request]:
    """`count` requests at random times, `rate` a second, that begin with the same blocks and go on with their own."""
    dice, at_s, requests = random.Random(0), 0.0, []
    common = [dice.randrange(FIRST_TOKEN, END_OF_TOKENS) for _ in range(shared_blocks * block_size)]
    for number in range(count):
        at_s += dice.expovariate(rate)
        own = [dice.randrange(FIRST_TOKEN, END_OF_TOKENS) for _ in range(own_blocks * block_size)]
        first = shared_blocks + number * own_blocks
        ids = [*range(shared_blocks), *range(first, first + own_blocks)]
        requests.append(Request(at_s, ids, common + own, block_size))
    return requests


def scale_time(requests: Sequence[Request], share: float) -> float:
    """Seconds of the trace in one virtual second so that one instance without any cache would be busy for `share` of
    the time."""
    work = sum(len(one.tokens) * COMPUTE_S + one.max_tokens * (STEP_S + ROW_S) for one in requests)
    return (requests[-1].at_s - requests[0].at_s) * share / work


class Clock:
    """Virtual time; what is due at the same moment happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), work))

    def run(self) -> None:
        while self._due:
            self.now, _, work = heapq.heappop(self._due)
            work()


@dataclass(frozen=True)
class Sizes:
    """Blocks of one instance, and tokens of a block."""

    device: int = 192
    host: int = 768
    block_size: int = 16
    max_tokens: int = 512
    max_seqs: int = 16
    chunk_tokens: int = 256


class SimulatedInstance:
    """One engine without model: it is its own worker, whose answers come at once or after the time of a read."""

    num_workers = 1

    def __init__(
        self,
        name: str,
        clock: Clock,
        sizes: Sizes,
        store: set[bytes] | None,
        on_output: Callable[[SimulatedInstance, RequestOutput], None],
        on_turn: Callable[[SimulatedInstance], None],
    ) -> None:
        self.name = name
        self._clock, self._sizes = clock, sizes
        self._store = store if store is not None else set()
        self._on_output, self._on_turn = on_output, on_turn
        self.journal = CacheJournal(sizes.block_size)
        self.manager = HierarchyBlockManagerPool(
            self,
            [TypeSizes("KV", 0, sizes.device, sizes.host, 1)],
            BookSettings(sizes.block_size, limits=ReadLimits(timeout_ms=0)),
            store_enabled=store is not None,
            journal=self.journal,
        )
        self.scheduler = Scheduler(
            self.manager, max_tokens=sizes.max_tokens, max_seqs=sizes.max_seqs, chunk_tokens=sizes.chunk_tokens
        )
        self._answers: deque[Callable[[], None]] = deque()
        self._num_loaded = 0
        self._busy = False
        self._step_s: deque[float] = deque(maxlen=32)
        self.busy_s = 0.0

    # ------------------------------------------------------------------------------------------- as a worker

    def broadcast(self, message: Any) -> None:
        """Carry out a plan."""
        if isinstance(message, TransferBlocks):
            count = sum(len(mapping.device) for mapping in message.target_mappings)
            self._num_loaded += count
            self._answers.append(lambda: self.manager.on_worker(TransferAck(message.batch_id, 0, count)))
        elif isinstance(message, TransferKvBlocks):
            self._answers.append(lambda: self._write_back(message))
        elif isinstance(message, PrefetchFromStorage):
            hashes = [message.hashes[at : at + HASH_BYTES] for at in range(0, len(message.hashes), HASH_BYTES)]
            self._clock.at(self._clock.now + READ_S * len(hashes), lambda: self._read(message, hashes))

    def _write_back(self, plan: TransferKvBlocks) -> None:
        count = 0
        for mapping in plan.target_mappings:
            count += len(mapping.device)
            if plan.put:
                starts = range(0, len(mapping.hashes), HASH_BYTES)
                self._store.update(mapping.hashes[start : start + HASH_BYTES] for start in starts)
        self.manager.on_worker(OffloadCopied(plan.transfer_id, 0, count))
        self.manager.on_worker(OffloadStored(plan.transfer_id, 0, count if plan.put else 0))

    def _read(self, plan: PrefetchFromStorage, hashes: Iterable[bytes]) -> None:
        hits = bytes(HIT if one in self._store else MISS for one in hashes)
        self.manager.on_worker(PrefetchAnswer(plan.prefetch_id, plan.offset, 0, hits))
        self.wake()

    # ------------------------------------------------------------------------------------------ as an engine

    def add(self, request: AddRequest) -> None:
        """A request arrives."""
        self.scheduler.add_request(request)
        self.wake()

    def wake(self) -> None:
        """Something has come: begin a step unless one is under way."""
        if self._busy:
            return
        self._settle()
        self.scheduler.poll_prefetches()
        step = self.scheduler.schedule()
        self._settle()
        self._on_turn(self)
        if step is None:
            return
        prompt = sum(len(row.token_ids) for row in step.plan.prefill)
        seconds = STEP_S + prompt * COMPUTE_S + len(step.plan.decode) * ROW_S + self._num_loaded * LOAD_S
        self._num_loaded, self._busy = 0, True
        self.busy_s += seconds
        if step.plan.decode:
            self._step_s.append(seconds)
        self._clock.at(self._clock.now + seconds, lambda: self._finish(step))

    def _settle(self) -> None:
        """Send what is to be written back; take answers until there are none."""
        self.manager.transfer_offload_blocks()
        while self._answers:
            self._answers.popleft()()
            self.manager.transfer_offload_blocks()

    def _finish(self, step: Step) -> None:
        self._settle()
        rows = sum(row.sampling is not None for row in (*step.plan.prefill, *step.plan.decode))
        tokens = ints([FIRST_TOKEN - 1] * rows)
        self.scheduler.finish(step, ForwardOutput(step.plan.step_id, 0, tokens, [None] * rows, [], [], 0.0, 0.0))
        self._busy = False
        for output in self.scheduler.take_outputs():
            self._on_output(self, output)
        self.wake()

    def load(self) -> InstanceLoad:
        """What its heartbeat says now."""
        scheduler = self.scheduler
        return InstanceLoad(
            num_open=scheduler.num_open,
            num_waiting=len(scheduler.waiting) + len(scheduler.prefetching),
            num_running=len(scheduler.running),
            backlog_tokens=scheduler.backlog_tokens(),
            compute_s=COMPUTE_S,
            load_s=LOAD_S,
            read_s=READ_S,
            step_s=statistics.median(self._step_s) if self._step_s else None,
        )


@dataclass
class Run:
    """What came of a replay: `hits` counts the trace's blocks by the tier that gave them, of `num_blocks` in all.

    `placed[r]` is the number of the instance that got request r, `expected` the hits that the router had predicted.
    """

    num_blocks: int = 0
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    expected: int = 0
    placed: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    busy: float = 0.0
    decisions: dict[str, int] = field(default_factory=dict)

    def ratio(self, *tiers: str) -> float:
        return sum(self.hits[tier] for tier in tiers or TIERS) / self.num_blocks

    @property
    def spread(self) -> tuple[float, float]:
        """Most over mean of the instances' computed tokens and requests."""
        requests = [self.placed.count(number) for number in range(len(self.computed))]
        return max(self.computed) / statistics.mean(self.computed), max(requests) / statistics.mean(requests)


class Replay:
    """One trace against `count` instances behind one router."""

    def __init__(
        self, requests: Sequence[Request], count: int, policy: str, *, store: bool, sizes: Sizes, time_scale: float
    ) -> None:
        self._requests, self._sizes = requests, sizes
        self._clock = Clock()
        self._index = PrefixIndex()
        self._router = Router(policy, self._index)
        contents: set[bytes] | None = set() if store else None
        self._instances = [
            SimulatedInstance(f"i{number}", self._clock, sizes, contents, self._on_output, self._on_turn)
            for number in range(count)
        ]
        self._numbers = {one.name: number for number, one in enumerate(self._instances)}
        for one in self._instances:
            rules = [pools.rule for pools in one.manager.pools.values()]
            self._index.join(one.name, "one", rules, "store" if store else "")
            self._index.set_state(one.name, IndexState.EXACT)
        self._loads: list[InstanceLoad] = []
        self._routes: dict[str, Route] = {}
        self._arrived: dict[str, float] = {}
        self._num_open = len(requests)
        self.result = Run(computed=[0] * count, num_blocks=sum(len(one.ids) for one in requests))
        start = requests[0].at_s
        self._clock.at(0.0, self._heartbeat)
        for number, request in enumerate(requests):
            self._clock.at((request.at_s - start) / time_scale, lambda number=number: self._arrive(number))  # type: ignore[misc]

    def run(self) -> Run:
        """To the end of the trace."""
        self._clock.run()
        assert not self._num_open, "requests were left unanswered"
        self.result.busy = sum(one.busy_s for one in self._instances) / len(self._instances) / self._clock.now
        self.result.decisions = self._router.describe()["decisions"]
        return self.result

    def _heartbeat(self) -> None:
        self._loads = [one.load() for one in self._instances]
        if self._num_open:
            self._clock.at(self._clock.now + HEARTBEAT_S, self._heartbeat)

    def _arrive(self, number: int) -> None:
        request, name = self._requests[number], str(number)
        size = self._sizes.block_size
        candidates = [
            Candidate(one.name, "DEFAULT", "one", size, load)
            for one, load in zip(self._instances, self._loads, strict=True)
        ]
        route = self._router.choose(Prompt(request.tokens), candidates)
        assert route is not None
        self._router.begin(route)
        self._routes[name], self._arrived[name] = route, self._clock.now
        self.result.placed.append(self._numbers[route.prefill])
        self.result.expected += -(-route.match.cached // size)
        added = AddRequest(name, ints(request.tokens), SamplingSpec(), request.max_tokens, ignore_eos=True)
        self._instances[self._numbers[route.prefill]].add(added)

    def _on_turn(self, one: SimulatedInstance) -> None:
        self._index.apply(one.name, "one", one.journal.take())

    def _on_output(self, one: SimulatedInstance, output: RequestOutput) -> None:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
        name, usage = output.request_id, output.usage
        if usage is not None:
            seconds = self._clock.now - self._arrived[name]
            self._router.first_token(self._routes[name], seconds)
            self.result.ttft_s.append(seconds)
            self.result.computed[self._numbers[one.name]] += usage.computed
            for tier in TIERS:  # the last block of a full hit is cut: its last token is computed
                self.result.hits[tier] += -(-getattr(usage, tier) // self._sizes.block_size)
        if output.finish_reason is not None:
            self._router.end(self._routes.pop(name))
            self._num_open -= 1


# ---------------------------------------------------------------------------------------------------- the oracle


class _Lru:
    """Blocks by when they were last used; of one prompt the last ones are forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, ids: Sequence[int]) -> None:
        for one in reversed(ids):
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        while len(self.blocks) > self._size:
            self.blocks.popitem(last=False)


def oracle(requests: Sequence[Request], placed: Sequence[int], sizes: Sizes) -> dict[str, float]:
    """Share of the trace's blocks that caches which know nothing but the order of their use would give, one request at
    a time: `device` alone, with the `host`, with the `store`, which has all that ever was; request r is for instance
    `placed[r]`."""
    devices = [_Lru(sizes.device) for _ in range(max(placed) + 1)]
    hosts = [_Lru(sizes.host) for _ in devices]
    seen: set[int] = set()
    hits = dict.fromkeys(TIERS, 0)
    for request, where in zip(requests, placed, strict=True):
        ids, device, host = request.ids, devices[where], hosts[where]
        on_device = _prefix(ids, device.blocks.__contains__)
        hits["device"] += on_device
        hits["host"] += _prefix(ids, lambda one: one in device.blocks or one in host.blocks)  # noqa: B023
        hits["store"] += _prefix(ids, seen.__contains__)
        device.use(ids)
        host.use(ids[on_device:])  # the host does not hear of what the device gives
        seen.update(ids)
    return {tier: hits[tier] / sum(len(request.ids) for request in requests) for tier in TIERS}


def _prefix(ids: Sequence[int], has: Callable[[int], bool]) -> int:
    return sum(1 for _ in itertools.takewhile(has, ids))
