"""What users meet first: `LLM` in Python, and the real demo model behind the official client."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, runs, wait_for
from tiny_models import VOCAB, make

from xllm_hier import LLM, SamplingParams
from xllm_hier.errors import ConfigError, RequestError
from xllm_hier.models.demo import demo_model_folder

ROOT = Path(__file__).parent.parent
BLOCK = 16
TIERS = ("device", "host", "store")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


# ------------------------------------------------------------------------------------------------ offline


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(
        tiny,
        block_size=BLOCK,
        max_cache_size=8 << 20,
        host_blocks_factor=2.0,
        enable_kvcache_store=True,
        store_segment_size=64 << 20,
        check_invariants=True,
        restore_policy="always",
        startup_timeout_s=120,
        log_level="warning",
    ) as made:
        yield made


def settle(llm: LLM) -> None:
    """Until every write-back has ended."""

    def quiet() -> bool:
        stats = llm.stats()
        pinned = sum(kind["pinned"] for tier in stats["blocks"].values() for kind in tier.values())
        return not pinned and not stats["canonical"]

    wait_for(quiet)


def test_the_second_call_is_served_from_each_tier_with_the_same_tokens(llm: LLM) -> None:
    prompt = prompt_of(1, 50)
    answers = []
    for forget in ((), (), ("device",), ("device", "host")):
        settle(llm)
        if forget:
            llm.clear_cache(forget)
        answers += llm.generate([prompt], GREEDY, use_tqdm=False)
    assert [answer.prompt_token_ids for answer in answers] == [prompt] * 4
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    paid = [(usage.device, usage.host, usage.store, usage.computed) for a in answers if (usage := a.usage)]
    assert paid == [(0, 0, 0, 50), (48, 0, 0, 2), (0, 48, 0, 2), (0, 0, 48, 2)]


def test_two_ranks_answer_as_one_and_a_number_that_cannot_be_is_told_with_those_that_can(llm: LLM, tiny: Path) -> None:
    prompts = [prompt_of(seed, 50) for seed in (1, 2)]
    alone = [answer.outputs[0].token_ids for answer in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(tiny, tp_size=2, block_size=BLOCK, max_cache_size=8 << 20, log_level="warning") as pair:
        together = [answer.outputs[0].token_ids for answer in pair.generate(prompts, GREEDY, use_tqdm=False)]
        block_bytes = 2 * 2 * BLOCK * 12 * 4  # two layers, key and value, the one KV head of each rank
        assert pair.stats()["tier_bytes"]["device"] == 2 * ((8 << 20) // block_bytes * block_bytes)
    assert together == alone
    with pytest.raises(ConfigError, match=r"tp_size=3 .*one of 1, 2 for this model"):
        LLM(tiny, tp_size=3, log_level="warning")


def test_clear_cache_and_stats_tell_what_there_was(llm: LLM) -> None:
    settle(llm)
    llm.clear_cache()
    before = llm.stats()
    assert before["store_state"] == "attached"
    assert all(kinds["KV"]["evictable"] == 0 for kinds in before["blocks"].values())
    llm.generate([prompt_of(2, 40)], GREEDY, use_tqdm=False)
    settle(llm)
    after = llm.stats()
    computed = after["prefix_tokens"]["computed"] - before["prefix_tokens"]["computed"]
    assert computed == 40 and after["generation_tokens"] - before["generation_tokens"] == 8
    cleared = llm.clear_cache(["device", "host"])["cleared"]
    assert cleared == {"device": 3, "host": 3}, "two blocks of the prompt, one completed by the answer"
    with pytest.raises(RequestError, match="no tier 'disk'"):
        llm.clear_cache(["disk"])


def test_choices_are_drawn_with_seeds_of_their_own_and_batches_keep_their_order(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = [prompt_of(3, 21), prompt_of(4, 35)]
    first, second = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
    drawn = [[choice.token_ids for choice in answer.outputs] for answer in first]
    assert drawn == [[choice.token_ids for choice in answer.outputs] for answer in second]
    assert all(len({tuple(ids) for ids in choices}) == 3 for choices in drawn)
    assert [answer.prompt_token_ids for answer in first] == prompts
    one = llm.generate(prompts, SamplingParams(seed=8, temperature=1.0, max_tokens=12, ignore_eos=True), False)
    assert [answer.outputs[0].token_ids for answer in one] == [choices[1] for choices in drawn], "choice i has seed + i"


def test_log_probabilities_and_lengths_come_as_asked(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (answer,) = llm.generate([prompt_of(5, 33)], params, use_tqdm=False)
    (output,) = answer.outputs
    assert output.finish_reason == "length" and len(output.token_ids) == len(output.logprobs or []) == 5
    assert all(entry.rank == 1 and len(entry.top_ids) == 2 for entry in output.logprobs or [])
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 33
    assert answer.prompt_logprobs[0] is None and answer.prompt_logprobs[1] is not None
    assert answer.usage is not None and answer.usage.computed == 33, "prompt log probabilities need the whole prompt"


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([5] * 3000, {}, "prompt"),
        ("text", {}, "prompts"),
        ([5], {"stop": "x"}, "stop"),
    ],
)
def test_prompts_that_do_not_fit_name_their_field(llm: LLM, prompt: Any, params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("setting", "value"), [("block_size", -1), ("dtype", "int3"), ("tp_size", 0), ("host_blocks_factor", "many")]
)
def test_a_bad_setting_is_named_before_any_process_starts(tiny: Path, setting: str, value: object) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ConfigError) as refused:
        LLM(tiny, **{setting: value})
    assert refused.value.name == setting
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_close_ends_every_process_and_a_closed_llm_says_so(tiny: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    llm = LLM(tiny, block_size=BLOCK, max_cache_size=8 << 20, startup_timeout_s=120, log_level="warning")
    made = set(psutil.Process().children(recursive=True)) - before
    ours = [process for process in made if process.name().startswith(("xllm", "mooncake"))]
    assert {"xllm-engine", "xllm-worker-0"} <= {process.name() for process in ours}
    llm.generate([prompt_of(6, 20)], GREEDY, use_tqdm=False)
    llm.close()
    llm.close()
    assert not [process for process in ours if runs(process.pid)]
    with pytest.raises(RequestError, match="closed"):
        llm.stats()


# ------------------------------------------------------------------------------------------ the demo model


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    try:
        folder = demo_model_folder(progress=False)
    except ConfigError as error:
        pytest.skip(f"the demo model is not installed: {error}")
    flags = ["--max_cache_size=64MB", "--host_blocks_factor=2", "--enable_kvcache_store=true"]
    with Server(folder, *flags, "--store_segment_size=128MB", "--check_invariants") as server:
        yield server


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def tiers_of(usage: Any) -> dict[str, int]:
    tiers = dict(usage.model_dump()["prompt_tokens_details"]["cached_tokens_by_tier"])
    assert sum(tiers.values()) == usage.prompt_tokens_details.cached_tokens
    return tiers


def test_the_capital_of_france_cold_and_from_the_cache(demo: Server) -> None:
    demo.clear("device", "host", "store")
    answers = []
    for forget in ((), (), ("device",), ("device", "host")):
        demo.wait_quiet()
        demo.clear(*forget)
        answers.append(demo.client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0))
    texts = {answer.choices[0].message.content for answer in answers}
    assert len(texts) == 1 and "Paris" in (texts.pop() or "")
    assert all(answer.choices[0].finish_reason == "stop" for answer in answers)
    paid = [tuple(tiers_of(answer.usage)[tier] for tier in TIERS) for answer in answers]
    assert paid == [(0, 0, 0), (32, 0, 0), (0, 32, 0), (0, 0, 32)]


def test_a_stream_brings_one_chunk_per_token_and_the_same_text(demo: Server) -> None:
    ask: dict[str, Any] = {"model": demo.model, "messages": QUESTION, "temperature": 0}
    whole = demo.client.chat.completions.create(**ask)
    chunks = list(demo.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *spoken, last = chunks
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == len(spoken) - 1, "one opens the stream"
    assert spoken[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in spoken)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in spoken] == [None] * (len(spoken) - 1) + ["stop"]


def test_completions_echo_their_prompt_with_log_probabilities(demo: Server) -> None:
    prompt = "The capital of France is"
    got = demo.client.completions.create(
        model=demo.model, prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=1
    )
    choice = got.choices[0]
    assert choice.text.startswith(f"{prompt} Paris")
    assert choice.logprobs is not None and got.usage is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert "".join(tokens) == choice.text
    assert len(tokens) == got.usage.prompt_tokens + got.usage.completion_tokens == len(values)
    assert values[0] is None and all(value is not None and value <= 0 for value in values[1:])
    plain = demo.client.completions.create(model=demo.model, prompt=prompt, max_tokens=4, temperature=0)
    assert prompt + plain.choices[0].text == choice.text


def test_stop_strings_end_the_text_before_them(demo: Server) -> None:
    got = demo.client.completions.create(
        model=demo.model, prompt="The capital of France is", max_tokens=40, temperature=0, stop=["Berlin", "."]
    )
    assert got.choices[0].text == " Paris" and got.choices[0].finish_reason == "stop"
    assert got.choices[0].model_dump()["stop_reason"] == "."


def samples(server: Server) -> dict[tuple[str, str], float]:
    """Every sample of /metrics by its name and its tier, type or state."""
    found: dict[tuple[str, str], float] = {}
    answer = httpx.get(f"{server.url}/metrics", timeout=30)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = sample.labels
            key = labels.get("tier") or labels.get("kind") or labels.get("state") or labels.get("finish_reason") or ""
            found[sample.name, key] = sample.value
    return found


def test_metrics_agree_with_what_requests_were_told(demo: Server) -> None:
    demo.wait_quiet()
    time.sleep(0.3)  # the figures of /metrics are at most 0.2 s old
    before = samples(demo)
    usages = []
    for _ in range(3):
        got = demo.client.completions.create(
            model=demo.model, prompt="One, two, three. " * 12, max_tokens=6, extra_body={"ignore_eos": True}
        )
        assert got.usage is not None
        usages.append(got.usage)
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    cached = {tier: sum(tiers_of(usage)[tier] for usage in usages) for tier in TIERS}
    assert cached["device"] > 0
    expected = {("xllm_prefix_tokens_total", tier): count for tier, count in cached.items()} | {
        ("xllm_prefix_tokens_total", "computed"): prompt_tokens - sum(cached.values()),
        ("vllm:prefix_cache_queries_total", ""): prompt_tokens,
        ("vllm:prefix_cache_hits_total", ""): sum(cached.values()),
        ("vllm:prompt_tokens_total", ""): prompt_tokens,
        ("vllm:generation_tokens_total", ""): 18,
        ("xllm_generation_tokens_total", ""): 18,
        ("xllm_time_to_first_token_seconds_count", ""): 3,
        ("vllm:time_to_first_token_seconds_count", ""): 3,
        ("xllm_inter_token_seconds_count", ""): 15,
        ("xllm_request_seconds_count", ""): 3,
        ("xllm_requests_total", "length"): 3,
    }

    def told() -> bool:
        after = samples(demo)
        return {name: after[name] - before.get(name, 0) for name in expected} == expected

    wait_for(told, every_s=0.3)
    now = samples(demo)
    assert now["xllm_store_state", "attached"] == 1 and now["xllm_requests_running", ""] == 0
    assert now["vllm:num_requests_waiting", ""] == 0 and now["xllm_transfer_bytes_total", "d2h"] > 0


# ---------------------------------------------------------------------------------------------- gpu-check


def test_the_device_checks_pass_on_the_cpu() -> None:
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu"]
    environment = {"GOMP_SPINCOUNT": "2000", **os.environ}  # as workers have it: beside busy processes spins cost most
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 14 and "FAILED" not in done.stdout and "skipped" not in done.stdout
