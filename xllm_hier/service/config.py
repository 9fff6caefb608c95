"""Every setting of the service once; names are those of xLLM's service where it has them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from ..errors import ConfigError
from ..machine import check_address, check_secret, etcd_endpoints
from ..settings import check_value, read_sources, setting

CLUSTER, ROUTING, SERVER, LIMITS = "cluster", "routing", "server", "time limits"


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """All settings of one replica of the service; immutable, checked when made.

    Raises:
        ConfigError: a value is out of its range, or two settings contradict each other.
    """

    etcd_addr: str = setting(
        "",
        CLUSTER,
        "host:port of etcd, several separated by ;, where the instances are registered; user and password come from "
        "ETCD_USERNAME and ETCD_PASSWORD",
    )
    etcd_namespace: str = setting("", CLUSTER, "prefix of all keys in etcd, the same as that of the instances")
    etcd_ttl: int = setting(3, CLUSTER, "of this replica's registration", unit="s", low=1)
    store_metrics_address: str = setting(
        "",
        CLUSTER,
        "comma list of host:port where the masters of the one store of this cluster answer HTTP (their metrics_port): "
        "what the store holds is then read there, too; empty = known from the instances' events alone",
    )

    load_balance_policy: str = setting(
        "CAR",
        ROUTING,
        "CAR = where the answer begins earliest, by queues and by what each cache and the store hold; SLO_AWARE = the "
        "same among those that meet target_ttft and target_tpot; RR = one after the other",
        choices=("RR", "CAR", "SLO_AWARE"),
    )
    target_ttft: float = setting(1000.0, ROUTING, "of SLO_AWARE: to the first token", unit="ms", low=1)
    target_tpot: float = setting(50.0, ROUTING, "of SLO_AWARE: between two tokens", unit="ms", low=0.1)
    tokenizer_path: str = setting(
        "",
        ROUTING,
        "folder of the model's tokenizer: prompts are tokenised here, once; empty = texts and chats are routed by load "
        "alone, and tokenised by the instance",
    )
    block_size: int = setting(0, ROUTING, "only instances with blocks of so many tokens; 0 = all", unit="tokens", low=0)
    max_attempts: int = setting(
        3, ROUTING, "instances that are tried for a request of which the client has seen nothing yet", low=1, high=16
    )

    host: str = setting("127.0.0.1", SERVER, "address of both HTTP servers")
    http_server_port: int = setting(8888, SERVER, "port for clients; 0 = a free one, printed", low=0, high=65535)
    rpc_server_port: int = setting(
        8889, SERVER, "a second port with the same routes, under which replicas know each other", low=0, high=65535
    )
    advertise_host: str = setting("", SERVER, "address under which others reach this replica; empty = host")
    api_key: str = setting(
        "", SERVER, "bearer token that /v1/* asks for, and that is shown to the instances; empty = none"
    )
    max_open_requests: int = setting(4096, SERVER, "more open requests than this are refused with HTTP 429", low=1)
    log_level: str = setting("info", SERVER, "of the service", choices=("debug", "info", "warning", "error"))
    log_requests: bool = setting(False, SERVER, "log each HTTP request")

    heart_beat_timeout_s: float = setting(
        3.0, LIMITS, "without a sign of life of an instance, before it is looked after", unit="s", low=0.2
    )
    probe_timeout_s: float = setting(1.0, LIMITS, "for an instance's /health, asked twice", unit="s", low=0.1)
    deregister_after_s: float = setting(
        15.0, LIMITS, "of an instance that answers nothing, before all of it is forgotten", unit="s", low=0
    )
    connect_timeout_s: float = setting(2.0, LIMITS, "for a connection to an instance", unit="s", low=0.1)
    answer_timeout_s: float = setting(
        600.0, LIMITS, "between two bytes of an answer, the first included; then the request fails", unit="s", low=1
    )
    drain_timeout_s: float = setting(30.0, LIMITS, "for open requests after SIGTERM", unit="s", low=0)

    def __post_init__(self) -> None:
        hints = get_type_hints(ServiceConfig)
        for item in dataclasses.fields(self):
            check_value(item, hints[item.name], getattr(self, item.name))
        if not self.etcd_addr:
            raise ConfigError("etcd_addr", "", "host:port of an etcd: the instances are found there")
        etcd_endpoints(self.etcd_addr)
        check_secret("api_key", self.api_key)
        for address in self.store_masters:
            check_address("store_metrics_address", address, "a comma list of host:port")
        if self.reachable_host in ("0.0.0.0", "::", ""):
            allowed = f"an address that others reach, as --host={self.host} is none"
            raise ConfigError("advertise_host", self.advertise_host, allowed)
        if self.http_server_port and self.http_server_port == self.rpc_server_port:
            raise ConfigError("rpc_server_port", self.rpc_server_port, "another port than http_server_port")

    @property
    def reachable_host(self) -> str:
        """The address under which others reach this replica."""
        return self.advertise_host or self.host

    @property
    def store_masters(self) -> list[str]:
        return [address.strip() for address in self.store_metrics_address.split(",") if address.strip()]

    @classmethod
    def from_sources(cls, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServiceConfig:
        """The configuration of a command line, the environment and an optional `--config` file.

        Raises:
            ConfigError: unknown flag or name, or a value that does not parse.
            SystemExit: after `--help` (code 0).
        """
        what = "The service in front of all instances of a cluster."
        return cls(**read_sources(cls, argv, environ, "python -m xllm_hier.service", what=what))
