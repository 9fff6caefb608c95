"""Prefill and decode on separate instances: tokens and bits are those of one instance that does both, whatever the
decode side had before, and whoever paid for the prompt."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError
from pairs import BLOCK, COMMON, moved_bytes, prompt_of, running_pair, wait_at_rest
from serving import Answer, Server, running_store, store_flags, wait_for
from tiny_models import add_head, make


@dataclass(frozen=True)
class Setup:
    """A tiny model, its ranks, how blocks travel, and who drafts: its own `head`, `ngram`, or a model of a family."""

    family: str
    tp_size: int
    mode: str
    dtype: torch.dtype = torch.float32
    draft: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SETUPS = {
    "llama-PUSH": Setup("llama", 1, "PUSH", torch.bfloat16),
    "llama-PULL-tp2": Setup("llama", 2, "PULL"),
    "latents-PUSH-tp2": Setup("deepseek_v3", 2, "PUSH", torch.bfloat16),
    "windows-PULL": Setup("gemma3", 1, "PULL", draft="ngram"),
    "windows alone-PUSH": Setup("mistral", 1, "PUSH", torch.bfloat16),
    "states-PUSH-tp2": Setup("qwen3_next", 2, "PUSH"),
    "states and their head-PULL": Setup("qwen3_next", 1, "PULL", draft="head", changes=ONE_OF_EACH),
    "a draft with latents-PUSH": Setup("llama", 1, "PUSH", draft="deepseek_v2"),
}


@dataclass(frozen=True)
class Pair:
    """The two halves, and one instance that does both without any cache."""

    setup: Setup
    prefill: Server
    decode: Server
    fused: Server

    def fresh(self) -> None:
        self.forget(self.prefill, self.decode)
        self.prefill.clear("store")

    def forget(self, *servers: Server) -> None:
        wait_at_rest(self.prefill, self.decode)
        for server in servers:
            server.clear("device", "host")


@pytest.fixture(scope="module", params=SETUPS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    setup = SETUPS[request.param]
    folder: Path = tmp_path_factory.mktemp("model") / setup.family
    make(folder, setup.family, setup.dtype, **setup.changes)
    flags = [f"--tp_size={setup.tp_size}"]
    more = ["--peer_timeout_s=20"]  # nobody is lost here, however busy the machine is
    more += [] if setup.family == "mistral" else ["--audit_rate=2"]
    if setup.draft == "head":
        add_head(folder, qwen_names=True, alike=True)
        more += ["--num_speculative_tokens=3", "--speculative_algorithm=mtp"]
    elif setup.draft == "ngram":
        more += ["--num_speculative_tokens=3", "--speculative_algorithm=ngram"]
    elif setup.draft:
        draft = make(folder.with_name("draft"), setup.draft)
        more += ["--num_speculative_tokens=3", "--speculative_algorithm=draft_model", f"--draft_model={draft}"]
    with (
        running_store(tmp_path_factory.mktemp("store")) as store,
        running_pair(folder, setup.mode, *flags, *more, *store_flags(store)) as (prefill, decode),
        Server(folder, *COMMON, *flags, "--enable_prefix_cache=false") as fused,
    ):
        yield Pair(setup, prefill, decode, fused)


def ask_all(server: Server, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda prompt: server.ask(prompt, max_tokens), prompts))


def test_the_same_tokens_and_bits_cold_again_and_from_each_tier_of_the_prefill_side(pair: Pair) -> None:
    pair.fresh()
    prompt = prompt_of(1, 150)
    expected = pair.fused.ask(prompt, 40)
    assert pair.prefill.ask(prompt, 40).bits == expected.bits
    for tier, forgotten in (("device", ()), ("host", ("device",)), ("store", ("device", "host"))):
        wait_at_rest(pair.prefill, pair.decode)
        pair.prefill.clear(*forgotten)
        got = pair.prefill.ask(prompt, 40)
        assert got.bits == expected.bits
        assert got.tiers[tier] >= 128 and sum(got.tiers.values()) == got.tiers[tier], "usage is the prefill side's"
    assert pair.decode.stats()["pd"]["taken_over"] >= 4
    assert pair.decode.stats()["transfer_bytes"]["g2h"] == 0, "the decode side admits by its device prefix alone"


def test_lengths_around_blocks_and_chunks_one_token_and_many(pair: Pair) -> None:
    pair.fresh()
    for number, length in enumerate((1, 15, 16, 17, 63, 64, 65, 128, 129)):
        prompt = prompt_of(100 + number, length)
        for max_tokens in (1, 2, 20):
            expected = pair.fused.ask(prompt, max_tokens)
            assert pair.prefill.ask(prompt, max_tokens).bits == expected.bits, (length, max_tokens)


def test_any_k_of_the_blocks_may_be_there_and_only_the_others_travel(pair: Pair) -> None:
    """A decode instance that has a prefix is sent what it lacks, also when prompts are computed in several chunks."""
    prompt = prompt_of(2, 6 * BLOCK)
    expected = pair.fused.ask(prompt, 12).bits
    sizes: dict[int, int] = {}
    for count in (0, 1, 3, 5, 6):
        pair.fresh()
        if count:
            pair.prefill.ask(prompt[: count * BLOCK], 2)
            pair.forget(pair.prefill)
            pair.prefill.clear("store")
        before = moved_bytes(pair.prefill, pair.decode)
        assert pair.prefill.ask(prompt, 12).bits == expected, count
        sizes[count] = moved_bytes(pair.prefill, pair.decode) - before
    assert sizes[0] > 0 and sorted(sizes.values(), reverse=True) == list(sizes.values())
    if pair.setup.family in ("llama", "deepseek_v3") and not pair.setup.draft:  # full attention alone: all blocks alike
        assert [sizes[0] * (6 - count) // 6 for count in sizes] == list(sizes.values())


def test_sixteen_at_once_that_share_prefixes_and_n_answers_to_one_prompt(pair: Pair) -> None:
    pair.fresh()
    shared = prompt_of(3, 70)
    prompts = [shared[: 20 + 3 * n] + prompt_of(200 + n, 5 + 7 * n) for n in range(16)]
    expected = [pair.fused.ask(prompt, 24).bits for prompt in prompts]
    assert [answer.bits for answer in ask_all(pair.prefill, prompts, 24)] == expected
    both = []
    for server in (pair.fused, pair.prefill):
        got = server.client.completions.create(
            model=server.model,
            prompt=shared,
            max_tokens=16,
            n=3,
            temperature=0.8,
            seed=5,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        both.append(sorted((choice.index, tuple(choice.model_dump()["token_ids"])) for choice in got.choices))
        assert got.usage is not None and got.usage.completion_tokens == 48
    assert both[0] == both[1] and len({tokens for _, tokens in both[0]}) > 1
    wait_at_rest(pair.prefill, pair.decode)


def test_both_sides_write_back_and_a_next_turn_finds_the_answer_in_the_store(pair: Pair) -> None:
    pair.fresh()
    turn = prompt_of(4, 80)
    answer = pair.prefill.ask(turn, 60)
    pair.forget(pair.prefill, pair.decode)
    turn = [*turn, *answer.token_ids, *prompt_of(5, 9)]
    got = pair.prefill.ask(turn, 10)
    assert got.bits == pair.fused.ask(turn, 10).bits
    if pair.setup.family == "llama":  # what was generated is a prefix, once the decode side has computed it as one
        assert got.tiers["store"] >= (80 + 60) // BLOCK * BLOCK - BLOCK
    else:
        assert got.tiers["store"] >= 64


def test_each_token_of_a_prompt_is_accounted_for_once_and_by_the_prefill_side(pair: Pair) -> None:
    pair.fresh()
    before = pair.prefill.stats()["prefix_tokens"]
    for length in (5, 33, 33, 90, 90):
        pair.prefill.ask(prompt_of(6, length), 4)
    after = pair.prefill.stats()["prefix_tokens"]
    assert sum(after.values()) - sum(before.values()) == 5 + 33 + 33 + 90 + 90
    assert sum(pair.decode.stats()["prefix_tokens"].values()) == 0


def test_a_stream_and_prompt_logprobs_are_those_of_one_instance(pair: Pair) -> None:
    prompt = prompt_of(7, 50)
    for server in (pair.prefill, pair.fused):
        chunks = list(
            server.client.completions.create(
                model=server.model,
                prompt=prompt,
                max_tokens=9,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
        )
        tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.model_dump()["token_ids"]]
        assert tokens == list(pair.fused.ask(prompt, 9).token_ids)
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
    asked = {"extra_body": {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}}
    both = [
        server.client.completions.create(model=server.model, prompt=prompt, max_tokens=5, temperature=0, **asked)
        for server in (pair.prefill, pair.fused)
    ]
    assert both[0].choices[0].model_dump() == both[1].choices[0].model_dump()


def test_a_stop_token_that_comes_first_ends_it_where_it_was_computed(pair: Pair) -> None:
    prompt = prompt_of(8, 40)
    first, second = pair.fused.ask(prompt, 2).token_ids
    taken = pair.decode.stats()["pd"]["taken_over"]
    body = {"stop_token_ids": [first]}
    assert pair.prefill.ask(prompt, 30, extra_body=body).token_ids == (first,)
    assert pair.decode.stats()["pd"]["taken_over"] == taken
    if second != first:
        assert pair.prefill.ask(prompt, 30, extra_body={"stop_token_ids": [second]}).token_ids == (first, second)
    wait_at_rest(pair.prefill, pair.decode)


def test_the_decode_side_takes_no_requests_of_its_own(pair: Pair) -> None:
    with pytest.raises(BadRequestError, match="PREFILL"):
        pair.decode.ask([3, 4, 5])


def test_what_was_sent_is_what_the_decode_side_would_have_computed(pair: Pair) -> None:
    """The audit computes prompts again there, in idle time, and compares bit for bit."""
    if pair.setup.family == "mistral":
        pytest.skip("of sliding windows alone no prefix is kept that could be compared")
    for number in range(4):
        pair.prefill.ask(prompt_of(300 + number, 70), 3)
    wait_at_rest(pair.prefill, pair.decode)
    audits = wait_for(lambda: found if (found := pair.decode.stats()["audits"])["equal"] else None)
    assert audits["different"] == audits["rounding"] == 0


def test_metrics_and_health_tell_of_the_other_half(pair: Pair) -> None:
    import httpx

    health = pair.prefill.health()
    assert health["role"] == "PREFILL" and list(health["peers"].values()) == ["linked"] and health["status"] == "ok"
    assert pair.decode.health()["role"] == "DECODE"
    text = httpx.get(f"{pair.prefill.url}/metrics", timeout=30).text
    assert 'xllm_pd_peers{state="linked"} 1.0' in text and "xllm_pd_handed_over_total" in text
    kind = pair.setup.mode.lower()
    mover = pair.prefill if kind == "push" else pair.decode
    assert f'xllm_transfer_bytes_total{{kind="{kind}"}}' in httpx.get(f"{mover.url}/metrics", timeout=30).text
