"""run.sh bench spec: tokens per step and per second with drafts and without, cold and warm.

The demo model continues a repetitive text: without drafts, with n-gram drafts, and with those of a smaller model that
is its own first layers. All instances are up and take turns, and the answers must be equal.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
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
    "restore_policy": "always",
}


def first_layers(folder: Path, target: Path, count: int) -> Path:
    """A model of the first layers of another; the files are its own."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}), encoding="utf-8")
    return target


def ask(client: Client, prompt: str) -> dict[str, Any]:
    """One request, the steps it took, and what became of its drafts."""
    before = client.stats()
    answer = client.ask(prompt, TOKENS)
    client.settle()
    after = client.stats()
    return {
        "tokens": answer.token_ids,
        "decode_s": answer.total_s - answer.ttft_s,
        **{what: sum(after[what].values()) - sum(before[what].values()) for what in ("drafted", "accepted")},
        "draft_steps": sum(after["draft_steps"].values()) - sum(before["draft_steps"].values()),
    }


def measure(clients: dict[str, Client], repetitions: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """{(instance, state of the prompt): its runs}, the instances in turns."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for repetition in range(repetitions + 1):
        prompt = "".join(TEXT.format(n=100 * repetition + n) for n in range(30))
        answers = set()
        for state, forget in (("cold", ()), ("device", ()), ("store", ("device", "host"))):
            for name, client in clients.items():
                if forget:
                    client.clear(*forget)
                found = ask(client, prompt)
                answers.add(found["tokens"])
                if repetition:  # the first one touches pages and threads
                    runs.setdefault((name, state), []).append(found)
        if len(answers) != 1:
            raise RuntimeError(f"drafts changed the answer: {answers}")
    return runs


def main() -> int:
    options = arguments(__doc__ or "", drafts={"type": int, "default": 4}, draft_layers={"type": int, "default": 25})
    repetitions = 2 if options.quick else 6
    folder = demo_model_folder()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        draft = first_layers(folder, place / f"{options.draft_layers}-layers", options.draft_layers)
        ways: dict[str, dict[str, Any]] = {
            "none": {},
            "ngram": {"speculative_algorithm": "ngram"},
            f"first {options.draft_layers} layers": {
                "speculative_algorithm": "draft_model",
                "draft_model": str(draft),
            },
        }
        clients = {
            name: stack.enter_context(
                serving(folder, **SETTINGS, **more, num_speculative_tokens=options.drafts if more else 0)
            )
            for name, more in ways.items()
        }
        runs = measure(clients, repetitions)
    rows, figures = [], {}
    for (name, state), found in runs.items():
        per_s = statistics.median((len(run["tokens"]) - 1) / run["decode_s"] for run in found)
        drafted, accepted, steps = (sum(run[what] for run in found) for what in ("drafted", "accepted", "draft_steps"))
        length = 1.0 + accepted / steps if steps else 1.0
        figures[f"{name}, {state}"] = {"tokens_per_s": per_s, "accept_length": length}
        share = f"{accepted / drafted:.0%}" if drafted else ""
        rows.append([name, state, f"{per_s:.1f}", share, f"{length:.2f}" if steps else ""])
    show(
        f"{TOKENS} tokens after about 900, up to {options.drafts} drafts a step, median of {repetitions}",
        ["drafts", "prompt", "tokens/s", "accepted", "tokens per step with drafts"],
        rows,
    )
    if options.json:
        print(json.dumps({"bench": "spec", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
