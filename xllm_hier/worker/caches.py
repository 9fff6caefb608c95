"""The device caches of one worker: sized by all ranks together, allocated, and bound to its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..block import BlockType, CacheLayout
from ..config import EngineConfig
from ..errors import ConfigError
from ..figures import TypeSizes
from ..models.parallel import TensorParallel
from .compute.model_runner import ModelRunner
from .platform import Platform
from .tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
from .tiers.cache_sizes import CacheSizes, strides


class WorkerCaches:
    """Caches of the models in `runners`, by key component, the target's first; a draft's has the target's numbers.

    `block_bytes` are those of one block of each type in all domains. `strides` are tokens between two boundaries worth
    keeping, of types with a partial restore rule. `domains` are the caches.

    Raises:
        ConfigError: the memory does not suffice, or the audit has no blocks to compare.
    """

    def __init__(
        self, config: EngineConfig, runners: Mapping[str, ModelRunner], platform: Platform, parallel: TensorParallel
    ) -> None:
        self._layouts = next(iter(runners.values())).layout.blocks
        self._device = platform.device
        if config.audit_rate and self._layouts[0].block_type is not BlockType.KV:
            allowed = "0 for a model of sliding windows alone, of which no prefix is kept (or --cache_layout=flat)"
            raise ConfigError("audit_rate", config.audit_rate, allowed)
        self.block_bytes = _block_bytes([runner.layout for runner in runners.values()])
        self.strides = strides(config, self._layouts)
        sizes = CacheSizes(config, self._layouts)
        num_blocks = sizes.fit(platform.cache_budget(config), self.block_bytes)
        self.num_device_blocks = sizes.counts(parallel.agree(num_blocks, device=platform.device))
        factor = config.host_blocks_factor if config.host_cache_enabled else 0.0
        self.num_host_blocks = {kind: int(count * factor) for kind, count in self.num_device_blocks.items()}
        self.domains = [self._domain(component, runner) for component, runner in runners.items()]

    def _domain(self, component: str, runner: ModelRunner) -> CacheDomain:
        """A model's device caches, bound to it."""
        domain = CacheDomain(runner.layout.role, component, runner.layout)
        by_layer: dict[int, torch.Tensor] = {}
        for layout in runner.layout.blocks:
            kind = layout.block_type
            caches = allocate_device_cache(layout, self.num_device_blocks[kind], self._device)
            by_layer.update(zip(layout.layers, caches, strict=True))
            domain.caches[kind] = BlockCache(layout, [as_bytes(cache) for cache in caches])
        runner.bind_cache([by_layer[layer] for layer in range(runner.layout.num_layers)])
        return domain

    @property
    def sizes(self) -> list[TypeSizes]:
        """The blocks of each type, the model's first type first."""
        spans = {layout.block_type: layout.span for layout in self._layouts}
        return [
            TypeSizes(kind.value, spans[kind], count, self.num_host_blocks[kind], self.block_bytes[kind])
            for kind, count in self.num_device_blocks.items()
        ]

    def store_keys(self, rank: int) -> dict[str, list[str]]:
        """By block type, the key prefixes of the objects that `rank` keeps in the store."""
        keys: dict[str, list[str]] = {}
        for domain in self.domains:
            for kind, cache in domain.caches.items():
                if cache.layout.kept_by(rank):
                    keys.setdefault(kind.value, []).append(cache.prefix)
        return keys


def _block_bytes(layouts: Sequence[CacheLayout]) -> dict[BlockType, int]:
    """Device bytes of one block of each type, in all domains together."""
    nbytes: dict[BlockType, int] = {}
    for layout in layouts:
        for block in layout.blocks:
            nbytes[block.block_type] = nbytes.get(block.block_type, 0) + block.payload_bytes
    return nbytes
