"""A draft model's caches move with the target's: a hit restores both or is none, and never changes an answer."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Server, running_store, store_flags, wait_for
from simulation.world import World
from tiny_models import VOCAB, Driver, add_head, blurred, first_layers, generated, make, prompt_part, random_table
from transformers import PreTrainedTokenizerFast

from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import EmbeddedStore
from xllm_hier.engine.steps.drafts import DraftCounts
from xllm_hier.engine.steps.scheduler import Step
from xllm_hier.errors import ConfigError
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.store_key import draft_component
from xllm_hier.worker.compute.speculation import DraftModel, check_same_tokenizer

FLAGS = ["--block_size=16", "--max_cache_size=8MB", "--check_invariants"]
DRAFTS = 3


@dataclass(frozen=True)
class Setup:
    """A target and its `draft`: a model of another family, or of the same weights with noise, or its own head."""

    family: str
    dtype: torch.dtype
    tp_size: int
    draft: str
    draft_changes: dict[str, Any] = field(default_factory=dict)
    draft_dtype: torch.dtype = torch.float32
    changes: dict[str, Any] = field(default_factory=dict)


ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SETUPS = {
    "llama, a draft that is often right": Setup("llama", torch.bfloat16, 1, "blurred"),
    "qwen3-tp2, a draft of other heads and dtype": Setup(
        "qwen3", torch.bfloat16, 2, "llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 20}
    ),
    "latents-tp2, a draft with keys and values": Setup("deepseek_v2", torch.float32, 2, "llama", {"hidden_size": 48}),
    "llama, a draft with latents": Setup("llama", torch.float32, 1, "deepseek_v2"),
    "qwen3, its head": Setup("qwen3", torch.float32, 1, "head", changes={"num_hidden_layers": 1}),
    "states-tp2, their head": Setup("qwen3_next", torch.float32, 2, "head", changes=ONE_OF_EACH),
    "windows, a draft of other heads": Setup("gemma3", torch.bfloat16, 1, "llama"),
    "states, a draft with attention alone": Setup("qwen3_next", torch.bfloat16, 1, "qwen3"),
    "latents-tp2, their head": Setup(
        "deepseek_v3", torch.bfloat16, 2, "head", changes={"num_hidden_layers": 1, "tie_word_embeddings": True}
    ),
}


# Each start of an instance takes seconds: what needs more than the two runs with some only.
starts_instances = pytest.mark.parametrize(
    "pair",
    [
        "llama, a draft that is often right",
        "latents-tp2, a draft with keys and values",
        "qwen3, its head",
        "states-tp2, their head",
    ],
    indirect=True,
)


@dataclass(frozen=True)
class Pair:
    """A target with drafts and all tiers (`flags` start one more), and the same without either."""

    name: str
    flags: list[str]
    folder: Path
    store: EmbeddedStore
    drafting: Server
    plain: Server
    often_right: bool


@pytest.fixture(scope="module", params=SETUPS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    setup, folder = SETUPS[request.param], tmp_path_factory.mktemp("model")
    target = make(folder / "target", setup.family, setup.dtype, **setup.changes)
    flags = [*FLAGS, f"--tp_size={setup.tp_size}"]
    with running_store(tmp_path_factory.mktemp("store")) as store:
        drafting = [*flags, *speculation(setup, target, folder / "draft"), *store_flags(store)]
        with Server(target, *drafting) as one, Server(target, *flags, "--enable_prefix_cache=false") as plain:
            yield Pair(request.param, drafting, target, store, one, plain, setup.draft in ("blurred", "head"))


def speculation(setup: Setup, target: Path, folder: Path) -> list[str]:
    """The flags; makes the draft, or gives the target a head."""
    flags = [f"--num_speculative_tokens={DRAFTS}"]
    if setup.draft == "head":
        add_head(target, qwen_names=setup.family.startswith("qwen3"), alike=True)
        return [*flags, "--speculative_algorithm=mtp"]
    if setup.draft == "blurred":
        blurred(target, folder, 0.15)
    else:
        make(folder, setup.draft, setup.draft_dtype, seed=7, **setup.draft_changes)
    return [*flags, "--speculative_algorithm=draft_model", f"--draft_model={folder}"]


def repetitive(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    phrase = [dice.randrange(3, VOCAB) for _ in range(9)]
    return (phrase * (length // 9 + 1))[:length]


# ------------------------------------------------------------------------------------------------- answers


def test_answers_and_accepted_drafts_are_the_same_cold_and_from_every_tier(pair: Pair) -> None:
    """The second half is the sharper one: what the draft model got back must be what it had."""
    drafting, plain = pair.drafting, pair.plain
    prompt = repetitive(0, 100)
    expected = plain.ask(prompt, 50).bits
    counts, before = {}, drafting.stats()
    for origin, tiers in (("cold", ()), ("device", ()), ("host", ("device",)), ("store", ("device", "host"))):
        drafting.wait_quiet()
        drafting.clear(*tiers)
        answer = drafting.ask(prompt, 50)
        assert answer.bits == expected
        after = drafting.wait_quiet()
        counts[origin] = tuple(after[what][origin] - before[what][origin] for what in ("drafted", "accepted"))
    assert len(set(counts.values())) == 1 and counts["cold"][0] > 20, counts
    if pair.often_right:
        assert counts["cold"][1] > 5


@starts_instances
def test_a_crowd_with_preemption_answers_as_each_alone(pair: Pair) -> None:
    prompts = [repetitive(20 + n, 40 + 7 * n) for n in range(8)]
    expected = [pair.plain.ask(prompt, 40).bits for prompt in prompts]
    small = [flag for flag in pair.flags if "max_cache_size" not in flag]
    block_bytes = pair.drafting.stats()["tier_bytes"]["device"] // num_blocks(pair.drafting)
    with (
        Server(pair.folder, *small, f"--max_cache_size={block_bytes * 16}", "--max_tokens_per_batch=64") as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        for tiers in ((), ("device",), ("device", "host")):
            server.clear(*tiers)
            assert [got.bits for got in pool.map(lambda prompt: server.ask(prompt, 40), prompts)] == expected
            stats = server.wait_quiet()
        assert stats["preemptions"] > 0 and stats["drafted"]["cold"] > 0


def num_blocks(server: Server) -> int:
    return sum(server.stats()["blocks"]["device"]["KV"].values())


def test_sampled_answers_with_a_seed_do_not_depend_on_what_was_drafted(pair: Pair) -> None:
    for seed in range(3):
        answers = []
        for server in (pair.drafting, pair.plain):
            body = {"prompt": repetitive(seed, 50), "max_tokens": 40, "seed": seed, "logprobs": 1}
            got = server.client.completions.create(model=server.model, temperature=0.7, top_p=0.9, **body)
            answers.append((got.choices[0].text, got.choices[0].logprobs and got.choices[0].logprobs.token_logprobs))
        assert answers[0] == answers[1]


def test_the_next_turn_finds_the_answer_in_both_caches(pair: Pair) -> None:
    turn = repetitive(9, 45)
    for _ in range(3):
        answer = pair.drafting.ask(turn, 40)
        assert answer.bits == pair.plain.ask(turn, 40).bits
        pair.drafting.wait_quiet()
        turn = [*turn, *answer.token_ids, 5, 6, 7]
        assert sum(pair.drafting.ask(turn, 1).cached) >= (len(turn) - 4) // 16 * 16 - 1


# ------------------------------------------------------------------------------------------------ the store


def remove(store: EmbeddedStore, regex: str) -> int:
    """Take objects away behind every instance's back."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert client.setup_dummy(16 << 20, 16 << 20, store.client_address) == 0
    try:
        return int(client.remove_by_regex(regex, True))
    finally:
        client.close()


@pytest.mark.parametrize("lost", ["spec_draft", "4.main"])
def test_a_block_whose_object_of_one_domain_is_gone_is_a_miss_and_is_stored_again(pair: Pair, lost: str) -> None:
    server, prompt = pair.drafting, repetitive(31, 90)
    expected = pair.plain.ask(prompt, 20).bits
    server.clear("device", "host", "store")
    assert server.ask(prompt, 20).bits == expected
    server.wait_quiet()
    put = server.stats()["store"]["put_objects"]
    count = remove(pair.store, f"xllm-kv-v3:.*:[0-9]+.{lost}.*" if lost == "spec_draft" else f"xllm-kv-v3:.*:{lost}:.*")
    assert count >= 5
    server.clear("device", "host")
    answer = server.ask(prompt, 20)
    assert answer.bits == expected and answer.cached == (0, 0, 0)
    assert server.wait_quiet()["store"]["put_objects"] - put >= count - 2, "only what was lost is stored again"
    server.clear("device", "host")
    assert server.ask(prompt, 20).cached[2] >= 79


@starts_instances
def test_an_instance_without_drafts_reads_what_one_with_them_stored_and_not_the_other_way_round(pair: Pair) -> None:
    """Keys of the target do not know of the draft; what lacks the draft's half is no hit for who needs it."""
    server = pair.drafting
    server.clear("device", "host", "store")
    without = [flag for flag in pair.flags if "specul" not in flag and "draft" not in flag]
    first, second = repetitive(41, 90), repetitive(42, 90)
    expected = [pair.plain.ask(prompt, 10).bits for prompt in (first, second)]
    assert server.ask(first, 10).bits == expected[0]
    server.wait_quiet()
    with Server(pair.folder, *without) as other:
        answer = other.ask(first, 10)
        assert answer.bits == expected[0] and answer.cached == (0, 0, 80)
        assert other.ask(second, 10).bits == expected[1]
        other.wait_quiet()
    answer = server.ask(second, 10)
    assert answer.bits == expected[1] and sum(answer.cached) == 0
    server.wait_quiet()
    server.clear("device", "host")
    answer = server.ask(second, 10)
    assert answer.bits == expected[1] and answer.cached[2] >= 79


@starts_instances
def test_a_restarted_instance_finds_both_halves_and_one_with_another_draft_finds_none(
    pair: Pair, tmp_path: Path
) -> None:
    server, prompt = pair.drafting, repetitive(51, 90)
    expected = pair.plain.ask(prompt, 10).bits
    server.ask(prompt, 10)
    server.wait_quiet()
    with Server(pair.folder, *pair.flags) as again:
        answer = again.ask(prompt, 10)
        assert answer.bits == expected and answer.cached[2] >= 79
    draft = next((flag for flag in pair.flags if flag.startswith("--draft_model=")), None)
    other = [flag for flag in pair.flags if not flag.startswith("--draft_model=") and "algorithm" not in flag]
    folder = tmp_path / "moved"
    if "states" in pair.name:  # its first layer has no attention to draft with
        make(folder, "qwen3")
    else:
        first_layers(Path(draft.partition("=")[2]) if draft else pair.folder, folder, 1)
    with Server(
        pair.folder, *other, "--speculative_algorithm=draft_model", f"--draft_model={folder}"
    ) as server_of_another:
        answer = server_of_another.ask(prompt, 10)
        assert answer.bits == expected and answer.cached == (0, 0, 0)


def test_a_draft_that_was_trained_anew_in_its_place_is_another_one_and_the_store_stays_attached(
    tmp_path: Path,
) -> None:
    target, draft = make(tmp_path / "target", "llama"), make(tmp_path / "draft", "llama", seed=1)
    flags = ["--num_speculative_tokens=2", "--speculative_algorithm=draft_model", f"--draft_model={draft}"]
    prompt = repetitive(3, 90)
    with running_store(tmp_path) as store:
        with Server(target, *FLAGS, *flags, *store_flags(store)) as before:
            expected = before.ask(prompt, 10).bits
            before.wait_quiet()
        make(draft, "llama", seed=2)
        with Server(target, *FLAGS, *flags, *store_flags(store)) as after:
            answer = after.ask(prompt, 10)
            assert answer.bits == expected and answer.cached == (0, 0, 0)
            assert after.health()["store"] == "attached"
            after.wait_quiet()
            after.clear("device", "host")
            assert after.ask(prompt, 10).cached == (0, 0, 80)


def test_the_draft_of_a_folder_is_named_by_its_path_however_it_is_written(tmp_path: Path) -> None:
    one = draft_component("draft_model", f"{tmp_path}/small")
    assert one.startswith("spec_draft::draft_model::small::")
    assert one == draft_component("draft_model", f"{tmp_path}/other/../small/")
    others = {draft_component("draft_model", f"{tmp_path}/x/small"), draft_component("mtp"), draft_component("eagle")}
    others |= {draft_component("draft_model", f"{tmp_path}/small", weights) for weights in ("before", "after")}
    assert len(others | {one}) == 6 and draft_component("mtp") == "spec_draft::mtp::embedded"


# --------------------------------------------------------------------------------------------- distribution


def test_sampled_tokens_have_the_targets_distribution_whatever_is_drafted(tmp_path: Path) -> None:
    """Chi-square of token triples over 700 seeds, accepted and rejected drafts alike, against the target's own."""
    target = make(tmp_path / "target", "llama")
    settings = {"num_speculative_tokens": 2, "speculative_algorithm": "draft_model"}
    driver = Driver(target, draft_model=str(blurred(target, tmp_path / "draft", 0.2)), **settings)
    draft = DraftModel.load(driver.config, driver.runner, progress=False)
    assert draft is not None
    driver.bind_draft(draft.runner)
    prompt, table = repetitive(3, 20), random_table(4)
    kind: dict[str, Any] = {"temperature": 1.0, "top_k": 3}

    def drawn(seed: int) -> tuple[tuple[int, ...], int]:
        spec = SamplingSpec(seed=seed, **kind)
        rows = [prompt_part(prompt, table, sampling=spec, draft_from=0, num_proposals=2)]
        tokens, accepted = [*prompt], -1
        decode: list[Any] = []
        while len(tokens) < len(prompt) + 3:
            output = driver.step(rows, decode)
            proposals = draft.propose(driver.plan, output)
            tokens += output.token_ids
            accepted += len(output.token_ids) if decode else 1
            more = {"num_drafts": len(proposals[0]), "draw": len(tokens) - len(prompt), "sampling": spec}
            more |= {"draft_from": len(tokens), "num_proposals": 2}
            rows, decode = [], [generated([*tokens, *proposals[0].tolist()], table, len(tokens) - 1, **more)]
        return tuple(tokens[len(prompt) : len(prompt) + 3]), accepted

    count = 700
    found = [drawn(seed) for seed in range(count)]
    accepted = Counter(number for _, number in found)
    assert len(accepted) > 1, "some drafts are accepted, others are not"
    probabilities = _triples(driver, prompt, table, kind)
    assert sum(probabilities.values()) == pytest.approx(1.0)
    triples = Counter(triple for triple, _ in found)
    assert set(triples) <= set(probabilities)
    likely = {triple: p for triple, p in probabilities.items() if p * count >= 5}
    chi_square = sum((triples[triple] - p * count) ** 2 / (p * count) for triple, p in likely.items())
    assert chi_square < len(likely) + 5 * (2 * len(likely)) ** 0.5


def _triples(driver: Driver, prompt: list[int], table: Any, kind: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The exact probability of each triple, from the target's logits with its filter."""

    def best(logits: torch.Tensor) -> dict[int, float]:
        values, ids = logits.double().topk(kind["top_k"])
        return dict(zip(ids.tolist(), (values / kind["temperature"]).softmax(0).tolist(), strict=True))

    driver.step([prompt_part(prompt, table)])
    result = {}
    for first, p in best(driver.logits[0]).items():
        driver.step([], [generated([*prompt, first], table, len(prompt))])
        for second, q in best(driver.logits[0]).items():
            driver.step([], [generated([*prompt, first, second], table, len(prompt))])
            result |= {(first, second, third): p * q * r for third, r in best(driver.logits[0]).items()}
    return result


# ------------------------------------------------------------------------------------------------ its cache


@pytest.mark.parametrize("stop", [50, 48], ids=["in a block", "at a block's end"])
def test_a_replay_leaves_the_draft_models_blocks_as_they_were(tmp_path: Path, stop: int) -> None:
    """Decoded blocks are found by what they hold: the draft's half must have one content too, bit for bit."""
    target = make(tmp_path / "target", "llama", num_hidden_layers=3)
    driver = Driver(
        target,
        num_speculative_tokens=2,
        speculative_algorithm="draft_model",
        draft_model=str(first_layers(target, tmp_path / "draft", 2)),
    )
    draft = DraftModel.load(driver.config, driver.runner, progress=False)
    assert draft is not None
    driver.bind_draft(draft.runner)
    tokens, table = repetitive(2, stop), random_table(6)

    def step(rows: list[Any], decode: list[Any]) -> list[int]:
        output = driver.step(rows, decode)
        draft.propose(driver.plan, output)
        return output.token_ids

    tokens += step([prompt_part(tokens, table, draft_from=0, num_proposals=2)], [])
    while len(tokens) < 70:
        tokens += step([], [generated(tokens, table, len(tokens) - 1, draft_from=len(tokens), num_proposals=2)])
    known = [cache[table][:4].clone() for cache in driver.draft_caches]
    driver.poison()
    for cache in driver.draft_caches:
        cache.fill_(float("nan"))
    prompt = tokens[:stop]
    more = {"sampling": None, "draft_from": 0, "next_token": tokens[stop], "next_generated": True}
    step([prompt_part(prompt, table, **more)], [])
    step([], [generated(tokens[:69], table, stop, draft_from=stop + 1, sampling=None, next_token=tokens[69])])
    for cache, before in zip(driver.draft_caches, known, strict=True):
        assert torch.equal(cache[table][:4], before)


# --------------------------------------------------------------------------------------------------- limits


def test_a_draft_model_of_shorter_context_stops_drafting_where_it_ends(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "llama")
    draft = make(tmp_path / "draft", "llama", max_position_embeddings=64)
    flags = ["--num_speculative_tokens=3", "--speculative_algorithm=draft_model", f"--draft_model={draft}"]
    with Server(target, *FLAGS, *flags) as drafting, Server(target, *FLAGS) as plain:
        for length in (40, 62, 63, 64, 65, 90):
            prompt = repetitive(length, length)
            assert drafting.ask(prompt, 60).bits == plain.ask(prompt, 60).bits
        before = drafting.stats()["drafted"]
        drafting.ask(repetitive(5, 70), 30)
        assert drafting.stats()["drafted"] == before


def test_short_answers_and_stops_within_what_was_accepted_end_where_they_should(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "llama")
    flags = ["--num_speculative_tokens=3", "--speculative_algorithm=draft_model", f"--draft_model={target}"]
    with Server(target, *FLAGS, *flags, "--max_model_len=64") as server:
        for limit in (1, 2, 3, 4, 5):
            prompt = repetitive(6, 64 - limit)
            assert len(server.ask(prompt, limit).token_ids) == limit
            longer = server.ask(prompt[:40], 20)
            stop = longer.token_ids[limit]
            body = {"stop_token_ids": [stop], "ignore_eos": True}
            got = server.ask(prompt[:40], 20, extra_body=body).token_ids
            assert got == longer.token_ids[: longer.token_ids.index(stop) + 1]
        server.wait_quiet()


def refused(folder: Path, *flags: str) -> str:
    with pytest.raises(AssertionError) as error, Server(folder, *FLAGS, "--num_speculative_tokens=2", *flags):
        pass
    return str(error.value)


def test_drafts_that_cannot_be_had_are_refused_with_what_can(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "llama")
    draft = "--speculative_algorithm=draft_model"
    assert "no multi-token prediction head" in refused(target, "--speculative_algorithm=mtp")
    assert "config.json" in refused(target, draft, f"--draft_model={tmp_path}/nowhere")
    broken = make(tmp_path / "broken", "llama")
    (broken / "config.json").write_text("[]")
    assert "draft_model" in refused(target, draft, f"--draft_model={broken}")
    small = make(tmp_path / "small", "llama", vocab_size=300)
    assert f"a model of {VOCAB} tokens" in refused(target, draft, f"--draft_model={small}")
    three = make(tmp_path / "three", "llama", num_attention_heads=3, num_key_value_heads=3)
    assert "tp_size" in refused(target, draft, f"--draft_model={three}", "--tp_size=2")
    for settings, name in (
        ({"num_speculative_tokens": 2, "speculative_algorithm": "draft_model"}, "draft_model"),
        ({"num_speculative_tokens": 2, "speculative_algorithm": "ngram", "draft_model": "x"}, "draft_model"),
        ({"draft_model": "x", "speculative_algorithm": "draft_model"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 32}, "31"),
        ({"speculative_algorithm": "eagle"}, "ngram | draft_model | mtp"),
    ):
        with pytest.raises(ConfigError, match=name.replace("|", "[|]")):
            EngineConfig(model="m", **settings)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ vocabularies


def vocabulary(folder: Path, size: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    return folder


def give_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    ids = {word: number for number, word in enumerate(words)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(ids, unk_token="a"))).save_pretrained(folder)
    return folder


def test_without_tokenizers_the_sizes_of_the_vocabularies_decide(tmp_path: Path) -> None:
    target, same, other = (vocabulary(tmp_path / name, size) for name, size in (("t", 9), ("s", 9), ("o", 8)))
    check_same_tokenizer(target, same, 9)
    with pytest.raises(ConfigError, match="a model of 9 tokens, as the target has") as caught:
        check_same_tokenizer(target, other, 9)
    assert caught.value.name == "draft_model"
    check_same_tokenizer(give_tokenizer(target, "abcd"), same, 9)  # one alone says nothing of the other


def test_with_tokenizers_every_token_must_be_the_same(tmp_path: Path) -> None:
    target, same, other = (vocabulary(tmp_path / name, 9) for name in ("t", "s", "o"))
    give_tokenizer(target, "abcd")
    check_same_tokenizer(target, give_tokenizer(same, "abcd"), 9)
    with pytest.raises(ConfigError, match="2 tokens are others") as caught:
        check_same_tokenizer(target, give_tokenizer(other, "abdc"), 9)
    assert caught.value.name == "draft_model"
    shutil.rmtree(other)
    check_same_tokenizer(target, give_tokenizer(vocabulary(other, 12), "abcd"), 9)  # a padded matrix is no difference


def test_a_token_that_only_one_of_both_knows_is_neither_drafted_nor_a_fault(tmp_path: Path) -> None:
    """One tokenizer, and matrices padded to other sizes: the draft's padding is no token of the target, and prompts of
    token ids may name what the draft has no row for."""
    target = give_tokenizer(make(tmp_path / "target", "llama"), "abcd")
    wider = give_tokenizer(make(tmp_path / "wider", "llama", vocab_size=VOCAB + 20), "abcd")
    path = wider / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][VOCAB:] *= 100.0
    save_file(tensors, path, {"format": "pt"})
    narrower = give_tokenizer(make(tmp_path / "narrower", "llama", vocab_size=VOCAB - 20), "abcd")
    made = {}
    for folder in (wider, narrower):
        driver = Driver(target, num_speculative_tokens=3, speculative_algorithm="draft_model", draft_model=str(folder))
        draft = DraftModel.load(driver.config, driver.runner, progress=False)
        assert draft is not None
        driver.bind_draft(draft.runner)
        prompt = [*repetitive(1, 20), VOCAB - 1]
        output = driver.step([prompt_part(prompt, random_table(3), draft_from=0, num_proposals=3)])
        (made[folder],) = draft.propose(driver.plan, output)
    assert draft.runner.last_logits.shape[1] == VOCAB - 20
    assert len(made[wider]) == 0 and len(made[narrower]) == 3


# ------------------------------------------------------------------------------------------------- counting


def test_no_more_is_drafted_than_the_next_step_can_verify_and_a_long_prompt_does_not_take_its_place() -> None:
    """A draft of a model costs a forward; one that finds no room in the next step was for nothing."""
    world = World(draft="model", num_drafts=4, num_device=200, num_host=0, store=False, max_tokens=16, chunk_tokens=16)
    made = 0
    schedule = world.scheduler.schedule

    def watched() -> Step | None:
        nonlocal made
        step = schedule()
        made += sum(row.num_proposals for row in step.plan.decode) if step is not None else 0
        return step

    world.scheduler.schedule = watched  # type: ignore[method-assign]
    for name in ("a", "b"):
        world.add(name, [ord(name) % 50, 2, 3], 60)
    world.run(lambda: all(sequence.num_generated > 4 for sequence in world.scheduler.running))
    world.add("long", [number % 50 for number in range(400)], 1)
    made, before = 0, sum(world.scheduler.drafts.drafted.values())
    world.run(lambda: len(world.scheduler.running) == 3)
    world.run(lambda: len(world.scheduler.running) < 3)
    verified = sum(world.scheduler.drafts.drafted.values()) - before
    assert made > 20 and verified > 0.7 * made
    world.run()
    alone = World(draft="model", num_drafts=4, num_device=50, num_host=0, store=False, max_tokens=1, chunk_tokens=1)
    alone.add("a", [1, 2, 3], 20)
    alone.run()
    assert sum(alone.scheduler.drafts.drafted.values()) == 0


def test_the_alarm_sounds_when_warm_drafts_are_right_less_often_beyond_chance() -> None:
    def counts(**origins: tuple[int, int]) -> DraftCounts:
        result = DraftCounts()
        for (origin, (drafted, accepted)), _ in itertools.product(origins.items(), range(100)):
            result.add(origin, drafted // 100, accepted // 100)
        return result

    assert not counts(cold=(1000, 600), host=(1000, 600)).alarm
    assert not counts(cold=(1000, 600), host=(1000, 900)).alarm
    assert not counts(cold=(1000, 600), host=(1000, 500)).alarm, "a small gap: other prompts"
    assert not counts(cold=(1000, 600), host=(200, 0)).alarm, "too few to tell"
    assert not counts(cold=(200, 200), host=(1000, 0)).alarm
    assert counts(cold=(1000, 600), host=(1000, 300)).alarm
    assert counts(cold=(1000, 600), device=(1000, 600), store=(400, 100)).alarm
    later = counts(cold=(1000, 600), host=(1000, 300))
    later.forget()
    assert not later.alarm, "what the tiers hold now is new"
    assert counts(cold=(300, 600)).accept_length == {"cold": 7.0}


def test_drafts_are_counted_by_where_their_prompt_came_from(pair: Pair) -> None:
    pair.drafting.ask(repetitive(77, 60), 12)
    text = wait_for(lambda: httpx.get(f"{pair.drafting.url}/metrics", timeout=60).text)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert float(lines['xllm_draft_tokens_total{origin="cold",result="drafted"}']) > 0
    assert float(lines['xllm_accept_length{origin="cold"}']) >= 1.0
    assert float(lines["xllm_accept_alarm"]) == 0.0
