"""run.sh gpu-check: what a CUDA machine must do right before it may serve; `--device cpu` runs the same checks there.

A check whose Python packages are missing is skipped and says so. Exit code 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

BLOCK, NUM_BLOCKS, PROMPT, ANSWER, LIMIT_S = 16, 64, 100, 24, 60.0
SHAPE = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}


def check_rows(device: str, dtype: torch.dtype) -> dict[str, bool]:
    """In a product of fixed size a row's bits must depend neither on its place nor on its neighbours."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 1024, generator=generator).to(device, dtype) for _ in range(2))
    whole = x @ w.T
    moved = x.flip(0) @ w.T
    alone = torch.zeros_like(x)
    alone[7] = x[7]
    return {"rows of a 256-row product": torch.equal(moved.flip(0), whole) and torch.equal((alone @ w.T)[7], whole[7])}


def make_model(folder: Path, dtype: torch.dtype) -> Path:
    """A random Llama of SHAPE."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    hidden, ffn, head = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    q, kv = SHAPE["num_attention_heads"] * head, SHAPE["num_key_value_heads"] * head
    matrices = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    matrices |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
    matrices |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (SHAPE["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(SHAPE["num_hidden_layers"]):
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (matrices | norms).items()}
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(SHAPE | kind | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}))
    return folder


class Bench:
    """Runner, device cache and transfers of one worker, without its processes."""

    def __init__(self, folder: Path, device: str) -> None:
        from xllm_hier.block import BlockType, CacheRole
        from xllm_hier.config import EngineConfig
        from xllm_hier.worker.cache_domain import BlockCache, CacheDomain, allocate_device_cache, as_bytes
        from xllm_hier.worker.kv_cache_transfer import HierarchyKVCacheTransfer
        from xllm_hier.worker.model_runner import ModelRunner
        from xllm_hier.worker.transfer_stats import TransferStats

        config = EngineConfig(model=str(folder), device=device, block_size=BLOCK, host_blocks_factor=2.0)
        self.runner = ModelRunner(config, progress=False)
        layout = self.runner.layout.of(BlockType.KV)
        self.caches = allocate_device_cache(layout, NUM_BLOCKS, self.runner.device)
        self.runner.bind_cache(self.caches)
        domain = CacheDomain(CacheRole.TARGET, "main", self.runner.layout)
        domain.caches[BlockType.KV] = BlockCache(layout, [as_bytes(cache) for cache in self.caches])
        self.answers: queue.Queue[Any] = queue.Queue()
        self.transfer = HierarchyKVCacheTransfer(config, 0, TransferStats(), self.answers.put)
        self.transfer.register(domain)
        self.transfer.build(NUM_BLOCKS)

    def greedy(self, prompt: list[int], table: list[int], cuts: list[int]) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens and their logits; the prompt is computed in chunks between `cuts`, the first of which is the hit."""
        from xllm_hier.plans import DecodeSequence, Forward, PrefillSequence, SamplingSpec, ints

        logits, tokens = [], list(prompt)
        loads = self.transfer.attach_loads()

        def wait_for_layer(layer: int) -> None:
            for load in loads:
                load.wait(layer, LIMIT_S)

        for start, stop in zip(cuts, [*cuts[1:], len(prompt)], strict=True):
            sampling = SamplingSpec() if stop == len(prompt) else None
            part = PrefillSequence(start, ints(prompt[start:stop]), ints(table), start, sampling)
            output = self.runner.forward(Forward(0, [], [part], []), wait_for_layer)
        while True:
            tokens += output.token_ids
            logits.append(self.runner.last_logits.cpu())
            if len(tokens) == len(prompt) + ANSWER:
                failed = [str(load.error) for load in loads if load.error]
                if failed:
                    raise RuntimeError(f"the load failed: {failed[0]}")
                return tokens[len(prompt) :], logits
            row = DecodeSequence(len(tokens) - 1, ints(tokens[-1:]), ints(table), SamplingSpec())
            output = self.runner.forward(Forward(0, [], [], [row]), lambda layer: None)

    def blocks(self, table: list[int]) -> torch.Tensor:
        return torch.stack([cache[table].cpu() for cache in self.caches])


def check_model(device: str, dtype: torch.dtype) -> dict[str, bool]:
    """Greedy tokens, logits and KV: cold, in chunks, and restored from the host into other device blocks."""
    from xllm_hier.plans import BlockMapping, OffloadCopied, TransferBlocks, TransferKvBlocks, ints

    dice = random.Random(2)
    prompt = [dice.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT)]
    places = dice.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    full, used = PROMPT // BLOCK, -(-(PROMPT + ANSWER) // BLOCK)
    first, second, third, host = (places[start : start + used] for start in range(0, 4 * used, used))
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(make_model(Path(scratch), dtype), device)
        try:
            cold, cold_logits = bench.greedy(prompt, first, [0])
            kv = bench.blocks(first[:full])
            chunked, chunked_logits = bench.greedy(prompt, second, [0, 33, 50])
            hashes = b"".join(bytes([number]) * 16 for number in range(full))
            bench.transfer.offload(
                TransferKvBlocks(1, [BlockMapping("KV", ints(first[:full]), ints(host[:full]), hashes)])
            )
            copied = bench.answers.get(timeout=LIMIT_S)
            offloaded = isinstance(copied, OffloadCopied) and copied.num_blocks == full
            for cache in bench.caches:
                cache.fill_(float("nan"))
            if offloaded:
                bench.transfer.load_from_host(
                    TransferBlocks(2, [BlockMapping("KV", ints(third[:full]), ints(host[:full]), hashes)])
                )
                warm, warm_logits = bench.greedy(prompt, third, [full * BLOCK])
        finally:
            bench.transfer.close()
        results = {
            "chunked prefill: tokens": chunked == cold,
            "chunked prefill: logits, bit for bit": all(map(torch.equal, chunked_logits, cold_logits)),
            "offload to the host": offloaded,
        }
        if offloaded:
            results["restored from the host: KV, bit for bit"] = torch.equal(bench.blocks(third[:full]), kv)
            results["restored from the host: tokens"] = warm == cold
            results["restored from the host: logits, bit for bit"] = all(map(torch.equal, warm_logits, cold_logits))
        return results


def main() -> int:
    """Run all checks and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    device = parser.parse_args().device
    if device != "cpu" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device, so nothing was checked; try --device cpu")
        return 1 if device == "cuda" else 0
    device = "cuda" if device == "auto" else device
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"gpu-check on {name}, torch {torch.__version__}")
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        for check in (check_rows, check_model):
            try:
                results = {what: "ok" if good else "FAILED" for what, good in check(device, dtype).items()}
            except ImportError as error:
                results = {check.__name__: f"skipped: needs {error.name}"}
            except Exception as error:  # one line per check, whatever went wrong in it
                results = {check.__name__: f"FAILED: {type(error).__name__}: {error}"}
            for what, result in results.items():
                print(f"  {str(dtype).removeprefix('torch.'):9} {what:46} {result}")
                failed |= result.startswith("FAILED")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
