"""The instance's own entry in the registry of its cluster, and the decode instances it finds there."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time

from ..calls import SetDecodeInstances
from ..config import EngineConfig
from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError
from ..figures import EngineInfo
from ..machine import split_address
from ..registry import ROLES, Etcd, InstanceInfo, Membership, instances_of

log = logging.getLogger("xllm.registry")

_CALL_S = 5.0
_STOP_S = 2.0


def store_name(config: EngineConfig) -> str:
    """Which store an instance uses, the same text for all that share one; empty without."""
    address = config.store_master_server_address
    if not config.enable_kvcache_store or not address:
        return ""
    if address.startswith("etcd://"):
        parts = sorted(_global(part, config) for part in address.removeprefix("etcd://").split(";"))
        return f"etcd://{';'.join(parts)}/{os.environ.get('MC_STORE_CLUSTER_ID', '')}"
    return _global(address, config)


def _global(address: str, config: EngineConfig) -> str:
    """An address of this machine's own, as others would say it."""
    host, port = split_address(address)
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return f"{config.reachable_host}:{port}" if local else address


def describe(config: EngineConfig, info: EngineInfo, port: int) -> InstanceInfo:
    """The registry's entry for an instance whose engine told `info` and whose HTTP server listens on `port`."""
    sessions = [split_address(session) for session in info.transfer_endpoints]
    name = f"{config.reachable_host}:{port}"
    return InstanceInfo(
        name=name,
        rpc_address=name,
        incarnation_id=info.incarnation,
        register_ts_ms=int(time.time() * 1000),
        type=ROLES.index(config.instance_role),
        addrs=[host for host, _ in sessions],
        ports=[port for _, port in sessions],
        kv_split_size=info.tp_size,
        cluster_ids=list(range(info.tp_size)),
        model=info.model,
        model_id=info.model_id,
        block_size=info.block_size,
        tp_size=info.tp_size,
        max_model_len=info.max_model_len,
        types=[[name, sizes.span] for name, sizes in info.block_types.items()],
        events=info.events,
        replay=info.replay,
        pd_address=info.pd_address,
        store=store_name(config),
        store_keys=info.store_keys,
    )


class Registration:
    """Registers one instance from `start` on, and tells a prefill instance's engine of the decode instances there are.

    Raises:
        ConfigError: the address of etcd is none.
    """

    def __init__(self, client: EngineClient, config: EngineConfig, port: int) -> None:
        self._client, self._port = client, port
        self._loop = asyncio.get_running_loop()
        self._decode_instances: dict[str, str] = {}
        self._seeks = config.instance_role == "PREFILL"
        self._info = describe(config, client.info, port)
        etcd = Etcd(config.etcd_addr, config.etcd_namespace)
        self._membership = Membership(etcd, config.etcd_ttl, self._owned(), on_round=self._on_round)

    def _owned(self) -> dict[str, bytes]:
        return {self._info.key: self._info.to_json()}

    def start(self) -> None:
        self._membership.start()

    async def stop(self) -> None:
        """Leave the registry: nothing is routed here any more."""
        await asyncio.to_thread(self._membership.stop, _STOP_S)

    def renew(self, config: EngineConfig) -> None:
        """The instance uses another store now."""
        self._info = describe(config, self._client.info, self._port)
        self._membership.replace(self._owned())

    @property
    def state(self) -> str:
        """`registered`, or why not."""
        return f"unreachable: {self._membership.why}" if self._membership.why else "registered"

    def _on_round(self, membership: Membership) -> None:
        """In the registry's thread."""
        if not self._seeks or membership.found is None:
            return
        mine = self._info
        found = {
            name: other.pd_address
            for name, other in instances_of(membership.found).items()
            if other.role == "DECODE" and other.pd_address and other.model_id == mine.model_id
        }
        if found != self._decode_instances:
            asyncio.run_coroutine_threadsafe(self._tell(found), self._loop)  # the lease does not wait for the engine

    async def _tell(self, found: dict[str, str]) -> None:
        try:
            await self._client.call(SetDecodeInstances(found), _CALL_S)
            self._decode_instances = found
        except (TimeoutError, RequestError, EngineDeadError) as error:
            log.warning("the engine was not told of the decode instances, the next round tries again: %s", error)
