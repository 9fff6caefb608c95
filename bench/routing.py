"""run.sh bench routing: what the service's way of choosing an instance is worth, on slices of real traces.

Instances of the engine's own scheduler and block books, on a virtual clock, get a trace's requests in turn (RR) or
where they cost least (CAR). Reported is the share of the prompts' blocks that caches give, beside two other simulations
of the same slice: plain LRU caches with the same routing, and the reference figures that came with the slices.
Real instances follow, and what the service itself costs (`routing_real.py`; without them: `--no-real`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .routing_real import added_latency, throughput, traces
from .routing_simulated import TIERS, Replay, Request, Run, Sizes, oracle, read_trace, scale_time, shared_prefix
from .serving import arguments, show

TRACES = Path(__file__).parent / "traces"
SLICES = {"conversation": "conversation_slice_R24_s1.jsonl", "synthetic": "synthetic_slice_R8_s12.jsonl"}
# Share of blocks hit with a device only, with a host too, with a store too, by an independent simulation. It says
# nothing of load, so it is compared with replays in which hardly anybody waits.
REFERENCE = {
    ("conversation", 1, "RR"): (0.090, 0.293, 0.373),
    ("conversation", 2, "RR"): (0.118, 0.228, 0.373),
    ("conversation", 2, "CAR"): (0.182, 0.354, 0.373),
    ("conversation", 4, "RR"): (0.123, 0.196, 0.373),
    ("conversation", 4, "CAR"): (0.286, 0.366, 0.373),
    ("synthetic", 1, "RR"): (0.122, 0.307, 0.611),
    ("synthetic", 2, "RR"): (0.099, 0.267, 0.611),
    ("synthetic", 2, "CAR"): (0.203, 0.493, 0.611),
    ("synthetic", 4, "RR"): (0.114, 0.247, 0.611),
    ("synthetic", 4, "CAR"): (0.314, 0.588, 0.611),
}
BUSY, LIGHT = 0.8, 0.3  # share of the time that instances without caches would compute
MOST_APART, LEAST_GAIN = 0.03, 1.5


@dataclass(frozen=True)
class Case:
    """One way to route one slice to `count` instances: replayed with a device only, with a host, and with a store too.

    `expected` is what the oracle says of the three, given where each request went. `light` are the ratios under a load
    that makes nobody wait; of requests in turn they are the same.
    """

    name: str
    count: int
    policy: str
    runs: tuple[Run, ...]
    expected: tuple[float, ...]
    light: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(run.ratio() for run in self.runs)

    @property
    def reference(self) -> tuple[float, ...]:
        return REFERENCE[self.name, self.count, self.policy]

    def told(self) -> dict[str, Any]:
        return {
            "slice": self.name,
            "instances": self.count,
            "policy": self.policy,
            "oracle": dict(zip(TIERS, self.expected, strict=True)),
            "light": dict(zip(TIERS, self.light, strict=True)),
            "reference": dict(zip(TIERS, self.reference, strict=True)),
            "runs": {f"up to {tier}": summary(run) for tier, run in zip(TIERS, self.runs, strict=True)},
        }


def summary(run: Run) -> dict[str, Any]:
    computed, requests = run.spread
    return {
        "hit": run.ratio(),
        **{tier: run.ratio(tier) for tier in TIERS},
        "router_expected": run.expected / run.num_blocks,
        "busy": run.busy,
        "ttft_p50_s": statistics.median(run.ttft_s),
        "ttft_p90_s": statistics.quantiles(run.ttft_s, n=10)[-1],
        "spread_of_computed_tokens": computed,
        "spread_of_requests": requests,
        "decisions": run.decisions,
    }


def measure(name: str, requests: Sequence[Request], count: int, policy: str) -> Case:
    runs, light, expected = [], [], []
    for tier, sizes in zip(TIERS, (Sizes(host=0), Sizes(), Sizes()), strict=True):

        def replay(busy: float, tier: str = tier, sizes: Sizes = sizes) -> Run:
            time_scale = scale_time(requests, busy) * count
            return Replay(requests, count, policy, store=tier == "store", sizes=sizes, time_scale=time_scale).run()

        runs.append(replay(BUSY))
        light.append((replay(LIGHT) if policy == "CAR" else runs[-1]).ratio())
        expected.append(oracle(requests, runs[-1].placed, sizes)[tier])
    return Case(name, count, policy, tuple(runs), tuple(expected), tuple(light))


def demands(cases: Sequence[Case]) -> list[tuple[str, float, bool]]:
    """What is asked for, how it is at worst, and whether that is good enough."""
    apart = max(abs(a - b) for case in cases for a, b in zip(case.ratios, case.expected, strict=True))
    from_table = max(abs(a - b) for case in cases for a, b in zip(case.light, case.reference, strict=True))
    hits = {(case.name, case.count, case.policy): case.ratios[1] for case in cases}
    gain = min(hits[name, 4, "CAR"] / hits[name, 4, "RR"] for name in {case.name for case in cases})
    return [
        (f"engine and own simulation at most {MOST_APART:.2f} apart", apart, apart <= MOST_APART),
        (
            f"engine at a light load and reference at most {MOST_APART:.2f} apart",
            from_table,
            from_table <= MOST_APART,
        ),
        (f"4 instances, no store: hits of CAR at least {LEAST_GAIN} x those of RR", gain, gain >= LEAST_GAIN),
    ]


# ---------------------------------------------------------------------------------------------------- the tables


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}"[1:] for value in values)


def milliseconds(run: Run) -> str:
    told = summary(run)
    return f"{told['ttft_p50_s'] * 1000:.0f}/{told['ttft_p90_s'] * 1000:.0f}"


def spread(run: Run) -> str:
    return "{:.2f}/{:.2f}".format(*run.spread)


def row(case: Case) -> list[str]:
    _, host, store = case.runs
    cells = [f"{case.name} {case.count} {case.policy if case.count > 1 else ''}"]
    cells += [shares(case.ratios), shares(case.expected), shares(case.light), shares(case.reference)]
    return [*cells, milliseconds(host), milliseconds(store), f"{host.busy * 100:.0f} %", spread(host)]


def slices(quick: bool) -> dict[str, Any]:
    """Replays of the traces."""
    names = dict(list(SLICES.items())[:1]) if quick else SLICES
    ways = [(1, "RR"), *((count, policy) for count in ((4,) if quick else (2, 4)) for policy in ("RR", "CAR"))]
    cases = []
    for name, file in names.items():
        requests = read_trace(TRACES / file, Sizes().block_size)
        cases += [measure(name, requests, count, policy) for count, policy in ways]
    columns = [
        "slice, instances",
        "engine",
        "LRU",
        "light load",
        "reference",
        "TTFT ms",
        "with store",
        "busy",
        "spread",
    ]
    title = (
        "share of blocks hit with a device only, with a host, with a store; virtual time to first token p50/p90;\n"
        "most over mean of the instances' computed tokens/requests (the last two with a host and no store)"
    )
    show(title, columns, [row(case) for case in cases])
    found = demands(cases)
    verdicts = [[what, f"{worst:.3f}", "PASS" if passed else "FAIL"] for what, worst, passed in found]
    show("", ["demand", "at worst", ""], verdicts)
    return {
        "cases": [case.told() for case in cases],
        "demands": [{"demand": what, "worst": worst, "passed": passed} for what, worst, passed in found],
    }


def hot_prefix(quick: bool) -> list[dict[str, Any]]:
    """All prompts begin alike: who has the prefix must not get everything while others idle."""
    rows, results = [], []
    for rate in (10.0,) if quick else (3.0, 10.0, 18.0):
        requests = shared_prefix(600, rate, shared_blocks=64, own_blocks=8, block_size=Sizes().block_size)
        for policy in ("RR", "CAR"):
            run = Replay(requests, 4, policy, store=False, sizes=Sizes(), time_scale=1.0).run()
            cells = [f"{rate:g} {policy}", f"{run.ratio():.3f}", milliseconds(run), f"{run.busy * 100:.0f} %"]
            rows.append([*cells, spread(run)])
            results.append({"requests_per_s": rate, "policy": policy, **summary(run)})
    columns = ["requests a second", "hit", "TTFT ms", "busy", "spread"]
    show("4 instances, 1024 tokens that all prompts share and 128 of their own", columns, rows)
    return results


def real(quick: bool) -> dict[str, Any]:
    """With real processes; needs etcd."""
    size = Sizes().block_size
    names = dict(list(SLICES.items())[1:]) if quick else SLICES
    return {
        "real": traces({name: read_trace(TRACES / file, size) for name, file in names.items()}, REFERENCE),
        "latency": added_latency(40 if quick else 200),
        "throughput": throughput(500 if quick else 3000),
    }


def main() -> int:
    options = arguments(__doc__ or "", no_real={"action": "store_true", "help": "only the simulated instances"})
    results = slices(options.quick) | {"hot_prefix": hot_prefix(options.quick)}
    if not options.no_real:
        results |= real(options.quick)
    if options.json:
        print(json.dumps({"bench": "routing", **results}))
    return 0 if all(one["passed"] for one in results["demands"]) else 1


if __name__ == "__main__":
    sys.exit(main())
