"""The differences of cpu, cuda and npu behind one interface: streams, memory, copies, attention, collectives.

The npu half has never run on hardware. torch_npu is imported only when asked for: without CANN its import fails, and as
an installed backend it even makes `import torch` fail unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..host_memory import available_memory_bytes
from ..models.row_kernels import RowKernels, open_kernels
from .compute.attention import PagedAttention, find_query_tiles
from .compute.device_attention import CudaAttention, NpuAttention, choose_attention
from .compute.latent_attention import LatentAttention
from .compute.native_attention import NativeAttention, NativeLatentAttention
from .tiers.layer_copy import Copier, NativeCopier, TorchCopier

log = logging.getLogger("xllm.worker")

CPU_CACHE_LIMIT = 1 << 30  # device cache on cpu when nothing is asked for: it shares memory with all the rest


@dataclass(frozen=True)
class _Facts:
    block_size: int
    native: str  # name of the native copier's backend
    distributed: str  # name of torch.distributed's backend


# FlashAttention 2 takes pages of multiples of 256 tokens; the NPU's kernel recommends 128.
_FACTS = {
    "cpu": _Facts(32, "cpu", "gloo"),
    "cuda": _Facts(256, "cuda", "nccl"),
    "npu": _Facts(128, "ascend", "hccl"),
}


@dataclass(frozen=True)
class Platform:
    """The device of one worker."""

    name: str
    device: torch.device

    @classmethod
    def choose(cls, config: EngineConfig, rank: int = 0) -> Platform:
        """The device `config.device` asks for, made the current one of this process.

        Raises:
            ConfigError: this machine or build has none, or not as many as `rank` needs.
        """
        name = _found_device() if config.device == "auto" else config.device
        if name == "cpu":
            return cls(name, torch.device("cpu"))
        module = _cuda() if name == "cuda" else _npu()
        count = module.device_count()
        if rank >= count:
            raise ConfigError("tp_size", config.tp_size, f"at most {count} (devices of kind {name} on this machine)")
        device = torch.device(name, rank)
        module.set_device(device)
        return cls(name, device)

    @property
    def default_block_size(self) -> int:
        return _FACTS[self.name].block_size

    @property
    def distributed_backend(self) -> str:
        return _FACTS[self.name].distributed

    def torch_threads(self, config: EngineConfig) -> int:
        """Threads of torch's CPU operators, fixed for life, as bits may depend on them.

        On cpu the default is every core, shared out to the ranks: the `copy_threads` of the native copier then share
        cores with the forward for as long as a restore runs, and hide less of it. `num_threads = cores - copy_threads`
        hides nearly all of it, at the price of those cores in every other forward (`bench overlap` measures both).
        """
        return config.num_threads or max(1, len(os.sched_getaffinity(0)) // config.tp_size)

    # --------------------------------------------------------------------------------------------- the device

    def compute_stream(self) -> int | None:
        """Handle of the stream that forwards run on; None on cpu, where a forward has ended when it returns.

        On npu reading it first hands all queued operators to the device: needed before something is to run after them.
        """
        if self.name == "cpu":
            return None
        stream = self._module.current_stream(self.device)
        return int(stream.cuda_stream if self.name == "cuda" else stream.npu_stream)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.name != "cpu":
            self._module.synchronize(self.device)

    def mark(self) -> Callable[[], None]:
        """Mark the work given to the compute stream so far; the answer waits for its end, from any thread."""
        if self.name == "cpu":
            return _ended
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def free_memory_bytes(self) -> int:
        if self.name == "cpu":
            return available_memory_bytes()
        return int(self._module.mem_get_info(self.device)[0])

    @property
    def _module(self) -> Any:
        return getattr(torch, self.name)

    # --------------------------------------------------------------------------------------- what runs on it

    def copier(self, config: EngineConfig) -> Copier:
        """The copier `config.copy_backend` asks for. Raises ConfigError when it asks for one that is not built.

        It pins host memory itself, when its caches are attached.
        """
        if config.copy_backend == "torch":
            return TorchCopier()
        backend, index = _FACTS[self.name].native, self.device.index or 0
        try:
            return NativeCopier(backend, threads=config.copy_threads, device=index, stream=self.compute_stream)
        except ConfigError as error:
            if config.copy_backend == "native":
                raise
            log.warning("copying with torch: %s", error)
            return TorchCopier()

    def row_kernels(self, config: EngineConfig) -> RowKernels | None:
        """The cpu's native kernels as `config.cpu_kernels` wants them; None computes with torch.

        Raises:
            ConfigError: they are asked for and cannot run.
        """
        if self.name == "cpu":
            return open_kernels(config.cpu_kernels)
        if config.cpu_kernels == "native":
            raise ConfigError("cpu_kernels", "native", f"auto | torch on {self.name}")
        return None

    def attention(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        windows: Sequence[int | None],
        first_position: int = 0,
        kernels: RowKernels | None = None,
    ) -> PagedAttention:
        """The attention for these shapes: the device's kernel where a trial finds it right, else gathering.

        Kernels of devices know no `first_position`. `kernels`: those of the cpu.
        """
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {"dtype": dtype, "device": self.device}
        more: dict[str, Any] = {"block_size": block_size, "windows": windows}
        if kernels is not None:
            return NativeAttention(kernels=kernels, **sizes, **more, first_position=first_position)
        if self.name == "cpu" or first_position:
            more |= {"tiles": find_query_tiles(**sizes), "first_position": first_position}
            attention = PagedAttention(**sizes, **more)
            attention.batch_invariant = self.name == "cpu"
            return attention
        return choose_attention(CudaAttention if self.name == "cuda" else NpuAttention, **sizes, **more)

    def latent_attention(
        self,
        *,
        heads: int,
        width: int,
        dtype: torch.dtype,
        block_size: int,
        windows: Sequence[int | None],
        first_position: int = 0,
        kernels: RowKernels | None = None,
    ) -> LatentAttention:
        """The attention over latents of `width` columns: by the cpu's `kernels`, else gathering.

        Gathering has equal bits on cpu, by tiles that a trial finds.
        """
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": 1, "head_dim": width}
        sizes |= {"dtype": dtype, "device": self.device}
        more: dict[str, Any] = {"block_size": block_size, "windows": windows, "first_position": first_position}
        if kernels is not None:
            return NativeLatentAttention(kernels=kernels, **sizes, **more)
        tiles = find_query_tiles(LatentAttention, **sizes)
        attention = LatentAttention(**sizes, **more, tiles=tiles)
        attention.batch_invariant = self.name == "cpu"
        return attention

    # ------------------------------------------------------------------------------------------------ memory

    def cache_budget(self, config: EngineConfig) -> int:
        """Bytes of the device cache: `max_cache_size`, or what free memory allows.

        On cpu host and device blocks of all ranks share the memory, and without `max_cache_size` the ranks take no more
        than 1 GiB together.

        Raises:
            ConfigError: there are not so many.
        """
        factor = config.host_blocks_factor if config.host_cache_enabled else 0.0
        ranks_here = config.tp_size if self.name == "cpu" else 1
        free = int(self.free_memory_bytes() * config.max_memory_utilization) // ranks_here
        if config.max_cache_size:
            budget = config.max_cache_size
        elif self.name == "cpu":
            budget = min(int(free / (1.0 + factor)), CPU_CACHE_LIMIT // ranks_here)
        else:
            budget = free
        if budget > free:
            raise ConfigError("max_cache_size", budget, f"at most {free} bytes (what max_memory_utilization leaves)")
        return budget


def _ended() -> None:
    """On cpu an operator has ended when it returns."""


# ------------------------------------------------------------------------------------------- looking for devices


def _found_device() -> str:
    """The best device of this machine; a torch_npu that does not work is said, but no error."""
    if torch.cuda.is_available():
        return "cuda"
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return "cpu"
    try:
        _npu()
    except ConfigError as error:
        log.warning("running on cpu: %s", error)
        return "cpu"
    return "npu"


def _cuda() -> Any:
    if not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "auto | cpu (this torch sees no CUDA device)")
    return torch.cuda


def _npu() -> Any:
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: beside a CUDA build of torch
        hint = "it needs CANN: source its set_env.sh" if "lib" in str(error) else "pip install 'xllm_hier[npu]'"
        raise ConfigError("device", "npu", f"auto | cpu (torch_npu does not load: {error}; {hint})") from error
    if not torch_npu.npu.is_available():
        raise ConfigError("device", "npu", "auto | cpu (torch_npu sees no NPU)")
    return torch_npu.npu
