"""python -m xllm_hier.serve: one instance with an OpenAI server in front of its three cache tiers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from .config import EngineConfig
from .environment import check_environment
from .launch import Instance, run_until_stopped
from .process import configure_logging, exit_code


def _configuration(argv: Sequence[str]) -> EngineConfig:
    config = EngineConfig.from_sources(argv)
    if not config.model:
        from .models.demo import demo_model_folder

        config = dataclasses.replace(config, model=str(demo_model_folder()))
    check_environment(config)
    return config


def _announce(instance: Instance) -> None:
    config, info = instance.config, instance.info
    types = info.block_types.items()
    device = " + ".join(f"{sizes.device} {kind}" for kind, sizes in types)
    host = " + ".join(f"{sizes.host} {kind}" for kind, sizes in types)
    print(f"xllm_hier serves {info.model} at http://{config.host}:{instance.port}", flush=True)
    print(f"  {device} device and {host} host blocks of {info.block_size} tokens, store {info.store_state}", flush=True)
    print(f"  longest request {info.max_model_len} tokens", flush=True)
    if config.enable_disagg_pd:
        print(f"  {config.instance_role} instance, reached by its peers at {info.pd_address}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after an ordered stop, 1 when a process died or did not come up, 2 for a setting that cannot be."""

    def body() -> int:
        config = _configuration(sys.argv[1:] if argv is None else argv)
        configure_logging(config.log_level, "launch")
        return run_until_stopped(Instance(config), _announce)

    return exit_code("xllm_hier", body)


if __name__ == "__main__":
    sys.exit(main())
