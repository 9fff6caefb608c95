"""Offline inference: `LLM` starts an instance without HTTP and speaks to its engine from this process.

with LLM("/models/SmolLM2-135M-Instruct", host_blocks_factor=4.0) as llm:
    for answer in llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32)):
        print(answer.outputs[0].text, answer.usage)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from .calls import ClearCache, GetStats
from .config import EngineConfig
from .engine_client import EngineClient
from .errors import ConfigError, EngineDeadError, RequestError
from .launch import Instance
from .openai.output import ChoiceDecoder, TokenEvent, decode_choice
from .openai.sampling import SamplingParams, ServedModel, build_requests
from .openai.tokenizer import Tokenizer, load_tokenizer
from .request_messages import AddRequest, PromptUsage, TokenLogprob
from .wire import Deadline

__all__ = ["LLM", "GenerationOutput", "SamplingParams", "TextOutput"]

T = TypeVar("T")
_CALL_S = 60.0
_MAX_OPEN = 512  # engine requests at once; more would only wait inside the engine
_RETRY_S = 30.0  # for an engine whose limit is taken up, for instance by requests that were just aborted
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_START_TOLERANCE_S = 30.0
_WATCH_S = 0.5


@dataclass
class TextOutput:
    """One answer to one prompt. `logprobs` has an entry per token when `SamplingParams.logprobs` asks for them."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: TokenEvent) -> None:
        """Append the parts of `event` other than its text."""
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            if self.logprobs is not None and event.logprob is not None:
                self.logprobs.append(event.logprob)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


@dataclass
class GenerationOutput:
    """All answers to one prompt, and which tier paid for each of its tokens (of the first answer)."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[TextOutput]
    usage: PromptUsage | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class LLM:
    """One instance of the engine, owned by this object: `close` it, or use it as a context manager.

    `settings` are those of EngineConfig. Calls are safe from several threads.

    Raises:
        ConfigError: a setting cannot be used, or a file of the model folder is missing.
        StartupError: a process of the instance did not come up.
    """

    def __init__(self, model: str | Path = "", **settings: Any) -> None:
        if not model:
            from .models.demo import demo_model_folder

            model = demo_model_folder()
        self.config = EngineConfig(model=str(model), **settings)
        if self.config.restart_on_failure:
            raise ConfigError("restart_on_failure", True, "false for an LLM object (only a served instance restarts)")
        self.tokenizer: Tokenizer | None = load_tokenizer(self.config.tokenizer_folder)
        self._instance = Instance(self.config, api=False)
        self._instance.start()
        self._ids = itertools.count()
        self._max_open = min(_MAX_OPEN, self.config.max_waiting_requests)
        self._places = asyncio.Semaphore(self._max_open)  # of all calls together
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="xllm_hier-llm", daemon=True)
        self._thread.start()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name="xllm_hier-llm-watch", daemon=True)
        self._watch.start()
        self._client: EngineClient | None = None
        try:
            self._client = self._run(EngineClient.connect(self._instance.engine_address, _START_TOLERANCE_S))
        except BaseException:
            self.close()
            raise
        own_eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        self._model = ServedModel.from_info(self._client.info)
        self._chat_model = ServedModel.from_info(self._client.info, () if own_eos is None else (own_eos,))

    # ------------------------------------------------------------------------------------------- to use

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Continue each prompt, text or token ids, in one batch; answers come in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter does not fit the model; nothing was started.
            EngineDeadError: the engine is gone.
        """
        params = sampling_params or SamplingParams()
        items: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        tokenised = [self._tokenise(item) for item in items]
        return self._generate(self._model, tokenised, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[GenerationOutput]:
        """Answer one chat, or several, by the model's chat template; raises as `generate`."""
        chats: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self._need_tokenizer("messages")
        tokenised: list[tuple[str | None, list[int]]] = [
            tokenizer.encode_chat(chat, template_kwargs=template_kwargs) for chat in chats
        ]
        return self._generate(self._chat_model, tokenised, sampling_params or SamplingParams(), use_tqdm)

    def clear_cache(self, tiers: Sequence[str] = ("device", "host", "store")) -> dict[str, Any]:
        """Empty tiers of the cache; blocks in use stay. Raises RequestError for an unknown tier."""
        answer = self._run(self._engine().call(ClearCache(list(tiers)), _CALL_S))
        return asdict(answer)

    def stats(self) -> dict[str, Any]:
        """The engine's figures: blocks, tokens by tier, transfers, queues; the body of /cache/stats."""
        return self._run(self._engine().call(GetStats(), _CALL_S)).to_json()

    def close(self) -> None:
        """Stop the instance and its processes; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.join()
        try:
            self._instance.stop()
            if self._client is not None:
                self._run(self._client.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- inside

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the private loop; an interrupt of this thread cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _look_after(self) -> None:
        """Keep the instance's helpers alive; its client notices its end and fails the open requests."""
        with contextlib.suppress(EngineDeadError):
            while not self._closed.wait(_WATCH_S):
                self._instance.poll()

    def _engine(self) -> EngineClient:
        if self._client is None or self._closed.is_set():
            raise RequestError("this LLM is closed")
        return self._client

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: prompts must be token ids", param=param)
        return self.tokenizer

    def _tokenise(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("prompts").encode(prompt)
        return None, list(prompt)

    def _generate(
        self, model: ServedModel, prompts: list[tuple[str | None, list[int]]], params: SamplingParams, use_tqdm: bool
    ) -> list[GenerationOutput]:
        self._engine()
        if params.stop_strings:
            self._need_tokenizer("stop")
        if params.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        requests = [build_requests(model, ids, params, f"llm-{next(self._ids)}") for _, ids in prompts]
        answers = [GenerationOutput(text, ids, []) for text, ids in prompts]
        with tqdm(total=sum(map(len, requests)), desc="generate", unit="answer", disable=not use_tqdm) as bar:
            self._run(self._serve(requests, answers, params, bar))
        return answers

    async def _serve(
        self, requests: list[list[AddRequest]], answers: list[GenerationOutput], params: SamplingParams, bar: Any
    ) -> None:
        mine = asyncio.Semaphore(self._max_open)  # so that other calls need not queue behind this whole batch

        async def serve_one(request: AddRequest, answer: GenerationOutput, output: TextOutput) -> None:
            async with mine, self._places:
                decoder = await self._fill(request, answer.prompt_token_ids, output, params)
            if output.index == 0:
                answer.usage, answer.prompt_logprobs = decoder.usage, decoder.prompt_logprobs
            bar.update(1)

        try:
            async with asyncio.TaskGroup() as group:
                for answer, choices in zip(answers, requests, strict=True):
                    for index, request in enumerate(choices):
                        output = TextOutput(index, logprobs=None if params.logprobs is None else [])
                        answer.outputs.append(output)
                        group.create_task(serve_one(request, answer, output))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fill(
        self, request: AddRequest, prompt_ids: list[int], output: TextOutput, params: SamplingParams
    ) -> ChoiceDecoder:
        """Serve one request into `output`; while the engine has no place for it, which it says first, try again."""
        deadline, pause = Deadline(_RETRY_S), _FIRST_PAUSE_S
        while True:
            try:
                return await self._try(request, prompt_ids, output, params)
            except RequestError as error:
                if error.status != 429 or deadline.passed():
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _try(
        self, request: AddRequest, prompt_ids: list[int], output: TextOutput, params: SamplingParams
    ) -> ChoiceDecoder:
        decoder = ChoiceDecoder(
            self.tokenizer,
            prompt_ids,
            stops=params.stop_strings,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        pieces: list[str] = []
        async with aclosing(decode_choice(self._engine(), request, decoder)) as batches:
            async for events in batches:
                for event in events:
                    pieces.append(event.text)
                    output.add(event)
        output.text = "".join(pieces)
        return decoder
