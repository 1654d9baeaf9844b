"""The metrics as Prometheus reads them: those of the engine (`core/metrics.py`), and three of the API's own."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from reprise.api.records import Record
from reprise.api.service import ChatService
from reprise.core.backend import Status
from reprise.core.metrics import METRICS, MetricKind

_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20)


class Metrics:
    """The metrics of one service, in a registry of their own: two servers in a process do not mix."""

    def __init__(self, service: ChatService) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "reprise_requests", "Ended requests, by API and outcome.", ["api", "outcome"], registry=self._registry
        )
        self._ttft = Histogram(
            "reprise_time_to_first_token_seconds",
            "Time from a request's arrival at the engine to its first token.",
            registry=self._registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self._gap = Histogram(
            "reprise_inter_token_seconds",
            "Time between two tokens of an answer.",
            registry=self._registry,
            buckets=_GAP_BUCKETS_S,
        )
        self._registry.register(_EngineCollector(service))
        service.watch(self)

    def request_ended(self, record: Record) -> None:
        self._requests.labels(api=record.api, outcome=record.ended).inc()
        for outcome in record.outcomes:
            if outcome.ttft_s is not None:
                self._ttft.observe(outcome.ttft_s)

    def token_came(self, gap_s: float) -> None:
        self._gap.observe(gap_s)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own metrics, read when somebody asks."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def collect(self) -> Iterable[Family]:
        return families(self._service.status())


def families(status: Status) -> Iterable[Family]:
    """A family of samples for each name in `METRICS`, in their order."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric in METRICS:
        reading = metric.read(status)
        if metric.family is None or reading is None:
            continue
        if metric.family not in found:
            make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
            labels = None if metric.label is None else [metric.label]
            found[metric.family] = make(f"reprise_{metric.family}", metric.help, labels=labels)
        family = found[metric.family]
        if isinstance(reading, Mapping):
            for value, number in (dict.fromkeys(metric.expected, 0) | dict(reading)).items():
                family.add_metric([value], number)
        else:
            family.add_metric([] if metric.series is None else [metric.series], float(reading))
    return found.values()
