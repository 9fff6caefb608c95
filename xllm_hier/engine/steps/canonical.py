"""Finished sequences whose decoded blocks are computed once more by the prefill path, one tile of the oldest a step.

They have been answered in full: nobody waits for them but requests that want their blocks.
"""

from __future__ import annotations

from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence, SequenceState
from .audit import Auditor
from .step import Step

CANONICAL_CHUNK = 256  # one prefill tile per step bounds the time that finished sequences take from running ones


class CanonicalQueue:
    """Sequences in the order in which they finished."""

    def __init__(self, manager: HierarchyBlockManagerPool, auditor: Auditor) -> None:
        self._manager = manager
        self._auditor = auditor
        self.sequences: list[Sequence] = []

    def offer(self, sequence: Sequence) -> bool:
        """Take a finished sequence that still holds its blocks; False when recomputing none of them is worth it."""
        if not self._manager.begin_canonical(sequence):
            return False
        sequence.state = SequenceState.CANONICAL
        self.sequences.append(sequence)
        return True

    def add_tile(self, step: Step) -> None:
        """Add one tile of the oldest sequence, even to a full step, because others may wait for its blocks."""
        for sequence in self.sequences[:1]:
            end = min(sequence.num_computed + CANONICAL_CHUNK, sequence.canonical_end)
            if self._manager.allocate(sequence, end):
                step.add_recomputed(self._manager, sequence, end)
            else:
                self.end(sequence)

    def computed(self, sequence: Sequence) -> None:
        """A tile has been computed and published; with the last one the sequence ends."""
        if sequence.num_computed >= sequence.canonical_end:
            self.end(sequence)

    def end_newest(self) -> bool:
        """Give up the sequence that finished last, for its blocks; False when there is none."""
        if self.sequences:
            self.end(self.sequences[-1])
            return True
        return False

    def end(self, sequence: Sequence) -> None:
        """Recompute no more of this sequence and release its blocks."""
        self.sequences.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._auditor.consider(sequence)
        self._manager.deallocate(sequence)
