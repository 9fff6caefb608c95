"""The CPU's native kernels, whose rows do not depend on their neighbours: a small face over the C++ extension.

A row's bits are the same for any number of rows, any threads and any place in a step (docs/native.md). The torch code
in `linear`, `parts`, `rope` and the worker's `attention` is their reference, and runs where they are not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError

log = logging.getLogger("xllm.worker")

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FUSED = {name: number for number, name in enumerate(("none", "silu", "gelu", "gelu_tanh", "sigmoid", "add", "mul"))}


@dataclass(frozen=True)
class RowKernels:
    """The kernels as this machine has them.

    `instructions`: avx2 or avx512. `own_bf16`: products of bfloat16 are the machine's own (AVX512_BF16, AMX); elsewhere
    16-bit numbers are widened, and multiplied in fp32.
    """

    instructions: str
    own_bf16: bool

    @property
    def name(self) -> str:
        """For logs and the numerics id."""
        return f"{self.instructions}{'-bf16' if self.own_bf16 else ''}"

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, fused: str, out_dtype: torch.dtype | None = None
    ) -> Product:
        """fused(x W^T + b [, other]) for weight [out, in], which is packed and not needed any more.

        The answer takes x [rows, in] and, with `add` and `mul`, other [rows, out], of the weight's dtype, and gives
        [rows, out] of `out_dtype` (None: the weight's). It raises ValueError for other shapes or dtypes.
        """
        outputs, inputs = weight.shape
        packed, dtype = self._pack(weight[None], bias), weight.dtype
        out_dtype = out_dtype or dtype

        def run(x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
            _check(x, (inputs,), dtype, "x")
            _check_other(other, fused, len(x), outputs, dtype)
            return _multiply(packed, x, torch.empty(len(x), outputs, dtype=out_dtype), fused=fused, other=other)

        return run

    def product_per_head(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rows [rows, heads, in] to [rows, heads, out] for weight [heads, out, in]; errors as of `product`."""
        heads, outputs, inputs = weight.shape
        packed, dtype = self._pack(weight, None), weight.dtype

        def run(x: torch.Tensor) -> torch.Tensor:
            _check(x, (heads, inputs), dtype, "x")
            return _multiply(packed, x, torch.empty(len(x), heads, outputs, dtype=dtype))

        return run

    def grouped_product(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, fused: str
    ) -> GroupedProduct:
        """A product of `experts` matrices [outputs, inputs], which `fill` brings one by one."""
        packed = _library().pack(0, experts, outputs, inputs, _TYPES[dtype], 0)
        return GroupedProduct(packed, experts, outputs, inputs, dtype, fused)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        if weight.dtype not in _TYPES or weight.device.type != "cpu":
            raise ValueError(f"the weight is {weight.dtype} on {weight.device}; allowed: fp32, bf16, fp16 on cpu")
        weight, (count, outputs, inputs) = weight.contiguous(), weight.shape
        wide = bias.float().contiguous() if bias is not None else None
        if wide is not None and wide.shape != (outputs,):
            raise ValueError(f"the bias is {tuple(wide.shape)}, not ({outputs},)")
        place = wide.data_ptr() if wide is not None else 0
        return _library().pack(weight.data_ptr(), count, outputs, inputs, _TYPES[weight.dtype], place)

    def attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        spans: NDArray[np.int64],
        tables: NDArray[np.int32],
        *,
        scale: float,
        window: int | None,
        first_position: int,
    ) -> None:
        """Attend all rows of `spans` [n, 5] (row, start, stop, wanted_from, first entry in `tables`) over a cache
        [blocks, tensors, block_size, kv_heads, head_dim]; q and out are [rows, heads, head_dim].

        Rows before `wanted_from` may be left out. Raises ValueError for shapes, dtypes or spans that do not fit.
        """
        blocks, tensors, block_size, kv_heads, head_dim = cache.shape
        heads = q.shape[1]
        _check(q, (heads, head_dim), cache.dtype, "q")
        _check(out, (heads, head_dim), cache.dtype, "out")
        if not cache.is_contiguous() or q.stride(1) != head_dim or out.stride(1) != head_dim:
            raise ValueError("the cache and the heads of a row must be contiguous")
        _library().attention(
            _TYPES[cache.dtype],
            cache.data_ptr(),
            blocks,
            min(len(q), len(out)),
            tensors,
            block_size,
            kv_heads,
            head_dim,
            heads,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            scale,
            window or 0,
            first_position,
            spans,
            tables,
            torch.get_num_threads(),
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm over the last dimension of x [rows, width] or [rows, vectors, width], as `rms_norm`.

        `weight` is fp32, [width] or one for each vector [vectors, width]; a row's vectors lie side by side.
        """
        groups, width = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        _check(x, tuple(x.shape[1:]), x.dtype, "x")
        if weight.dtype is not torch.float32 or weight.shape not in ((width,), (groups, width)):
            raise ValueError(f"the norm's weight is {list(weight.shape)} of {weight.dtype}, not fp32 [{width}]")
        if groups > 1 and x.stride(1) != width:
            x = x.contiguous()
        out, weight = torch.empty(x.shape, dtype=x.dtype), weight.contiguous()
        _library().norm(
            _TYPES[x.dtype],
            len(x),
            groups,
            width,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            width if weight.dim() == 2 else 0,
            eps,
            out.data_ptr(),
            groups * width,
            torch.get_num_threads(),
        )
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [rows, heads, width], rotated by its position's angles, to `out`; columns without an angle stay.

        cos and sin are [rows, 1, half] of x's dtype. Products and sums are rounded once.
        """
        rows, heads, width = x.shape
        half = cos.shape[-1]
        _check(x, (heads, width), x.dtype, "x")
        _check(out, (heads, width), x.dtype, "out")
        for name, part in (("cos", cos), ("sin", sin)):
            _check(part, (1, half), x.dtype, name)
        if len(out) != rows or cos.shape != sin.shape or len(cos) != rows or 2 * half > width:
            raise ValueError(
                f"out has {len(out)} rows, cos {list(cos.shape)}, sin {list(sin.shape)}, x {list(x.shape)}"
            )
        cos, sin = cos.contiguous(), sin.contiguous()
        _library().rotate(
            _TYPES[x.dtype],
            rows,
            heads,
            width,
            half,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            torch.get_num_threads(),
        )


@dataclass(frozen=True)
class GroupedProduct:
    """fused(x W_e^T [, other]) for rows that lie sorted by the expert e whose matrix they take, in one call."""

    packed: object
    experts: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    fused: str

    def fill(self, expert: int, weight: torch.Tensor) -> None:
        """Pack this expert's weight [outputs, inputs]."""
        if weight.shape != (self.outputs, self.inputs) or weight.dtype is not self.dtype:
            raise ValueError(f"a weight is {list(weight.shape)} of {weight.dtype}, not [{self.outputs}, {self.inputs}]")
        weight = weight.contiguous()  # named: it must live as long as the call
        _library().fill(self.packed, expert, weight.data_ptr())

    def __call__(self, x: torch.Tensor, sizes: Sequence[int], other: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, inputs], of which each expert takes the next `sizes[e]` rows, to [rows, outputs].

        Raises ValueError for shapes, dtypes or sizes that do not fit.
        """
        _check(x, (self.inputs,), self.dtype, "x")
        _check_other(other, self.fused, len(x), self.outputs, self.dtype)
        offsets = np.cumsum([0, *sizes], dtype=np.int64)
        out = torch.empty(len(x), self.outputs, dtype=self.dtype)
        return _multiply(self.packed, x, out, fused=self.fused, other=other, offsets=offsets)


def open_kernels(wanted: str, instructions: str = "", *, own_bf16: bool = True) -> RowKernels | None:
    """The kernels, or None for torch's: `wanted` is a value of `--cpu_kernels`.

    `instructions` and `own_bf16` False ask for less than the machine has.

    Raises:
        ConfigError: `native` is wanted, and the extension is not built or this machine or torch cannot run it.
    """
    if wanted == "torch":
        return None
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        used = _library().open(str(libtorch), instructions, own_bf16)
    except (ImportError, RuntimeError) as error:
        if wanted == "native":
            raise ConfigError("cpu_kernels", "native", f"auto | torch on this machine ({error})") from error
        log.warning("computing with torch's CPU kernels: %s", error)
        return None
    return RowKernels(str(used["instructions"]), bool(used["bf16"]))


def _library() -> ModuleType:
    from .. import _cpu_kernels

    return _cpu_kernels


def _check(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if x.shape[1:] != shape or x.dtype is not dtype or x.device.type != "cpu":
        allowed = f"[rows, {', '.join(map(str, shape))}] of {dtype} on cpu"
        raise ValueError(f"{name} is {list(x.shape)} of {x.dtype} on {x.device}, not {allowed}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the columns of {name} are not side by side")


def _check_other(other: torch.Tensor | None, fused: str, rows: int, outputs: int, dtype: torch.dtype) -> None:
    takes = fused in ("add", "mul")
    if (other is not None) is not takes:
        raise ValueError(f"a product with {fused} takes {'one' if takes else 'no'} other operand")
    if other is not None:
        _check(other, (outputs,), dtype, "other")
        if len(other) != rows:
            raise ValueError(f"other has {len(other)} rows, x {rows}")


def _multiply(
    packed: object,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    fused: str = "none",
    other: torch.Tensor | None = None,
    offsets: NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """`out`, written: rows, or rows of several matrices side by side; with `offsets` each matrix has its own rows."""
    place, stride = (other.data_ptr(), other.stride(0)) if other is not None else (0, 0)
    _library().linear(
        packed,
        len(x),
        x.data_ptr(),
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        _FUSED[fused],
        place,
        stride,
        0,
        out.data_ptr(),
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        _TYPES[out.dtype],
        torch.get_num_threads(),
        offsets,
    )
    return out
