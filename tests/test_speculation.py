"""Drafts change how long an answer takes and nothing else: same tokens, log probabilities and blocks, bit for bit."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from serving import Answer, Server, running_store, store_flags
from simulation.scripts import draw, replay
from tiny_models import VOCAB, Driver, generated, make, prompt_part, random_prompt, random_table

from xllm_hier.engine.steps.drafts import lookup
from xllm_hier.request_messages import SamplingSpec

FLAGS = ["--block_size=16", "--max_cache_size=8MB", "--check_invariants"]
DRAFTS = ["--num_speculative_tokens=4", "--speculative_algorithm=ngram"]
FAMILIES = {"llama": ("llama", {}, 1), "llama-tp2": ("llama", {}, 2), "latents": ("deepseek_v2", {}, 1)}


def test_what_followed_the_longest_tail_the_last_time_is_drafted() -> None:
    assert lookup([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert lookup([1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 2) == [8, 5], "the latest place"
    assert lookup([4, 5, 6, 7, 0, 6, 7, 1, 4, 5, 6, 7], 1) == [0], "four equal tokens before two"
    assert lookup([1, 2, 3, 4, 5], 3) == [] == lookup([3, 1, 2, 3], 3), "one equal token is chance"
    assert lookup([5, 5, 5], 4) == [5] and lookup([5] * 40, 4) == [5] * 1
    assert lookup([1, 2, 1, 2], 0) == [] == lookup([], 4) == lookup([1], 4)


def repetitive(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    phrase = [dice.randrange(3, VOCAB) for _ in range(9)]
    return (phrase * (length // 9 + 1))[:length]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """The same model with drafts and all tiers, and without either."""
    family, changes, tp_size = FAMILIES[request.param]
    folder: Path = make(tmp_path_factory.mktemp("model") / "tiny", family, torch.bfloat16, **changes)
    more = [*FLAGS, f"--tp_size={tp_size}"]
    with (
        running_store(tmp_path_factory.mktemp("store")) as store,
        Server(folder, *more, *DRAFTS, *store_flags(store)) as drafting,
        Server(folder, *more, "--enable_prefix_cache=false") as plain,
    ):
        yield drafting, plain


def test_answers_are_those_without_drafts_cold_and_from_every_tier(pair: tuple[Server, Server]) -> None:
    drafting, plain = pair
    for seed in range(3):
        prompt = repetitive(seed, 100)
        expected = plain.ask(prompt, 120).bits
        for tiers in ((), (), ("device",), ("device", "host")):
            drafting.wait_quiet()
            drafting.clear(*tiers)
            assert drafting.ask(prompt, 120).bits == expected
    stats = drafting.stats()
    assert sum(stats["accepted"].values()) > 20, "tiny models repeat themselves"
    assert all(stats["drafted"][origin] > 0 for origin in ("cold", "device", "host", "store"))
    assert all(stats["accepted"][origin] <= stats["drafted"][origin] for origin in stats["drafted"])


def test_fewer_steps_are_taken_when_drafts_are_right(pair: tuple[Server, Server]) -> None:
    drafting, plain = pair
    before = [server.stats()["steps"] for server in pair]
    for seed in range(30, 34):
        prompt = repetitive(seed, 60)
        assert drafting.ask(prompt, 150).bits == plain.ask(prompt, 150).bits
    taken = [server.wait_quiet()["steps"] - steps for server, steps in zip(pair, before, strict=True)]
    assert taken[0] < 0.95 * taken[1]


def test_sampled_answers_with_a_seed_are_the_same_too(pair: tuple[Server, Server]) -> None:
    for seed in range(4):
        answers = []
        for server in pair:
            got = server.client.completions.create(
                model=server.model, prompt=repetitive(seed, 50), max_tokens=60, temperature=0.4, seed=seed, logprobs=2
            )
            answers.append((got.choices[0].text, got.choices[0].logprobs and got.choices[0].logprobs.token_logprobs))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_a_stop_or_the_last_token_within_what_was_accepted_ends_the_answer_there(
    pair: tuple[Server, Server], limit: int
) -> None:
    drafting, plain = pair
    prompt = repetitive(6, 60)
    whole = plain.ask(prompt, 40)
    assert drafting.ask(prompt, limit).token_ids == whole.token_ids[:limit]
    stop = whole.token_ids[-1 - limit]
    body = {"stop_token_ids": [stop], "ignore_eos": True}
    got: list[Answer] = [server.ask(prompt, 40, extra_body=body) for server in pair]
    assert got[0].token_ids == got[1].token_ids and got[0].token_ids[-1] == stop


def test_a_crowd_with_preemption_answers_as_each_alone(pair: tuple[Server, Server]) -> None:
    drafting, plain = pair
    prompts = [repetitive(20 + n, 40 + 7 * n) for n in range(8)]
    expected = [plain.ask(prompt, 60).bits for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [answer.bits for answer in pool.map(lambda prompt: drafting.ask(prompt, 60), prompts)] == expected
    drafting.wait_quiet()


def test_the_next_turn_finds_the_answer_although_drafts_were_rejected_in_its_blocks(
    pair: tuple[Server, Server],
) -> None:
    drafting, plain = pair
    turn = repetitive(9, 45)
    for _ in range(3):
        answer = drafting.ask(turn, 50)
        assert answer.bits == plain.ask(turn, 50).bits
        drafting.wait_quiet()
        turn = [*turn, *answer.token_ids, *random_prompt(5)]
        assert sum(drafting.ask(turn, 1).cached) >= (len(turn) - 6) // 16 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_drafts_have_the_logits_of_steps_of_their_own_and_wrong_ones_leave_no_trace(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    driver = Driver(tiny_models.make(tmp_path, "qwen3", dtype))
    prompt, table = random_prompt(40), random_table(6)
    tokens = [*prompt, driver.step([prompt_part(prompt, table)]).token_ids[0]]
    logits = []
    while len(tokens) < 60:
        tokens.append(driver.step([], [generated(tokens, table, len(tokens) - 1)]).token_ids[0])
        logits.append(driver.logits[0])
    blocks = driver.blocks(table, 59)
    driver.poison()
    driver.step([prompt_part(prompt, table)])
    known = tokens[:41]
    while len(known) < 60:
        right = tokens[len(known) : len(known) + 3]
        drafts = [*right[:-1], (right[-1] + 1) % VOCAB] if len(known) % 2 else right
        row = generated([*known, *drafts], table, len(known) - 1, num_drafts=len(drafts))
        output = driver.step([], [row])
        assert output.num_tokens is not None
        for place in range(output.num_tokens[0]):
            if len(known) + place < 60:
                assert torch.equal(driver.logits[place], logits[len(known) - 41 + place])
        known += output.token_ids
    assert known[:60] == tokens[:60]
    assert torch.equal(driver.blocks(table, 59)[:, :3], blocks[:, :3])


def test_a_sequence_without_drafts_beside_one_with_them_gets_its_one_token(tmp_path: Path) -> None:
    driver = Driver(tiny_models.make(tmp_path, "llama"))
    first, second, third = random_prompt(20), random_prompt(25, seed=1), random_prompt(30, seed=2)
    tables = [random_table(9)[3 * n : 3 * n + 3] for n in range(3)]
    driver.step([prompt_part(first[:19], tables[0]), prompt_part(second[:24], tables[1])])
    rows = [
        generated([*first, 5, 6], tables[0], 19, num_drafts=2, sampling=SamplingSpec(num_logprobs=1)),
        generated(second, tables[1], 24),
    ]
    output = driver.step([prompt_part(third, tables[2])], rows)
    assert output.num_tokens is not None and output.num_tokens[0] == output.num_tokens[2] == 1
    assert sum(output.num_tokens) == len(output.token_ids) == len(output.logprobs)


def test_random_schedules_accept_and_reject_drafts() -> None:
    drafted = accepted = 0
    for seed in range(20):
        counts = replay(draw("drafts", seed)).scheduler.drafts
        drafted += sum(counts.drafted.values())
        accepted += sum(counts.accepted.values())
    assert 20 < accepted < drafted
