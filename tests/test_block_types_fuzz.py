"""Random traffic over models with blocks of several types: a real engine and a real worker, in one process.

Small pools of each type, device memory that is NaN until somebody writes it, aborts, restarts, tiers that are emptied
and a store that loses blocks of one type: every answer has the bits of the same request alone with no cache at all,
every object in the store is a function of its key, and when all is quiet nothing is held.
"""

from __future__ import annotations

import ctypes
import queue
import random
from collections.abc import Iterator
from collections.abc import Sequence as Types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, make

from xllm_hier.calls import Call, ClearCache, WorkerCall
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.core import EngineCore
from xllm_hier.figures import WorkerReady
from xllm_hier.ints import ints
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.plans import PrefetchFromStorage, ProbeStorage
from xllm_hier.request_messages import AbortRequest, AddRequest, PromptUsage, SamplingSpec, StepOutputs
from xllm_hier.wire import pack, unpack
from xllm_hier.worker.worker import Worker

MOST_TURNS = 5000
POISON = 0xFF  # NaN in every float type


class Objects:
    """The store's client: objects of all instances of a test; a share of what is put of some types is lost."""

    through_node = False
    connected = True

    def __init__(self, lost: dict[str, float] | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.lost = lost or {}
        self.dice = random.Random(0)

    def connect(self, _pool_bytes: int) -> None:
        pass

    def register(self, _address: int, _nbytes: int) -> None:
        pass

    def reachable(self) -> bool:
        return True

    def exist(self, keys: Types[str]) -> list[bool]:
        return [key in self.objects for key in keys]

    def get(self, keys: Types[str], addresses: Types[int], sizes: Types[int]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            ctypes.memmove(address, self.objects[key], size)
        return list(sizes)

    def put(self, keys: Types[str], addresses: Types[int], sizes: Types[int], _groups: Types[str]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            share = next((share for kind, share in self.lost.items() if f":{kind}:" in key), 0.0)
            if self.dice.random() >= share:
                self.objects[key] = ctypes.string_at(address, size)
        return [0] * len(keys)

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)

    def close(self) -> bool:
        return True

    @property
    def blocks(self) -> dict[str, bytes]:
        """The objects that are blocks."""
        kinds = (":KV:", ":SWA:", ":LINEAR:")
        return {key: raw for key, raw in self.objects.items() if any(kind in key for kind in kinds)}


class Mailbox:
    """A channel within one process; messages travel as bytes, as they do between processes. What is sent goes to
    `other`, None: comes back."""

    def __init__(self, other: Mailbox | None = None) -> None:
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._other = other or self

    def send(self, message: Any) -> bool:
        self._other.put(message)
        return True

    def put(self, message: Any) -> None:
        self._messages.put(pack(message))

    def receive(self, timeout_s: float) -> Any | None:
        try:
            return unpack(self._messages.get(timeout=timeout_s) if timeout_s else self._messages.get_nowait())
        except queue.Empty:
            return None

    def peer_gone(self) -> bool:
        return False

    def take_all(self) -> list[Any]:
        return list(iter(lambda: self.receive(0), None))


class OneWorker:
    """In place of RemoteWorkers: plans become calls of the worker's methods, in order."""

    num_workers = 1

    def __init__(self, worker: Worker, answers: Mailbox) -> None:
        self._worker, self._answers = worker, answers

    def broadcast(self, message: Any) -> None:
        message = unpack(pack(message))
        if isinstance(message, PrefetchFromStorage):
            self._worker.transfer.prefetch(message)
        elif isinstance(message, ProbeStorage):
            self._worker.transfer.probe(message)
        elif isinstance(message, WorkerCall):
            self._worker._on_call(message)
        else:
            self._worker._execute(message)

    def receive(self, timeout_s: float, also: Mailbox | None = None) -> list[Any]:
        first = self._answers.receive(min(timeout_s, 0.001))
        return [] if first is None else [first, *self._answers.take_all()]

    def take_states(self) -> list[Any]:
        return []

    def check_alive(self) -> None:
        pass

    def forgive(self) -> None:
        pass


@dataclass
class Said:
    """What came back for one request: tokens with their log probabilities, usage, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: PromptUsage | None = None
    finish: str | None = None

    def take(self, output: Any) -> None:
        self.tokens += output.token_ids
        self.logprobs += [entry.logprob for entry in output.logprobs or [] if entry is not None]
        self.usage = output.usage or self.usage
        self.finish = output.finish_reason or self.finish

    @property
    def bits(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens, self.logprobs, strict=True))


class Instance:
    """An engine and its worker, driven turn by turn."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        common = {"num_threads": 1, "copy_backend": "torch", "restore_policy": "always", "block_size": 16}
        config = EngineConfig(model=str(folder), check_invariants=True, **{**common, **settings})
        answers, self._outputs = Mailbox(), Mailbox()
        self._engine = Mailbox(self._outputs)
        self.worker = Worker(config, TensorParallel(), Mailbox(), answers, folder)  # type: ignore[arg-type]
        self.worker.stop()
        self.worker.run()  # says what it brings, and ends
        ready = [message for message in answers.take_all() if isinstance(message, WorkerReady)]
        workers = OneWorker(self.worker, answers)
        self.core = EngineCore(config, self._engine, workers, ready)  # type: ignore[arg-type]
        self.said: dict[str, Said] = {}
        self._poison_free()

    def _poison_free(self) -> None:
        for domain in self.worker.transfer.domains.values():
            for kind, cache in domain.caches.items():
                pools = self.core.manager.pools[kind]
                free = torch.tensor(list(pools.device._free), dtype=torch.int64)
                for layer in cache.device:
                    layer.index_fill_(0, free, POISON)

    def add(self, name: str, tokens: Types[int], max_tokens: int, **more: Any) -> None:
        self.said[name] = Said()
        sampling = SamplingSpec(num_logprobs=0)
        self._engine.put(AddRequest(name, ints(tokens), sampling, max_tokens, **more))

    def abort(self, name: str) -> None:
        self._engine.put(AbortRequest(name))

    def clear(self, *tiers: str) -> None:
        self._engine.put(Call(1, ClearCache(list(tiers))))

    def turn(self) -> None:
        self.core.turn()
        self._poison_free()
        for message in self._outputs.take_all():
            for output in message.outputs if isinstance(message, StepOutputs) else []:
                self.said[output.request_id].take(output)

    @property
    def _busy(self) -> bool:
        core, scheduler = self.core, self.core.scheduler
        waits = [*scheduler.sequences, *scheduler.canonical, *core.calls.clears, *core.calls.questions]
        auditing = scheduler.auditor.has_work or scheduler.auditor.comparing
        return bool(waits or auditing or core.manager.busy or any(said.finish is None for said in self.said.values()))

    def run(self) -> None:
        """Turn until all is quiet; then nothing is held, and the books balance."""
        for _ in range(MOST_TURNS):
            if not self._busy:
                break
            self.turn()
        assert not self._busy, "still busy"
        self.core.manager.check()
        counts = self.core.manager.block_counts()
        assert not any(states["pinned"] for tier in counts.values() for states in tier.values()), counts

    def ask(self, tokens: Types[int], max_tokens: int, **more: Any) -> Said:
        name = f"asked {len(self.said)}"
        self.add(name, tokens, max_tokens, **more)
        self.run()
        return self.said[name]

    def close(self) -> None:
        assert self.worker.transfer.close()


@dataclass(frozen=True)
class Setup:
    """A tiny model and how it is served; `small` bytes are blocks for about two prompts."""

    family: str
    small: int
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    draft: bool = False
    lost: dict[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


NGRAM = {"num_speculative_tokens": 3, "speculative_algorithm": "ngram"}
FEW_STATES = {"linear_checkpoints_factor": 0.0}
MANY_STATES = {"linear_checkpoint_stride": 16, "prefetch_batch_size": 1}
SETUPS = {
    "window beyond a block": Setup("gemma3", 140_000, {"sliding_window": 33}, {"audit_rate": 1}, lost={"SWA": 0.3}),
    "window within a block": Setup("gemma3", 60_000, {"sliding_window": 7}, NGRAM, dtype=torch.bfloat16),
    "windows with a draft model": Setup("gemma3", 270_000, {"sliding_window": 16}, {}, True),
    "windows alone": Setup("mistral", 68_000, {}, {"decode_kv_reuse": "off"}),
    "states": Setup("qwen3_next", 280_000, {}, {"audit_rate": 2, **FEW_STATES}, lost={"LINEAR": 0.3}),
    "states with drafts": Setup("qwen3_next", 450_000, {}, {**NGRAM, **MANY_STATES}, lost={"KV": 0.1}),
}


class Store:
    """Makes instances over one store, and closes those that are still open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = Objects()
        monkeypatch.setattr("xllm_hier.worker.store.kv_cache_store.MooncakeClient", lambda *_: self.client)
        self._instances: list[Instance] = []

    def start(self, folder: Path, **settings: Any) -> Instance:
        """An instance with all three tiers, unless the settings say otherwise."""
        tiers = {"host_blocks_factor": 1.5, "enable_kvcache_store": True, "store_master_server_address": "localhost:1"}
        self._instances.append(Instance(folder, **{**tiers, **settings}))
        return self._instances[-1]

    def close(self) -> None:
        for instance in self._instances:
            instance.close()
        self._instances.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store(monkeypatch)
    yield made
    made.close()


OFF = {"enable_prefix_cache": False, "enable_kvcache_store": False, "max_cache_size": 8 << 20}


class Traffic:
    """Requests that share prefixes, and what each one's answer is without any cache."""

    def __init__(self, dice: random.Random, plain: Instance) -> None:
        self._dice, self._plain = dice, plain
        self._trunks = [self._random(150) for _ in range(3)]
        self._heard: list[list[int]] = []
        self._expected: dict[tuple[tuple[int, ...], int], Said] = {}

    def _random(self, count: int) -> list[int]:
        return [self._dice.randrange(3, VOCAB) for _ in range(count)]

    def next(self) -> tuple[list[int], int]:
        """A prompt and how many tokens to generate: a piece of a trunk, or an earlier conversation's next turn."""
        dice = self._dice
        if self._heard and dice.random() < 0.3:
            prompt = dice.choice(self._heard)
        else:
            prompt = dice.choice(self._trunks)[: dice.choice([dice.randrange(1, 140), 16 * dice.randrange(1, 9)])]
        return prompt[:150] + self._random(dice.choice([0, 1, 5, 16, 32])), dice.choice([1, 5, 20])

    def _alone(self, prompt: list[int], max_tokens: int) -> Said:
        key = tuple(prompt), max_tokens
        if key not in self._expected:
            self._expected[key] = self._plain.ask(prompt, max_tokens)
        return self._expected[key]

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Drafts, of which most are right."""
        request, start = sequence.request, sequence.num_generated
        right = self._alone(request.token_ids.tolist(), request.max_tokens).tokens[start : start + max(0, most)]
        return [token if self._dice.random() < 0.8 else 3 for token in right]

    def check(self, prompt: list[int], max_tokens: int, said: Said) -> None:
        """The answer, or as much as there is of it, is that of the request alone without a cache."""
        expected = self._alone(prompt, max_tokens).bits
        assert said.finish in ("length", "stop", "abort")
        assert said.bits == (expected[: len(said.bits)] if said.finish == "abort" else expected), said.usage
        if said.usage is not None:
            usage = said.usage
            assert usage.device + usage.host + usage.store + usage.computed == len(prompt)
        if said.finish != "abort":
            self._heard.append(prompt + said.tokens)


def play(instance: Instance, wanted: dict[str, tuple[list[int], int]], dice: random.Random) -> None:
    """Let requests come, a few go away or lose their place, and tiers be emptied while they run."""
    coming, emptied = list(wanted), dice.random() < 0.5
    while coming:
        if dice.random() < 0.5:
            name = coming.pop(0)
            instance.add(name, *wanted[name], cache_salt=dice.choice(["", "", "", "salt"]))
        if dice.random() < 0.04 and instance.said:
            instance.abort(dice.choice(list(instance.said)))
        if dice.random() < 0.15 and instance.core.scheduler.running:
            instance.core.scheduler.preempt(dice.choice(instance.core.scheduler.running))
        if emptied and dice.random() < 0.1:
            instance.clear(*dice.choice([["device"], ["host"], ["device", "host"]]))
        instance.turn()
    instance.run()


@pytest.mark.parametrize("name", SETUPS)
def test_random_traffic_gets_the_bits_of_each_request_alone_without_a_cache(
    name: str, store: Store, tmp_path: Path
) -> None:
    setup, dice = SETUPS[name], random.Random(name)
    folder = make(tmp_path / setup.family, setup.family, setup.dtype, **setup.changes)
    settings = {"max_tokens_per_batch": 100, "max_seqs_per_batch": 4, "max_cache_size": setup.small}
    settings |= {"swa_checkpoint_stride": 64, "linear_checkpoint_stride": 64, **setup.settings}
    if setup.draft:
        draft = make(tmp_path / "draft", setup.family, setup.dtype, seed=1)
        settings |= {"num_speculative_tokens": 2, "speculative_algorithm": "draft_model", "draft_model": str(draft)}
    traffic = Traffic(dice, store.start(folder, **OFF))
    store.client.lost = setup.lost
    paid, preemptions, written = {"device": 0, "host": 0, "store": 0}, 0, dict[str, bytes]()
    for life in range(2):
        instance = store.start(folder, **settings)
        if settings.get("speculative_algorithm") == "ngram":
            instance.core.scheduler.drafter.propose = traffic.guess
        for wave in range(2):
            wanted = {f"{life} {wave} {number}": traffic.next() for number in range(8)}
            play(instance, wanted, dice)
            for request, (prompt, max_tokens) in wanted.items():
                traffic.check(prompt, max_tokens, instance.said[request])
        usages = [said.usage for said in instance.said.values()]
        paid = {tier: count + sum(getattr(usage, tier, 0) for usage in usages) for tier, count in paid.items()}
        preemptions += instance.core.scheduler.num_preemptions
        accepted = sum(instance.core.scheduler.drafts.accepted.values())
        assert accepted or settings.get("speculative_algorithm") != "ngram"
        audits = instance.core.scheduler.auditor.results
        assert not audits["different"] and not audits["rounding"]
        blocks = store.client.blocks
        assert all(blocks.get(key, raw) == raw for key, raw in written.items()), "one key, two contents"
        assert not any(bytes([POISON]) * 16 in raw for raw in blocks.values()), "unwritten memory was published"
        written |= blocks
    assert all(paid.values()) and preemptions, (paid, preemptions)
