"""Device blocks between workers of two instances, over the real Transfer Engine on loopback: bytes, failures, ports."""

from __future__ import annotations

import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pd_sides import KV, LIMIT_S, LINEAR, NUM_BLOCKS, Side, domain_of, everything, kv_push, made_sides, settings

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import TRANSFER_PORTS
from xllm_hier.ints import ints
from xllm_hier.plans import LinkPeer, PullBlocks, PullDone, TransferEndpoint, TransferRegion
from xllm_hier.worker.peers.pieces import Pieces, merged
from xllm_hier.worker.peers.transfer_engine import MAX_CALL_BYTES, MAX_PIECES, transfer_ports
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain
from xllm_hier.worker.transfer_stats import PD_KINDS


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    yield from made_sides()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Side, Side]]:
    """Two that know each other, for what leaves no trace in them; the end of an engine takes a second."""
    here, there = Side(), Side()
    here.know(there)
    yield here, there
    assert here.pd.close() and there.pd.close()


# --------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("pulled", [False, True], ids=["push", "pull"])
def test_every_block_of_every_layer_type_and_domain_arrives_and_no_other_is_touched(
    pair: tuple[Side, Side], pulled: bool
) -> None:
    here, there = pair
    block_bytes = {
        (role, kind): cache.layout.payload_bytes
        for role, domain in zip(("target", "draft"), here.domains, strict=True)
        for kind, cache in domain.caches.items()
    }
    kind, other = PD_KINDS[::-1] if pulled else PD_KINDS
    before = {each: here.stats.total(each)[0] for each in PD_KINDS}
    moved = 0
    dice = random.Random(5)
    for number in range(3):
        here.fill(2 * number)
        there.fill(2 * number + 1)
        kinds = {"target": list(BlockType), "draft": [KV, LINEAR]}
        pairs = {
            role: {
                each: (dice.sample(range(NUM_BLOCKS), count), dice.sample(range(NUM_BLOCKS), count))
                for each in types
                for count in [dice.randrange(1, NUM_BLOCKS)]
            }
            for role, types in kinds.items()
        }
        source, target = (there, here) if pulled else (here, there)
        expected = [layer.clone() for layer in target.layers]
        chosen = [both for types in pairs.values() for both in types.values()]
        caches = [cache for domain in here.domains for cache in domain.caches.values()]
        places = [both for both, cache in zip(chosen, caches, strict=True) for _ in cache.device]
        for want, given, (local, remote) in zip(expected, source.layers, places, strict=True):
            into, origin = (local, remote) if pulled else (remote, local)
            want[into] = given[origin]
        plan = everything(pairs, number)
        if pulled:
            done = here.pull(PullBlocks(number, "d", plan.target_mappings, plan.draft_mappings))
            assert done == PullDone(number, 0)
        else:
            assert here.push(plan) == []
        assert all(torch.equal(*both) for both in zip(target.layers, expected, strict=True))
        moved += sum(block_bytes[role, each] * len(ids) for role in pairs for each, (ids, _) in pairs[role].items())
    assert here.stats.total(kind)[0] - before[kind] == moved, "each byte is counted once"
    assert here.stats.total(other)[0] == before[other]


def test_each_ranks_blocks_go_to_the_same_rank_also_those_that_all_ranks_hold_alike(sides: Callable[..., Side]) -> None:
    def latent() -> list[CacheDomain]:
        layout = BlockLayout(KV, 4, (0, 1), (TensorSpec("latent", "bfloat16", (4, 9)),), replicated=True)
        return [domain_of(CacheRole.TARGET, [layout], NUM_BLOCKS)]

    ours, theirs = ([sides(latent(), rank) for rank in range(2)] for _ in range(2))
    endpoints = [side.pd.endpoint for side in reversed(theirs)]
    for rank, side in enumerate(ours):
        side.fill(rank)
        side.pd.link(LinkPeer("d", endpoints))
        assert side.push(kv_push([3], [8])) == []
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a[3], b[8]) for a, b in zip(mine.layers, other.layers, strict=True))


def test_runs_are_the_longest_that_are_neighbours_on_both_sides_in_whatever_order_they_come() -> None:
    def runs(local: list[int], remote: list[int], most: int = 99) -> list[tuple[int, ...]]:
        return [tuple(run) for run in np.stack(merged(ints(local), ints(remote), most), axis=1).tolist()]

    assert runs([4, 5, 6, 9], [1, 2, 3, 7]) == [(4, 1, 3), (9, 7, 1)] == runs([9, 5, 4, 6], [7, 2, 1, 3])
    assert runs([4, 5, 6], [1, 2, 9]) == [(4, 1, 2), (6, 9, 1)]
    assert runs([4, 5], [2, 1]) == [(4, 2, 1), (5, 1, 1)]
    assert runs([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], most=2) == [(0, 5, 2), (2, 7, 2), (4, 9, 1)]
    assert runs([], []) == []
    dice = random.Random(0)
    for _ in range(50):
        count = dice.randrange(1, 30)
        pairs = list(zip(dice.sample(range(40), count), dice.sample(range(40), count), strict=True))
        found = runs([a for a, _ in pairs], [b for _, b in pairs], most=3)
        assert sorted((a + i, b + i) for a, b, n in found for i in range(n)) == sorted(pairs)
        assert all(not (a + n == c and b + n == d and n < 3) for a, b, n in found for c, d, _ in found)


def test_a_call_has_no_more_pieces_than_the_library_can_take_and_no_more_bytes_than_its_limit_allows() -> None:
    def of(count: int, size: int) -> Pieces:
        places = np.arange(count, dtype=np.int64)
        return Pieces(places, places, np.full(count, size, dtype=np.int64))

    many = of(2500, 16)
    assert [len(part.sizes) for part in many.calls()] == [MAX_PIECES, MAX_PIECES, 2500 - 2 * MAX_PIECES]
    assert np.concatenate([part.local for part in many.calls()]).tolist() == list(range(2500))
    assert [len(part.sizes) for part in of(5, MAX_CALL_BYTES // 2).calls()] == [2, 2, 1]


# ------------------------------------------------------------------------------------------------- failures


def test_what_cannot_be_moved_fails_by_name_and_the_rest_arrives(pair: tuple[Side, Side]) -> None:
    here, there = pair
    here.fill(1)
    ours = here.pd.endpoint.regions
    here.know(TransferEndpoint(0, "", [dataclasses.replace(ours[0], addresses=ours[0].addresses * 2)]), "misfit")
    here.pd.link(LinkPeer("lacking", []))
    plans = [
        kv_push([0], [0], 1, "nobody"),
        kv_push([0], [0], 2, "misfit"),
        kv_push([0], [NUM_BLOCKS], 3),
        kv_push([-1], [0], 4),
        kv_push([0, 1], [0], 5),
        kv_push([0], [0], 6, "lacking"),
        kv_push([5], [6], 7),
    ]
    failures = {failure.push_id: failure for failure in here.push(*plans)}
    assert sorted(failures) == [1, 2, 3, 4, 5, 6] and all(failure.certain for failure in failures.values())
    assert "'nobody'" in failures[1].error
    assert "misfit has 6 layers of 48 bytes for KV blocks of the target model, this instance 3" in failures[2].error
    assert f"{NUM_BLOCKS}" in failures[3].error and "pairs" in failures[5].error
    assert "rank 0" in failures[6].error
    assert all(torch.equal(a[5], b[6]) for a, b in zip(here.layers[:3], there.layers[:3], strict=True))
    done = here.pull(PullBlocks(9, "nobody", []))
    assert done.error is not None and done.certain
    assert here.failures() == {
        ("push", "peer_unknown"): 1,
        ("push", "mismatch"): 2,
        ("push", "blocks"): 3,
        ("pull", "peer_unknown"): 1,
    }


LARGE = 1 << 20  # bytes of a layer of a block: of twelve the kernel takes over but a part for a peer that does not read
_PEER = """
import os, sys
import numpy as np
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
blocks = np.memmap(sys.argv[1], np.uint8, "r+")
assert engine.register_memory(blocks.ctypes.data, blocks.nbytes) == 0
print(engine.get_rpc_port(), blocks.ctypes.data, flush=True)
sys.stdin.read()
os._exit(0)
"""


def large_domain() -> list[CacheDomain]:
    layout = BlockLayout(KV, 4, (0, 1), (TensorSpec("latent", "uint8", (LARGE,)),))
    return [domain_of_bytes(layout)]


def domain_of_bytes(layout: BlockLayout) -> CacheDomain:
    domain = CacheDomain(CacheRole.TARGET, "main", CacheLayout(CacheRole.TARGET, (layout,)))
    device = [torch.zeros(NUM_BLOCKS, layout.layer_bytes, dtype=torch.uint8) for _ in layout.layers]
    domain.caches[layout.block_type] = BlockCache(layout, device)
    return domain


class PeerProcess:
    """A peer of its own process, with the blocks of `large_domain` in a file that we see, too."""

    def __init__(self, path: Path) -> None:
        blocks = np.memmap(path, np.uint8, "w+", shape=(2, NUM_BLOCKS, LARGE))
        self.blocks = torch.from_numpy(blocks)
        command = [sys.executable, "-c", _PEER, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port, base = map(int, self.process.stdout.readline().split())
        region = TransferRegion("TARGET", "KV", LARGE, NUM_BLOCKS, [base, base + NUM_BLOCKS * LARGE])
        self.endpoint = TransferEndpoint(0, f"127.0.0.1:{port}", [region])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Callable[[], PeerProcess]]:
    made: list[PeerProcess] = []

    def make() -> PeerProcess:
        made.append(PeerProcess(tmp_path / f"blocks-{len(made)}"))
        return made[-1]

    yield make
    for peer in made:
        peer.kill()


ALL = list(range(NUM_BLOCKS))


def test_a_killed_peer_fails_at_once_and_for_sure_is_left_alone_and_another_one_serves(
    sides: Callable[..., Side], peers: Callable[[], PeerProcess]
) -> None:
    here, first, second = sides(large_domain()), peers(), peers()
    here.fill(1)
    here.know(first.endpoint)
    here.know(second.endpoint, "e")
    assert here.push(kv_push(ALL, ALL)) == []
    assert torch.equal(torch.stack(here.layers), first.blocks)
    first.kill()
    start = time.monotonic()
    failures = here.push(kv_push(ALL, ALL, 2), kv_push(ALL, ALL, 3, "e"))
    assert [(failure.push_id, failure.certain) for failure in failures] == [(2, True)]
    assert "d (127.0.0.1:" in failures[0].error and time.monotonic() - start < 4, "not the 30 s of a call's limit"
    assert torch.equal(torch.stack(here.layers), second.blocks)
    (failure,) = here.push(kv_push([0], [0], 4))
    assert failure.certain and "until it is linked anew" in failure.error
    assert here.pull(PullBlocks(5, "d", kv_push([0], [0]).target_mappings)).error == failure.error
    here.know(second.endpoint)
    assert here.push(kv_push([0], [0], 6)) == []
    assert here.failures() == {("push", "call"): 1, ("push", "peer_failed"): 1, ("pull", "peer_failed"): 1}


@pytest.mark.parametrize("pulled", [False, True], ids=["push", "pull"])
def test_after_a_peer_stood_still_nothing_moves_behind_our_back_and_it_serves_again(
    sides: Callable[..., Side], peers: Callable[[], PeerProcess], pulled: bool
) -> None:
    """The library goes on with a failed call when the peer does: without an end of the engine, most of what is written
    here after the failure would arrive there, and what is pulled would arrive over what these blocks are used for."""
    here, peer = sides(large_domain()), peers()
    here.know(peer.endpoint)
    blocks = kv_push(ALL, ALL).target_mappings
    assert here.push(kv_push(ALL, ALL)) == [], "it is known before it stands still"
    before, after = 11, 33
    peer.blocks.fill_(before)
    for layer in here.layers:
        layer.fill_(22)
    peer.process.send_signal(signal.SIGSTOP)
    if pulled:
        done = here.pull(PullBlocks(2, "d", blocks))
        assert done.error is not None and done.certain, "what is read comes in through the engine that has ended"
    else:
        (failure,) = here.push(kv_push(ALL, ALL, 2))
        assert not failure.certain, "the peer's kernel has some of it"
    for layer in here.layers:
        layer.fill_(after)
    peer.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert all(bool((layer == after).all()) for layer in here.layers)
    assert not bool((peer.blocks == after).any())
    here.know(peer.endpoint)
    assert here.push(kv_push(ALL, ALL, 3)) == [] and bool((peer.blocks == after).all())


# --------------------------------------------------------------------------------------------------- ports


_OPEN = """
import os, sys
from xllm_hier.config import EngineConfig
from xllm_hier.errors import ConfigError
from xllm_hier.worker.store.mooncake_client import set_environment
from xllm_hier.worker.peers.transfer_engine import TransferEngine, transfer_ports
settings = {"enable_disagg_pd": True, "instance_role": "DECODE", "transfer_listen_port": int(sys.argv[1])}
try:
    config = EngineConfig(model="tiny", **settings)
    set_environment("error", transfer_ports(config, 1))
    print(TransferEngine(config, 1, []).session, flush=True)
except ConfigError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("port", [26400, 40000])
def test_an_engine_listens_in_its_ranks_range_or_says_why_it_does_not(port: int) -> None:
    command = [sys.executable, "-c", _OPEN, str(port)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    if port == 40000:
        assert "--transfer_listen_port=40000 cannot be used" in answer and "32768 to 60999" in answer
    else:
        host, _, found = answer.rpartition(":")
        assert host == "127.0.0.1" and port + TRANSFER_PORTS <= int(found) < port + 2 * TRANSFER_PORTS
    assert list(transfer_ports(settings(), 1)) == []
