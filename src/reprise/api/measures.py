"""What Prometheus may know of the server."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reprise.api.records import Record
from reprise.api.service import ChatService
from reprise.core.backend import EVICTION_REASONS, Status

_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20)


class Metrics:
    """The metrics of one service, in a registry of their own: two servers in a process do not mix."""

    def __init__(self, service: ChatService) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "reprise_requests", "Requests that ended, by API and how.", ["api", "outcome"], registry=self._registry
        )
        self._ttft = Histogram(
            "reprise_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            registry=self._registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self._gap = Histogram(
            "reprise_inter_token_seconds",
            "Between two tokens of one answer.",
            registry=self._registry,
            buckets=_GAP_BUCKETS_S,
        )
        self._registry.register(_Engine(service))
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


class _Engine(Collector):
    """The engine's own counts, read when somebody asks."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        status = self._service.backend.status()
        yield from _counters(status)
        yield from _gauges(status)
        idle = GaugeMetricFamily("reprise_idle", "1 while nothing is queued, running or settling.")
        idle.add_metric([], float(self._service.is_idle))
        yield idle


def _counters(status: Status) -> Iterable[Metric]:
    counts = status.counts
    for name, text, value in (
        ("prompt_tokens", "Tokens of all prompts.", counts.prompt),
        ("reused_tokens", "Prompt tokens that were in the prefix cache.", counts.reused),
        ("prefilled_tokens", "Prompt tokens computed while a user waited.", counts.prefilled),
        ("settled_tokens", "Tokens computed ahead while idle.", counts.settled),
        ("loaded_tokens", "Of the reused tokens, those that were read from disk.", counts.loaded),
        ("generated_tokens", "Tokens sampled.", counts.generated),
        ("cancellations", "Jobs that were cancelled.", counts.cancelled),
        ("pauses", "Times that a running request had to wait for memory.", counts.paused),
    ):
        yield CounterMetricFamily(f"reprise_{name}", text, value=value)
    evictions = CounterMetricFamily("reprise_evictions", "Items that left the prefix cache.", labels=["reason"])
    # A series that is not there until something happens hides its first rise.
    for reason, value in (dict.fromkeys(EVICTION_REASONS, 0) | status.held.evicted_by_reason).items():
        evictions.add_metric([reason], value)
    yield evictions
    disk = status.disk
    if disk is not None:
        for name, text, value in (
            ("disk_written_bytes", "Bytes written to the disk.", disk.written),
            ("disk_read_bytes", "Bytes read from the disk.", disk.read),
            ("disk_evictions", "Files that gave way to others.", disk.evicted),
            ("disk_quarantined", "Files that did not verify, and were put aside.", disk.quarantined),
            ("disk_errors", "Times that the disk could not be written or read.", disk.errors),
        ):
            yield CounterMetricFamily(f"reprise_{name}", text, value=value)


def _gauges(status: Status) -> Iterable[Metric]:
    held = status.held
    requests = GaugeMetricFamily("reprise_running_requests", "Requests at the engine, by phase.", labels=["phase"])
    for phase, value in (
        ("queued", status.queued),
        ("prefill", status.prefilling),
        ("decode", status.decoding),
    ):
        requests.add_metric([phase], value)
    yield requests
    memory = GaugeMetricFamily("reprise_state_bytes", "Bytes of layer state, by use.", labels=["use"])
    for use, value in (("kv", held.kv), ("snapshots", held.snapshots), ("live", held.live), ("index", held.index)):
        memory.add_metric([use], value)
    yield memory
    yield GaugeMetricFamily("reprise_pinned_bytes", "Of KV and snapshots, what stays for pins.", value=held.pinned)
    yield GaugeMetricFamily("reprise_pins", "Positions that are pinned.", value=held.pins)
    yield GaugeMetricFamily("reprise_budget_bytes", "Bytes that layer state may take.", value=held.budget)
    yield GaugeMetricFamily("reprise_cached_tokens", "Unique tokens in the prefix cache.", value=held.tokens)
    disk = status.disk
    if disk is not None:
        yield GaugeMetricFamily("reprise_disk_budget_bytes", "Bytes that may be kept on disk.", value=disk.budget)
        kept = GaugeMetricFamily("reprise_disk_bytes", "Bytes kept on disk, by model.", labels=["model"])
        kept.add_metric(["this"], disk.held)
        kept.add_metric(["others"], disk.others)
        yield kept
