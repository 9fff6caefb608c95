"""Scripts: what happens to a world and when. They are replayed as they stand, drawn at random, and shrunk.

A script is plain data. Printed it can be put into a test as it is: `replay(Script(Settings(...), [...]))`.
"""

from __future__ import annotations

import pprint
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from xllm_hier.block import BlockType
from xllm_hier.calls import AttachStore, ClearCache, DetachStore, Drain, GetStats, Question

from .contents import VOCABULARY, reference, root_value
from .world import Settings, World

QUESTIONS: dict[str, Question[Any]] = {
    "drain": Drain(),
    "stats": GetStats(),
    "attach_store": AttachStore(),
    "detach_store": DetachStore(),
}

Event = tuple[Any, ...]  # (time in s, what, its arguments...)


@dataclass(frozen=True)
class Script:
    settings: Settings
    events: list[Event]

    def __str__(self) -> str:
        changed = [
            f"{item.name}={getattr(self.settings, item.name)!r}"
            for item in fields(Settings)
            if getattr(self.settings, item.name) != item.default
        ]
        events = pprint.pformat(self.events, width=110, compact=True)
        return f"replay(Script(Settings({', '.join(changed)}), {events}))"


def happen(world: World, event: Event) -> None:
    """Let one event happen now."""
    _, what, *rest = event
    args: Any = rest
    if what == "add":
        name, prompt, max_tokens, more = args
        world.add(name, prompt, max_tokens, **more)
    elif what == "abort":
        world.abort(*args)
    elif what == "clear":
        world.call(ClearCache(list(args)))
    elif what in QUESTIONS:
        world.call(QUESTIONS[what])
    elif what == "fault":
        kind, ranks, amount = args
        world.ranks.arm(kind, [rank for rank in ranks if rank < world.settings.num_ranks], amount)
    elif what == "store down":
        seconds, keep = args
        world.ranks.store_fails(seconds, keep=keep)
    elif what == "spoil store":
        world.spoil_store(*args)
    elif what == "spoil host":
        world.spoil_host(*args)
    elif what == "die":
        world.ranks.ranks[args[0] % world.settings.num_ranks].die()
    elif what == "silent":
        world.ranks.ranks[args[0] % world.settings.num_ranks].fall_silent()
    else:
        raise ValueError(f"no event {what!r}")


def replay(script: Script) -> World:
    """Run a script to its end; raises what went wrong."""
    world = World(script.settings)
    start = world.timeline.now

    def at(event: Event) -> Callable[[], None]:
        def work() -> None:
            world.num_events_left -= 1
            happen(world, event)

        return work

    for event in script.events:
        world.num_events_left += 1
        world.timeline.at(start + event[0], at(event))
    world.run()
    return world


def failure_of(script: Script) -> str | None:
    """What goes wrong when the script is run; None when nothing does."""
    try:
        replay(script)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --------------------------------------------------------------------------------------------------- shrinking


def shrink(script: Script, fails: Callable[[Script], bool], most_runs: int = 2000) -> Script:
    """Leave out events for as long as the script still fails."""
    left = shrink_events(script.events, lambda events: fails(replace(script, events=events)), most_runs)
    return replace(script, events=left)


def shrink_events(events: list[Event], fail: Callable[[list[Event]], bool], most_runs: int) -> list[Event]:
    """Leave out events, first many at once, then one by one, for as long as those left still fail."""
    events, runs = list(events), 0
    step = max(1, len(events) // 2)
    while True:
        start, smaller = 0, False
        while start < len(events) and runs < most_runs:
            left = events[:start] + events[start + step :]
            runs += 1
            if fail(left):
                events, smaller = left, True
            else:
                start += step
        if runs >= most_runs or (step == 1 and not smaller):
            return events
        step = max(1, step // 2)


# ------------------------------------------------------------------------------------------------ drawn at random

# What is armed: (what fails, by how many seconds).
GENTLE = [
    *[("slow read", 0.3), ("slow put", 0.3), ("slow load", 0.3), ("slow copy", 0.3), ("slow forward", 0.1)],
    *[("delay read", 0.2), ("delay copied", 0.2), ("delay stored", 0.2)],
    *[("double read", 0.0), ("double copied", 0.0), ("double stored", 0.0), ("double ack", 0.0)],
]
HARSH = [
    *[("load", 0.0), ("offload", 0.0), ("put", 0.0), ("read", 0.0), ("forward", 0.0)],
    *[("late", 0.5), ("late", 12.0), ("length", 0.0), ("ack", 0.0), ("lose read", 0.0), ("lose ack", 0.0)],
    *[("slow read", 3.0), ("slow read", 12.0), ("slow put", 12.0), ("slow copy", 1.0), ("slow load", 2.0)],
]
PROBING = [("lose probe", 0.0), ("delay probe", 0.2), ("double probe", 0.0), ("vanish", 0.0), ("length probe", 0.0)]
DEADLY = ["die", "silent", "view", "forward", "lose copied", "lose forward"]

# A draft's own blocks are at stake wherever blocks are: scarce, shared, restored, lost, spoilt, audited.
_DRAFTED: dict[str, Any] = dict(
    num_ranks=(1, 2, 2, 3),
    replicated=(False, False, True),
    num_drafts=(1, 2, 5),
    num_device=(5, 6, 8, 12),
    block_size=(1, 2, 2, 4),
    chunk_tokens=(1, 4, 8, 64),
    decode_kv_reuse=("canonical", "canonical", "off", "as_is", "as_is"),
    audit_rate=(0, 0, 1),
    tile=(2, 5, 256),
    faults=8,
    outages=(0, 0, 2),
    switches=(0, 0, 2),
    policy=("always", "always", "measured"),
    long=(0, 1),
)

# Blocks of several types, each scarce at times; `spare` ones are beyond what one sequence needs in a step, strides and
# `host` sizes are in blocks.
_TYPED: dict[str, Any] = dict(
    num_ranks=(1, 1, 2, 3),
    replicated=(False, False, True),
    num_device=(6, 8, 12, 16),
    block_size=(2, 4, 4),
    chunk_tokens=(4, 4, 8, 64),
    window=(2, 3, 5, 6, 7, 9, 13),
    spare_swa=(0, 0, 2, 6),
    spare_linear=(0, 0, 2, 8),
    num_host=(4, 16, 32),
    host_swa=(2, 8, 24),
    host_linear=(1, 4, 12),
    swa_stride=(0, 2, 4),
    linear_stride=(0, 1, 3),
    scan=(1, 2, 4),
    tile=(4, 256),
    decode_kv_reuse=("canonical", "canonical", "canonical", "off", "as_is"),
    num_drafts=(0, 0, 1, 3),
    audit_rate=(0, 0, 1),
    policy=("always", "always", "always", "measured"),
    store=(True, True, True, False),
    prefix_cache=(True,) * 15 + (False,),
    timeout_ms=(0, 0, 0, 100),
    faults=(0, 2, 8),
    outages=(0, 0, 0, 2),
    switches=(0, 0, 2),
    long=(0, 1),
)

# What differs from the usual sizes (see `draw`); of several values one is drawn.
FAMILIES: dict[str, dict[str, Any]] = {
    "device only": dict(store=False, num_host=0),
    "device and host": dict(store=False),
    "three tiers": {},
    "tight": dict(num_device=(5, 6, 8), block_size=2, max_seqs=(4, 16), pace=(1.0, 5.0, 20.0), long=1),
    "ranks": dict(num_ranks=(2, 2, 3, 4)),
    "latents": dict(num_ranks=(2, 3), replicated=True),
    "faults": dict(num_ranks=(1, 2, 3), replicated=(False, False, True), faults=12),
    "outages": dict(num_ranks=(1, 2), faults=3, outages=4),
    "limits": dict(num_ranks=(1, 2), faults=6, timeout_ms=(0, 20, 200), deadline_ms=(0, 30, 100, 300), slow_reads=6),
    "measured": dict(num_ranks=(1, 2), policy="measured", pace=(1.0, 10.0, 50.0), tick_s=(0.0, 0.001, 0.005), faults=2),
    "harsh": dict(
        num_ranks=(1, 1, 2),
        num_device=(2, 3, 4, 6),
        num_host=(0, 1, 2, 4, 8),
        block_size=(1, 2, 4),
        max_tokens=(1, 2, 3, 8, 64),
        max_seqs=(1, 2, 4, 16),
        chunk_tokens=(1, 2, 8, 64),
        prefix_cache=(True,) * 8 + (False,),
        store=(True,) * 4 + (False,),
        faults=4,
    ),
    "audited": dict(num_ranks=(1, 2), audit_rate=(1, 2), num_device=(6, 8, 20), block_size=2, long=1, faults=2),
    "drafts": dict(num_ranks=(1, 2), num_drafts=(1, 2, 5), max_tokens=(8, 16, 64), faults=3, audit_rate=(0, 2)),
    "draft model": dict(draft="model", **_DRAFTED),
    "draft head": dict(draft="head", **_DRAFTED),
    "switched": dict(num_ranks=(1, 2), replicated=(False, True), faults=3, switches=4),
    "deadly": dict(num_ranks=(1, 2, 3), faults=3, deadly=1),
    "windows": _TYPED | dict(types="KV SWA"),
    "windows only": _TYPED | dict(types="SWA", num_device=0, longest=(24, 40)),
    "windows and a draft model": _TYPED | dict(types="KV SWA", draft="model", num_drafts=(1, 2, 4)),
    "states": _TYPED | dict(types="KV LINEAR"),
    "states and a draft": _TYPED | dict(types="KV LINEAR", draft=("model", "head"), num_drafts=(1, 2, 4)),
    "windows and states": _TYPED | dict(types="KV SWA LINEAR"),
    "typed and restored": _TYPED
    | dict(types=("KV SWA", "KV LINEAR", "SWA", "KV SWA LINEAR"), restores=1, num_host=(16, 32), host_swa=(8, 24))
    | dict(host_linear=12, faults=(0, 1, 3), store=True, outages=0, switches=0),
    "typed and deadly": _TYPED | dict(types=("KV SWA", "KV LINEAR", "SWA"), deadly=1, faults=3),
}


EXTRAS = ("faults", "slow_reads", "outages", "switches", "deadly", "long", "restores")


def draw(family: str, seed: int) -> Script:
    """The script of a seed in a family of settings."""
    dice = random.Random(f"{family} {seed}")
    chosen: dict[str, Any] = dict(
        num_device=(5, 8, 8, 12),
        num_host=(6, 16, 16),
        block_size=(2, 4, 4),
        decode_kv_reuse=("canonical", "canonical", "off", "as_is"),
        max_tokens=(8, 16, 64),
        max_seqs=(2, 4, 16),
        chunk_tokens=(4, 8, 64),
        batch_size=(1, 2, 8),
        pace=(0.2, 1.0, 1.0, 5.0),
    )
    chosen |= FAMILIES[family]
    chosen = {key: dice.choice(value) if isinstance(value, tuple) else value for key, value in chosen.items()}
    extra = {key: chosen.pop(key, 0) for key in EXTRAS}
    settings = Settings(seed=seed, **chosen) if "types" not in chosen else _typed(seed, chosen)
    if not settings.prefix_cache or not settings.num_host:
        settings = replace(settings, store=False)
    if settings.num_ranks == 1:
        settings = replace(settings, replicated=False)
    events = _requests(dice, settings, LONG if extra["long"] else SHORT, restores=bool(extra["restores"]))
    end = max(event[0] for event in events) + 0.5
    events += _faults(dice, settings, end, GENTLE, dice.choice([0, 0, 3]))
    events += _faults(dice, settings, end, HARSH, dice.randrange(extra["faults"] + 1))
    reads = [("slow read", 0.5), ("slow read", 3.0), ("late", 9.0)]
    events += _faults(dice, settings, end, reads, dice.randrange(extra["slow_reads"] + 1))
    events += _store_events(dice, settings, end, extra["outages"], extra["faults"])
    for _ in range(dice.randrange(extra["switches"] + 1)):
        events.append((_time(dice, end), dice.choice(["attach_store", "detach_store"])))
    if settings.types != "KV":
        events += _faults(dice, settings, end, PROBING, dice.randrange(extra["faults"] + 1) // 2)
    events += _calls(dice, end)
    if extra["deadly"]:
        events.append(_deadly(dice, settings, end))
    events.sort(key=lambda event: event[0])
    return Script(settings, events)


def _typed(seed: int, chosen: dict[str, Any]) -> Settings:
    """Settings for blocks of several types; each type has at least what one sequence needs in a step."""
    spare_swa, spare_linear = chosen.pop("spare_swa"), chosen.pop("spare_linear")
    host_swa, host_linear = chosen.pop("host_swa"), chosen.pop("host_linear")
    size, drafts = chosen["block_size"], chosen["num_drafts"]
    chosen["scan"] = min(chosen["scan"], size)
    chosen["swa_stride"] *= size
    chosen["linear_stride"] *= size
    settings = Settings(seed=seed, **chosen)
    num_swa = settings.swa_need() + spare_swa
    if settings.kinds == (BlockType.SWA,):
        return replace(settings, num_device=num_swa, num_host=host_swa)
    num_swa = min(num_swa, settings.num_device)
    settings = replace(settings, num_swa=(num_swa, host_swa), num_linear=(3 + drafts + spare_linear, host_linear))
    return settings if BlockType.SWA in settings.kinds else replace(settings, window=0)


def _ranks(dice: random.Random, settings: Settings) -> tuple[int, ...]:
    """One rank alone, several, or all."""
    return tuple(sorted(dice.sample(range(settings.num_ranks), dice.randint(1, settings.num_ranks))))


def _faults(
    dice: random.Random, settings: Settings, end: float, kinds: list[tuple[str, float]], count: int
) -> list[Event]:
    events: list[Event] = []
    for kind, amount in (dice.choice(kinds) for _ in range(count)):
        ranks = tuple(range(settings.num_ranks)) if kind == "forward" else _ranks(dice, settings)
        events.append((_time(dice, end), "fault", kind, ranks, amount))
    return events


def _time(dice: random.Random, end: float) -> float:
    return round(dice.random() * end, 3)


def _store_events(dice: random.Random, settings: Settings, end: float, outages: int, faults: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(dice.randrange(outages + 1)):
        events.append((_time(dice, end), "store down", dice.choice([0.05, 0.5, 5.0]), dice.random() < 0.5))
    for _ in range(dice.randrange(faults + 1)):
        how = dice.choice(["lost", "bytes", "other"])
        events.append((_time(dice, end), "spoil store", dice.randrange(50), how))
    for _ in range(dice.randrange(faults + 1) // 2):
        rank = dice.randrange(settings.num_ranks)
        events.append((_time(dice, end), "spoil host", rank, dice.randrange(50)))
    return events


def _calls(dice: random.Random, end: float) -> list[Event]:
    events: list[Event] = []
    for _ in range(dice.choice([0, 0, 1])):
        tiers = [tier for tier in ("device", "host", "store") if dice.random() < 0.5]
        events.append((_time(dice, end), "clear", *tiers))
    if dice.random() < 0.1:
        events.append((_time(dice, end), "stats"))
    if dice.random() < 0.1:
        events.append((round(end * dice.choice([0.8, 1.0]), 3), "drain"))
    return events


def _deadly(dice: random.Random, settings: Settings, end: float) -> Event:
    kind, time = dice.choice(DEADLY), _time(dice, end)
    if kind in ("die", "silent"):
        return time, kind, dice.randrange(settings.num_ranks)
    return time, "fault", kind, _ranks(dice, settings), 0.0


SHORT, LONG = (1, 1, 2, 3, 5, 9), (3, 6, 9, 12)  # tokens of answers


def _requests(
    dice: random.Random, settings: Settings, lengths: tuple[int, ...], *, restores: bool = False
) -> list[Event]:
    """Rounds of requests; before each but the first the device, or more, forgets what it has.

    `restores`: all but the store forgets it, and what was asked before is asked again.
    """
    limit = settings.most_tokens
    trunk = [dice.randrange(VOCABULARY) for _ in range(limit)]
    asked: list[Asking] = []
    events: list[Event] = []
    time, count = 0.0, dice.choice([3, 6, 10, 14])
    for _ in range(dice.choice([1, 2, 2, 3]) + restores):
        if events and restores:
            time = round(time + dice.choice([0.5, 1.0]), 3)
            events.append((time, "clear", "device", *(["host"] if dice.random() < 0.7 else [])))
            time = round(time + dice.choice([0.0, 0.3]), 3)
            again = dice.sample(asked, min(len(asked), 4))
            for prompt, max_tokens, more in again:
                name, length = f"r{len(asked)}", dice.choice([len(prompt), len(prompt), dice.randrange(1, 40)])
                prompt = prompt[:length]
                asked.append((prompt, max_tokens, more))
                events.append((time, "add", name, prompt, max_tokens, more))
                time = round(time + dice.choice([0.0, 0.03]), 3)
        elif events:
            time = round(time + dice.choice([0.3, 1.0, 1.0]), 3)
            forgetful = dice.choice([["device"], ["device", "host"], ["device", "host"], ["device", "host", "store"]])
            events.append((time, "clear", *forgetful))
            time = round(time + dice.choice([0.0, 0.3]), 3)
        for _ in range(dice.randint(1, count)):
            time = round(time + dice.choice([0.0, 0.0, 0.005, 0.03, 0.1, 0.3]), 3)
            events += _request(dice, f"r{len(asked)}", time, dice.choice(lengths), trunk, asked, settings)
    return events


Asking = tuple[list[int], int, dict[str, Any]]  # prompt, max_tokens, more


def _request(
    dice: random.Random,
    name: str,
    time: float,
    max_tokens: int,
    trunk: list[int],
    asked: list[Asking],
    settings: Settings,
) -> list[Event]:
    prompt, more = _prompt(dice, trunk, asked, settings)
    if dice.random() > 0.02:  # else: it may not fit, and is refused
        prompt = prompt[: len(trunk) - 1]
        max_tokens = min(max_tokens, len(trunk) - len(prompt))
    asked.append((prompt, max_tokens, more))
    events: list[Event] = [(time, "add", name, prompt, max_tokens, more)]
    if dice.random() < 0.12:
        events.append((round(time + dice.choice([0.0, 0.01, 0.05, 0.2]), 3), "abort", name))
    return events


def _prompt(
    dice: random.Random, trunk: list[int], asked: list[Asking], settings: Settings
) -> tuple[list[int], dict[str, Any]]:
    """One that shares a prefix, repeats another or goes on from its answer; with salt, priority, prompt logprobs."""
    kind = dice.random()
    if asked and kind < 0.6:
        before, max_tokens, more = dice.choice(asked)
        if kind < 0.35:
            return list(before), more
        root = root_value(0, more.get("salt", ""), replicated=settings.replicated)
        answer = reference(before, max_tokens, root, "P" if settings.decode_kv_reuse == "as_is" else "D")
        return [*before, *answer, dice.randrange(VOCABULARY)], more
    more = {}
    if dice.random() < 0.15:
        more["salt"] = "a"
    if dice.random() < 0.2:
        more["priority"] = dice.choice([-1, 1])
    if dice.random() < 0.08:
        more["prompt_logprobs"] = 1
    if dice.random() < 0.1:
        more["stop"] = [dice.randrange(VOCABULARY) for _ in range(5)]
    tail = [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 4))]
    return trunk[: dice.randrange(len(trunk))] + tail, more
