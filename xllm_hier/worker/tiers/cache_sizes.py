"""How a worker's cache memory is shared out among the BlockTypes of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...block import BlockLayout, BlockType
from ...config import EngineConfig
from ...errors import ConfigError

_CHECKPOINT_TOKENS = 1024  # between two states worth keeping, unless a setting says so
_WINDOWS_PER_STRIDE = 4


def strides(config: EngineConfig, layouts: Sequence[BlockLayout]) -> dict[BlockType, int]:
    """Tokens between two boundaries worth keeping, of the types of which a restore needs a part only.

    Raises:
        ConfigError: a setting is no multiple of the block size.
    """
    settings = {
        BlockType.SWA: ("swa_checkpoint_stride", config.swa_checkpoint_stride),
        BlockType.LINEAR: ("linear_checkpoint_stride", config.linear_checkpoint_stride),
    }
    found = {}
    for layout in layouts:
        if layout.block_type not in settings:
            continue
        name, tokens = settings[layout.block_type]
        if tokens % layout.block_size:
            raise ConfigError(name, tokens, f"a multiple of the block size, {layout.block_size}")
        default = _WINDOWS_PER_STRIDE * layout.span if layout.block_type is BlockType.SWA else _CHECKPOINT_TOKENS
        found[layout.block_type] = tokens or -(-default // layout.block_size) * layout.block_size
    return found


@dataclass(frozen=True)
class CacheSizes:
    """Device blocks of each type for a number of blocks of the first one, as the settings have it."""

    config: EngineConfig
    layouts: Sequence[BlockLayout]

    def counts(self, num_blocks: int) -> dict[BlockType, int]:
        """Blocks of each type beside `num_blocks` of the first.

        SWA: a share of them, but all that one sequence needs in a step. LINEAR: what the sequences of a step need for
        themselves, and a checkpoint for each stride of the tokens that the other blocks hold.
        """
        counts = {self.layouts[0].block_type: num_blocks}
        for layout in self.layouts[1:]:
            if layout.block_type is BlockType.SWA:
                share = int(num_blocks * self.config.swa_blocks_factor)
                counts[BlockType.SWA] = min(num_blocks, max(share, self.swa_need(layout)))
            else:
                counts[BlockType.LINEAR] = self._states(layout, num_blocks)
        return counts

    def swa_need(self, layout: BlockLayout) -> int:
        """SWA blocks of one sequence in one step: its window, a chunk, and what lies across their edges."""
        ahead = self.config.num_speculative_tokens + 1
        tokens = layout.span + self.config.chunk_tokens + ahead
        return -(-tokens // layout.block_size) + 2

    def _states(self, layout: BlockLayout, num_blocks: int) -> int:
        stride = strides(self.config, self.layouts)[BlockType.LINEAR]
        checkpoints = int(num_blocks * layout.block_size * self.config.linear_checkpoints_factor / stride)
        sequences = min(self.config.max_seqs_per_batch, num_blocks)
        return sequences * (1 + self.config.num_speculative_tokens) + max(2, checkpoints)

    def fit(self, budget: int, bytes_of: Mapping[BlockType, int]) -> int:
        """The most blocks of the first type with which all fit into `budget` bytes.

        Raises:
            ConfigError: not even one sequence's blocks fit.
        """

        def total(num_blocks: int) -> int:
            return sum(count * bytes_of[kind] for kind, count in self.counts(num_blocks).items())

        least = self.swa_need(self.layouts[0]) if self.layouts[0].block_type is BlockType.SWA else 1
        if total(least) > budget:
            raise ConfigError("max_cache_size", budget, f"at least {total(least)} bytes for one sequence")
        return _largest(least, budget // bytes_of[self.layouts[0].block_type], lambda count: total(count) <= budget)


def _largest(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The largest good number of `low .. high`, of which `low` is good, as are all below a good one."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
