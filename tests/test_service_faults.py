"""Etcd, a replica of the service, an instance: each is killed or stopped under load, and each request has an answer."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from etcd import EtcdServer, needs_etcd, running_etcd
from pairs import prompt_of
from service import Service, instance, name_of
from serving import Server, wait_for
from tiny_models import make

from xllm_hier.embedded_store import free_ports
from xllm_hier.registry import MASTER

pytestmark = needs_etcd
SLOW = ["--max_tokens_per_batch=16"]  # a prompt of some length takes many steps: there is time for a death


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("service") / "llama", "llama")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path / "etcd") as server:
        yield server


class Asked:
    """One request in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:  # looked at by the test
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def get(self, timeout_s: float = 120.0) -> Any:
        self._thread.join(timeout_s)
        assert self.done, "no answer"
        if self.error is not None:
            raise self.error
        return self.result


def serving(service: Service, servers: list[Server]) -> Server:
    """The instance that has an open request."""
    names = {name_of(server): server for server in servers}

    def found() -> Server | None:
        opened = httpx.get(f"{service.url}/instances", timeout=60).json()["routing"]["open"]
        return next((names[name] for name, count in opened.items() if count), None)

    return wait_for(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_request_that_has_streamed_nothing_is_answered_elsewhere(
    etcd: EtcdServer, model: Path, number: signal.Signals
) -> None:
    """Upstream's fault 7: requests in flight on a dead instance are cancelled."""
    with ExitStack() as stack:
        servers = [stack.enter_context(instance(model, etcd, *SLOW)) for _ in range(2)]
        service = stack.enter_context(Service(etcd))
        service.wait_known(*servers)
        prompt = prompt_of(1, 1500)
        asked = Asked(lambda: service.ask(prompt, 400))  # it is not over before its instance is
        victim = serving(service, servers)
        (other,) = [server for server in servers if server is not victim]
        everybody = [victim.process, *victim.children]
        if number == signal.SIGKILL:
            victim.kill()
        else:
            for process in everybody:
                process.send_signal(number)
        try:
            answer = asked.get()
            assert answer.bits == other.ask(prompt, 400).bits
            assert service.metric("xllm_service_retries_total") == 1
            wait_for(lambda: service.instances().get(name_of(victim), {}).get("state") in ("SUSPECT", None))
            assert service.ask(prompt_of(2, 40)).token_ids  # at once, by the other one
        finally:
            for process in everybody:
                if number == signal.SIGSTOP:
                    process.send_signal(signal.SIGCONT)
        if number == signal.SIGSTOP:
            wait_for(lambda: service.instances().get(name_of(victim), {}).get("state") == "ACTIVE")


def test_an_answer_that_breaks_off_ends_with_an_error_the_client_understands(etcd: EtcdServer, model: Path) -> None:
    with instance(model, etcd) as server, Service(etcd) as service:
        service.wait_known(server)
        stream = service.client.completions.create(
            model="", prompt=prompt_of(3, 20), max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        got = []
        with pytest.raises(openai.APIError):
            for chunk in stream:
                got.append(chunk)
                if len(got) == 3:
                    server.kill()
        assert len(got) >= 3
        wait_for(lambda: service.metric("xllm_service_open_requests") == 0)


def test_a_client_that_goes_away_ends_its_request_at_the_instance(etcd: EtcdServer, model: Path) -> None:
    with instance(model, etcd) as server, Service(etcd) as service:
        service.wait_known(server)
        body = {"prompt": prompt_of(4, 20), "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        wait_for(lambda: server.stats()["running"] == 0)
        assert server.stats()["generation_tokens"] < 1900
        body |= {"stream": False}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{service.url}/v1/completions", json=body, timeout=0.3)
        wait_for(lambda: server.stats()["running"] == 0 and service.metric("xllm_service_open_requests") == 0)


def test_an_instance_that_stops_in_order_loses_no_request(etcd: EtcdServer, model: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(instance(model, etcd)) for _ in range(2)]
        service = stack.enter_context(Service(etcd))
        service.wait_known(*servers)
        asked = [Asked(lambda n=n: service.ask(prompt_of(n, 30), 60)) for n in range(12)]
        serving(service, servers)
        servers[0].process.terminate()
        more = [Asked(lambda n=n: service.ask(prompt_of(50 + n, 30), 20)) for n in range(8)]
        assert [len(one.get().token_ids) for one in asked + more] == [60] * 12 + [20] * 8
        assert servers[0].process.wait(60) == 0


def test_requests_go_on_while_etcd_is_away_and_what_is_new_is_found_when_it_is_back(
    etcd: EtcdServer, model: Path
) -> None:
    (port,) = free_ports(1)
    with ExitStack() as stack:
        server = stack.enter_context(instance(model, etcd))
        service = stack.enter_context(Service(etcd))
        service.wait_known(server)
        etcd.stop()
        wait_for(lambda: service.health()["registry"] != "reachable")
        end = time.monotonic() + 5  # longer than leases live
        while time.monotonic() < end:
            assert service.ask(prompt_of(5, 30), 2).token_ids
        assert service.instances()[name_of(server)]["state"] == "ACTIVE"
        assert "unreachable" in server.health()["registry"] and server.health()["status"] == "ok"
        late = stack.enter_context(instance(model, etcd, port=port))  # starts without etcd
        assert late.ask([5, 6]).token_ids
        stranger = stack.enter_context(Service(etcd))  # so does a replica, which knows nobody
        with pytest.raises(openai.InternalServerError, match="no instance is there"):
            stranger.ask([5])
        etcd.start()
        service.wait_known(server, late)
        stranger.wait_known(server, late)
        assert stranger.ask(prompt_of(5, 30), 2).token_ids
        wait_for(lambda: service.health()["status"] == "ok")


def test_when_the_master_dies_another_replica_takes_its_place_and_requests_go_on(etcd: EtcdServer, model: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(instance(model, etcd))
        replicas = [stack.enter_context(Service(etcd)) for _ in range(2)]
        for one in replicas:
            one.wait_known(server)
        wait_for(lambda: [one.health()["role"] for one in replicas].count("master") == 1)
        (master,) = [one for one in replicas if one.health()["role"] == "master"]
        (other,) = [one for one in replicas if one is not master]
        master.process.kill()
        assert other.ask(prompt_of(6, 30)).token_ids
        wait_for(lambda: other.health()["role"] == "master")
        found = etcd.client().read()
        assert found[MASTER] == f"127.0.0.1:{other.rpc_port}".encode()
        wait_for(lambda: len([key for key in etcd.client().read() if key.startswith("XLLM:SERVICE:1")]) == 1)


def test_a_replica_that_is_told_to_stop_finishes_what_it_has(etcd: EtcdServer, model: Path) -> None:
    with instance(model, etcd) as server, Service(etcd) as service:
        service.wait_known(server)
        asked = [Asked(lambda n=n: service.ask(prompt_of(n, 30), 600)) for n in range(3)]
        wait_for(lambda: service.health()["open"] == 3)  # one that comes later is refused
        service.process.terminate()
        assert [len(one.get().token_ids) for one in asked] == [600] * 3
        assert service.process.wait(60) == 0
        assert not [key for key in etcd.client().read() if key.startswith("XLLM:SERVICE")]


def test_two_hundred_requests_on_three_instances_that_are_killed_at_random(etcd: EtcdServer, model: Path) -> None:
    """Every request is answered in full with the right tokens, or failed with an error that says why."""
    dice = random.Random(9)
    ports = free_ports(3)
    prompts = [prompt_of(seed, dice.randrange(20, 200)) for seed in range(10)]
    with ExitStack() as stack:
        calm = stack.enter_context(Server(model, "--block_size=16", "--max_cache_size=8MB", "--num_threads=1"))
        right = {tuple(prompt): calm.ask(prompt, 6).bits for prompt in prompts}
        calm.stop()
        servers = [stack.enter_context(instance(model, etcd, port=port)) for port in ports]
        service = stack.enter_context(Service(etcd))
        service.wait_known(*servers)
        outcomes: Counter[str] = Counter()
        lock, calm_again = threading.Lock(), threading.Event()

        def client(seed: int) -> None:
            mine = random.Random(seed)
            while True:
                if calm_again.is_set() and outcomes.total() >= 200:
                    return
                prompt = mine.choice(prompts)
                try:
                    answer = service.ask(prompt, 6)
                    outcome = "right" if answer.bits == right[tuple(prompt)] else "WRONG"
                except openai.APIStatusError as error:
                    outcome = f"error {error.status_code}: {error.body}" if error.status_code == 503 else repr(error)
                except openai.APIConnectionError as error:
                    outcome = f"NO ANSWER: {error!r}"
                with lock:
                    outcomes[outcome] += 1

        clients = [Asked(lambda seed=seed: client(seed)) for seed in range(6)]
        for _ in range(3):
            time.sleep(dice.random())
            victim = dice.randrange(3)
            servers[victim].kill()
            servers[victim] = stack.enter_context(instance(model, etcd, port=ports[victim]))
        calm_again.set()
        for one in clients:
            one.get(120)
        allowed = {outcome for outcome in outcomes if outcome.startswith("error 503")} | {"right"}
        assert set(outcomes) <= allowed and outcomes["right"] >= 0.9 * outcomes.total(), outcomes
        print(outcomes, service.metric("xllm_service_retries_total"))
        service.wait_known(*servers)
        assert service.ask(prompts[0], 6).bits == right[tuple(prompts[0])]
        wait_for(lambda: service.metric("xllm_service_open_requests") == 0)
