"""Loading a model: our decoder or transformers' code, its attention over blocks, its recurrent states, its tiles."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from ...config import EngineConfig
from ...errors import ConfigError
from ...models.decoder import Decoder, load_decoder
from ...models.families import DecoderSpec, decoder_spec
from ...models.linear import DECODE_TILE_COST, PREFILL_TILE_COST, choose_tiles
from ...models.mtp import FIRST_POSITION, head_spec, load_head
from ...models.parallel import TensorParallel
from ...models.parts import Loader
from ...models.rope import RopeTable
from ...models.row_kernels import RowKernels
from ...models.weights import Checkpoint
from ..platform import Platform
from .attention import PagedAttention
from .model_facts import ModelFacts
from .recurrent_state import RecurrentStates

if TYPE_CHECKING:
    from ...models.hf_model import HfModel

logger = logging.getLogger(__name__)

_SCAN_TOKENS = 64  # of a recurrent layer's prompt go through one computation


def load_model(
    config: EngineConfig,
    facts: ModelFacts,
    platform: Platform,
    parallel: TensorParallel,
    *,
    progress: bool,
    target: Decoder | HfModel | None,
    kernels: RowKernels | None = None,
) -> Decoder | HfModel:
    """One rank's share of the model of `config`; with `target`, of the multi-token prediction head in its checkpoint.

    `kernels` None computes with torch's.

    Raises:
        ConfigError: the model cannot run as asked.
    """
    spec = _own_spec(config, facts)
    if spec is not None:
        spec.check_tp_size(parallel.size)
    elif parallel.size > 1:
        raise ConfigError("tp_size", parallel.size, "1 with transformers' modelling code (--model_impl=hf)")
    if target is not None and (spec is None or not isinstance(target, Decoder)):
        raise ConfigError("speculative_algorithm", "mtp", "ngram | draft_model with transformers' modelling code")
    if spec is None:
        from ...models.hf_model import HfModel  # transformers' models take a second to import

        return HfModel(config.model, facts.hf_config, facts.dtype, platform.device, progress=progress)
    ropes = {
        kind: RopeTable(
            facts.hf_config,
            kind,
            spec.rope_dim,
            max_len=facts.max_model_len,
            dtype=facts.dtype,
            device=platform.device,
        )
        for kind in dict.fromkeys(spec.rope_types)
    }
    with Checkpoint(config.model, progress=progress) as checkpoint:
        if isinstance(target, Decoder):
            loader = Loader(head_spec(spec), checkpoint, facts.dtype, platform.device, parallel, kernels)
            model = load_head(loader, target, ropes)
        else:
            model = load_decoder(Loader(spec, checkpoint, facts.dtype, platform.device, parallel, kernels), ropes)
    if config.batch_invariant and kernels is None:
        _choose_tiles(model, config.prefill_tile_rows)
    return model


def _own_spec(config: EngineConfig, facts: ModelFacts) -> DecoderSpec | None:
    """The spec for our decoder; None when transformers' code is to run."""
    if config.model_impl == "hf":
        return None
    try:
        return decoder_spec(facts.hf_config)
    except ConfigError as refused:
        if config.model_impl == "own":
            raise
        logger.info("running transformers' modelling code: %s", refused)
        return None


def make_attention(
    model: Decoder | HfModel, facts: ModelFacts, platform: Platform, kernels: RowKernels | None = None
) -> PagedAttention:
    """The attention of all layers of `model`, over blocks that are bound later."""
    shape = model.spec if isinstance(model, Decoder) else model
    first_position = FIRST_POSITION if isinstance(model, Decoder) and model.join else 0
    if isinstance(shape, DecoderSpec) and shape.latent:
        return platform.latent_attention(
            heads=shape.heads,
            width=shape.latent.width,
            dtype=facts.dtype,
            block_size=facts.block_size,
            windows=shape.windows,
            first_position=first_position,
            kernels=kernels,
        )
    return platform.attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=facts.dtype,
        block_size=facts.block_size,
        windows=shape.windows,
        first_position=first_position,
        kernels=kernels,
    )


def make_states(model: Decoder | HfModel, facts: ModelFacts, platform: Platform) -> RecurrentStates | None:
    """The states of the recurrent layers of `model`; None when it has none."""
    if not isinstance(model, Decoder) or not any(model.spec.recurrent):
        return None
    layers = [layer for layer, net in enumerate(model.spec.recurrent) if net]
    spec = next(net for net in model.spec.recurrent if net)
    scan_tokens = math.gcd(facts.block_size, _SCAN_TOKENS)  # so that each block ends a cell of the scan
    return RecurrentStates(spec=spec, layers=layers, dtype=facts.dtype, device=platform.device, scan_tokens=scan_tokens)


def _choose_tiles(model: Decoder, fixed_rows: int) -> None:
    on_cpu = model.embedding.device.type == "cpu"
    prefill = {fixed_rows: 1.0} if fixed_rows else PREFILL_TILE_COST if on_cpu else {256: 1.0}
    decode = DECODE_TILE_COST if on_cpu else {32: 1.0}
    choose_tiles([*model.linears(), *model.grouped_linears()], prefill, decode)
    if model.head.decode is None:  # else it is another's, which has chosen
        choose_tiles([model.head], {max(prefill): 1.0}, decode)
    linears, device = model.linears(), model.embedding.device
    prefill_unit = max(linear.prefill.unit for linear in linears if linear.prefill)
    decode_unit = max(linear.decode.unit for linear in [*linears, model.head] if linear.decode)
    # Rank 0 adds residuals inside its products, a kernel of its own: the ranks' units may differ, their rows must not.
    model.prefill_unit = model.parallel.agree(prefill_unit, largest=True, device=device)
    model.decode_unit = model.parallel.agree(decode_unit, largest=True, device=device)
    # Few rows keep a layer's activations in the CPU's cache; with experts more of them share a read of the weights.
    model.chunk_rows = max(prefill) * (4 if model.grouped_linears() else 1)
