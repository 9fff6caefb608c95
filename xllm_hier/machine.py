"""Checks of settings against this machine, before any process starts: addresses, ports, folders, devices."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import socket
from pathlib import Path

from .errors import ConfigError

_LOCK_FILE = "xllm.lock"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError when it is not of that form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(address)
    return host, int(port)


def check_address(name: str, address: str, allowed: str = "host:port") -> None:
    """Refuse a value of setting `name` that is no address. Raises ConfigError."""
    try:
        split_address(address)
    except ValueError:
        raise ConfigError(name, address, allowed) from None


def etcd_endpoints(address: str) -> list[str]:
    """The host:port of each etcd in `address`, separated by `;` or `,`, with or without `etcd://` before them. Raises
    ConfigError."""
    parts = [part.strip() for part in address.removeprefix("etcd://").replace(",", ";").split(";")]
    for part in parts:
        allowed = "host:port, several separated by ; (without http://)"
        if "/" in part:
            raise ConfigError("etcd_addr", part, allowed)
        check_address("etcd_addr", part, allowed)
    return parts


def check_secret(name: str, value: str) -> None:
    """Refuse a text that cannot be sent in a header. Raises ConfigError, which does not tell the secret."""
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ConfigError(name, "...", "printable ASCII without spaces around it")


def check_model_folder(name: str, value: str) -> None:
    """Refuse a folder without a model in safetensors. Raises ConfigError."""
    folder = Path(value)
    if not (folder / "config.json").is_file():
        raise ConfigError(name, value, "a folder with config.json and *.safetensors")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(name, value, "a folder with *.safetensors (this one has none)")


def check_port_free(name: str, host: str, port: int) -> None:
    """Refuse a port that somebody has. Raises ConfigError."""
    take_port(name, host, port, reuse=True).close()


def take_port(name: str, host: str, port: int, *, reuse: bool = False) -> socket.socket:
    """A socket bound there; `reuse`: connections of an earlier owner that linger do not matter. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on the connections; without it every answer waits 40 ms.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(name, f"{host}:{port}", f"an address that can be bound ({error.strerror})") from None
    return found


def take_folder(name: str, path: str) -> int:
    """A descriptor that keeps a folder from other instances while it is open; the folder is made if it is not there.

    Raises:
        ConfigError: it cannot be made or written to, or another instance has it.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(name, path, f"a folder that can be written to ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(name, path, "a folder that no other running instance uses") from None
    return descriptor


def check_device(name: str) -> None:
    """Refuse a device this machine cannot have; the worker, which knows torch, looks closer."""
    if name == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            "device", name, "auto | cpu | cuda (torch_npu is not installed: pip install 'xllm_hier[npu]')"
        )
    if name == "cuda":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ConfigError("device", name, "auto | cpu (this machine has no libcuda.so.1)") from None


def has_rdma() -> bool:
    """Some RDMA device is there; without one Mooncake would silently take TCP."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())
