"""Layered copies of cache blocks between host and device: the extension built from `native/`, see docs/native.md.

A copier owns the threads (and on a device the copy streams) of one worker. Memory is registered with it as regions, a
table says where the pieces of one kind of block lie in them, and a transfer copies many blocks of some tables, layer
group by layer group. One piece is one layer of one block. All of it may be used from any thread.

    copier = Copier("cpu", threads=1)
    copier.register_region(address, nbytes, kind="host", owner=memory)
    table = copier.table([...], device_stride=..., ...)
    transfer = copier.submit("load", [(table, device_ids, host_ids)], [(0, 4), (4, 8)], owners=caches)
    transfer.wait_group(0, timeout_s=30.0)

Wrong arguments are ValueError, TypeError or IndexError before anything moves; all else is a NativeError.
"""

from collections.abc import Sequence
from typing import Literal, final

from typing_extensions import Buffer

class NativeError(RuntimeError):
    """A native copy or its set-up failed."""

class BackendUnavailable(NativeError):
    """The device's library, a function of it, or the device is not there; the text is the loader's."""

class DeviceError(NativeError):
    """The device's runtime reported an error; `code` is its own number for it."""

    code: int

class TransferCancelled(NativeError):
    """The transfer was cancelled, or its copier closed, before all of it was copied."""

class TransferTimeout(NativeError, TimeoutError):
    """A wait reached its time limit; the transfer goes on."""

@final
class Region:
    """Registered memory. The copier keeps it, and its owner, until `unregister_region` or `close`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pinned(self) -> bool:
        """Whether the copier pinned it; false on cpu, for device memory, and when it was pinned before (CUDA)."""

@final
class Table:
    """Where the pieces of one kind of block lie; constant, made once by `Copier.table`."""

    @property
    def piece_bytes(self) -> int: ...
    @property
    def layers(self) -> tuple[int, ...]: ...

@final
class Transfer:
    """A submitted transfer.

    When the last reference goes, what has not started is cancelled, and the rest is waited for (up to 60 s, after
    which the owners are never freed) before the owners are let go.
    """

    def wait_group(self, group: int, timeout_s: float) -> None:
        """Block without the GIL until all pieces of `group` are copied; signals are handled meanwhile.

        On a device that is when the copies have happened, as opposed to `stream_wait_group`.

        Raises:
            TransferTimeout: they were not within `timeout_s`.
            NativeError: the transfer failed or was cancelled (its first error, from every wait, also for groups that
                had arrived); nothing of it is running any more.
        """

    def wait_all(self, timeout_s: float) -> None:
        """As `wait_group`, for all groups; on a device a load is to be trusted only after this, or `error` is None."""

    def stream_wait_group(self, group: int, stream: int, timeout_s: float) -> None:
        """Make the device's `stream` (its handle; 0 is the default stream) wait for `group`; the host goes on.

        Blocks only until the copies of the group have been issued. What is launched into `stream` later sees them.

        Raises:
            NativeError: as `wait_group`; also on cpu, which has no streams.
        """

    def done(self, group: int) -> bool:
        """Whether all pieces of `group` are copied; never blocks, raises nothing about the transfer."""

    def cancel(self) -> None:
        """Start nothing more; the waits raise TransferCancelled once what runs has ended. No effect after the end."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs or will run any more: copied, failed or cancelled."""
    @property
    def error(self) -> str | None:
        """The first error of a transfer that has ended; None before, and when all went well."""
    @property
    def num_groups(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Copier:
    """Copies between the host blocks and the device blocks of one worker.

    Args:
        backend: cuda and ascend open their driver library here.
        threads: that copy, on cpu. Devices have two for each direction, whatever this says.
        device: ordinal of the device.
        method: auto, or on cpu: memcpy, streaming, avx2, avx512; cuda: batch, loop; ascend: batch, sync_batch, loop.
        bytes_per_second: rate of a pretended slow link, cpu only; 0 is none.
        library: file of the driver library instead of its usual name, for tests.

    Raises:
        BackendUnavailable: the library, a needed function, or any device is missing.
        DeviceError: the device cannot be used.
    """

    def __init__(
        self,
        backend: Literal["cpu", "cuda", "ascend"] | str,
        *,
        threads: int = 1,
        device: int = 0,
        method: str = "auto",
        bytes_per_second: float = 0.0,
        library: str = "",
    ) -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def method(self) -> str:
        """What is used in fact: a batch that the driver refuses becomes a loop at the first copy."""
    bytes_per_second: float
    """May be set at any time, cpu only; counts at once."""

    def register_region(
        self, address: int, nbytes: int, *, kind: Literal["host", "device"] | str, owner: object
    ) -> Region:
        """Allow copies to touch this memory; host memory is pinned for the device. `owner` is kept meanwhile.

        Ascend wants host memory to begin on a page.

        Raises:
            ValueError: it overlaps a registered region.
            DeviceError: it could not be pinned.
        """

    def unregister_region(self, region: Region) -> None:
        """Unpin and forget; nothing happens the second time. Raises NativeError while a transfer uses it."""

    def table(
        self,
        device_bases: Sequence[int],
        *,
        device_stride: int,
        device_blocks: int,
        host_base: int,
        host_stride: int,
        host_blocks: int,
        piece_bytes: int,
        host_offsets: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> Table:
        """Describe one kind of block; all of its pieces must lie within registered regions.

        Args:
            device_bases: for each layer, the address of device block 0; block b is at base + b * device_stride.
            host_base: address of host block 0; the piece is at host_base + b * host_stride + its host offset.
            host_offsets: for each layer; by default pieces lie one behind the other from 0.
            layers: number of each layer as `submit`'s groups count them, rising; by default 0, 1, 2, ...
        """

    def submit(
        self,
        direction: Literal["load", "offload"] | str,
        parts: Sequence[tuple[Table, Buffer, Buffer]],
        groups: Sequence[tuple[int, int]],
        *,
        owners: object,
        after_stream: int | None = None,
        fail_at_piece: int = -1,
    ) -> Transfer:
        """Start to copy and return at once.

        Transfers of one copier are not ordered against each other: wait for one that another depends on. On cpu loads
        go before offloads, on a device each direction has a stream of its own.

        Args:
            direction: load is host to device, offload device to host.
            parts: (table, device ids, host ids), the ids as one-dimensional int64 buffers of one length. Several
                tables (target and draft) advance the same groups.
            groups: [first, end) in layer numbers, rising; copied in this order. Layers of no group are not copied,
                groups without layers are done at once.
            owners: kept until the transfer has ended and is dropped.
            after_stream: handle of a device stream; all copies wait for what is in it at this moment. 0 is the
                default stream; None, and on cpu 0, is no wait.
            fail_at_piece: for tests: fail when this piece's turn comes.
        """

    def close(self) -> None:
        """Cancel what has not started, wait for the rest, end the threads, unpin all regions."""
