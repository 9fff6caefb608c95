"""Where the states of recurrent layers lie: each sequence's own, and the checkpoints that it leaves and goes on from.

A state is that behind a number of tokens, and nothing can be made of it but those that follow. So a sequence has a
block of its own that every step writes (and one for each draft it may verify, of which it does not know yet which one
it will go on from), and at boundaries worth keeping a step writes a block more, which others may find. A checkpoint
that was found is only read.

    tokens    0 ......... 64 ......... 128 .. 150          prompt of 150, a checkpoint each 64 tokens
    blocks    nothing     c0           c1     live         step 1 reads nothing, writes c0, c1, live; step 2 reads live
"""

from __future__ import annotations

from ...ints import ints
from ...plans import HOLE, StateMoves
from .keeping import Keeping
from .sequence import Sequence
from .types import HeldCheckpoints, TypePools


class Checkpoints:
    """The LINEAR blocks of all sequences."""

    def __init__(self, pools: TypePools, keeping: Keeping) -> None:
        self._pools = pools
        self._size = pools.rule.block_size
        self._keeping = keeping

    def _held(self, sequence: Sequence) -> HeldCheckpoints:
        held = sequence.held[self._pools.type]
        assert isinstance(held, HeldCheckpoints)
        return held

    def begin(self, sequence: Sequence, boundary: int) -> None:
        """The next step begins behind block `boundary`, with the state of its checkpoint."""
        state = self._held(sequence).block(boundary - 1) if boundary else HOLE
        sequence.states = {boundary * self._size: state}

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for the states worth keeping among the next tokens, as far as there are any: a checkpoint less makes
        a restore longer, nothing else. Those of generated tokens serve the sequence alone, if it is preempted, and are
        held until then: they leave half of the pool to others."""
        held, device = self._held(sequence), self._pools.device
        left = 0 if sequence.in_prefill or sequence.canonical_end else device.num_blocks // 2
        end = sequence.canonical_end or num_tokens
        if not sequence.tag_decoded and not sequence.canonical_end:
            end = sequence.prompt_length  # a state that decoding left must not be found where a prompt's is looked for
        last = min(num_tokens, end) // self._size
        for index in range(sequence.num_computed // self._size, last):
            if held.block(index) == HOLE and self._keeping.is_kept(sequence, self._pools, index):
                block = device.allocate(1) if device.num_available > left else None
                if block is None:
                    return
                held.put(index, block[0])

    def move(self, sequence: Sequence, end: int, num_drafts: int) -> StateMoves:
        """Where the next step, over the tokens up to `end` and `num_drafts` drafts behind them, takes the sequence's
        state from and leaves it."""
        source, held = sequence.states[sequence.num_computed], self._held(sequence)
        moves = {end + number: sequence.live_states[number] for number in range(num_drafts + 1)}
        for index in held.numbers((end + num_drafts) // self._size):
            if (index + 1) * self._size > sequence.num_computed:
                moves[(index + 1) * self._size] = held.block(index)
        sequence.states = dict(sorted(moves.items())) if len(moves) > 1 else moves
        return StateMoves(source, ints(list(sequence.states)), ints(list(sequence.states.values())))

    def note_written(self, sequence: Sequence) -> None:
        """A step has ended, and the sequence's tokens are known: note the checkpoints that hold their state. One
        behind a draft that was rejected does not, and is written again."""
        held = self._held(sequence)
        if not held.blocks:
            return
        for index in held.numbers(sequence.num_computed // self._size):
            if sequence.states.get((index + 1) * self._size) == held.block(index):
                held.written.add(index)

    def needless(self, sequence: Sequence) -> dict[int, int]:
        """Take from the sequence the checkpoints, by number, that it neither goes on from nor may have to leave: all
        that others can find, and of those behind its prompt all but the last."""
        held = self._held(sequence)
        if not held.blocks:
            return {}
        waiting = sorted(index for index in held.written if index >= sequence.num_published)
        known = [*held.numbers(sequence.num_published), *waiting[:-1]]
        states = sequence.states.values()
        done = [index for index in known if held.block(index) not in states]
        taken = {index: held.block(index) for index in done}
        for index in done:
            held.put(index, HOLE)
        return taken

    def keep_live(self, sequence: Sequence) -> int | None:
        """Where a prompt was interrupted right behind a block, the sequence's own state becomes the checkpoint there:
        its number. None: it was not, or there is one."""
        position = sequence.num_computed
        state = sequence.states.get(position, HOLE)
        if not sequence.in_prefill or position % self._size or state not in sequence.live_states:
            return None
        index, held = position // self._size - 1, self._held(sequence)
        sequence.live_states.remove(state)
        held.put(index, state)
        held.written.add(index)
        return index

    def num_resumable(self, sequence: Sequence) -> int:
        """Blocks up to the last checkpoint that the sequence has left, or up to its prompt's end."""
        written = self._held(sequence).written
        return max([sequence.prompt_length // self._size, *(index + 1 for index in written)])

    def drop_from(self, sequence: Sequence, first: int) -> None:
        """Release the checkpoints from block `first` on: their states will be computed anew."""
        held = self._held(sequence)
        for index in [index for index in held.numbers(len(sequence.tokens)) if index >= first]:
            self._pools.release([held.block(index)])
            held.put(index, HOLE)
