"""The C++ extension of row kernels (native/kernels); `models/row_kernels.py` is its face. Addresses are of tensors."""

from typing import Any

class Packed:
    nbytes: int
    pairs: bool

def open(libtorch: str, instructions: str = "", own_bf16: bool = True) -> dict[str, Any]: ...
def pack(weights: int, count: int, outputs: int, inputs: int, type: int, bias: int) -> Packed: ...
def fill(packed: Packed, index: int, weights: int) -> None: ...
def linear(
    weight: Packed,
    rows: int,
    x: int,
    x_stride: int,
    x_step: int,
    fused: int,
    other: int,
    other_stride: int,
    other_step: int,
    out: int,
    out_stride: int,
    out_step: int,
    out_type: int,
    threads: int,
    offsets: Any,
) -> None: ...
def attention(
    type: int,
    cache: int,
    blocks: int,
    rows: int,
    tensors: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    heads: int,
    q: int,
    q_stride: int,
    out: int,
    out_stride: int,
    scale: float,
    window: int,
    first_position: int,
    spans: Any,
    tables: Any,
    threads: int,
) -> None: ...
def norm(
    type: int,
    rows: int,
    groups: int,
    width: int,
    x: int,
    x_stride: int,
    weight: int,
    weight_step: int,
    eps: float,
    out: int,
    out_stride: int,
    threads: int,
) -> None: ...
def rotate(
    type: int,
    rows: int,
    heads: int,
    head_dim: int,
    half: int,
    x: int,
    x_stride: int,
    x_step: int,
    cos: int,
    sin: int,
    out: int,
    out_stride: int,
    out_step: int,
    threads: int,
) -> None: ...
