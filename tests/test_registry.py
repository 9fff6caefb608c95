"""The registry on a real etcd: keys live as long as their owners, and nobody dies because etcd does."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from etcd import EtcdServer, needs_etcd, running_etcd
from serving import wait_for

from xllm_hier.embedded_store import free_ports
from xllm_hier.errors import ConfigError
from xllm_hier.registry import MASTER, ROLES, Etcd, InstanceInfo, Membership, RegistryError, instances_of, replica_key

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def info(name: str = "10.0.0.1:8010", **changes: Any) -> InstanceInfo:
    fixed: dict[str, Any] = {"name": name, "rpc_address": name, "incarnation_id": "a", "register_ts_ms": 1, "type": 0}
    return InstanceInfo(**(fixed | {"block_size": 16, "types": [["KV", 0]]} | changes))


class Members:
    """Memberships that are stopped at the end, whatever happens."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def join(self, etcd: EtcdServer, owned: dict[str, bytes], **more: Any) -> Membership:
        name_space = more.pop("name_space", "")
        membership = Membership(Etcd(etcd.address, name_space, timeout_s=5.0), 2, owned, **more)
        membership.start()
        self._stack.callback(membership.stop)
        return membership


@pytest.fixture
def members() -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(stack)


def test_the_keys_and_fields_of_an_instance_are_those_of_xllm() -> None:
    names = ["name", "rpc_address", "incarnation_id", "register_ts_ms", "type", "addrs", "ports"]
    names += ["dp_size", "kv_split_size", "cluster_ids"]
    assert ROLES == ("DEFAULT", "PREFILL", "DECODE", "MIX")
    assert [info(type=number).key for number in range(4)] == [f"XLLM:{role}:10.0.0.1:8010" for role in ROLES]
    assert list(json.loads(info().to_json()))[: len(names)] == names
    assert replica_key("10.0.0.9:8889") == "XLLM:SERVICE:10.0.0.9:8889" and MASTER == "XLLM:SERVICE:MASTER"


def test_what_was_registered_is_read_back_and_unknown_fields_are_ignored() -> None:
    one = info(addrs=["10.0.0.1"], ports=[26000], store="10.0.0.5:50051", store_keys={"KV": ["a:"]})
    assert InstanceInfo.from_json(one.to_json()) == one
    more = json.dumps(json.loads(one.to_json()) | {"of_tomorrow": 1}).encode()
    assert InstanceInfo.from_json(more) == one


BROKEN: list[tuple[str, Any]] = [
    ("name", 5),
    ("type", 4),
    ("type", "0"),
    ("type", True),
    ("block_size", 0),
    ("types", {}),
]


@pytest.mark.parametrize("field, value", BROKEN)
def test_an_entry_that_is_no_instance_is_left_out_and_the_others_are_read(field: str, value: Any) -> None:
    good = info("10.0.0.2:1")
    broken = json.dumps(json.loads(info().to_json()) | {field: value}).encode()
    found = {info().key: broken, good.key: good.to_json(), "XLLM:DEFAULT:x": b"{", "XLLM:DECODE:y": b"[]"}
    assert instances_of(found | {MASTER: b"10.0.0.9:8889"}) == {good.name: good}


def test_an_entry_under_another_name_or_role_than_its_own_is_none() -> None:
    assert (
        instances_of({"XLLM:DEFAULT:10.0.0.7:1": info().to_json(), "XLLM:DECODE:10.0.0.1:8010": info().to_json()}) == {}
    )


def test_a_key_is_there_while_its_owner_is_and_goes_when_it_stops(etcd: EtcdServer, members: Members) -> None:
    reader = etcd.client()
    membership = members.join(etcd, {"XLLM:DEFAULT:a": b"1"})
    wait_for(lambda: reader.read() == {"XLLM:DEFAULT:a": b"1"})
    membership.stop()
    assert reader.read() == {}


def test_a_key_of_an_owner_that_died_ends_with_its_lease(etcd: EtcdServer) -> None:
    reader = etcd.client()
    reader.put("XLLM:DEFAULT:dead", b"1", reader.grant(2))
    assert "XLLM:DEFAULT:dead" in reader.read()
    wait_for(lambda: "XLLM:DEFAULT:dead" not in reader.read())


def test_a_key_outlives_many_times_its_lease(etcd: EtcdServer, members: Members) -> None:
    reader, seen = etcd.client(), []
    members.join(etcd, {"XLLM:DEFAULT:b": b"1"}, on_round=lambda m: seen.append("XLLM:DEFAULT:b" in reader.read()))
    wait_for(lambda: len(seen) >= 10)  # three rounds a lease
    assert all(seen)


def test_a_key_that_somebody_removed_or_changed_is_put_again(etcd: EtcdServer, members: Members) -> None:
    reader, key = etcd.client(), "XLLM:DEFAULT:c"
    members.join(etcd, {key: b"1"})
    wait_for(lambda: reader.read().get(key) == b"1")
    reader.delete(key)
    wait_for(lambda: reader.read().get(key) == b"1")
    reader.put(key, b"wrong", reader.grant(60))
    wait_for(lambda: reader.read().get(key) == b"1")


def test_a_changed_value_replaces_the_old_one(etcd: EtcdServer, members: Members) -> None:
    reader = etcd.client()
    membership = members.join(etcd, {"XLLM:DEFAULT:d": b"1"})
    wait_for(lambda: reader.read().get("XLLM:DEFAULT:d") == b"1")
    membership.replace({"XLLM:DEFAULT:d": b"2"})
    wait_for(lambda: reader.read().get("XLLM:DEFAULT:d") == b"2")


def test_one_of_several_is_the_master_and_another_one_when_it_goes(etcd: EtcdServer, members: Members) -> None:
    all_of_them = [members.join(etcd, {}, contested={MASTER: f"{number}".encode()}) for number in range(3)]
    wait_for(lambda: all(one.found and not one.why for one in all_of_them))
    (first,) = [one for one in all_of_them if one.holds(MASTER)]
    for _ in range(4):  # it stays
        assert etcd.client().read()[MASTER] == f"{all_of_them.index(first)}".encode()
    first.stop()
    rest = [one for one in all_of_them if one is not first]
    wait_for(lambda: [one.holds(MASTER) for one in rest].count(True) == 1)


def test_keys_that_a_forerunner_left_do_not_go_with_its_lease(etcd: EtcdServer, members: Members) -> None:
    """A process that was killed and started again at once: same keys, same values, and a lease that still runs."""
    reader, key = etcd.client(), "XLLM:DEFAULT:again"
    old = reader.grant(4)
    reader.put(key, b"1", old)
    reader.put(MASTER, b"1", old)
    members.join(etcd, {key: b"1"}, contested={MASTER: b"1"})
    end = time.monotonic() + 6
    while time.monotonic() < end:
        assert {key: b"1", MASTER: b"1"}.items() <= reader.read().items()
        time.sleep(0.05)


def test_a_lease_that_somebody_ended_is_replaced(etcd: EtcdServer, members: Members) -> None:
    membership = members.join(etcd, {"XLLM:DEFAULT:k": b"1"})
    wait_for(lambda: membership.found)
    reader = etcd.client()
    reader.revoke(membership._lease)
    wait_for(lambda: reader.read().get("XLLM:DEFAULT:k") == b"1")


def test_name_spaces_do_not_see_each_other(etcd: EtcdServer, members: Members) -> None:
    members.join(etcd, {"XLLM:DEFAULT:e": b"1"}, name_space="blue")
    wait_for(lambda: etcd.client("/blue/").read() == {"XLLM:DEFAULT:e": b"1"})
    assert etcd.client("green").read() == {} and "XLLM:DEFAULT:e" not in etcd.client().read()
    raw = etcd.post("kv/range", {"key": base64.b64encode(b"/blue/XLLM:DEFAULT:e").decode()})
    assert len(raw["kvs"]) == 1


def test_an_outage_is_survived_what_was_read_stays_and_lost_keys_come_back(tmp_path: Path, members: Members) -> None:
    with running_etcd(tmp_path / "etcd") as server:
        membership = members.join(server, {"XLLM:DEFAULT:f": b"1"}, contested={MASTER: b"m"})
        wait_for(lambda: membership.found and not membership.why)
        server.stop()
        wait_for(lambda: membership.why)
        assert membership.found == {"XLLM:DEFAULT:f": b"1", MASTER: b"m"} and not membership.holds(MASTER)
        server.start()
        reader = server.client()
        wait_for(lambda: not membership.why and reader.read() == {"XLLM:DEFAULT:f": b"1", MASTER: b"m"})


def test_an_etcd_that_comes_back_empty_is_filled_again(tmp_path: Path, members: Members) -> None:
    with running_etcd(tmp_path / "one") as server:
        membership = members.join(server, {"XLLM:DEFAULT:g": b"1"})
        wait_for(lambda: membership.found)
        server.stop()
        server._folder = tmp_path / "other"
        server.start()
        wait_for(lambda: server.client().read() == {"XLLM:DEFAULT:g": b"1"})


def test_it_may_be_started_before_etcd_is(tmp_path: Path, members: Members) -> None:
    with running_etcd(tmp_path / "etcd") as server:
        server.stop()
        membership = members.join(server, {"XLLM:DEFAULT:h": b"1"})
        wait_for(lambda: "refused" in membership.why)
        assert membership.found is None
        server.start()
        wait_for(lambda: membership.found)


def test_a_listener_with_a_fault_does_not_end_the_registration(etcd: EtcdServer, members: Members) -> None:
    rounds: list[int] = []

    def faulty(membership: Membership) -> None:
        rounds.append(1)
        raise KeyError("a fault of the listener")

    members.join(etcd, {"XLLM:DEFAULT:i": b"1"}, on_round=faulty)
    wait_for(lambda: len(rounds) >= 3)
    assert "XLLM:DEFAULT:i" in etcd.client().read()


def test_of_several_endpoints_a_dead_one_costs_one_try(etcd: EtcdServer) -> None:
    (dead,) = free_ports(1)
    client = Etcd(f"127.0.0.1:{dead};{etcd.address}", timeout_s=10.0)
    client.read()
    assert client._endpoints[0] == etcd.address
    with pytest.raises(RegistryError, match=f"127.0.0.1:{dead}"):
        Etcd(f"127.0.0.1:{dead}", timeout_s=10.0).read()


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1", "127.0.0.1:1;", "http://127.0.0.1:2379", "a:b"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match="etcd_addr"):
        Etcd(address)


def _with_users(server: EtcdServer) -> None:
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "secret"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ):
        server.post(path, body)


def test_users_of_etcd_are_asked_for_their_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_etcd(tmp_path / "etcd") as server:
        before = server.client()
        before.read()
        _with_users(server)
        with pytest.raises(RegistryError, match="user name is empty"):
            before.read()
        monkeypatch.setenv("ETCD_USERNAME", "root")
        monkeypatch.setenv("ETCD_PASSWORD", "wrong")
        with pytest.raises(RegistryError, match="authentication failed"):
            server.client().read()
        monkeypatch.setenv("ETCD_PASSWORD", "secret")
        client = server.client()
        client.put("XLLM:DEFAULT:j", b"1", client.grant(60))
        assert client._client is not None
        client._client.session.headers["Authorization"] = "of.yesterday"  # tokens end when they are not used
        assert client.read() == {"XLLM:DEFAULT:j": b"1"}
        server.stop()
        server.start()
        assert client.read() == {"XLLM:DEFAULT:j": b"1"}


def test_a_password_for_an_etcd_without_users_does_no_harm(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_USERNAME", "root")
    monkeypatch.setenv("ETCD_PASSWORD", "secret")
    assert isinstance(etcd.client().read(), dict)


def test_a_restarted_instance_replaces_its_own_entry(etcd: EtcdServer, members: Members) -> None:
    reader, old = etcd.client(), info("10.0.0.3:1")
    reader.put(old.key, old.to_json(), reader.grant(2))  # of a process that was killed a moment ago
    new = dataclasses.replace(old, incarnation_id="b", register_ts_ms=2)
    members.join(etcd, {new.key: new.to_json()})
    reads: Callable[[], Any] = lambda: instances_of(reader.read()).get(new.name)  # noqa: E731
    wait_for(lambda: reads() == new)
    time.sleep(2.5)  # the old lease has ended
    assert reads() == new
