"""The metrics as Prometheus reads them: those of the engine (`core/metrics.py`), and three of the API's own.

What is of one model has the label `model`, also where there is only one: whoever adds a model keeps their dashboards.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from reprise.api.service.exchange import Record
from reprise.api.service.service import ChatService
from reprise.core.backend import Status, total_of
from reprise.core.metrics import METRICS

_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20)


class Metrics:
    """The metrics of one server, in a registry of their own: two servers in a process do not mix."""

    def __init__(self, service: ChatService) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "reprise_requests",
            "Ended requests, by API and outcome.",
            ["api", "outcome", "model"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "reprise_time_to_first_token_seconds",
            "Time from a request's arrival at the engine to its first token.",
            ["model"],
            registry=self._registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self._gap = Histogram(
            "reprise_inter_token_seconds",
            "Time between two tokens of an answer.",
            ["model"],
            registry=self._registry,
            buckets=_GAP_BUCKETS_S,
        )
        for model in service.statuses():
            # A series that is not there hides its first rise.
            self._ttft.labels(model=model)
            self._gap.labels(model=model)
        self._registry.register(_EngineCollector(service))
        service.watch(self)

    def request_ended(self, record: Record) -> None:
        self._requests.labels(api=record.api, outcome=record.ended, model=record.model).inc()
        for outcome in record.outcomes:
            if outcome.ttft_s is not None:
                self._ttft.labels(model=record.model).observe(outcome.ttft_s)

    def token_came(self, gap_s: float, model: str) -> None:
        self._gap.labels(model=model).observe(gap_s)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own metrics, read when somebody asks."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def collect(self) -> Iterable[Family]:
        return families(self._service.statuses())


def families(statuses: Mapping[str, Status]) -> Iterable[Family]:
    """A family of samples for each name in `METRICS`, in their order; `statuses` are those of the models by name."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    of_server: Mapping[str, Status] = {"": total_of(list(statuses.values()))}
    for metric in METRICS:
        for model, status in (of_server if metric.is_of_server else statuses).items():
            reading = metric.read(status)
            if metric.family is None or reading is None:
                continue
            labels = [] if metric.label is None else [metric.label]
            if metric.family not in found:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                names = [*labels, *([] if metric.is_of_server else ["model"])]
                found[metric.family] = make(f"reprise_{metric.family}", metric.help, labels=names)
            name = [] if metric.is_of_server else [model]
            if isinstance(reading, Mapping):
                for value, number in (dict.fromkeys(metric.expected, 0) | dict(reading)).items():
                    found[metric.family].add_metric([value, *name], number)
            else:
                series = [] if metric.series is None else [metric.series]
                found[metric.family].add_metric([*series, *name], float(reading))
    return found.values()
