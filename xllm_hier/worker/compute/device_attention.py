"""Attention of devices that bring a paged kernel, behind the same methods as `PagedAttention`.

The cache [blocks, 2, block_size, kv_heads, head_dim] is seen as pages, of which block b has the two 2b and 2b + 1. Keys
are all pages but the last, values all but the first, so one page number finds both, and both views are contiguous (the
NPU's kernel refuses others)::

    pages     | K0 | V0 | K1 | V1 | K2 | V2 |
    as keys   |-0--|-1--|-2--|-3--|-4--|             block 1 is page 2 in both
    as values      |-0--|-1--|-2--|-3--|-4--|

A step is at most two kernel calls a layer: one for all prompt spans, one for all generated rows, each of which is a
sequence of its own over its own context, so that replaying generated tokens gives what generating them gave.

No kernel here has ever run on hardware: tests run the same calls against stand-ins of the documented signatures. So
`choose_attention` tries every kernel at load against gathering and scaled dot products on the very device, window by
window; what a kernel refuses, or computes differently, is gathered. `batch_invariant` is what that trial found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from .attention import PagedAttention, Span, find_query_tiles

log = logging.getLogger("xllm.worker")

_Pages = tuple[torch.Tensor, torch.Tensor]  # of keys and of values


@dataclass(frozen=True)
class _Sequences:
    """One kernel call: `rows` of the step, sequence after sequence; all tensors int32.

    Sequence i has the queries `query_ends[i - 1] .. query_ends[i]`, which are the last of its `key_counts[i]` tokens.
    `table` [sequences, pages] holds page numbers.
    """

    rows: slice | torch.Tensor
    query_ends: list[int]
    key_counts: list[int]
    longest_query: int
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    used_keys: torch.Tensor
    table: torch.Tensor
    any_wanted: bool


class KernelAttention(PagedAttention):
    """Attention by `_run`, a kernel over the block table; windows in `gathered` go the gathering way.

    `variant` is one of `variants`: ways to call the kernel among which only a trial can choose.
    """

    variants: tuple[str, ...] = ("",)

    def __init__(self, *, gathered: Sequence[int | None] = (), variant: str = "", **shape: Any) -> None:
        super().__init__(**shape)
        self.variant = variant
        self._bands = {window: band for window, band in self._bands.items() if window in gathered}
        self._pages: list[_Pages] = []
        self._calls: dict[int | None, list[_Sequences]] = {}

    def bind(self, layer_caches: Sequence[torch.Tensor]) -> None:
        """As the base, and see the caches as pages."""
        super().bind(layer_caches)
        shape = (-1, self.block_size, self.kv_heads, self.head_dim)
        self._pages = [(pages[:-1], pages[1:]) for pages in (cache.view(shape) for cache in layer_caches)]

    def _lay_out(self, prefill: Sequence[Span], decode: Sequence[Span]) -> None:
        super()._lay_out(prefill, decode)
        alone = [
            Span(at, at + 1, span.row + at - span.start, span.table, at, at, span.window_table)
            for span in decode
            for at in range(span.start, span.stop)
        ]
        self._calls = {
            window: [self._sequences(spans, window) for spans in (prefill, alone) if spans]
            for window in dict.fromkeys(self.windows)
            if window not in self._bands
        }

    def _sequences(self, spans: Sequence[Span], window: int | None) -> _Sequences:
        lengths = [span.stop - span.start for span in spans]
        rows = np.concatenate([np.arange(span.row, span.row + span.stop - span.start) for span in spans])
        pages = [-(-span.stop // self.block_size) for span in spans]
        table = np.zeros((len(spans), max(pages)), dtype=np.int32)
        for line, span, count in zip(table, spans, pages, strict=True):
            line[:count] = np.maximum(span.table_of(window)[:count], 0) * 2  # no row sees what has slid out: any page
        key_counts = [span.stop for span in spans]
        return _Sequences(
            rows=self._index(rows.astype(np.int64)),
            query_ends=list(accumulate(lengths)),
            key_counts=key_counts,
            longest_query=max(lengths),
            cu_queries=self._int32([0, *accumulate(lengths)]),
            cu_keys=self._int32([0, *accumulate(key_counts)]),
            used_keys=self._int32(key_counts),
            table=torch.from_numpy(table).to(self.device),
            any_wanted=any(span.wanted_from < span.stop for span in spans),
        )

    def _attend(self, layer: int, q: torch.Tensor, scale: float, wanted_only: bool) -> None:
        window = self.windows[layer]
        if window in self._bands:
            super()._attend(layer, q, scale, wanted_only)
            return
        for call in self._calls[window]:
            if call.any_wanted or not wanted_only:
                self._output[call.rows] = self._run(call, q[call.rows], self._pages[layer], scale, window)

    def _run(self, call: _Sequences, q: torch.Tensor, pages: _Pages, scale: float, window: int | None) -> torch.Tensor:
        """Output [rows, heads, head_dim] of one call; both sides of `pages` are [pages, block_size, kv_heads, dim]."""
        raise NotImplementedError

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)


class CudaAttention(KernelAttention):
    """torch's `varlen_attn` with a block table; never run on hardware.

    `num_splits=1` is documented to make it batch invariant; for prompt rows that also takes equal bits for every
    chunking, which nothing promises. Its FlashAttention 2 takes 16-bit types, head sizes that are multiples of 8 up to
    256 and pages of a multiple of 256 tokens (read in its source); FlashAttention 3 refuses `cu_seq_k` beside a block
    table, and some builds may want it: hence the variants.
    """

    kernel = "varlen_attn"
    variants = ("", "cu_seq_k")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        from torch.nn.attention import varlen

        logging.getLogger(varlen.__name__).setLevel(logging.WARNING)  # it logs every call
        self._varlen: Any = varlen

    def _run(self, call: _Sequences, q: torch.Tensor, pages: _Pages, scale: float, window: int | None) -> torch.Tensor:
        # A single query that sees all its keys needs no mask, and only without one the kernel packs grouped heads.
        left = -1 if window is None else window - 1
        right = -1 if window is None and call.longest_query == 1 else 0
        output: torch.Tensor = self._varlen.varlen_attn(
            q,
            *pages,
            call.cu_queries,
            call.cu_keys if self.variant else None,
            call.longest_query,
            max(call.key_counts),
            scale=scale,
            window_size=(left, right),
            enable_gqa=self.heads != self.kv_heads,
            seqused_k=call.used_keys,
            block_table=call.table,
            num_splits=1,
        )
        return output


class NpuAttention(KernelAttention):
    """`_npu_reshape_and_cache` and `npu_fused_infer_attention_score` of torch_npu; never run on hardware.

    Documented for 16-bit types, pages of 128, 256, 384 or 512 tokens, and fewer than 2^31 elements in all pages of a
    layer. The band of `sparse_mode=4` is said to be ignored for single queries, in which case the trial sends the
    windows to the gathering way.
    """

    kernel = "npu_fused_infer_attention_score"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        import torch_npu

        self._npu: Any = torch_npu
        # The kernel wants this one mask for all causal and banded calls: 1 hides.
        self._hidden = torch.ones(2048, 2048, dtype=torch.int8).triu_(1).to(self.device)

    def prepare(self, prefill: Sequence[Span], decode: Sequence[Span], num_rows: int) -> None:
        """As the base; the cache lines are also needed as int32."""
        super().prepare(prefill, decode, num_rows)
        self._slots = {window: slots[0].to(torch.int32) for window, slots in self._write_slots.items()}

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._pages[layer]
        slots = self._slots[self.windows[layer]]
        self._npu._npu_reshape_and_cache(
            key=k.contiguous(), value=v.contiguous(), key_cache=keys, value_cache=values, slot_indices=slots
        )

    def _run(self, call: _Sequences, q: torch.Tensor, pages: _Pages, scale: float, window: int | None) -> torch.Tensor:
        band = {"sparse_mode": 3} if window is None else {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
        output: torch.Tensor = self._npu.npu_fused_infer_attention_score(
            q.contiguous(),
            *(side.flatten(2) for side in pages),
            atten_mask=self._hidden,
            block_table=call.table,
            input_layout="TND",
            block_size=self.block_size,
            actual_seq_lengths=call.query_ends,
            actual_seq_lengths_kv=call.key_counts,
            num_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            scale=scale,
            **band,
        )[0]
        return output


# ------------------------------------------------------------------------------------------- load-time trial


def choose_attention(kind: type[KernelAttention], **shape: Any) -> PagedAttention:
    """`kind` for the windows where a trial on the device finds it right, gathering for the rest.

    `shape` is what PagedAttention is made of, but `tiles`.
    """
    sizes = {name: shape[name] for name in ("heads", "kv_heads", "head_dim", "dtype", "device")}
    shape["tiles"] = find_query_tiles(**sizes)
    windows = list(dict.fromkeys(shape["windows"]))
    variant, good, reasons = _best_variant(kind, shape, windows)
    chosen: PagedAttention
    if good:
        chosen = kind(**shape, variant=variant, gathered=[window for window in windows if window not in good])
    else:
        chosen = PagedAttention(**shape)
    for window, reason in reasons.items():
        log.warning("%s is not used for %s: %s", kind.kernel, _name(window), reason)
    trials = [Trial(shape, window) for window in windows]
    chosen.batch_invariant = all(
        good[window] if window in good else trial.equal_bits(trial.make(PagedAttention))
        for window, trial in zip(windows, trials, strict=True)
    )
    if not chosen.batch_invariant:
        log.warning("attention on %s does not give the same bits for every chunking and batch", shape["device"])
    return chosen


def _best_variant(
    kind: type[KernelAttention], shape: dict[str, Any], windows: Sequence[int | None]
) -> tuple[str, dict[int | None, bool], dict[int | None, str]]:
    """The variant right for most windows, whether each right window has equal bits, and why the others are not right.

    Anything a kernel raises is a refusal here: absent for the device, a shape, a type, or an argument it does not know.
    """
    best: tuple[str, dict[int | None, bool], dict[int | None, str]] = ("", {}, {})
    for variant in kind.variants:
        good: dict[int | None, bool] = {}
        reasons: dict[int | None, str] = {}
        for window in windows:
            trial = Trial(shape, window)
            try:
                attention = trial.make(kind, variant=variant)
                error = trial.error(attention)
                if error > trial.tolerance:
                    reasons[window] = f"its rows are off by up to {error:.1e}"
                else:
                    good[window] = trial.equal_bits(attention)
            except Exception as refused:
                reasons[window] = f"{type(refused).__name__}: {str(refused).strip().splitlines()[:1]}"
        if len(good) > len(best[1]) or not best[2]:
            best = (variant, good, reasons)
        if not reasons:
            break
    return best


def _name(window: int | None) -> str:
    return "full attention" if window is None else f"windows of {window}"


Part = tuple[int, int, int]  # sequence, start, stop


class Trial:
    """Two random sequences in scattered blocks: is an attention right, and do bits depend on how it is asked?

    A window is cut to 64 tokens, where one key too many or too few shows far above rounding.
    """

    least_tokens = 512

    def __init__(self, shape: dict[str, Any], window: int | None) -> None:
        self.window = window if window is None else min(window, 64)
        self._shape = {**shape, "windows": (self.window,)}
        self._block_size: int = shape["block_size"]
        long = max(2 * self._block_size, self.least_tokens) + 77
        self.lengths = (long, self._block_size + 3)
        heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        dtype, device = shape["dtype"], shape["device"]
        generator = torch.Generator().manual_seed(long)

        def random(rows: int, count: int) -> torch.Tensor:
            return torch.randn(rows, count, head_dim, generator=generator).to(device, dtype)

        self._q, self._k, self._v = (
            [random(length, count) for length in self.lengths] for count in (heads, kv_heads, kv_heads)
        )
        counts = [-(-length // self._block_size) for length in self.lengths]
        places = torch.randperm(sum(counts), generator=generator).to(torch.int32).numpy()
        self._tables = (places[: counts[0]], places[counts[0] :])
        self._cache_shape = (len(places), 2, self._block_size, kv_heads, head_dim)
        # Two right ways to sum differ by about one rounding of the type; one key too many or too few by far more.
        self.tolerance = max(4 * torch.finfo(dtype).eps, 1e-4)

    def make(self, kind: type[PagedAttention], **options: Any) -> PagedAttention:
        """An attention over an empty cache of its own, with all keys and values written."""
        attention = kind(**self._shape, **options)
        device, dtype = self._shape["device"], self._shape["dtype"]
        attention.bind([torch.zeros(self._cache_shape, dtype=dtype, device=device)])
        self.run(attention, [(0, 0, self.lengths[0]), (1, 0, self.lengths[1])])
        return attention

    def run(self, attention: PagedAttention, prefill: Sequence[Part], decode: Sequence[Part] = ()) -> torch.Tensor:
        """Output [rows, heads * head_dim] of one step, in the order of the parts, moved to the CPU."""
        parts = [*prefill, *decode]
        q, k, v = (torch.cat([rows[s][a:b] for s, a, b in parts]) for rows in (self._q, self._k, self._v))
        spans = list(self._spans(parts))
        attention.prepare(spans[: len(prefill)], spans[len(prefill) :], len(q))
        return attention(0, q, k, v, self._shape["head_dim"] ** -0.5).cpu().clone()

    def _spans(self, parts: Sequence[Part]) -> Iterator[Span]:
        row = 0
        for sequence, start, stop in parts:
            yield Span(start, stop, row, self._tables[sequence], start, start)
            row += stop - start

    def error(self, attention: PagedAttention) -> float:
        """The largest error of a row, relative to the row, against gathering; infinite where the cache differs."""
        reference = self.make(PagedAttention)
        if not torch.equal(attention._caches[0].cpu(), reference._caches[0].cpu()):
            return float("inf")
        first, second = self.lengths
        steps: list[tuple[list[Part], list[Part]]] = [
            ([(0, 0, first), (1, 0, second)], []),
            ([(0, first // 4, first)], [(1, second - 3, second)]),
            ([], [(1, second - 1, second), (0, first - 1, first)]),
        ]
        worst = 0.0
        for prefill, decode in steps:
            ours, theirs = (self.run(which, prefill, decode).float() for which in (attention, reference))
            distance = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
            worst = max(worst, float(torch.nan_to_num(distance, nan=torch.inf).max()))
        return worst

    def equal_bits(self, attention: PagedAttention) -> bool:
        """Whether a few chunkings, batches and replays give the bits of each sequence alone and whole."""
        first, second = self.lengths
        whole = self.run(attention, [(0, 0, first)])
        other = self.run(attention, [(1, 0, second)])
        for cuts in ((64,), (first // 5, first // 5 + 1, first // 2), (self._block_size,)):
            edges = [0, *cuts, first]
            pieces = [self.run(attention, [(0, *edge)]) for edge in pairwise(edges)]
            if not torch.equal(torch.cat(pieces), whole):
                return False
        both = self.run(attention, [(1, 0, second), (0, first // 2, first)])
        if not torch.equal(both, torch.cat([other, whole[first // 2 :]])):
            return False
        row = self.run(attention, [], [(0, first - 1, first)])
        replay = self.run(attention, [(1, 0, second)], [(1, second - 2, second), (0, first - 4, first)])
        return torch.equal(replay[-1:], row) and torch.equal(replay[:second], other)
