"""The mid-size random model of the benches: 12 layers, hidden 1024, 16 query and 8 KV heads of 64, ffn 2816."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 262144,
    "max_position_embeddings": 16384,
}


def bench_model(**changes: int) -> Path:
    """Folder of a random bfloat16 Llama of SHAPE with `changes`, made once in the user's cache directory."""
    import torch
    from safetensors.torch import save_file

    shape = SHAPE | changes
    folder = _cache() / ("bench-" + "-".join(str(value) for value in shape.values()))
    if (folder / "model.safetensors").exists():
        return folder
    hidden, ffn, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    torch.manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, columns**-0.5)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": weight(shape["vocab_size"], hidden), "model.norm.weight": ones.clone()}
    for layer in range(shape["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "self_attn.q_proj.weight": weight(query, hidden),
                "self_attn.k_proj.weight": weight(kv, hidden),
                "self_attn.v_proj.weight": weight(kv, hidden),
                "self_attn.o_proj.weight": weight(hidden, query),
                "mlp.gate_proj.weight": weight(ffn, hidden),
                "mlp.up_proj.weight": weight(ffn, hidden),
                "mlp.down_proj.weight": weight(hidden, ffn),
                "input_layernorm.weight": ones.clone(),
                "post_attention_layernorm.weight": ones.clone(),
            }.items()
        }
    scratch = folder.with_suffix(f".{os.getpid()}")
    scratch.mkdir(parents=True)
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (scratch / "config.json").write_text(json.dumps(config, indent=1))
    return _put_in_place(scratch, folder)


def latent_model() -> Path:
    """Folder of a small random DeepSeek-V2 without experts: latents of 512 + 64 columns, 8 heads, 4 layers."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    folder = _cache() / "bench-latent"
    if (folder / "config.json").exists():
        return folder
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    scratch = folder.with_suffix(f".{os.getpid()}")
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    return _put_in_place(scratch, folder)


def sliding_model() -> Path:
    """Folder of a random bfloat16 Gemma 3 of the 270M model's shape, but for a smaller vocabulary and context."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = _cache() / "bench-sliding"
    if (folder / "config.json").exists():
        return folder
    config = Gemma3TextConfig(
        vocab_size=32768,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    scratch = folder.with_suffix(f".{os.getpid()}")
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    return _put_in_place(scratch, folder)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "xllm_hier"


def _put_in_place(scratch: Path, folder: Path) -> Path:
    try:
        scratch.rename(folder)
    except OSError:  # another bench was quicker
        shutil.rmtree(scratch)
    return folder
