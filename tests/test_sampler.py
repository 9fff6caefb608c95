"""Token choice: greedy, filters, and draws that depend on seed and number only."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from xllm_hier.request_messages import SamplingSpec
from xllm_hier.worker.compute.sampler import _draw, sample, token_logprobs, uniform

GOLDEN = [0.66004496448, 0.804296693587, 0.868698937512]
GOLDEN_DRAWS = [12, 57, 12, 19, 46, 19, 12, 57, 12, 19, 38, 19, 12, 57, 12, 19, 38, 19, 12, 57, 12, 19, 38, 19]
# Probabilities 0.5, 0.25, 0.125, 0.125 in a scattered order: token 3 is the most likely, then 1, then 0 and 2.
LOGITS = torch.tensor([0.125, 0.25, 0.125, 0.5]).log()


def tokens_drawn(logits: torch.Tensor, count: int = 400, **spec) -> Counter[int]:
    rows = logits.expand(count, -1)
    return Counter(sample(rows, [SamplingSpec(**{"temperature": 1.0} | spec)] * count, range(count)))


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert sample(logits, [SamplingSpec()] * 2, [0, 0]) == [1, 0]


def test_draws_follow_the_distribution():
    drawn = tokens_drawn(LOGITS, 4000)
    for token, probability in enumerate(LOGITS.exp().tolist()):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(drawn[token] - 4000 * probability) < 5 * deviation


def test_temperature_sharpens_before_the_filters():
    """At temperature 0.5 probabilities are squared: 4/5.5 for token 3 alone passes top_p 0.7, at 1.0 it does not."""
    assert set(tokens_drawn(LOGITS, temperature=0.5, top_p=0.7)) == {3}
    assert set(tokens_drawn(LOGITS, temperature=1.0, top_p=0.7)) == {3, 1}


@pytest.mark.parametrize(
    ("spec", "passing"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.51}, {3, 1}),
        ({"min_p": 0.49}, {3, 1}),
        ({"min_p": 0.6}, {3}),
        ({"min_p": 0.3, "top_p": 0.8}, {3, 1}),
        ({"top_k": 2, "top_p": 0.6}, {3}),  # of what top_k left, token 3 has two thirds
        ({"top_k": 2, "top_p": 0.7}, {3, 1}),
        ({"min_p": 0.3, "top_p": 0.6}, {3}),  # of what min_p left, too
    ],
)
def test_filters_let_through_what_they_say(spec, passing):
    assert set(tokens_drawn(LOGITS, **spec)) == passing


def test_top_p_of_a_flat_distribution_needs_more_than_the_first_look():
    drawn = tokens_drawn(torch.arange(5000) * -1e-6, 200, top_p=0.6)
    assert 2500 < max(drawn) < 3010


@pytest.mark.parametrize("spec", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_a_draw_depends_on_seed_and_number_only(spec):
    torch.manual_seed(0)
    logits = torch.randn(3, 200)
    mine = SamplingSpec(temperature=0.8, seed=42, **spec)
    alone = [sample(logits[:1], [mine], [draw])[0] for draw in range(30)]
    other = SamplingSpec(temperature=1.3, seed=7)
    crowd = [sample(logits[[1, 0, 2]], [other, mine, SamplingSpec()], [3, draw, 9])[1] for draw in reversed(range(30))]
    assert alone == crowd[::-1]
    assert len(set(alone)) > 5


EXTREME_ROWS = {
    "random": torch.linspace(-9, 9, 3000)[torch.randperm(3000, generator=torch.Generator().manual_seed(1))],
    "flat": torch.zeros(3000),
    "huge": torch.tensor([-3.4e38, 3.4e38, 0.0, 3.3e38]),
    "tiny": torch.tensor([1e-45, -1e-45, 0.0]),
    "masked": torch.tensor([-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]),
    "one left": torch.tensor([-torch.inf, -torch.inf, -3.4e38]),
    "single": torch.tensor([5.0]),
}


@pytest.mark.parametrize("row", EXTREME_ROWS.values(), ids=EXTREME_ROWS.keys())
def test_every_accepted_spec_draws_a_possible_token(row):
    for temperature, top_p, min_p, top_k in itertools.product(
        (5e-324, 1e-310, 1e-30, 9e-6, 1e-5, 1e-3, 1.0, 2.0),
        (5e-324, 1e-12, 0.5, 1 - 2**-53, 1.0),
        (0.0, 5e-324, 0.5, 1.0),
        (0, 1, 2, 2999, 1 << 30),
    ):
        spec = SamplingSpec(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
        for draw in range(3):
            token = _draw(row, spec, draw)
            assert row[token] > -torch.inf, (spec, draw)
            if temperature < 1e-5 or min_p == 1 or top_k == 1 or top_p < 1e-9:
                assert row[token] >= row.max() - 1e-6, (spec, draw)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 9.9e-6])
def test_temperatures_close_to_zero_are_greedy(temperature):
    """Division by them overflows, and one such request failed the whole step."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.9999]])
    assert sample(logits, [SamplingSpec(temperature=temperature, seed=3)] * 2, [0, 5]) == [1, 0]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_does_not_fail_the_others(broken):
    logits = torch.stack([torch.full((4,), broken), LOGITS])
    token, other = sample(logits, [SamplingSpec(temperature=1.0), SamplingSpec(temperature=1.0, top_k=1)], [0, 0])
    assert 0 <= token < 4
    assert other == 3


def test_draws_never_change():
    """Golden, as the numbers are: a request that goes on elsewhere keeps its text."""
    logits = torch.linspace(-3, 3, 64)[torch.arange(64) * 37 % 64]
    drawn = [
        sample(logits[None], [SamplingSpec(temperature=0.8, seed=42, **spec)], [draw])[0]
        for spec in ({}, {"top_k": 8}, {"top_p": 0.7}, {"min_p": 0.2})
        for draw in range(6)
    ]
    assert drawn == GOLDEN_DRAWS


def test_uniform_numbers_never_change():
    """Golden: a resumed request on another machine, or a later version, must draw the same."""
    ids = torch.arange(40)
    assert [round(number, 12) for number in uniform(0, 1, ids[:3]).tolist()] == GOLDEN
    numbers = torch.stack([uniform(seed, draw, ids) for seed in range(40) for draw in range(40)])
    assert len(numbers.unique()) == 64_000
    assert 0 < numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(numbers.var() - 1 / 12) < 0.005
    assert torch.equal(uniform(-1, 0, ids), uniform((1 << 64) - 1, 0, ids))


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
def test_two_models_that_draw_with_the_same_numbers_mostly_draw_the_same(noise):
    """Both are right in distribution, and equal at least as often as Daliri, Musco and Suresh (2024) prove."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(50, generator=generator) * 1.5
    draft = target + torch.randn(50, generator=generator) * noise
    count = 6000
    spec = [SamplingSpec(temperature=1.0, seed=9)] * count
    ours, theirs = (sample(logits.expand(count, -1), spec, range(count)) for logits in (target, draft))
    p, q = target.double().softmax(0), draft.double().softmax(0)
    distance = float((p - q).abs().sum() / 2)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True)) / count
    assert equal > (1 - distance) / (1 + distance) - 0.03
    assert equal > 2 * float((p * q).sum())
    for drawn, probabilities in ((ours, p), (theirs, q)):
        found = torch.bincount(torch.tensor(drawn), minlength=50)
        chi_square = float(((found - count * probabilities) ** 2 / (count * probabilities)).sum())
        assert chi_square < 49 + 5 * math.sqrt(2 * 49)


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.stack([LOGITS, LOGITS + 5.0, LOGITS])
    first, second, third = token_logprobs(logits, [1, 2, 3], [2, 0, None])
    assert third is None
    assert (first.token_id, first.rank, first.top_ids) == (1, 2, [3, 1])
    assert first.logprob == pytest.approx(math.log(0.25))
    assert first.top_logprobs == pytest.approx([math.log(0.5), math.log(0.25)])
    assert (second.rank, second.top_ids, second.top_logprobs) == (3, [], [])
    assert second.logprob == pytest.approx(math.log(0.125))
