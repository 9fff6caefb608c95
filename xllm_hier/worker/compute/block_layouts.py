"""The blocks of a loaded model by type: full attention, sliding windows kept apart, recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from ...config import EngineConfig
from .attention import PagedAttention
from .latent_attention import LatentAttention
from .model_facts import ModelFacts
from .recurrent_state import RecurrentStates


def cache_layout(
    facts: ModelFacts,
    attention: PagedAttention,
    states: RecurrentStates | None,
    role: CacheRole,
    *,
    windows_apart: bool,
    takes_hidden: bool,
) -> CacheLayout:
    """The layouts of all block types of a model.

    `windows_apart`: layers with a sliding window have SWA blocks, else KV blocks as all others. `takes_hidden`: the
    model is a head that keeps its target's hidden state beside each recurrent state.
    """
    recurrent = states.layers if states is not None else ()
    layers = [layer for layer in range(len(attention.windows)) if layer not in recurrent]
    sliding = [layer for layer in layers if windows_apart and attention.windows[layer] is not None]
    full = [layer for layer in layers if layer not in sliding]
    blocks = [_attention_blocks(BlockType.KV, full, facts, attention)] if full else []
    if sliding:
        span = max(window for window in attention.windows if window is not None)
        blocks.append(replace(_attention_blocks(BlockType.SWA, sliding, facts, attention), span=span))
    if states is not None:
        blocks.append(BlockLayout(BlockType.LINEAR, facts.block_size, recurrent, states.tensors, span=1))
    if takes_hidden:
        # The target cannot step back to the token before a restored state: a head's hidden state of it lies beside.
        hidden = TensorSpec("hidden", facts.dtype_name, (int(facts.hf_config.hidden_size),))
        blocks.append(BlockLayout(BlockType.LINEAR, facts.block_size, (len(layers),), (hidden,), span=1))
    return CacheLayout(role, tuple(blocks))


def keeps_windows_apart(
    config: EngineConfig, facts: ModelFacts, attention: PagedAttention, num_recurrent: int, role: CacheRole
) -> bool:
    """Whether the windows of one of our decoders have blocks of their own.

    A draft's caches, and those that share the numbers of a draft's blocks, lie in KV blocks; a window that no sequence
    outgrows saves nothing.
    """
    windows = [window for window in attention.windows if window is not None]
    all_slide = len(windows) == len(attention.windows) - num_recurrent
    return (
        config.cache_layout == "auto"
        and bool(windows)
        and max(windows) < facts.max_model_len
        and role is CacheRole.TARGET
        and not (all_slide and config.drafts_by_model)
    )


def _attention_blocks(
    block_type: BlockType, layers: Sequence[int], facts: ModelFacts, attention: PagedAttention
) -> BlockLayout:
    shape, dtype = (facts.block_size, attention.kv_heads, attention.head_dim), facts.dtype_name
    tensors: tuple[TensorSpec, ...] = (TensorSpec("key", dtype, shape), TensorSpec("value", dtype, shape))
    latent = isinstance(attention, LatentAttention)
    if latent:
        tensors = (TensorSpec("latent", dtype, (facts.block_size, attention.head_dim)),)
    return BlockLayout(block_type, facts.block_size, tuple(layers), tensors, replicated=latent)
