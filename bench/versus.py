"""run.sh bench versus --peer "COMMAND": this engine beside any other OpenAI-compatible server, in turns, by one client.

COMMAND starts the other server; {model} and {port} in it are replaced. Prompts are random token ids over streamed
/v1/completions, so that neither a tokenizer nor the grouping of chunks counts. Each repetition takes one fresh prompt
cold, again, and again with 64 new tokens behind it, at one server and then at the other. Decode rates come from two
rounds of a batch, of 1 and of N + 1 tokens. A ratio above 1 is this engine ahead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from xllm_hier.embedded_store import free_ports

from .bench_model import bench_model
from .serving import LIMIT_S, arguments, random_prompt, show

OURS = f"{shlex.quote(sys.executable)} -m xllm_hier.serve --model {{model}} --port {{port}} --log_level warning"
NEW_TOKENS = 64


@dataclass
class Measured:
    """Of one server: seconds by (state, prompt length), tokens per second by batch, and what it costs to have it."""

    start_s: float = 0.0
    pss_mib: float = 0.0
    first_token_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    decode_rate: dict[int, list[float]] = field(default_factory=dict)


class Peer:
    """A server under measurement, told by nothing but its command."""

    def __init__(self, name: str, process: psutil.Popen, url: str) -> None:
        self.name, self.process, self.measured = name, process, Measured()
        self._http = httpx.Client(base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=64))
        self._model = ""

    def wait_up(self, started: float) -> None:
        while not self._model:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self.process.returncode} while it came up")
            if time.monotonic() > started + LIMIT_S:
                raise RuntimeError(f"{self.name} did not come up within {LIMIT_S:g} s")
            with contextlib.suppress(httpx.HTTPError):
                answer = self._http.get("/v1/models", timeout=5)
                if answer.status_code == 200:
                    self._model = answer.json()["data"][0]["id"]
                    break
            time.sleep(0.1)
        self.measured.start_s = time.monotonic() - started

    def first_and_last(self, prompt: list[int], max_tokens: int) -> tuple[float, float]:
        """Seconds to the first event that has a choice with text or ids, and to the end."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        first, start = 0.0, time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{self.name}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if not first and line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def batch_s(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Seconds until all of `prompts`, sent at once, have `max_tokens` tokens."""
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.first_and_last(prompt, max_tokens), prompts))
        return time.perf_counter() - start

    def weigh(self) -> None:
        """Proportional set size of all of its processes."""
        total = 0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        self.measured.pss_mib = total / (1 << 20)


@contextlib.contextmanager
def running(name: str, command: str, model: str) -> Iterator[Peer]:
    """The server of `command`, until it answers; ended with all of its processes."""
    (port,) = free_ports(1)
    words = shlex.split(command.replace("{port}", str(port)).replace("{model}", shlex.quote(model)))
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = psutil.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        peer = Peer(name, process, f"http://127.0.0.1:{port}")
        try:
            peer.wait_up(started)
            yield peer
        except RuntimeError as error:
            output.seek(0)
            raise RuntimeError(f"{error}\n{output.read()[-2000:]}") from error
        finally:
            everybody = [process, *process.children(recursive=True)] if process.is_running() else []
            process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(30)
            for left in everybody:
                with contextlib.suppress(psutil.Error):
                    left.kill()


def measure_first_tokens(peers: Sequence[Peer], length: int, repetition: int, vocabulary: int) -> None:
    prompt = random_prompt(("versus", length, repetition), length, vocabulary)
    longer = [*prompt, *random_prompt(("new", length, repetition), NEW_TOKENS, vocabulary)]
    for peer in peers if repetition % 2 == 0 else reversed(peers):
        for state, tokens in (("cold", prompt), ("again", prompt), ("64 new", longer)):
            first, _ = peer.first_and_last(tokens, 1)
            peer.measured.first_token_s.setdefault((state, length), []).append(first)


def measure_decoding(peers: Sequence[Peer], batch: int, tokens: int, repetition: int, vocabulary: int) -> None:
    prompts = [random_prompt(("decode", batch, repetition, n), 64, vocabulary) for n in range(batch)]
    for peer in peers if repetition % 2 == 0 else reversed(peers):
        peer.batch_s(prompts, 1)
        one, many = peer.batch_s(prompts, 1), peer.batch_s(prompts, tokens + 1)
        peer.measured.decode_rate.setdefault(batch, []).append(batch * tokens / max(1e-9, many - one))


def rows_of(ours: Measured, other: Measured) -> list[tuple[str, float, float, float]]:
    """(what, ours, the other's, ratio) of all that was measured."""
    rows = []
    for key, times in ours.first_token_s.items():
        mine, theirs = statistics.median(times), statistics.median(other.first_token_s[key])
        rows.append((f"{key[1]} tokens, {key[0]}, ms", 1e3 * mine, 1e3 * theirs, theirs / mine))
    for batch, rates in ours.decode_rate.items():
        mine, theirs = statistics.median(rates), statistics.median(other.decode_rate[batch])
        rows.append((f"decode, batch {batch}, tokens/s", mine, theirs, mine / theirs))
    rows.append(("start, s", ours.start_s, other.start_s, other.start_s / ours.start_s))
    rows.append(("memory (PSS), MiB", ours.pss_mib, other.pss_mib, other.pss_mib / ours.pss_mib))
    return rows


def main() -> int:
    more: dict[str, Any] = {
        "peer": {"required": True, "help": "the other server's command, with {model} and {port}"},
        "ours": {"default": OURS, "help": "this engine's command, likewise"},
        "model": {"default": "", "help": "a folder; empty = the random model of the benches"},
        "vocabulary": {"type": int, "default": 0, "help": "token ids are drawn below it; 0 = the model's"},
        "lengths": {"default": "", "help": "comma list of prompt lengths"},
        "batches": {"default": "", "help": "comma list of decode batches"},
    }
    options = arguments(__doc__ or "", **more)
    folder = options.model or str(bench_model())
    vocabulary = options.vocabulary or _vocabulary(folder)
    lengths = _numbers(options.lengths) or ([512] if options.quick else [512, 2048, 8192])
    batches = _numbers(options.batches) or ([1, 8] if options.quick else [1, 8, 32])
    repetitions, tokens = (1, 16) if options.quick else (5, 64)
    with running("ours", options.ours, folder) as ours, running("the peer", options.peer, folder) as other:
        peers = [ours, other]
        measure_first_tokens(peers, 512, -1, vocabulary)  # first touch of caches, threads and pages
        for peer in peers:
            peer.measured.first_token_s.clear()
        for repetition in range(repetitions):
            for length in lengths:
                measure_first_tokens(peers, length, repetition, vocabulary)
            for batch in batches:
                measure_decoding(peers, batch, tokens, repetition, vocabulary)
        for peer in peers:
            peer.weigh()
        rows = rows_of(ours.measured, other.measured)
    title = "this engine and the peer, in turns; medians; a ratio above 1 is this engine ahead"
    show(title, ("", "ours", "peer", "ratio"), [(what, f"{a:.1f}", f"{b:.1f}", f"{r:.2f}") for what, a, b, r in rows])
    if options.json:
        print(json.dumps({what: {"ours": a, "peer": b, "ratio": r} for what, a, b, r in rows}))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _vocabulary(folder: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)


if __name__ == "__main__":
    sys.exit(main())
