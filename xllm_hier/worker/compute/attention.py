"""Attention over a paged KV cache: gather a sequence's blocks into a kept workspace, then plain scaled dot product.

Bits do not depend on chunking, batch or cache hits:

- prompt rows run in query tiles that lie on the absolute grid of the sequence, with keys up to the tile's end; what
  lies beyond the sequence's last token is zeroed, not left, because NaN behind a mask is still NaN;
- a generated row runs alone over its own context.

    positions   0        t0     start        stop   t0 + tile
    keys        |--------|-------|------------|00000|
    query tile           |0000000|-- rows ----|00000|

The same call serves every layer: `prepare` builds the views of one step once for each window size, a layer then only
gathers and multiplies. `device_attention` puts the kernels of other devices behind the same three methods; this one is
their reference and their fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ...ints import Ints
from ...plans import HOLE

# Workspace rows start at a multiple of this position, so that a position always has the same alignment in memory.
_ALIGN_TOKENS = 64
SMALL_TILE, LARGE_TILE = 64, 256
_TRIED_ELEMENTS = 1 << 19  # of output, over contexts of up to two large tiles, in search of one difference


@dataclass(frozen=True)
class Span:
    """Consecutive tokens `start .. stop` of one sequence in one step; `row` is the row of `start` in the step.

    Positions below `write_from` are computed but not written. Outputs of the last layer are asked for from position
    `wanted_from` on. `window_table`: layers with a window have blocks of their own, HOLE where one has slid out of it;
    None: `table` is theirs, too.
    """

    start: int
    stop: int
    row: int
    table: Ints
    write_from: int
    wanted_from: int
    window_table: Ints | None = None

    def table_of(self, window: int | None) -> Ints:
        """The blocks of the layers with this window."""
        return self.table if window is None or self.window_table is None else self.window_table


@dataclass(frozen=True)
class _Gather:
    """Blocks to copy: for each tensor, rows `sources` of the cache seen as [blocks * tensors, block] to `targets`."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]


@dataclass(frozen=True)
class _Queries:
    """One scaled dot product: `rows` of the step, at `lead` in a tile of `size` rows, over the given keys."""

    rows: slice
    lead: int
    size: int
    last: int
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Work:
    """The work of one sequence in one layer."""

    gather: _Gather
    padding: list[torch.Tensor]
    queries: list[_Queries]
    wanted_from: int


@dataclass
class _Band:
    """Additive causal mask by distance: column c holds key t0 + c - `before` for query rows t0 ... of any tile."""

    before: int = -1
    mask: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class PagedAttention:
    """Writes K and V of a step into the cache and attends; q, k, v are [rows, heads, head_dim] of the model's dtype.

    `windows[i]` is layer i's sliding window in tokens (a row sees itself and window - 1 before), None = all.
    `tiles` are the query tile sizes found to give equal bits, ascending, each a multiple of the one before.
    `batch_invariant` says whether equal bits for every chunking and batch were found, or are known, for this device.
    Positions before `first_position` hold nothing: no row attends to them, and none may be computed there.
    """

    kernel = "gather"
    tensors = 2  # of a block's layer in the cache: the first holds keys, the last values

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        windows: Sequence[int | None],
        tiles: tuple[int, ...],
        first_position: int = 0,
    ) -> None:
        self.first_position = first_position
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype, self.device, self.block_size = dtype, device, block_size
        self.windows, self.tiles = tuple(windows), tiles
        self.batch_invariant = True
        self._caches: list[torch.Tensor] = []
        self._workspaces = self._new_workspaces(0)
        self._queries = torch.zeros(tiles[-1], heads, head_dim, dtype=dtype, device=device)
        self._output = self._new(0, heads)
        self._bands: dict[int | None, _Band] = {window: _Band() for window in self.windows}
        self._prefill: dict[int | None, list[_Work]] = {}
        self._decode: dict[int | None, list[_Work]] = {}

    def bind(self, layer_caches: Sequence[torch.Tensor]) -> None:
        """Use these caches, one per layer: contiguous [num_blocks, tensors, block_size, kv_heads, head_dim]."""
        self._caches = list(layer_caches)

    def no_cache(self) -> torch.Tensor:
        """The cache that `bind` takes for a layer without attention."""
        return torch.zeros(1, self.tensors, self.block_size, self.kv_heads, self.head_dim, dtype=self.dtype).to(
            self.device
        )

    def zero_before_first(self, block: int) -> None:
        """Make the places of a sequence's first block that hold nothing a function of nothing, too."""
        for cache in self._caches:
            cache.view(len(cache), self.tensors, self.block_size, -1)[block, :, : self.first_position] = 0

    # ------------------------------------------------------------------------------------------- one step

    def prepare(self, prefill: Sequence[Span], decode: Sequence[Span], num_rows: int) -> None:
        """Lay out one step of `num_rows` rows (padding included); rows that belong to no span keep finite output."""
        spans = [*prefill, *decode]
        self._write_rows = self._index(np.concatenate([self._written_rows(span) for span in spans]))
        slots = {window: self._key_slots(spans, window) for window in dict.fromkeys(self.windows)}
        self._write_slots = {
            window: [keys + tensor * self.block_size for tensor in range(self.tensors)]
            for window, keys in slots.items()
        }
        self._rows = num_rows
        if len(self._output) < num_rows:
            self._output = self._new(num_rows, self.heads)
        self._lay_out(prefill, decode)

    def _lay_out(self, prefill: Sequence[Span], decode: Sequence[Span]) -> None:
        """The views that each window of `_bands` needs in this step."""
        if not self._bands:
            return
        self._reserve([*prefill, *decode])
        self._prefill = {window: [self._prefill_work(span, window) for span in prefill] for window in self._bands}
        self._decode = {window: [self._decode_work(span, window) for span in decode] for window in self._bands}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, wanted_only: bool = False
    ) -> torch.Tensor:
        """Attention output [rows, heads * head_dim], in a buffer that the next call overwrites.

        `wanted_only`: leave out prompt tiles that hold no wanted row.
        """
        if len(self._write_slots[self.windows[layer]][0]):
            self._write(layer, k[self._write_rows], v[self._write_rows])
        self._attend(layer, q, scale, wanted_only)
        return self._output[: self._rows].view(self._rows, -1)

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        lines = self._caches[layer].view(-1, self.kv_heads * self.head_dim)
        for slots, rows in zip(self._write_slots[self.windows[layer]], (k, v), strict=False):
            lines.index_copy_(0, slots, rows.flatten(1))

    def _attend(self, layer: int, q: torch.Tensor, scale: float, wanted_only: bool) -> None:
        cache = self._caches[layer]
        blocks = cache.view(cache.shape[0] * self.tensors, -1)
        window = self.windows[layer]
        for work in self._prefill[window]:
            wanted = [item for item in work.queries if not wanted_only or item.last >= work.wanted_from]
            if not wanted:
                continue
            self._collect(blocks, work)
            for item in wanted:
                self._attend_tile(q, item, scale)
        for work in self._decode[window]:
            self._collect(blocks, work)
            for item in work.queries:
                self._attend_row(q, item, scale)

    def _collect(self, blocks: torch.Tensor, work: _Work) -> None:
        for source, target in zip(work.gather.sources, work.gather.targets, strict=True):
            torch.index_select(blocks, 0, source, out=target)
        for rows in work.padding:
            rows.zero_()

    def _attend_tile(self, q: torch.Tensor, item: _Queries, scale: float) -> None:
        count = item.rows.stop - item.rows.start
        tile = self._queries[: item.size]
        if count < item.size:
            tile.zero_()
        tile[item.lead : item.lead + count] = q[item.rows]
        result = F.scaled_dot_product_attention(
            tile.transpose(0, 1)[None],
            item.keys,
            item.values,
            attn_mask=item.mask,
            scale=scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        self._output[item.rows] = result[0].transpose(0, 1)[item.lead : item.lead + count]

    def _attend_row(self, q: torch.Tensor, item: _Queries, scale: float) -> None:
        # The query heads of one KV head become the rows of one product: nothing is repeated. The copy into the kept
        # buffer gives every row the same alignment.
        row = self._queries[:1]
        row.copy_(q[item.rows])
        grouped = row.view(1, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        result = F.scaled_dot_product_attention(grouped, item.keys, item.values, scale=scale)
        self._output[item.rows] = result.reshape(1, self.heads, self.head_dim)

    # ------------------------------------------------------------------------------------------- layout

    def _prefill_work(self, span: Span, window: int | None) -> _Work:
        # With a window the first key moves with the tile, and with it the order of sums: one size only.
        tiles = query_tiles(span.start, span.stop, self.tiles if window is None else self.tiles[:1])
        gather, base, padding = self._gather(span, window, self._first_key(tiles[0][0], window), span.stop)
        end = tiles[-1][0] + tiles[-1][1]
        if end > span.stop:
            padding += [rows[span.stop - base : end - base] for rows in self._workspaces]
        queries = []
        for start, size in tiles:
            rows = slice(*(span.row + min(max(at, span.start), span.stop) - span.start for at in (start, start + size)))
            key_start = self._first_key(start, window)
            keys, values = self._context(key_start - base, start + size - base)
            mask = self._mask(window, key_start - start, size)
            last = min(start + size, span.stop) - 1
            queries.append(_Queries(rows, max(0, span.start - start), size, last, keys, values, mask))
        return _Work(gather, padding, queries, span.wanted_from)

    def _decode_work(self, span: Span, window: int | None) -> _Work:
        gather, base, _ = self._gather(span, window, self._first_key(span.start, window), span.stop)
        queries = []
        for position in range(span.start, span.stop):
            row = span.row + position - span.start
            keys, values = self._context(self._first_key(position, window) - base, position + 1 - base)
            queries.append(_Queries(slice(row, row + 1), 0, 1, position, keys, values, None))
        return _Work(gather, [], queries, span.wanted_from)

    def _first_key(self, position: int, window: int | None) -> int:
        return max(self.first_position, 0 if window is None else position - window + 1)

    def _gather(self, span: Span, window: int | None, first: int, stop: int) -> tuple[_Gather, int, list[torch.Tensor]]:
        """The copy of the blocks that hold positions `first .. stop`, the position of workspace row 0, and the rows of
        blocks that have slid out: a tile reaches further back than the rows at hand, which do not see them."""
        size = self.block_size
        begin, end = first // size, -(-stop // size)
        base = begin * size // _ALIGN_TOKENS * _ALIGN_TOKENS
        blocks = span.table_of(window)[begin:end].astype(np.int64)
        slid = int((blocks == HOLE).sum())
        held = (begin + slid) * size - base
        keys = torch.from_numpy(blocks[slid:] * self.tensors).to(self.device)
        targets = [rows[held : end * size - base].view(end - begin - slid, -1) for rows in self._workspaces]
        holes = [rows[begin * size - base : held] for rows in self._workspaces] if slid else []
        return _Gather([keys + tensor for tensor in range(self.tensors)], targets), base, holes

    def _context(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        context = [rows[start:stop].transpose(0, 1)[None] for rows in self._workspaces]
        return context[0], context[-1]

    def _mask(self, window: int | None, first: int, size: int) -> torch.Tensor:
        """Mask [size, keys] of a tile whose keys begin `first` tokens from its first row, mostly before it."""
        band = self._bands[window]
        return band.mask[:size, band.before + first : band.before + size]

    def _reserve(self, spans: Sequence[Span]) -> None:
        """Grow the kept buffers to what this step needs: large tensors made anew in every layer would cost dearly."""
        longest = max((span.stop for span in spans), default=0) + self.tiles[-1] + self.block_size + _ALIGN_TOKENS
        if len(self._workspaces[0]) < longest:
            self._workspaces = self._new_workspaces(1 << (longest - 1).bit_length())
        for window, band in self._bands.items():
            before = longest if window is None else min(longest, window + self.tiles[-1])
            if band.before < before:
                band.before = min(len(self._workspaces[0]), before if window else len(self._workspaces[0]))
                band.mask = self._band_mask(band.before, window)

    def _band_mask(self, before: int, window: int | None) -> torch.Tensor:
        tile = self.tiles[-1]
        distance = torch.arange(tile)[:, None] - (torch.arange(before + tile) - before)[None, :]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self.device)

    def _new_workspaces(self, rows: int) -> list[torch.Tensor]:
        return [self._new(rows, self.kv_heads) for _ in range(self.tensors)]

    def _new(self, rows: int, heads: int) -> torch.Tensor:
        return torch.zeros(rows, heads, self.head_dim, dtype=self.dtype, device=self.device)

    def _index(self, rows: NDArray[np.int64]) -> slice | torch.Tensor:
        """Rows as a slice where they are consecutive: a view costs nothing."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return torch.from_numpy(rows).to(self.device)

    @staticmethod
    def _written_rows(span: Span) -> NDArray[np.int64]:
        """Rows of the step to write."""
        return np.arange(max(span.start, span.write_from), span.stop, dtype=np.int64) - span.start + span.row

    def _key_slots(self, spans: Sequence[Span], window: int | None) -> torch.Tensor:
        """The cache line of each written row's key, in layers with this window."""
        slots = []
        for span in spans:
            positions = self._written_rows(span) - span.row + span.start
            blocks = span.table_of(window)[positions // self.block_size].astype(np.int64)
            slots.append(blocks * self.tensors * self.block_size + positions % self.block_size)
        return torch.from_numpy(np.concatenate(slots)).to(self.device)


def query_tiles(start: int, stop: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tiles (first position, rows) on the absolute grid that cover `start .. stop`; a large one where it fits."""
    small = sizes[0]
    end = -(-stop // small) * small
    at = start // small * small
    tiles = []
    while at < end:
        size = max(size for size in sizes if size == small or (at % size == 0 and at + size <= end))
        tiles.append((at, size))
        at += size
    return tiles


# ------------------------------------------------------------------------------------------- load-time check


def find_query_tiles(
    kind: type[PagedAttention] = PagedAttention,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...]:
    """Query tile sizes of equal bits for these heads: small and large where trials say so, else the small one.

    The large tile is up to 1.5 times faster on long prompts in bf16, the small one serves short suffixes. Where the
    tiles' sums are split differently, rounding to 16 bits hides all but about one in 20,000 of the differences: with
    few and narrow heads many draws are needed to meet one.
    """
    generator = torch.Generator().manual_seed(16 * LARGE_TILE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def equal(size: int, spans: Sequence[Span]) -> bool:
        """Both tiles give the same bits for random queries of `spans` over a random cache of blocks of `size`."""
        cache = random(spans[-1].stop // size, kind.tensors, size, kv_heads, head_dim)
        q, kv = random(sum(span.stop - span.start for span in spans), heads, head_dim), random(1, kv_heads, head_dim)
        results = []
        for tile in (SMALL_TILE, LARGE_TILE):
            attention = kind(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
                block_size=size,
                windows=(None,),
                tiles=(tile,),
            )
            attention.bind([cache])
            attention.prepare(spans, [], len(q))
            results.append(attention(0, q, kv, kv, head_dim**-0.5))
        return torch.equal(*results)

    table, short, end = np.arange(32, dtype=np.int32), 2 * LARGE_TILE, 16 * LARGE_TILE
    draws = -(-_TRIED_ELEMENTS // (short * heads * head_dim))
    if not all(equal(16, [Span(0, short, 0, table, short, 0)]) for _ in range(draws)):
        return (SMALL_TILE,)
    long = [Span(0, 768, 0, table, 768, 0), Span(end - 256, end, 768, table, end, 0)]
    return (SMALL_TILE, LARGE_TILE) if equal(256, long) else (SMALL_TILE,)
