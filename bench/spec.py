"""run.sh bench spec: tokens per step and per second with n-gram drafts and without, cold and warm.

The demo model continues a repetitive text; both instances are up and take turns, and the answers must be equal.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from xllm_hier.models.demo import demo_model_folder

from .serving import Client, arguments, serving, show

TEXT = "def add_{n}(a: int, b: int) -> int:\n    return a + b\n\n\n"
TOKENS = 120
SETTINGS: dict[str, Any] = {
    "max_cache_size": 256 << 20,
    "enable_kvcache_store": True,
    "host_blocks_factor": 2.0,
    "store_segment_size": 1 << 30,
}


def ask(client: Client, prompt: str) -> dict[str, Any]:
    """One request, the steps it took, and what became of its drafts."""
    before = client.stats()
    answer = client.ask(prompt, TOKENS)
    client.settle()
    after = client.stats()
    return {
        "tokens": answer.token_ids,
        "decode_s": answer.total_s - answer.ttft_s,
        "steps": after["steps"] - before["steps"],
        **{what: sum(after[what].values()) - sum(before[what].values()) for what in ("drafted", "accepted")},
    }


def main() -> int:
    options = arguments(__doc__ or "", drafts={"type": int, "default": 4})
    repetitions = 2 if options.quick else 6
    folder = demo_model_folder()
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with (
        serving(folder, **SETTINGS) as plain,
        serving(folder, **SETTINGS, num_speculative_tokens=options.drafts) as drafting,
    ):
        for repetition in range(repetitions + 1):
            prompt = "".join(TEXT.format(n=100 * repetition + n) for n in range(30))
            answers = set()
            for state, forget in (("cold", ()), ("device", ()), ("store", ("device", "host"))):
                for name, client in (("without", plain), ("with", drafting)):
                    if forget:
                        client.clear(*forget)
                    found = ask(client, prompt)
                    answers.add(found["tokens"])
                    if repetition:  # the first one touches pages and threads
                        runs.setdefault((name, state), []).append(found)
            if len(answers) != 1:
                raise RuntimeError(f"drafts changed the answer: {answers}")
    rows, figures = [], {}
    for (name, state), found in sorted(runs.items()):
        per_s = statistics.median((len(run["tokens"]) - 1) / run["decode_s"] for run in found)
        drafted, accepted = (sum(run[what] for run in found) for what in ("drafted", "accepted"))
        share = accepted / drafted if drafted else 0.0
        figures[f"{name} {state}"] = {"tokens_per_s": per_s, "accepted": share}
        rows.append([name, state, f"{per_s:.1f}", f"{share:.0%}" if drafted else ""])
    show(
        f"{TOKENS} tokens after about 900, up to {options.drafts} drafts a step, median of {repetitions}",
        ["drafts", "prompt", "tokens/s", "accepted"],
        rows,
    )
    if options.json:
        print(json.dumps({"bench": "spec", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
