"""Workers' halves of PD instances without a model: device blocks of several types, and moves between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from serving import wait_for

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.ints import ints
from xllm_hier.plans import LinkPeer, PullBlocks, PullDone, PushBlocks, PushFailure, RemoteBlocks, TransferEndpoint
from xllm_hier.worker.peers.pd_transfer import PdTransfer
from xllm_hier.worker.platform import Platform
from xllm_hier.worker.store.mooncake_client import set_environment
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
from xllm_hier.worker.transfer_stats import KINDS, PD_KINDS, TransferStats

set_environment("error")

KV, SWA, LINEAR = BlockType
LIMIT_S = 20.0
NUM_BLOCKS, LAYERS = 12, 7
LAYERS_OF = {KV: (0, 3, 6), SWA: (1, 4), LINEAR: (2, 5)}
PAIR = tuple(TensorSpec(role, "bfloat16", (4, 3)) for role in ("key", "value"))
STATE = (TensorSpec("state", "float32", (5, 2)), TensorSpec("conv", "bfloat16", (3, 4)))
CPU = Platform("cpu", torch.device("cpu"))


def settings(**changes: Any) -> EngineConfig:
    fixed: dict[str, Any] = {"enable_disagg_pd": True, "instance_role": "DECODE", "transfer_listen_port": 0}
    return EngineConfig(**{"model": "tiny", "layers_wise_copy_batchs": 3, **fixed, **changes})


def typed_domains(count: int = NUM_BLOCKS) -> list[CacheDomain]:
    """A target of seven layers of three types, and a draft of one layer of keys and values and one of hidden states."""
    target = [BlockLayout(kind, 4, LAYERS_OF[kind], STATE if kind is LINEAR else PAIR) for kind in BlockType]
    hidden = (TensorSpec("hidden", "float32", (9,)),)
    draft = [BlockLayout(KV, 4, (0,), PAIR), BlockLayout(LINEAR, 4, (1,), hidden, span=1)]
    return [domain_of(CacheRole.TARGET, target, count), domain_of(CacheRole.DRAFT, draft, count)]


def domain_of(role: CacheRole, layouts: Sequence[BlockLayout], count: int) -> CacheDomain:
    domain = CacheDomain(role, role.value, CacheLayout(role, tuple(layouts)))
    for layout in layouts:
        caches = allocate_device_cache(layout, count, torch.device("cpu"))
        domain.caches[layout.block_type] = BlockCache(layout, [as_bytes(cache) for cache in caches])
    return domain


class Side:
    """The worker's half of one instance; `answers` is what its engine would receive."""

    def __init__(self, domains: list[CacheDomain] | None = None, rank: int = 0, **changes: Any) -> None:
        self.domains = typed_domains() if domains is None else domains
        self.answers: list[Any] = []
        self.stats = TransferStats((*KINDS, *PD_KINDS))
        more: dict[str, Any] = {"stats": self.stats, "answer": self.answers.append}
        self.pd = PdTransfer(settings(**changes), rank, self.domains, CPU, **more)

    @property
    def layers(self) -> list[torch.Tensor]:
        """Each layer's blocks, of all types and domains."""
        return [layer for domain in self.domains for cache in domain.caches.values() for layer in cache.device]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))

    def know(self, peer: Side | TransferEndpoint, name: str = "d") -> None:
        endpoint = peer.pd.endpoint if isinstance(peer, Side) else peer
        self.pd.link(LinkPeer(name, [endpoint]))

    def push(self, *pushes: PushBlocks) -> list[PushFailure]:
        """Push as a forward does that has computed all layers at once."""
        begun = self.pd.begin(pushes)
        begun.target_computed()
        begun.drafted()
        return begun.finish(LIMIT_S)

    def pull(self, plan: PullBlocks) -> PullDone:
        self.pd.pull(plan)
        done: PullDone = wait_for(lambda: self.answers.pop() if self.answers else None)
        return done

    def failures(self) -> dict[tuple[str, str], int]:
        return {(one.kind, one.cause): one.count for one in self.stats.snapshot().transfer_failures}


def everything(pairs: dict[str, dict[BlockType, tuple[list[int], list[int]]]], number: int = 1) -> PushBlocks:
    """A push of pairs of blocks by domain and type."""
    mappings = {
        role: [RemoteBlocks(kind.value, ints(local), ints(remote)) for kind, (local, remote) in types.items()]
        for role, types in pairs.items()
    }
    return PushBlocks(number, "d", mappings["target"], mappings.get("draft", []))


def kv_push(local: Sequence[int], remote: Sequence[int], number: int = 1, peer: str = "d") -> PushBlocks:
    return PushBlocks(number, peer, [RemoteBlocks("KV", ints(local), ints(remote))])


def made_sides() -> Iterator[Callable[..., Side]]:
    """Body of a fixture: makes sides, and closes them behind the test."""
    made: list[Side] = []

    def make(*arguments: Any, **changes: Any) -> Side:
        made.append(Side(*arguments, **changes))
        return made[-1]

    yield make
    for side in made:
        assert side.pd.close()


def seven_layers() -> list[CacheDomain]:
    """A target of one type, and a draft of one layer: layer i is memory i, the draft's is memory 7."""
    target = domain_of(CacheRole.TARGET, [BlockLayout(KV, 4, tuple(range(LAYERS)), PAIR)], NUM_BLOCKS)
    return [target, domain_of(CacheRole.DRAFT, [BlockLayout(KV, 4, (0,), PAIR)], NUM_BLOCKS)]
