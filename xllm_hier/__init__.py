"""xllm_hier: LLM inference whose KV cache has three tiers: device, host, and a store shared by all instances.

`LLM`, `SamplingParams` and `EngineConfig` are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .config import EngineConfig
    from .llm import LLM, SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        from . import llm

        return getattr(llm, name)
    if name == "EngineConfig":
        from .config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
