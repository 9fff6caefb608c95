"""The settings of an instance against its machine, before any process starts: folders, device, ports, RDMA."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

from .config import EngineConfig
from .errors import ConfigError
from .machine import (
    check_device,
    check_model_folder,
    check_port_free,
    has_rdma,
    split_address,
    take_folder,
    take_port,
)


def check_environment(config: EngineConfig) -> None:
    """Check the settings whose truth depends on the machine: model folder, device, free ports, RDMA hardware.

    Raises:
        ConfigError: with the setting at fault.
    """
    check_model_folder("model", config.model)
    if config.draft_model:
        check_model_folder("draft_model", config.draft_model)
    if config.tokenizer and not Path(config.tokenizer).is_dir():
        raise ConfigError("tokenizer", config.tokenizer, "a folder")
    check_device(config.device)
    if config.port:
        check_port_free("port", config.host, config.port)
    if config.enable_kvcache_store:
        _check_rdma("store_protocol", config.store_protocol)
    if config.embedded_store_dir:
        os.close(take_folder("embedded_store_dir", config.embedded_store_dir))
    if config.enable_disagg_pd:
        _check_rdma("transfer_protocol", config.transfer_protocol)
        if config.disagg_pd_port:
            check_port_free("disagg_pd_port", config.disagg_pd_host, config.disagg_pd_port)
    for endpoint in take_store_endpoints(config):
        endpoint.close()


def _check_rdma(name: str, protocol: str) -> None:
    if protocol == "rdma" and not has_rdma():
        raise ConfigError(name, "rdma", "tcp on this machine: /sys/class/infiniband has no device")


def take_store_endpoints(config: EngineConfig) -> list[socket.socket]:
    """Sockets bound to the endpoints of direct store clients, which keep other instances of this machine off them.

    They do not listen, and belong to the caller. With P2PHANDSHAKE the library uses an endpoint as a name only and
    would not notice a second owner; with other metadata it binds the endpoints itself, and none is taken here.

    Raises:
        ConfigError: somebody has one of them.
    """
    if not config.enable_kvcache_store or config.embedded_store or config.store_client_address:
        return []
    host, port = split_address(config.store_local_hostname)
    with ExitStack() as stack:
        taken = [
            stack.enter_context(take_port("store_local_hostname", host, port + rank)) for rank in range(config.tp_size)
        ]
        if config.store_metadata_server == "P2PHANDSHAKE":
            stack.pop_all()
            return taken
    return []
