"""Which instances are scheduled: the states of the service's table, on a clock turned by hand."""

from __future__ import annotations

import dataclasses

import pytest

from xllm_hier.errors import ConfigError
from xllm_hier.registry import InstanceInfo
from xllm_hier.service.config import ServiceConfig
from xllm_hier.service.instances import Instance, Instances, State

CONFIG = ServiceConfig(etcd_addr="127.0.0.1:1", heart_beat_timeout_s=3.0, deregister_after_s=15.0)


def info(name: str = "a", incarnation: str = "one", at: int = 1, **more: object) -> InstanceInfo:
    fixed = InstanceInfo(
        name=name, rpc_address=name, incarnation_id=incarnation, register_ts_ms=at, type=0, events="e", replay="r"
    )
    return dataclasses.replace(fixed, **more)  # type: ignore[arg-type]


class Table:
    """Instances whose comings and goings are written down; `healthy` says who answers a probe."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log: list[str] = []
        self.healthy = {"a": True, "b": True}
        self.found: dict[str, InstanceInfo] = {}
        self.instances = Instances(CONFIG, self._note("+"), self._note("-"), self._note("?"))

    def _note(self, sign: str):  # type: ignore[no-untyped-def]
        def note(instance: Instance) -> None:
            self.log.append(f"{sign}{instance.info.name}/{instance.info.incarnation_id}")

        return note

    def register(self, *infos: InstanceInfo) -> None:
        self.found = {one.name: one for one in infos}
        self.instances.registered(self.found, self.now)

    def pass_time(self, seconds: float, *, heard: tuple[str, ...] = (), registry: bool = True) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name in heard:
                if name in self.instances.by_name:
                    self.instances.alive(name, self.instances.by_name[name].info.incarnation_id, self.now)
            if registry:
                self.instances.registered(self.found, self.now)
            for instance in self.instances.due(self.now):
                self.instances.probed(instance, self.healthy[instance.info.name], self.now)

    def state(self, name: str = "a") -> State | None:
        found = self.instances.by_name.get(name)
        return None if found is None else found.state


def test_an_instance_that_is_registered_and_heard_of_is_active_and_never_probed() -> None:
    table = Table()
    table.register(info())
    table.healthy["a"] = False
    table.pass_time(60, heard=("a",))
    assert (table.state(), table.log) == (State.ACTIVE, ["+a/one"])


def test_a_lost_lease_is_looked_into_and_a_healthy_instance_stays_scheduled() -> None:
    table = Table()
    table.register(info())
    table.register()
    table.pass_time(0.2, heard=("a",))
    assert table.state() is State.LEASE_LOST and table.instances.by_name["a"].schedulable
    table.pass_time(60, heard=("a",))
    assert table.state() is State.LEASE_LOST  # as long as it is heard of


def test_a_lost_lease_of_one_that_does_not_answer_is_suspect_and_then_forgotten() -> None:
    table = Table()
    table.register(info())
    table.healthy["a"] = False
    table.register()
    table.pass_time(0.2)
    assert table.state() is State.SUSPECT and not table.instances.by_name["a"].schedulable
    table.pass_time(14)
    assert table.state() is State.SUSPECT
    table.pass_time(2)
    assert table.state() is None and table.log == ["+a/one", "?a/one", "-a/one"]


def test_a_lost_lease_and_silence_make_it_suspect_although_it_answers_and_it_comes_back() -> None:
    table = Table()
    table.register(info())
    table.register()
    table.pass_time(0.2, heard=("a",))
    assert table.state() is State.LEASE_LOST
    table.pass_time(2.5)
    assert table.state() is State.LEASE_LOST
    table.pass_time(1.5)
    assert table.state() is State.SUSPECT
    table.pass_time(5)
    assert table.state() is State.SUSPECT  # an answer alone is no sign that it belongs here
    table.pass_time(1.5, heard=("a",))
    assert table.state() is State.LEASE_LOST
    table.register(info())
    assert table.state() is State.ACTIVE and "-a/one" not in table.log


def test_a_silent_one_that_answers_stays_and_one_that_does_not_is_suspect_though_registered() -> None:
    table = Table()
    table.register(info("a"), info("b"))
    table.healthy["b"] = False
    table.pass_time(4)
    assert (table.state("a"), table.state("b")) == (State.ACTIVE, State.SUSPECT)
    table.pass_time(60)
    assert table.state("b") is State.SUSPECT  # registered: not forgotten
    table.healthy["b"] = True
    table.pass_time(1.5)
    assert table.state("b") is State.ACTIVE


def test_a_request_that_did_not_get_through_has_it_looked_after_at_once() -> None:
    table = Table()
    table.register(info())
    table.pass_time(1, heard=("a",))
    table.healthy["a"] = False
    table.instances.unreachable("a", table.now)
    table.pass_time(0.1)
    assert table.state() is State.SUSPECT


def test_another_incarnation_replaces_the_old_one_at_once() -> None:
    table = Table()
    table.register(info())
    table.register(info(incarnation="two", at=2))
    assert table.log == ["+a/one", "-a/one", "+a/two"] and table.state() is State.ACTIVE


def test_what_a_process_that_was_here_before_registered_or_says_does_not_count() -> None:
    table = Table()
    table.register(info(incarnation="two", at=2))
    table.register(info(incarnation="one", at=1))
    assert table.log == ["+a/two"]
    assert table.instances.alive("a", "one", table.now) is None
    assert table.instances.alive("a", "two", table.now) is not None
    assert table.instances.alive("nobody", "two", table.now) is None


def test_a_probe_of_one_that_has_been_replaced_meanwhile_says_nothing() -> None:
    table = Table()
    table.register(info())
    table.register()
    (old,) = table.instances.due(table.now)
    table.register(info(incarnation="two", at=2))
    table.instances.probed(old, False, table.now)
    assert table.state() is State.ACTIVE and "?a/one" not in table.log


def test_while_the_registry_does_not_answer_signs_of_life_decide() -> None:
    table = Table()
    table.register(info("a"), info("b"))
    table.healthy["b"] = False
    table.pass_time(5, heard=("a",), registry=False)
    assert (table.state("a"), table.state("b")) == (State.ACTIVE, State.SUSPECT)
    table.pass_time(60, heard=("a",), registry=False)
    assert set(table.instances.by_name) == {"a", "b"}


def test_an_instance_without_events_is_probed_instead_of_heard() -> None:
    table = Table()
    table.register(info(events="", replay=""))
    table.pass_time(10)
    assert table.state() is State.ACTIVE
    table.healthy["a"] = False
    table.pass_time(4.2)
    assert table.state() is State.SUSPECT
    table.healthy["a"] = True
    table.pass_time(1.2)
    assert table.state() is State.ACTIVE


def test_an_instance_that_changes_its_store_is_known_anew() -> None:
    table = Table()
    table.register(info(store="one"))
    table.register(info(store="other"))
    assert table.log == ["+a/one", "-a/one", "+a/one"] and table.instances.by_name["a"].info.store == "other"


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"etcd_addr": ""}, "etcd_addr"),
        ({"etcd_addr": "here"}, "etcd_addr"),
        ({"etcd_addr": "a:1", "host": "0.0.0.0"}, "advertise_host"),
        ({"etcd_addr": "a:1", "load_balance_policy": "BEST"}, "load_balance_policy"),
        ({"etcd_addr": "a:1", "store_metrics_address": "x"}, "store_metrics_address"),
        ({"etcd_addr": "a:1", "http_server_port": 5, "rpc_server_port": 5}, "rpc_server_port"),
        ({"etcd_addr": "a:1", "max_attempts": 0}, "max_attempts"),
        ({"etcd_addr": "a:1", "target_ttft": 0}, "target_ttft"),
    ],
)
def test_a_setting_of_the_service_that_cannot_be_is_refused_by_name(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.name == name
