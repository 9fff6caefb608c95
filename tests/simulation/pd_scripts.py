"""Scripts for clusters of prefill and decode instances: replayed, drawn at random; see `scripts`."""

from __future__ import annotations

import pprint
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from xllm_hier.calls import ClearCache

from . import scripts
from .cluster import Cluster, Pair
from .scripts import GENTLE, QUESTIONS, Event
from .world import Settings


@dataclass(frozen=True)
class PdScript:
    settings: Pair
    events: list[Event]

    def __str__(self) -> str:
        pair = self.settings
        sizes = [f"{name}=Settings({_changes(getattr(pair, name))})" for name in ("prefill", "decode")]
        sizes += [f"{name}={getattr(pair, name)!r}" for name in ("num_prefill", "num_decode", "mode")]
        events = pprint.pformat(self.events, width=110, compact=True)
        return f"replay(PdScript(Pair({', '.join(sizes)}), {events}))"


def _changes(settings: Settings) -> str:
    values = [(item.name, getattr(settings, item.name), item.default) for item in fields(Settings)]
    return ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)


def happen(cluster: Cluster, event: Event) -> None:
    """Let one event happen now."""
    _, what, *rest = event
    args: Any = rest
    if what == "add":
        where, name, prompt, max_tokens, more = args
        cluster.add(where, name, prompt, max_tokens, **more)
    elif what == "abort":
        cluster.abort(*args)
    elif what == "clear":
        where, *tiers = args
        if where in cluster.instances:
            cluster.instances[where].call(ClearCache(list(tiers)))
    elif what in ("drain", "stats"):
        if args[0] in cluster.instances:
            cluster.instances[args[0]].call(QUESTIONS[what])
    elif what == "fault":
        cluster.fault(*args)
    elif what == "kill":
        cluster.kill(*args)
    elif what == "stop":
        cluster.stop(*args)
    elif what == "cut":
        cluster.cut_off(*args)
    elif what == "die":
        where, rank = args
        if where in cluster.instances:
            cluster.instances[where].ranks.ranks[rank % cluster.settings.prefill.num_ranks].die()
    else:
        raise ValueError(f"no event {what!r}")


def replay(script: PdScript) -> Cluster:
    """Run a script to its end; raises what went wrong."""
    cluster = Cluster(script.settings)
    try:
        for name in cluster.places:
            cluster.start(name)
        start = cluster.timeline.now

        def at(event: Event) -> Callable[[], None]:
            def work() -> None:
                cluster.num_events_left -= 1
                happen(cluster, event)

            return work

        for event in script.events:
            cluster.num_events_left += 1
            cluster.timeline.at(start + event[0], at(event))
        cluster.run()
    finally:
        cluster.end()
    return cluster


def failure_of(script: PdScript) -> str | None:
    """What goes wrong when the script is run; None when nothing does."""
    try:
        replay(script)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(script: PdScript, fails: Callable[[PdScript], bool], most_runs: int = 300) -> PdScript:
    """As `scripts.shrink`."""
    left = scripts.shrink_events(script.events, lambda events: fails(replace(script, events=events)), most_runs)
    return replace(script, events=left)


# ------------------------------------------------------------------------------------------------ drawn at random

# Settings are those of a family of `scripts`, with changes of the decode instance's; the numbers are the most there
# may be of an event of a kind.
PD_FAMILIES: dict[str, dict[str, Any]] = {
    "in peace": dict(of=("three tiers", "device and host", "ranks", "latents")),
    "tight pools": dict(of=("tight", "harsh"), device=(0, 0, 2)),
    "moves fail": dict(of=("three tiers", "ranks", "tight"), moves=6, gentle=3),
    "broken lines": dict(of=("three tiers", "tight", "ranks"), cuts=4, moves=2),
    "stopped": dict(of=("three tiers", "tight", "ranks"), stops=3, moves=2),
    "killed": dict(of=("three tiers", "tight", "ranks"), kills=3, moves=2, many=1),
    "everything": dict(of=("three tiers", "faults", "tight", "ranks"), kills=2, stops=2, cuts=2, moves=3, many=1),
    "slow pulls": dict(of=("tight", "three tiers"), mode=("PULL",), pulls=6, cuts=3),
    "drafts": dict(of=("draft model", "draft head", "drafts"), moves=2, cuts=1),
    "types": dict(of=("windows", "windows only", "states", "windows and states"), moves=2, cuts=1),
    "types and drafts": dict(of=("windows and a draft model", "states and a draft"), moves=2, cuts=1, stops=1, kills=1),
}

MOVES = [
    *[("push", 0.0), ("push limit", 0.1), ("push limit", 5.0), ("push limit", 9.0), ("slow push", 0.3)],
    *[("slow push", 3.0), ("pull", 0.0), ("pull limit", 0.1), ("pull limit", 8.0), ("slow pull", 0.3)],
    ("slow pull", 3.0),
]


def draw(family: str, seed: int) -> PdScript:
    """The script of a seed in a family."""
    dice = random.Random(f"pd {family} {seed}")
    chosen = PD_FAMILIES[family]
    one = scripts.draw(dice.choice(chosen["of"]), seed)
    prefill = replace(one.settings, seed=seed, policy="always", limit_s=16.0)
    spare = dice.choice(chosen.get("device", (0, 0, 4)))
    decode = replace(prefill, seed=seed + 1, num_device=prefill.num_device + spare)
    num_prefill, num_decode = dice.choice([1, 2]) if chosen.get("many") else 1, dice.choice([1, 2])
    pair = Pair(prefill, decode, num_prefill, num_decode, dice.choice(chosen.get("mode", ("PUSH", "PULL"))))
    names = [place.name for place in pair.places()]
    takers = [name for name in names if name[0] == "P"]
    events: list[Event] = []
    for event in one.events:
        time, what, *rest = event
        if what == "add":
            events.append((time + 0.2, what, dice.choice(takers), *rest))
        elif what == "abort":
            events.append((time + 0.2, what, *rest))
        elif what in ("clear", "stats", "fault") or (what == "drain" and dice.random() < 0.3):
            events.append((time + 0.2, what, dice.choice(names), *rest))
    end = max(event[0] for event in events) + 0.5
    events += _events(dice, pair, names, end, chosen)
    events.sort(key=lambda event: event[0])
    return PdScript(pair, [(round(event[0], 3), *event[1:]) for event in events])


def _events(dice: random.Random, pair: Pair, names: list[str], end: float, chosen: dict[str, Any]) -> list[Event]:
    def time() -> float:
        return dice.random() * end

    def number(kind: str) -> range:
        return range(dice.randrange(chosen.get(kind, 0) + 1))

    ranks = pair.prefill.num_ranks
    some = tuple(sorted(dice.sample(range(ranks), dice.randint(1, ranks))))
    events: list[Event] = []
    for _ in number("gentle"):
        kind, amount = dice.choice(GENTLE)
        events.append((time(), "fault", dice.choice(names), kind, some, amount))
    for _ in number("moves"):
        kind, amount = dice.choice(MOVES)
        side = "P" if "push" in kind else "D"
        events.append((time(), "fault", dice.choice([n for n in names if n[0] == side]), kind, some, amount))
    for _ in number("pulls"):
        where = dice.choice([name for name in names if name[0] == "D"])
        events.append((time(), "fault", where, "slow pull", some, dice.choice([0.3, 1.0, 3.0])))
    for _ in number("cuts"):
        one = dice.choice([name for name in names if name[0] == "P"])
        other = dice.choice([name for name in names if name[0] == "D"])
        ends = (one, other) if dice.random() < 0.5 else (other, one)
        how = dice.choice(["break", "break one way", "stall"])
        events.append((time(), "cut", *ends, dice.choice([0.01, 0.3, 2.0, 7.0]), how))
    for _ in number("stops"):
        who = dice.choice(["all", "all", "engine", "ranks"])
        events.append((time(), "stop", dice.choice(names), dice.choice([0.3, 1.5, 3.0, 6.0, 9.0, 20.0]), who))
    for _ in number("kills"):
        events.append((time(), "kill", dice.choice(names), dice.choice([0.1, 1.0, 5.0, 20.0, None])))
    return events
