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
from serving import Answer, Server, running_store, store_flags, wait_for
from tiny_models import LATENT_SHAPE, VOCAB, make

BLOCK = 16
LATENT_WIDTH = LATENT_SHAPE["kv_lora_rank"] + LATENT_SHAPE["qk_rope_head_dim"]
COMMON = ["--max_cache_size=8MB", "--max_tokens_per_batch=512", "--check_invariants"]
COMMON += ["--swa_checkpoint_stride=64", "--linear_checkpoint_stride=64"]  # of models that have such blocks


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


@dataclass(frozen=True)
class Setup:
    """A tiny model, the ranks it runs on, and the types of its blocks; `small_cache` bytes hold the blocks of one rank
    for about two prompts."""

    family: str
    dtype: torch.dtype
    tp_size: int
    small_cache: int
    changes: dict[str, int] = field(default_factory=dict)
    types: tuple[str, ...] = ("KV",)
    kernels: str = "auto"


def kv_bytes(values_per_token: int, dtype: torch.dtype) -> int:
    """Of seventeen blocks of two layers; what one rank caches of a token in one layer is given."""
    return 17 * 2 * BLOCK * values_per_token * dtype.itemsize


# Keys and values, once, split, and with KV heads that serve two ranks each; one latent for all ranks, with experts.
# Then windows of 24 or 33 tokens over blocks of 16, beside full attention and alone, and recurrent states.
BF16, FP32 = torch.bfloat16, torch.float32
SETUPS = {
    "llama-bf16": Setup("llama", BF16, 1, kv_bytes(2 * 2 * 12, BF16)),
    "llama-fp32-tp2": Setup("llama", FP32, 2, kv_bytes(2 * 12, FP32)),
    "deepseek_v2-fp32": Setup("deepseek_v2", FP32, 1, kv_bytes(LATENT_WIDTH, FP32)),
    "deepseek_v3-bf16-tp2": Setup("deepseek_v3", BF16, 2, kv_bytes(LATENT_WIDTH, BF16)),
    "qwen3-bf16-tp4": Setup("qwen3", BF16, 4, kv_bytes(2 * 20, BF16), {"num_attention_heads": 8}),
    "gemma3-fp32": Setup("gemma3", FP32, 1, 154_000, types=("KV", "SWA")),
    "gemma3-bf16-tp2": Setup("gemma3", BF16, 2, 38_500, {"sliding_window": 33}, ("KV", "SWA")),
    "mistral-bf16": Setup("mistral", BF16, 1, 28_000, types=("SWA",)),
    "qwen3_next-fp32": Setup("qwen3_next", FP32, 1, 420_000, types=("KV", "LINEAR")),
    "qwen3_next-bf16-tp2": Setup("qwen3_next", BF16, 2, 140_000, types=("KV", "LINEAR")),
    "llama-bf16-torch": Setup("llama", BF16, 1, kv_bytes(2 * 2 * 12, BF16), kernels="torch"),
    "gemma3-fp32-torch": Setup("gemma3", FP32, 1, 154_000, types=("KV", "SWA"), kernels="torch"),
}
KV_ALONE = ["llama-bf16", "llama-fp32-tp2", "deepseek_v2-fp32", "deepseek_v3-bf16-tp2"]  # four ranks take long to start
ONE_OF_EACH_MIX = ["gemma3-bf16-tp2", "mistral-bf16", "qwen3_next-fp32"]
# What starts instances of its own does so for some of the setups.
starts_instances = pytest.mark.parametrize("model", [*KV_ALONE, *ONE_OF_EACH_MIX], indirect=True)
several_types = pytest.mark.parametrize(
    "model", [name for name in SETUPS if SETUPS[name].types != ("KV",)], indirect=True
)
several_types_start = pytest.mark.parametrize("model", ONE_OF_EACH_MIX, indirect=True)


@dataclass(frozen=True)
class Model:
    """What a server is started with."""

    setup: Setup
    folder: Path

    def serve(self, *flags: str) -> Server:
        flags = (f"--tp_size={self.setup.tp_size}", f"--cpu_kernels={self.setup.kernels}", *flags)
        return Server(self.folder, f"--block_size={BLOCK}", *flags)

    @property
    def small_cache(self) -> str:
        return f"--max_cache_size={self.setup.small_cache}"

    def reusable(self, boundary: int, length: int) -> int:
        """Tokens a prompt of up to 64 tokens need not compute when another one left what lies before `boundary`."""
        if "LINEAR" in self.setup.types:  # no state lies before a block's end, and none was kept before this one
            return boundary if boundary < length else 0
        return min(boundary, length - 1)


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


def ask_all(server: Server, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: server.ask(prompt, max_tokens), prompts))


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
def test_partial_hits_at_every_block_boundary_and_full_hits(
    model: Model, plain: Server, tiered: Server, length: int
) -> None:
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
            assert got.cached[tier] == model.reusable(boundary, length) == sum(got.cached), (boundary, forget)


@starts_instances
def test_chunked_runs_store_the_same_blocks_and_outlive_the_instance(
    model: Model, plain: Server, tiered: Server, store: object
) -> None:
    """Each limit of a chunk writes what a whole run reads; an instance that has ended leaves what later ones read."""
    short, *long = prompt_of(3, 90), prompt_of(4, 300), prompt_of(11, 300)
    talk = prompt_of(12, 50)
    expected = [plain.ask(prompt).bits for prompt in (short, *long)]
    with model.serve(*COMMON, "--max_tokens_per_chunk_for_prefill=40", *store_flags(store)) as earlier:  # type: ignore[arg-type]
        for prompt, bits in zip((short, long[0]), expected, strict=False):
            got = earlier.ask(prompt)
            assert got.bits == bits and got.cached == (0, 0, 0)
        answered = [*talk, *earlier.ask(talk, 60).token_ids]
        earlier.wait_quiet()
    got = tiered.ask(long[0])
    assert got.bits == expected[1] and got.cached == (0, 0, 288)
    with model.serve(*COMMON, "--max_tokens_per_batch=33", *store_flags(store, direct=True)) as later:  # type: ignore[arg-type]
        got = later.ask(short)
        assert got.bits == expected[0] and got.cached == (0, 0, 80)
        got = later.ask([*answered, 5])
        assert got.bits == plain.ask([*answered, 5]).bits
        assert got.cached == (0, 0, 96) or model.setup.types != ("KV",)  # the answer's blocks, too
        got = later.ask(long[1])
        assert got.bits == expected[2] and got.cached == (0, 0, 0)
        later.wait_quiet()
        got = tiered.ask(long[1])
        assert got.bits == expected[2] and got.cached == (0, 0, 288)
    got = tiered.ask(short)
    assert got.bits == expected[0] and got.cached == (0, 0, 80)


def test_after_one_cold_chunked_run_of_2000_tokens_every_full_block_is_in_the_store(
    model: Model, tiered: Server
) -> None:
    prompt = prompt_of(5, 2000)
    cold = tiered.ask(prompt, 2)
    tiered.wait_quiet()
    tiered.clear("device", "host")
    warm = tiered.ask(prompt, 2)
    full_hit = 1984 if "LINEAR" in model.setup.types else 1999
    assert cold.cached == (0, 0, 0) and warm.cached == (0, 0, full_hit) and warm.bits == cold.bits


def test_eight_requests_at_once_share_a_prefix_and_answer_as_each_alone(plain: Server, tiered: Server) -> None:
    trunk = prompt_of(6, 70)
    prompts = [trunk[: 40 + 4 * n] + prompt_of(60 + n, 1 + 7 * n) for n in range(8)]
    expected = [plain.ask(prompt, 12).bits for prompt in prompts]
    for forget in ((), ("device",), ("device", "host")):
        tiered.wait_quiet()
        tiered.clear(*forget)
        answers = ask_all(tiered, prompts, 12)
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


@pytest.mark.parametrize("model", KV_ALONE, indirect=True)
def test_when_an_answer_ends_all_its_full_blocks_are_there_for_the_next_turn(plain: Server, tiered: Server) -> None:
    """Decoding writes the bits that a prompt would have: nothing is waited for or computed once more."""
    prompt = prompt_of(13, 50)
    turn = [*prompt, *tiered.ask(prompt, 60).token_ids, *prompt_of(14, 5)]
    device = tiered.ask(turn)
    assert not tiered.stats()["canonical"]
    tiered.wait_quiet()
    tiered.clear("device")
    host = tiered.ask(turn)
    tiered.clear("device", "host")
    store = tiered.ask(turn)
    assert [answer.bits for answer in (device, host, store)] == [plain.ask(turn).bits] * 3
    assert (device.cached, host.cached) == ((96, 0, 0), (0, 112, 0)) and store.cached == (0, 0, 112)


@pytest.mark.parametrize("model", KV_ALONE, indirect=True)
def test_preempted_sequences_answer_with_the_bits_they_would_have_had(model: Model, plain: Server) -> None:
    prompts = [prompt_of(80 + n, 40) for n in range(6)]
    expected = [plain.ask(prompt, 60).bits for prompt in prompts]
    small = [model.small_cache, "--check_invariants"]
    for more in (["--host_blocks_factor=4"], []):
        with model.serve(*small, *more) as server:
            for _ in range(4):  # which requests run side by side is a matter of chance
                assert [answer.bits for answer in ask_all(server, prompts, 60)] == expected
                if server.stats()["preemptions"]:
                    break
            assert server.stats()["preemptions"] > 0


def test_salts_keep_tenants_apart_in_every_tier(model: Model, tiered: Server) -> None:
    prompt = prompt_of(9, 64)
    first = tiered.ask(prompt, extra_body={"cache_salt": "a"})
    other = tiered.ask(prompt, extra_body={"cache_salt": "b"})
    again = tiered.ask(prompt, extra_body={"cache_salt": "a"})
    reused = max(model.reusable(64, 64), model.reusable(48, 64))  # a state lies before the prompt's last block, too
    assert other.cached == (0, 0, 0) and again.cached == (reused, 0, 0)
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


# ----------------------------------------------------------------------------------- blocks of several types


@several_types
def test_each_type_has_pools_of_its_own_in_both_tiers(model: Model, tiered: Server) -> None:
    blocks = tiered.stats()["blocks"]
    assert tuple(blocks["device"]) == tuple(blocks["host"]) == model.setup.types
    for kind in model.setup.types:
        device, host = (sum(blocks[tier][kind].values()) for tier in ("device", "host"))
        assert host == int(3 * device) > 0


@several_types_start
def test_an_audit_of_windows_alone_is_refused_and_of_others_finds_equal_bits(model: Model) -> None:
    flags = [*COMMON, "--host_blocks_factor=2", "--audit_rate=1"]
    if "KV" not in model.setup.types:
        with pytest.raises(AssertionError, match=r"audit_rate=1 .*0 for a model of sliding windows alone"):
            model.serve(*flags).stop()
        return
    with model.serve(*flags) as server:
        for seed in range(2):
            server.ask(prompt_of(seed, 90), 1)
        server.wait_quiet()
        server.clear("device")
        for seed in range(2):
            server.ask(prompt_of(seed, 90), 1)
            wait_for(lambda wanted=seed + 1: server.stats()["audits"]["equal"] == wanted)


@several_types
def test_the_types_of_a_hit_may_come_from_different_tiers(model: Model, plain: Server, tiered: Server) -> None:
    """What one prompt left on the device and what the store has of another make up one hit."""
    trunk, ends = prompt_of(3, 128), [prompt_of(30 + n, 20) for n in range(3)]
    expected = [plain.ask(trunk[:cut] + end).bits for cut, end in zip((128, 80, 128), ends, strict=True)]
    assert tiered.ask(trunk + ends[0]).bits == expected[0]
    tiered.wait_quiet()
    tiered.clear("device", "host")
    assert tiered.ask(trunk[:80] + ends[1]).bits == expected[1]  # brings a shorter prefix, and its window, back
    got = tiered.ask(trunk + ends[2])
    assert got.bits == expected[2] and sum(got.cached) == 128


@several_types
def test_where_prompts_part_others_find_what_they_need_from_the_third_on(
    model: Model, plain: Server, tiered: Server
) -> None:
    """A prompt that leaves another one in its middle, far from any boundary that was kept, keeps that one."""
    trunk, ends = prompt_of(4, 112), [prompt_of(40 + n, 90) for n in range(3)]
    for number, end in enumerate(ends):
        got = tiered.ask(trunk + end)
        assert got.bits == plain.ask(trunk + end).bits
        tiered.wait_quiet()
        tiered.clear("device")
        if number:  # with windows alone nothing on the host tells where prompts part
            assert sum(got.cached) == (112 if number == 2 and "KV" in model.setup.types else 64)


@several_types_start
@pytest.mark.parametrize("more", [[], ["--num_speculative_tokens=3", "--speculative_algorithm=ngram"]])
def test_with_little_room_for_any_type_nothing_changes_but_the_hits(
    model: Model, plain: Server, store: object, more: list[str]
) -> None:
    """Eviction of each type, preemption, restores at whatever boundary is left, drafts that are rejected."""
    dice = random.Random(9)
    trunks = [prompt_of(90 + n, 96) * 2 for n in range(3)]  # repeated: drafts are found
    prompts = [dice.choice(trunks)[: dice.randrange(20, 192)] + prompt_of(100 + n, 9) for n in range(24)]
    expected = [plain.ask(prompt, 30).bits for prompt in prompts]
    flags = [*store_flags(store), *more, "--max_tokens_per_batch=64", "--host_blocks_factor=1.5"]
    with model.serve(model.small_cache, *flags, "--max_seqs_per_batch=4") as server:
        for _ in range(4):  # which requests run side by side is a matter of chance
            assert [answer.bits for answer in ask_all(server, prompts, 30)] == expected
            if server.stats()["preemptions"]:
                break
        assert server.stats()["preemptions"] > 0
        answers = ask_all(server, prompts, 30)
        assert [answer.bits for answer in answers] == expected
        assert sum(sum(answer.cached) for answer in answers) > 0
        wait_until_nothing_is_held(server)


def wait_until_nothing_is_held(server: Server) -> None:
    blocks = server.wait_quiet()["blocks"]
    assert not any(counts["pinned"] for tier in blocks.values() for counts in tier.values()), blocks
