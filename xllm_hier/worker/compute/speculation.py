"""Drafts by a model of this worker that has caches of its own: a smaller one, or the checkpoint's own head.

Its caches share the target's block ids. Behind each step of the target it takes in the tokens that are now known, one
more than the target has computed, and drafts on from there; the engine sends the drafts back with the next step::

    positions          s      s+1    s+2    s+3
    target's rows      t(s)   d1     d2     d3        drafts of the last step behind the newest token
    drawn from them    d1     d2     new              d3 is rejected: `new` stands in its place
    draft's rows              d1     d2     new       ... then new drafts, one row each

A draft is drawn from the draft's own distribution with the numbers that the target will draw with (see `sampler`), so
it is accepted whenever the target draws the same; the answer does not depend on it. The KV of rejected drafts in the
caches is written over before anybody attends to it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ...block import CacheRole
from ...config import EngineConfig
from ...errors import ConfigError
from ...ints import Ints, ints
from ...models.identity import ModelIdentity
from ...models.mtp import FIRST_POSITION
from ...plans import Forward, SequenceRows
from ...request_messages import SamplingSpec
from ...store_key import draft_component
from .model_runner import ModelOutput, ModelRunner

log = logging.getLogger("xllm.worker")


@dataclass
class _Work:
    """The draft's work for one sequence: rows of `tokens` from position `start`, the last `num_decoded` of them
    by the decode path; `given` their hidden states, for a head; then `num_proposals` drafts with `sampling`."""

    table: Ints
    start: int
    tokens: list[int]
    num_decoded: int
    given: torch.Tensor | None
    sampling: SamplingSpec | None
    draw: int
    num_proposals: int
    proposals: list[int] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DraftModel:
    """The draft model of one rank; all ranks draft alike. `component` names its caches in the store."""

    def __init__(self, target: ModelRunner, runner: ModelRunner, component: str, *, is_head: bool) -> None:
        self.runner = runner
        self.component = component
        self.is_head = is_head
        self._target = target
        self.going_on_s = 0.0
        target.everywhere = runner.everywhere = True
        target.keeps_hidden = is_head

    @classmethod
    def load(cls, config: EngineConfig, target: ModelRunner, *, progress: bool = True) -> DraftModel | None:
        """The one `config` asks for; None when drafts need no model.

        Raises:
            ConfigError: it cannot draft for this target.
        """
        if not config.drafts_by_model:
            return None
        is_head = config.speculative_algorithm == "mtp"
        more: dict[str, Any] = {"platform": target.platform, "parallel": target.parallel, "role": CacheRole.DRAFT}
        more["block_size"] = target.facts.block_size  # its blocks are the target's, number by number
        if is_head:
            runner = ModelRunner(config, progress=progress, head_of=target, **more)
        else:
            folder = Path(config.draft_model)
            check_same_tokenizer(config.tokenizer_folder, folder, target.facts.vocab_size)
            longest = _facts(folder).get("max_position_embeddings") or target.facts.max_model_len
            longest = min(target.facts.max_model_len, longest)
            own = dataclasses.replace(config, model=config.draft_model, max_model_len=longest)
            try:
                runner = ModelRunner(own, progress=progress, **more)
            except ConfigError as error:
                raise ConfigError("draft_model", config.draft_model, f"one that can run here ({error})") from error
            if runner.is_recurrent:
                raise ConfigError("draft_model", config.draft_model, "a model without recurrent layers")
        component = draft_component(
            config.speculative_algorithm, config.draft_model, "" if is_head else runner.identity.text
        )
        return cls(target, runner, component, is_head=is_head)

    @property
    def identity(self) -> ModelIdentity:
        return self._target.identity if self.is_head else self.runner.identity

    # ---------------------------------------------------------------------------------------------- drafting

    @torch.inference_mode()
    def propose(self, plan: Forward, output: ModelOutput) -> list[Ints]:
        """Take in what `output` made known and draft on: tokens for each sequence that was sampled from, in its order.

        The target's runner must have computed `plan` last. `going_on_s` is then the time of the drafts behind the
        first, which is no price of the step's tokens.
        """
        works, sampled = self._works(plan, output)
        self.going_on_s = 0.0
        if works:
            self._take_in(works)
            start = time.perf_counter()
            self._go_on([work for work in works if work.num_proposals])
            self.going_on_s = time.perf_counter() - start
        return [ints(work.proposals if work is not None else []) for work in sampled]

    def _works(self, plan: Forward, output: ModelOutput) -> tuple[list[_Work], list[_Work | None]]:
        """The draft's work for each sequence it has any for, and that of the sampled ones, None where there is none."""
        found = iter(_by_sequence(output))
        works: list[_Work] = []
        sampled: list[_Work | None] = []
        for index, sequence in enumerate([*plan.prefill, *plan.decode]):
            self._keep_hidden(index, sequence)
            drawn = next(found) if sequence.sampling is not None else []
            work = self._work(index, sequence, drawn, is_prompt=index < len(plan.prefill))
            if sequence.sampling is not None:
                sampled.append(work)
            if work is not None:
                works.append(work)
        return works, sampled

    def _work(self, index: int, sequence: SequenceRows, drawn: list[int], *, is_prompt: bool) -> _Work | None:
        if sequence.draft_from is None:
            return None
        given = sequence.token_ids[: len(sequence.token_ids) - sequence.num_drafts].tolist()
        following = drawn or ([sequence.next_token] if sequence.next_token is not None else [])
        known = [*given, *following]  # from position sequence.start on
        first = max(sequence.draft_from, FIRST_POSITION if self.is_head else 0)
        limit = self.runner.facts.max_model_len
        tokens = known[first - sequence.start : max(0, limit - sequence.start)]
        if not tokens:
            return None
        # Which path a row takes is the target's rule: one for the prompt's tokens, the other for generated ones.
        num_decoded = len(tokens)
        end = first + len(tokens)
        whole = end == sequence.start + len(known)  # else the draft model's longest context ends before
        if is_prompt:
            num_decoded = int(whole and (bool(drawn) or sequence.next_generated))
        hidden = None
        if self.is_head:
            before = first - 1 - sequence.start  # the row whose hidden state the first token takes
            hidden = self._target.hidden_of(index, before + len(tokens))[max(0, before) :]
            if before < 0:  # a step before this one computed it
                assert sequence.states is not None, "a head needs the row before its first"
                hidden = torch.cat([self.runner.saved_hidden(sequence.states.source), hidden])
        room = min(len(sequence.block_table) * self.runner.facts.block_size, limit) - end + 1
        wanted = min(sequence.num_proposals, room) if drawn and whole else 0
        sampling = None
        if wanted and sequence.sampling is not None:
            sampling = dataclasses.replace(sequence.sampling, num_logprobs=None)
        draw = sequence.draw + len(drawn)
        return _Work(sequence.block_table, first, tokens, num_decoded, hidden, sampling, draw, wanted)

    def _keep_hidden(self, index: int, sequence: SequenceRows) -> None:
        """With each state that the target has saved, its last hidden state, for whoever goes on from there."""
        if not self.is_head or sequence.states is None:
            return
        moves = sequence.states
        for position, block in zip(moves.positions.tolist(), moves.blocks.tolist(), strict=True):
            self.runner.save_hidden(block, self._target.hidden_of(index, position - sequence.start)[-1])

    def _take_in(self, works: list[_Work]) -> None:
        """One forward over the tokens that became known; whoever drafts gets the first one from it."""
        prefill: list[SequenceRows] = []
        decode: list[SequenceRows] = []
        given: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for work in works:
            if self.is_head and work.start == FIRST_POSITION:
                self.runner.begin_head(int(work.table[0]))
            split = len(work.tokens) - work.num_decoded
            parts = ((True, work.start, work.tokens[:split]), (False, work.start + split, work.tokens[split:]))
            for prompt, start, tokens in parts:
                if not tokens:
                    continue
                if work.given is not None:
                    given[prompt].append(work.given[start - work.start :][: len(tokens)])
                if prompt:
                    prefill.append(SequenceRows(start, self._ids(tokens), work.table, start))
                else:
                    decode.append(SequenceRows(start, self._ids(tokens), work.table, 0, work.sampling, work.draw))
        rows = [*given[True], *given[False]]
        hidden = self._target.normed(torch.cat(rows)) if rows else None
        drawn = self.runner.forward(Forward(0, [], prefill, decode), _no_wait, hidden)
        self._collect([work for work in works if work.num_proposals], drawn)

    def _go_on(self, works: list[_Work]) -> None:
        """The drafts behind the first, all sequences' next ones together."""
        number = 1
        hidden = self._own_hidden() if works else None
        while True:
            going = [place for place, work in enumerate(works) if len(work.proposals) == number < work.num_proposals]
            if not going:
                return
            works = [works[place] for place in going]
            rows = [
                SequenceRows(
                    work.end + number - 1,
                    self._ids(work.proposals[-1:]),
                    work.table,
                    0,
                    work.sampling,
                    work.draw + number,
                )
                for work in works
            ]
            given = hidden[going] if hidden is not None else None
            drawn = self.runner.forward(Forward(0, [], [], rows), _no_wait, given)
            hidden = self._own_hidden()
            self._collect(works, drawn)
            number += 1

    def _own_hidden(self) -> torch.Tensor | None:
        """The head's hidden states of the rows it drew from: they replace the target's from the second draft on."""
        return self.runner.normed(self.runner.hidden_drawn_from()) if self.is_head else None

    def _collect(self, works: list[_Work], drawn: ModelOutput) -> None:
        for work, token in zip(works, drawn.token_ids, strict=True):
            if token < self._target.facts.vocab_size:  # else no token of the target's: padding of a larger matrix
                work.proposals.append(token)

    def _ids(self, tokens: list[int]) -> Ints:
        """Tokens beyond the draft's vocabulary can only come in prompts of token ids: any other will do."""
        return ints(tokens).clip(max=self.runner.facts.vocab_size - 1)


def _no_wait(_layer: int) -> None:
    """The target's layers have waited for the loads of both domains."""


def _by_sequence(output: ModelOutput) -> list[list[int]]:
    counts = output.num_tokens if output.num_tokens is not None else [1] * len(output.token_ids)
    ends = [0, *accumulate(counts)]
    return [output.token_ids[start:end] for start, end in pairwise(ends)]


# ------------------------------------------------------------------------------------------------ tokenizers


def check_same_tokenizer(target: Path, draft: Path, vocab_size: int) -> None:
    """Raise ConfigError unless a token means the same text to both models.

    Folders without a tokenizer are compared by their vocabularies' size.
    """
    theirs, ours = _vocabulary(draft), _vocabulary(target)
    if theirs is None or ours is None:
        size = _facts(draft).get("vocab_size")
        if size != vocab_size:
            raise ConfigError(
                "draft_model", str(draft), f"a model of {vocab_size} tokens, as the target has (it has {size})"
            )
    elif theirs != ours:
        different = sum(ours.get(text) != theirs.get(text) for text in {*ours, *theirs})
        raise ConfigError(
            "draft_model", str(draft), f"a model with the target's tokenizer ({different} tokens are others)"
        )


def _facts(folder: Path) -> dict[str, Any]:
    """The draft model's config.json. Raises ConfigError when there is none."""
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("draft_model", str(folder), f"a folder with a readable config.json ({error})") from error
    if not isinstance(facts, dict):
        raise ConfigError("draft_model", str(folder), "a folder whose config.json is a mapping")
    return facts


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token texts and their ids; None without a tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer  # takes a second, and only this needs it

    load: Callable[..., Any] = AutoTokenizer.from_pretrained
    try:
        return dict(load(folder, local_files_only=True).get_vocab())
    except Exception as error:  # transformers raises whatever its parsers do
        raise ConfigError("draft_model", str(folder), f"a readable tokenizer (in {folder}: {error})") from error
