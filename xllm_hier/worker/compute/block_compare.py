"""Comparing device blocks that ought to hold the same: for the truth audit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...plans import DIFFERENT, EQUAL, ROUNDING
from ..tiers.cache_domain import TORCH_DTYPES, BlockCache

# Of the largest value in a block: several times what another order of sums makes of 16 bit numbers in deep layers.
_TOLERANCE = 0.05


def compare_blocks(cache: BlockCache, first: Sequence[int], second: Sequence[int]) -> bytes:
    """For each pair of blocks EQUAL, ROUNDING or DIFFERENT, over all layers of `cache`."""
    verdicts = [EQUAL] * len(first)
    dtype = TORCH_DTYPES[cache.layout.tensors[0].dtype]
    for layer in cache.device:
        for pair, (one, other) in enumerate(zip(first, second, strict=True)):
            if not torch.equal(layer[one], layer[other]):
                a, b = (layer[block].view(dtype).float() for block in (one, other))
                near = bool(((a - b).abs().max() <= _TOLERANCE * b.abs().max()).item())  # NaN is near to nothing
                verdicts[pair] = max(verdicts[pair], ROUNDING if near else DIFFERENT)
    return bytes(verdicts)
