"""The facts on which the bits of a model depend, and the id that names them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from ...figures import ModelDetails
from ...models.decoder import Decoder
from ...models.linear import Linear, can_pack
from .attention import PagedAttention
from .model_facts import ModelFacts
from .native_attention import NativeAttention
from .recurrent_state import RecurrentStates

if TYPE_CHECKING:
    from ...models.hf_model import HfModel


def model_details(
    facts: ModelFacts,
    model: Decoder | HfModel,
    attention: PagedAttention,
    states: RecurrentStates | None,
    *,
    tp_size: int,
    batch_invariant: bool,
) -> ModelDetails:
    """How this rank computes `model`, with the `numerics_id` of it.

    `batch_invariant` as the settings ask for; the answer says whether it is so.
    """
    own, device = isinstance(model, Decoder), attention.device
    prefill = [*model.linears(), *model.grouped_linears()] if isinstance(model, Decoder) else []
    decode = [*prefill, model.head] if isinstance(model, Decoder) else []
    equal_bits = attention.batch_invariant and (states is None or device.type == "cpu")
    kernels = attention.kernels if isinstance(attention, NativeAttention) else None
    native = isinstance(model, Decoder) and model.rows_invariant and kernels is not None
    details = ModelDetails(
        family=facts.hf_config.model_type,
        implementation="own" if own else "hf",
        dtype=facts.dtype_name,
        device=device.type,
        threads=torch.get_num_threads(),
        tp_size=tp_size,
        experts=facts.has_experts,
        cpu_capability=torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "",
        packed_weights=own and (native or can_pack(facts.dtype, device)),
        batch_invariant=own and batch_invariant and equal_bits,
        rows_invariant=native and batch_invariant and states is None,
        cpu_kernels=kernels.name if kernels is not None else "",
        attention=attention.kernel,
        query_tiles=list(attention.tiles),
        prefill_tiles={_label(linear): list(linear.prefill.sizes) for linear in prefill if linear.prefill},
        decode_rows={_label(linear): list(linear.decode.sizes) for linear in decode if linear.decode},
        parameter_bytes=_parameter_bytes(model),
        scan_tokens=states.scan_tokens if states is not None else None,
    )
    return replace(details, numerics_id=_numerics_id(details))


def _parameter_bytes(model: Decoder | HfModel) -> int:
    """Bytes of the weights; of a head those that it does not share with its target."""
    if not isinstance(model, Decoder):
        return int(model.nbytes)
    layers: int = sum(linear.nbytes for linear in [*model.linears(), *model.grouped_linears()])
    if model.join:
        return layers
    embedding = 0 if model.spec.tied else int(model.embedding.nbytes)
    return layers + model.head.nbytes + embedding


def _label(linear: Linear) -> str:
    inputs, outputs, what, dtype = linear.shape_key
    return f"{inputs}x{outputs}:{what}:{str(dtype).removeprefix('torch.')}"


def _numerics_id(details: ModelDetails) -> str:
    """The same for two workers of equal weights exactly when they compute equal bits, as far as is known."""
    facts = asdict(details) | {"torch": torch.__version__}
    del facts["numerics_id"]
    if details.rows_invariant:
        del facts["threads"]
    if details.scan_tokens is None:
        del facts["scan_tokens"]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    place = details.cpu_capability or details.device
    threads = "" if details.rows_invariant else f"-t{details.threads}"
    return f"{details.implementation}-{place}-{details.dtype}{threads}-{digest}"
