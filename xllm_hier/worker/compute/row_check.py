"""The check at load that native kernels are right, and that rows have the same bits in any number of rows, any split of
a prompt and on any threads.

It runs the very kernels of the model with its own weights; where one fails, the model is loaded with torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ...models.decoder import Decoder
from ...models.linear import Fused, Linear
from ...models.row_kernels import RowKernels
from .attention import Span
from .native_attention import NativeAttention

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 255, 256)
_WIDE = 16384  # outputs of a linear (a vocabulary's) of which fewer rows are tried: all its panels run one kernel
_TOKENS, _BLOCK = 600, 8
_CUTS = ((0, 1), (0, 255), (255, 258), (256, 257), (250, 600), (511, 513), (599, 600))


@torch.inference_mode()
def find_difference(model: Decoder, attention: NativeAttention) -> str:
    """A kernel that is wrong, or a part whose rows depend on others or on threads, in words; empty: there is none."""
    if wrong := find_error(attention.kernels, model.layers[0].attention.linears()[0].dtype):
        return f"{wrong} are wrong"
    seen = set()
    for linear in [*model.linears(), *model.grouped_linears(), model.head]:
        if linear.shape_key in seen:
            continue
        seen.add(linear.shape_key)
        if not _linear_is_invariant(linear):
            return f"rows of the linear {linear.shape_key} differ"
    windows = [window for window in dict.fromkeys(attention.windows) if not attention_is_invariant(attention, window)]
    return f"rows of attention with window {windows[0]} differ" if windows else ""


def find_error(kernels: RowKernels, dtype: torch.dtype) -> str:
    """The name of a kernel whose results are not near to exact ones; empty when all are.

    A machine may have instructions that no test has run on.
    """
    near = {torch.float32: 1e-4, torch.float16: 5e-3}.get(dtype, 4e-2)

    def differs(found: torch.Tensor, exact: torch.Tensor) -> bool:
        return not torch.allclose(found.double(), exact, rtol=near, atol=near)

    weight, x, other = (_random(*shape, dtype=dtype) for shape in ((72, 96), (21, 96), (21, 72)))
    weight *= 96**-0.5
    exact = x.double() @ weight.double().T
    fused: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda y: y,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "add": lambda y: y + other.double(),
        "mul": lambda y: y * other.double(),
    }
    for name, finish in fused.items():
        product = kernels.product(weight, None, name)
        if differs(product(x, other if name in ("add", "mul") else None), finish(exact)):
            return f"products with {name}"
    if differs(kernels.norm(x, torch.ones(96), 1e-6), F.rms_norm(x.double(), (96,), eps=1e-6)):
        return "norms"
    turned, angle = torch.empty(21, 3, 32, dtype=dtype), torch.full((21, 1, 16), 0.5, dtype=dtype)
    kernels.rotate(x.view(21, 3, 32), angle.cos(), angle.sin(), turned)
    a, b = x.double().view(21, 3, 2, 16).unbind(2)
    cos, sin = angle.double().cos(), angle.double().sin()
    if differs(turned, torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)):
        return "rotations"
    return "attended rows" if _attends_wrong(kernels, dtype, near) else ""


def _attends_wrong(kernels: RowKernels, dtype: torch.dtype, near: float) -> bool:
    tokens, heads, kv_heads, width = 300, 4, 2, 40
    cache, q = _random(38, 2, 8, kv_heads, width, dtype=dtype), _random(tokens, heads, width, dtype=dtype)
    found, table = torch.zeros_like(q), np.arange(38, dtype=np.int32)
    spans = np.array([[0, 0, tokens, 0, 0]], np.int64)
    kernels.attention(q, cache, found, spans, table, scale=width**-0.5, window=None, first_position=0)
    keys, values = (
        part.double().transpose(0, 1)[:, :tokens].repeat_interleave(heads // kv_heads, 0)
        for part in cache.transpose(1, 2).flatten(0, 1).unbind(1)
    )
    exact = F.scaled_dot_product_attention(q.double().transpose(0, 1), keys, values, is_causal=True).transpose(0, 1)
    return not torch.allclose(found.double(), exact, rtol=near, atol=near)


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
