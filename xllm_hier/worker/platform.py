"""What differs between cpu, cuda and npu: the device, its free memory, and its default block size."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..host_memory import available_memory_bytes
from .layer_copy import Copier, NativeCopier, TorchCopier

log = logging.getLogger("xllm.worker")

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 256, "npu": 128}
CPU_CACHE_LIMIT = 1 << 30  # device cache on cpu when nothing is asked for: it shares memory with all the rest


@dataclass(frozen=True)
class Platform:
    """The device of one worker."""

    name: str
    device: torch.device

    @classmethod
    def choose(cls, config: EngineConfig, rank: int = 0) -> Platform:
        """The device `config.device` asks for. Raises ConfigError when this machine or build has none."""
        name = config.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", name, "cpu (this torch sees no CUDA device)")
        if name == "npu":
            raise ConfigError("device", name, "cpu or cuda (the NPU backend is not built yet)")
        return cls(name, torch.device("cpu") if name == "cpu" else torch.device(name, rank))

    def compute_stream(self) -> int | None:
        """Handle of the stream that forwards run on; None on cpu, where a forward has ended when it returns."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.name == "cuda" else None

    def copier(self, config: EngineConfig) -> Copier:
        """The copier `config.copy_backend` asks for. Raises ConfigError when it asks for one that is not built."""
        if config.copy_backend == "torch":
            return TorchCopier()
        try:
            return NativeCopier(
                self.name, threads=config.copy_threads, device=self.device.index or 0, stream=self.compute_stream
            )
        except ConfigError as error:
            if config.copy_backend == "native":
                raise
            log.warning("copying with torch: %s", error)
            return TorchCopier()

    def free_memory_bytes(self) -> int:
        if self.name == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_memory_bytes()

    def num_device_blocks(self, config: EngineConfig, block_bytes: int) -> int:
        """Blocks of the device cache: `max_cache_size`, or what free memory allows.

        On cpu host and device blocks share the memory, and without `max_cache_size` no more than 1 GiB is taken.

        Raises:
            ConfigError: not even one block fits.
        """
        factor = config.host_blocks_factor if config.host_cache_enabled else 0.0
        free = int(self.free_memory_bytes() * config.max_memory_utilization)
        if config.max_cache_size:
            budget = config.max_cache_size
        elif self.name == "cpu":
            budget = min(int(free / (1.0 + factor)), CPU_CACHE_LIMIT)
        else:
            budget = free
        if budget > free:
            raise ConfigError("max_cache_size", budget, f"at most {free} bytes (what max_memory_utilization leaves)")
        if budget < block_bytes:
            raise ConfigError("max_cache_size", budget, f"at least one block, {block_bytes} bytes")
        return budget // block_bytes
