"""run.sh bench hybrid: a long prompt of a model with sliding windows, whose layers have blocks of their own or not.

Two instances of one Gemma3-like random model (five layers of six see 512 tokens) are up and take turns: one with SWA
blocks, one with all layers in KV blocks (`--cache_layout=flat`). Reported are the bytes that the prompt takes in each
tier, how much of it the same prompt, and one that leaves it in the middle, find there, and the time to first tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack
from typing import Any

from .bench_model import sliding_model
from .serving import Client, arguments, random_prompt, serving, show

LAYOUTS = ("auto", "flat")
STATES = {"device": (), "host": ("device",), "store": ("device", "host")}
SETTINGS: dict[str, Any] = {
    "enable_kvcache_store": True,
    "host_blocks_factor": 2.0,
    "max_cache_size": 384 << 20,
    "store_segment_size": 2 << 30,
    "block_size": 64,
}


def used_bytes(client: Client) -> dict[str, int]:
    """Bytes of the blocks that are not free, by tier; of the store, all that was ever written to it."""
    stats, types = client.stats(), client.instance.info.block_types
    used = {
        tier: sum(
            types[kind].block_bytes * sum(n for state, n in counts.items() if state != "free")
            for kind, counts in stats["blocks"][tier].items()
        )
        for tier in ("device", "host")
    }
    return used | {"store": int(stats["transfer_bytes"]["h2g"])}


def measure(client: Client, length: int, repetition: int) -> dict[str, Any]:
    """One prompt from its cold run to its restore from each tier."""
    client.clear("device", "host", "store")
    client.settle()
    before = used_bytes(client)
    prompt = random_prompt((length, repetition), length, 30_000)
    cut = length * 5 // 8
    cold = client.ask(prompt)
    client.settle()
    after = used_bytes(client)
    run: dict[str, Any] = {"bytes": {tier: after[tier] - before[tier] for tier in after}}
    run["ttft_s"], run["hit"], run["middle"] = {"cold": cold.ttft_s}, {}, {}
    for tier, forget in STATES.items():
        if forget:
            client.clear(*forget)
        answer = client.ask(prompt)
        if answer.token_ids != cold.token_ids:
            raise RuntimeError(f"a hit in {tier} changed the answer")
        run["ttft_s"][tier], run["hit"][tier] = answer.ttft_s, sum(answer.tiers.values())
        client.settle()
    for tier, forget in STATES.items():
        if forget:
            client.clear(*forget)
        other = prompt[:cut] + random_prompt((tier, repetition), length - cut, 30_000)
        run["middle"][tier] = sum(client.ask(other).tiers.values())
        client.settle()
    return run


def main() -> int:
    options = arguments(__doc__ or "")
    lengths, repetitions = ((4096,), 1) if options.quick else ((4096, 12288), 3)
    folder = sliding_model()
    results: dict[str, dict[int, list[dict[str, Any]]]] = {layout: {} for layout in LAYOUTS}
    with ExitStack() as stack:
        clients = {
            layout: stack.enter_context(serving(folder, cache_layout=layout, model_id=f"hybrid-{layout}", **SETTINGS))
            for layout in LAYOUTS
        }
        for length in lengths:
            for repetition in range(-1, repetitions):
                for layout, client in clients.items():
                    run = measure(client, length, repetition)
                    if repetition >= 0:  # the first one touches memory for the first time
                        results[layout].setdefault(length, []).append(run)
        types = {layout: client.instance.info.block_types["KV"] for layout, client in clients.items()}
        size = SETTINGS["block_size"]
        room = {layout: {"device": kv.device * size, "host": kv.host * size} for layout, kv in types.items()}
    rows = []
    for length in lengths:
        medians = {layout: _medians(results[layout][length]) for layout in LAYOUTS}
        for layout, run in medians.items():
            rows.append([f"{length} {layout}", *(f"{run['bytes'][tier] / 2**20:.1f}" for tier in STATES)])
            rows[-1] += [f"{run['hit'][tier]}/{run['middle'][tier]}" for tier in STATES]
            rows[-1] += [f"{run['ttft_s'][state] * 1000:.0f}" for state in ("cold", *STATES)]
        rows.append([f"{length} ratio", *(_ratio(medians, "bytes", tier) for tier in STATES), *[""] * 4])
        rows[-1] += [_ratio(medians, "ttft_s", state) for state in STATES]
    columns = ["prompt, layout", *(f"{tier} MiB" for tier in STATES), *(f"{tier} hit" for tier in STATES)]
    title = f"median of {repetitions}; hit: of the same prompt / of one that leaves it after five eighths"
    show(title, [*columns, *(f"{state} ms" for state in ("cold", *STATES))], rows)
    rows = [[layout, *(f"{tokens:,}" for tokens in room[layout].values())] for layout in LAYOUTS]
    rows.append(["ratio", *(f"{room['auto'][tier] / room['flat'][tier]:.2f}" for tier in room["auto"])])
    show(
        f"tokens of full attention that {SETTINGS['max_cache_size'] >> 20} MiB of device cache hold",
        ["", *room["auto"]],
        rows,
    )
    if options.json:
        print(json.dumps({"bench": "hybrid", "runs": results, "room": room}))
    return 0


def _medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {what: {key: statistics.median(run[what][key] for run in runs) for key in runs[0][what]} for what in runs[0]}


def _ratio(medians: dict[str, dict[str, dict[str, float]]], what: str, key: str) -> str:
    return f"{medians['auto'][what][key] / medians['flat'][what][key]:.2f}"


if __name__ == "__main__":
    sys.exit(main())
