"""The identity of a model, read from its files in well under a second: all that must be equal for KV to be shared.

Three parts, each compared by itself, so that a message can say which one differs:

- `config`: `config.json` without what no key and no value depends on (`_FREE`, and names that begin with `_`);
- `weights`: name, dtype and shape of every tensor, and PLACES x PLACE_BYTES of its bytes at fixed places. Neither the
  folder nor how tensors are spread over files matters. A change between the places is not seen;
- `dtype`: what the model computes in.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .weights import weight_files

PLACES, PLACE_BYTES = 16, 64
_FREE = frozenset(
    {
        "architectures",
        "auto_map",
        "transformers_version",
        "dtype",  # of the files: each tensor has its own, and what is computed in is a part of its own
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)


@dataclass(frozen=True)
class ModelIdentity:
    """Two instances may share KV only if these are equal; all ranks of an instance have the same."""

    config: str
    weights: str
    dtype: str

    @property
    def text(self) -> str:
        """As kept in the store; `difference` reads it."""
        return " ".join(f"{part}={value}" for part, value in asdict(self).items())

    def difference(self, text: str) -> str:
        """The parts in which `text`, another identity's, differs: `config and weights`; empty when it is the same."""
        if text == self.text:
            return ""
        theirs = dict(part.partition("=")[::2] for part in text.split())
        return " and ".join(part for part, value in asdict(self).items() if theirs.get(part) != value) or "format"


def model_identity(folder: str | Path, dtype: torch.dtype) -> ModelIdentity:
    """The identity of the model in `folder`, computed in `dtype`.

    Raises:
        ConfigError: the folder has no complete checkpoint.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    facts = json.dumps(_relevant(config), sort_keys=True)
    weights = hashlib.blake2b(digest_size=16)
    for name, header, sampled in sorted(_tensors(Path(folder))):
        weights.update(f"{len(name)}.{name}{header}{len(sampled)}.".encode())
        weights.update(sampled)
    return ModelIdentity(
        hashlib.blake2b(facts.encode(), digest_size=8).hexdigest(),
        weights.hexdigest(),
        str(dtype).removeprefix("torch."),
    )


def _relevant(config: Any) -> Any:
    if isinstance(config, list):
        return [_relevant(item) for item in config]
    if not isinstance(config, dict):
        return config
    kept = {name: value for name, value in config.items() if name not in _FREE and not name.startswith("_")}
    return {name: _relevant(value) for name, value in kept.items()}


def _tensors(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, dtype with shape, and sampled bytes of every tensor; only the pages of the places are read."""
    for path in weight_files(folder):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            (length,) = struct.unpack_from("<Q", mapped)
            data = 8 + length
            for name, entry in json.loads(mapped[8:data]).items():
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    yield name, f"{entry['dtype']}{entry['shape']}", _sampled(mapped, data + start, data + stop)


def _sampled(mapped: mmap.mmap, start: int, stop: int) -> bytes:
    """The first bytes, the last ones, and those of places evenly between; all of a small tensor."""
    last = stop - start - PLACE_BYTES
    if last < PLACES * PLACE_BYTES:
        return mapped[start:stop]
    places = (start + last * number // (PLACES - 1) for number in range(PLACES))
    return b"".join(mapped[place : place + PLACE_BYTES] for place in places)
