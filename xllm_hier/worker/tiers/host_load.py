"""A load under way: copies that bring its blocks to the device, and beside them the proof of the host blocks.

The copies do not wait for the proof, and a forward waits for it only at its end: what was computed from a block that
did not prove itself is thrown away with the step.
"""

from __future__ import annotations

from concurrent.futures import Future

from ...errors import TransferError
from .layer_copy import LayerSynchronizer


class HostLoad:
    """`copies`, and perhaps their `proof`: its result is what is wrong with the host blocks, None when nothing is."""

    def __init__(self, copies: LayerSynchronizer, proof: Future[str | None] | None = None) -> None:
        self.batch_id = copies.batch_id
        self._copies = copies
        self._proof = proof

    @property
    def error(self) -> str | None:
        """Why the load failed; None while that is not known, and when it succeeded (see `wait_all`)."""
        if self._copies.error is not None or self._proof is None or not self._proof.done():
            return self._copies.error
        return self._proof.result()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until the group of `layer` is there or a copy has failed. Raises TransferError after `timeout_s`."""
        self._copies.wait(layer, timeout_s)

    def wait_all(self, timeout_s: float) -> None:
        """Block until every copy has ended and the proof is known. Raises TransferError after `timeout_s` of each."""
        self._copies.wait_all(timeout_s)
        if self._proof is not None:
            try:
                self._proof.result(timeout_s)
            except TimeoutError:
                raise TransferError(
                    f"the host blocks of load {self.batch_id} were not verified within {timeout_s:g} s"
                ) from None
