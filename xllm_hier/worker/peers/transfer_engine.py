"""One end of Mooncake's Transfer Engine: memory that peers reach, and calls that move bytes to and from theirs.

Known of wheel 0.3.13 (measured, over tcp):

- The port in the local name means nothing. An engine opens two listeners, on all interfaces, at random ports from
  MC_MIN_RPC_PORT to MC_MAX_RPC_PORT, which are read once per process; a range that touches 32768..60999 is ignored.
- A call after a failed initialisation, and the end of an engine during a call, are segmentation faults.
- A call that has returned an error is not over: its queued pieces are still sent, or received, when the peer goes on,
  and from the memory as it is then. Only the end of the engine ends that: a reader's memory is then its own again, and
  to a stopped peer goes only what the kernel has taken over, 8 MiB at most, within 0.3 s of its going on.
- The end of an engine holds the interpreter's lock for 0.1 to 1 s.
- Calls end by MC_TCP_STATUS_TIMEOUT_SEC and MC_TRANSFER_TIMEOUT, but the first one to a peer that accepts connections
  and says nothing takes 61 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from ...config import TRANSFER_PORTS, EngineConfig
from ...errors import ConfigError, StartupError
from ..store.mooncake_client import library

MAX_PIECES = 1024  # per call: more than 2048 in flight to one peer can make the library useless for that peer
MAX_CALL_BYTES = 64 << 20  # so that a call ends within its limit over 0.2 Gbit/s
_GREETING_BYTES = 8


def transfer_ports(config: EngineConfig, rank: int) -> range:
    """The ports that this rank's engine may take; empty: any."""
    if not config.enable_disagg_pd or not config.transfer_listen_port:
        return range(0)
    first = config.transfer_listen_port + rank * TRANSFER_PORTS
    return range(first, first + TRANSFER_PORTS)


def call_limit_s() -> float:
    """After how long a call to a peer that says nothing more gives up; the first one to a peer takes longer."""
    status_s = int(os.environ.get("MC_TCP_STATUS_TIMEOUT_SEC", "30"))
    return float(min(status_s, max(5, int(os.environ.get("MC_TRANSFER_TIMEOUT", "30")))))


class TransferEngine:
    """An initialised engine with all of `memory` (address, bytes) registered; one thread at a time may call it.

    Raises:
        StartupError: the library refuses.
        ConfigError: it is not installed, or takes another port than asked for.
    """

    def __init__(self, config: EngineConfig, rank: int, memory: Sequence[tuple[int, int]]) -> None:
        ports, protocol = transfer_ports(config, rank), config.transfer_protocol
        engine = library("engine", "enable_disagg_pd").TransferEngine()
        host = f"[{config.disagg_pd_host}]" if ":" in config.disagg_pd_host else config.disagg_pd_host
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            where = f"ports {ports[0]} to {ports[-1]} (--transfer_listen_port)" if ports else "free ports"
            raise StartupError(
                f"the Transfer Engine does not come up with code {code}: --transfer_protocol={protocol}, {where}"
            )
        port = int(engine.get_rpc_port())
        if ports and port not in ports:
            allowed = f"0, or a port whose {TRANSFER_PORTS} for each rank lie outside of 32768 to 60999"
            raise ConfigError("transfer_listen_port", config.transfer_listen_port, allowed)
        self.session = f"{host}:{port}"
        self._greeting = np.zeros(_GREETING_BYTES, dtype=np.uint8)
        self._greeted: set[str] = set()
        for address, nbytes in (*memory, (self._greeting.ctypes.data, _GREETING_BYTES)):
            code = engine.register_memory(address, nbytes)
            if code != 0:
                raise StartupError(
                    f"the Transfer Engine does not register {nbytes} bytes of a device cache with "
                    f"--transfer_protocol={protocol}: code {code}"
                )
        self._engine = engine

    def greet(self, session: str, address: int) -> tuple[int, float]:
        """Read a few bytes at a peer's `address` unless it has answered before, so that the first call to a peer, which
        may hang, moves nothing of value. The answer is that of `write`."""
        if session in self._greeted:
            return 0, 0.0
        code, seconds = self.read(session, [self._greeting.ctypes.data], [address], [_GREETING_BYTES])
        if code == 0:
            self._greeted.add(session)
        return code, seconds

    def write(
        self, session: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]
    ) -> tuple[int, float]:
        """Write local pieces to a peer's addresses: code, 0 when all of them are there, and the seconds it took."""
        start = time.perf_counter()
        code = self._engine.batch_transfer_sync_write(session, local, remote, sizes)
        return int(code), time.perf_counter() - start

    def read(
        self, session: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]
    ) -> tuple[int, float]:
        """Read a peer's pieces to local addresses; the answer is that of `write`."""
        start = time.perf_counter()
        code = self._engine.batch_transfer_sync_read(session, local, remote, sizes)
        return int(code), time.perf_counter() - start

    def close(self) -> None:
        """End all that a failed call has left behind; nothing may be called any more."""
        self._engine = None
