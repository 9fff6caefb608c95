"""The multi-token prediction head: what a plain reference of it drafts, from a cache that keeps the laws of caches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from mtp_reference import Reference
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, Driver, generated, make, prompt_part, random_prompt, random_table

from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.plans import Forward, SequenceRows
from xllm_hier.request_messages import SamplingSpec
from xllm_hier.worker.compute.model_runner import ModelOutput, ModelRunner
from xllm_hier.worker.compute.sampler import sample
from xllm_hier.worker.compute.speculation import DraftModel

BLOCK = 16
NUM_DRAFTS = 3
GREEDY = SamplingSpec()
# Family, changes, whether the head has Qwen's names.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", {}, False),
    "llama, one matrix for embedding and head": ("llama", {"tie_word_embeddings": True}, False),
    "mistral, whose head sees beyond its window": ("mistral", {}, False),
    "qwen2": ("qwen2", {}, False),
    "qwen3": ("qwen3", {}, True),
    "deepseek_v3": ("deepseek_v3", {}, False),
}
CACHES = ["llama", "qwen3", "deepseek_v3"]  # one for each kind of cache and of names


def make_case(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    family, changes, qwen_names = CASES[name]
    return tiny_models.add_head(make(folder, family, dtype, **changes), qwen_names=qwen_names)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# ------------------------------------------------------------------------------------------- driven by hand


class Pair(Driver):
    """A target and its head, each with a cache of its own whose slots start as NaN; `drafts` are the last step's."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        more: dict[str, Any] = {"num_speculative_tokens": NUM_DRAFTS, "speculative_algorithm": "mtp"} | settings
        super().__init__(folder, block_size=BLOCK, **more)
        config = EngineConfig(model=str(folder), num_threads=2, **more)
        head = DraftModel.load(config, self.runner, progress=False)
        assert head is not None
        self.head = head
        (layout,) = head.runner.layout.blocks
        assert layout.layers == (0,) and layout.block_size == BLOCK
        shape = (len(self.caches[0]), len(layout.tensors), *layout.tensors[0].shape)
        self.head_cache = torch.full(shape, float("nan"), dtype=head.runner.facts.dtype)
        head.runner.bind_cache([self.head_cache])
        self.drafts: list[list[int]] = []

    def step(
        self,
        prefill: Sequence[SequenceRows] = (),
        decode: Sequence[SequenceRows] = (),
        wait_for_layer: Callable[[int], None] = lambda layer: None,
    ) -> ModelOutput:
        output = super().step(prefill, decode, wait_for_layer)
        found = self.head.propose(Forward(0, [], list(prefill), list(decode)), output)
        self.drafts = [drafts.tolist() for drafts in found]
        return output

    @property
    def head_logits(self) -> torch.Tensor:
        """What the last drafts were drawn from, [sequences, vocab]."""
        return self.head.runner.last_logits

    def poison(self) -> None:
        super().poison()
        self.head_cache.fill_(float("nan"))

    def saved(self, table: Sequence[int], num_tokens: int) -> Saved:
        """Both models' full blocks of a sequence."""
        return Saved(self.blocks(table, num_tokens), self.head_cache[list(table[: num_tokens // BLOCK])])

    def put_back(self, table: Sequence[int], saved: Saved) -> None:
        self.restore(table, saved.target)
        self.head_cache[list(table[: len(saved.head)])] = saved.head


@dataclass
class Saved:
    target: torch.Tensor  # [layers, blocks, ...]
    head: torch.Tensor  # [blocks, ...]

    def equals(self, other: Saved) -> bool:
        return same_bits(self.target, other.target) and same_bits(self.head, other.head)

    def first(self, count: int) -> Saved:
        return Saved(self.target[:, :count], self.head[:count])


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Also where nothing was written, which is NaN."""
    return ours.shape == theirs.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (ours, theirs)))


def take_prompt(
    pair: Pair,
    prompt: Sequence[int],
    table: Sequence[int],
    *,
    chunk: int = 0,
    restored: int = 0,
    num_proposals: int = NUM_DRAFTS,
    sampling: SamplingSpec = GREEDY,
) -> int:
    """Prefill as the engine plans it, of a prompt whose first `restored` positions both caches hold; the first token.

    The target's last restored token is computed again: no cache holds the hidden state that the head needs of it.
    """
    start, draft_from, token = max(0, restored - 1), restored, -1
    while start < len(prompt):
        stop = min(start + (chunk or len(prompt)), len(prompt))
        last = stop == len(prompt)
        part = prompt_part(
            prompt,
            table,
            start,
            stop,
            write_from=max(start, restored),
            sampling=sampling if last else None,
            next_token=None if last else prompt[stop],
            draft_from=draft_from,
            num_proposals=num_proposals if last else 0,
        )
        found = pair.step([part]).token_ids
        start, draft_from, token = stop, stop + 1, found[0] if last else -1
    return token


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.drafted


Change = Callable[[list[int], list[int]], list[int]]


def answer(
    pair: Pair,
    prompt: Sequence[int],
    table: Sequence[int],
    count: int,
    *,
    restored: int = 0,
    sampling: SamplingSpec = GREEDY,
    change: Change = lambda known, drafts: drafts,
) -> Answer:
    """`count` tokens or a few more; `change(answer so far, drafts)` is sent in place of the drafts."""
    answer = Answer([take_prompt(pair, prompt, table, restored=restored, sampling=sampling)])
    while len(answer.tokens) < count:
        answer.drafts.append(pair.drafts[0])
        drafts = change(answer.tokens, pair.drafts[0])
        output = pair.step([], [next_row(prompt, answer.tokens, drafts, table, sampling)])
        brought = output.num_tokens[0] if output.num_tokens is not None else 1
        answer.drafted += len(drafts)
        answer.accepted += brought - 1
        answer.tokens += output.token_ids
    return answer


def next_row(
    prompt: Sequence[int],
    given: Sequence[int],
    drafts: Sequence[int],
    table: Sequence[int],
    sampling: SamplingSpec = GREEDY,
    num_proposals: int = NUM_DRAFTS,
) -> SequenceRows:
    known = [*prompt, *given]
    return generated(
        [*known, *drafts],
        table,
        len(known) - 1,
        sampling=sampling,
        draw=len(given),
        num_drafts=len(drafts),
        draft_from=len(known),
        num_proposals=num_proposals,
    )


def alone(folder: Path, prompt: Sequence[int], count: int, sampling: SamplingSpec = GREEDY) -> list[int]:
    """The target's answer without drafts."""
    driver, table = Driver(folder), random_table(12)
    tokens = driver.step([prompt_part(prompt, table, sampling=sampling)]).token_ids
    while len(tokens) < count:
        known = [*prompt, *tokens]
        row = generated(known, table, len(known) - 1, sampling=sampling, draw=len(tokens))
        tokens += driver.step([], [row]).token_ids
    return tokens


# ------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", CASES)
def test_drafts_and_their_logits_are_those_of_a_plain_head(tmp_path: Path, name: str) -> None:
    """The first from the target's hidden states, the others from the head's own; behind a prompt and behind steps."""
    reference = Reference(make_case(tmp_path, name))
    pair = Pair(tmp_path)
    for length in (1, 2, 40, 150):
        prompt, table = random_prompt(length, seed=length), random_table(11, seed=length)
        for count in (1, 2, 3):
            pair.poison()
            tokens = [*prompt, take_prompt(pair, prompt, table, num_proposals=count)]
            theirs = reference.draft(tokens, count)
            assert error(pair.head_logits[0], theirs[-1]) < 1e-5
            assert pair.drafts == [[int(row.argmax()) for row in theirs]]
        for _ in range(3):
            tokens += pair.step([], [next_row(prompt, tokens[length:], [], table)]).token_ids
            theirs = reference.draft(tokens, NUM_DRAFTS)
            assert error(pair.head_logits[0], theirs[-1]) < 1e-5
            assert pair.drafts == [[int(row.argmax()) for row in theirs]]


def test_bfloat16_stays_near_the_reference(tmp_path: Path) -> None:
    reference = Reference(make_case(tmp_path, "llama", torch.bfloat16))
    pair, prompt = Pair(tmp_path), random_prompt(60)
    known = [*prompt, take_prompt(pair, prompt, random_table(5), num_proposals=1)]
    assert error(pair.head_logits[0], reference.draft(known, 1)[0]) < 0.05


def test_a_sampled_draft_is_drawn_with_the_numbers_the_target_will_draw_with(tmp_path: Path) -> None:
    pair, prompt, table = Pair(make_case(tmp_path, "llama")), random_prompt(30), random_table(4)
    for seed in range(5):
        hot = SamplingSpec(temperature=1.5, seed=seed)
        take_prompt(pair, prompt, table, sampling=hot, num_proposals=1)
        assert pair.drafts[0] == sample(pair.head_logits, [hot], [1])
        (first,) = pair.drafts[0]
        take_prompt(pair, prompt, table, sampling=hot, num_proposals=2)
        assert pair.drafts[0] == [first, *sample(pair.head_logits, [hot], [2])]


def test_each_sequence_of_a_batch_gets_the_drafts_it_gets_alone(tmp_path: Path) -> None:
    """Two prompts, one of them cut; two answers, one with drafts behind it; one that is left alone."""
    pair = Pair(make_case(tmp_path, "llama"))
    prompts = [random_prompt(20 + 9 * n, seed=n) for n in range(5)]
    tables = [random_table(25)[5 * n : 5 * n + 5] for n in range(5)]

    def begin(numbers: Sequence[int]) -> list[int]:
        return [take_prompt(pair, prompts[n], tables[n]) for n in numbers]

    def rows(first: Sequence[int], wanted: Sequence[int]) -> tuple[list[list[SequenceRows]], list[list[SequenceRows]]]:
        whole = prompt_part(prompts[0], tables[0], draft_from=0, num_proposals=wanted[0])
        cut = prompt_part(prompts[1], tables[1], 0, 13, next_token=prompts[1][13], draft_from=0)
        plain = next_row(prompts[2], first[:1], [], tables[2], num_proposals=wanted[1])
        drafts = next_row(prompts[3], first[1:2], [5, 6], tables[3], num_proposals=wanted[2])
        left = prompt_part(prompts[4], tables[4], num_proposals=3)
        return [[whole], [cut], [left]], [[plain], [drafts]]

    wanted = (3, 1, 2)
    prefill, decode = rows(begin([2, 3]), wanted)
    expected = []
    for part in prefill:
        pair.step(part)
        expected += pair.drafts
    for row in decode:
        pair.step([], row)
        expected += pair.drafts
    apart = [pair.saved(table, 16) for table in tables]
    pair.poison()
    prefill, decode = rows(begin([2, 3]), wanted)
    pair.step([part for parts in prefill for part in parts], [row for rows in decode for row in rows])
    assert pair.drafts == expected
    assert [len(drafts) for drafts in expected] == [3, 0, 1, 2]
    together = [pair.saved(table, 16) for table in tables]
    assert all(ours.equals(theirs) for ours, theirs in zip(together, apart, strict=True))
    assert together[4].head.isnan().all() and not together[4].target.isnan().any()


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_no_draft_is_made_for_which_the_sequence_has_no_place(tmp_path: Path, room: int) -> None:
    """The newest token has one; a draft needs one only if another is drafted behind it."""
    folder = make_case(tmp_path, "llama")
    prompt = random_prompt(4 * BLOCK - room)
    pair = Pair(folder)
    take_prompt(pair, prompt, random_table(4))
    assert len(pair.drafts[0]) == min(NUM_DRAFTS, room)
    short = Pair(folder, max_model_len=4 * BLOCK)
    take_prompt(short, prompt, random_table(9))
    assert short.drafts == pair.drafts


# ------------------------------------------------------------------------------------------- the head's cache


@pytest.mark.parametrize("name", CACHES)
def test_position_0_of_the_head_is_zeros_and_never_looked_at(tmp_path: Path, name: str) -> None:
    """What stands there goes to host and store with its block, so it must not be what another sequence left. Anything
    else there would show in the bits of all that attends to it."""
    pair, prompt, table = Pair(make_case(tmp_path, name)), random_prompt(70), random_table(8)
    cold = answer(pair, prompt, table, 20)
    at = pair.head_logits
    first = pair.head_cache[table[0]][:, :1]
    assert not first.any() and not pair.head_cache[table[0]][:, 1:].isnan().any()
    assert not pair.head_cache[table[1:4]].isnan().any() and not at.isnan().any()
    first.fill_(1e4)
    pair.head.runner.begin_head = lambda block: None  # type: ignore[method-assign]
    again = answer(pair, prompt, table, 20)
    assert again == cold and same_bits(pair.head_logits, at)
    assert (first == 1e4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CACHES)
def test_chunks_and_restored_blocks_leave_the_bits_of_one_cold_prefill(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    pair = Pair(make_case(tmp_path, name, dtype))
    prompt, places = random_prompt(75), random_table(18)
    table, other = places[:9], places[9:]
    first = take_prompt(pair, prompt, table)
    drafts, logits, cold = pair.drafts, pair.head_logits, pair.saved(table, 75)
    assert not cold.target.isnan().any()
    ways = [(chunk, 0) for chunk in (1, 7, 16, 17, 64)] + [(0, b) for b in (16, 32, 48, 64)] + [(7, 16), (5, 48)]
    for chunk, restored in ways:
        pair.poison()
        pair.put_back(other, cold.first(restored // BLOCK))
        assert take_prompt(pair, prompt, other, chunk=chunk, restored=restored) == first
        assert pair.drafts == drafts and same_bits(pair.head_logits, logits)
        assert pair.saved(other, 75).equals(cold)


@pytest.mark.parametrize("name", CACHES)
def test_a_prompt_that_is_restored_to_its_last_block_lacks_only_the_drawn_token(tmp_path: Path, name: str) -> None:
    """The target computes its last token again without writing it, the head nothing but what comes behind."""
    pair = Pair(make_case(tmp_path, name))
    prompt, places = random_prompt(64), random_table(18)
    table, other = places[:9], places[9:]
    first = take_prompt(pair, prompt, table)
    drafts, logits, cold = pair.drafts, pair.head_logits, pair.saved(table, 64)
    pair.put_back(other, cold)
    assert take_prompt(pair, prompt, other, restored=64) == first
    assert pair.drafts == drafts and same_bits(pair.head_logits, logits)
    assert pair.saved(other, 64).equals(cold)


@pytest.mark.parametrize("name", CACHES)
def test_a_block_depends_on_the_tokens_up_to_its_own_end(tmp_path: Path, name: str) -> None:
    """Two prompts share exactly one block; also where the second ends there, so that a drawn token comes next."""
    pair = Pair(make_case(tmp_path, name))
    one = random_prompt(40)
    two = [*one[:BLOCK], *random_prompt(30, seed=1)]
    places, blocks = random_table(24), []
    for number, prompt in enumerate((one, two, one[:BLOCK])):
        table = places[6 * number : 6 * number + 6]
        take_prompt(pair, prompt, table)
        blocks.append(pair.saved(table, len(prompt)))
    assert blocks[0].first(1).equals(blocks[1].first(1)) and blocks[0].first(1).equals(blocks[2])
    assert not same_bits(blocks[0].head[1:2], blocks[1].head[1:2])
    changed = [*one[: BLOCK - 1], (one[BLOCK - 1] + 1) % VOCAB]
    take_prompt(pair, changed, places[18:])
    (slot,) = {place for place in range(1, BLOCK) if not same_bits(*at(blocks[2], pair.saved(places[18:], 16), place))}
    assert slot == BLOCK - 1


def at(one: Saved, two: Saved, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    return one.head[0][:, place], two.head[0][:, place]


def test_a_row_below_write_from_is_computed_and_leaves_the_shared_block_alone(tmp_path: Path) -> None:
    """What a restored answer computes again for its hidden state, it computes by the decode path."""
    pair = Pair(make_case(tmp_path, "llama"))
    tokens, table = random_prompt(40), random_table(4)
    pair.step([prompt_part(tokens[:10], table, sampling=None, draft_from=0, next_token=tokens[10])])
    pair.step([], [generated(tokens[:32], table, 10, sampling=None, draft_from=11, next_token=tokens[32])])
    for cache in pair.caches:
        cache[table[1], :, -1] = 7.0
    pair.step([], [generated(tokens[:34], table, 31, sampling=None, write_from=32, draft_from=32)])
    for cache in pair.caches:
        assert (cache[table[1], :, -1] == 7.0).all()
        assert not cache[table[2], :, :2].isnan().any() and cache[table[2], :, 2:].isnan().all()


def test_the_head_counts_its_own_weights_and_not_those_it_shares(tmp_path: Path) -> None:
    folder = make_case(tmp_path, "llama")
    matrices = [
        tensor.numel() * 4
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("model.layers.2.") and tensor.ndim == 2
    ]
    assert Pair(folder).head.runner.details.parameter_bytes == sum(matrices)


# ------------------------------------------------------------------------------------------- verification


def rejected(truth: Sequence[int]) -> Change:
    return lambda given, _: [(token + 1) % VOCAB for token in truth[len(given) : len(given) + NUM_DRAFTS]]


def partly_right(truth: Sequence[int]) -> Change:
    """None, one, two or all three of a step's drafts are right."""
    dice = random.Random(0)

    def change(given: list[int], _: list[int]) -> list[int]:
        following, right = truth[len(given) : len(given) + NUM_DRAFTS], dice.randrange(NUM_DRAFTS + 1)
        return [token if place < right else (token + 1) % VOCAB for place, token in enumerate(following)]

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CACHES)
def test_whatever_is_accepted_tokens_and_blocks_are_those_of_drafts_that_were_all_rejected(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = make_case(tmp_path, name, dtype)
    pair, prompt, table = Pair(folder), random_prompt(50), random_table(8)
    truth, end = alone(folder, prompt, 48), 50 + 40

    def run(change: Change) -> tuple[Answer, Saved]:
        pair.poison()
        found = answer(pair, prompt, table, 40 + 1, change=change)
        assert found.tokens[:41] == truth[:41]
        return found, pair.saved(table, end)

    none, without = run(lambda given, drafts: [])
    assert none.drafted == 0 and not without.target.isnan().any() and not without.head[1:].isnan().any()
    wrong, expected = run(rejected(truth))
    assert wrong.drafted > 100 and wrong.accepted == 0
    assert expected.equals(without)
    mixed, blocks = run(partly_right(truth))
    assert 0 < mixed.accepted < mixed.drafted
    assert blocks.equals(expected)
    _, blocks = run(lambda given, drafts: drafts)
    assert blocks.equals(expected)


@pytest.mark.parametrize("name", CACHES)
def test_the_replay_of_a_preempted_answer_leaves_the_bits_of_its_steps(tmp_path: Path, name: str) -> None:
    """As the engine plans it: the prompt again, then all that was generated in one piece, then drafts go on."""
    pair, prompt, table = Pair(make_case(tmp_path, name)), random_prompt(50), random_table(8)
    before = answer(pair, prompt, table, 31, change=lambda given, drafts: [])
    known, blocks = [*prompt, *before.tokens[:30]], pair.saved(table, 79)
    pair.poison()
    pair.step([prompt_part(prompt, table, sampling=None, next_token=known[50], draft_from=0)])
    pair.step([], [generated(known[:75], table, 50, sampling=None, next_token=known[75], draft_from=51)])
    rest = generated(known, table, 75, draw=30, draft_from=76, num_proposals=NUM_DRAFTS)
    assert pair.step([], [rest]).token_ids == before.tokens[30:]
    pair.step([], [next_row(prompt, before.tokens, [], table)])
    after = pair.drafts
    assert pair.saved(table, 79).equals(blocks)
    pair.poison()
    answer(pair, prompt, table, 32, change=lambda given, drafts: [])
    assert pair.drafts == after


def test_drafts_behind_a_token_do_not_depend_on_how_it_became_known(tmp_path: Path) -> None:
    """One by one, or several in a step because they were drafted: the next drafts are the same."""
    folder = make_case(tmp_path, "llama")
    pair, prompt, table = Pair(folder), random_prompt(50), random_table(8)
    truth = alone(folder, prompt, 48)
    single = answer(pair, prompt, table, 30, change=lambda given, drafts: [])
    take_prompt(pair, prompt, table)
    given, change = truth[:1], partly_right(truth)
    while len(given) < 30:
        assert pair.drafts[0] == single.drafts[len(given) - 1]
        drafts = change(given, [])
        given = given + pair.step([], [next_row(prompt, given, drafts, table)]).token_ids


def test_sampled_answers_are_those_of_the_target_alone(tmp_path: Path) -> None:
    folder = make_case(tmp_path, "qwen3")
    pair, prompt = Pair(folder), random_prompt(33)
    for seed in range(3):
        warm = SamplingSpec(temperature=0.8, top_p=0.95, seed=seed)
        pair.poison()
        found = answer(pair, prompt, random_table(8), 40, sampling=warm)
        assert found.tokens[:40] == alone(folder, prompt, 40, warm)


# ------------------------------------------------------------------------------------------- a head that has learnt


def train_head(folder: Path, prompts: Sequence[Sequence[int]], count: int, *, steps: int = 200) -> None:
    """Teach a dense model's head the target's own greedy answers to prompts of one length, and write it back.

    Two drafts deep: its own state of a token stands in for the target's in the second pass.
    """
    torch.manual_seed(0)
    reference = Reference(folder)
    reference.model.requires_grad_(False)
    length = len(prompts[0])
    tokens = reference.go_on(torch.tensor(prompts), count)
    states = reference.states(tokens)
    optimizer = torch.optim.AdamW(reference.tensors.values(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        loss, before, shift = torch.zeros(()), states[:, :-1], 1
        for _depth in range(2):
            own = reference.head(tokens[:, shift:], before)
            # Position j of the head draws the token behind its own.
            first = max(0, length - 1 - shift)
            logits, truth = reference.logits(own)[:, first:-1], tokens[:, shift + first + 1 :]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), truth.flatten())
            before, shift = own[:, :-1], shift + 1
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    path = folder / "model.safetensors"
    learnt = {name: tensor.detach().clone() for name, tensor in reference.tensors.items()}
    save_file(load_file(path) | learnt, path, {"format": "pt"})


LEARNT = [random_prompt(40, seed=100 + number) for number in range(4)]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_case(tmp_path_factory.mktemp("learnt") / "model", "llama")
    train_head(folder, LEARNT, 60)
    return folder


def test_a_head_that_has_learnt_is_accepted_as_often_behind_restored_blocks(learnt: Path) -> None:
    pair, places = Pair(learnt), random_table(18)
    table, other = places[:9], places[9:]
    cold_rates, bare_rates = [], []
    for prompt in LEARNT:
        pair.poison()
        cold = answer(pair, prompt, table, 40)
        assert cold.tokens[:40] == alone(learnt, prompt, 40)
        blocks, end = pair.saved(table, 75), pair.saved(table, 40)
        for boundary in (16, 32):
            pair.poison()
            pair.put_back(other, end.first(boundary // BLOCK))
            assert answer(pair, prompt, other, 40, restored=boundary) == cold
            assert pair.saved(other, 75).equals(blocks)
        pair.poison()
        pair.put_back(other, Saved(end.target, torch.zeros_like(end.head)))
        bare = answer(pair, prompt, other, 40, restored=32)
        assert bare.tokens[:40] == cold.tokens[:40], "drafts change nothing but the number of steps"
        cold_rates.append(cold.accept_rate)
        bare_rates.append(bare.accept_rate)
    assert sum(cold_rates) / len(LEARNT) > 0.4
    assert sum(bare_rates) < 0.9 * sum(cold_rates)


# ------------------------------------------------------------------------------------------- what is refused


def load(folder: Path, **settings: Any) -> DraftModel | None:
    more: dict[str, Any] = {"num_speculative_tokens": 2, "speculative_algorithm": "mtp"} | settings
    config = EngineConfig(model=str(folder), num_threads=2, **more)
    return DraftModel.load(config, ModelRunner(config, progress=False), progress=False)


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.eh_proj\.weight or mtp\.fc\.weight") as caught:
        load(make(tmp_path, "llama"))
    assert caught.value.name == "speculative_algorithm"


@pytest.mark.parametrize("name", ["eh_proj", "enorm", "self_attn.k_proj", "mlp.down_proj", "shared_head.norm"])
@pytest.mark.parametrize("wrong", ["missing", "misshapen"])
def test_a_wrong_tensor_of_the_head_is_named(tmp_path: Path, wrong: str, name: str) -> None:
    folder = make_case(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    full = f"model.layers.2.{name}.weight"
    tensor = tensors.pop(full)
    if wrong == "misshapen":
        tensors[full] = tensor[:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=name) as caught:
        load(folder)
    assert caught.value.name == ("speculative_algorithm" if (wrong, name) == ("missing", "eh_proj") else "model")


def test_transformers_modelling_code_has_no_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers' modelling code") as caught:
        load(make_case(tmp_path, "llama"), model_impl="hf")
    assert caught.value.name == "speculative_algorithm"


def test_without_drafts_or_with_lookup_no_head_is_looked_for(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama")
    assert load(folder, num_speculative_tokens=0) is None
    assert load(folder, speculative_algorithm="ngram") is None
