"""Prefill and decode instances for tests, as users start them, and how to wait for them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import Server, wait_for
from tiny_models import VOCAB

from xllm_hier.embedded_store import free_ports

BLOCK = 16
COMMON = [f"--block_size={BLOCK}", "--max_cache_size=8MB", "--max_tokens_per_batch=64", "--num_threads=1"]
COMMON += ["--check_invariants", "--swa_checkpoint_stride=64", "--linear_checkpoint_stride=64"]
PD = ["--enable_disagg_pd", "--transfer_listen_port=0", "--heart_beat_interval=0.1", "--peer_timeout_s=2"]
PD += ["--peer_late_writes_s=2"]  # what a killed process had on the wire comes at once here
BACK_S = 40.0  # for blocks held because a process that is gone may have had bytes on the wire


def prompt_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


def free_port() -> int:
    return free_ports(1)[0]


def decode_server(model: Path, mode: str, *flags: str, port: int = 0) -> Server:
    more = [*PD, "--instance_role=DECODE", f"--kv_cache_transfer_mode={mode}", f"--disagg_pd_port={port}"]
    return Server(model, *COMMON, *more, *flags)


def prefill_server(model: Path, mode: str, addresses: list[str], *flags: str, port: int = 0) -> Server:
    more = [*PD, "--instance_role=PREFILL", f"--kv_cache_transfer_mode={mode}", f"--disagg_pd_port={port}"]
    return Server(model, *COMMON, *more, f"--decode_instances={','.join(addresses)}", *flags)


def address_of(server: Server) -> str:
    return str(server.stats()["pd"]["address"])


def wait_linked(server: Server, count: int = 1) -> None:
    wait_for(lambda: list(server.stats()["pd"]["peers"].values()).count("linked") == count)


@contextlib.contextmanager
def running_pair(model: Path, mode: str, *flags: str) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode instance that are linked."""
    with (
        decode_server(model, mode, *flags) as decode,
        prefill_server(model, mode, [address_of(decode)], *flags) as prefill,
    ):
        wait_linked(prefill)
        yield prefill, decode


def wait_at_rest(*servers: Server, timeout_s: float = BACK_S) -> None:
    """Until nothing is pinned, open or on its way at any of them."""

    def rests(server: Server) -> bool:
        stats = server.stats()
        pinned = sum(kind["pinned"] for tier in stats["blocks"].values() for kind in tier.values())
        ways = sum(stats["pd"]["phases"].values()) + stats["pd"].get("held", 0)
        queues = stats["running"] + stats["waiting"] + stats["prefetching"] + stats["canonical"]
        return not pinned and not ways and not queues

    for server in servers:
        wait_for(lambda server=server: rests(server), timeout_s)


def moved_bytes(prefill: Server, decode: Server) -> int:
    """Bytes that have gone from one to the other so far, whoever moved them."""
    return int(prefill.stats()["transfer_bytes"]["push"] + decode.stats()["transfer_bytes"]["pull"])


def phase_count(server: Server, phase: str) -> Any:
    return server.stats()["pd"]["phases"][phase]
