"""Native kernels of the CPU: a row's bits depend on what it is made of and on nothing else; bad calls are errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xllm_hier.models.linear import Fused, Linear
from xllm_hier.models.parts import rms_norm
from xllm_hier.models.rope import rotate
from xllm_hier.models.row_kernels import RowKernels, open_kernels
from xllm_hier.worker.compute.attention import Span
from xllm_hier.worker.compute.native_attention import NativeAttention, NativeLatentAttention

KERNELS = open_kernels("auto")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 63, 64, 65, 100, 255, 256)

pytestmark = pytest.mark.skipif(KERNELS is None, reason="this machine has no AVX2, or the extension is not built")


@pytest.fixture(params=["own", "widened"])
def kernels(request: pytest.FixtureRequest) -> Iterator[RowKernels]:
    """Both ways to multiply 16-bit numbers, where the machine has two."""
    found = open_kernels("native", own_bf16=request.param == "own")
    assert found is not None
    if request.param == "own" and not found.own_bf16:
        pytest.skip("this machine multiplies no bfloat16")
    yield found
    open_kernels("native")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("fused", list(Fused))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 576), (100, 77), (64, 1536)])
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(kernels, outputs, inputs, dtype, fused) -> None:
    weight, bias = (random(outputs, inputs, seed=1) * inputs**-0.5).to(dtype), random(outputs, seed=2).to(dtype)
    x, other = random(320, inputs, seed=3).to(dtype), random(320, outputs, seed=4).to(dtype)
    product = kernels.product(weight, bias, fused.value)
    two = fused in (Fused.ADD, Fused.MUL)
    whole = product(x, other if two else None)
    for rows in ROWS:
        for start in {0, 5, 320 - rows} if rows <= 315 else {0}:
            part = slice(start, start + rows)
            assert torch.equal(product(x[part], other[part] if two else None), whole[part])
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(product(x, other if two else None), whole)


@pytest.mark.parametrize("fused", list(Fused))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_as_near_to_the_exact_one_as_torchs(kernels, dtype, fused) -> None:
    inputs, outputs = 2816, 200
    weight, bias = (random(outputs, inputs, seed=1) * inputs**-0.5).to(dtype), random(outputs, seed=2).to(dtype)
    x, other = random(64, inputs, seed=3).to(dtype), random(64, outputs, seed=4).to(dtype)
    two = fused in (Fused.ADD, Fused.MUL)
    exact = Linear(weight.double(), bias.double(), fused).one_tile(x.double(), other.double() if two else None)
    errors = [
        float((linear.one_tile(x, other if two else None).double() - exact).abs().mean())
        for linear in (Linear(weight, bias, fused, kernels=kernels), Linear(weight, bias, fused))
    ]
    assert errors[0] <= 1.25 * errors[1] + 1e-9


def test_logits_leave_a_product_of_16_bits_unrounded(kernels) -> None:
    weight, x = random(40, 64, seed=1).to(torch.bfloat16), random(3, 64, seed=2).to(torch.bfloat16)
    y = kernels.product(weight, None, "none", torch.float32)(x, None)
    assert y.dtype is torch.float32
    assert torch.allclose(y.double(), x.double() @ weight.double().T, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_its_own_matrix(kernels, dtype) -> None:
    weight, x = random(4, 24, 40, seed=1).to(dtype), random(70, 4, 64, seed=2).to(dtype)[..., :40]
    product = kernels.product_per_head(weight)
    whole = product(x)
    assert torch.allclose(
        whole.double(), torch.einsum("rhi,hoi->rho", x.double(), weight.double()), rtol=0.02, atol=0.1
    )
    for rows in (1, 3, 64, 65):
        assert torch.equal(product(x[70 - rows :]), whole[70 - rows :])


@pytest.mark.parametrize("fused", [Fused.NONE, Fused.SILU, Fused.MUL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sorted_to_experts_have_the_bits_of_each_experts_own_product(kernels, dtype, fused) -> None:
    weights = [random(100, 48, seed=seed).to(dtype) for seed in range(5)]
    x, other = random(370, 48, seed=8).to(dtype), random(370, 100, seed=9).to(dtype)
    two = fused is Fused.MUL
    grouped = kernels.grouped_product(5, 100, 48, dtype, fused.value)
    for number, weight in enumerate(weights):
        grouped.fill(number, weight)
    for sizes in ([1, 0, 300, 2, 67], [0, 0, 0, 0, 370], [370, 0, 0, 0, 0], [74] * 5):
        ends = np.cumsum([0, *sizes])
        found = grouped(x, sizes, other if two else None)
        for weight, first, last in zip(weights, ends[:-1], ends[1:], strict=True):
            own = kernels.product(weight, None, fused.value)(x[first:last], other[first:last] if two else None)
            assert torch.equal(found[first:last], own)


def test_weights_and_angles_need_not_lie_in_order() -> None:
    """Copies of them live as long as a call: other memory is taken at once for what follows."""
    wide, x = random(64, 256, seed=1), random(9, 128, seed=2)
    grouped = KERNELS.grouped_product(40, 64, 128, torch.float32, "none")
    for number in range(40):
        grouped.fill(number, wide[:, 128:] + number if number % 2 else (wide + number)[:, 128:])
    for number in range(40):
        sizes = [9 * (number == other) for other in range(40)]
        assert torch.equal(grouped(x, sizes), KERNELS.product(wide[:, 128:] + number, None, "none")(x, None))
    norms = random(128, 6, seed=3)
    assert torch.equal(KERNELS.norm(x, norms[:, 1], 1e-6), KERNELS.norm(x, norms[:, 1].contiguous(), 1e-6))
    angles, found, expected = random(9, 1, 64, seed=4), torch.empty(9, 2, 64), torch.empty(9, 2, 64)
    KERNELS.rotate(x.view(9, 2, 64), angles[..., 32:], angles[..., :32], found)
    KERNELS.rotate(x.view(9, 2, 64), angles[..., 32:].contiguous(), angles[..., :32].contiguous(), expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("sizes", [[3, 0], [1, 1], [4, 0], [-1, 4, 0], [1, 1, 1, 0], [5, -2, 0]])
def test_sizes_that_do_not_divide_the_rows_are_an_error(sizes) -> None:
    grouped = KERNELS.grouped_product(3, 4, 8, torch.float32, "none")
    with pytest.raises(ValueError, match="offsets"):
        grouped(torch.zeros(3, 8), sizes)


def test_other_weights_and_rows_of_experts_are_errors() -> None:
    grouped = KERNELS.grouped_product(2, 4, 8, torch.float32, "mul")
    for weight in (torch.zeros(4, 7), torch.zeros(4, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="a weight is"):
            grouped.fill(0, weight)
    with pytest.raises(ValueError, match="no such matrix"):
        grouped.fill(2, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="takes one other operand"):
        grouped(torch.zeros(3, 8), [1, 2])
    with pytest.raises(ValueError, match="rows"):
        grouped(torch.zeros(3, 8), [1, 2], torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("x", "other", "words"),
    [
        (torch.zeros(3, 7), None, r"x is \[3, 7\]"),
        (torch.zeros(8), None, r"x is \[8\]"),
        (torch.zeros(3, 8, dtype=torch.float64), None, "float64"),
        (torch.zeros(8, 3).T, None, "side by side"),
        (torch.zeros(3, 8), torch.zeros(3, 4), "takes no other"),
    ],
)
def test_a_product_of_other_shapes_is_an_error(x, other, words) -> None:
    with pytest.raises(ValueError, match=words):
        KERNELS.product(torch.zeros(4, 8), None, "none")(x, other)


@pytest.mark.parametrize("other", [None, torch.zeros(2, 4), torch.zeros(3, 5)])
def test_another_operand_that_does_not_fit_is_an_error(other) -> None:
    with pytest.raises(ValueError, match="other"):
        KERNELS.product(torch.zeros(4, 8), None, "add")(torch.zeros(3, 8), other)


def test_weights_that_no_kernel_takes_are_errors() -> None:
    with pytest.raises(ValueError, match="float64"):
        KERNELS.product(torch.zeros(4, 8, dtype=torch.float64), None, "none")
    with pytest.raises(ValueError, match="bias"):
        KERNELS.product(torch.zeros(4, 8), torch.zeros(5), "none")


def test_no_rows_give_no_rows() -> None:
    assert KERNELS.product(torch.zeros(4, 8), None, "silu")(torch.zeros(0, 8), None).shape == (0, 4)


# ------------------------------------------------------------------------------------------------- attention

# heads, KV heads, width of a head, block size, window, first position, tensors of a block
SHAPES = {
    "grouped": (16, 8, 64, 32, None, 0, 2),
    "one KV head": (8, 1, 80, 16, None, 0, 2),
    "window": (6, 2, 20, 24, 100, 0, 2),
    "window of a tile": (4, 4, 16, 16, 256, 0, 2),
    "head of a model": (4, 4, 16, 16, None, 1, 2),
    "latents": (16, 1, 576, 32, None, 0, 1),
    "more heads than a query block": (72, 1, 24, 16, None, 0, 1),
}
TOKENS = 700
CUTS = [(0, 1), (1, 3), (3, 250), (250, 256), (256, 257), (257, 300), (300, 512), (512, 699), (699, 700)]


class Paged:
    """A sequence of random queries, keys and values in blocks at random places."""

    def __init__(self, kernels: RowKernels, shape: str, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.width, self.block, self.window, self.first, tensors = SHAPES[shape]
        kind = NativeAttention if tensors == 2 else NativeLatentAttention
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.width, "block_size": self.block}
        more = {"windows": (self.window,), "first_position": self.first}
        self.attention = kind(kernels=kernels, dtype=dtype, device=torch.device("cpu"), **sizes, **more)
        count = -(-TOKENS // self.block)
        self.cache = random(count + 5, tensors, self.block, self.kv_heads, self.width, seed=5).to(dtype)
        self.attention.bind([self.cache])
        self.table = np.random.default_rng(7).permutation(count + 5)[:count].astype(np.int32)
        self.q = random(TOKENS, self.heads, self.width, seed=6).to(dtype)

    def span(self, start: int, stop: int, row: int = 0) -> Span:
        return Span(start, stop, row, self.table, stop, start)

    def attended(self, *spans: Span) -> torch.Tensor:
        """The spans' rows, behind each other; nothing is written to the cache."""
        rows = sum(span.stop - span.start for span in spans)
        q = torch.cat([self.q[span.start : span.stop] for span in spans])
        self.attention.prepare(list(spans), [], rows)
        unused = q[:, : self.kv_heads]
        return self.attention(0, q, unused, unused, self.width**-0.5).clone().view(rows, self.heads, self.width)

    def exact(self) -> torch.Tensor:
        lines = self.cache[torch.from_numpy(self.table).long()].double().transpose(1, 2).flatten(0, 1)[:TOKENS]
        keys, values = lines[:, 0], lines[:, -1]
        group = self.heads // self.kv_heads
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("rhd,khd->hrk", self.q.double(), keys) * self.width**-0.5
        distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
        hidden = (distance < 0) | (torch.arange(TOKENS)[None] < self.first)
        if self.window is not None:
            hidden |= distance >= self.window
        return torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_attends_with_the_same_bits_in_any_cut_of_its_prompt(kernels, shape, dtype) -> None:
    paged = Paged(kernels, shape, dtype)
    first = paged.first
    whole = paged.attended(paged.span(first, TOKENS))
    exact = paged.exact()[first:]
    assert float((whole.double() - exact).abs().max()) < {torch.float32: 1e-5, torch.bfloat16: 0.02}.get(dtype, 0.002)
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(paged.attended(paged.span(first, TOKENS)), whole)
            for start, stop in CUTS:
                if (start := max(start, first)) < stop:
                    part = paged.attended(paged.span(start, stop))
                    assert torch.equal(part, whole[start - first : stop - first])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sequences_of_a_step_do_not_see_each_other(kernels, count) -> None:
    paged = Paged(kernels, "grouped", torch.bfloat16)
    whole = paged.attended(paged.span(0, TOKENS))
    cuts = [(699, 700), (10, 90), (512, 513), (0, 1), (256, 600)]
    rows = np.cumsum([0, *(stop - start for start, stop in cuts)])
    with threads(count):
        together = paged.attended(*(paged.span(*cut, row=int(row)) for cut, row in zip(cuts, rows, strict=False)))
    assert torch.equal(together, torch.cat([whole[start:stop] for start, stop in cuts]))


def test_what_has_slid_out_of_a_window_and_what_lies_behind_a_sequence_is_not_read(kernels) -> None:
    paged = Paged(kernels, "window", torch.float32)
    before = paged.attended(paged.span(500, 640))
    gone = (500 - 99) // paged.block
    paged.cache[paged.table[:gone].tolist()] = torch.nan
    paged.cache[paged.table[-(-640 // paged.block) :].tolist()] = torch.nan
    paged.cache[paged.table[640 // paged.block], :, 640 % paged.block :] = torch.nan
    paged.table[:gone] = -1
    assert torch.equal(paged.attended(paged.span(500, 640)), before)


def test_rows_that_nobody_wants_may_be_left_out_and_all_others_keep_their_bits(kernels) -> None:
    paged = Paged(kernels, "grouped", torch.float32)
    whole = paged.attended(paged.span(0, TOKENS))
    paged.attention.prepare([replace(paged.span(0, TOKENS), wanted_from=650)], [], TOKENS)
    unused = paged.q[:, : paged.kv_heads]
    some = paged.attention(0, paged.q, unused, unused, paged.width**-0.5, wanted_only=True)
    assert torch.equal(some.view_as(whole)[650:], whole[650:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(8, 4, 15)}, "q is"),
        ({"q": torch.zeros(4, 4, 16)}, "more rows"),
        ({"out": torch.zeros(8, 4, 16, dtype=torch.float64)}, "out is"),
        ({"q": torch.zeros(8, 16, 4).transpose(1, 2)}, "side by side"),
        ({"q": torch.zeros(8, 3, 16), "out": torch.zeros(8, 3, 16)}, "multiple of kv_heads"),
        ({"spans": np.array([[0, 4, 4, 0, 0]])}, "outside"),
        ({"spans": np.array([[0, 4, 12, 0, 1]])}, "outside"),
        ({"spans": np.array([[-1, 4, 12, 0, 0]])}, "outside"),
        ({"tables": np.array([0, 9], np.int32)}, "names block 9 of 3"),
        ({"tables": np.array([0], np.int32)}, "outside"),
        ({"first_position": 5}, "outside"),
    ],
)
def test_an_attention_that_would_read_elsewhere_is_an_error(changes, words) -> None:
    call = {
        "q": torch.zeros(8, 4, 16),
        "cache": torch.zeros(3, 2, 8, 2, 16),
        "out": torch.zeros(8, 4, 16),
        "spans": np.array([[0, 4, 12, 0, 0]], np.int64),
        "tables": np.array([0, 1], np.int32),
        "first_position": 0,
        **changes,
    }
    with pytest.raises(ValueError, match=words):
        KERNELS.attention(**call, scale=1.0, window=None)


# ------------------------------------------------------------------------------------------- norms and rotary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 20, 13])
def test_a_row_is_normed_with_the_same_bits_among_any_rows_and_as_torch_does(dtype, width) -> None:
    x, weight = random(300, 3, width, seed=1).to(dtype), random(3, width, seed=2)
    whole, flat = KERNELS.norm(x, weight, 1e-6), KERNELS.norm(x[:, 0], weight[0], 1e-6)
    assert torch.allclose(whole.float(), rms_norm(x, weight, 1e-6).float(), atol=1e-6, rtol=0.01)
    assert torch.equal(flat, whole[:, 0])
    for rows in (1, 2, 17, 255):
        with threads(1 + rows % 2):
            assert torch.equal(KERNELS.norm(x[300 - rows :], weight, 1e-6), whole[300 - rows :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "half"), [(64, 32), (20, 10), (32, 4), (16, 3)])
def test_a_row_is_rotated_with_the_same_bits_among_any_rows_and_as_torch_does(dtype, width, half) -> None:
    x, angles = random(300, 5, width + 4, seed=1).to(dtype)[..., :width], random(300, 1, half, seed=2)
    cos, sin, out = angles.cos().to(dtype), angles.sin().to(dtype), torch.empty(300, 5, width, dtype=dtype)
    KERNELS.rotate(x, cos, sin, out)
    reference = torch.empty_like(out)
    rotate(x, cos, sin, reference)
    assert torch.allclose(out.float(), reference.float(), atol={torch.float32: 1e-6}.get(dtype, 0.05))
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])
    for rows in (1, 2, 17, 255):
        part = torch.empty(rows, 5, width, dtype=dtype)
        KERNELS.rotate(x[300 - rows :], cos[300 - rows :], sin[300 - rows :], part)
        assert torch.equal(part, out[300 - rows :])


def test_norms_and_rotations_of_other_shapes_are_errors() -> None:
    x, angles = torch.zeros(3, 2, 8), torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match="norm's weight"):
        KERNELS.norm(x, torch.zeros(7), 1e-6)
    for bad in (torch.zeros(2, 1, 4), torch.zeros(3, 1, 5), torch.zeros(3, 2, 4)):
        with pytest.raises(ValueError, match="cos"):
            KERNELS.rotate(x, bad, bad, torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="out"):
        KERNELS.rotate(x, angles, angles, torch.zeros(3, 2, 9))


def test_an_activation_far_out_is_finite_and_right() -> None:
    x = torch.tensor([[-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4, float("nan")]])
    for fused, expected in ((Fused.SILU, F.silu(x)), (Fused.GELU_TANH, F.gelu(x, approximate="tanh"))):
        product = KERNELS.product(torch.eye(1), None, fused.value)
        found = torch.cat([product(value.view(1, 1), None) for value in x[0]])[:, 0]
        assert torch.allclose(found[:7], expected[0, :7], atol=1e-6) and found[7].isnan()
