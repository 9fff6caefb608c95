"""One prompt, one result: the same bits for every chunking, restore boundary, batch, preemption and replay.

Whatever is compared is compared bit for bit: logits of the last token and K and V of every full block. The cache starts
as NaN everywhere, so a slot that is read before it was written shows at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import tiny_models
import torch
from ranks import RankedDriver
from tiny_models import Driver, generated, prompt_part, random_prompt, random_table

from xllm_hier.worker.compute.attention import LARGE_TILE, SMALL_TILE, find_query_tiles

LENGTH = 333
# Small models for families, sliding windows and odd sizes; `wide` has the layer shapes at which the matrix kernel
# rounds differently for different numbers of rows.
MODELS = {
    "llama-fp32": ("llama", torch.float32, {}),
    "llama-bf16": ("llama", torch.bfloat16, {}),
    "gemma3-fp32": ("gemma3", torch.float32, {}),
    "gemma3-bf16": ("gemma3", torch.bfloat16, {}),
    "mixtral-fp32": ("mixtral", torch.float32, {}),
    "qwen3_moe-bf16": ("qwen3_moe", torch.bfloat16, {}),
    "deepseek_v2-bf16": ("deepseek_v2", torch.bfloat16, {}),
    "deepseek_v3-fp32": ("deepseek_v3", torch.float32, {}),
    "wide-bf16": (
        "qwen3",
        torch.bfloat16,
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "qwen3_moe-wide-bf16": (
        "qwen3_moe",
        torch.bfloat16,
        {
            "hidden_size": 1024,
            "intermediate_size": 1408,
            "moe_intermediate_size": 384,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "latent-wide-bf16": (
        "deepseek_v2",
        torch.bfloat16,
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
}


# The same on ranks with real collectives: at tp 4 each of two KV heads serves two ranks, and three sums are rounded.
RANKED = {
    "llama-bf16-tp2": ("llama", torch.bfloat16, {}, 2),
    "gemma3-bf16-tp2": ("gemma3", torch.bfloat16, {}, 2),
    "qwen3-bf16-tp4": ("qwen3", torch.bfloat16, {"num_attention_heads": 8}, 4),
    "mixtral-bf16-tp2": ("mixtral", torch.bfloat16, {}, 2),
    "deepseek_v3-bf16-tp2": ("deepseek_v3", torch.bfloat16, {}, 2),
}


# Torch's kernels in tiles of rows, as on machines without AVX2 and on other devices: each kind of layer in both dtypes.
IN_TILES = ["llama-fp32", "llama-bf16", "gemma3-fp32", "mixtral-fp32", "qwen3_moe-bf16", "deepseek_v2-bf16"]
IN_TILES += ["deepseek_v3-fp32", "wide-bf16", "gemma3-bf16-tp2", "qwen3-bf16-tp4"]


@pytest.fixture(scope="module", params=[*MODELS, *RANKED, *(f"{name} in tiles" for name in IN_TILES)])
def driver(request, tmp_path_factory) -> Iterator[Driver | RankedDriver]:
    folder: Path = tmp_path_factory.mktemp("model")
    name = request.param.removesuffix(" in tiles")
    kernels = "auto" if name == request.param else "torch"
    if name in MODELS:
        family, dtype, changes = MODELS[name]
        made = tiny_models.make(folder, family, dtype, **changes)
        yield Driver(made, num_blocks=192, cpu_kernels=kernels)
        return
    family, dtype, changes, tp_size = RANKED[name]
    made = tiny_models.make(folder, family, dtype, **changes)
    ranks = RankedDriver(made, tp_size, num_blocks=192, cpu_kernels=kernels)
    yield ranks
    ranks.close()


# What has been computed for a driver, by prompt: many tests compare with the same.
COLD: WeakKeyDictionary[Driver | RankedDriver, dict[tuple[int, ...], Result]] = WeakKeyDictionary()
STORIES: WeakKeyDictionary[Driver | RankedDriver, dict[tuple[int, ...], Story]] = WeakKeyDictionary()


@dataclass
class Result:
    """Last logits and full blocks of one prompt."""

    logits: torch.Tensor
    blocks: torch.Tensor

    def check(self, logits: torch.Tensor, blocks: torch.Tensor) -> None:
        assert not torch.isnan(self.blocks).any()
        assert torch.equal(logits, self.logits)
        assert torch.equal(blocks, self.blocks)


def cold(driver: Driver, prompt: list[int]) -> Result:
    """The whole prompt alone, in one step, from an empty cache; computed once for each driver."""
    known = COLD.setdefault(driver, {})
    if (key := tuple(prompt)) not in known:
        driver.poison()
        table = random_table(-(-len(prompt) // driver.block_size), seed=99, pool=range(192))
        driver.step([prompt_part(prompt, table)])
        known[key] = Result(driver.logits[0], driver.blocks(table, len(prompt)))
    return known[key]


@pytest.mark.parametrize("chunk", [1, 50, 64, 100, 256, "random"])
def test_chunking_does_not_change_bits(driver, chunk):
    prompt = random_prompt(LENGTH)
    whole = cold(driver, prompt)
    driver.poison()
    table = random_table(21)
    start = 300 if chunk == 1 else 0  # single tokens only at the end: they take a step each
    if start:
        driver.step([prompt_part(prompt, table, 0, start)])
    lengths = random.Random(5)
    while start < LENGTH:
        stop = min(LENGTH, start + (lengths.randint(1, 120) if chunk == "random" else chunk))
        driver.step([prompt_part(prompt, table, start, stop)])
        start = stop
    whole.check(driver.logits[0], driver.blocks(table, LENGTH))


def test_long_prompts_keep_their_bits(driver):
    """Long enough for the attention kernel to add up its keys in several parts."""
    prompt = random_prompt(1500)
    whole = cold(driver, prompt)
    driver.poison()
    table = random_table(94, pool=range(192))
    driver.restore(table, whole.blocks[:, :11])
    for start, stop in ((176, 500), (500, 555), (555, 1300), (1300, None)):
        driver.step([prompt_part(prompt, table, start, stop)])
    whole.check(driver.logits[0], driver.blocks(table, 1500))


def test_restore_at_any_block_boundary_does_not_change_bits(driver):
    prompt = random_prompt(LENGTH)
    whole = cold(driver, prompt)
    for boundary in range(1, 21):
        driver.poison()
        table = random_table(21, seed=boundary)
        driver.restore(table, whole.blocks[:, :boundary])
        driver.step([prompt_part(prompt, table, boundary * driver.block_size)])
        whole.check(driver.logits[0], driver.blocks(table, LENGTH))


def test_batch_mates_do_not_change_bits(driver):
    prompts = [random_prompt(length, seed=length) for length in (40, 333, 7, 129, 256)]
    whole = [cold(driver, prompt) for prompt in prompts]
    driver.poison()
    places = random_table(21 * len(prompts), pool=range(192))
    tables = [places[21 * i : 21 * i + 21] for i in range(len(prompts))]
    driver.step([prompt_part(prompt, table) for prompt, table in zip(prompts, tables, strict=True)])
    logits = driver.logits
    for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        whole[i].check(logits[i], driver.blocks(table, len(prompt)))


def test_hits_of_many_requests_in_one_step_do_not_change_bits(driver):
    """Suffixes of different lengths after hits of different lengths share tiles; a generated row runs beside them."""
    prompts = [random_prompt(length, seed=length) for length in (100, 333, 200)]
    whole = [cold(driver, prompt) for prompt in prompts]
    driver.poison()
    places = random_table(66, pool=range(192))
    tables = [places[21 * i : 21 * i + 21] for i in range(3)]
    for table, result, hit in zip(tables, whole, (5, 20, 8), strict=True):
        driver.restore(table, result.blocks[:, :hit])
    running = random_prompt(30, seed=1)
    driver.step([prompt_part(running[:29], places[63:])])
    parts = [
        prompt_part(prompt, table, hit * 16) for prompt, table, hit in zip(prompts, tables, (5, 20, 8), strict=True)
    ]
    driver.step(parts, [generated(running, places[63:], 29)])
    logits = driver.logits
    for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        whole[i].check(logits[i], driver.blocks(table, len(prompt)))


def test_full_hit_computes_its_last_token_and_leaves_the_shared_block_alone(driver):
    prompt = random_prompt(64)
    whole = cold(driver, prompt)
    driver.poison()
    table = random_table(4)
    driver.restore(table, whole.blocks)
    driver.step([prompt_part(prompt, table, 63, write_from=64)])
    whole.check(driver.logits[0], driver.blocks(table, 64))
    # The last token's K comes from the block, not from the row just computed.
    marked = whole.blocks.clone()
    marked[0, 3, 0, 15] += 1
    driver.restore(table, marked)
    driver.step([prompt_part(prompt, table, 63, write_from=64)])
    assert torch.equal(driver.blocks(table, 64), marked)
    assert not torch.equal(driver.logits[0], whole.logits)


def test_prompt_logprobs_do_not_change_bits(driver):
    """The last layer then keeps all rows, not only the last."""
    prompt = random_prompt(LENGTH)
    whole = cold(driver, prompt)
    driver.poison()
    table = random_table(21)
    driver.step([prompt_part(prompt, table, 0, 150, prompt_logprobs=0, next_token=prompt[150])])
    driver.step([prompt_part(prompt, table, 150, prompt_logprobs=0)])
    whole.check(driver.logits[0], driver.blocks(table, LENGTH))


@dataclass
class Story:
    """A prompt, 24 tokens generated after it, and the logits that chose each of them."""

    prompt: list[int]
    tokens: list[int]
    logits: list[torch.Tensor]
    blocks: torch.Tensor


def write_story(driver: Driver, prompt: list[int]) -> Story:
    """Generate alone, one token a step; once for each driver."""
    known = STORIES.setdefault(driver, {})
    if (key := tuple(prompt)) not in known:
        known[key] = new_story(driver, prompt)
    return known[key]


def new_story(driver: Driver, prompt: list[int]) -> Story:
    table = random_table(-(-(len(prompt) + 24) // 16), seed=7)
    output = driver.step([prompt_part(prompt, table)])
    tokens, logits = list(prompt), []
    for _ in range(24):
        tokens.append(output.token_ids[0])
        output = driver.step([], [generated(tokens, table, len(tokens) - 1)])
        logits.append(driver.logits[0])
    return Story(prompt, tokens, logits, driver.blocks(table, len(tokens)))


def test_decode_in_a_batch_gives_the_bits_of_decode_alone(driver):
    stories = [write_story(driver, random_prompt(length, seed=length)) for length in range(20, 31)]
    driver.poison()
    places = random_table(11 * 4, pool=range(192))
    tables = [places[4 * i : 4 * i + 4] for i in range(11)]
    driver.step([prompt_part(story.prompt, table) for story, table in zip(stories, tables, strict=True)])
    for step in range(24):
        # Later requests join as earlier ones run: 1, 2, ... 11 rows.
        batch = [i for i in range(11) if i <= step]
        rows = [generated(s.tokens[: len(s.prompt) + step + 1 - i], tables[i], len(s.prompt) + step - i)
                for i in batch for s in [stories[i]]]  # fmt: skip
        driver.step([], rows)
        for place, i in enumerate(batch):
            assert torch.equal(driver.logits[place], stories[i].logits[step - i])


def test_replay_of_generated_tokens_gives_the_bits_they_had(driver):
    """After preemption all generated tokens are computed again in one step; more than one tile of decode rows."""
    story = write_story(driver, random_prompt(70))
    other = write_story(driver, random_prompt(45, seed=3))
    for already in (0, 1, 13):
        driver.poison()
        places = random_table(12, seed=already)
        tables = [places[:6], places[6:]]
        driver.step([prompt_part(s.prompt, table) for s, table in zip((story, other), tables, strict=True)])
        starts = [len(s.prompt) + already for s in (story, other)]
        if already:
            driver.step([], [generated(s.tokens[:start], table, len(s.prompt), sampling=None)
                             for s, table, start in zip((story, other), tables, starts, strict=True)])  # fmt: skip
        driver.step([], [generated(s.tokens, table, start)
                         for s, table, start in zip((story, other), tables, starts, strict=True)])  # fmt: skip
        for place, s in enumerate((story, other)):
            assert torch.equal(driver.logits[place], s.logits[-1])
            assert torch.equal(driver.blocks(tables[place], len(s.tokens)), s.blocks)


def test_resume_from_restored_blocks_gives_the_bits_of_an_undisturbed_run(driver):
    """A preempted sequence comes back with the blocks it had; only the rest of its generated tokens is replayed."""
    story = write_story(driver, random_prompt(70))
    driver.poison()
    table = random_table(6, seed=2)
    driver.restore(table, story.blocks[:, :5])
    driver.step([], [generated(story.tokens, table, 80)])
    assert torch.equal(driver.logits[0], story.logits[-1])
    assert torch.equal(driver.blocks(table, len(story.tokens)), story.blocks)


@pytest.mark.parametrize("block_size", [24, 48, 100, 256])
def test_block_size_need_not_divide_the_tiles(tmp_path, block_size):
    folder = tiny_models.make(tmp_path, "gemma3", torch.bfloat16)
    driver = Driver(folder, block_size=block_size, num_blocks=40)
    prompt = random_prompt(LENGTH)
    num_blocks = -(-LENGTH // block_size)
    places = random_table(2 * num_blocks, pool=range(40))
    driver.step([prompt_part(prompt, places[:num_blocks])])
    whole = Result(driver.logits[0], driver.blocks(places[:num_blocks], LENGTH))
    table = places[num_blocks:]
    for start, stop in ((0, 77), (77, 290), (290, None)):
        driver.step([prompt_part(prompt, table, start, stop)])
    whole.check(driver.logits[0], driver.blocks(table, LENGTH))


@pytest.mark.parametrize(("tile_rows", "block_size"), [(48, 16), (100, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_tile_size_is_used_as_given(tmp_path, dtype, tile_rows, block_size):
    folder = tiny_models.make(tmp_path, "llama", dtype)
    driver = Driver(folder, prefill_tile_rows=tile_rows, block_size=block_size, num_blocks=192, cpu_kernels="torch")
    assert set(map(tuple, driver.runner.details.prefill_tiles.values())) == {(tile_rows,)}
    prompt = random_prompt(200)
    whole = cold(driver, prompt)
    driver.poison()
    table = random_table(17)
    for start, stop in ((0, 30), (30, 131), (131, None)):
        driver.step([prompt_part(prompt, table, start, stop)])
    whole.check(driver.logits[0], driver.blocks(table, 200))


def test_many_generated_rows_need_not_fill_a_prefill_tile(tmp_path):
    """Decode tiles are their own: 113 replayed rows beside prefill tiles of 100."""
    driver = Driver(tiny_models.make(tmp_path, "llama", torch.bfloat16), prefill_tile_rows=100, block_size=20)
    tokens = random_prompt(153)
    results = []
    for seed, parts in enumerate(([40, 153], [40, 60, 97, 98, 153])):
        driver.poison()
        table = random_table(8, seed=seed)
        driver.step([prompt_part(tokens[:40], table)])
        for start, stop in itertools.pairwise(parts):
            driver.step([], [generated(tokens[:stop], table, start)])
        results.append(Result(driver.logits[0], driver.blocks(table, 153)))
    results[0].check(results[1].logits, results[1].blocks)


class RarelyDifferent:
    """Attention whose large tile gives other bits in one of 20,000 outputs of rows 128 to 320, which is what rounding
    to bf16 leaves of sums that are split differently (seen on CPUs without AVX-512)."""

    tensors = 2
    share = 1 / 20_000

    def __init__(self, *, heads: int, head_dim: int, tiles: tuple[int, ...], **_: object) -> None:
        self.width, self.large = heads * head_dim, tiles == (LARGE_TILE,)
        self.rows = 0

    def bind(self, _caches: list[torch.Tensor]) -> None:
        pass

    def prepare(self, _prefill: object, _decode: object, num_rows: int) -> None:
        self.rows = num_rows

    def __call__(self, _layer: int, q: torch.Tensor, *_: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(q[0, 0].abs().sum() * 1000))
        differs = torch.rand(self.rows, self.width, generator=generator) < self.share
        differs[:128] = differs[320:] = False
        return differs if self.large else torch.zeros_like(differs)


class Equal(RarelyDifferent):
    share = 0.0


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (2, 20), (16, 64)])
def test_query_tiles_that_differ_in_one_output_of_twenty_thousand_are_found_out(heads: int, head_dim: int) -> None:
    """A hit of another tile would change bits, if rarely; few and narrow heads take many draws to show it."""
    shape = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "dtype": torch.float32, "device": torch.device("cpu")}
    assert find_query_tiles(RarelyDifferent, **shape) == (SMALL_TILE,)
    assert find_query_tiles(Equal, **shape) == (SMALL_TILE, LARGE_TILE)
