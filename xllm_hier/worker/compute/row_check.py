"""The check at load that rows have the same bits in any number of rows, any split of a prompt and any threads.

It runs the very kernels of the model with its own weights; where one fails, the model is loaded with torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...models.decoder import Decoder
from ...models.linear import Fused, Linear
from .attention import Span
from .native_attention import NativeAttention

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 255, 256)
_WIDE = 16384  # outputs of a linear (a vocabulary's) of which fewer rows are tried: all its panels run one kernel
_TOKENS, _BLOCK = 600, 8
_CUTS = ((0, 1), (0, 255), (255, 258), (256, 257), (250, 600), (511, 513), (599, 600))


@torch.inference_mode()
def find_difference(model: Decoder, attention: NativeAttention) -> str:
    """The name of a part whose rows depend on others or on threads; empty when there is none."""
    seen = set()
    for linear in [*model.linears(), *model.grouped_linears(), model.head]:
        if linear.shape_key in seen:
            continue
        seen.add(linear.shape_key)
        if not _linear_is_invariant(linear):
            return f"the linear {linear.shape_key}"
    windows = [window for window in dict.fromkeys(attention.windows) if not attention_is_invariant(attention, window)]
    return f"attention with window {windows[0]}" if windows else ""


def _linear_is_invariant(linear: Linear) -> bool:
    counts = ROWS if linear.out_features <= _WIDE else tuple(rows for rows in ROWS if rows <= 33)
    most = max(counts)
    x = _random(most, linear.in_features, dtype=linear.dtype)
    with_other = linear.fused in (Fused.ADD, Fused.MUL)
    other = _random(most, linear.out_features, dtype=linear.dtype) if with_other else None

    def product(start: int, stop: int) -> torch.Tensor:
        return linear.one_tile(x[start:stop], other[start:stop] if other is not None else None)

    whole = product(0, most)
    cuts = [(most - rows, most) for rows in counts[:-1]]
    return all(torch.equal(product(*cut), whole[slice(*cut)]) for cut in cuts) and torch.equal(
        _on_one_thread(lambda: product(0, 33)), whole[:33]
    )


def attention_is_invariant(attention: NativeAttention, window: int | None) -> bool:
    """Any cut of a prompt gives its rows the bits of the whole, over a cache of random keys and values."""
    first, kind, dtype = attention.first_position, type(attention), attention.dtype
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
    trial = kind(
        kernels=attention.kernels,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        dtype=dtype,
        device=attention.device,
        block_size=_BLOCK,
        windows=(window,),
        first_position=first,
    )
    blocks = -(-_TOKENS // _BLOCK)
    trial.bind([_random(blocks, kind.tensors, _BLOCK, kv_heads, width, dtype=dtype)])
    q, table = _random(_TOKENS, heads, width, dtype=dtype), np.arange(blocks, dtype=np.int32)
    unused = q[:, :kv_heads]

    def attended(start: int, stop: int) -> torch.Tensor:
        trial.prepare([Span(start, stop, 0, table, stop, start)], [], stop - start)
        return trial(0, q[start:stop], unused[start:stop], unused[start:stop], width**-0.5).clone()

    whole = attended(first, _TOKENS)
    cuts = [(max(first, start), stop) for start, stop in _CUTS if stop > first]
    return all(torch.equal(attended(*cut), whole[cut[0] - first : cut[1] - first]) for cut in cuts) and torch.equal(
        _on_one_thread(lambda: attended(first, _TOKENS)), whole
    )


def _on_one_thread(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return compute()
    finally:
        torch.set_num_threads(threads)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randn(shape, generator=generator).to(dtype)
