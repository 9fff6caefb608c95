"""The blocks of one model on one rank: what each tier holds, and who reads and writes them just now."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeGuard

from xllm_hier.block import BlockType

from .contents import POISON, TARGET, Part, Values


class Object(NamedTuple):
    """Payload and trailer of a host block or of a store object; `sound`: the checksum is the payload's."""

    values: Values
    name: bytes
    sound: bool = True


class Claims:
    """Blocks of one tier of one rank that some I/O reads or writes just now."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.readers: Counter[int] = Counter()
        self.writers: dict[int, str] = {}

    def read(self, block: int, who: str) -> None:
        assert block not in self.writers, f"{who} reads {self.tier} {block}, which {self.writers[block]} is writing"
        self.readers[block] += 1

    def write(self, block: int, who: str) -> None:
        assert block not in self.writers, f"{who} writes {self.tier} {block}, so does {self.writers[block]}"
        assert not self.readers[block], f"{who} writes {self.tier} {block} while it is being read"
        self.writers[block] = who

    def end_read(self, block: int) -> None:
        self.readers[block] -= 1

    def end_write(self, block: int) -> None:
        del self.writers[block]

    def busy(self) -> set[int]:
        return {block for block, count in self.readers.items() if count} | set(self.writers)


class Domain:
    """The blocks of one part on one rank, in all tiers; `size` values in each."""

    def __init__(self, number: int, part: Part, size: int, num_device: int, num_host: int) -> None:
        self.part = part
        self.size = size
        self.device: list[list[bytes]] = [[POISON] * size for _ in range(num_device)]
        self.host: list[Object | None] = [None] * num_host
        self.store: dict[bytes, Object] = {}
        self.spoilt: set[int] = set()  # host blocks that a fault has changed since they were written
        name = f"rank {number}" if part == (TARGET, BlockType.KV) else f"rank {number} {part}"
        self.device_claims, self.host_claims = Claims(f"{name} device"), Claims(f"{name} host")

    def host_values(self, host: int) -> Values:
        found = self.host[host]
        assert found is not None, f"host block {host} is loaded and holds nothing"
        return found.values

    @property
    def garbage(self) -> Values:
        """What no computing gives."""
        return (b"garbage",) * self.size


def is_named(held: Object | None, name: bytes) -> TypeGuard[Object]:
    """It is there, and its trailer says that it is block `name`."""
    return held is not None and held.name == name
