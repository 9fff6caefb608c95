"""The main promise, on real processes and a real store: a hit in any tier changes nothing but the time.

Log probabilities are compared as well as tokens: they are equal only if the logits are, bit for bit.
"""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from serving import Answer, Server, running_store, store_flags
from tiny_models import LATENT_SHAPE, VOCAB, make

BLOCK = 16
LATENT_WIDTH = LATENT_SHAPE["kv_lora_rank"] + LATENT_SHAPE["qk_rope_head_dim"]
COMMON = ["--max_cache_size=8MB", "--max_tokens_per_batch=512", "--check_invariants"]


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


@dataclass(frozen=True)
class Setup:
    """A tiny model and the ranks it runs on; `values_per_token` is what one rank caches of a token in one layer."""

    family: str
    dtype: torch.dtype
    tp_size: int
    values_per_token: int
    changes: dict[str, int] = field(default_factory=dict)


# Keys and values, once, split, and with KV heads that serve two ranks each; one latent for all ranks, with experts.
SETUPS = {
    "llama-bf16": Setup("llama", torch.bfloat16, 1, 2 * 2 * 12),
    "llama-fp32-tp2": Setup("llama", torch.float32, 2, 2 * 12),
    "deepseek_v2-fp32": Setup("deepseek_v2", torch.float32, 1, LATENT_WIDTH),
    "deepseek_v3-bf16-tp2": Setup("deepseek_v3", torch.bfloat16, 2, LATENT_WIDTH),
    "qwen3-bf16-tp4": Setup("qwen3", torch.bfloat16, 4, 2 * 20, {"num_attention_heads": 8}),
}
# Those that start instances of their own leave out the four ranks, which take long to start on few cores.
starts_instances = pytest.mark.parametrize("model", [name for name in SETUPS if "tp4" not in name], indirect=True)


@dataclass(frozen=True)
class Model:
    """What a server is started with."""

    setup: Setup
    folder: Path

    def serve(self, *flags: str) -> Server:
        return Server(self.folder, f"--tp_size={self.setup.tp_size}", f"--block_size={BLOCK}", *flags)

    def cache_flag(self, num_blocks: int) -> str:
        block_bytes = 2 * BLOCK * self.setup.values_per_token * self.setup.dtype.itemsize
        return f"--max_cache_size={num_blocks * block_bytes}"


@pytest.fixture(scope="module", params=SETUPS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    setup = SETUPS[request.param]
    folder = tmp_path_factory.mktemp("model") / request.param
    return Model(setup, make(folder, setup.family, setup.dtype, **setup.changes))


@pytest.fixture(scope="module")
def plain(model: Model) -> Iterator[Server]:
    """The hierarchy switched off: what every other answer must equal."""
    with model.serve(*COMMON, "--enable_prefix_cache=false") as server:
        yield server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with running_store(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def tiered(model: Model, store: object) -> Iterator[Server]:
    with model.serve(*COMMON, *store_flags(store)) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> None:
    if "tiered" in request.fixturenames:
        tiered: Server = request.getfixturevalue("tiered")
        tiered.wait_quiet()
        tiered.clear("device", "host", "store")


def test_the_same_tokens_and_bits_off_cold_and_from_each_tier(plain: Server, tiered: Server) -> None:
    prompt = prompt_of(1, 100)
    expected = plain.ask(prompt)
    cold = tiered.ask(prompt)
    device = tiered.ask(prompt)
    tiered.clear("device")
    host = tiered.ask(prompt)
    tiered.clear("device", "host")
    store = tiered.ask(prompt)
    answers = [cold, device, host, store]
    assert [answer.bits for answer in answers] == [expected.bits] * 4
    assert [answer.cached for answer in answers] == [(0, 0, 0), (96, 0, 0), (0, 96, 0), (0, 0, 96)]


@pytest.mark.parametrize("length", [16, 17, 47, 48, 64])
def test_partial_hits_at_every_block_boundary_and_full_hits(plain: Server, tiered: Server, length: int) -> None:
    prompt = prompt_of(2, length)
    expected = plain.ask(prompt).bits
    for boundary in range(0, length + 1, BLOCK):
        for forget in ((), ("device",), ("device", "host")):
            tiered.clear("device", "host", "store")
            if boundary:
                tiered.ask(prompt[:boundary] + prompt_of(99, 1), 1)
                tiered.wait_quiet()
            tiered.clear(*forget)
            got = tiered.ask(prompt)
            assert got.bits == expected, (boundary, forget)
            tier = (0, 1, 2)[len(forget)]
            assert got.cached[tier] == min(boundary, length - 1) == sum(got.cached)


@starts_instances
def test_an_instance_finds_what_an_earlier_one_stored(model: Model, plain: Server, store: object) -> None:
    prompt = prompt_of(3, 90)
    expected = plain.ask(prompt).bits
    name = f"--model_id=restart-{model.folder.name}"
    for direct, cached in ((False, 0), (False, 80), (True, 80)):
        with model.serve(*COMMON, *store_flags(store, direct=direct), name) as server:  # type: ignore[arg-type]
            got = server.ask(prompt)
            server.wait_quiet()
        assert got.bits == expected and got.cached == (0, 0, cached)


@starts_instances
@pytest.mark.parametrize("flags", [["--max_tokens_per_chunk_for_prefill=40"], ["--max_tokens_per_batch=33"]])
def test_chunked_runs_write_the_same_blocks_and_read_them(
    model: Model, plain: Server, tiered: Server, store: object, flags: list[str]
) -> None:
    prompt = prompt_of(4, 300)
    expected = plain.ask(prompt).bits
    with model.serve(*COMMON, *flags, *store_flags(store)) as chunked:  # type: ignore[arg-type]
        assert chunked.ask(prompt).bits == expected
        chunked.wait_quiet()
        got = tiered.ask(prompt)
        assert got.bits == expected and got.cached == (0, 0, 288)


def test_after_one_cold_chunked_run_of_2000_tokens_every_full_block_is_in_the_store(tiered: Server) -> None:
    prompt = prompt_of(5, 2000)
    cold = tiered.ask(prompt, 2)
    tiered.wait_quiet()
    tiered.clear("device", "host")
    warm = tiered.ask(prompt, 2)
    assert cold.cached == (0, 0, 0) and warm.cached == (0, 0, 1999) and warm.bits == cold.bits


def test_eight_requests_at_once_share_a_prefix_and_answer_as_each_alone(plain: Server, tiered: Server) -> None:
    trunk = prompt_of(6, 70)
    prompts = [trunk[: 40 + 4 * n] + prompt_of(60 + n, 1 + 7 * n) for n in range(8)]
    expected = [plain.ask(prompt, 12).bits for prompt in prompts]
    for forget in ((), ("device",), ("device", "host")):
        tiered.wait_quiet()
        tiered.clear(*forget)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers: list[Answer] = list(pool.map(lambda prompt: tiered.ask(prompt, 12), prompts))
        assert [answer.bits for answer in answers] == expected
    assert all(sum(answer.cached) >= 32 for answer in answers)


def test_the_next_turn_of_a_conversation_reuses_the_answer_with_equal_bits(plain: Server, tiered: Server) -> None:
    turn = prompt_of(7, 30)
    for number in range(3):
        answer = tiered.ask(turn, 40)
        assert answer.bits == plain.ask(turn, 40).bits
        tiered.wait_quiet()
        if number == 1:
            tiered.clear("device")
        previous, turn = turn, [*turn, *answer.token_ids, *prompt_of(70 + number, 5)]
        expected_blocks = (len(previous) + 40) // BLOCK
        assert sum(tiered.ask(turn, 1).cached) >= expected_blocks * BLOCK - 1


@starts_instances
def test_preempted_sequences_answer_with_the_bits_they_would_have_had(model: Model, plain: Server) -> None:
    prompts = [prompt_of(80 + n, 40) for n in range(6)]
    expected = [plain.ask(prompt, 60).bits for prompt in prompts]
    small = [model.cache_flag(17), "--check_invariants"]
    for more in (["--host_blocks_factor=4"], []):
        with model.serve(*small, *more) as server:
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(lambda prompt, s=server: s.ask(prompt, 60), prompts))
            assert server.stats()["preemptions"] > 0
            assert [answer.bits for answer in answers] == expected


def test_salts_keep_tenants_apart_in_every_tier(tiered: Server) -> None:
    prompt = prompt_of(9, 64)
    first = tiered.ask(prompt, extra_body={"cache_salt": "a"})
    other = tiered.ask(prompt, extra_body={"cache_salt": "b"})
    again = tiered.ask(prompt, extra_body={"cache_salt": "a"})
    assert other.cached == (0, 0, 0) and again.cached == (63, 0, 0)
    assert first.bits == other.bits == again.bits


def test_the_tier_counters_sum_to_all_prompt_tokens(tiered: Server) -> None:
    before = tiered.stats()["prefix_tokens"]
    lengths = [5, 16, 33, 33, 90, 90]
    for number, length in enumerate(lengths):
        tiered.ask(prompt_of(10, length), 1)
        if number % 2:
            tiered.clear("device")
    after = tiered.stats()["prefix_tokens"]
    assert sum(after.values()) - sum(before.values()) == sum(lengths)
    assert all(after[tier] > before[tier] for tier in ("device", "host", "computed"))
