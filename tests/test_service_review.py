"""What can go wrong between a service, its registry and its instances; all but the service are stand-ins."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession, web
from scripted_engine import ScriptedEngine
from serving import wait_for

from xllm_hier.block import BlockType, RestoreRule
from xllm_hier.config import EngineConfig
from xllm_hier.engine_client import EngineClient
from xllm_hier.errors import ConfigError, RequestError
from xllm_hier.ints import ints
from xllm_hier.kv_events import Stored
from xllm_hier.openai.refusals import Refusal
from xllm_hier.registry import Etcd, InstanceInfo, Membership, RegistryError, instances_of
from xllm_hier.request_messages import AddRequest, SamplingSpec
from xllm_hier.service.app import create_app, wait_idle
from xllm_hier.service.cluster import Cluster
from xllm_hier.service.config import ServiceConfig
from xllm_hier.service.instances import Instances, State
from xllm_hier.service.policies import Prompt
from xllm_hier.service.prefix_index import IndexState, PrefixIndex
from xllm_hier.service.relay import Answer, Relay
from xllm_hier.service.store_watch import StoreWatch

KV = BlockType.KV


class StandIn:
    """An instance that answers what it is told to; `go` lets its answers end, `drain` makes it refuse new ones."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.draining = self.hangs = self.breaks_off = False
        self.asked = 0
        self.name = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[StandIn]:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.post("/v1/completions", self._complete)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.name = f"{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        status = "draining" if self.draining else "ok"
        return web.json_response({"status": status}, status=503 if self.draining else 200)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if not (await request.json()).get("stream"):
            await self.go.wait()
            return web.json_response({"all": "of it"})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: {}\n\n")
        if self.breaks_off:
            await answer.write(b'data: {"half": ')
            await asyncio.sleep(0.1)
            assert request.transport is not None
            request.transport.close()
            return answer
        await self.go.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def info(self, **changes: Any) -> InstanceInfo:
        fixed = InstanceInfo(
            name=self.name, rpc_address=self.name, incarnation_id="one", register_ts_ms=1, type=0, model="m",
            block_size=4, max_model_len=100, types=[["KV", 0]],
        )  # fmt: skip
        return dataclasses.replace(fixed, **changes)


def found(*infos: InstanceInfo) -> dict[str, bytes]:
    return {one.key: one.to_json() for one in infos}


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[Cluster]:
    """A replica whose registry never answers: a test tells it what is registered."""
    settings = {"probe_timeout_s": 30.0, **settings}  # who is probed runs in this thread, too
    async with Cluster(ServiceConfig(etcd_addr="127.0.0.1:1", **settings), "127.0.0.1:2") as cluster:
        yield cluster


def ask(cluster: Cluster, **body: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(Relay(cluster).send("/v1/completions", {"model": "m", **body}, Prompt([1, 2]), "id"))


async def until(what: Callable[[], Any], limit_s: float = 30.0) -> None:
    end = asyncio.get_running_loop().time() + limit_s
    while not what():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


async def text_of(answer: Answer) -> bytes:
    return b"".join([chunk async for chunk in answer.body()])


# ------------------------------------------------------------------------------------- instances come and go


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_that_drains_may_finish_what_it_has_also_when_there_is_no_other(stream: bool) -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service(deregister_after_s=0.2) as cluster:
            cluster.registered(found(one.info()))
            asked = ask(cluster, stream=stream)
            await until(lambda: one.asked)
            one.draining = True
            cluster.registered({})
            await until(lambda: not cluster.candidates(""))
            await asyncio.sleep(2.5 if stream else 0.5)  # long enough to be forgotten
            one.go.set()
            assert b"instance_lost" not in await text_of(await asked)

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_that_is_attached_to_another_store_goes_on_with_its_requests(stream: bool) -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service() as cluster:
            cluster.registered(found(one.info(store="a:1")))
            asked = ask(cluster, stream=stream)
            await until(lambda: one.asked)
            if stream:
                await asked
            cluster.registered(found(one.info(store="b:1", register_ts_ms=2)))
            await asyncio.sleep(0.1)
            one.go.set()
            assert b"instance_lost" not in await text_of(await asked)

    asyncio.run(story())


def test_a_stream_of_an_instance_that_hangs_ends_also_while_it_is_registered() -> None:
    """Its API process keeps the lease, whatever has become of its engine."""

    async def story() -> None:
        limits = {"heart_beat_timeout_s": 0.2, "probe_timeout_s": 0.5, "deregister_after_s": 0.2}
        async with StandIn().serving() as one, service(**limits) as cluster:
            cluster.registered(found(one.info()))
            answer = await ask(cluster, stream=True)
            one.hangs = True
            try:
                assert b"instance_lost" in await asyncio.wait_for(text_of(answer), 30.0)
            finally:
                one.go.set()

    asyncio.run(story())


def test_an_event_that_breaks_off_does_not_spoil_the_error_behind_it() -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service() as cluster:
            one.breaks_off = True
            cluster.registered(found(one.info()))
            text = (await text_of(await ask(cluster, stream=True))).decode()
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert events.pop() == "[DONE]"
            assert json.loads(events.pop())["error"]["code"] == "instance_lost"
            assert [json.loads(event) for event in events] == [{}]

    asyncio.run(story())


def test_one_request_that_did_not_get_through_is_no_proof_against_an_instance_that_lost_its_lease() -> None:
    """It is asked for its health first, as any other, before those that wait there are sent elsewhere."""
    one = InstanceInfo(name="a", rpc_address="a", incarnation_id="one", register_ts_ms=1, type=0, events="e")
    suspected: list[str] = []
    instances = Instances(
        ServiceConfig(etcd_addr="127.0.0.1:1"),
        lambda instance: None,
        lambda instance: None,
        lambda instance: suspected.append(instance.info.name),
    )
    instances.registered({"a": one}, 0.0)
    instances.registered({}, 1.0)
    for due in instances.due(1.0):
        instances.probed(due, True, 1.0)
    instances.alive("a", "one", 2.1)
    instances.unreachable("a", 2.2)
    (asked,) = instances.due(2.3)
    instances.probed(asked, True, 2.4)
    assert instances.by_name["a"].state is State.LEASE_LOST and not suspected


def test_a_probe_that_fails_in_an_unheard_of_way_is_not_the_last_one() -> None:
    async def story() -> None:
        async with service(heart_beat_timeout_s=0.2) as cluster:
            name = f"{'x' * 70}:80"  # no resolver takes it, with an error that is none of aiohttp's
            info = InstanceInfo(
                name=name, rpc_address=name, incarnation_id="one", register_ts_ms=1, type=0, types=[["KV", 0]]
            )
            cluster.registered(found(info))
            await until(lambda: not cluster.candidates(""))

    asyncio.run(story())


def test_prefill_instances_without_a_decode_instance_can_be_sent_nothing_and_health_says_so() -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service() as cluster:
            cluster.registered(found(one.info(type=1)))
            transport = httpx.ASGITransport(create_app(cluster, None))
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                assert (await client.post("/v1/completions", json={"prompt": [5]})).status_code == 503
                assert (await client.get("/health")).status_code == 503

    asyncio.run(story())


def test_a_model_whose_instances_do_not_answer_for_a_moment_is_no_unknown_model() -> None:
    """404 tells a client never to come back."""

    async def story() -> None:
        async with StandIn().serving() as one, StandIn().serving() as other, service() as cluster:
            cluster.registered(found(one.info(), other.info(model="n")))
            known = cluster.instances
            known._to(known.by_name[one.name], State.SUSPECT, 0.0, "a test says so")
            answer = await post(cluster, {"model": "m", "prompt": [5]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")

    asyncio.run(story())


def test_a_process_that_was_restarted_on_a_clock_set_back_is_followed() -> None:
    """Of two that had this name only one is heard of; the registry has the newer one, whatever its clock says."""
    new = InstanceInfo(name="a", rpc_address="a", incarnation_id="new", register_ts_ms=10_000, type=0, events="e")
    old = dataclasses.replace(new, incarnation_id="old", register_ts_ms=99_000)
    instances = Instances(ServiceConfig(etcd_addr="127.0.0.1:1"), lambda one: None, lambda one: None)
    instances.registered({"a": old}, 0.0)
    for second in range(1, 60):
        instances.registered({"a": new}, float(second))
        for due in instances.due(float(second)):
            instances.probed(due, True, float(second))
    assert instances.by_name["a"].info.incarnation_id == "new"


def test_an_entry_without_block_types_does_not_stop_the_others_from_being_asked() -> None:
    """As xLLM's own engines register, which publish nothing of their caches."""

    async def story() -> None:
        async with StandIn().serving() as one, service() as cluster:
            one.go.set()
            stranger = one.info(name="127.0.0.1:9", rpc_address="127.0.0.1:9", types=[])
            cluster.registered(found(stranger, one.info()))
            assert (await ask(cluster)).status == 200

    asyncio.run(story())


# --------------------------------------------------------------------------------------------- the API


async def post(cluster: Cluster, body: Any, tokenizer: Any = None) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(cluster, tokenizer), raise_app_exceptions=False)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.post("/v1/completions", content=content)


@pytest.mark.parametrize("body", [{"prompt": [1 << 31]}, {"prompt": [[1], [-(1 << 40)]]}, b"[" * 100_000])
def test_what_no_instance_would_take_is_the_callers_fault(body: Any) -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service() as cluster:
            one.go.set()
            cluster.registered(found(one.info()))
            answer = await post(cluster, body)
            assert answer.status_code == 400, answer.text

    asyncio.run(story())


def test_a_client_that_goes_away_while_it_sends_is_no_fault_of_the_service() -> None:
    """A fault would fill the log with tracebacks."""

    async def story() -> None:
        messages: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            assert message.get("status") != 500

        async with service() as cluster:
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
            await create_app(cluster, None)(scope, receive, send)

    asyncio.run(story())


class SlowTokenizer:
    """Has `begun`, and ends when it may `go` on, as with a long text."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        await self.go.wait()
        return [5]


def test_a_request_is_open_from_its_first_byte_on_also_while_it_is_tokenised() -> None:
    async def story() -> None:
        async with StandIn().serving() as one, service(max_open_requests=1) as cluster:
            one.go.set()
            cluster.registered(found(one.info()))
            tokenizer = SlowTokenizer()
            app = create_app(cluster, tokenizer)  # type: ignore[arg-type]
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a text"}))
                await asyncio.wait_for(tokenizer.begun.wait(), 30.0)
                assert (await client.post("/v1/completions", json={"prompt": [5]})).status_code == 429
                app.state.front.draining = True
                asyncio.get_running_loop().call_later(0.3, tokenizer.go.set)
                await wait_idle(app.state.front, 30.0)
                assert first.done() or one.asked, "the service would have ended before it had sent this one on"
                assert (await first).status_code == 200

    asyncio.run(story())


# --------------------------------------------------------------------------------------- where requests go


def test_texts_that_nobody_tokenises_here_are_spread_by_load() -> None:
    """Of what they are nothing is known, so they have nothing in common either."""

    async def story() -> None:
        async with StandIn().serving() as one, StandIn().serving() as other, service() as cluster:
            cluster.registered(found(one.info(), other.info()))
            texts = [f"{number} is not like any of the others. " * 200 for number in range(8)]
            asked = [asyncio.create_task(post(cluster, {"prompt": text})) for text in texts]
            await until(lambda: one.asked + other.asked == 8)
            counts = sorted((one.asked, other.asked))
            one.go.set()
            other.go.set()
            await asyncio.gather(*asked)
            assert counts == [4, 4] and cluster.router.describe()["tokens"].get("device", 0) == 0

    asyncio.run(story())


# --------------------------------------------------------------------------------------------- the store


class Master:
    """Says what it is told to; `during` happens while it lists its keys."""

    def __init__(self, keys: list[str]) -> None:
        self.keys, self.evicted = keys, 0
        self.during: Callable[[], Any] = lambda: None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics), web.get("/get_all_keys", self._list)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield "{}:{}".format(*runner.addresses[0][:2])
        finally:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"master_evicted_key_count {self.evicted}\n")

    async def _list(self, request: web.Request) -> web.Response:
        text = "\n".join(self.keys)
        self.during()
        return web.Response(text=text)


def hashed(number: int) -> bytes:
    return number.to_bytes(16, "big")


def key(prefix: str, number: int) -> str:
    return f"{prefix}{hashed(number).hex()}"


def user_of_store(name: str = "a", prefix: str = "m:") -> InstanceInfo:
    return InstanceInfo(
        name=name, rpc_address=name, incarnation_id="one", register_ts_ms=1, type=0, model=prefix,
        types=[["KV", 0]], block_size=4, store="s:1", store_keys={"KV": [prefix]},
    )  # fmt: skip


@asynccontextmanager
async def watching(master: Master, index: PrefixIndex, users: list[InstanceInfo]) -> AsyncIterator[StoreWatch]:
    async with master.serving() as address, ClientSession() as session:
        watch = StoreWatch([address], index, lambda: users)
        task = asyncio.create_task(watch.run(session))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_what_is_written_while_the_keys_are_listed_is_known_afterwards() -> None:
    index, master, user = PrefixIndex(), Master([key("m:", 1)]), user_of_store()
    index.join("a", "one", [RestoreRule(KV, 4, 0)], user.store_blocks)
    store = index.store(user.store_blocks)
    master.during = lambda: index.apply("a", "one", [Stored("store", KV, [hashed(2)])])

    async def story() -> None:
        async with watching(master, index, [user]):
            await until(lambda: store.state is IndexState.EXACT)
            assert store.of(KV) == {hashed(1), hashed(2)}, "it says that it is exact"

    asyncio.run(story())


def test_what_was_evicted_while_nobody_was_registered_is_not_known_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_hier.service.store_watch._EVERY_S", 0.02)
    index, master, users = PrefixIndex(), Master([key("m:", 1)]), [user_of_store()]
    store = index.store(users[0].store_blocks)

    async def story() -> None:
        async with watching(master, index, users) as watch:
            await until(lambda: store.state is IndexState.EXACT)
            user = users.pop()
            master.keys, master.evicted = [], 1
            await until(lambda: 1.0 in watch._losses.values())
            await asyncio.sleep(0.05)
            users.append(user)
            await asyncio.sleep(0.05)
            assert store.state is not IndexState.EXACT or not store.of(KV)

    asyncio.run(story())


# ------------------------------------------------------------------------------------------- the registry


class Gateway:
    """What stands at the address of etcd; `answer` is the body of whatever it says, but for its version."""

    def __init__(self, answer: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say({"etcdserver": "3.5.0", "etcdcluster": "3.5.0"})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._say(answer)

            def _say(self, what: Any) -> None:
                body = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "not now",
        {"ID": "1", "kvs": [{"key": _base64(b"XLLM:\xff"), "value": ""}]},
        {"ID": "1", "kvs": [7]},
    ],
)
def test_whatever_is_answered_instead_of_etcd_the_registration_goes_on(answer: Any) -> None:
    with Gateway(answer) as gateway:
        membership = Membership(Etcd(gateway.address), 1, {"XLLM:DEFAULT:a": b"1"})
        membership.start()
        try:
            wait_for(lambda: membership.why != "not tried yet" or not membership._thread.is_alive())
            assert membership._thread.is_alive()
        finally:
            membership.stop()


class StalledReads:
    """An etcd that renews leases at once, and cannot read; `renewed` are the times of a clock that only its calls and
    the pauses between rounds turn, for five seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.renewed: list[float] = []

    def grant(self, ttl_s: int) -> int:
        return 1

    def keep_alive(self, lease: int) -> bool:
        self.renewed.append(self.now)
        return True

    def read(self, prefix: str = "") -> dict[str, bytes]:
        self.now += 0.8  # its limit, as of a call
        raise RegistryError("too slow")

    def revoke(self, lease: int) -> None: ...
    def close(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """The pause of a membership; True: it is to stop."""
        self.now += timeout_s
        return self.now >= 5.0


def test_a_lease_is_renewed_in_time_also_when_keys_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = StalledReads()
    monkeypatch.setattr("xllm_hier.registry.time", SimpleNamespace(monotonic=lambda: etcd.now))
    membership = Membership(etcd, 1, {"XLLM:DEFAULT:a": b"1"})  # type: ignore[arg-type]
    membership._stop = etcd  # type: ignore[assignment]
    membership._run()
    pauses = [after - before for before, after in zip(etcd.renewed, etcd.renewed[1:], strict=False)]
    assert len(pauses) > 3 and max(pauses) < 1.0, pauses


def test_an_entry_that_is_nested_without_end_is_left_out_and_the_others_are_read() -> None:
    good = user_of_store()
    assert instances_of({"XLLM:DEFAULT:x": b"[" * 100_000, good.key: good.to_json()}) == {good.name: good}


# ---------------------------------------------------------------------------------------- the instance's API


def test_an_id_that_is_in_use_is_refused_and_the_first_request_with_it_goes_on(tmp_path: Path) -> None:
    """The service's ids are its own, but whoever reaches an instance can say one."""

    async def story() -> list[int]:
        async with await EngineClient.connect(engine.address, 5.0) as client:
            first = client.generate(AddRequest("same", ints([5, 6]), SamplingSpec(), 3))
            got = [*(await anext(first)).token_ids]
            engine.allowance = 100
            with pytest.raises(RequestError, match="in use"):
                async for _ in client.generate(AddRequest("same", ints([5, 6]), SamplingSpec(), 3)):
                    pass
            async with asyncio.timeout(30):
                return got + [token async for output in first for token in output.token_ids]

    with ScriptedEngine(tmp_path) as engine:
        engine.allowance = 1
        assert asyncio.run(story()) == [1, 2, 3]


@pytest.mark.parametrize("key", ["line\nend", " led ", "schlüssel", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str) -> None:
    for make in (lambda: ServiceConfig(etcd_addr="a:1", api_key=key), lambda: EngineConfig(api_key=key)):
        with pytest.raises(ConfigError, match="api_key") as caught:
            make()
        assert key not in str(caught.value)


def test_an_answer_that_does_not_come_is_an_error_of_its_own_and_tried_once() -> None:
    async def story() -> None:
        async with StandIn().serving() as one, StandIn().serving() as other, service(answer_timeout_s=1.0) as cluster:
            cluster.registered(found(one.info(), other.info()))
            with pytest.raises(Refusal, match="nothing of an answer") as caught:
                await ask(cluster)
            assert caught.value.status == 504 and one.asked + other.asked == 1

    asyncio.run(story())
