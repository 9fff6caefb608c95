"""Qwen3-Next: layers with a state instead of keys and values, gates, partly turned heads; and how states are kept.

A sequence's state is in a block, as its keys and values are. Every block starts as NaN, so one that is read before it
was written shows at once. Cells of prompt tokens are 64 long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from test_models import LINEAR_ROPE, YARN_ROPE, close, reference
from tiny_models import random_prompt
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from xllm_hier.errors import ConfigError, InvariantError
from xllm_hier.models.decoder import Decoder, StepRows, load_decoder
from xllm_hier.models.delta_rule import DeltaWeights
from xllm_hier.models.experts import load_experts
from xllm_hier.models.families import RecurrentSpec, decoder_spec, layer_windows
from xllm_hier.models.linear import DECODE_TILE_COST, PREFILL_TILE_COST, choose_tiles
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.models.parts import Loader
from xllm_hier.models.rope import RopeTable, rotate
from xllm_hier.models.weights import Checkpoint
from xllm_hier.worker.compute.attention import PagedAttention, Span
from xllm_hier.worker.compute.recurrent_state import RecurrentStates, StateSpan

CELL = 64
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype, parallel: TensorParallel) -> Decoder:
    """The model, with tiles as the runner chooses them."""
    config = AutoConfig.from_pretrained(folder)
    spec = decoder_spec(config)
    ropes = {None: RopeTable(config, None, spec.rope_dim, max_len=2048, dtype=dtype, device=CPU)}
    with Checkpoint(folder) as checkpoint, torch.inference_mode():
        model = load_decoder(Loader(spec, checkpoint, dtype, CPU, parallel), ropes)
        linears = [*model.linears(), *model.grouped_linears(), model.head]
        choose_tiles(linears, PREFILL_TILE_COST, DECODE_TILE_COST)
    model.prefill_unit = max(linear.prefill.unit for linear in linears if linear.prefill)
    model.decode_unit = max(linear.decode.unit for linear in linears if linear.decode)
    return model


@dataclass
class Tokens:
    """A sequence: its tokens, the blocks of its keys and values, and the block of its state."""

    ids: list[int]
    table: Sequence[int]
    state: int


@dataclass
class Part:
    """Tokens `start .. stop` of a sequence in a step, from its state before them, which is saved after them.

    `source` and `saved` ask for other blocks than the sequence's own.
    """

    tokens: Tokens
    start: int
    stop: int
    source: int | None = None
    saved: tuple[tuple[int, int], ...] | None = None

    def spans(self, row: int) -> tuple[Span, StateSpan]:
        source = self.tokens.state if self.source is None else self.source
        saved = ((self.stop, self.tokens.state),) if self.saved is None else self.saved
        count, source = self.stop - self.start, source if self.start else -1
        span = Span(self.start, self.stop, row, np.array(self.tokens.table, np.int32), self.start, self.start)
        return span, StateSpan(row, count, self.start, source, saved)


class Model:
    """A decoder with caches of its own, driven by hand."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, parallel: TensorParallel | None = None
    ) -> None:
        self.decoder = load(folder, dtype, parallel or TensorParallel())
        spec = self.decoder.spec
        sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
        self.attention = PagedAttention(
            **sizes, dtype=dtype, device=CPU, block_size=16, windows=spec.windows, tiles=(64,)
        )
        self.keys = [torch.empty(96, 2, 16, spec.kv_heads, spec.head_dim, dtype=dtype) for _ in range(spec.layers)]
        self.attention.bind(self.keys)
        layers = [number for number, net in enumerate(spec.recurrent) if net]
        net = spec.recurrent[layers[0]]
        assert net is not None
        self.states = RecurrentStates(spec=net, layers=layers, dtype=dtype, device=CPU, scan_tokens=CELL)
        size = sum(tensor.nbytes for tensor in self.states.tensors)
        self.blocks = [torch.empty(48, size, dtype=torch.uint8) for _ in layers]
        self.states.bind(self.blocks)
        self.poison()

    def poison(self) -> None:
        for cache in self.keys:
            cache.fill_(float("nan"))
        for cache in self.blocks:
            cache.fill_(255)

    @torch.inference_mode()
    def step(
        self,
        prefill: Sequence[Part] = (),
        decode: Sequence[Part] = (),
        *,
        every: bool = False,
        wait_for_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Logits after each part's last token, or after every token, in the parts' order."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[tuple[Span, StateSpan]] = []
        ends, padding = [], []
        for parts, unit in ((prefill, self.decoder.prefill_unit), (decode, self.decoder.decode_unit)):
            for part in parts:
                spans.append(part.spans(len(ids)))
                ids += part.tokens.ids[part.start : part.stop]
                positions += range(part.start, part.stop)
            padding.append(-len(ids) % unit)
            ids, positions = ids + [0] * padding[-1], positions + [0] * padding[-1]
            ends.append(len(ids))
        own = [range(span.row, span.row + span.stop - span.start) for span, _ in spans]
        wanted = torch.tensor([row for rows in own for row in (rows if every else rows[-1:])])
        step = StepRows(torch.tensor(ids), torch.tensor(positions), ends[0], wanted, (padding[0], padding[1]))
        count = len(prefill)
        self.attention.prepare([s for s, _ in spans[:count]], [s for s, _ in spans[count:]], len(ids))
        self.states.prepare([s for _, s in spans[:count]], [s for _, s in spans[count:]], len(ids))
        hidden = self.decoder.forward(step, self.attention, wait_for_layer, recurrence=self.states)
        return self.decoder.logits(hidden)


# ------------------------------------------------------------------------------------------- against transformers


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "the last layer has a state": {"layer_types": ["full_attention", "linear_attention"] * 2},
    "a value head for each key head": {"linear_num_value_heads": 2},
    "four value heads for a key head": {"linear_num_key_heads": 1},
    "a convolution of two tokens": {"linear_conv_kernel_dim": 2},
    "all columns turn": {"partial_rotary_factor": 1.0},
    "experts in every layer": {"mlp_only_layers": []},
    "experts in every other layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "no experts": {"num_experts": 0},
    "weights of experts as they are": {"norm_topk_prob": False},
    "a tied head": {"tie_word_embeddings": True},
    "slower turns": {"rope_parameters": LINEAR_ROPE | {"partial_rotary_factor": 0.5}},
    "some slower turns": {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path, name):
    """A whole prompt, one in chunks beside a sequence that already generates, and then one token a step."""
    model = Model(tiny_models.make(tmp_path, "qwen3_next", **VARIANTS[name]))
    long, short = Tokens(random_prompt(205, seed=1), range(20, 33), 3), Tokens(random_prompt(45, seed=2), [7, 2, 5], 9)
    expected, beside = (reference(tmp_path, tokens.ids) for tokens in (long, short))
    assert close(model.step([Part(long, 0, 205)], every=True), expected)
    model.poison()
    assert close(model.step([Part(long, 0, 128), Part(short, 0, 40)]), torch.stack([expected[127], beside[39]]))
    assert close(model.step([Part(long, 128, 192)], [Part(short, 40, 42)]), torch.stack([expected[191], beside[41]]))
    assert close(model.step([Part(long, 192, 200)], [Part(short, 42, 45)]), torch.stack([expected[199], beside[44]]))
    for start in range(200, 205):
        assert close(model.step([], [Part(long, start, start + 1)])[0], expected[start])


def test_bfloat16_is_as_near_to_the_exact_model_as_transformers_is(tmp_path):
    """Without experts: where two of them are all but equal, the lower precision may choose the other one."""
    model = Model(tiny_models.make(tmp_path, "qwen3_next", torch.bfloat16, num_experts=0), torch.bfloat16)
    ids = random_prompt(200)
    with torch.inference_mode():
        exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor(ids)[None]).logits[0]
    theirs = (reference(tmp_path, ids).float() - exact).abs().mean()
    ours = (model.step([Part(Tokens(ids, range(13), 0), 0, 200)], every=True) - exact).abs().mean()
    assert ours < 1.1 * theirs < 0.05 * exact.abs().max()


def test_every_layer_is_waited_for_before_its_states_are_touched(tmp_path):
    model, seen = Model(tiny_models.make(tmp_path, "qwen3_next")), []

    def wait(layer: int) -> None:
        seen.append((layer, [bool((blocks == 255).all()) for blocks in model.blocks]))

    model.step([Part(Tokens(random_prompt(20), [5, 6], 3), 0, 20)], wait_for_layer=wait)
    untouched = [[True, True], [False, True], [False, True], [False, False]]
    assert seen == [(layer, states) for layer, states in enumerate(untouched)]


@torch.inference_mode()
def test_the_shared_expert_counts_by_its_gate(tmp_path):
    """Also where its gate is all but shut: the layer's own experts remain."""
    folder = tiny_models.make(tmp_path, "qwen3_next")
    theirs = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp
    spec = decoder_spec(AutoConfig.from_pretrained(folder))
    x = torch.randn(64, 72, generator=torch.Generator().manual_seed(0))
    with Checkpoint(folder) as checkpoint:
        ours = load_experts(
            Loader(spec, checkpoint, torch.float32, CPU, TensorParallel()), "model.layers.0.", spec.experts[0]
        )
    torch.testing.assert_close(ours(x, True, None), theirs(x[None])[0], rtol=1e-5, atol=1e-5)
    shared = torch.sigmoid(theirs.shared_expert_gate(x)) * theirs.shared_expert(x)
    assert shared.abs().mean() > 0.01
    torch.testing.assert_close(ours(x, True, x), theirs.experts(x, *theirs.gate(x)[:0:-1]) + shared + x)


def test_only_the_first_columns_of_a_head_turn():
    x = torch.randn(5, 3, 20)
    angles = torch.rand(5, 5) * 6
    ours = torch.empty_like(x)
    rotate(x, angles.cos()[:, None], angles.sin()[:, None], ours)
    both = torch.cat([angles, angles], dim=1)
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin(), 0)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    assert torch.equal(ours[..., 10:], x[..., 10:])
    assert not torch.equal(ours[..., :10], x[..., :10])


# ------------------------------------------------------------------------------------------- one model, one result


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def model(request, tmp_path_factory) -> Model:
    return Model(tiny_models.make(tmp_path_factory.mktemp("model"), "qwen3_next", request.param), request.param)


def written(model: Model, tokens: Tokens, block: int) -> list[torch.Tensor]:
    """All that a sequence has in the caches: keys and values of its full blocks, and the state in `block`."""
    full = list(tokens.table[: len(tokens.ids) // 16])
    keys = [cache[full] for cache, net in zip(model.keys, model.decoder.spec.recurrent, strict=True) if not net]
    return [*keys, *(cache[block].clone() for cache in model.blocks)]


def test_chunks_batches_and_restored_states_do_not_change_bits(model):
    """333 prompt tokens, with states saved at each end of a cell: cold, chunked, and from each of the states."""
    whole = Tokens(random_prompt(333), range(21), 0)
    ends = [*range(CELL, 333, CELL), 333]
    model.poison()
    saved = tuple((end, 10 + i) for i, end in enumerate(ends))
    logits = model.step([Part(whole, 0, 333, saved=saved)])
    kept = written(model, whole, 10 + len(ends) - 1)
    assert not any(part.isnan().any() for part in kept if part.is_floating_point())
    other = Tokens(random_prompt(100, seed=5), range(80, 87), 30)
    for number, end in enumerate([0, *ends[:-1]]):
        again = Tokens(whole.ids, [*whole.table[: end // 16], *range(40, 61 - end // 16)], 31)
        parts = [Part(other, 0, 100), Part(again, end, 333, source=9 + number)]
        assert torch.equal(model.step(parts)[1], logits[0])
        assert all(map(torch.equal, written(model, again, 31), kept))
    model.poison()
    again = Tokens(whole.ids, range(60, 81), 5)
    for start, stop in ((0, 64), (64, 192), (192, 320), (320, 333)):
        last = model.step([Part(again, start, stop)])
    assert torch.equal(last, logits)
    assert all(map(torch.equal, written(model, again, 5), kept))


def test_generated_tokens_have_the_same_bits_alone_together_and_again(model):
    model.poison()
    sequences = [Tokens(random_prompt(20 + 7 * i, seed=i), range(8 * i, 8 * i + 8), i) for i in range(5)]
    lengths = [len(tokens.ids) for tokens in sequences]
    generated = [[*tokens.ids, *random_prompt(40, seed=50 + i)] for i, tokens in enumerate(sequences)]
    for tokens, ids in zip(sequences, generated, strict=True):
        tokens.ids = ids
    alone = []
    for tokens, length in zip(sequences, lengths, strict=True):
        model.step([Part(tokens, 0, length)])
        steps = [model.step([], [Part(tokens, at, at + 1)])[0] for at in range(length, length + 40)]
        alone.append(torch.stack(steps))
    kept = [written(model, tokens, tokens.state) for tokens in sequences]
    model.poison()
    model.step([Part(tokens, 0, length) for tokens, length in zip(sequences, lengths, strict=True)])
    for cut in range(40):
        parts = [Part(tokens, n + cut, n + cut + 1) for tokens, n in zip(sequences, lengths, strict=True)]
        assert torch.equal(model.step([], parts), torch.stack([logits[cut] for logits in alone]))
    assert all(all(map(torch.equal, written(model, t, t.state), k)) for t, k in zip(sequences, kept, strict=True))
    model.poison()
    model.step([Part(tokens, 0, length) for tokens, length in zip(sequences, lengths, strict=True)])
    parts = [Part(tokens, length, length + 40) for tokens, length in zip(sequences, lengths, strict=True)]
    assert torch.equal(model.step([], parts, every=True), torch.cat(alone))
    assert all(all(map(torch.equal, written(model, t, t.state), k)) for t, k in zip(sequences, kept, strict=True))


# ------------------------------------------------------------------------------------------- states by themselves


SPEC = RecurrentSpec(key_heads=2, value_heads=4, key_dim=12, value_dim=20, conv_size=4)
WIDE = RecurrentSpec(key_heads=4, value_heads=8, key_dim=128, value_dim=128, conv_size=4)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random_weights(spec: RecurrentSpec) -> DeltaWeights:
    generator = torch.Generator().manual_seed(spec.channels)
    conv = torch.randn(spec.conv_size, spec.channels, generator=generator) * 0.5
    fading = torch.rand(spec.value_heads, generator=generator) * 0.1
    return DeltaWeights(conv, fading, torch.randn(spec.value_heads, generator=generator))


@dataclass
class Layer:
    """One recurrent layer, number 7 of a model, with 48 blocks of states, all NaN."""

    spec: RecurrentSpec
    dtype: torch.dtype
    weights: DeltaWeights = field(init=False)
    states: RecurrentStates = field(init=False)
    blocks: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weights = random_weights(self.spec)
        self.states = RecurrentStates(spec=self.spec, layers=[7], dtype=self.dtype, device=CPU, scan_tokens=CELL)
        self.blocks = torch.full((48, sum(tensor.nbytes for tensor in self.states.tensors)), 255, dtype=torch.uint8)
        self.states.bind([self.blocks])

    def tokens(self, count: int, seed: int = 0) -> torch.Tensor:
        """What a layer projects for so many tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.spec.inputs, generator=generator).to(self.dtype)

    @torch.inference_mode()
    def run(
        self, rows: torch.Tensor, prefill: Sequence[StateSpan] = (), decode: Sequence[StateSpan] = ()
    ) -> torch.Tensor:
        self.states.prepare(prefill, decode, len(rows))
        return self.states(7, rows, self.weights).clone()


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def layer(request) -> Layer:
    return Layer(SPEC, request.param)


def by_the_rule(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """The rule token by token, head by head, in double precision: [tokens, value columns]."""
    spec, weights = layer.spec, layer.weights
    rows = rows.double()
    mixing = F.pad(rows[:, : spec.channels], (0, 0, spec.conv_size - 1, 0))
    mixed = sum(mixing[i : i + len(rows)] * weights.conv[i] for i in range(spec.conv_size))
    keys = spec.key_heads * spec.key_dim
    queries, keys, values = torch.split(F.silu(mixed), [keys, keys, spec.values], dim=1)
    shares, fading = rows[:, spec.channels :].split(spec.value_heads, dim=1)
    decays = torch.exp(-weights.fading * F.softplus(fading + weights.bias))
    result = torch.zeros(len(rows), spec.value_heads, spec.value_dim, dtype=torch.float64)
    for head in range(spec.value_heads):
        served = head * spec.key_heads // spec.value_heads
        state = torch.zeros(spec.key_dim, spec.value_dim, dtype=torch.float64)
        q, k = (F.normalize(x.view(len(rows), spec.key_heads, -1)[:, served], dim=-1) for x in (queries, keys))
        for t in range(len(rows)):
            value = values.view(len(rows), spec.value_heads, -1)[t, head]
            state = state * decays[t, head]
            state += torch.outer(k[t], (value - k[t] @ state) * shares[t, head].sigmoid())
            result[t, head] = spec.key_dim**-0.5 * q[t] @ state
    return result.flatten(1)


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["odd", "wide"])
def test_cells_and_single_tokens_follow_the_rule(spec):
    layer = Layer(spec, torch.float32)
    rows = layer.tokens(150)
    expected = by_the_rule(layer, rows)
    for spans in ({"prefill": [StateSpan(0, 150, 0, -1, ())]}, {"decode": [StateSpan(0, 150, 0, -1, ())]}):
        assert (layer.run(rows, **spans) - expected).abs().max() < 1e-5 * expected.abs().max() + 1e-6
    assert expected[100:].abs().max() > 0.01


def test_keys_that_are_all_alike_do_no_harm():
    """A power series in the products of keys would lose all digits here."""
    layer = Layer(SPEC, torch.float32)
    rows = layer.tokens(1).expand(128, -1).contiguous()
    expected = by_the_rule(layer, rows)
    assert (layer.run(rows, [StateSpan(0, 128, 0, -1, ())]) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_memory_that_fades_at_once_stays_a_number():
    layer = Layer(SPEC, torch.float32)
    layer.weights.fading.fill_(1e4)
    rows = layer.tokens(100)
    assert (layer.run(rows, [StateSpan(0, 100, 0, -1, ())]) - by_the_rule(layer, rows)).abs().max() < 1e-5


def saved_at(*positions: int, first: int = 20) -> tuple[tuple[int, int], ...]:
    return tuple((position, first + i) for i, position in enumerate(positions))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["odd", "wide"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_every_cut_on_the_grid_gives_the_bits_of_the_whole(spec, dtype):
    layer = Layer(spec, dtype)
    rows, ends = layer.tokens(290), (64, 128, 192, 256, 290)
    whole = layer.run(rows, [StateSpan(0, 290, 0, -1, saved_at(*ends))])
    assert not layer.blocks[20:25].view(-1, layer.blocks.shape[1])[:, :4].view(torch.float32).isnan().any()
    for number, start in enumerate(ends[:-1]):
        span = StateSpan(0, 290 - start, start, 20 + number, saved_at(*ends[number + 1 :], first=31 + number))
        assert torch.equal(layer.run(rows[start:], [span]), whole[start:])
        assert torch.equal(layer.blocks[31 + number : 35], layer.blocks[21 + number : 25])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 3, 40, 256])
def test_what_else_is_in_the_step_does_not_change_bits(layer, count):
    """A prompt of 100 tokens and one generated token, behind and before `count` rows of others, and padding."""
    prompt, others, one = layer.tokens(100), layer.tokens(count, seed=1), layer.tokens(1, seed=2)
    alone = layer.run(prompt, [StateSpan(0, 100, 0, -1, saved_at(100))])
    after = layer.run(one, decode=[StateSpan(0, 1, 100, 20, saved_at(101, first=21))])
    rows = torch.cat([others, prompt, layer.tokens(5, seed=3), others, one, others])
    first = count + 100 + 5
    output = layer.run(
        rows,
        [StateSpan(0, count, 0, -1, saved_at(count, first=30)), StateSpan(count, 100, 0, -1, saved_at(100, first=31))],
        [
            StateSpan(first, count, 0, -1, ()),
            StateSpan(first + count, 1, 100, 20, saved_at(101, first=32)),
            StateSpan(first + count + 1, count, 64, 30, ()),
        ],
    )
    assert torch.equal(output[count : count + 100], alone)
    assert torch.equal(output[first + count], after[0])
    assert torch.equal(layer.blocks[31:33], layer.blocks[20:22])
    assert output.isfinite().all()


def test_the_number_of_threads_does_not_change_bits():
    layer = Layer(WIDE, torch.bfloat16)
    rows, before, results = layer.tokens(230), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        spans = [StateSpan(0, 200, 0, -1, saved_at(200, first=20 + count))], [StateSpan(200, 30, 0, -1, ())]
        results.append(layer.run(rows, *spans))
    torch.set_num_threads(before)
    assert torch.equal(*results)
    assert torch.equal(layer.blocks[21], layer.blocks[22])


def test_a_sequence_that_overflows_harms_no_other(layer):
    rows = layer.tokens(6)
    spans = [StateSpan(0, 6, 0, -1, saved_at(6))]
    alone = layer.run(rows, spans)
    layer.run(torch.full_like(layer.tokens(128), float("inf")), [StateSpan(0, 128, 0, -1, saved_at(128, first=30))])
    assert not layer.blocks[30, :960].view(torch.float32).isfinite().all()
    assert torch.equal(layer.run(rows, spans), alone)
    assert layer.blocks[20, :960].view(torch.float32).isfinite().all()


@pytest.mark.parametrize("stop", [65, 70, 100, 127])
def test_a_tokens_bits_do_not_depend_on_the_tokens_behind_it(layer, stop):
    """Keys and values made of a short prompt may serve a longer one."""
    rows = layer.tokens(128)
    whole = layer.run(rows, [StateSpan(0, 128, 0, -1, ())])
    assert torch.equal(layer.run(rows[:stop], [StateSpan(0, stop, 0, -1, ())]), whole[:stop])


@pytest.mark.usefixtures("threads")
def test_forty_tokens_in_one_step_have_the_bits_of_forty_steps(layer):
    rows = layer.tokens(140)
    layer.run(rows[:100], [StateSpan(0, 100, 0, -1, saved_at(100))])
    together = layer.run(rows[100:], decode=[StateSpan(0, 40, 100, 20, saved_at(140, first=21))])
    layer.blocks[22] = layer.blocks[20]
    for step in range(40):
        span = StateSpan(0, 1, 100 + step, 22, saved_at(101 + step, first=22))
        assert torch.equal(layer.run(rows[100 + step : 101 + step], decode=[span])[0], together[step])
    assert torch.equal(layer.blocks[22], layer.blocks[21])


def test_each_drafted_token_has_a_state_of_its_own_to_go_back_to(layer):
    """Four rows; two drafts are accepted; what comes then has the bits of a run without drafts."""
    rows, wrong = layer.tokens(84), layer.tokens(2, seed=9)
    layer.run(rows[:80], [StateSpan(0, 80, 0, -1, saved_at(80))])
    drafts = StateSpan(0, 4, 80, 20, saved_at(81, 82, 83, 84, first=30))
    layer.run(torch.cat([rows[80:82], wrong]), decode=[drafts])
    after = layer.run(rows[82:], decode=[StateSpan(0, 2, 82, 31, saved_at(84, first=40))])
    plain = layer.run(rows[80:], decode=[StateSpan(0, 4, 80, 20, saved_at(84, first=41))])
    assert torch.equal(after, plain[2:])
    assert torch.equal(layer.blocks[40], layer.blocks[41])
    assert not torch.equal(layer.blocks[33], layer.blocks[41])


def test_only_the_blocks_asked_for_are_written(layer):
    rows = layer.tokens(130)
    layer.run(rows[:64], [StateSpan(0, 64, 0, -1, saved_at(64))])
    before = layer.blocks.clone()
    layer.run(rows[64:], [StateSpan(0, 64, 64, 20, saved_at(128, first=30))], [StateSpan(64, 2, 64, 20, ())])
    changed = (layer.blocks != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [30]


def test_a_source_that_is_written_too_is_read_first(layer):
    rows = layer.tokens(130)
    whole = layer.run(rows, [StateSpan(0, 130, 0, -1, saved_at(128, 130))])
    for start, stop in ((0, 64), (64, 128), (128, 130)):
        span = StateSpan(0, stop - start, start, 30 if start else -1, ((stop, 30),))
        assert torch.equal(layer.run(rows[start:stop], [span]), whole[start:stop])
    assert torch.equal(layer.blocks[30], layer.blocks[21])


def test_a_block_is_the_heads_matrices_then_the_last_inputs(layer):
    """As bytes of one layer of one block; two tokens leave one input of the three before them nothing."""
    state, inputs = layer.states.tensors
    assert (state.dtype, state.shape) == ("float32", (4, 12, 20))
    assert (inputs.dtype, inputs.shape) == (str(layer.dtype).removeprefix("torch."), (3, 128))
    rows = layer.tokens(2)
    layer.run(rows, [StateSpan(0, 2, 0, -1, ((2, 0),))])
    kept = layer.blocks[0, state.nbytes :].view(layer.dtype).view(3, 128)
    assert torch.equal(kept[1:], rows[:, :128])
    assert not kept[0].any()
    assert layer.blocks[0, : state.nbytes].view(torch.float32).isfinite().all()


WRONG = {
    "a prompt beside the grid": (StateSpan(0, 10, 60, 3, ()), True),
    "no state before it": (StateSpan(0, 10, 64, -1, ()), True),
    "a state before the first token": (StateSpan(0, 10, 0, 3, ()), True),
    "saved within a cell": (StateSpan(0, 100, 0, -1, ((70, 1),)), True),
    "saved behind the end": (StateSpan(0, 100, 0, -1, ((128, 1),)), True),
    "saved at the start": (StateSpan(0, 100, 64, 3, ((64, 1),)), True),
    "saved in another order": (StateSpan(0, 100, 0, -1, ((100, 1), (64, 2))), True),
    "no tokens": (StateSpan(0, 0, 64, 3, ()), True),
    "generated, saved behind the end": (StateSpan(0, 2, 70, 3, ((73, 1),)), False),
}


@pytest.mark.parametrize("name", WRONG)
def test_spans_that_cannot_be_are_told(name):
    span, prompt = WRONG[name]
    states = Layer(SPEC, torch.float32).states
    with pytest.raises(InvariantError):
        states.prepare([span] if prompt else [], [] if prompt else [span], 128)


# ------------------------------------------------------------------------------------------- ranks


class Rank(TensorParallel):
    """One of two ranks, which are threads that meet at a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, desk: list[torch.Tensor]) -> None:
        super().__init__(rank, 2)
        self._barrier, self._desk = barrier, desk

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._desk[self.rank] = x.clone()
        self._barrier.wait(60)
        parts = list(self._desk)
        self._barrier.wait(60)
        return parts

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self._exchange(x)
        return first + second

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)


def test_two_ranks_are_the_same_model(tmp_path):
    folder = tiny_models.make(tmp_path, "qwen3_next")
    tokens = Tokens(random_prompt(150), range(10), 2)
    barrier, desk = threading.Barrier(2), [torch.empty(0)] * 2
    found: dict[int, torch.Tensor] = {}

    def serve(rank: int) -> None:
        model = Model(folder, parallel=Rank(rank, barrier, desk))
        assert model.states.tensors[0].shape == (2, 12, 20)
        prompt = model.step([Part(tokens, 0, 140)], every=True)
        found[rank] = torch.cat([prompt, *(model.step([], [Part(tokens, at, at + 1)]) for at in range(140, 150))])

    ranks = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert torch.equal(found[0], found[1])
    assert close(found[0], reference(folder, tokens.ids))


@pytest.mark.parametrize(("changes", "allowed"), [({}, "1, 2"), ({"linear_num_key_heads": 1}, "1")])
def test_key_heads_divide_by_the_ranks(tmp_path, changes, allowed):
    tiny_models.make(tmp_path, "qwen3_next", **changes)
    spec = decoder_spec(AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ConfigError, match=rf"one of {allowed} for this model .* key heads with states"):
        spec.check_tp_size(4)


# ------------------------------------------------------------------------------------------- what is refused


REFUSED: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "another activation than silu": {"hidden_act": "gelu"},
    "convolution of one token": {"linear_conv_kernel_dim": 1},
    "5 value heads for 2 key heads": {"linear_num_value_heads": 5},
    "an odd width": {"linear_value_head_dim": 15},
    "5 turning columns": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    },
    "no layer with full attention": {"layer_types": ["linear_attention"] * 4},
    "not sliding_attention": {"layer_types": ["linear_attention", "sliding_attention"] * 2},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_run_is_named(tmp_path, reason):
    tiny_models.make(tmp_path, "qwen3_next", num_hidden_layers=4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REFUSED[reason]))
    with pytest.raises(ConfigError, match=reason):
        decoder_spec(AutoConfig.from_pretrained(tmp_path))


def test_other_families_have_neither_states_nor_partly_turned_heads(tmp_path):
    tiny_models.make(tmp_path, "qwen3")
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters |= {"partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match="partial rotary factor"):
        decoder_spec(config)
    config.rope_parameters["partial_rotary_factor"] = 1.0
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="not linear_attention"):
        decoder_spec(config)


def test_transformers_own_code_has_no_place_for_states(tmp_path):
    tiny_models.make(tmp_path, "qwen3_next")
    with pytest.raises(ConfigError, match="not linear_attention"):
        layer_windows(AutoConfig.from_pretrained(tmp_path))
