"""The model of one worker: loads it, describes its cache, and computes one plan at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ...block import BlockType, CacheRole
from ...config import EngineConfig
from ...errors import ConfigError
from ...models.decoder import Decoder
from ...models.identity import ModelIdentity, model_identity
from ...models.parallel import TensorParallel
from ...plans import Forward, SequenceRows
from ...request_messages import TokenLogprob
from ..platform import Platform
from .attention import PagedAttention
from .block_layouts import cache_layout, keeps_windows_apart
from .model_facts import ModelFacts
from .model_loading import load_model, make_attention, make_states
from .native_attention import NativeAttention
from .numerics import model_details
from .row_check import find_difference
from .sampler import sample, token_logprobs
from .step_layout import StepLayout, sampled

if TYPE_CHECKING:
    from ...models.hf_model import HfModel

log = logging.getLogger("xllm.worker")

# Prompt log probabilities take vocab x 4 bytes per row; so many rows at a time bound it.
_HEAD_ROWS = 32


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

    `head_of`: this is the multi-token prediction head in the checkpoint of that one, which stays the owner of the parts
    they share. `block_size` 0: as configured. `keeps_hidden`: `hidden_of` can be asked after a step, for which all rows
    go through the last layer.

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
        self.platform = platform or Platform.choose(config)
        self.parallel = parallel or TensorParallel()
        torch.set_num_threads(self.platform.torch_threads(config))
        size = block_size or config.block_size or self.platform.default_block_size
        self.facts = facts = ModelFacts.read(config, size)
        target = head_of.model if head_of is not None else None
        with torch.inference_mode():
            self.model: Decoder | HfModel
            self.model, self._attention = self._load(config, target, progress=progress)
            self._states = make_states(self.model, facts, self.platform)
        _check_chunks(config, self.scan_tokens)
        self._takes_hidden = head_of is not None and head_of.is_recurrent
        num_recurrent = len(self._states.layers) if self._states is not None else 0
        apart = isinstance(self.model, Decoder) and keeps_windows_apart(
            config, facts, self._attention, num_recurrent, role
        )
        self.layout = cache_layout(
            facts, self._attention, self._states, role, windows_apart=apart, takes_hidden=self._takes_hidden
        )
        self._window_blocks = any(block.block_type is BlockType.SWA for block in self.layout.blocks)
        self.details = model_details(
            facts,
            self.model,
            self._attention,
            self._states,
            tp_size=self.parallel.size,
            batch_invariant=config.batch_invariant,
        )
        self._folder = config.model
        self._step: StepLayout | None = None  # of the last plan
        self.last_logits = self._hidden = self._hidden_blocks = torch.empty(0)
        self._drawn: list[int] = []  # the rows of _hidden that were sampled from

    def _load(
        self, config: EngineConfig, target: Decoder | HfModel | None, *, progress: bool
    ) -> tuple[Decoder | HfModel, PagedAttention]:
        """The model and its attention, with native kernels where the check of their rows passes."""
        kernels = self.platform.row_kernels(config)
        while True:
            model = load_model(
                config, self.facts, self.platform, self.parallel, progress=progress, target=target, kernels=kernels
            )
            attention = make_attention(model, self.facts, self.platform, kernels)
            if kernels is None or not isinstance(model, Decoder) or not isinstance(attention, NativeAttention):
                return model, attention
            difference = find_difference(model, attention)
            if self.parallel.agree(int(not difference)):
                log.info("computing with native kernels: %s", kernels.name)
                return model, attention
            if config.cpu_kernels == "native":
                raise ConfigError("cpu_kernels", "native", f"auto | torch here: {difference or 'another rank refuses'}")
            log.warning("computing with torch's CPU kernels: %s", difference or "another rank does")
            kernels = None

    @cached_property
    def identity(self) -> ModelIdentity:
        """The name of the weights; quick after loading, when its pages are in memory."""
        return model_identity(self._folder, self.facts.dtype)

    @property
    def is_recurrent(self) -> bool:
        """Some of its layers have a state in place of keys and values."""
        return self._states is not None

    @property
    def scan_tokens(self) -> int:
        """Prompt steps of a sequence must end at multiples of this, or with the prompt; 1 where nothing asks for it."""
        return self._states.scan_tokens if self._states is not None else 1

    # ------------------------------------------------------------------------------------------- caches

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
        """Of a head: a sequence's first block is written anew; the bytes before its first position must not be those
        that another sequence left there."""
        self._attention.zero_before_first(block)

    def save_hidden(self, block: int, hidden: torch.Tensor) -> None:
        """Of a head: keep, with the target's state in this block, its hidden state of the same token [hidden]."""
        self._hidden_blocks[block] = hidden

    def saved_hidden(self, block: int) -> torch.Tensor:
        """The hidden state that `save_hidden` kept [1, hidden]."""
        return self._hidden_blocks[block : block + 1]

    # ------------------------------------------------------------------------------------------- one step

    @torch.inference_mode()
    def forward(
        self, plan: Forward, wait_for_layer: Callable[[int], None], given: torch.Tensor | None = None
    ) -> ModelOutput:
        """Compute one step; `wait_for_layer(i)` is called before layer i touches the cache.

        The logits that were sampled from stay in `last_logits` [sampled rows, vocab], fp32, until the next step.
        `given` [the plan's tokens, hidden] is the second input of a multi-token prediction head.
        """
        if not plan.prefill and not plan.decode:
            for layer in range(self.layout.num_layers):
                wait_for_layer(layer)
            return ModelOutput([], [], [])
        step = self._step = StepLayout.of(
            plan,
            units=(self.model.prefill_unit, self.model.decode_unit),
            device=self.platform.device,
            windows_apart=self._window_blocks,
            all_rows=self.keeps_hidden,
        )
        count, num_rows = step.num_prefill, len(step.rows.token_ids)
        self._attention.prepare(step.spans[:count], step.spans[count:], num_rows)
        if self._states is not None:
            moves = step.state_spans
            self._states.prepare(moves[:count], moves[count:], num_rows)
        self._hidden, self._drawn = self._run(step, wait_for_layer, given), []
        prompt_logprobs = [
            self._prompt_logprobs(sequence, self._hidden[step.hidden_rows(index)])
            for index, sequence in enumerate(plan.prefill)
            if sequence.prompt_logprobs is not None
        ]
        return self._draw(step, prompt_logprobs)

    def _run(self, step: StepLayout, wait_for_layer: Callable[[int], None], given: torch.Tensor | None) -> torch.Tensor:
        """Final hidden states of the rows that are asked for [wanted rows, hidden]."""
        if not isinstance(self.model, Decoder):
            return self.model.forward(step.rows, self._attention, wait_for_layer)
        if given is None:
            return self.model.forward(step.rows, self._attention, wait_for_layer, recurrence=self._states)
        return self.model.forward(step.rows, self._attention, wait_for_layer, step.scattered(given))

    def _draw(self, step: StepLayout, prompt_logprobs: list[list[TokenLogprob]]) -> ModelOutput:
        """Sample every token that the step asks for."""
        specs, draws, self._drawn = step.draws()
        if not specs:
            return ModelOutput([], [], prompt_logprobs)
        logits = self.last_logits = self.model.logits(self._hidden[self._drawn])
        first = self.parallel.rank == 0
        token_ids = sample(logits, specs, draws) if first else [0] * len(specs)
        if self.everywhere:
            token_ids = self.parallel.from_first(token_ids, self.platform.device)
        elif not first:
            return ModelOutput([], [], [])
        counts = [spec.num_logprobs if first else None for spec in specs]
        output = ModelOutput(token_ids, token_logprobs(logits, token_ids, counts), prompt_logprobs)
        return _accepted(sampled(step.sequences), output)

    def _prompt_logprobs(self, sequence: SequenceRows, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the tokens after each position of the chunk; the last one's successor may lie in the next chunk."""
        following = sequence.token_ids[1:].tolist()
        if sequence.next_token is not None:
            following.append(sequence.next_token)
        result: list[TokenLogprob] = []
        for start in range(0, len(following), _HEAD_ROWS):
            targets = following[start : start + _HEAD_ROWS]
            logits = self.model.logits(hidden[start : start + len(targets)])
            if self.parallel.rank != 0:
                continue
            found = token_logprobs(logits, targets, [sequence.prompt_logprobs] * len(targets))
            result.extend(entry for entry in found if entry is not None)
        return result

    def hidden_of(self, index: int, count: int) -> torch.Tensor:
        """Final hidden states [count, hidden] of the first rows of sequence `index` of the last plan, not normed."""
        assert self._step is not None
        return self._hidden[self._step.hidden_rows(index)][:count]

    def hidden_drawn_from(self) -> torch.Tensor:
        """Final hidden states of the rows that the last step sampled from [sampled rows, hidden]."""
        return self._hidden[self._drawn]

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states as a multi-token prediction head takes them."""
        assert isinstance(self.model, Decoder)
        return self.model.normed(hidden)


def _check_chunks(config: EngineConfig, scan_tokens: int) -> None:
    if config.chunk_tokens < scan_tokens:
        name = "max_tokens_per_batch"
        if config.max_tokens_per_chunk_for_prefill == config.chunk_tokens:
            name = "max_tokens_per_chunk_for_prefill"
        allowed = f"at least {scan_tokens}, as recurrent layers take so many tokens at a time"
        raise ConfigError(name, config.chunk_tokens, allowed)


def _accepted(sequences: list[SequenceRows], drawn: ModelOutput) -> ModelOutput:
    """The drawn tokens, cut behind each sequence's first one that is not the draft at its place.

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
