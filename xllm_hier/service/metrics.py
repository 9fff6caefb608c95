"""The metrics of one replica of the service, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .cluster import Cluster
from .instances import State
from .prefix_index import IndexState
from .relay import Relay

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class ServiceMetrics(Collector):
    """Owns the registry of one replica; `routing_s` is the time from a request's body to its first attempt."""

    def __init__(self, cluster: Cluster, relay: Relay) -> None:
        self._cluster, self._relay = cluster, relay
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.num_open = 0
        self.routing_s = Histogram(
            "xllm_service_routing_seconds",
            "from a request's body to its being sent to an instance: tokenising, hashing, choosing",
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        cluster = self._cluster
        yield GaugeMetricFamily("xllm_service_master", "1 for the elected replica", float(cluster.is_master))
        reads = float(not cluster.membership.why)
        yield GaugeMetricFamily("xllm_service_registry", "1 while the registry answers", reads)
        yield GaugeMetricFamily("xllm_service_open_requests", "requests that are being answered", self.num_open)
        yield from self._instances()
        yield from self._requests()
        yield from self._index()

    def _instances(self) -> Iterator[Metric]:
        states = Counter((one.state, one.info.role) for one in self._cluster.instances.by_name.values())
        family = GaugeMetricFamily("xllm_service_instances", "instances by state and role", labels=["state", "role"])
        for state in State:
            for role in sorted({role for _, role in states} | {"DEFAULT"}):
                family.add_metric([state.value, role], states[state, role])
        yield family

    def _requests(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "xllm_service_answers", "answers of instances by status", labels=["instance", "status"]
        )
        for (name, status), count in self._relay.answers.items():
            answers.add_metric([name, str(status)], count)
        yield answers
        retries = CounterMetricFamily("xllm_service_retries", "attempts that gave no answer", labels=["reason"])
        for reason, count in self._relay.retries.items():
            retries.add_metric([reason], count)
        yield retries
        told = self._cluster.router.describe()
        decisions = CounterMetricFamily("xllm_service_decisions", "how requests were routed", labels=["decision"])
        for decision, count in told["decisions"].items():
            decisions.add_metric([decision], count)
        yield decisions
        tokens = CounterMetricFamily(
            "xllm_service_prefix_tokens", "prompt tokens by the tier expected to pay for them", labels=["tier"]
        )
        for tier, count in told["tokens"].items():
            tokens.add_metric([tier], count)
        yield tokens

    def _index(self) -> Iterator[Metric]:
        known = self._cluster.index.describe()
        state = GaugeMetricFamily(
            "xllm_service_index", "1 for the state of what is known of a cache", labels=["of", "state"]
        )
        blocks = GaugeMetricFamily("xllm_service_index_blocks", "known blocks", labels=["of", "tier", "type"])
        for name, one in known["instances"].items():
            for each in IndexState:
                state.add_metric([name, each.value], float(one["state"] == each.value))
            for tier in ("device", "host"):
                for block_type, count in one[tier].items():
                    blocks.add_metric([name, tier, block_type], count)
        for name, one in known["stores"].items():
            for each in IndexState:
                state.add_metric([name, each.value], float(one["state"] == each.value))
            for block_type, count in one.items():
                if block_type != "state":
                    blocks.add_metric([name, "store", block_type], count)
        yield state
        yield blocks
        yield CounterMetricFamily("xllm_service_event_gaps", "times that events were missed", self._cluster.gaps())
