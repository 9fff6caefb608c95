"""One engine with its ranks and clients on a fake clock: run by script, or turn by turn.

The engine is the real one down to its heartbeats; only its channels end in the simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from xllm_hier.block import BlockType
from xllm_hier.calls import Call, CallResult, Drain, Question
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.pool import BlockPool, BlockState
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.core import EngineCore
from xllm_hier.engine.remote_worker import RemoteWorkers
from xllm_hier.errors import EngineDeadError
from xllm_hier.figures import TypeSizes, WorkerReady
from xllm_hier.ints import ints
from xllm_hier.request_messages import AbortRequest, AddRequest, PromptUsage, RequestOutput, SamplingSpec, StepOutputs

from . import invariants
from .contents import DRAFT, POISON, Contents, Part
from .domains import Object
from .oracle import HitOracle
from .ranks import BLOCK_BYTES, Model, Rank, Ranks
from .rows import Origin, Row
from .timeline import Line, Timeline

QUARANTINE_S = 20.0
PATIENCE_S = 400.0  # simulated, after a script's last event: every wait has ended by then
MOST_TURNS = 20_000


@dataclass(frozen=True)
class Settings:
    """Sizes and settings of one world; `pace` multiplies what transfers take, `tick_s` passes with each look at the
    clock, `limit_s` is the engine's patience with its workers. `draft`: "model" or "head" when drafts come from one
    that has caches of its own.

    `types` names the model's BlockTypes; `num_device` and `num_host` are of the first, `num_swa` ... of the others.
    A stride of 0 is none. `longest`: tokens that a sequence may have, 0 = what the device has KV blocks for."""

    num_ranks: int = 1
    replicated: bool = False
    num_device: int = 8
    num_host: int = 16
    block_size: int = 4
    types: str = "KV"
    window: int = 6
    num_swa: tuple[int, int] = (8, 16)  # on device and host
    num_linear: tuple[int, int] = (8, 16)
    swa_stride: int = 0
    linear_stride: int = 0
    scan: int = 1
    longest: int = 0
    store: bool = True
    prefix_cache: bool = True
    decode_kv_reuse: str = "canonical"
    max_tokens: int = 16
    max_seqs: int = 4
    chunk_tokens: int = 8
    batch_size: int = 2
    timeout_ms: int = 0
    deadline_ms: int = 0
    policy: str = "always"
    audit_rate: int = 0
    num_drafts: int = 0
    draft: str = ""
    tile: int = 256  # tokens that a step recomputes of a finished sequence, or of an audited prefix
    limit_s: float = 8.0
    max_open: int = 1024
    pace: float = 1.0
    tick_s: float = 0.0
    seed: int = 0

    @property
    def kinds(self) -> tuple[BlockType, ...]:
        return tuple(BlockType(name) for name in self.types.split())

    @property
    def most_tokens(self) -> int:
        """Of one sequence."""
        return self.longest or self.num_device * self.block_size

    def swa_need(self, chunk_tokens: int = 0) -> int:
        """SWA blocks of one sequence in one step: its window, a chunk, drafts, and what lies across their edges."""
        tokens = self.window + (chunk_tokens or min(self.chunk_tokens, self.max_tokens)) + self.num_drafts + 1
        return -(-tokens // self.block_size) + 2

    def model(self) -> Model:
        spans = {BlockType.KV: 0, BlockType.SWA: self.window, BlockType.LINEAR: 1}
        counts = {BlockType.SWA: self.num_swa, BlockType.LINEAR: self.num_linear}
        counts[self.kinds[0]] = self.num_device, self.num_host
        sizes = [TypeSizes(kind.value, spans[kind], *counts[kind], BLOCK_BYTES) for kind in self.kinds]
        strides = {"SWA": self.swa_stride, "LINEAR": self.linear_stride}
        strides = {kind: stride for kind, stride in strides.items() if stride and BlockType(kind) in self.kinds}
        return Model(tuple(sizes), strides, self.scan, self.longest or 10**6)

    def contents(self) -> Contents:
        return Contents(
            self.block_size,
            self.num_ranks,
            replicated=self.replicated,
            decode_path="P" if self.decode_kv_reuse == "as_is" else "D",
            draft=self.draft,
            types=self.kinds,
        )

    def config(self) -> EngineConfig:
        return EngineConfig(
            model="tiny",
            tp_size=self.num_ranks,
            enable_prefix_cache=self.prefix_cache,
            enable_kvcache_store=self.store,
            host_blocks_factor=2.0,
            decode_kv_reuse=self.decode_kv_reuse,
            prefetch_batch_size=self.batch_size,
            prefetch_timeout=self.timeout_ms,
            prefetch_deadline_ms=self.deadline_ms,
            restore_policy=self.policy,
            audit_rate=self.audit_rate,
            num_speculative_tokens=self.num_drafts,
            speculative_algorithm="ngram",
            max_tokens_per_batch=self.max_tokens,
            max_seqs_per_batch=self.max_seqs,
            max_tokens_per_chunk_for_prefill=self.chunk_tokens,
            worker_timeout_s=self.limit_s,
            max_waiting_requests=self.max_open,
        )


@dataclass(eq=False)
class Asked:
    """A request as its client sees it."""

    prompt: list[int]
    answer: list[int]
    fits: bool
    salt: str = ""
    wants_logprobs: bool = False
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    usage: PromptUsage | None = None
    end: RequestOutput | None = None

    @property
    def status(self) -> int:
        """HTTP status of its end; 200 for an answer, 0 while it is open."""
        if self.end is None:
            return 0
        return self.end.error_status if self.end.error is not None else 200


class World:
    """`turn` lets the engine go round its loop once and checks all that has to hold then."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        timeline: Timeline | None = None,
        contents: Contents | None = None,
        name: str = "",
        sessions: dict[str, Rank] | None = None,
        **changes: Any,
    ) -> None:
        """The last four are given where several instances share them; see `Ranks`."""
        self.settings = one = settings or Settings(**changes)
        self.timeline = timeline or Timeline(one.tick_s)
        self.contents = contents or one.contents()
        self.ranks = Ranks(
            self.timeline,
            self.contents,
            num_ranks=one.num_ranks,
            model=one.model(),
            store=one.store,
            pace=one.pace,
            seed=one.seed,
            origin_of=self._origin_of,
            is_published=lambda kind, block: self.manager.pools[kind].device._state[block] is BlockState.READY,
            name=name,
            sessions=sessions,
        )
        self.asked: dict[str, Asked] = {}
        self.answered_calls: dict[int, CallResult] = {}
        self.num_calls = 0
        self.num_events_left = 0  # of the script that is being run
        self.draining = False
        self.dead: EngineDeadError | None = None
        self.api = Line(self._on_output)
        with self.installed():
            self.workers = RemoteWorkers(None, "", one.num_ranks, one.limit_s)  # type: ignore[arg-type]
            for rank in self.ranks.ranks:
                rank.announce()
            ready = self.workers.wait_ready(1.0)
            self.core = self._new_core(ready)
        self.manager, self.scheduler = self.core.manager, self.core.scheduler
        if not one.draft:
            self.scheduler.drafter.propose = self._drafts
        self.found: dict[str, set[bytes]] = {"device": set(), "host": set()}  # KV blocks, after the last turn
        self.withdrawn: set[bytes] = set()  # since then, on purpose
        self.published: set[bytes] = set()  # since then; perhaps once more, after an eviction
        for pool in self.manager.pools[BlockType.KV].tiers.values() if BlockType.KV in self.manager.pools else ():
            self._watch_index(pool)
        self.oracle = HitOracle(self.manager, one.window)
        self.preempted: list[Sequence] = []  # in this turn
        self._watch_preemptions()
        if one.draft:
            self._watch_canonical()

    def _new_core(self, ready: list[WorkerReady]) -> EngineCore:
        return EngineCore(self.settings.config(), self.api, self.workers, ready)  # type: ignore[arg-type]

    def elsewhere(self) -> list[Sequence]:
        """Sequences that stand in no queue, and may hold blocks."""
        return []

    def not_begun(self) -> list[Sequence]:
        """Those of them that the scheduler does not know yet, or no more."""
        return []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the engine runs, time and channels are those of this world."""
        logger = logging.getLogger("xllm.engine")
        level, logger.level = logger.level, logging.CRITICAL
        try:
            with (
                mock.patch("time.monotonic", self.timeline.monotonic),
                mock.patch("xllm_hier.engine.remote_worker.Channel", self._channel),
                mock.patch("xllm_hier.engine.remote_worker.wait_readable", self.timeline.wait),
                mock.patch("xllm_hier.engine.blocks.read_targets.QUARANTINE_S", QUARANTINE_S),
                mock.patch("xllm_hier.engine.blocks.policy.MIN_PROMPT_TOKENS", 4),  # prompts are short here,
                mock.patch("xllm_hier.engine.blocks.policy.STALE_S", 0.3),  # and so are scripts
                mock.patch("xllm_hier.engine.steps.canonical.CANONICAL_CHUNK", self.settings.tile),
                mock.patch("xllm_hier.engine.steps.audit.TILE", self.settings.tile),
            ):
                yield
        finally:
            logger.level = level

    def _drafts(self, sequence: Sequence, most: int) -> list[int]:
        """What will come, now and then with a token that will not: any mix of right and wrong drafts."""
        request = sequence.request
        tokens = self.ranks.contents.answer(request.token_ids.tolist(), request.max_tokens, request.cache_salt or "")
        done = sequence.num_generated
        drafts = tokens[done : done + most]
        wrong = (done * 7 + len(tokens)) % 5
        return [token + 1 if place == wrong else token for place, token in enumerate(drafts)]

    def _channel(self, _context: object, address: str, *, bind: bool) -> Line:
        assert bind
        rank, _, direction = address.rpartition("-")[2].partition(".")
        one = self.ranks.ranks[int(rank)]
        return one.plans if direction == "plan" else one.answers

    def _watch_index(self, pool: BlockPool) -> None:
        withdraw, publish = pool.withdraw, pool.publish

        def watched_withdraw(block: int) -> None:
            self.withdrawn.add(pool._hash[block])
            withdraw(block)

        def watched_publish(block: int, block_hash: bytes, parent_hash: bytes) -> bool:
            found = publish(block, block_hash, parent_hash)
            if found:
                self.published.add(block_hash)
            return found

        pool.withdraw, pool.publish = watched_withdraw, watched_publish  # type: ignore[method-assign]

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler.preempt

        def watched(sequence: Sequence) -> None:
            assert sequence.order == max(other.order for other in self.scheduler.running), "not the last in order"
            assert not self.scheduler.canonical, "blocks that are only recomputed would have to go first"
            self.preempted.append(sequence)
            preempt(sequence)

        self.scheduler.preempt = watched  # type: ignore[method-assign]

    def _watch_canonical(self) -> None:
        """Decoded blocks are to be computed once more by the draft too: what it left there must not be relied on."""
        begin, size = self.manager.begin_canonical, self.settings.block_size

        def watched(sequence: Sequence) -> bool:
            begun = begin(sequence)
            for rank in self.ranks.ranks if begun else ():
                for block in sequence.device_blocks[sequence.num_published : sequence.canonical_end // size]:
                    rank.domains[Part(DRAFT, BlockType.KV)].device[block] = [POISON] * size
            return begun

        self.manager.begin_canonical = watched  # type: ignore[method-assign]

    def _origin_of(self, row: Row) -> Origin:
        for sequence in (*self.scheduler.running, *self.scheduler.canonical):
            if sequence.device_blocks == (row.table or row.window):
                end = sequence.canonical_end or sequence.prompt_length
                return Origin(sequence.request.cache_salt, sequence.tokens, end)
        audit = self.scheduler.auditor.audit
        if audit is not None and audit.again.device_blocks == row.table:
            return Origin(self.salt_of(audit.request_id), audit.again.tokens, audit.again.prompt_length)
        raise AssertionError(f"no sequence has the blocks {row.table or row.window}")

    def salt_of(self, request_id: str) -> str:
        return self.asked[request_id].salt

    # ----------------------------------------------------------------------------------------------- clients

    def add(
        self,
        name: str,
        prompt: Iterable[int],
        max_tokens: int = 3,
        *,
        salt: str = "",
        priority: int = 0,
        prompt_logprobs: int | None = None,
        stop: Iterable[int] = (),
    ) -> Asked:
        """Send a request; its answer is compared with what a run without any cache says."""
        prompt, stop = list(prompt), list(stop)
        answer = self.contents.answer(prompt, max_tokens, salt)
        for index, token in enumerate(answer):
            if token in stop:
                del answer[index + 1 :]
                break
        fits = len(prompt) + max_tokens <= self.settings.most_tokens
        self.asked[name] = Asked(prompt, answer, fits, salt, prompt_logprobs is not None)
        request = AddRequest(
            name,
            ints(prompt),
            SamplingSpec(),
            max_tokens,
            stop_token_ids=stop,
            prompt_logprobs=prompt_logprobs,
            cache_salt=salt,
            priority=priority,
        )
        self.api.inbox.append(request)
        return self.asked[name]

    def abort(self, name: str) -> None:
        if name in self.asked:
            self.asked[name].aborted = True
            self.api.inbox.append(AbortRequest(name))

    def call(self, question: Question[Any]) -> int:
        self.num_calls += 1
        self.draining = self.draining or isinstance(question, Drain)
        self.api.inbox.append(Call(self.num_calls, question))
        return self.num_calls

    def _on_output(self, message: Any) -> None:
        if isinstance(message, CallResult):
            assert message.call_id not in self.answered_calls, f"call {message.call_id} is answered twice"
            self.answered_calls[message.call_id] = message
            return
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        name, asked = output.request_id, self.asked[output.request_id]
        assert asked.end is None, f"{name} goes on after its end"
        asked.tokens.extend(output.token_ids)
        assert asked.tokens == asked.answer[: len(asked.tokens)], f"{name}: {asked.tokens} instead of {asked.answer}"
        if asked.wants_logprobs and output.token_ids and len(asked.tokens) == 1:
            logprobs = output.prompt_logprobs or []
            assert [one and one.token_id for one in logprobs] == [None, *asked.prompt[1:]], f"{name}: {logprobs}"
        asked.usage = asked.usage or output.usage
        if asked.usage is not None:
            one = asked.usage
            assert min(one.device, one.host, one.store) >= 0, f"{name}: {one}"
            assert one.device + one.host + one.store + one.computed == len(asked.prompt), f"{name}: {one}"
        assert not asked.tokens or asked.usage is not None, f"{name} has an answer and no usage"
        if output.finish_reason is not None:
            asked.end = output
            self._judge_end(name, asked, output)

    def _judge_end(self, name: str, asked: Asked, output: RequestOutput) -> None:
        """Is this an end that such a request may have?"""
        if output.error is not None:
            allowed = self._allowed_errors(asked)
            assert allowed[output.error_status], f"{name} ends with {output.error_status}: {output.error}"
        elif output.finish_reason == "abort":
            assert asked.aborted, f"{name} was not aborted"
        else:
            assert asked.tokens == asked.answer, f"{name} ends after {asked.tokens} of {asked.answer}"

    def _allowed_errors(self, asked: Asked) -> dict[int, bool]:
        """By HTTP status."""
        return {
            500: bool(self.ranks.num_failed_forwards),
            503: bool(self.ranks.doom) or self.draining,
            429: self.settings.max_open < len(self.asked),
            400: not asked.fits,
        }

    # ----------------------------------------------------------------------------------------------- time

    def turn(self) -> None:
        """Once round the engine's loop."""
        with self.installed():
            self._turn()

    def _turn(self) -> None:
        try:
            self.core.turn()
        except EngineDeadError as error:
            assert self.ranks.doom, f"the instance ends without need: {error}"
            self.dead = error
            self.core.answer_all_open(error)
            return
        invariants.check_after_turn(self)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Turn until `until` holds, else until all is over and nothing is held: no wait may be for ever."""
        done = until or self.is_at_rest
        self.timeline.latest = self.timeline.now + PATIENCE_S
        with self.installed():
            for _ in range(MOST_TURNS):
                if self.dead or done():
                    break
                assert self.timeline.now < self.timeline.latest, f"for ever: {invariants.what_is_left(self)}"
                self._turn()
            else:
                raise AssertionError(f"the engine turns without end: {invariants.what_is_left(self)}")
        self.timeline.latest = float("inf")
        if until is None:
            invariants.check_at_the_end(self)

    def is_at_rest(self) -> bool:
        """Nobody waits for anything and nothing is under way."""
        return not invariants.what_is_left(self)

    def ask(self, prompt: Iterable[int], max_tokens: int = 3, **fields: Any) -> Asked:
        """One request, run until all is at rest."""
        asked = self.add(f"q{len(self.asked)}", prompt, max_tokens, **fields)
        self.run()
        return asked

    # ----------------------------------------------------------------------------------------------- looks

    def sequence(self, name: str) -> Sequence:
        """The engine's view of a request, canonical ones included."""
        open_ones = [*self.scheduler.sequences.values(), *self.scheduler.canonical]
        return next(sequence for sequence in open_ones if sequence.request.request_id == name)

    def sent(self, kind: type) -> list[Any]:
        """What rank 0 was sent of this kind."""
        return [message for message in self.ranks.sent if isinstance(message, kind)]

    def forget(self, *tiers: str) -> None:
        """Empty tiers of what can be found in them; blocks in use stay."""
        for tier in tiers:
            if tier != "store":
                self.manager.clear(tier)
            else:
                self.ranks.clear_stores()

    def spoil_host(self, rank: int, number: int) -> None:
        """Change a READY host block, payload and trailer, as a write does that comes long after its time."""
        part = self.contents.parts[number % len(self.contents.parts)]
        pool, keeper = self.manager.pools[part.type].host, self.ranks.keeper(rank, part)
        blocks = [block for block in sorted(pool.contents().values()) if block not in keeper.host_claims.busy()]
        if blocks:
            block = blocks[number % len(blocks)]
            keeper.host[block] = Object(keeper.garbage, b"another")
            keeper.spoilt.add(block)

    def spoil_store(self, number: int, how: str) -> None:
        """`lost`: one object of one rank is gone. `bytes`: its payload changed. `other`: it is another key's object."""
        objects = self.ranks.objects()
        if not objects:
            return
        store, name = objects[number % len(objects)]
        others = [held for held in store.values() if held.name != name]
        if how == "lost":
            del store[name]
        elif how == "bytes":
            store[name] = Object((b"garbage",) * len(store[name].values), name, sound=False)
        elif others:
            store[name] = others[number % len(others)]
