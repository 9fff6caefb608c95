"""Platforms without their hardware: the calls to the devices' kernels over stand-ins, the trial at load, the choices.

The stand-ins have the documented signatures, refuse what the kernels refuse, and compute what they compute in plain
torch. What no stand-in can show, a device must: `run.sh gpu-check`.
"""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Driver, generated, make, prompt_part, random_prompt, random_table
from torch.nn.attention import varlen

from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.worker import platform as platform_module
from xllm_hier.worker.compute.attention import PagedAttention, Span
from xllm_hier.worker.compute.device_attention import (
    CudaAttention,
    KernelAttention,
    NpuAttention,
    Trial,
    choose_attention,
)
from xllm_hier.worker.platform import Platform
from xllm_hier.worker.tiers.layer_copy import TorchCopier

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SHAPE = {"heads": 6, "kv_heads": 2, "head_dim": 16, "device": CPU, "block_size": 16}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """q [queries, heads, dim] over k, v [keys, kv_heads, dim]; hidden [queries, keys]. One row at a time, in fp32."""
    groups = q.shape[1] // k.shape[1]
    k, v = (side.float().repeat_interleave(groups, dim=1) for side in (k, v))
    rows = []
    for row, mask in zip(q.float(), hidden, strict=True):
        seen = ~mask
        scores = (row[None] * k[seen]).sum(-1) * scale
        rows.append((scores.softmax(0)[..., None] * v[seen]).sum(0))
    return torch.stack(rows).to(q.dtype)


def pages_of(pages: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` tokens of one sequence; everything behind them is never touched."""
    size = pages.shape[1]
    return pages[table[: -(-count // size)].long()].flatten(0, 1)[:count]


def band(queries: int, keys: int, left: int, right: int) -> torch.Tensor:
    """Hidden keys of FlashAttention's window, aligned at the last query and key; -1 is no limit."""
    distance = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    return hidden


class Varlen:
    """`varlen_attn` of torch 2.13 with FlashAttention's demands."""

    def __init__(self, *, page: int = 16, wants_cu_seq_k: bool = False, skew: float = 0.0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.page, self.wants_cu_seq_k, self.skew = page, wants_cu_seq_k, skew

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        assert seqused_k is not None and block_table is not None and scale is not None and num_splits == 1
        if key.shape[1] % self.page:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {self.page}\nException raised from x")
        if self.wants_cu_seq_k != (cu_seq_k is not None):
            raise RuntimeError("cu_seq_k")
        for lengths in (cu_seq_q, seqused_k, block_table):
            assert lengths.dtype == torch.int32 and lengths.device == query.device and lengths.is_contiguous()
        if cu_seq_k is not None:
            assert cu_seq_k.tolist() == [0, *torch.cumsum(seqused_k, 0).tolist()]
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and query.dtype == key.dtype == value.dtype
        assert key.is_contiguous() and value.is_contiguous() and key.shape == value.shape and key.dim() == 4
        sequences = len(seqused_k)
        assert cu_seq_q.shape == (sequences + 1,) and block_table.shape[0] == sequences
        assert cu_seq_q[-1] == len(query) and enable_gqa == (query.shape[1] != key.shape[2])
        lengths = cu_seq_q.diff().tolist()
        assert max_q == max(lengths) and max_k == int(seqused_k.max()) <= block_table.shape[1] * key.shape[1]
        self.calls.append({"sequences": sequences, "window": window_size, "queries": lengths})
        outputs = []
        for q, used, table in zip(query.split(lengths), seqused_k.tolist(), block_table, strict=True):
            keys, values = (pages_of(side, table, used) for side in (key, value))
            outputs.append(attend(q, keys, values, band(len(q), used, *window_size), scale))
        return torch.cat(outputs) * (1.0 + self.skew)


class TorchNpu(types.ModuleType):
    """The two operators of torch_npu 2.13 that are used, with their documented demands; pages of 16 are let through."""

    def __init__(self, *, ignore_bands_of_single_queries: bool = False) -> None:
        super().__init__("torch_npu")
        self.writes = 0
        self.calls: list[dict[str, Any]] = []
        self.ignore_bands = ignore_bands_of_single_queries
        self.npu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, set_device=lambda _: None)

    def _npu_reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_indices: torch.Tensor,
    ) -> None:
        self.writes += 1
        assert slot_indices.dtype == torch.int32 and len(slot_indices) == len(key) == len(value)
        for rows, cache in ((key, key_cache), (value, value_cache)):
            assert rows.is_contiguous() and cache.is_contiguous() and rows.shape[1:] == cache.shape[2:]
            cache.flatten(0, 1)[slot_indices.long()] = rows

    def npu_fused_infer_attention_score(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        atten_mask: torch.Tensor | None = None,
        actual_seq_lengths: list[int] | None = None,
        actual_seq_lengths_kv: list[int] | None = None,
        block_table: torch.Tensor | None = None,
        num_heads: int = 1,
        scale: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        block_size: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert atten_mask is not None and block_table is not None and input_layout == "TND"
        assert atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.int8
        assert atten_mask[0].tolist() == [0] + [1] * 2047 and not atten_mask[-1].any()
        assert actual_seq_lengths is not None and actual_seq_lengths_kv is not None
        assert all(type(item) is int for item in [*actual_seq_lengths, *actual_seq_lengths_kv])
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous() and key.shape == value.shape
        assert query.shape[1] == num_heads and key.shape[1:] == (block_size, num_key_value_heads * query.shape[2])
        assert block_table.dtype == torch.int32 and block_table.shape[0] == len(actual_seq_lengths)
        assert len(actual_seq_lengths_kv) == len(actual_seq_lengths) and actual_seq_lengths[-1] == len(query)
        self.calls.append({"sequences": len(actual_seq_lengths), "sparse_mode": sparse_mode})
        outputs, start = [], 0
        for end, used, table in zip(actual_seq_lengths, actual_seq_lengths_kv, block_table, strict=True):
            q = query[start:end]
            keys, values = (
                pages_of(side, table, used).unflatten(-1, (num_key_value_heads, -1)) for side in (key, value)
            )
            left, right = (pre_tokens, next_tokens) if sparse_mode == 4 else (-1, 0)
            if self.ignore_bands and len(q) == 1:
                left = -1
            outputs.append(attend(q, keys, values, band(len(q), used, left, right), scale))
            start = end
        return torch.cat(outputs), torch.zeros(1)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins attend row by row, so that their bits depend on nothing else: exact, but slow."""
    monkeypatch.setattr(Trial, "least_tokens", 90)


@pytest.fixture
def use_varlen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Varlen], Varlen]:
    def use(stand_in: Varlen) -> Varlen:
        monkeypatch.setattr(varlen, "varlen_attn", stand_in)
        return stand_in

    return use


@pytest.fixture
def use_npu(monkeypatch: pytest.MonkeyPatch) -> Callable[[TorchNpu], TorchNpu]:
    def use(stand_in: TorchNpu) -> TorchNpu:
        monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
        return stand_in

    return use


@pytest.fixture(params=["cuda", "npu"])
def kind(request: pytest.FixtureRequest, use_varlen: Any, use_npu: Any) -> type[KernelAttention]:
    if request.param == "cuda":
        use_varlen(Varlen())
        return CudaAttention
    use_npu(TorchNpu())
    return NpuAttention


# ------------------------------------------------------------------------------------------ the kernels' calls


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (24, torch.bfloat16), (1, torch.float32)]
)
def test_a_kernel_attends_as_gathering_does(
    kind: type[KernelAttention], window: int | None, dtype: torch.dtype
) -> None:
    trial = Trial({**SHAPE, "dtype": dtype, "windows": (window,), "tiles": (64,)}, window)
    attention = trial.make(kind)
    assert trial.error(attention) < trial.tolerance
    assert trial.equal_bits(attention)


@pytest.mark.parametrize("error", ["one key more", "one key less"])
def test_the_trial_sees_a_window_that_is_off_by_one(use_varlen: Any, error: str) -> None:
    class Wrong(CudaAttention):
        def _run(self, call: Any, q: Any, pages: Any, scale: float, window: int | None) -> torch.Tensor:
            assert window is not None
            return super()._run(call, q, pages, scale, window + (1 if error == "one key more" else -1))

    use_varlen(Varlen())
    trial = Trial({**SHAPE, "dtype": torch.bfloat16, "windows": (4096,), "tiles": (64,)}, 4096)
    assert trial.error(trial.make(Wrong)) > 3 * trial.tolerance


def test_positions_before_write_from_are_not_written(kind: type[KernelAttention]) -> None:
    attention = kind(**SHAPE, dtype=torch.float32, windows=(None,), tiles=(64,))
    cache = torch.full((4, 2, 16, 2, 16), 7.0)
    attention.bind([cache])
    table = torch.tensor([3, 1, 0], dtype=torch.int32).numpy()
    attention.prepare([Span(0, 40, 0, table, 21, 39)], [], 48)
    k, v = torch.randn(48, 2, 16), torch.randn(48, 2, 16)
    output = attention(0, torch.randn(48, 6, 16), k, v, 0.25)
    written = cache[[3, 1, 0]].transpose(1, 2).flatten(0, 1)  # [48 tokens, 2, kv_heads, dim]
    assert (written[:21] == 7).all() and (written[40:] == 7).all() and (cache[2] == 7).all()
    assert torch.equal(written[21:40, 0], k[21:40]) and torch.equal(written[21:40, 1], v[21:40])
    assert output.shape == (48, 96) and output.isfinite().all() and not output[40:].any()


def test_a_step_is_one_call_for_prompts_and_one_for_generated_rows(use_varlen: Any) -> None:
    kernel = use_varlen(Varlen())
    attention = CudaAttention(**SHAPE, dtype=torch.float32, windows=(None, 24), tiles=(64,))
    attention.bind([torch.zeros(8, 2, 16, 2, 16)] * 2)
    tables = torch.arange(8, dtype=torch.int32).view(4, 2).numpy()
    prompts = [Span(0, 20, 0, tables[0], 0, 19), Span(16, 20, 20, tables[1], 16, 20)]
    decode = [Span(30, 31, 24, tables[2], 0, 30), Span(10, 13, 25, tables[3], 0, 12)]
    attention.prepare(prompts, decode, 28)
    rows = [torch.randn(28, count, 16) for count in (6, 2, 2)]
    attention(0, *rows, 0.25)
    attention(1, *rows, 0.25, wanted_only=True)
    assert kernel.calls == [
        {"sequences": 2, "window": (-1, 0), "queries": [20, 4]},
        {"sequences": 4, "window": (-1, -1), "queries": [1, 1, 1, 1]},
        {"sequences": 2, "window": (23, 0), "queries": [20, 4]},
        {"sequences": 4, "window": (23, 0), "queries": [1, 1, 1, 1]},
    ]
    attention.prepare([prompts[1]], decode, 28)
    attention(1, *rows, 0.25, wanted_only=True)
    assert len(kernel.calls) == 5, "prompt rows that nobody wants are left out of the last layer"


# ------------------------------------------------------------------------------------------ the trial at load


def choose(kind: type[KernelAttention], windows: tuple[int | None, ...] = (None,), **changes: Any) -> PagedAttention:
    return choose_attention(kind, **{**SHAPE, "dtype": torch.bfloat16, "windows": windows, **changes})


def test_a_right_kernel_is_used_for_every_window(kind: type[KernelAttention]) -> None:
    attention = choose(kind, (None, 24))
    assert type(attention) is kind and attention.batch_invariant and not attention._bands


def test_without_a_kernel_for_the_device_blocks_are_gathered(caplog: pytest.LogCaptureFixture) -> None:
    """torch's own varlen_attn has no CPU kernel."""
    attention = choose(CudaAttention, (None, 24))
    assert type(attention) is PagedAttention and attention.kernel == "gather" and attention.batch_invariant
    assert "NotImplementedError" in caplog.text


def test_pages_that_the_kernel_refuses_are_gathered(use_varlen: Any, caplog: pytest.LogCaptureFixture) -> None:
    use_varlen(Varlen(page=256))
    assert type(choose(CudaAttention)) is PagedAttention
    assert "must be divisible by 256" in caplog.text and "Exception raised" not in caplog.text


def test_a_kernel_that_computes_something_else_is_not_used(use_varlen: Any, caplog: pytest.LogCaptureFixture) -> None:
    use_varlen(Varlen(skew=0.1))
    assert type(choose(CudaAttention)) is PagedAttention
    assert "off by up to 1.0e-01" in caplog.text


def test_both_ways_to_give_key_lengths_are_tried(use_varlen: Any) -> None:
    use_varlen(Varlen(wants_cu_seq_k=True))
    attention = choose(CudaAttention)
    assert isinstance(attention, CudaAttention) and attention.variant == "cu_seq_k"


def test_only_the_windows_that_fail_are_gathered(use_npu: Any) -> None:
    """The NPU kernel is documented to ignore bands for single queries."""
    kernel = use_npu(TorchNpu(ignore_bands_of_single_queries=True))
    attention = choose(NpuAttention, (24, None))
    assert isinstance(attention, NpuAttention) and list(attention._bands) == [24] and attention.batch_invariant
    shape = {**SHAPE, "dtype": torch.bfloat16, "windows": (24, None), "tiles": attention.tiles}
    reference = PagedAttention(**shape)
    table = torch.tensor([5, 2, 0, 3], dtype=torch.int32).numpy()
    rows = [torch.randn(51, count, 16).bfloat16() for count in (6, 2, 2)]
    kernel.calls.clear()
    for layer in (0, 1):
        outputs = []
        for which in (attention, reference):
            which.bind([torch.zeros(6, 2, 16, 2, 16, dtype=torch.bfloat16)] * 2)
            which.prepare([Span(0, 50, 0, table, 0, 49)], [Span(50, 51, 50, table, 0, 50)], 51)
            outputs.append(which(layer, *rows, 0.25).clone())
        assert torch.equal(*outputs) if layer == 0 else torch.allclose(*outputs, atol=0.02)
    assert [call["sparse_mode"] for call in kernel.calls] == [3, 3]


@pytest.mark.parametrize("spoiled", ["prompts", "batches"])
def test_bits_that_move_are_reported(use_varlen: Any, spoiled: str) -> None:
    class Moving(CudaAttention):
        """Right within rounding, but a little different for each query length, or number of sequences."""

        def _run(self, call: Any, q: Any, pages: Any, scale: float, window: int | None) -> torch.Tensor:
            output = super()._run(call, q, pages, scale, window)
            moved = call.longest_query % 3 if spoiled == "prompts" else len(call.key_counts) % 2
            return output * (1.0 + moved * 1e-2)

    use_varlen(Varlen())
    attention = choose(Moving)
    assert type(attention) is Moving and not attention.batch_invariant


def test_the_page_view_finds_keys_and_values_under_one_number() -> None:
    attention = KernelAttention(**SHAPE, dtype=torch.float32, windows=(None,), tiles=(64,))
    cache = torch.randn(5, 2, 16, 2, 16)
    attention.bind([cache])
    keys, values = attention._pages[0]
    for block in range(5):
        assert torch.equal(keys[2 * block], cache[block, 0]) and torch.equal(values[2 * block], cache[block, 1])
    assert keys.is_contiguous() and values.is_contiguous() and keys.data_ptr() == cache.data_ptr()


# --------------------------------------------------------------------------------------------------- platform


def test_the_facts_of_each_device() -> None:
    platforms = [Platform(name, CPU) for name in ("cpu", "cuda", "npu")]  # an npu needs torch_npu to be named at all
    facts = [(here.default_block_size, here.distributed_backend) for here in platforms]
    assert facts == [(32, "gloo"), (256, "nccl"), (128, "hccl")]


def test_cpu_has_no_stream_and_no_kernel() -> None:
    here = Platform.choose(EngineConfig(model="x", device="cpu"))
    assert here.compute_stream() is None and here.free_memory_bytes() > 0
    here.synchronize()
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 32, "windows": (None,)}
    assert type(here.attention(**sizes, dtype=torch.float32)) is PagedAttention
    assert here.torch_threads(EngineConfig(model="x", num_threads=3)) == 3


def test_a_device_that_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            Platform.choose(EngineConfig(model="x", device="cuda"))
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="torch_npu does not load"):
        Platform.choose(EngineConfig(model="x", device="npu"))


def test_torch_npu_without_cann_is_refused_with_the_loaders_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = "libhccl.so: cannot open shared object file: No such file or directory"
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"libhccl\.so.*source its set_env\.sh"):
        Platform.choose(EngineConfig(model="x", device="npu"))
    assert Platform.choose(EngineConfig(model="x")).name == "cpu"
    assert "libhccl.so" in caplog.text


def test_auto_takes_an_npu_that_works_and_tells_ranks_beyond_the_last_one(
    monkeypatch: pytest.MonkeyPatch, use_npu: Any
) -> None:
    use_npu(TorchNpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "device", lambda name, index=None: f"{name}:{index}")
    here = Platform.choose(EngineConfig(model="x"))
    assert (here.name, here.device) == ("npu", "npu:0")
    with pytest.raises(ConfigError, match="at most 1"):
        Platform.choose(EngineConfig(model="x"), rank=1)


def test_streams_and_memory_come_from_the_devices_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, handle in (("cuda", "cuda_stream"), ("npu", "npu_stream")):
        waited: list[Any] = []
        module = types.SimpleNamespace(
            current_stream=lambda device, handle=handle: types.SimpleNamespace(**{handle: 77}),
            mem_get_info=lambda device: (123, 456),
            synchronize=waited.append,
        )
        monkeypatch.setattr(torch, name, module, raising=False)
        here = Platform(name, CPU)
        assert here.compute_stream() == 77 and here.free_memory_bytes() == 123
        here.synchronize()
        assert waited == [CPU]


def test_the_native_copier_gets_the_devices_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int]] = []

    def native(backend: str, *, threads: int, device: int, stream: Any) -> Any:
        made.append((backend, threads, device))
        raise ConfigError("device", backend, "nothing here")

    monkeypatch.setattr(platform_module, "NativeCopier", native)
    for name in ("cpu", "cuda", "npu"):
        here = Platform(name, CPU)
        copier = here.copier(EngineConfig(model="x", copy_threads=2))
        assert isinstance(copier, TorchCopier)
        copier.close()
        with pytest.raises(ConfigError):
            here.copier(EngineConfig(model="x", copy_backend="native"))
    assert [backend for backend, _, _ in made] == ["cpu", "cpu", "cuda", "cuda", "ascend", "ascend"]
    assert {(threads, device) for _, threads, device in made} >= {(2, 0)}


# ------------------------------------------------------------------------------------- a model over a kernel


def test_a_model_over_a_stand_in_kernel_agrees_with_gathering(
    tmp_path: Path, kind: type[KernelAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full and sliding layers, a prompt in chunks, then a generated row: the runner needs to know nothing of it."""
    folder = make(tmp_path, "gemma3")
    prompt = random_prompt(70, seed=1)
    table = random_table(6)

    def logits() -> tuple[list[torch.Tensor], dict[str, Any]]:
        driver = Driver(folder, device="cpu", cpu_kernels="torch")
        for cache in driver.caches:
            cache.zero_()
        found = []
        for start, stop in ((0, 33), (33, 69)):
            driver.step([prompt_part(prompt[:69], table, start, stop)])
        found.append(driver.logits.clone())
        driver.step([], [generated(prompt, table, 69)])
        found.append(driver.logits.clone())
        return found, driver.runner.details

    expected, details = logits()
    assert details.attention == "gather" and details.batch_invariant
    monkeypatch.setattr(
        Platform, "attention", lambda self, kernels=None, **shape: choose_attention(kind, device=CPU, **shape)
    )
    found, details = logits()
    assert details.attention == kind.kernel and details.batch_invariant
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(found, expected, strict=True))


# -------------------------------------------------------------------------------------------------- gpu-check


def test_the_device_checks_need_only_torch_and_numpy() -> None:
    """`--bare` puts stand-ins in place of every other package, as on a machine without a package index."""
    command = [sys.executable, "scripts/gpu_check.py", "--device=cpu", "--bare", "--only=model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0 and "stand-ins" in done.stdout, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and "restored from the host: tokens" in done.stdout


def test_the_device_checks_fail_loudly_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    command = [sys.executable, "scripts/gpu_check.py", "--device=cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 1 and "no CUDA device" in done.stdout


def test_kernel_calls_are_not_logged_one_by_one(kind: type[KernelAttention]) -> None:
    kind(**SHAPE, dtype=torch.float32, windows=(None,), tiles=(64,))
    if kind is CudaAttention:
        assert not logging.getLogger(varlen.__name__).isEnabledFor(logging.INFO)
    assert math.isfinite(Trial({**SHAPE, "dtype": torch.float32, "windows": (None,), "tiles": (64,)}, None).tolerance)
