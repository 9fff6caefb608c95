"""The messages between the engines of two instances, a prefill one and a decode one; packed by `wire`.

They travel in an envelope that says which version of them it holds (`engine/pair/links.py`). A request's way::

    prefill                                  decode
    AddNewRequests  ------------------------>            tokens known so far
                    <------------------------ Allocated  blocks by number, without those it has
    ... forwards, PUSH of those blocks ...
    FirstGeneration ------------------------>            the new token (PULL: and where the blocks lie)
                    <------------------------ FirstGenerationDone
    Release ----------------------------->              PULL: the read blocks count
                    <------------------------ Tokens ... until a finish reason
    Cancel  -------------------------------->            at any time, from either side
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ints import Ints
from .plans import TransferEndpoint
from .request_messages import AddRequest, PromptUsage, RequestOutput

PROTOCOL = 2  # of the messages below: any change of theirs, or of plans they contain, is a new version


@dataclass(frozen=True)
class Hello:
    """A prefill instance asks to be linked. No transfer of its is under way when it is sent; one that ran past its
    limit before may still write if `uncertain`. `facts` must be equal on both sides; where `numerics_id` is not, bits
    may differ."""

    facts: dict[str, str | int | None]
    numerics_id: str
    endpoints: list[TransferEndpoint]
    uncertain: bool = False


@dataclass(frozen=True)
class Welcome:
    """Answer to Hello: the two are linked, or not, and why not."""

    facts: dict[str, str | int | None]
    numerics_id: str
    endpoints: list[TransferEndpoint]
    refused: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """The sender lives and has so much to do: open requests, those of them that wait, device blocks it could give."""

    num_open: int
    num_waiting: int
    num_available: int


@dataclass(frozen=True)
class Bye:
    """The sender does not know the receiver, or no more: every request that they shared is over."""

    why: str


@dataclass(frozen=True)
class NumberedBlocks:
    """Device blocks of one BlockType of one sequence: block `numbers[i]` is `blocks[i]`; a recurrent state is its
    number 0."""

    block_type: str
    numbers: Ints
    blocks: Ints


@dataclass(frozen=True)
class NewRequest:
    """A request and the tokens generated for it so far, by an instance that is lost."""

    request: AddRequest
    generated: Ints


@dataclass(frozen=True)
class AddNewRequests:
    """Requests for which the decode instance is to find room; it answers each with one Allocated."""

    requests: list[NewRequest]


@dataclass(frozen=True)
class Allocated:
    """Room for a request: the blocks to be filled, those left out that the decode instance has (`remote_shared_num`
    leading ones of its first type). `error`: there is none, for good or, with a status of 429 or 503, for now."""

    request_id: str
    blocks: list[NumberedBlocks] = field(default_factory=list)
    remote_shared_num: int = 0
    error: str | None = None
    status: int = 500


@dataclass(frozen=True)
class FirstGeneration:
    """The known tokens are computed and `token` follows them; `drafts` are guesses behind it. PUSH: the blocks are
    there. PULL: they are to be read from `source`, which stays until the answer."""

    request_id: str
    token: int
    mode: str
    usage: PromptUsage | None
    drafts: Ints
    source: list[NumberedBlocks] = field(default_factory=list)


@dataclass(frozen=True)
class FirstGenerationDone:
    """PUSH: the request generates now. PULL: all is read, and it generates when Release comes. Or `error`: nothing is
    left of it at the decode instance."""

    request_id: str
    error: str | None = None


@dataclass(frozen=True)
class Release:
    """PULL: the source was kept until FirstGenerationDone came, so the blocks read from it count. It is
    released now. A prefill instance that had given the other up before releases it without a word."""

    request_id: str


@dataclass(frozen=True)
class Tokens:
    """Outputs of one step of the decode instance. Output i goes on behind `starts[i]` generated tokens: one that is
    lost on the way is noticed."""

    outputs: list[RequestOutput]
    starts: list[int]


@dataclass(frozen=True)
class Cancel:
    """The sender is done with a request. From a prefill instance it says, too, that nothing of it is being written any
    more; from a decode instance it asks for that in return."""

    request_id: str
    why: str = ""
