"""The metrics for Prometheus: the engine's counters as it tells them, and the times that only the API sees.

Names are those of the documentation; vLLM's names for the same figures stand beside them, so that its dashboards work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..calls import GetStats
from ..engine_client import EngineClient
from ..errors import EngineDeadError, RequestError
from ..figures import EngineStats, PairStats, WorkerStats

STORE_STATES = ("attached", "degraded", "open", "detached")
_TIERS = ("device", "host", "store", "computed")
_FIRST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_NEXT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class StatsCache:
    """The engine's latest stats; asks again when they are older than `max_age_s`, and keeps the old ones on silence.

    `told`: the engine has answered at least once; `fresh`: it answered the last time it was asked.
    """

    def __init__(self, client: EngineClient, max_age_s: float = 0.2) -> None:
        self._client = client
        self._max_age_s = max_age_s
        self._asked_at = float("-inf")
        self.values = EngineStats()
        self.told = False
        self.fresh = False

    async def refresh(self, timeout_s: float) -> EngineStats:
        """The stats, at most `timeout_s` seconds later; `fresh` tells whether the engine answered this time."""
        if self.fresh and time.monotonic() - self._asked_at < self._max_age_s:
            return self.values
        try:
            self.values = await self._client.call(GetStats(), timeout_s)
            self.fresh = self.told = True
        except (TimeoutError, EngineDeadError, RequestError):
            self.fresh = False
        self._asked_at = time.monotonic()
        return self.values

    @property
    def store_state(self) -> str:
        """The state that the engine told last, at its start or since."""
        return self.values.workers.store_state if self.told else self._client.info.store_state


class ApiMetrics:
    """Owns the registry of one API process."""

    def __init__(self, stats: StatsCache) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._first = self._histogram("xllm_time_to_first_token_seconds", "request to first token", _FIRST_BUCKETS)
        self._first_vllm = self._histogram("vllm:time_to_first_token_seconds", "request to first token", _FIRST_BUCKETS)
        self._next = self._histogram("xllm_inter_token_seconds", "between tokens of one choice", _NEXT_BUCKETS)
        self._whole = self._histogram("xllm_request_seconds", "request to the end of a choice", _WHOLE_BUCKETS)
        self._ended = Counter(
            "xllm_requests", "choices that ended, by reason", ["finish_reason"], registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def start_request(self) -> RequestTimes:
        """Start the clock of one HTTP request."""
        return RequestTimes(self)

    def observe_token(self, seconds: float, *, first: bool) -> None:
        if first:
            self._first.observe(seconds)
            self._first_vllm.observe(seconds)
        else:
            self._next.observe(seconds)

    def observe_end(self, seconds: float, finish_reason: str) -> None:
        self._whole.observe(seconds)
        self._ended.labels(finish_reason).inc()

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class RequestTimes:
    """The clock of one HTTP request, whose choices run side by side."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}

    def token(self, choice: int) -> None:
        now = time.perf_counter()
        last = self._last.get(choice)
        self._metrics.observe_token(now - (self._start if last is None else last), first=last is None)
        self._last[choice] = now

    def ended(self, finish_reason: str) -> None:
        self._metrics.observe_end(time.perf_counter() - self._start, finish_reason)


class _EngineCollector(Collector):
    """Renders the engine's latest stats."""

    def __init__(self, stats: StatsCache) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        values, state = self._stats.values, self._stats.store_state
        yield from _prefix(values)
        yield _blocks(values.blocks)
        yield _labelled_gauge(
            "xllm_tier_bytes", "memory of a tier on this machine, all ranks", "tier", values.tier_bytes
        )
        yield from _restores(values)
        yield from _drafts(values)
        alarm = float(values.cache_alarm)
        yield GaugeMetricFamily("xllm_cache_alarm", "1 when an audit found a wrong block: nothing is restored", alarm)
        yield from _transfers(values.workers)
        states = {name: float(name == state) for name in STORE_STATES}
        yield _labelled_gauge("xllm_store_state", "1 for the state the store is in", "state", states)
        if self._stats.told:
            yield from _queues(values)
        yield _counter("xllm_preemptions", "sequences that lost their device blocks", values.preemptions)
        yield _counter("xllm_steps", "steps of the engine", values.steps)
        if self._stats.told:
            yield GaugeMetricFamily("xllm_uptime_seconds", "since the engine's start", value=values.uptime_s)
        if values.pd is not None:
            yield from _pairs(values.pd)


def _labelled_gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _restores(values: EngineStats) -> Iterator[Metric]:
    decisions = CounterMetricFamily(
        "xllm_restore_decisions", "requests by tier and what was done with their hits", labels=["tier", "decision"]
    )
    for tier, counts in values.restore_decisions.items():
        for decision, count in counts.items():
            decisions.add_metric([tier, decision], count)
    yield decisions
    audits = CounterMetricFamily("xllm_audits", "restored prefixes computed again, by result", labels=["result"])
    for result, count in values.audits.items():
        audits.add_metric([result], count)
    yield audits


def _drafts(values: EngineStats) -> Iterator[Metric]:
    drafts = CounterMetricFamily(
        "xllm_draft_tokens", "draft tokens, by where the request's prompt came from", labels=["origin", "result"]
    )
    for result, counts in (("drafted", values.drafted), ("accepted", values.accepted)):
        for origin, count in counts.items():
            drafts.add_metric([origin, result], count)
    yield drafts
    text = "tokens per step with drafts, by where the prompt came from"
    yield _labelled_gauge("xllm_accept_length", text, "origin", values.accept_length)
    yield GaugeMetricFamily(
        "xllm_accept_alarm",
        "1 when drafts behind restored prompts are right less often",
        float(values.accept_alarm),
    )


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _prefix(values: EngineStats) -> Iterator[Metric]:
    tokens = values.prefix_tokens
    by_tier = CounterMetricFamily("xllm_prefix_tokens", "prompt tokens by the tier that paid", labels=["tier"])
    for tier in _TIERS:
        by_tier.add_metric([tier], tokens.get(tier, 0))
    yield by_tier
    total, computed = sum(tokens.get(tier, 0) for tier in _TIERS), tokens.get("computed", 0)
    yield _counter("vllm:prefix_cache_queries", "prompt tokens looked up", total)
    yield _counter("vllm:prefix_cache_hits", "prompt tokens found in any tier", total - computed)
    yield _counter("vllm:prompt_tokens", "prompt tokens", total)
    yield _counter("vllm:generation_tokens", "generated tokens", values.generation_tokens)
    yield _counter("xllm_generation_tokens", "generated tokens", values.generation_tokens)


def _blocks(blocks: dict[str, dict[str, dict[str, int]]]) -> Metric:
    family = GaugeMetricFamily("xllm_blocks", "blocks by tier, type and state", labels=["tier", "type", "state"])
    for tier, types in blocks.items():
        for block_type, states in types.items():
            for state, count in states.items():
                family.add_metric([tier, block_type, state], count)
    return family


def _transfers(workers: WorkerStats) -> Iterator[Metric]:
    moved = CounterMetricFamily("xllm_transfer_bytes", "bytes moved between tiers and instances", labels=["kind"])
    for kind, count in workers.transfer_bytes.items():
        moved.add_metric([kind], count)
    yield moved
    times = HistogramMetricFamily("xllm_transfer_seconds", "time of one transfer", labels=["kind"])
    for kind, found in workers.transfer_seconds.items():
        buckets = [(f"{border:g}", float(count)) for border, count in found.buckets if not math.isinf(border)]
        times.add_metric([kind], [*buckets, ("+Inf", float(found.count))], found.sum)
    yield times
    failures = CounterMetricFamily("xllm_transfer_failures", "transfers that failed", labels=["kind", "cause"])
    for failure in workers.transfer_failures:
        failures.add_metric([failure.kind, failure.cause], failure.count)
    yield failures


def _queues(values: EngineStats) -> Iterator[Metric]:
    queues = {"running": values.running, "waiting": values.waiting, "prefetching": values.prefetching}
    for state, count in queues.items():
        yield GaugeMetricFamily(f"xllm_requests_{state}", f"requests {state}", value=count)
    for state in ("running", "waiting"):
        yield GaugeMetricFamily(f"vllm:num_requests_{state}", f"requests {state}", value=queues[state])


def _pairs(pair: PairStats) -> Iterator[Metric]:
    """The metrics of an instance that is one half of a pair."""
    states = [state.partition(":")[0] for state in pair.peers.values()]
    counts = {state: states.count(state) for state in ("linked", "refused", "absent")}
    yield _labelled_gauge("xllm_pd_peers", "other halves by state", "state", counts)
    yield _labelled_gauge("xllm_pd_requests", "requests on their way between instances", "phase", pair.phases)
    for name, text, count in (
        ("handed_over", "requests handed over to a decode instance", pair.handed_over),
        ("moved", "requests that left a decode instance for another one", pair.moved),
        ("taken_over", "requests taken over from a prefill instance", pair.taken_over),
    ):
        if count is not None:
            yield _counter(f"xllm_pd_{name}", text, count)
    yield _counter("xllm_pd_push_wait_seconds", "steps waited for their pushes", pair.push_wait_s)
