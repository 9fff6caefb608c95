"""The service in front of real instances: OpenAI's endpoints, where requests go, and what it knows of the caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from etcd import EtcdServer, needs_etcd, running_etcd
from pairs import COMMON, PD, prompt_of
from service import FAST, Service, instance, name_of, running_cluster
from serving import Server, running_store, store_flags, wait_for
from tiny_models import make

from xllm_hier.embedded_store import EmbeddedStore, free_ports
from xllm_hier.registry import instances_of

pytestmark = needs_etcd
HOST = ["--host_blocks_factor=3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("service") / "llama", "llama")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[EtcdServer, list[Server], EmbeddedStore, Service]]:
    """Two instances that share a store, and one replica of the service that watches its master, too."""
    folder = tmp_path_factory.mktemp("cluster")
    with running_store(folder) as store, running_cluster(folder, model, 2, *store_flags(store)) as (etcd, servers):
        metrics = f"--store_metrics_address=127.0.0.1:{store._metrics}"
        with Service(etcd, metrics) as service:
            service.wait_known(*servers)
            yield etcd, servers, store, service


Cluster = tuple[EtcdServer, list[Server], EmbeddedStore, Service]


# --------------------------------------------------------------------------------------------- the API


def test_an_answer_has_the_bits_that_an_instance_gives(cluster: Cluster) -> None:
    _, servers, _, service = cluster
    prompt = prompt_of(1, 100)
    assert service.ask(prompt).bits == servers[0].ask(prompt).bits == servers[1].ask(prompt).bits


def test_a_stream_comes_token_by_token_with_its_usage(cluster: Cluster) -> None:
    _, _, _, service = cluster
    prompt, body = prompt_of(2, 60), {"ignore_eos": True, "return_token_ids": True}
    stream = service.client.completions.create(
        model="llama", prompt=prompt, max_tokens=6, stream=True, temperature=0,
        stream_options={"include_usage": True}, extra_body=body,
    )  # fmt: skip
    chunks = list(stream)
    ids = [token for chunk in chunks for choice in chunk.choices for token in choice.model_dump()["token_ids"]]
    assert len(chunks) == 7 and tuple(ids) == service.ask(prompt, 6).token_ids
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 60


def test_several_prompts_and_choices_go_as_one_request(cluster: Cluster) -> None:
    _, _, _, service = cluster
    got = service.client.completions.create(
        model="", prompt=[prompt_of(3, 20), prompt_of(4, 30)], n=2, max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3] and got.usage is not None
    assert got.usage.prompt_tokens == 50


def test_models_are_those_of_the_instances(cluster: Cluster) -> None:
    _, _, _, service = cluster
    (found,) = service.client.models.list().data
    assert found.id == "llama" and found.model_dump()["max_model_len"] == 2048


@pytest.mark.parametrize(
    "body, status, says",
    [
        ({"prompt": [5], "model": "other"}, 404, "there is llama"),
        ({"prompt": [5], "n": -1}, 400, "n must be"),
        ({"prompt": [5], "unknown": 1}, 400, "unknown"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": "a text"}, 400, "tokenizer"),
        ({"prompt": [5] * 3000}, 400, "3000"),
        ({}, 400, "prompt"),
        (7, 400, ""),
    ],
)
def test_a_bad_request_is_refused_as_an_instance_would(cluster: Cluster, body: object, status: int, says: str) -> None:
    _, _, _, service = cluster
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert says in error["message"] and error["type"]


def test_broken_json_is_refused_and_routing_is_said_by_the_service_alone(cluster: Cluster) -> None:
    _, _, _, service = cluster
    assert httpx.post(f"{service.url}/v1/completions", content=b"{", timeout=60).status_code == 400
    forged = {"prompt": [5, 6], "max_tokens": 1, "routing": {"service_request_id": "x", "token_ids": [[1]]}}
    answer = httpx.post(f"{service.url}/v1/completions", json=forged, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 2
    assert answer.json()["id"].startswith("cmpl-")


def test_metrics_and_instances_tell_what_happened(cluster: Cluster) -> None:
    _, servers, _, service = cluster
    before = service.metric("xllm_service_answers_total")
    service.ask(prompt_of(5, 40))
    assert service.metric("xllm_service_answers_total") == before + 1
    wait_for(lambda: service.metric('xllm_service_instances{role="DEFAULT",state="ACTIVE"}') == 2)
    wait_for(lambda: service.metric("xllm_service_open_requests") == 0)  # counted out behind the last byte
    assert service.metric("xllm_service_routing_seconds_count") > 0
    found = service.instances()
    assert set(found) == {name_of(server) for server in servers}
    assert all(one["index"]["incarnation"] == one["incarnation"] for one in found.values())
    told = {
        "status": "ok",
        "role": "master",
        "name": f"127.0.0.1:{service.rpc_port}",
        "registry": "reachable",
        "instances": 2,
        "suspects": 0,
        "open": 0,
        "version": "",
    }
    wait_for(lambda: service.health() | {"version": ""} == told)


def test_the_rpc_port_answers_as_the_other_one_does(cluster: Cluster) -> None:
    _, _, _, service = cluster
    assert httpx.get(f"http://127.0.0.1:{service.rpc_port}/health", timeout=60).json()["role"] == "master"


# --------------------------------------------------------------------------------------- where requests go


def knows_all(service: Service, servers: list[Server]) -> bool:
    """All that these instances tell of their devices and hosts has come to the service."""
    found = service.instances()
    for server in servers:
        blocks, known = server.stats()["blocks"], found[name_of(server)]["index"]
        if any(known[tier].get("KV", 0) != blocks[tier]["KV"]["evictable"] for tier in ("device", "host")):
            return False
    return True


def test_a_conversation_stays_where_its_prefix_is_and_strangers_spread(cluster: Cluster) -> None:
    _, servers, _, service = cluster
    for server in servers:
        server.clear("device", "host", "store")
    wait_for(lambda: all(not any(one["index"]["device"].values()) for one in service.instances().values()))
    talks = [prompt_of(100 + number, 320) for number in range(8)]
    before = [server.stats()["prefix_tokens"]["device"] for server in servers]
    with ThreadPoolExecutor(8) as pool:  # at a time: one after the other any of them may go anywhere
        answers = list(pool.map(lambda talk: service.ask(talk, 8), talks))
    for turn in range(1, 4):
        talks = [[*talk, *answer.token_ids, *prompt_of(turn, 24)] for talk, answer in zip(talks, answers, strict=True)]
        wait_for(lambda: knows_all(service, servers))
        answers = []
        for talk in talks:
            wait_for(lambda: not any(one["load"]["num_open"] for one in service.instances().values()))
            answers.append(service.ask(talk, 8))
            assert answers[-1].tiers["device"] >= 320, "a turn went where the conversation is not"
    after = [server.stats()["prefix_tokens"]["device"] for server in servers]
    counts = [now - then for now, then in zip(after, before, strict=True)]
    assert min(counts) > 0, "all conversations went to one instance"


def test_what_the_service_knows_is_what_the_instances_have(cluster: Cluster) -> None:
    _, servers, _, service = cluster
    for server in servers:
        server.wait_quiet()
    wait_for(lambda: knows_all(service, servers))
    wait_for(lambda: all(one["index"]["state"] == "exact" for one in service.instances().values()))


def test_a_prefix_of_one_instance_reaches_the_other_through_the_store(cluster: Cluster) -> None:
    """The store's blocks are in the index, read from its master: what either has computed is a hit for both."""
    _, servers, store, service = cluster
    prompt = prompt_of(7, 160)
    cold = servers[0].ask(prompt)
    servers[0].wait_quiet()
    (name,) = service.stores()
    assert name.startswith(f"{store.master_address}/llama/")
    servers[0].clear("device", "host")
    wait_for(lambda: service.stores()[name]["state"] == "exact")
    there = servers[1].ask(prompt)
    assert there.tiers["store"] >= 144 and there.bits == cold.bits
    servers[1].wait_quiet()
    wait_for(lambda: knows_all(service, servers))
    before = service.metric('xllm_service_prefix_tokens_total{tier="device"}')
    again = service.ask(prompt)
    assert again.tiers["device"] >= 144 and again.bits == cold.bits
    assert service.metric('xllm_service_prefix_tokens_total{tier="device"}') - before >= 144, "it was not expected"


def test_what_goes_from_the_store_goes_from_the_index_although_nobody_asked_for_it(cluster: Cluster) -> None:
    _, servers, _, service = cluster
    prompt = prompt_of(8, 96)
    servers[0].ask(prompt)
    servers[0].wait_quiet()
    (name,) = service.stores()
    wait_for(lambda: service.stores()[name].get("KV", 0) >= 6)
    servers[0].clear("store")
    wait_for(
        lambda: service.stores()[name] | {"KV": service.stores()[name].get("KV", 0)} == {"state": "exact", "KV": 0}, 90
    )


# ----------------------------------------------------------------------------------- instances come and go


def test_without_an_instance_there_is_a_clear_error_and_the_first_one_is_found(tmp_path: Path, model: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd, Service(etcd, "--load_balance_policy=RR") as service:
        assert httpx.get(f"{service.url}/health", timeout=60).status_code == 503
        with pytest.raises(openai.InternalServerError, match="no instance is there") as caught:
            service.ask([5])
        assert caught.value.status_code == 503
        with instance(model, etcd, "--api_key=secret") as server:
            service.wait_known(server)
            with pytest.raises(openai.AuthenticationError):  # the instance asks for a key that the service has not
                service.ask([5])
            assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 401
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            with Service(etcd, environ={"XLLM_API_KEY": "secret"}) as guarded:
                guarded.wait_known(server)
                with pytest.raises(openai.AuthenticationError):
                    guarded.ask([5])
                guarded.client = guarded.new_client("secret")
                assert len(guarded.ask([5, 6], 3).token_ids) == 3
            assert server.stop() == 0
        wait_for(lambda: not service.instances() or service.health()["suspects"])
        with pytest.raises(openai.InternalServerError):
            service.ask([5])


def test_a_restarted_instance_has_no_phantom_hits(tmp_path: Path, model: Path) -> None:
    """Upstream's fault 4: blocks of a process that is gone stay in the index."""
    (port,) = free_ports(1)
    with running_etcd(tmp_path / "etcd") as etcd, Service(etcd) as service:
        prompt = prompt_of(9, 128)
        with instance(model, etcd, *HOST, port=port) as first:
            service.wait_known(first)
            service.ask(prompt)
            assert service.ask(prompt).tiers["device"] >= 112
            old = service.instances()[name_of(first)]["incarnation"]
            first.kill()
            with instance(model, etcd, *HOST, port=port) as second:
                wait_for(lambda: service.instances().get(name_of(second), {}).get("incarnation") not in (None, old))
                service.wait_known(second)
                assert not any(service.instances()[name_of(second)]["index"]["device"].values())
                expected = service.metric('xllm_service_prefix_tokens_total{tier="device"}')
                assert service.ask(prompt).cached == (0, 0, 0)
                assert service.metric('xllm_service_prefix_tokens_total{tier="device"}') == expected


def test_a_prefill_and_a_decode_instance_find_each_other_and_are_sent_requests_as_a_pair(
    tmp_path: Path, model: Path
) -> None:
    role = ["--disagg_pd_port=0", *PD, "--peer_timeout_s=20"]
    with running_etcd(tmp_path / "etcd") as etcd, ExitStack() as stack:
        alone = stack.enter_context(Server(model, *COMMON))  # with as many threads as the pair: bits may depend on them
        prefill = stack.enter_context(instance(model, etcd, *role, "--instance_role=PREFILL"))
        service = stack.enter_context(Service(etcd))
        wait_for(lambda: service.instances())
        with pytest.raises(openai.InternalServerError, match="no instance can take"):
            service.ask([5])
        decodes = [stack.enter_context(instance(model, etcd, *role, "--instance_role=DECODE")) for _ in range(2)]
        service.wait_known(prefill, *decodes)
        wait_for(lambda: list(prefill.stats()["pd"]["peers"].values()) == ["linked", "linked"])
        prompt = prompt_of(10, 100)
        assert service.ask(prompt).bits == alone.ask(prompt).bits
        with ThreadPoolExecutor(8) as pool:  # at a time: who has some already gets no more
            list(pool.map(lambda number: service.ask(prompt_of(20 + number, 40), 40), range(8)))
        took = [decode.stats()["pd"]["taken_over"] for decode in decodes]
        assert sum(took) == 9 and min(took) >= 1, took
        found = instances_of(etcd.client().read())
        wanted = found[name_of(decodes[1])]
        before = decodes[1].stats()["pd"]["taken_over"]
        for number in range(4):  # the choice of the service is the prefill instance's
            body = {"prompt": prompt_of(40 + number, 20), "max_tokens": 3, "ignore_eos": True}
            routing = {"decode_name": wanted.name, "service_request_id": f"mine-{number}"}
            answer = httpx.post(f"{prefill.url}/v1/completions", json=body | {"routing": routing}, timeout=60)
            assert answer.json()["id"] == f"mine-{number}"
        assert decodes[1].stats()["pd"]["taken_over"] == before + 4
        decodes[1].stop()
        service.wait_known(prefill, decodes[0])
        assert len(service.ask(prompt_of(60, 30), 3).token_ids) == 3


def test_a_chat_is_tokenised_once_by_the_service_and_answered_with_the_same_bits(tmp_path: Path) -> None:
    from xllm_hier.models.demo import demo_model_folder

    folder = demo_model_folder()
    ask = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "temperature": 0}
    with running_etcd(tmp_path / "etcd") as etcd, ExitStack() as stack:
        server = stack.enter_context(
            Server(folder, *FAST, f"--etcd_addr={etcd.address}", "--max_cache_size=64MB", "--max_model_len=256")
        )
        service = stack.enter_context(Service(etcd, f"--tokenizer_path={folder}"))
        service.wait_known(server)
        direct = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=60).json()
        chat = httpx.post(f"{service.url}/v1/chat/completions", json=ask, timeout=60).json()
        assert chat["choices"][0]["message"] == direct["choices"][0]["message"]
        assert chat["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
        assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        text = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "echo": True}
        one = httpx.post(f"{server.url}/v1/completions", json=text, timeout=60).json()["choices"][0]["text"]
        other = httpx.post(f"{service.url}/v1/completions", json=text, timeout=60).json()["choices"][0]["text"]
        assert one == other and one.startswith("The capital")
        lines = []
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=ask | {"stream": True}, timeout=60) as got:
            lines = [line for line in got.iter_lines() if line.startswith("data: {")]
        parts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines]
        assert "".join(parts) == direct["choices"][0]["message"]["content"]
        wrong = httpx.post(f"{service.url}/v1/chat/completions", json={"messages": []}, timeout=60)
        assert wrong.status_code == 400
