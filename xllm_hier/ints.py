"""Arrays of integers in messages: a block table costs its bytes and not a list of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ints(values: Any) -> Ints:
    """A one-dimensional int32 array of `values`, ready to travel as bytes."""
    return np.asarray(values, dtype=np.int32)
