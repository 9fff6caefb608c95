"""Which bytes move between two instances: blocks merged into runs, runs of some layers as pieces, pieces in calls.

A block of a layer is `layer_bytes` bytes at `address of the layer + block * layer_bytes` on either side, so blocks that
are neighbours on both sides are one piece::

    local blocks     4  5  6     9        runs: (4, 1) x 3, (9, 7) x 1, for every layer
    remote blocks    1  2  3     7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import TransferError
from ...plans import RemoteBlocks, TransferRegion
from .transfer_engine import MAX_CALL_BYTES, MAX_PIECES

Longs = NDArray[np.int64]
_MAX_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Pieces:
    """Piece i: `sizes[i]` bytes at `local[i]` here and at `remote[i]` at the peer."""

    local: Longs
    remote: Longs
    sizes: Longs

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def calls(self) -> Iterator[Pieces]:
        """These pieces in parts of which each is one call to the library."""
        ends = np.cumsum(self.sizes)
        start = 0
        while start < len(ends):
            sent = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, sent + MAX_CALL_BYTES, side="right"))
            part = slice(start, min(max(stop, start + 1), start + MAX_PIECES))
            yield Pieces(self.local[part], self.remote[part], self.sizes[part])
            start = part.stop

    @staticmethod
    def joined(parts: Sequence[Pieces]) -> Pieces:
        """All of these as one."""
        nothing = Pieces(*[np.empty(0, dtype=np.int64)] * 3)
        each = [nothing, *parts]
        arrays = ([part.local for part in each], [part.remote for part in each], [part.sizes for part in each])
        return Pieces(*(np.concatenate(array) for array in arrays))


@dataclass(frozen=True)
class MovingBlocks:
    """Blocks of one type and domain as runs of neighbours: run i has `counts[i]` blocks from `local[i]`, `remote[i]`.

    `layers` are the model's numbers of the regions' layers.
    """

    ours: TransferRegion
    theirs: TransferRegion
    layers: tuple[int, ...]
    local: Longs
    remote: Longs
    counts: Longs

    @classmethod
    def of(
        cls, mapping: RemoteBlocks, ours: TransferRegion, theirs: TransferRegion, layers: tuple[int, ...]
    ) -> MovingBlocks:
        """The runs of a mapping in whatever order it comes. Raises TransferError when it names blocks there are not."""
        if len(mapping.local) != len(mapping.remote):
            raise TransferError(f"{len(mapping.local)} local and {len(mapping.remote)} remote blocks are no pairs")
        for blocks, region, whose in ((mapping.local, ours, "our"), (mapping.remote, theirs, "the peer's")):
            if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < region.num_blocks:
                raise TransferError(f"{region.block_type} blocks beyond {whose} {region.num_blocks}")
        most = max(1, _MAX_PIECE_BYTES // ours.layer_bytes)
        local, remote, counts = merged(mapping.local, mapping.remote, most)
        return cls(ours, theirs, layers, local, remote, counts)

    def pieces(self, layers: range) -> Pieces:
        """The pieces of those of `layers` that these blocks have, layer by layer."""
        places = [place for place, layer in enumerate(self.layers) if layer in layers]
        size = self.ours.layer_bytes
        local = self._addresses(self.ours, places) + self.local * size
        remote = self._addresses(self.theirs, places) + self.remote * size
        return Pieces(local.ravel(), remote.ravel(), np.tile(self.counts * size, len(places)))

    @staticmethod
    def _addresses(region: TransferRegion, places: list[int]) -> Longs:
        return np.array([region.addresses[place] for place in places], dtype=np.int64).reshape(-1, 1)


def merged(local: NDArray[np.int32], remote: NDArray[np.int32], most: int) -> tuple[Longs, Longs, Longs]:
    """First local and remote blocks, and lengths of at most `most`, of the runs that are neighbours on both sides."""
    order = np.argsort(local, kind="stable")
    ours, theirs = local[order].astype(np.int64), remote[order].astype(np.int64)
    breaks = np.ones(len(ours), dtype=bool)
    breaks[1:] = (np.diff(ours) != 1) | (np.diff(theirs) != 1)
    place = np.arange(len(ours))
    within = place - np.maximum.accumulate(np.where(breaks, place, 0))
    starts = np.flatnonzero(within % most == 0)
    return ours[starts], theirs[starts], np.diff(np.append(starts, len(ours)))
