"""The model of one worker: loads it, says what its cache looks like, and computes one plan at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from ...block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from ...config import EngineConfig
from ...errors import ConfigError
from ...figures import ModelDetails
from ...models.decoder import Decoder, StepRows, load_decoder
from ...models.families import DecoderSpec, decoder_spec
from ...models.identity import ModelIdentity, model_identity
from ...models.linear import DECODE_TILE_COST, PREFILL_TILE_COST, Linear, can_pack, choose_tiles
from ...models.mtp import FIRST_POSITION, head_spec, load_head
from ...models.parallel import TensorParallel
from ...models.parts import Loader
from ...models.rope import RopeTable
from ...models.weights import Checkpoint
from ...plans import Forward, SequenceRows, TokenLogprob
from ..platform import Platform
from .attention import PagedAttention, Span
from .latent_attention import LatentAttention
from .recurrent_state import RecurrentStates, StateSpan
from .sampler import sample, token_logprobs

if TYPE_CHECKING:
    from ...models.hf_model import HfModel

logger = logging.getLogger(__name__)

# Prompt log probabilities take vocab x 4 bytes per row; so many rows at a time bound it.
_HEAD_ROWS = 32
_SCAN_TOKENS = 64  # of a recurrent layer's prompt go through one computation


@dataclass
class ModelOutput:
    """Tokens and perhaps their log probabilities of each sequence that had `sampling`, prefill first, in plan order.

    `num_tokens`: how many each has; None: one each.

    `prompt_logprobs`: one list per prefill sequence that asked, one entry per position whose next token is known.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]
    num_tokens: list[int] | None = None


class ModelRunner:
    """The loaded model, or one rank's share of it; all of a process use its one thread count, on which bits depend.
    Ranks other than 0 compute all they are asked for; they return tokens only if `everywhere`, and then rank 0's.

    `head_of`: this is the multi-token prediction head in the checkpoint of that one, which stays the owner of what they
    share. `block_size` 0: as configured. `keeps_hidden`: `hidden_of` can be asked after a step, for which all rows go
    through the last layer.

    Raises:
        ConfigError: the folder holds no model that can run as asked.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = True,
        platform: Platform | None = None,
        parallel: TensorParallel | None = None,
        role: CacheRole = CacheRole.TARGET,
        head_of: ModelRunner | None = None,
        block_size: int = 0,
    ) -> None:
        self.everywhere = self.keeps_hidden = False
        self._role = role
        self.platform = platform or Platform.choose(config)
        self.parallel = parallel or TensorParallel()
        self.device = self.platform.device
        torch.set_num_threads(self.platform.torch_threads(config))
        self.hf_config = _model_config(config)
        self.dtype = _dtype(config, self.hf_config)
        self.block_size = block_size or config.block_size or self.platform.default_block_size
        self.max_model_len = _max_model_len(config, self.hf_config)
        self.vocab_size = int(self.hf_config.vocab_size)
        self.eos_token_ids = _eos_token_ids(Path(config.model), self.hf_config)
        self.last_logits = self._hidden = torch.empty(0)
        self._places: list[int] = []  # where each sequence's rows begin in _hidden, with keeps_hidden
        self._drawn: list[int] = []  # the rows of _hidden that were sampled from
        with torch.inference_mode():
            self._model: Decoder | HfModel = self._load(config, progress, head_of)
            self._attention = self._make_attention()
            self._states = self._make_states()
        if config.chunk_tokens < self.scan_tokens:
            name = "max_tokens_per_batch"
            if config.max_tokens_per_chunk_for_prefill == config.chunk_tokens:
                name = "max_tokens_per_chunk_for_prefill"
            allowed = f"at least {self.scan_tokens}, as recurrent layers take so many tokens at a time"
            raise ConfigError(name, config.chunk_tokens, allowed)
        self._takes_hidden = head_of is not None and head_of.is_recurrent
        self._hidden_blocks = torch.empty(0)
        self.layout = self._layout(config)
        self._window_blocks = any(block.block_type is BlockType.SWA for block in self.layout.blocks)
        self.details = self._details(config)
        self._folder = config.model

    @cached_property
    def identity(self) -> ModelIdentity:
        """Which model this is; quick after loading, when its pages are in memory."""
        return model_identity(self._folder, self.dtype)

    @property
    def is_recurrent(self) -> bool:
        """Some of its layers have a state in place of keys and values."""
        return self._states is not None

    @property
    def scan_tokens(self) -> int:
        """Prompt steps of a sequence must end at multiples of this, or with the prompt; 1 where nothing asks for it."""
        return self._states.scan_tokens if self._states is not None else 1

    def bind_cache(self, layer_caches: list[torch.Tensor]) -> None:
        """Use these caches, one per layer of the model: contiguous [num_blocks, tensors, *shape], or bytes of a layer
        with a state, as `layout` has them."""
        if self._states is not None:
            self._states.bind([layer_caches[layer] for layer in self._states.layers])
        if self._takes_hidden:
            *layer_caches, kept = layer_caches
            self._hidden_blocks = kept.flatten(1)
        recurrent = self._states.layers if self._states is not None else ()
        nothing = self._attention.no_cache()
        self._attention.bind([nothing if n in recurrent else cache for n, cache in enumerate(layer_caches)])

    def begin_head(self, block: int) -> None:
        """Of a head: a sequence's first block is written anew; what lies before its first position must not be what
        somebody else left there."""
        self._attention.zero_before_first(block)

    def save_hidden(self, block: int, hidden: torch.Tensor) -> None:
        """Of a head: keep, with the target's state in this block, its hidden state of the same token [hidden]."""
        self._hidden_blocks[block] = hidden

    def saved_hidden(self, block: int) -> torch.Tensor:
        """What `save_hidden` kept [1, hidden]."""
        return self._hidden_blocks[block : block + 1]

    @torch.inference_mode()
    def forward(
        self, plan: Forward, wait_for_layer: Callable[[int], None], given: torch.Tensor | None = None
    ) -> ModelOutput:
        """Compute one step; `wait_for_layer(i)` is called before layer i touches the cache.

        The logits that were sampled from stay in `last_logits` [sampled sequences, vocab], fp32, until the next step.
        `given` [the plan's tokens, hidden] is what a multi-token prediction head takes beside them.
        """
        if not plan.prefill and not plan.decode:
            for layer in range(self.layout.num_layers):
                wait_for_layer(layer)
            return ModelOutput([], [], [])
        rows, spans = self._lay_out(plan)
        sequences = [*plan.prefill, *plan.decode]
        count = len(plan.prefill)
        self._attention.prepare(spans[:count], spans[count:], len(rows.token_ids))
        if self._states is not None:
            moves = [_state_span(sequence, span) for sequence, span in zip(sequences, spans, strict=True)]
            self._states.prepare(moves[:count], moves[count:], len(rows.token_ids))
        hidden = self._run(rows, spans, wait_for_layer, given)
        place = {row: index for index, row in enumerate(rows.wanted.tolist())}
        self._hidden, self._drawn = hidden, []
        if self.keeps_hidden:
            self._places = [place[span.row] for span in spans]
        prompt_logprobs = [
            self._prompt_logprobs(sequence, hidden[place[span.row] : place[span.row] + span.stop - span.start])
            for sequence, span in zip(plan.prefill, spans[:count], strict=True)
            if sequence.prompt_logprobs is not None
        ]
        pairs = zip(sequences, spans, strict=True)
        drawn = [(sequence, span) for sequence, span in pairs if sequence.sampling is not None]
        asked = [
            (
                sequence.sampling,
                sequence.draw + number,
                place[span.row + span.stop - span.start - 1 - sequence.num_drafts + number],
            )
            for sequence, span in drawn
            for number in range(sequence.num_drafts + 1)
            if sequence.sampling is not None
        ]
        self._drawn = [index for _, _, index in asked]
        if not asked:
            return ModelOutput([], [], prompt_logprobs)
        logits = self._model.logits(hidden[self._drawn])
        self.last_logits = logits
        specs, first = [sampling for sampling, _, _ in asked], self.parallel.rank == 0
        token_ids = sample(logits, specs, [draw for _, draw, _ in asked]) if first else [0] * len(asked)
        if self.everywhere:
            token_ids = self.parallel.from_first(token_ids, self.device)
        elif not first:
            return ModelOutput([], [], [])
        counts = [spec.num_logprobs if first else None for spec in specs]
        output = ModelOutput(token_ids, token_logprobs(logits, token_ids, counts), prompt_logprobs)
        return _accepted([sequence for sequence, _ in drawn], output)

    def hidden_of(self, index: int, count: int) -> torch.Tensor:
        """Final hidden states [count, hidden] of the first rows of sequence `index` of the last plan, not normed."""
        return self._hidden[self._places[index] :][:count]

    def hidden_drawn_from(self) -> torch.Tensor:
        """Those of the rows that the last step sampled from [sampled rows, hidden]."""
        return self._hidden[self._drawn]

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states as a multi-token prediction head takes them."""
        assert isinstance(self._model, Decoder)
        return self._model.normed(hidden)

    def _run(
        self, rows: StepRows, spans: list[Span], wait_for_layer: Callable[[int], None], given: torch.Tensor | None
    ) -> torch.Tensor:
        if not isinstance(self._model, Decoder):
            return self._model.forward(rows, self._attention, wait_for_layer)
        if given is None:
            return self._model.forward(rows, self._attention, wait_for_layer, recurrence=self._states)
        places = np.concatenate([np.arange(span.row, span.row + span.stop - span.start) for span in spans])
        padded = given.new_zeros(len(rows.token_ids), given.shape[1])
        padded[torch.from_numpy(places).to(self.device)] = given
        return self._model.forward(rows, self._attention, wait_for_layer, padded)

    # ------------------------------------------------------------------------------------------- one step

    def _lay_out(self, plan: Forward) -> tuple[StepRows, list[Span]]:
        """Rows of the step: all prompt rows, padding to their unit, all generated rows, padding to theirs."""
        spans: list[Span] = []
        wanted: list[range] = []
        row = 0
        for sequence in plan.prefill:
            spans.append(self._span(sequence, row, self.keeps_hidden or sequence.prompt_logprobs is not None))
            row += len(sequence.token_ids)
        num_prefill = -(-row // self._model.prefill_unit) * self._model.prefill_unit
        prefill_padding, row = num_prefill - row, num_prefill
        for decode in plan.decode:
            spans.append(self._span(decode, row, self.keeps_hidden))
            row += len(decode.token_ids)
        total = num_prefill - (num_prefill - row) // self._model.decode_unit * self._model.decode_unit
        token_ids, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        parts = [part.token_ids for part in plan.prefill] + [part.token_ids for part in plan.decode]
        for part, span in zip(parts, spans, strict=True):
            token_ids[span.row : span.row + len(part)] = part
            positions[span.row : span.row + len(part)] = np.arange(span.start, span.stop)
            wanted.append(range(span.row + span.wanted_from - span.start, span.row + span.stop - span.start))
        indices = torch.tensor([index for rows in wanted for index in rows], dtype=torch.int64)
        tensors = (torch.from_numpy(token_ids), torch.from_numpy(positions))
        ids, places = (tensor.to(self.device) for tensor in tensors)
        return StepRows(ids, places, num_prefill, indices.to(self.device), (prefill_padding, total - row)), spans

    def _span(self, sequence: SequenceRows, row: int, all_wanted: bool) -> Span:
        start, stop = sequence.start, sequence.start + len(sequence.token_ids)
        num_drawn = sequence.num_drafts + 1 if sequence.sampling is not None else 0
        wanted_from = start if all_wanted else stop - num_drawn
        window_table = sequence.window_table if self._window_blocks else None
        return Span(start, stop, row, sequence.block_table, sequence.write_from, wanted_from, window_table)

    def _prompt_logprobs(self, sequence: SequenceRows, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the tokens after each position of the chunk; the last one's successor may lie in the next chunk."""
        following = sequence.token_ids[1:].tolist()
        if sequence.next_token is not None:
            following.append(sequence.next_token)
        result: list[TokenLogprob] = []
        for start in range(0, len(following), _HEAD_ROWS):
            targets = following[start : start + _HEAD_ROWS]
            logits = self._model.logits(hidden[start : start + len(targets)])
            if self.parallel.rank != 0:
                continue
            found = token_logprobs(logits, targets, [sequence.prompt_logprobs] * len(targets))
            result.extend(entry for entry in found if entry is not None)
        return result

    # ------------------------------------------------------------------------------------------- loading

    def _load(self, config: EngineConfig, progress: bool, head_of: ModelRunner | None) -> Decoder | HfModel:
        spec = self._own_spec(config)
        if spec is not None:
            spec.check_tp_size(self.parallel.size)
        elif self.parallel.size > 1:
            raise ConfigError("tp_size", self.parallel.size, "1 with transformers' modelling code (--model_impl=hf)")
        if head_of is not None and (spec is None or not isinstance(head_of._model, Decoder)):
            raise ConfigError("speculative_algorithm", "mtp", "ngram | draft_model with transformers' modelling code")
        if spec is None:
            from ...models.hf_model import HfModel  # transformers' models take a second to import

            return HfModel(config.model, self.hf_config, self.dtype, self.device, progress=progress)
        ropes = {
            kind: RopeTable(
                self.hf_config, kind, spec.rope_dim, max_len=self.max_model_len, dtype=self.dtype, device=self.device
            )
            for kind in dict.fromkeys(spec.rope_types)
        }
        with Checkpoint(config.model, progress=progress) as checkpoint:
            if head_of is not None and isinstance(head_of._model, Decoder):
                loader = Loader(head_spec(spec), checkpoint, self.dtype, self.device, self.parallel)
                model = load_head(loader, head_of._model, ropes)
            else:
                model = load_decoder(Loader(spec, checkpoint, self.dtype, self.device, self.parallel), ropes)
        if config.batch_invariant:
            _choose_tiles(model, config.prefill_tile_rows)
        return model

    def _own_spec(self, config: EngineConfig) -> DecoderSpec | None:
        """The spec for our decoder; None when transformers' code is to run."""
        if config.model_impl == "hf":
            return None
        try:
            return decoder_spec(self.hf_config)
        except ConfigError as refused:
            if config.model_impl == "own":
                raise
            logger.info("running transformers' modelling code: %s", refused)
            return None

    def _make_attention(self) -> PagedAttention:
        model = self._model
        shape = model.spec if isinstance(model, Decoder) else model
        first_position = FIRST_POSITION if isinstance(model, Decoder) and model.join else 0
        if isinstance(shape, DecoderSpec) and shape.latent:
            return self.platform.latent_attention(
                heads=shape.heads,
                width=shape.latent.width,
                dtype=self.dtype,
                block_size=self.block_size,
                windows=shape.windows,
                first_position=first_position,
            )
        return self.platform.attention(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            block_size=self.block_size,
            windows=shape.windows,
            first_position=first_position,
        )

    def _make_states(self) -> RecurrentStates | None:
        model = self._model
        if not isinstance(model, Decoder) or not any(model.spec.recurrent):
            return None
        layers = [layer for layer, net in enumerate(model.spec.recurrent) if net]
        spec = next(net for net in model.spec.recurrent if net)
        scan_tokens = math.gcd(self.block_size, _SCAN_TOKENS)  # so that each block ends a cell of the scan
        return RecurrentStates(spec=spec, layers=layers, dtype=self.dtype, device=self.device, scan_tokens=scan_tokens)

    def _layout(self, config: EngineConfig) -> CacheLayout:
        """Blocks by type: of full attention, of sliding windows that are kept apart, of recurrent states."""
        recurrent = self._states.layers if self._states is not None else ()
        layers = [layer for layer in range(len(self._attention.windows)) if layer not in recurrent]
        sliding = [layer for layer in layers if self._attention.windows[layer] is not None]
        if not self._keeps_windows_apart(config, len(sliding) == len(layers)):
            sliding = []
        full = [layer for layer in layers if layer not in sliding]
        blocks = [self._attention_blocks(BlockType.KV, full)] if full else []
        if sliding:
            span = max(window for window in self._attention.windows if window is not None)
            blocks.append(replace(self._attention_blocks(BlockType.SWA, sliding), span=span))
        if self._states is not None:
            tensors = self._states.tensors
            blocks.append(BlockLayout(BlockType.LINEAR, self.block_size, recurrent, tensors, span=1))
        if self._takes_hidden:
            # The target cannot step back to the token before a restored state: a head's hidden state of it lies beside.
            hidden = TensorSpec("hidden", str(self.dtype).removeprefix("torch."), (int(self.hf_config.hidden_size),))
            blocks.append(BlockLayout(BlockType.LINEAR, self.block_size, (len(layers),), (hidden,), span=1))
        return CacheLayout(self._role, tuple(blocks))

    def _keeps_windows_apart(self, config: EngineConfig, all_slide: bool) -> bool:
        """A draft's caches, and what has the numbers of a draft's blocks, lie in KV blocks; a window that no sequence
        outgrows saves nothing."""
        windows = [window for window in self._attention.windows if window is not None]
        return (
            config.cache_layout == "auto"
            and bool(windows)
            and max(windows) < self.max_model_len
            and isinstance(self._model, Decoder)
            and self._role is CacheRole.TARGET
            and not (all_slide and config.drafts_by_model)
        )

    def _attention_blocks(self, block_type: BlockType, layers: list[int]) -> BlockLayout:
        attention = self._attention
        shape = (self.block_size, attention.kv_heads, attention.head_dim)
        dtype = str(self.dtype).removeprefix("torch.")
        tensors: tuple[TensorSpec, ...] = (TensorSpec("key", dtype, shape), TensorSpec("value", dtype, shape))
        latent = isinstance(attention, LatentAttention)
        if latent:
            tensors = (TensorSpec("latent", dtype, (self.block_size, attention.head_dim)),)
        return BlockLayout(block_type, self.block_size, tuple(layers), tensors, replicated=latent)

    @property
    def _equal_bits(self) -> bool:
        """Whether the bits of a row are known not to depend on what is computed beside it."""
        return self._attention.batch_invariant and (self._states is None or self.device.type == "cpu")

    def _details(self, config: EngineConfig) -> ModelDetails:
        model = self._model
        own = isinstance(model, Decoder)
        prefill = [*model.linears(), *model.grouped_linears()] if isinstance(model, Decoder) else []
        decode = [*prefill, model.head] if isinstance(model, Decoder) else []
        details = ModelDetails(
            family=self.hf_config.model_type,
            implementation="own" if own else "hf",
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device.type,
            threads=torch.get_num_threads(),
            tp_size=self.parallel.size,
            experts=_has_experts(self.hf_config),
            cpu_capability=torch.backends.cpu.get_cpu_capability() if self.device.type == "cpu" else "",
            packed_weights=own and can_pack(self.dtype, self.device),
            batch_invariant=own and config.batch_invariant and self._equal_bits,
            attention=self._attention.kernel,
            query_tiles=list(self._attention.tiles),
            prefill_tiles={_label(i): list(i.prefill.sizes) for i in prefill if i.prefill},
            decode_rows={_label(i): list(i.decode.sizes) for i in decode if i.decode},
            parameter_bytes=_parameter_bytes(model),
            scan_tokens=self.scan_tokens if self._states is not None else None,
        )
        return replace(details, numerics_id=_numerics_id(details))


def _parameter_bytes(model: Decoder | HfModel) -> int:
    """Bytes of the weights; of a head those that it does not share with its target."""
    if not isinstance(model, Decoder):
        return int(model.nbytes)
    layers: int = sum(linear.nbytes for linear in [*model.linears(), *model.grouped_linears()])
    if model.join:
        return layers
    embedding = 0 if model.spec.tied else int(model.embedding.nbytes)
    return layers + model.head.nbytes + embedding


def _has_experts(hf_config: Any) -> bool:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any((getattr(hf_config, name, 0) or 0) > 1 for name in names)


def _label(linear: Linear) -> str:
    inputs, outputs, what, dtype = linear.shape_key
    return f"{inputs}x{outputs}:{what}:{str(dtype).removeprefix('torch.')}"


def _numerics_id(details: ModelDetails) -> str:
    """Names the facts on which the bits depend: two workers with equal ids and weights compute equal bits."""
    facts = asdict(details) | {"torch": torch.__version__}
    del facts["numerics_id"]
    if details.scan_tokens is None:
        del facts["scan_tokens"]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    place = details.cpu_capability or details.device
    return f"{details.implementation}-{place}-{details.dtype}-t{details.threads}-{digest}"


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


def _state_span(sequence: SequenceRows, span: Span) -> StateSpan:
    moves = sequence.states
    assert moves is not None, "a sequence of a recurrent model needs its state"
    saved = tuple(zip(moves.positions.tolist(), moves.blocks.tolist(), strict=True))
    return StateSpan(span.row, span.stop - span.start, span.start, moves.source, saved)


def _accepted(sequences: list[SequenceRows], drawn: ModelOutput) -> ModelOutput:
    """What was drawn, cut behind each sequence's first token that is not the draft at its place.

    Every token is drawn from the target's own logits with the draw it would have had without drafts, and the logits of
    a row do not depend on the rows beside it: the tokens are those of a run without drafts, sampled ones too. With a
    draft's distribution all on one token this is rejection sampling (https://arxiv.org/abs/2211.17192), at its rate.
    """
    if not any(sequence.num_drafts for sequence in sequences):
        return drawn
    token_ids: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    num_tokens, place = [], 0
    for sequence in sequences:
        drafts = sequence.token_ids[len(sequence.token_ids) - sequence.num_drafts :].tolist()
        found = drawn.token_ids[place : place + len(drafts) + 1]
        count = 1
        while count <= len(drafts) and found[count - 1] == drafts[count - 1]:
            count += 1
        token_ids += found[:count]
        logprobs += drawn.logprobs[place : place + count]
        num_tokens.append(count)
        place += len(drafts) + 1
    return ModelOutput(token_ids, logprobs, drawn.prompt_logprobs, num_tokens)


# ------------------------------------------------------------------------------------------- what to load


def _model_config(config: EngineConfig) -> Any:
    try:
        hf_config = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model", config.model, f"a folder with a config.json of a known model ({error})") from error
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError("model", config.model, "models without quantization_config")
    if not hasattr(hf_config, "num_hidden_layers"):
        raise ConfigError("model", config.model, f"text models with a causal head (not {hf_config.model_type})")
    return hf_config


def _dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else (hf_config.dtype or torch.float32)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError("dtype", config.dtype, f"float32 | bfloat16 | float16 for this checkpoint (it is {dtype})")
    return dtype


def _max_model_len(config: EngineConfig, hf_config: Any) -> int:
    limit = int(getattr(hf_config, "max_position_embeddings", 0)) or config.max_model_len
    if not limit:
        raise ConfigError("max_model_len", 0, "a number of tokens, as this model names no longest length")
    if config.max_model_len > limit:
        raise ConfigError("max_model_len", config.max_model_len, f"at most {limit} (tokens) with this model")
    return config.max_model_len or limit


def _eos_token_ids(folder: Path, hf_config: Any) -> list[int]:
    """generation_config.json first: chat models often name more end tokens there."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = getattr(hf_config, "eos_token_id", None)
    return [] if found is None else [int(item) for item in (found if isinstance(found, list) else [found])]
