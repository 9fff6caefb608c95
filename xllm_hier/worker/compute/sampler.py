"""Choosing tokens: greedy or drawn, each draw a function of (seed, number of the draw) and of that row's logits alone.

A draw takes the token whose probability, divided by an exponential random number of its own, is the largest: that
number is a function of (seed, draw, token), so two models that give nearly the same distribution draw mostly the same
token: with probability (1 - d) / (1 + d) or more when the distributions differ by d (total variation). A draft model
that draws with its target's numbers is therefore often right, and the target's answer does not depend on what was
drafted (drafter-invariant speculative decoding, https://arxiv.org/abs/2408.07978).

Filters work on the distribution after temperature, in vLLM's order: min_p, top_k, then top_p of what is left. Log
probabilities are of the raw distribution.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from ...request_messages import SamplingSpec, TokenLogprob

# top_p seldom needs more than this many of the most likely tokens; sorting a whole vocabulary takes milliseconds.
_FIRST_LOOK = 1024
# Below this the most likely token is all but certain; dividing by much less leaves the numbers' range.
_LEAST_TEMPERATURE = 1e-5
_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, specs: Sequence[SamplingSpec], draws: Sequence[int]) -> list[int]:
    """One token per row of fp32 `logits` [rows, vocab]; `draws[i]` counts the draws of row i's request before this."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()  # of equal logits the lowest token id
    for row, (spec, draw) in enumerate(zip(specs, draws, strict=True)):
        if spec.temperature >= _LEAST_TEMPERATURE:
            chosen[row] = _draw(logits[row], spec, draw)
    return chosen


def uniform(seed: int, draw: int, token_ids: torch.Tensor) -> torch.Tensor:
    """For each of int64 `token_ids` the number in (0, 1), fp64, of draw `draw` of a request with this seed; equal on
    every machine and device (SplitMix64 from a digest of seed and draw)."""
    seed_bytes = struct.pack("<Q", seed & _MASK)
    digest = hashlib.blake2b(seed_bytes + struct.pack("<Q", draw), digest_size=8, person=b"xllm-draw-v2")
    state = _signed(int.from_bytes(digest.digest(), "little"))
    mixed = (token_ids + 1) * _signed(0x9E3779B97F4A7C15) + state
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed = _shifted(mixed ^ _shifted(mixed, 31), 12)  # 52 bits, so that half of one is exact: never 0, never 1
    return (mixed.double() + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit number: torch multiplies and adds those as if they were unsigned."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right, where torch's keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Log probability, rank and `counts[i]` most likely tokens for each row's token; None where the count is None.

    `logits` fp32 [rows, vocab]. Rank 1 is the most likely token; equal ones share the better rank.
    """
    if all(count is None for count in counts):
        return [None] * len(counts)
    result: list[TokenLogprob | None] = []
    for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True)):
        if count is None:
            result.append(None)
            continue
        logprobs = logits[row].log_softmax(dim=-1)
        own = logprobs[token_id]
        top = logprobs.topk(min(count, len(logprobs))) if count else None
        result.append(
            TokenLogprob(
                token_id=token_id,
                logprob=float(own),
                rank=int((logprobs > own).sum()) + 1,
                top_ids=top.indices.tolist() if top else [],
                top_logprobs=top.values.tolist() if top else [],
            )
        )
    return result


def _draw(logits: torch.Tensor, spec: SamplingSpec, draw: int) -> int:
    """One token of the filtered distribution of one row; of a row without one, argmax."""
    best = logits.max()
    if spec.temperature < _LEAST_TEMPERATURE or not torch.isfinite(best):
        return int(logits.argmax())
    probabilities = ((logits.double() - best) / spec.temperature).softmax(dim=-1)
    kept, ids = _filter(probabilities, spec)
    exponential = -torch.log(uniform(spec.seed, draw, ids))
    return int(ids[int((kept / exponential).argmax())])


def _filter(probabilities: torch.Tensor, spec: SamplingSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the tokens that pass; never empty, as the most likely token always does."""
    vocab = len(probabilities)
    floor = spec.min_p * probabilities.max()
    if spec.top_p >= 1.0 and not 0 < spec.top_k < vocab:
        ids = (probabilities >= floor).nonzero()[:, 0]
        return probabilities[ids], ids
    limit = spec.top_k if 0 < spec.top_k < vocab else vocab
    look = limit if spec.top_p >= 1.0 else min(limit, _FIRST_LOOK)
    while True:
        kept, ids = probabilities.topk(look)
        passing = int((kept >= floor).sum())  # what min_p removes is the tail of a sorted list
        if spec.top_p >= 1.0:
            return kept[:passing], ids[:passing]
        total = _mass(probabilities, floor, limit, kept[:passing], passing < look)
        before = kept[:passing].cumsum(dim=0) - kept[:passing]  # a token stays while those before it lack the mass
        staying = max(1, int((before < spec.top_p * total).sum()))
        if staying < passing or passing < look or look == limit:
            return kept[:staying], ids[:staying]
        look = min(limit, look * 16)


def _mass(
    probabilities: torch.Tensor, floor: torch.Tensor, limit: int, kept: torch.Tensor, complete: bool
) -> torch.Tensor:
    """The whole of which top_p is a share: the sum of all that min_p and top_k let through."""
    if complete or len(kept) == limit:
        return kept.sum()
    passing = probabilities[probabilities >= floor]
    return passing.topk(limit).values.sum() if limit < len(passing) else passing.sum()
