"""What a request can be spared at the most, found token by token, against what `allocate` takes."""

from __future__ import annotations

from xllm_hier.block import BlockType
from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.sequence import Sequence


class HitOracle:
    """Looks at the pools each time a sequence takes its cached prefix: no more may be hit than is there, and no less
    where all that is there is wanted."""

    def __init__(self, manager: HierarchyBlockManagerPool, window: int) -> None:
        self._manager = manager
        self._window = window
        self._allocate = manager.allocate
        self.num_hits = 0
        manager.allocate = self._watched  # type: ignore[method-assign]

    def _watched(self, sequence: Sequence, num_tokens: int) -> bool:
        if sequence.probed:
            return self._allocate(sequence, num_tokens)
        all_there, on_device = self.most(sequence), self.most(sequence, host=False)
        done = self._allocate(sequence, num_tokens)
        if done:
            policy, hit = self._manager.policy, sequence.num_computed
            least = all_there if policy.loading_pays() else on_device
            assert hit == least, f"{sequence.request.request_id}: {hit} tokens are hit, {least} could be"
            self.num_hits += hit > 0
        return done

    def most(self, sequence: Sequence, *, host: bool = True) -> int:
        """Tokens that could be spared, with the blocks of the device and, if so wanted, of the host."""
        manager, size, length = self._manager, self._manager.settings.block_size, len(sequence.tokens)
        wants_all = sequence.request.prompt_logprobs is not None and not sequence.num_generated
        if sequence.private or not manager.settings.prefix_cache or wants_all:
            return 0
        best = 0
        for boundary in range(size, min(length, length - 2 + size) + 1, size):  # the last block spares a token itself
            # A recurrent model cannot compute its last token again; a decode row writes, so not into a shared block.
            whole = boundary == length
            if whole and (BlockType.LINEAR in manager.pools or sequence.num_generated):
                continue
            if all(self._holds(sequence, kind, boundary, host=host) for kind in manager.pools):
                best = min(boundary - manager.settings.drafting.needs_hidden, length - 1)
        return best

    def _holds(self, sequence: Sequence, kind: BlockType, boundary: int, *, host: bool) -> bool:
        """The tokens that a restore at `boundary` needs of one type are there."""
        first = {BlockType.KV: 0, BlockType.SWA: boundary - self._window, BlockType.LINEAR: boundary - 1}[kind]
        pools, size = self._manager.pools[kind], self._manager.settings.block_size
        for token in range(max(0, first), boundary):
            name = sequence.hash_of(token // size)
            there = pools.device.find(name) is not None
            if host:
                there = there or pools.host.find(name) is not None or token // size in sequence.held[kind].mounted
            if not there:
                return False
        return True
