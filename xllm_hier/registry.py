"""The registry of a cluster in etcd: its keys and values, and how a process keeps its own key there.

Keys and values are xLLM's (`XLLM:<ROLE>:<name>`), so that tools made for it find ours; an instance's JSON has more
fields. Every key hangs on a lease that its owner keeps alive: a dead owner's key is gone after `etcd_ttl`. Nobody
depends on etcd being there: a key that is lost comes back with the next round, and readers keep the last answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import requests
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease

from .errors import ConfigError, XllmError
from .machine import etcd_endpoints

log = logging.getLogger("xllm.registry")

ROLES = ("DEFAULT", "PREFILL", "DECODE", "MIX")  # an instance's `type` is the position in here
PREFIX = "XLLM:"
MASTER = "XLLM:SERVICE:MASTER"
_REPLICA = "XLLM:SERVICE:"
_NO_AUTH = ("authentication is not enabled",)
_BAD_TOKEN = ("invalid auth token", "auth: token", "user name is empty", "auth: revision")
_Answer = TypeVar("_Answer")
_complained: set[tuple[str, bytes]] = set()  # said once, not in every round


class RegistryError(XllmError):
    """etcd did not answer, or not as it should; the next round tries again."""


@dataclass(frozen=True, kw_only=True)
class InstanceInfo:
    """The registry's entry for one instance: xLLM's fields, then ours.

    ===================  ==========================================================================================
    name                 `host:port` of its HTTP server
    incarnation_id       new at each start of its engine: nothing of an older one's caches is left on device and host
    type                 position of its role in `ROLES`
    addrs, ports         hosts and ports of the Transfer Engine; no entry where instances do not form pairs
    types                its block types in order: `[name, span]`, see `RestoreRule`
    events, replay       `host:port` of the two sockets of `kv_events`; empty: it publishes nothing
    pd_address           `host:port` of the control between the halves of a pair; empty without
    store                which store it reads and writes: equal texts are one store; empty: none
    store_keys           by block type, the prefixes of the keys of all objects of one block
    model                its name in the API
    ===================  ==========================================================================================
    """

    name: str
    rpc_address: str
    incarnation_id: str
    register_ts_ms: int
    type: int
    addrs: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    dp_size: int = 1
    kv_split_size: int = 1
    cluster_ids: list[int] = field(default_factory=list)
    model: str = ""
    model_id: str = ""
    block_size: int = 1
    tp_size: int = 1
    max_model_len: int = 0
    types: list[list[Any]] = field(default_factory=list)
    events: str = ""
    replay: str = ""
    pd_address: str = ""
    store: str = ""
    store_keys: dict[str, list[str]] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return ROLES[self.type]

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.role}:{self.name}"

    @property
    def store_blocks(self) -> str:
        """The same text for all whose blocks are in one store under the same keys; empty without a store. Hashes know
        nothing of model and layout, keys do."""
        if not self.store:
            return ""
        digest = hashlib.blake2b(json.dumps(self.store_keys, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.store}/{self.model_id}/{digest}"

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> InstanceInfo:
        """The instance in `data`; fields it does not know are ignored. Raises ValueError when it is none."""
        try:
            raw = json.loads(data)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(raw, dict):
            raise ValueError("an instance is a JSON object")
        hints = get_type_hints(cls)
        values = {}
        for item in dataclasses.fields(cls):
            if item.name not in raw:
                continue
            kind = getattr(hints[item.name], "__origin__", hints[item.name])
            if not isinstance(raw[item.name], kind) or isinstance(raw[item.name], bool):
                raise ValueError(f"{item.name} is {raw[item.name]!r}")
            values[item.name] = raw[item.name]
        try:
            info = cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if not 0 <= info.type < len(ROLES) or info.block_size < 1:
            raise ValueError(f"type {info.type}, block_size {info.block_size}")
        return info


def replica_key(rpc_address: str) -> str:
    """Key of one replica of the service."""
    return f"{_REPLICA}{rpc_address}"


def instances_of(found: dict[str, bytes]) -> dict[str, InstanceInfo]:
    """The instances among the keys of a registry, by name; an entry that does not parse is logged and left out."""
    instances: dict[str, InstanceInfo] = {}
    for key, value in found.items():
        role = key.removeprefix(PREFIX).partition(":")[0]
        if role not in ROLES:
            continue
        try:
            info = InstanceInfo.from_json(value)
        except ValueError as error:
            if (key, value) not in _complained:
                _complained.add((key, value))
                log.warning("the registry's %s is no instance: %s", key, error)
            continue
        if info.key == key:
            instances[info.name] = info
    return instances


class Etcd:
    """One etcd cluster at `address` (`host:port`, several separated by `;` or `,`), over its JSON gateway.

    Keys get the prefix `/<name_space>/` when there is one. Every call has a limit of `timeout_s` for each endpoint; the
    one that answered last is asked first. User and password come from ETCD_USERNAME and ETCD_PASSWORD. One thread.

    Raises:
        ConfigError: `address` is none.
    """

    def __init__(self, address: str, name_space: str = "", timeout_s: float = 1.0) -> None:
        self._endpoints = etcd_endpoints(address)
        self._timeout_s = timeout_s
        self._prefix = f"/{name_space.strip('/')}/" if name_space.strip("/") else ""
        self._user = os.environ.get("ETCD_USERNAME", ""), os.environ.get("ETCD_PASSWORD", "")
        self._client: Etcd3Client | None = None

    def _connect(self, endpoint: str) -> Etcd3Client:
        host, _, port = endpoint.rpartition(":")
        client = Etcd3Client(host.strip("[]"), int(port), timeout=self._timeout_s, session=requests.Session())
        client.session.trust_env = False  # a proxy of the machine's is no way to a neighbour
        if self._user[0]:
            try:
                answer = client.post(
                    client.get_url("/auth/authenticate"), json={"name": self._user[0], "password": self._user[1]}
                )
                client.session.headers["Authorization"] = answer["token"]
            except Etcd3Exception as error:
                if not any(text in _text(error) for text in _NO_AUTH):
                    raise
        return client

    def _call(self, what: Callable[[Etcd3Client], _Answer]) -> _Answer:
        """`what` of the first endpoint that answers. Raises RegistryError with all that went wrong."""
        problems = []
        for endpoint in [*self._endpoints, self._endpoints[0]]:  # the first once more: its token may have expired
            try:
                client = self._client or self._connect(endpoint)
                answer = what(client)
                self._client = client
                return answer
            except (Etcd3Exception, requests.RequestException, ValueError, KeyError) as error:
                problems.append(f"{self._endpoints[0]}: {_text(error)}")
                self.close()
                if not any(text in _text(error) for text in _BAD_TOKEN):
                    self._endpoints.append(self._endpoints.pop(0))
        raise RegistryError("; ".join(dict.fromkeys(problems)))

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        if self._client is not None:
            self._client.session.close()
        self._client = None

    def read(self, prefix: str = PREFIX) -> dict[str, bytes]:
        """All keys that begin with `prefix`, and their values. Raises RegistryError."""
        rows = self._call(lambda client: client.get_prefix(self._prefix + prefix))
        start = len(self._prefix)
        return {meta["key"].decode(errors="backslashreplace")[start:]: value for value, meta in rows}

    def put(self, key: str, value: bytes, lease: int) -> None:
        """Write a key that lives as long as `lease`. Raises RegistryError."""
        self._call(lambda client: client.put(self._prefix + key, value, lease=Lease(lease, client)))

    def create(self, key: str, value: bytes, lease: int) -> bool:
        """Write a key unless it is there; True when it was not. Raises RegistryError."""
        return self._call(lambda client: bool(client.create(self._prefix + key, value, lease=Lease(lease, client))))

    def delete(self, key: str) -> None:
        """Remove a key that may or may not be there. Raises RegistryError."""
        self._call(lambda client: client.delete(self._prefix + key))

    def grant(self, ttl_s: int) -> int:
        """A new lease. Raises RegistryError."""
        return self._call(lambda client: int(client.lease(ttl_s).id))

    def keep_alive(self, lease: int) -> bool:
        """Begin the lease's time anew; False when it has ended. Raises RegistryError."""
        return self._call(lambda client: int(Lease(lease, client).refresh()) > 0)

    def revoke(self, lease: int) -> None:
        """End a lease and its keys now. Raises RegistryError."""
        self._call(lambda client: Lease(lease, client).revoke())


def _text(error: Exception) -> str:
    detail = getattr(error, "detail_text", None)
    return f"{type(error).__name__}: {detail or error}"


class Membership:
    """Keeps keys of this process in the registry from a thread of its own, from `start` to `stop`.

    Each round, three in `ttl_s`, the lease is renewed, and keys that are missing or differ are put again. `owned` are
    written in any case; `contested` are taken only when nobody has them, and their first owner keeps them until it
    dies. `found` is the registry at the last round that could read it, or None before; `why` is empty, or why the last
    round failed. `on_round` is called in that thread after every round.
    """

    def __init__(
        self,
        etcd: Etcd,
        ttl_s: int,
        owned: dict[str, bytes],
        contested: dict[str, bytes] | None = None,
        on_round: Callable[[Membership], None] = lambda membership: None,
    ) -> None:
        if ttl_s < 1:
            raise ConfigError("etcd_ttl", ttl_s, "at least 1 s")
        self._etcd, self._ttl_s = etcd, ttl_s
        self._owned, self._contested = dict(owned), contested or {}
        self._on_round = on_round
        self._lease = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)
        self.found: dict[str, bytes] | None = None
        self.why = "not tried yet"

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the thread and take the keys away; the rest after `timeout_s` is left to the lease."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def replace(self, owned: dict[str, bytes]) -> None:
        """Own other keys or values from the next round on."""
        with self._lock:
            self._owned = dict(owned)

    def holds(self, key: str) -> bool:
        """A contested key was this process's at the last round."""
        return not self.why and (self.found or {}).get(key) == self._contested.get(key)

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._round()
                if self.why:
                    log.info("the registry answers")
                self.why = ""
            except Exception as error:  # whatever stands there instead of etcd: the next round tries again
                if not self.why or self.found is None:
                    log.warning("the registry does not answer, its last answer stays in use: %s", error)
                self.why = str(error) or type(error).__name__
            try:
                self._on_round(self)
            except Exception:  # a fault of a listener must not end the registration
                log.exception("after a round with the registry")
            if self._stop.wait(max(0.05, self._ttl_s / 3 - (time.monotonic() - began))):
                break
        try:
            if self._lease:
                self._etcd.revoke(self._lease)
        except RegistryError as error:
            log.info("the lease ends by itself: %s", error)
        self._etcd.close()

    def _round(self) -> None:
        anew = not self._lease or not self._etcd.keep_alive(self._lease)
        if anew:  # keys that still hang on an older lease go with that
            self._lease = self._etcd.grant(self._ttl_s)
        found = self._etcd.read()
        with self._lock:
            owned = dict(self._owned)
        owned |= {key: value for key, value in self._contested.items() if anew and found.get(key) == value}
        for key, value in owned.items():
            if anew or found.get(key) != value:
                self._etcd.put(key, value, self._lease)
                found[key] = value
        for key, value in self._contested.items():
            if key not in found and self._etcd.create(key, value, self._lease):
                found[key] = value
        self.found = found
