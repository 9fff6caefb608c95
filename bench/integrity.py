"""run.sh bench integrity: what it costs to verify host blocks beside their copy to the device.

First the transfer alone: seconds per GiB of copies, of sums, and of both at once. Then the first token of a prompt that
lies on the host, from two instances in turns, one of which verifies. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack
from queue import SimpleQueue

import torch

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import GIB, EngineConfig
from xllm_hier.hashing import HASH_BYTES
from xllm_hier.ints import ints
from xllm_hier.plans import BlockMapping, TransferBlocks
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
from xllm_hier.worker.tiers.kv_cache_transfer import HierarchyKVCacheTransfer
from xllm_hier.worker.tiers.layer_copy import NativeCopier
from xllm_hier.worker.tiers.layered_wait import layer_groups
from xllm_hier.worker.tiers.proof import disproofs, write_trailer
from xllm_hier.worker.transfer_stats import TransferStats

from .bench_model import SHAPE, bench_model
from .serving import Client, arguments, random_prompt, serving, show

PROMPT_TOKENS = 2048
LIMIT_S = 60.0
LAYERS, GROUPS = 12, 4
WAYS = ("copies alone", "sums alone", "copies beside sums", "end of both")


class Loads:
    """Blocks of 768 KiB, written once on the host, and a transfer that loads all of them in another order."""

    def __init__(self, nbytes: int) -> None:
        tensors = tuple(TensorSpec(role, "bfloat16", (32, 8, 64)) for role in ("key", "value"))
        layout = BlockLayout(BlockType.KV, 32, tuple(range(LAYERS)), tensors)
        count = nbytes // layout.payload_bytes
        self.gib = count * layout.payload_bytes / GIB
        device = [as_bytes(cache) for cache in allocate_device_cache(layout, count, torch.device("cpu"))]
        cache = BlockCache(layout, device)
        domain = CacheDomain(CacheRole.TARGET, "main", CacheLayout(CacheRole.TARGET, (layout,)), {BlockType.KV: cache})
        self.copier = NativeCopier("cpu", threads=1, device=0, stream=lambda: None)
        config = EngineConfig(model="bench", host_blocks_factor=2.0, layers_wise_copy_batchs=GROUPS)
        self.transfer = HierarchyKVCacheTransfer(
            config, 0, TransferStats(), SimpleQueue[object]().put, copier=self.copier
        )
        self.transfer.register(domain)
        self.transfer.build({BlockType.KV: count})
        assert cache.host is not None
        cache.host.copy_(torch.randint(0, 256, cache.host.shape, dtype=torch.uint8))
        names = [number.to_bytes(HASH_BYTES, "little") for number in range(count)]
        for block, name in enumerate(names):
            write_trailer(cache, block, name)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        self.parts = [(domain, BlockMapping("KV", ints(order), ints(range(count)), b"".join(names)))]
        self._batch_id = 0

    def copies(self) -> float:
        start = time.perf_counter()
        self.copier.load(0, self.parts, layer_groups(LAYERS, GROUPS)).wait_all(LIMIT_S)
        return time.perf_counter() - start

    def sums(self) -> float:
        start = time.perf_counter()
        if disproofs(self.parts):
            raise RuntimeError("a block that nobody touched does not prove itself")
        return time.perf_counter() - start

    def both(self) -> tuple[float, float]:
        """Seconds until the copies had ended, and until the load had."""
        self._batch_id += 1
        start = time.perf_counter()
        self.transfer.load_from_host(TransferBlocks(self._batch_id, [mapping for _, mapping in self.parts]))
        (load,) = self.transfer.attach_loads()
        load.wait(LAYERS - 1, LIMIT_S)
        copied = time.perf_counter() - start
        load.wait_all(LIMIT_S)
        if load.error is not None:
            raise RuntimeError(load.error)
        return copied, time.perf_counter() - start

    def measure(self, rounds: int) -> dict[str, float]:
        """Median seconds per GiB of each way, taken in turns."""
        taken = [(self.copies(), self.sums(), *self.both()) for _ in range(rounds + 1)][1:]  # the first warms up
        return {way: statistics.median(row[place] for row in taken) / self.gib for place, way in enumerate(WAYS)}


def host_hit(client: Client, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that host memory holds."""
    client.settle()
    client.clear("device")
    answer = client.ask(prompt)
    if answer.tiers["host"] < PROMPT_TOKENS * 0.9:
        raise RuntimeError(f"served from {answer.tiers}")
    return answer.ttft_s


def first_tokens(rounds: int) -> dict[str, float]:
    """Median seconds to the first token of a host hit, verified or not, and the median of the ratios of neighbours."""
    prompt = random_prompt("integrity", PROMPT_TOKENS, SHAPE["vocab_size"])
    settings = {"host_blocks_factor": 2.0, "max_cache_size": 256 << 20}
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(serving(bench_model(), verify_host_blocks=verify, **settings))
            for verify in (True, False)
        )
        for client in (on, off):
            client.ask(prompt)
            host_hit(client, prompt)
        pairs = []
        for number in range(rounds):
            order = (on, off) if number % 2 else (off, on)
            times = {client: host_hit(client, prompt) for client in order}
            pairs.append((times[on], times[off]))
    return {
        "verified": statistics.median(pair[0] for pair in pairs),
        "trusted": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(verified / trusted for verified, trusted in pairs),
    }


def main() -> int:
    options = arguments(__doc__ or "")
    mebibytes, rounds = (192, 5) if options.quick else (768, 15)
    loads = Loads(mebibytes << 20)
    seconds = loads.measure(rounds)
    loads.transfer.close()
    title = f"{mebibytes} MiB from host to device in blocks of 768 KiB, medians of {rounds}"
    show(title, ["", "s/GiB"], [[way, f"{taken:.3f}"] for way, taken in seconds.items()])
    rounds = 7 if options.quick else 25
    ttft = first_tokens(rounds)
    row = [f"{ttft[name] * 1000:.1f} ms" for name in ("verified", "trusted")] + [f"{ttft['ratio']:.3f}"]
    title = f"first token of {PROMPT_TOKENS} tokens from the host, medians of {rounds}"
    show(title, ["verified", "not verified", "ratio"], [row])
    if options.json:
        print(json.dumps({"bench": "integrity", "s_per_gib": seconds, "ttft": ttft}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
