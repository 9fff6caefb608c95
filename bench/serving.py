"""What the benches share: an instance, a client that times the first token, tables."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from xllm_hier.config import EngineConfig
from xllm_hier.launch import Instance
from xllm_hier.process import configure_logging

LIMIT_S = 600.0


def arguments(description: str, argv: Sequence[str] | None = None, **more: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, one repetition")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    for name, options in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Answer:
    """One streamed request: seconds to the first token, its tokens, and who paid for the prompt."""

    ttft_s: float
    total_s: float
    token_ids: tuple[int, ...]
    text: str
    tiers: dict[str, int]
    prompt_tokens: int


class Client:
    """Talks to one instance over HTTP."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.model = instance.config.api_model_name
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{instance.port}", timeout=LIMIT_S)

    def ask(self, prompt: str | list[int] | list[dict[str, str]], max_tokens: int = 1) -> Answer:
        """Greedy; a list of messages is a chat."""
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "messages" if chat else "prompt": prompt,
        }
        path = "/v1/chat/completions" if chat else "/v1/completions"
        first, tokens, text, usage = 0.0, [], "", {}
        start = time.perf_counter()
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    if new := choice.get("token_ids"):
                        first = first or time.perf_counter() - start
                        tokens += new
                    text += (choice.get("delta", {}).get("content") or "") if chat else choice.get("text", "")
        tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        total = time.perf_counter() - start
        return Answer(first or total, total, tuple(tokens), text, tiers, usage["prompt_tokens"])

    def clear(self, *tiers: str) -> None:
        self._http.post("/cache/clear", json={"tiers": list(tiers)}).raise_for_status()

    def stats(self) -> dict[str, Any]:
        return dict(self._http.get("/cache/stats").json())

    def settle(self) -> None:
        """Wait until every write-back has ended."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            stats = self.stats()
            if not stats["canonical"] and not any(
                kind["pinned"] for tier in stats["blocks"].values() for kind in tier.values()
            ):
                return
            time.sleep(0.02)
        raise RuntimeError("the instance does not come to rest")

    def close(self) -> None:
        self._http.close()


@contextmanager
def serving(model: Path, **settings: Any) -> Iterator[Client]:
    """An instance of `model` with `settings`, stopped at the end; it restores whatever can be, to be measured."""
    configure_logging("warning", "bench")
    config = EngineConfig(model=str(model), port=0, log_level="warning", **{"restore_policy": "always", **settings})
    instance = Instance(config)
    instance.start()
    try:
        client = Client(instance)
        yield client
        client.close()
    finally:
        instance.stop()


def random_prompt(seed: object, length: int, vocabulary: int) -> list[int]:
    dice = random.Random(str(seed))
    return [dice.randrange(100, vocabulary) for _ in range(length)]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on stdout, plain when it is not a terminal."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)


def memory_of(pids: dict[str, int]) -> dict[str, dict[str, float]]:
    """RSS and PSS in MiB by process name; PSS divides shared pages among those who share them."""
    sizes = {}
    for name, pid in pids.items():
        fields = {"Rss": 0.0, "Pss": 0.0}
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key = line.split(":")[0]
            if key in fields:
                fields[key] = int(line.split()[1]) / 1024
        sizes[name] = {"rss_mib": fields["Rss"], "pss_mib": fields["Pss"]}
    return sizes
