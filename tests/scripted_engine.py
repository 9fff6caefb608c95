"""An engine that follows a script: it speaks the wire protocol from a thread, so that the API can be tested alone.

The script decides what a request gets: a list of `RequestOutput`s (one message each), without any model. `allowance` is
how many more outputs may leave; `die` closes the socket as a dead process would. `RunningApi` is the API over it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from xllm_hier.api.server import serve_api
from xllm_hier.calls import Call, CallResult, ClearCache, Cleared, Done, Drain, GetInfo, GetStats
from xllm_hier.config import EngineConfig
from xllm_hier.figures import EngineInfo, EngineStats, WorkerStats
from xllm_hier.request_messages import AbortRequest, AddRequest, PromptUsage, RequestOutput, StepOutputs, TokenLogprob
from xllm_hier.wire import open_socket, pack, unpack

Script = Callable[[AddRequest], Iterable[RequestOutput]]


def usage_of(request: AddRequest) -> PromptUsage:
    """A made-up split: one token from each tier where there are enough, the rest computed."""
    num = len(request.token_ids)
    cached = min(3, num - 1)
    return PromptUsage(int(cached > 0), int(cached > 1), int(cached > 2), num - cached)


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """A made-up entry: the token first, with -0.5, then its neighbours."""
    ids = [max(0, token_id - i) for i in range(num_top)]
    return TokenLogprob(token_id, -0.5, 1, ids, [-0.5 - i for i in range(num_top)])


def say(token_ids: Iterable[int], finish_reason: str = "length") -> Script:
    """A script that gives these tokens, at most `max_tokens`, one output each."""
    spoken = list(token_ids)

    def script(request: AddRequest) -> Iterable[RequestOutput]:
        tokens = spoken[: request.max_tokens]
        reason = finish_reason if len(tokens) == len(spoken) else "length"
        top, prompt_top = request.sampling.num_logprobs, request.prompt_logprobs
        for place, token_id in enumerate(tokens):
            output = RequestOutput(request.request_id, [token_id])
            if top is not None:
                output = replace(output, logprobs=[logprob_of(token_id, top)])
            if place == 0:
                output = replace(output, usage=usage_of(request))
                if prompt_top is not None:
                    rest = [logprob_of(int(i), prompt_top) for i in request.token_ids[1:]]
                    output = replace(output, prompt_logprobs=[None, *rest])
            if place == len(tokens) - 1:
                output = replace(output, finish_reason=reason)
            yield output

    return script


def fail(text: str, status: int, after: Iterable[int] = ()) -> Script:
    """A script that gives some tokens and then an error."""

    def script(request: AddRequest) -> Iterable[RequestOutput]:
        for token_id in after:
            yield RequestOutput(request.request_id, [token_id])
        yield RequestOutput(request.request_id, [], finish_reason="error", error=text, error_status=status)

    return script


class ScriptedEngine:
    """Binds an ipc address in `folder` and serves one client from a thread of its own."""

    def __init__(self, folder: Path, **info: Any) -> None:
        self.address = f"ipc://{folder}/engine"
        self.script: Script = say([1, 2, 3])
        self.allowance = float("inf")
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.calls: list[Call] = []
        self.mute = False  # calls get no answer
        self.hold_drain = False  # `drain` is answered when nothing is pending
        self._held: list[Call] = []
        self.refuse_calls = ""
        self.stats = EngineStats(workers=WorkerStats(store_state="attached"))
        self.info = EngineInfo(
            **{
                "model": "scripted",
                "model_id": "scripted",
                "max_model_len": 64,
                "vocab_size": 512,
                "eos_token_ids": [0],
                "block_size": 4,
                "num_device_blocks": 8,
                "num_host_blocks": 8,
                "store_state": "attached",
                "version": "0",
            }
            | info
        )
        self._pending: list[RequestOutput] = []
        self._end = threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="scripted-engine")
        self._thread.start()

    def _run(self) -> None:
        socket = open_socket(self._context, self.address, bind=True)
        try:
            while not self._end.is_set():
                if socket.poll(5):
                    self._take(socket, unpack(socket.recv()))
                while self.allowance > 0 and self._pending:
                    self.allowance -= 1
                    socket.send(pack(StepOutputs([self._pending.pop(0)])))
                while self._held and not self._pending:
                    self._answer(socket, self._held.pop())
        finally:
            socket.close(0)

    def _take(self, socket: Any, message: Any) -> None:
        if isinstance(message, AddRequest):
            self.added.append(message)
            self._pending += self.script(message)
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            self._pending = [item for item in self._pending if item.request_id != message.request_id]
        elif isinstance(message, Call):
            self.calls.append(message)
            if self.hold_drain and isinstance(message.question, Drain):
                self._held.append(message)
            elif not self.mute:
                self._answer(socket, message)

    def _answer(self, socket: Any, call: Call) -> None:
        question = call.question
        answers: dict[type, Any] = {GetInfo: self.info, GetStats: self.stats}
        if isinstance(question, ClearCache):
            answers[ClearCache] = Cleared(dict.fromkeys(question.tiers, 0))
        answer = answers.get(type(question), Done())
        socket.send(pack(CallResult(call.call_id, answer, self.refuse_calls or None)))

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        """Wait until `condition` holds. Raises TimeoutError after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.005)

    def die(self) -> None:
        """Close the socket without a word."""
        self._end.set()
        self._thread.join(30)

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()
        self._context.term()


FIRST_BYTE = 8  # id of byte b is FIRST_BYTE + b; below are special tokens, above the merges
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """One token per UTF-8 byte of `text`, none merged."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def make_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a byte-level BPE tokenizer of 266 tokens into `folder`."""
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|4|>", "<|5|>", "<|6|>", "<|7|>"]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {name: i for i, name in enumerate(special)} | {names[byte]: FIRST_BYTE + byte for byte in range(256)}
    vocab |= {"he": 264, "ll": 265}
    backend = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)


class RunningApi:
    """`serve_api` on a free port, in a thread with a loop of its own, over a ScriptedEngine."""

    def __init__(self, engine: ScriptedEngine, folder: Path, **settings: Any) -> None:
        config = EngineConfig(**({"model": str(folder), "port": 0, "drain_timeout_s": 5} | settings))
        self.engine = engine
        self.exit_code: int | None = None
        self._ready = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(config)), name="api")
        self._thread.start()
        if not self._ready.wait(60):
            raise TimeoutError("the API did not come up")

    async def _serve(self, config: EngineConfig) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.exit_code = await serve_api(config, self.engine.address, self._on_ready, self._stop)

    def _on_ready(self, port: int) -> None:
        self._port = port
        self._ready.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def begin_stop(self) -> None:
        """What SIGTERM does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    def wait(self, limit_s: float = 60.0) -> int | None:
        """The exit code, once the API has ended."""
        self._thread.join(limit_s)
        return self.exit_code

    def __enter__(self) -> RunningApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.begin_stop()
        self.wait()
        assert not self._thread.is_alive()
