"""Workers without a model: block bytes are a function of the tokens before them, so a wrong block is seen at once.

The value of a position is H(value of the position before, token, path), path = prefill or decode; the next token is
a function of the last value. Every row checks its whole context. Copies happen as late or as early as the protocol
allows, chosen by a seeded generator, and answers come in any order, so reuse of a pinned block shows too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.contents import POISON, next_token, reference, value
from simulation.rows import hashes_of

from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.journal import CacheJournal
from xllm_hier.engine.blocks.policy import RestorePolicy
from xllm_hier.engine.blocks.settings import BookSettings, ReadLimits
from xllm_hier.engine.steps.audit import Auditor
from xllm_hier.engine.steps.scheduler import Scheduler
from xllm_hier.figures import TypeSizes
from xllm_hier.ints import ints
from xllm_hier.plans import (
    DIFFERENT,
    EQUAL,
    UNKNOWN,
    BlocksCompared,
    CompareBlocks,
    Forward,
    ForwardOutput,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferAck,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.request_messages import AddRequest, RequestOutput, SamplingSpec, TokenLogprob

__all__ = ["Faults", "SimulatedWorkers", "Simulation", "reference"]


@dataclass
class Faults:
    """Probabilities of what may go wrong, per event."""

    load: float = 0.0
    offload: float = 0.0
    put: float = 0.0
    unreadable: float = 0.0
    forward: float = 0.0


class SimulatedWorkers:
    """`num_workers` ranks over one set of contents; `deliver` hands over the answers that are due."""

    def __init__(
        self, *, num_workers: int, num_device: int, num_host: int, block_size: int, seed: int, faults: Faults
    ) -> None:
        self.num_workers = num_workers
        self.block_size = block_size
        self.random = random.Random(seed)
        self.faults = faults
        self.device = [[POISON] * block_size for _ in range(num_device)]
        self.host = [[POISON] * block_size for _ in range(num_host)]
        self.store: dict[bytes, list[bytes]] = {}
        self.pending: list[Callable[[HierarchyBlockManagerPool], None]] = []
        self.late: list[Callable[[], None]] = []  # loads registered, copied at the next forward at the latest
        self.sent: list[object] = []
        self.failed_loads: set[int] = set()
        self.verdict = 0
        self.on_compared: Callable[[BlocksCompared], None] = lambda answer: None

    def broadcast(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, TransferBlocks):
            self._load(message)
        elif isinstance(message, TransferKvBlocks):
            self._offload(message)
        elif isinstance(message, PrefetchFromStorage):
            self._prefetch(message)
        elif isinstance(message, CompareBlocks):
            self._compare(message)

    def _compare(self, plan: CompareBlocks) -> None:
        pairs = zip(plan.first.tolist(), plan.second.tolist(), strict=True)
        verdicts = [EQUAL if self.device[one] == self.device[other] else DIFFERENT for one, other in pairs]
        for rank in range(self.num_workers):
            answer = BlocksCompared(plan.compare_id, rank, bytes(self.verdict or verdict for verdict in verdicts))
            self.pending.append(lambda manager, answer=answer: self.on_compared(answer))

    def _now_or_later(self, work: Callable[[], None], later: list[Callable[[], None]]) -> None:
        if self.random.random() < 0.5:
            work()
        else:
            later.append(work)

    def _load(self, plan: TransferBlocks) -> None:
        failed = self.random.random() < self.faults.load
        if failed:
            self.failed_loads.add(plan.batch_id)
        for mapping in plan.target_mappings:
            for device, host in zip(mapping.device.tolist(), mapping.host.tolist(), strict=True):
                if failed:
                    self.device[device] = [POISON] * self.block_size
                    continue
                self._now_or_later(
                    lambda device=device, host=host: self.device.__setitem__(device, list(self.host[host])), self.late
                )
            for rank in range(self.num_workers):
                ack = TransferAck(plan.batch_id, rank, len(mapping.device))
                self.pending.append(lambda manager, ack=ack: manager.on_worker(ack))

    def _offload(self, plan: TransferKvBlocks) -> None:
        (mapping,) = plan.target_mappings
        failed_rank = self.random.randrange(self.num_workers) if self.random.random() < self.faults.offload else -1
        state = {"copied": False, "stored": False}
        reached: set[bytes] = set()

        def copy() -> None:
            if not state["copied"]:
                state["copied"] = True
                for device, host in zip(mapping.device.tolist(), mapping.host.tolist(), strict=True):
                    self.host[host] = list(self.device[device])

        def put() -> None:
            if state["stored"] or not plan.put:
                return
            state["stored"] = True
            for host, block_hash in zip(mapping.host.tolist(), hashes_of(mapping.hashes), strict=True):
                if self.random.random() >= self.faults.put:
                    self.store.setdefault(block_hash, list(self.host[host]))
                    reached.add(block_hash)

        def stored(rank: int) -> Callable[[HierarchyBlockManagerPool], None]:
            def answer(manager: HierarchyBlockManagerPool) -> None:
                put()
                manager.on_worker(OffloadStored(plan.transfer_id, rank, len(reached)))

            return answer

        def copied(rank: int) -> Callable[[HierarchyBlockManagerPool], None]:
            def answer(manager: HierarchyBlockManagerPool) -> None:
                copy()
                count = len(mapping.device) - (rank == failed_rank)
                manager.on_worker(OffloadCopied(plan.transfer_id, rank, count))
                self.pending.append(stored(rank))

            return answer

        if self.random.random() < 0.5:
            copy()
        self.pending.extend(copied(rank) for rank in range(self.num_workers))

    def _prefetch(self, plan: PrefetchFromStorage) -> None:
        hashes = hashes_of(plan.hashes)
        exist = [block_hash in self.store for block_hash in hashes]
        read = [there and self.random.random() >= self.faults.unreadable for there in exist]
        late = [there and not good and self.random.random() < 0.5 for there, good in zip(exist, read, strict=True)]

        def fill() -> None:
            for host, block_hash, there, good in zip(plan.host.tolist(), hashes, exist, read, strict=True):
                if there:  # a failed read leaves whatever it likes behind
                    self.host[host] = list(self.store[block_hash]) if good else [POISON] * self.block_size

        def write_late(_manager: HierarchyBlockManagerPool) -> None:
            """What was given up goes on writing after its answer: whoever uses the block by then is spoilt."""
            for host, after in zip(plan.host.tolist(), late, strict=True):
                if after:
                    self.host[host] = [POISON] * self.block_size

        if self.random.random() < 0.5:
            fill()
        bad_rank = self.random.randrange(self.num_workers)
        for rank in range(self.num_workers):
            rows = zip(exist, read, late, strict=True)
            bits = bytes(there if rank != bad_rank else UNKNOWN if after else good for there, good, after in rows)

            def answer(manager: HierarchyBlockManagerPool, rank: int = rank, bits: bytes = bits) -> None:
                fill()
                manager.on_worker(PrefetchAnswer(plan.prefetch_id, plan.offset, rank, bits))
                if rank == bad_rank:
                    self.pending.append(write_late)

            self.pending.append(answer)

    def deliver(self, manager: HierarchyBlockManagerPool, share: float = 1.0) -> None:
        """Hand over each pending answer with probability `share`, in random order."""
        due = [answer for answer in self.pending if self.random.random() < share]
        self.pending = [answer for answer in self.pending if answer not in due]
        self.random.shuffle(due)
        for answer in due:
            answer(manager)

    def forward(self, plan: Forward) -> ForwardOutput:
        """Compute every row, checking the context of each; a context that a failed load spoilt is not checked."""
        self.sent.append(plan)
        for work in self.late:
            work()
        self.late.clear()
        failed = sorted(self.failed_loads)
        self.failed_loads.clear()
        tokens, prompt_logprobs = [], []
        for row in plan.prefill:
            if row.prompt_logprobs is not None:
                following = [*row.token_ids[1:].tolist(), row.next_token]
                prompt_logprobs.append(
                    [TokenLogprob(token, 0.0, 1, [], []) for token in following if token is not None]
                )
            last = self._rows(row.start, row.token_ids.tolist(), row.block_table.tolist(), "P", row.write_from, failed)
            if row.sampling is not None:
                tokens.append(next_token(last))
        for row in plan.decode:
            last = self._rows(row.start, row.token_ids.tolist(), row.block_table.tolist(), "D", 0, failed)
            if row.sampling is not None:
                tokens.append(next_token(last))
        error = "simulated" if self.random.random() < self.faults.forward else None
        return ForwardOutput(
            plan.step_id, 0, ints(tokens), [None] * len(tokens), prompt_logprobs, failed, 0.0, 0.0, error
        )

    def _rows(
        self, start: int, tokens: list[int], table: list[int], path: str, write_from: int, failed: list[int]
    ) -> bytes:
        size = self.block_size
        last = self.device[table[(start - 1) // size]][(start - 1) % size] if start else b""
        assert last != POISON or failed, f"position {start} has a context that nobody wrote"
        for position, token in enumerate(tokens, start):
            last = value(last, token, path)
            if position >= write_from:
                self.device[table[position // size]][position % size] = last
        return last


@dataclass
class Simulation:
    """A scheduler, its books and simulated workers, stepped by hand."""

    num_device: int = 8
    num_host: int = 16
    block_size: int = 4
    num_workers: int = 1
    seed: int = 0
    store: bool = True
    decode_kv_reuse: str = "canonical"
    max_tokens: int = 16
    max_seqs: int = 4
    chunk_tokens: int = 8
    prefetch_batch_size: int = 2
    prefetch_deadline_ms: int = 0
    policy: RestorePolicy | None = None
    audit_rate: int = 0
    enable_prefix_cache: bool = True
    faults: Faults = field(default_factory=Faults)
    journal: CacheJournal | None = None
    share: float = 1.0  # of the pending answers that arrive per step

    def __post_init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.answered: dict[str, list[int]] = {}
        self.count = 0
        self.workers = SimulatedWorkers(
            num_workers=self.num_workers,
            num_device=self.num_device,
            num_host=self.num_host,
            block_size=self.block_size,
            seed=self.seed,
            faults=self.faults,
        )
        self.manager = HierarchyBlockManagerPool(
            self.workers,
            [TypeSizes("KV", 0, self.num_device, self.num_host, 1)],
            BookSettings(
                self.block_size,
                prefix_cache=self.enable_prefix_cache,
                decode_kv_reuse=self.decode_kv_reuse,
                limits=ReadLimits(self.prefetch_batch_size, timeout_ms=0, deadline_ms=self.prefetch_deadline_ms),
            ),
            store_enabled=self.store,
            policy=self.policy,
            journal=self.journal,
        )
        self.scheduler = Scheduler(
            self.manager,
            max_tokens=self.max_tokens,
            max_seqs=self.max_seqs,
            chunk_tokens=self.chunk_tokens,
            auditor=Auditor(self.manager, self.audit_rate),
        )
        self.workers.on_compared = self.scheduler.auditor.on_compared

    def add(self, prompt: list[int], max_tokens: int = 3, **fields: object) -> str:
        request_id = f"r{self.count}"
        self.count += 1
        self.scheduler.add_request(
            AddRequest(request_id, ints(prompt), SamplingSpec(), max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]
        )
        return request_id

    def step(self) -> None:
        """One turn of the engine's loop, books checked after it."""
        self.workers.deliver(self.manager, self.share)
        self.scheduler.poll_prefetches()
        step = self.scheduler.schedule()
        if step is not None:
            output = self.workers.forward(step.plan)
            if output.error is None:
                self.scheduler.finish(step, output)
            else:
                self.scheduler.fail_step(step, output.error)
        self.manager.transfer_offload_blocks()
        for output in self.scheduler.take_outputs():
            self.outputs.setdefault(output.request_id, []).append(output)
            self.answered.setdefault(output.request_id, []).extend(output.token_ids)
        self.manager.check()

    def run(self, limit: int = 2000) -> None:
        """Until nothing is open or under way."""
        for _ in range(limit):
            waits = self.scheduler.sequences or self.scheduler.canonical or self.scheduler.auditor.has_work
            if not waits and not self.manager.busy and not self.scheduler.auditor.comparing:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def ask(self, prompt: list[int], max_tokens: int = 3, **fields: object) -> list[int]:
        """Answer of one request run to the end."""
        request_id = self.add(prompt, max_tokens, **fields)
        self.run()
        return self.answered[request_id]

    def usage(self, request_id: str) -> tuple[int, int, int, int]:
        found = next(output.usage for output in self.outputs[request_id] if output.usage is not None)
        return found.device, found.host, found.store, found.computed
