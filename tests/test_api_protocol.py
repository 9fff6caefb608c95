"""The API's laws over real HTTP: refusals, texts over token borders, disconnects, limits, operation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from scripted_engine import RunningApi, ScriptedEngine, byte_ids, make_tokenizer, say

from xllm_hier.api.app import create_app
from xllm_hier.api.generation import Admission, Choice, Generation, Prompt
from xllm_hier.calls import ClearCache, Drain
from xllm_hier.config import EngineConfig
from xllm_hier.engine_client import EngineClient
from xllm_hier.errors import ConfigError
from xllm_hier.figures import EngineStats, Histogram, TransferFailures, WorkerStats
from xllm_hier.openai.body_limit import MAX_BODY_BYTES
from xllm_hier.openai.output import ChoiceDecoder, Detokenizer, StopFinder
from xllm_hier.openai.refusals import ErrorAnswer, error_body
from xllm_hier.openai.tokenizer import load_tokenizer
from xllm_hier.request_messages import RequestOutput

ROOT = Path(__file__).parent.parent


@pytest.fixture
def engine(tmp_path):
    with ScriptedEngine(tmp_path) as engine:
        yield engine


@pytest.fixture
def api(engine, tmp_path):
    make_tokenizer(tmp_path)
    with RunningApi(engine, tmp_path) as api:
        yield api


@pytest.fixture
def http(api):
    with httpx.Client(base_url=api.url, timeout=60) as http:
        yield http


@pytest.fixture
def tokenizer(tmp_path):
    make_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def complete(http, **body):
    return http.post("/v1/completions", json={"prompt": "a"} | body)


def chat(http, **body):
    return http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]} | body)


def choice_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"colour": "red"}, "colour", "unknown field"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "equals n"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"max_tokens": -1}, "max_tokens", "from 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1 without echo"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "at least one token"),
        ({"prompt": [[5], []]}, "prompt", "at least one token"),
        ({"prompt": [5, 512]}, "prompt", "token id 512"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [5, "a"]}, "prompt", "a text, a list of texts"),
        ({"prompt": [True]}, "prompt", "a text, a list of texts"),
        ({"stop_token_ids": [600]}, "stop_token_ids", "token id 600"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"every": 1}}, "stream_options", "unknown field"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
    ],
)
def test_a_completion_that_cannot_be_served_is_a_400_that_names_the_field(http, engine, body, param, words):
    answer = complete(http, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]
    assert engine.added == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"colour": "red"}, "colour", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", "tool_calls"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "exclude"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    ],
)
def test_a_chat_that_cannot_be_served_is_a_400_that_names_the_field(http, engine, body, param, words):
    answer = chat(http, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert engine.added == []


def test_unsupported_fields_at_their_defaults_and_nulls_are_accepted(http):
    plain = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "u", "temperature": None}
    assert complete(http, **plain, suffix=None, best_of=1, max_tokens=None, stop=None).status_code == 200
    assert chat(http, **plain, tools=[], response_format={"type": "text"}, max_tokens=None).status_code == 200


def test_a_broken_body_is_a_400(http):
    answer = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]
    assert http.post("/v1/completions", json=[1]).status_code == 400
    for text in ('{"prompt": "\\ud800"}', '{"\\ud800": 1}', '{"prompt": NaN}'):
        answer = http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", '"prompt": "a\\ud800"', "prompt"),
        ("completions", '"prompt": ["a", "\\udfff"]', "prompt"),
        ("completions", '"prompt": "a", "model": "\\ud800"', "model"),
        ("completions", '"prompt": "a", "cache_salt": "\\ud800"', "cache_salt"),
        ("completions", '"prompt": "a", "stop": ["x", "\\udc00"]', "stop"),
        ("completions", '"prompt": "a", "user": "\\ud800", "stream": true', "user"),
        ("completions", '"prompt": "a", "\\ud800": 1', "\\ud800"),
        ("chat/completions", '"messages": [{"role": "user", "content": "\\ud800"}]', "messages"),
        ("chat/completions", '"messages": [{"role": "\\ud800", "content": "a"}]', "messages"),
        (
            "chat/completions",
            '"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]',
            "messages",
        ),
        (
            "chat/completions",
            '"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [{"\\ud800": 1}]}',
            "chat_template_kwargs",
        ),
    ],
)
def test_text_that_utf8_cannot_hold_is_a_400_that_names_the_field(http, engine, path, body, param):
    answer = http.post(f"/v1/{path}", content=f"{{{body}}}", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "valid Unicode" in answer.json()["error"]["message"]
    assert engine.added == []


def test_whole_surrogate_pairs_and_deep_nesting_are_no_broken_text(http):
    headers = {"content-type": "application/json"}
    assert http.post("/v1/completions", content='{"prompt": "\\ud83d\\ude00"}', headers=headers).status_code == 200
    deep = '{"prompt": "a", "metadata": ' + '{"a":' * 500 + "1" + "}" * 501
    answer = http.post("/v1/completions", content=deep, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_an_error_body_can_quote_any_text():
    body = json.loads(ErrorAnswer(error_body("no \ud800 é", 400, param="\udfff")).body)["error"]
    assert (body["message"], body["param"]) == ("no \\ud800 é", "\\udfff")
    assert ErrorAnswer({"error": "\ud800"}).body.isascii()


def test_too_many_tokens_are_a_400_with_both_numbers(http, engine):
    for body in ({"prompt": [5] * 64}, {"prompt": [5] * 60, "max_tokens": 5}):
        error = complete(http, **body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "64" in error["message"]
        assert str(len(body["prompt"])) in error["message"]
    assert engine.added == []
    assert complete(http, prompt=[5] * 63, max_tokens=1).status_code == 200


def test_a_body_above_the_limit_is_a_413(http):
    answer = http.post("/v1/completions", json={"prompt": "a" * MAX_BODY_BYTES})
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]["message"]


def test_an_unknown_path_or_method_has_openais_error_body(http):
    assert http.get("/v2").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405


# ------------------------------------------------------------------------------ text over token borders


@pytest.mark.parametrize("text", ["héllo", "世界 🙂", "a\ufffdb", "\ufffd\ufffd", "🙂" * 40])
def test_pieces_add_up_to_the_text_and_hold_no_half_character(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_tokens_that_end_and_begin_characters_at_once_do_not_hold_back_what_is_certain(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in byte_ids("世界")] == ["", "", "世", "", "", "界"]


def test_garbage_bytes_are_shown_after_a_bounded_wait(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(8 + 0xFF) for _ in range(40))
    assert len(text) >= 20
    assert len(text + detokenizer.flush()) == 40


def test_a_cut_character_at_the_end_is_shown_as_replacement(tokenizer):
    detokenizer = Detokenizer(tokenizer, byte_ids("prompt"))
    assert [detokenizer.push(i) for i in byte_ids("世")[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


def test_the_time_per_token_does_not_grow_with_the_output(tokenizer):
    class Counting:
        longest = 0

        def decode(self, ids, *, skip_special_tokens):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    detokenizer = Detokenizer(counting)
    assert "".join(detokenizer.push(i) for i in byte_ids("añ" * 1500)) == "añ" * 1500
    assert counting.longest < 40


def test_a_stop_string_is_found_over_piece_borders_and_never_shown():
    finder = StopFinder(["END", "EXIT"])
    shown = [finder.push(piece) for piece in ("aE", "E", "X", "N", " E", "N", "D more")]
    assert "".join(text for text, _ in shown) == "aEEXN "
    assert [stop for _, stop in shown] == [None] * 6 + ["END"]


def test_of_two_stop_strings_the_first_in_the_text_wins():
    assert StopFinder(["yy", "x"]).push("ax yy") == ("a", "x")
    assert StopFinder(["aab"]).push("aaab") == ("a", "aab")


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end():
    finder = StopFinder(["END"])
    assert finder.push("the EN") == ("the ", None)
    assert finder.flush() == "EN"


def test_a_stop_string_over_token_borders_ends_the_choice_and_aborts_the_engine_once(http, engine):
    engine.script = say(byte_ids("say END now"))
    choice = choice_of(complete(http, stop=["END"], return_token_ids=True))
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("say ", "stop", "END")
    assert choice["token_ids"] == byte_ids("say END")
    assert choice["prompt_token_ids"] == byte_ids("a")
    engine.wait_for(lambda: engine.aborted, "abort")
    assert engine.aborted == [engine.added[0].request_id]


def test_a_stream_holds_back_what_may_become_a_stop_string(http, engine):
    engine.script = say(byte_ids("aENbEND"))
    chunks = events(complete(http, stop="END", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "", "", "ENb", "", "", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_min_tokens_come_before_any_stop_string_counts(http, engine):
    engine.script = say(byte_ids("abab"))
    assert choice_of(complete(http, stop="b", min_tokens=2))["text"] == "aba"


def test_the_token_that_ends_a_text_is_counted_and_not_shown(http, engine):
    engine.script = say([*byte_ids("hi"), 0], "stop")
    answer = complete(http, skip_special_tokens=False, return_token_ids=True)
    assert choice_of(answer)["text"] == "hi"
    assert choice_of(answer)["token_ids"] == [*byte_ids("hi"), 0]
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_special_tokens_are_shown_when_asked_for(http, engine):
    engine.script = say([4, *byte_ids("x")])
    assert choice_of(complete(http))["text"] == "x"
    assert choice_of(complete(http, skip_special_tokens=False))["text"] == "<|4|>x"


def events(answer):
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# -------------------------------------------------------------------------------------- echo and logprobs


def test_echo_shows_the_prompt_first_as_text_and_as_ids(http, engine):
    engine.script = say(byte_ids("b"))
    assert choice_of(complete(http, echo=True))["text"] == "ab"
    assert choice_of(complete(http, echo=True, prompt=byte_ids("é")))["text"] == "éb"
    chunks = events(complete(http, echo=True, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab"]


def test_echo_with_logprobs_scores_the_prompt_from_its_second_token_on(http, engine):
    engine.script = say(byte_ids("é"))
    answer = complete(http, prompt="xy", echo=True, logprobs=1)
    found = choice_of(answer)["logprobs"]
    assert engine.added[0].prompt_logprobs == 1
    assert found["tokens"] == ["x", "y", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 2, 2]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"y": -0.5}


def test_echo_of_no_new_token_drops_the_one_the_engine_computes(http, engine):
    engine.script = say(byte_ids("zz"))
    answer = complete(http, prompt="xy", echo=True, logprobs=0, max_tokens=0)
    choice = choice_of(answer)
    assert engine.added[0].max_tokens == 1
    assert (choice["text"], choice["finish_reason"]) == ("xy", "length")
    assert choice["logprobs"]["tokens"] == ["x", "y"]
    assert answer.json()["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_maps_from_ids(http, engine):
    choice = choice_of(complete(http, prompt=[9, 10], prompt_logprobs=2))
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["10"] == {"logprob": -0.5, "rank": 1, "decoded_token": "\x02"}
    assert set(choice["prompt_logprobs"][1]) == {"10", "9"}


def test_vllms_extra_fields_reach_the_engine(http, engine):
    extra = {"cache_salt": "mine", "ignore_eos": True, "top_k": 5, "min_p": 0.1, "priority": 3, "min_tokens": 2}
    assert complete(http, **extra, stop_token_ids=[7], seed=-1).status_code == 200
    added = engine.added[0]
    assert (added.cache_salt, added.ignore_eos, added.priority, added.min_tokens) == ("mine", True, 3, 2)
    assert (added.sampling.top_k, added.sampling.min_p, added.stop_token_ids) == (5, 0.1, [7])
    assert 0 <= added.sampling.seed < 1 << 63


def test_several_tokens_in_one_output_are_one_chunk_each(http, engine):
    engine.script = lambda item: [RequestOutput(item.request_id, byte_ids("abc"), finish_reason="length")]
    assert [chunk["choices"][0]["text"] for chunk in events(complete(http, stream=True))] == ["a", "b", "c"]


# ------------------------------------------------------------------------------------------ no tokenizer


def test_a_folder_without_a_tokenizer_serves_token_ids_only(engine, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    with RunningApi(engine, folder) as api, httpx.Client(base_url=api.url, timeout=60) as http:
        choice = choice_of(complete(http, prompt=[5, 6], return_token_ids=True, logprobs=0, echo=True))
        assert (choice["text"], choice["token_ids"]) == ("", [1, 2, 3])
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (5, 6, 1, 2, 3)]
        assert "token ids" in complete(http).json()["error"]["message"]
        assert complete(http, prompt=[5], stop="x").json()["error"]["param"] == "stop"
        assert chat(http).status_code == 400


def test_a_tokenizer_without_template_refuses_chats_and_says_so(engine, tmp_path):
    make_tokenizer(tmp_path, chat_template=None)
    with RunningApi(engine, tmp_path) as api, httpx.Client(base_url=api.url, timeout=60) as http:
        assert "no chat template" in chat(http).json()["error"]["message"]
        assert complete(http).status_code == 200


def test_a_template_that_refuses_is_a_400_with_its_words(engine, tmp_path):
    make_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with RunningApi(engine, tmp_path) as api, httpx.Client(base_url=api.url, timeout=60) as http:
        answer = chat(http)
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]


def test_a_broken_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


# ------------------------------------------------------------------------------- disconnects and limits


def hang_up(api, path, body, num_requests, *, in_answer=False):
    """Ask, and hang up once the engine has all of it, or once the answer has begun."""
    content, wanted = json.dumps(body).encode(), len(api.engine.added) + num_requests
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", api._port), 60) as client:
        client.sendall(head.encode() + content)
        api.engine.wait_for(lambda: len(api.engine.added) == wanted, "requests")
        if in_answer:
            assert client.recv(1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_aborts_all_its_requests_exactly_once(api, engine, stream):
    engine.allowance = 1 if stream else 0
    hang_up(api, "/v1/completions", {"prompt": "a", "n": 3, "stream": stream}, 3, in_answer=stream)
    engine.wait_for(lambda: len(engine.aborted) >= 3, "aborts")
    time.sleep(0.05)
    assert sorted(engine.aborted) == sorted(item.request_id for item in engine.added)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_that_leaves_a_stream_is_no_error(engine, tmp_path, caplog, path):
    """Clients may leave at any time: one line in the access log at most."""
    make_tokenizer(tmp_path)
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    with RunningApi(engine, tmp_path) as api:
        for allowance in (0, 2):  # before the response starts, and after
            engine.allowance, before = allowance, len(engine.added)
            hang_up(api, f"/v1/{path}", body | {"stream": True}, 1, in_answer=bool(allowance))
            engine.wait_for(lambda before=before: len(engine.aborted) > before, "abort")
    assert engine.aborted == [item.request_id for item in engine.added]
    assert len(engine.aborted) == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_stream_whose_client_goes_before_the_first_token_is_aborted(api, engine):
    engine.allowance = 0
    hang_up(api, "/v1/completions", {"prompt": "a", "stream": True}, 1)
    engine.wait_for(lambda: engine.aborted, "abort")
    assert len(engine.aborted) == 1


def test_open_requests_beyond_the_limit_are_a_429_until_some_end(engine, tmp_path):
    engine.allowance = 0
    make_tokenizer(tmp_path)
    with (
        RunningApi(engine, tmp_path, max_waiting_requests=2) as api,
        httpx.Client(base_url=api.url, timeout=60) as http,
    ):
        waiting = threading.Thread(target=complete, args=(http,), kwargs={"n": 2})
        waiting.start()
        try:
            engine.wait_for(lambda: len(engine.added) == 2, "requests")
            refused = complete(http)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert complete(http, stream=True).status_code == 429
        finally:
            engine.allowance = float("inf")
            waiting.join(60)
        assert complete(http).status_code == 200


def test_places_are_given_back_after_the_aborts_are_sent():
    """Else the request that takes such a place reaches the engine before the abort, and is refused there."""
    admission = Admission(2)
    open_at_abort = []

    class Client:
        async def generate(self, request):
            try:
                await asyncio.Event().wait()
                yield
            finally:
                open_at_abort.append(admission.num_open)

    async def work():
        prompt = Prompt(None, [5])
        choices = [Choice(i, prompt, None, ChoiceDecoder(None, [5])) for i in range(2)]
        async with Generation(Client(), admission, choices, SimpleNamespace(ended=lambda reason: None)):
            await asyncio.sleep(0)

    asyncio.run(work())
    assert open_at_abort == [2, 2]
    assert admission.num_open == 0


# --------------------------------------------------------------------------------------------- operation


def test_the_engines_end_answers_open_requests_with_503_and_ends_the_api_with_1(api, engine):
    engine.allowance = 0
    answers = []
    with httpx.Client(base_url=api.url, timeout=60) as http:
        waiting = threading.Thread(target=lambda: answers.append(complete(http)))
        waiting.start()
        engine.wait_for(lambda: engine.added, "request")
        start = time.monotonic()
        engine.die()
        waiting.join(60)
        assert api.wait() == 1
    assert time.monotonic() - start < 2.5
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["type"] == "server_error"


def test_a_stop_lets_open_requests_end_and_refuses_new_ones(api, engine):
    engine.allowance = 0
    answers = []
    with httpx.Client(base_url=api.url, timeout=60) as http, httpx.Client(base_url=api.url, timeout=60) as other:
        assert other.get("/health").status_code == 200  # a connection that is open before the stop
        waiting = threading.Thread(target=lambda: answers.append(complete(http)))
        waiting.start()
        engine.wait_for(lambda: engine.added, "request")
        engine.hold_drain = True
        api.begin_stop()
        engine.wait_for(lambda: any(isinstance(call.question, Drain) for call in engine.calls), "drain")
        assert complete(other).status_code == 503
        assert other.get("/health").json()["status"] == "draining"
        engine.allowance = float("inf")
        waiting.join(60)
    assert answers[0].status_code == 200
    assert api.wait() == 0


def test_health_tells_the_store_and_whether_the_engine_answers(api, http, engine):
    assert http.get("/health").json()["status"] == "ok"
    engine.stats = EngineStats(workers=WorkerStats(store_state="degraded"), running=2)
    time.sleep(0.25)  # stats are kept for a moment
    found = http.get("/health")
    assert (found.status_code, found.json()["status"], found.json()["running"]) == (200, "degraded", 2)
    engine.mute = True
    time.sleep(0.25)
    assert http.get("/health").json()["engine_answers"] is False
    engine.mute = False


def test_metrics_show_the_engines_figures_and_the_apis_own(http, engine):
    engine.stats = EngineStats(
        workers=WorkerStats(
            transfer_bytes={"h2d": 4096},
            transfer_seconds={"h2d": Histogram([(0.1, 1), (1, 3)], 1.5, 4)},
            transfer_failures=[TransferFailures("g2h", "checksum", 2)],
            store_state="degraded",
        ),
        blocks={"device": {"KV": {"free": 5, "pinned": 2, "evictable": 1}}},
        prefix_tokens={"device": 10, "host": 20, "store": 30, "computed": 40},
        running=1,
        waiting=2,
        preemptions=3,
    )
    assert complete(http, max_tokens=2).status_code == 200
    lines = http.get("/metrics").text.splitlines()
    for line in (
        'xllm_prefix_tokens_total{tier="store"} 30.0',
        'xllm_blocks{state="pinned",tier="device",type="KV"} 2.0',
        'xllm_transfer_bytes_total{kind="h2d"} 4096.0',
        'xllm_transfer_seconds_bucket{kind="h2d",le="0.1"} 1.0',
        'xllm_transfer_seconds_bucket{kind="h2d",le="+Inf"} 4.0',
        'xllm_transfer_failures_total{cause="checksum",kind="g2h"} 2.0',
        'xllm_store_state{state="degraded"} 1.0',
        'xllm_store_state{state="attached"} 0.0',
        "xllm_requests_waiting 2.0",
        "xllm_preemptions_total 3.0",
        "vllm:prefix_cache_queries_total 100.0",
        "vllm:prefix_cache_hits_total 60.0",
        "vllm:num_requests_running 1.0",
        "vllm:prompt_tokens_total 100.0",
        "xllm_time_to_first_token_seconds_count 1.0",
        "vllm:time_to_first_token_seconds_count 1.0",
        "xllm_inter_token_seconds_count 1.0",
        'xllm_requests_total{finish_reason="length"} 1.0',
    ):
        assert line in lines, line


def test_metrics_of_a_silent_engine_are_the_last_known(http, engine):
    engine.stats = EngineStats(preemptions=3)
    assert "xllm_preemptions_total 3.0" in http.get("/metrics").text
    engine.mute = True
    time.sleep(0.25)
    assert "xllm_preemptions_total 3.0" in http.get("/metrics").text
    engine.mute = False


def test_the_cache_routes_reach_the_engine(http, engine):
    times = Histogram([(0.5, 1), (float("inf"), 2)], 1.0, 2)
    failures = [TransferFailures("h2d", "copy", 3)]
    engine.stats = EngineStats(workers=WorkerStats({"h2d": 1}, {"h2d": times}, failures, {"hit_blocks": 5}), steps=7)
    assert http.post("/cache/clear", json={"tiers": ["host", "store"]}).json() == {"cleared": {"host": 0, "store": 0}}
    assert engine.calls[-1].question == ClearCache(["host", "store"])
    expected = {
        "transfer_bytes": {"h2d": 1},
        "transfer_seconds": {"h2d": {"buckets": [[0.5, 1], ["+Inf", 2]], "sum": 1.0, "count": 2}},
        "transfer_failures": [["h2d", "copy", 3]],
        "store": {"hit_blocks": 5},
        "store_state": "detached",
        "store_refused": "",
        "steps": 7,
    }
    found = http.get("/cache/stats").json()
    assert {name: found.get(name) for name in expected} == expected and "workers" not in found and "pd" not in found
    assert http.post("/cache/clear", json={"tiers": ["moon"]}).status_code == 400
    assert http.post("/cache/clear", json={"tiers": []}).status_code == 400


@pytest.mark.parametrize(
    ("token", "peer", "header", "status"),
    [
        ("", "127.0.0.1", None, 200),
        ("", "::1", None, 200),
        ("", "::ffff:127.0.0.1", None, 200),
        ("", "10.0.0.9", None, 403),
        ("", "10.0.0.9", "Bearer ", 403),
        ("secret", "10.0.0.9", "Bearer secret", 200),
        ("secret", "127.0.0.1", None, 401),
        ("secret", "127.0.0.1", "Bearer secre", 401),
    ],
)
def test_the_cache_routes_answer_to_the_token_or_to_loopback(engine, tmp_path, token, peer, header, status):
    async def work():
        async with await EngineClient.connect(engine.address, 30) as client:
            app = create_app(client, None, EngineConfig(model=str(tmp_path), admin_token=token))
            transport = httpx.ASGITransport(app, client=(peer, 1))
            headers = {"authorization": header} if header else {}
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
                return await http.get("/cache/stats"), await http.get("/v1/models")

    stats, models = asyncio.run(asyncio.wait_for(work(), 60))
    assert stats.status_code == status
    assert models.status_code == 200


def test_sigterm_ends_the_process_with_0_without_torch_ever_loaded(engine, tmp_path):
    make_tokenizer(tmp_path)
    program = (
        "import asyncio, sys\n"
        "from xllm_hier.api.server import serve_api\n"
        "from xllm_hier.config import EngineConfig\n"
        "config = EngineConfig(model=sys.argv[1], port=0)\n"
        "code = asyncio.run(serve_api(config, sys.argv[2], lambda port: print(port, flush=True)))\n"
        "print('torch' in sys.modules, flush=True)\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), engine.address]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            port = int(process.stdout.readline())
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                assert chat(http).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "False\n"
            assert process.wait(60) == 0
        finally:
            process.kill()
