"""The engine client's laws, and the API as the official OpenAI client and `LLM` see it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import aclosing

import openai
import pytest
from scripted_engine import RunningApi, ScriptedEngine, byte_ids, fail, make_tokenizer, say

from xllm_hier.calls import ClearCache, Cleared, Drain, GetStats
from xllm_hier.engine_client import EngineClient
from xllm_hier.errors import EngineDeadError, RequestError, StartupError
from xllm_hier.ints import ints
from xllm_hier.openai.listening import listen
from xllm_hier.request_messages import AddRequest, SamplingSpec


@pytest.fixture
def engine(tmp_path):
    with ScriptedEngine(tmp_path) as engine:
        yield engine


@pytest.fixture
def client(engine, tmp_path):
    make_tokenizer(tmp_path)
    with (
        RunningApi(engine, tmp_path) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def request(name="r", max_tokens=8):
    return AddRequest(name, ints([5, 6]), SamplingSpec(), max_tokens)


# ------------------------------------------------------------------------------------------ EngineClient


def test_outputs_come_in_order_and_end_with_the_finish_reason(engine):
    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            assert client.info.model == "scripted"
            return [output async for output in client.generate(request())]

    outputs = run(work())
    assert [output.token_ids for output in outputs] == [[1], [2], [3]]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert engine.aborted == []


def test_requests_side_by_side_get_their_own_outputs(engine):
    engine.script = lambda item: say([int(item.request_id)] * 3)(item)

    async def one(client, name):
        return [output.token_ids[0] async for output in client.generate(request(name))]

    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            return await asyncio.gather(*(one(client, str(i)) for i in range(5)))

    assert run(work()) == [[i] * 3 for i in range(5)]


def test_a_generator_closed_before_its_end_aborts_exactly_once(engine):
    engine.allowance = 1

    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            async with aclosing(client.generate(request("gone"))) as outputs:
                await anext(outputs)
            assert client.num_open == 0
            await client.call(GetStats(), 30)  # answered after the abort was read

    run(work())
    assert engine.aborted == ["gone"]


def test_a_cancelled_task_aborts_exactly_once(engine):
    engine.allowance = 0

    async def drink(client):
        async for _ in client.generate(request("cancelled")):
            pass

    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            task = asyncio.create_task(drink(client))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.call(GetStats(), 30)

    run(work())
    assert engine.aborted == ["cancelled"]


def test_a_refused_call_is_a_request_error(engine):
    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            engine.refuse_calls = "not now"
            with pytest.raises(RequestError, match="not now"):
                await client.call(Drain(), 30)

    run(work())


def test_a_call_without_an_answer_ends_at_its_limit(engine):
    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            engine.mute = True
            with pytest.raises(TimeoutError):
                await client.call(GetStats(), 0.1)
            engine.mute = False
            assert await client.call(ClearCache(["host"]), 30) == Cleared({"host": 0})

    run(work())


def test_nobody_at_the_address_is_a_startup_error(tmp_path):
    with pytest.raises(StartupError, match=r"did not answer within 0\.2 s"):
        run(EngineClient.connect(f"ipc://{tmp_path}/nobody", 0.2))


def test_the_engines_end_fails_what_is_open_within_a_second_and_what_comes_at_once(engine):
    engine.allowance = 1

    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            outputs = client.generate(request())
            first = await anext(outputs)
            engine.mute = True
            waiting = asyncio.create_task(client.call(GetStats(), 60))
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await asyncio.to_thread(engine.die)
            with pytest.raises(EngineDeadError):
                await anext(outputs)
            with pytest.raises(EngineDeadError):
                await waiting
            assert time.monotonic() - start < 1
            assert client.dead.is_set()
            with pytest.raises(EngineDeadError):
                await client.call(GetStats(), 60)
            with pytest.raises(EngineDeadError):
                await anext(client.generate(request("late")))
            return first

    assert run(work()).token_ids == [1]


# --------------------------------------------------------------------------------------- OpenAI's client


def test_a_completion_has_text_usage_and_finish_reason(engine, client):
    engine.script = say(byte_ids("world"))
    answer = client.completions.create(model="scripted", prompt="hello", max_tokens=16, temperature=0)
    assert answer.choices[0].text == "world"
    assert answer.choices[0].finish_reason == "length"
    assert engine.added[0].token_ids.tolist() == [264, 265, *byte_ids("o")]
    assert engine.added[0].sampling.temperature == 0
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.prompt_tokens_details.cached_tokens_by_tier == {"device": 1, "host": 1, "store": 0}


def test_a_stream_has_one_chunk_per_token_and_the_usage_last(engine, client):
    engine.script = say(byte_ids("abc"))
    stream = client.completions.create(
        model="scripted", prompt=[9, 10], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["a", "b", "c"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_chat_goes_through_the_models_template_and_may_fill_its_context(engine, client):
    engine.script = say([*byte_ids("Hi!"), 0], "stop")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "x"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == "Hi!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    added = engine.added[0]
    assert added.token_ids.tolist() == [3, *byte_ids("be"), 1, *byte_ids("h\nx"), 2]
    assert added.max_tokens == 64 - len(added.token_ids)
    assert added.eos_token_ids == [0]


def test_a_streamed_chat_begins_with_the_role(engine, client):
    engine.script = say(byte_ids("yes"))
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(client.chat.completions.create(model="scripted", messages=messages, max_tokens=9, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "y", "e", "s"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs_have_tokens_bytes_and_the_top(engine, client):
    engine.script = say(byte_ids("é"))
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="scripted", messages=messages, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "é"
    assert [entry.token for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [entry.bytes for entry in entries] == [[0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2]
    assert entries[0].logprob == -0.5


def test_n_choices_of_several_prompts_are_numbered_and_drawn_with_growing_seeds(engine, client):
    engine.script = lambda item: say([item.token_ids[0]])(item)
    answer = client.completions.create(model="scripted", prompt=[[9, 9], [10]], n=2, seed=7, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["\x01", "\x01", "\x02", "\x02"]
    assert sorted(item.sampling.seed for item in engine.added) == [7, 7, 8, 8]
    assert len({item.request_id for item in engine.added}) == 4
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 4


def test_unseeded_choices_differ_in_their_seeds(engine, client):
    client.completions.create(model="scripted", prompt="a", n=4, max_tokens=1)
    assert len({item.sampling.seed for item in engine.added}) == 4


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-17", prompt="a")
    assert caught.value.code == "model_not_found"


def test_an_error_of_the_engine_keeps_its_status(engine, client):
    engine.script = fail("no block can hold this", 400)
    with pytest.raises(openai.BadRequestError, match="no block can hold this"):
        client.completions.create(model="scripted", prompt="a")


def test_an_error_after_the_stream_began_is_an_error_chunk(engine, client):
    engine.script = fail("lost a worker", 503, after=byte_ids("ab"))
    seen = []
    with pytest.raises(openai.APIError, match="lost a worker"):
        seen.extend(
            chunk.choices[0].text for chunk in client.completions.create(model="scripted", prompt="a", stream=True)
        )
    engine.script = fail("refused", 400)
    with pytest.raises(openai.BadRequestError, match="refused"):  # before the first token it is an HTTP error
        client.completions.create(model="scripted", prompt="a", stream=True)


def test_the_models_list_tells_the_limit(client):
    listed = client.models.list().data
    assert [(item.id, item.max_model_len) for item in listed] == [("scripted", 64)]
    assert client.models.retrieve("scripted").id == "scripted"


# ------------------------------------------------------------------------------------------------- LLM


@pytest.fixture
def start_llm(engine, tmp_path, monkeypatch):
    class Instance:
        engine_address = engine.address

        def __init__(self, config, api):
            assert not api

        def start(self):
            pass

        def poll(self):
            pass

        def stop(self):
            pass

    from xllm_hier import llm

    monkeypatch.setattr(llm, "Instance", Instance)
    make_tokenizer(tmp_path)
    return lambda **settings: llm.LLM(str(tmp_path), **settings)


@pytest.fixture
def llm(start_llm):
    with start_llm() as started:
        yield started


def test_llm_answers_in_the_order_of_its_prompts(engine, llm):
    from xllm_hier.llm import SamplingParams

    engine.script = lambda item: say([int(item.token_ids[0]), *byte_ids("!.")])(item)
    params = SamplingParams(n=2, temperature=0, stop="!", logprobs=1)
    answers = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [[output.text for output in answer.outputs] for answer in answers] == [["a", "a"], ["b", "b"]]
    assert {output.finish_reason for answer in answers for output in answer.outputs} == {"stop"}
    assert answers[0].outputs[0].token_ids == byte_ids("a!")
    assert [item.token_id for item in answers[0].outputs[0].logprobs] == byte_ids("a!")
    assert answers[0].usage.computed == 1
    assert llm.chat([{"role": "user", "content": "q"}], use_tqdm=False)[0].prompt_token_ids == [1, *byte_ids("q"), 2]


def test_llm_refuses_a_bad_prompt_before_anything_starts(engine, llm):
    with pytest.raises(RequestError, match="token id 900"):
        llm.generate([[1, 2], [900]], use_tqdm=False)
    assert engine.added == []
    assert llm.clear_cache(["host"]) == {"cleared": {"host": 0}}


def test_llm_keeps_to_the_engines_limit_of_open_requests_in_all_its_calls_together(engine, start_llm):
    engine.allowance = 0
    answers = []
    with start_llm(max_waiting_requests=2) as llm:
        both = threading.Barrier(2)

        def generate(first):
            both.wait(30)
            answers.append(llm.generate([[first + i] for i in range(6)], use_tqdm=False))

        calls = [threading.Thread(target=generate, args=(first,)) for first in (5, 25)]
        for call in calls:
            call.start()
        engine.wait_for(lambda: len(engine.added) >= 2, "requests")
        time.sleep(0.3)
        open_at_once = len(engine.added)
        engine.allowance = float("inf")
        for call in calls:
            call.join(60)
    assert open_at_once == 2
    assert [len(answer) for answer in answers] == [6, 6]
    firsts = [int(item.token_ids[0]) for item in engine.added]
    assert abs(sum(first < 25 for first in firsts[:6]) - 3) <= 2  # neither call waits for the whole of the other


def test_llm_asks_again_when_the_engine_has_no_place(engine, start_llm):
    refused = []

    def script(item):
        if refused.count(item.request_id) < 2:
            refused.append(item.request_id)
            return fail("too many are open", 429)(item)
        return say(byte_ids("ok"))(item)

    engine.script = script
    with start_llm() as llm:
        answers = llm.generate(["a", "b", "c"], use_tqdm=False)
    assert [answer.outputs[0].text for answer in answers] == ["ok"] * 3
    assert len(refused) == 6


def test_llm_does_not_ask_forever(engine, start_llm, monkeypatch):
    monkeypatch.setattr("xllm_hier.llm._RETRY_S", 0.5)
    engine.script = fail("too many are open", 429)
    with start_llm() as llm, pytest.raises(RequestError, match="too many are open"):
        llm.generate(["a", "b"], use_tqdm=False)
    assert 4 <= len(engine.added) <= 20


def test_answers_do_not_wait_for_the_peers_acknowledgement():
    """40 ms each without TCP_NODELAY, which asyncio sets only on sockets that name their protocol."""

    async def work():
        with listen("127.0.0.1", 0) as listener:
            accepted = asyncio.get_running_loop().create_future()

            class Peer(asyncio.Protocol):
                def connection_made(self, transport):
                    found = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    accepted.set_result(found)
                    transport.close()

            server = await asyncio.get_running_loop().create_server(Peer, sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                nodelay = await accepted
                writer.close()
                await writer.wait_closed()
            return nodelay

    assert run(work()) == 1
