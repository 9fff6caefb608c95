"""The queues of an engine: each open request stands in one of them, by its state.

prefetching -> waiting -> running -> (canonical, at the scheduler)
     |            ^
     +-> homeless +-> arriving -> running        on prefill and decode instances
"""

from __future__ import annotations

import bisect

from ...request_messages import AddRequest
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Home, Sequence, SequenceState

MATCHED_REQUESTS = 64  # whose hits are looked up for a heartbeat: the rest counts in full


class Queues:
    """Requests that were admitted and have not ended; used by one thread.

    `hands_over`: other instances generate the tokens of requests that want more than one. `sequences` are those that a
    client waits for, by request id.
    """

    def __init__(self, manager: HierarchyBlockManagerPool, *, hands_over: bool = False) -> None:
        self.manager = manager
        self.hands_over = hands_over
        self.sequences: dict[str, Sequence] = {}
        self.prefetching: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.arriving: list[Sequence] = []
        self.homeless: list[Sequence] = []
        self._next_arrival = 0

    def add_request(self, request: AddRequest) -> None:
        """Admit a checked request: its prefetch starts now, it is scheduled when that has ended."""
        sequence = self.manager.new_sequence(request)
        sequence.arrival = self.new_arrival()
        if self.hands_over and request.max_tokens > 1:
            sequence.home = Home.SOUGHT
        self.sequences[request.request_id] = sequence
        self.readmit(sequence)

    def new_arrival(self) -> int:
        """The next number in the order of arrival."""
        self._next_arrival += 1
        return self._next_arrival

    def readmit(self, sequence: Sequence) -> None:
        """Begin with a sequence that holds no blocks, from its prefetch on."""
        sequence.state = SequenceState.PREFETCHING
        if self.manager.prefetch_from_storage(sequence):
            self.prefetching.append(sequence)
        else:
            self.enqueue(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Go on with a sequence whose prompt and first token another instance has computed."""
        sequence.state = SequenceState.WAITING
        self.sequences[sequence.request.request_id] = sequence
        self.arriving.append(sequence)

    def abort(self, request_id: str) -> None:
        """Stop a request in whatever state it is; its blocks return as soon as no transfer needs them."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            sequence.aborted = True

    def poll_prefetches(self) -> None:
        """Move the requests whose prefetch has ended to the waiting queue; aborted ones leave."""
        for sequence in list(self.prefetching):
            if self.manager.update_prefetch_result(sequence):
                self.prefetching.remove(sequence)
                self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that waits for no read: for its turn, or for a decode instance to be found."""
        if sequence.home is Home.SOUGHT:
            sequence.state = SequenceState.REMOTE
            self.homeless.append(sequence)
        else:
            self.admit(sequence)

    def take_homeless(self) -> list[Sequence]:
        """Sequences since the last call that are ready and want a decode instance; `admit` brings them back."""
        homeless, self.homeless = self.homeless, []
        return homeless

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn to be computed."""
        sequence.state = SequenceState.WAITING
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def take_out(self, sequence: Sequence) -> None:
        """Compute it no further for now; it keeps its blocks."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        sequence.state = SequenceState.REMOTE

    def forget(self, sequence: Sequence) -> None:
        """Another instance has answered it in full."""
        sequence.state = SequenceState.FINISHED
        del self.sequences[sequence.request.request_id]

    def backlog_tokens(self) -> int:
        """Prompt tokens of open requests that are still to be computed, as far as caches do not have them."""
        known = sum(max(0, sequence.prompt_length - sequence.num_computed) for sequence in self.running)
        for number, sequence in enumerate([*self.waiting, *self.prefetching]):
            hit = self.manager.hit(sequence).tokens if number < MATCHED_REQUESTS else 0
            known += max(0, sequence.prompt_length - hit)
        return known

    @property
    def num_open(self) -> int:
        """Requests whose client still waits."""
        return sum(not sequence.aborted for sequence in self.sequences.values())
