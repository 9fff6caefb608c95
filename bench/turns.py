"""run.sh bench turns: what reusing decoded KV costs and gains in conversations, for each --decode_kv_reuse.

Several conversations at once, each turn's prompt being all that was said before plus a new question; the modes take
turns so that one run compares them.
"""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import sys
import time

from .bench_model import SHAPE, bench_model
from .serving import Answer, Client, arguments, random_prompt, serving, show

MODES = ("canonical", "as_is", "off")
CONVERSATIONS, QUESTION, ANSWER = 4, 64, 96


def converse(client: Client, seed: str, turns: int) -> list[Answer]:
    said: list[int] = random_prompt(seed, 256, SHAPE["vocab_size"])
    answers = []
    for turn in range(turns):
        said = said + random_prompt((seed, turn), QUESTION, SHAPE["vocab_size"])
        answer = client.ask(said, ANSWER)
        said = said + list(answer.token_ids)
        answers.append(answer)
    return answers


def measure(mode: str, repetition: int, turns: int) -> dict[str, float]:
    with serving(bench_model(), decode_kv_reuse=mode, max_cache_size=512 << 20) as client:
        client.ask(random_prompt("warm", 256, SHAPE["vocab_size"]), 8)
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(CONVERSATIONS) as pool:
            seeds = [f"{repetition}-{number}" for number in range(CONVERSATIONS)]
            answers = [answer for found in pool.map(lambda s: converse(client, s, turns), seeds) for answer in found]
        seconds = time.perf_counter() - start
        later = [answer for number, answer in enumerate(answers) if number % turns]
        return {
            "seconds": seconds,
            "ttft_s": statistics.median(answer.ttft_s for answer in later),
            "token_s": statistics.median((a.total_s - a.ttft_s) / max(1, len(a.token_ids) - 1) for a in answers),
            "computed": sum(answer.prompt_tokens - sum(answer.tiers.values()) for answer in later) / len(later),
        }


def main() -> int:
    options = arguments(__doc__ or "")
    turns, repetitions = (3, 1) if options.quick else (5, 3)
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for repetition in range(repetitions):
        for mode in MODES:
            runs[mode].append(measure(mode, repetition, turns))
    results = {
        mode: {name: statistics.median(run[name] for run in found) for name in found[0]} for mode, found in runs.items()
    }
    base = results["off"]
    rows = [
        [
            mode,
            f"{result['computed']:.0f}",
            f"{result['ttft_s'] * 1000:.0f} ms",
            f"{result['ttft_s'] / base['ttft_s'] * 100:.0f} %",
            f"{result['token_s'] * 1000:.1f} ms",
            f"{result['token_s'] / base['token_s'] * 100:.0f} %",
            f"{result['seconds'] / base['seconds'] * 100:.0f} %",
        ]
        for mode, result in results.items()
    ]
    columns = ["decode_kv_reuse", "computed", "first token", "of off", "per token", "of off", "whole run of off"]
    show(f"turns 2 to {turns} of {CONVERSATIONS} conversations at once, {ANSWER} tokens an answer", columns, rows)
    if options.json:
        print(json.dumps({"bench": "turns", "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
