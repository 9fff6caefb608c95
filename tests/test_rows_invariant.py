"""Models on native kernels: a row's bits depend on the tokens before it alone; where a check fails, torch computes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table

from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.models import row_kernels
from xllm_hier.models.row_kernels import open_kernels
from xllm_hier.worker.compute import model_runner, row_check
from xllm_hier.worker.compute.native_attention import NativeAttention
from xllm_hier.worker.platform import Platform

pytestmark = pytest.mark.skipif(open_kernels("auto") is None, reason="no AVX2, or the extension is not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

FAMILIES = ["llama", "qwen3", "gemma3", "mixtral", "deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_generated_row_has_the_bits_of_a_prompts_row_on_one_thread_and_on_two(tmp_path, family, dtype) -> None:
    """Logits of each token, and keys and values of all: as one prompt, and token by token behind a short one."""
    folder, tokens, table = tiny_models.make(tmp_path, family, dtype), random_prompt(70), random_table(5)
    seen, ids = [], set()
    for num_threads in (1, 2):
        driver = Driver(folder, num_threads=num_threads)
        assert driver.runner.details.rows_invariant
        ids.add(driver.runner.details.numerics_id)
        for first in (30, 70):
            driver.poison()
            driver.step([prompt_part(tokens[:first], table)])
            for position in range(first, 70):
                driver.step([], [generated(tokens, table, position)])
            seen.append((driver.logits.clone(), driver.blocks(table, 70)))
    logits, blocks = seen[0]
    assert not blocks.isnan().any()
    assert all(torch.equal(logits, other) and torch.equal(blocks, same) for other, same in seen)
    assert len(ids) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_torchs_kernels_give_the_same_up_to_rounding(tmp_path, family) -> None:
    folder, tokens, table = tiny_models.make(tmp_path, family), random_prompt(90), random_table(6)
    found = []
    for kernels in ("native", "torch"):
        driver = Driver(folder, cpu_kernels=kernels)
        driver.step([prompt_part(tokens, table)])
        found.append(driver.logits.clone())
    assert float((found[0] - found[1]).abs().max()) < 1e-4


def test_recurrent_layers_keep_two_kinds_of_rows(tmp_path) -> None:
    config = EngineConfig(model=str(tiny_models.make(tmp_path, "qwen3_next")), block_size=16)
    details = model_runner.ModelRunner(config, progress=False).details
    assert details.cpu_kernels and details.batch_invariant and not details.rows_invariant


# ------------------------------------------------------------------------------------------- choice at load


def test_where_the_check_fails_the_model_computes_with_torch_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    folder = tiny_models.make(tmp_path, "llama")
    monkeypatch.setattr(model_runner, "find_difference", lambda *_: "rows of the linear X differ")
    with caplog.at_level(logging.WARNING):
        details = Driver(folder).runner.details
    assert (details.cpu_kernels, details.rows_invariant, details.batch_invariant) == ("", False, True)
    assert "rows of the linear X differ" in caplog.text
    with pytest.raises(ConfigError, match=r"cpu_kernels.*rows of the linear X differ"):
        Driver(folder, cpu_kernels="native")


def test_the_check_finds_a_linear_and_an_attention_whose_rows_depend_on_others(tmp_path, monkeypatch) -> None:
    runner = Driver(tiny_models.make(tmp_path, "llama")).runner
    model, attention = runner.model, runner._attention
    assert row_check.find_difference(model, attention) == ""
    first = model.layers[0].mlp.linears()[0]  # of equal shapes the first is tried
    right = first._product
    monkeypatch.setattr(first, "_product", lambda x, other: right(x, other) + (1e-3 if len(x) == 17 else 0.0))
    assert str(first.shape_key) in row_check.find_difference(model, attention)
    monkeypatch.setattr(first, "_product", right)
    attend = NativeAttention._attend

    def disturbed(self: NativeAttention, layer: int, q: torch.Tensor, scale: float, wanted_only: bool) -> None:
        attend(self, layer, q, scale, wanted_only)
        if len(self._spans) == 1 and self._spans[0, 1] == 256:
            self._output[0] += 1e-3

    monkeypatch.setattr(NativeAttention, "_attend", disturbed)
    assert row_check.find_difference(model, attention) == "rows of attention with window None differ"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_finds_a_kernel_that_computes_something_else(monkeypatch, dtype) -> None:
    kernels = open_kernels("native")
    assert row_check.find_error(kernels, dtype) == ""
    for name, found in (("product", "products with none"), ("norm", "norms")):
        right = getattr(row_kernels.RowKernels, name)
        with monkeypatch.context() as patch:
            if name == "product":
                patch.setattr(
                    row_kernels.RowKernels,
                    name,
                    lambda self, *a, right=right: lambda x, other: right(self, *a)(x, other) * 1.5,
                )
            else:
                patch.setattr(row_kernels.RowKernels, name, lambda self, *a, right=right: right(self, *a) * 1.5)
            assert row_check.find_error(kernels, dtype) == found
    for name, found in (("rotate", "rotations"), ("attention", "attended rows")):
        with monkeypatch.context() as patch:
            patch.setattr(row_kernels.RowKernels, name, lambda self, *a, **k: a[3 if len(a) == 4 else 2].zero_())
            assert row_check.find_error(kernels, dtype) == found


def test_without_the_extension_torch_computes_and_native_is_refused(monkeypatch, caplog) -> None:
    def lacking() -> None:
        raise ImportError("no module named _cpu_kernels")

    monkeypatch.setattr(row_kernels, "_library", lacking)
    with caplog.at_level(logging.WARNING):
        assert open_kernels("auto") is None
    assert "no module named _cpu_kernels" in caplog.text
    with pytest.raises(ConfigError, match=r"cpu_kernels.*native.*auto \| torch"):
        open_kernels("native")


def test_native_kernels_are_refused_on_other_devices_and_torchs_can_be_asked_for() -> None:
    platform = Platform("cuda", torch.device("cpu"))
    with pytest.raises(ConfigError, match="cpu_kernels"):
        platform.row_kernels(EngineConfig(model="x", cpu_kernels="native"))
    assert platform.row_kernels(EngineConfig(model="x")) is None
    assert open_kernels("torch") is None


CHECK = """
import sys, torch
sys.path.insert(0, {tests!r})
import tiny_models
from pathlib import Path
for family, dtype in (("gemma3", torch.bfloat16), ("deepseek_v2", torch.float32), ("mixtral", torch.float16)):
    folder = Path({folder!r}) / family
    folder.mkdir()
    details = tiny_models.Driver(tiny_models.make(folder, family, dtype), cpu_kernels="native").runner.details
    print(details.cpu_kernels, details.rows_invariant)
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16"])
def test_the_check_at_load_passes_with_fewer_instructions(tmp_path: Path, isa: str) -> None:
    """oneDNN generates kernels of lesser machines when told so; bfloat16 without instructions of its own is widened."""
    code = CHECK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.endswith(" True") for line in lines)
    if isa == "AVX2":
        assert not any("bf16" in line for line in lines)
