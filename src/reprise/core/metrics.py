"""The metrics of a server: each is declared once, with its unit, its help and how to read it.

`GET /health`, `GET /metrics`, the line that the log ends with, and docs/metrics.md follow from `METRICS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reprise.core.backend import EVICTION_REASONS, DraftSource, DraftStatus, Status, WeightsState
from reprise.core.inspection import OnDisk

Reading = float | Mapping[str, int] | None
"""A number, or one per value of a label; None if it does not apply to this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number, or one for each value of `label`.

    `family` is its name in Prometheus, without `reprise_` and `_total`; several metrics can be series of one family,
    distinguished by `series`. `field` is its name in /health, under "disk" where it starts with `disk.`.
    """

    kind: Literal["counter", "gauge"]
    """A counter only grows while the server runs; a gauge is the current value."""
    unit: str
    help: str
    read: Callable[[Status], Reading]
    field: str
    family: str | None = None
    """None if it is only in /health, since Prometheus can sum it up."""
    label: str | None = None
    series: str | None = None
    expected: tuple[str, ...] = ()
    """Values of the label that Prometheus gets from the start, since a new series hides its first increase."""
    is_of_server: bool = False
    """Whether it is one number for all models of a server; otherwise Prometheus has a series per `model`."""

    def __post_init__(self) -> None:
        assert self.series is None or self.label is not None, self


_Read = Callable[[Status], Reading]


def _metric(
    kind: Literal["counter", "gauge"], *, is_of_server: bool = False
) -> Callable[[str, str | None, str, str, _Read], Metric]:
    """Makes metrics of a kind: of their field, family, unit and help, and what reads them."""

    def metric(field: str, family: str | None, unit: str, text: str, read: _Read) -> Metric:
        return Metric(kind=kind, unit=unit, help=text, read=read, field=field, family=family, is_of_server=is_of_server)

    return metric


_counter, _gauge = _metric("counter"), _metric("gauge")
_server_counter, _server_gauge = _metric("counter", is_of_server=True), _metric("gauge", is_of_server=True)


def _tokens(field: str, text: str, read: _Read) -> Metric:
    return _counter(field, f"{field}_tokens", "tokens", text, read)


def _series(family: str, unit: str, label: str, text: str) -> Callable[[str, str, _Read], Metric]:
    """Makes the gauges of one family: of a field, a value of the label, and what reads it."""
    return lambda field, series, read: replace(_gauge(field, family, unit, text, read), label=label, series=series)


_phase = _series("running_requests", "requests", "phase", "Requests at the engine, by phase.")
_state = _series(
    "state_bytes",
    "bytes",
    "use",
    "Memory by use: KV, snapshots and logits of the cache, live state of running requests, the index.",
)
_disk_bytes = _series("disk_bytes", "bytes", "of", "Bytes on disk, of this model and of others in the same directory.")


def _by_source(field: str, family: str, text: str, read: Callable[[DraftStatus], Mapping[str, int]]) -> Metric:
    metric = _counter(field, family, "tokens", text, _drafts(lambda drafts: dict(read(drafts))))
    return replace(metric, label="source", expected=tuple(map(str, DraftSource)))


def _drafts(read: Callable[[DraftStatus], Reading]) -> _Read:
    return lambda status: None if status.drafts is None else read(status.drafts)


def _on_disk(read: Callable[[OnDisk], int | None]) -> _Read:
    return lambda status: None if status.disk is None else read(status.disk)


METRICS: Sequence[Metric] = (
    _server_gauge("idle", "idle", "", "1 while nothing is queued, running or settling.", lambda s: s.is_idle),
    _server_gauge(
        "stalled_s",
        "stalled_seconds",
        "seconds",
        "Time since the engine last got something done; 0 while there is nothing to do.",
        lambda s: s.stalled_s,
    ),
    _server_counter(
        "busy_s",
        "engine_busy_seconds",
        "seconds",
        "Time the engine thread spent working rather than waiting.",
        lambda s: s.busy_s,
    ),
    _server_counter(
        "inspections",
        "inspections",
        "inspections",
        "Times the engine was inspected for the page, `reprise top` and events.",
        lambda s: s.num_inspections,
    ),
    _server_counter(
        "inspection_s",
        "inspection_seconds",
        "seconds",
        "Part of the engine's busy time spent on inspections; at most a hundredth while requests run.",
        lambda s: s.inspection_s,
    ),
    _phase("queued", "queued", lambda s: s.num_waiting),
    _phase("prefilling", "prefill", lambda s: s.num_prefilling),
    _phase("decoding", "decode", lambda s: s.num_decoding),
    _counter(
        "requests", "jobs", "jobs", "Jobs in the engine, one per choice of a request.", lambda s: s.counts.num_requests
    ),
    _counter("finished", "finished_jobs", "jobs", "Jobs that ran to their end.", lambda s: s.counts.num_finished),
    _counter("cancelled", "cancellations", "jobs", "Jobs that were cancelled.", lambda s: s.counts.num_cancelled),
    _counter("failed", "failed_jobs", "jobs", "Jobs that failed.", lambda s: s.counts.num_failed),
    _counter("prompt_tokens", "prompt_tokens", "tokens", "Tokens of all prompts.", lambda s: s.counts.num_prompt),
    _tokens("reused", "Prompt tokens found in the prefix cache.", lambda s: s.counts.num_reused),
    _tokens("prefilled", "Prompt tokens prefilled while a user waited.", lambda s: s.counts.num_prefilled),
    _tokens("settled", "Tokens prefilled ahead while idle.", lambda s: s.counts.num_settled),
    _tokens("loaded", "Of the reused tokens, those read from disk.", lambda s: s.counts.num_loaded),
    _counter(
        "saved_s",
        "saved_seconds",
        "seconds",
        "Waiting saved: what computing the reused tokens would have taken at the measured prefill speed.",
        lambda s: s.counts.saved_s,
    ),
    _tokens("generated", "Tokens sampled.", lambda s: s.counts.num_generated),
    _counter(
        "images_encoded",
        "encoded_images",
        "images",
        "Images that the model's tower ran for.",
        lambda s: s.counts.num_images_encoded,
    ),
    _counter(
        "images_reused",
        "reused_images",
        "images",
        "Images in prompts that it did not run for.",
        lambda s: s.counts.num_images_reused,
    ),
    _counter(
        "paused",
        "pauses",
        "times",
        "Times a running request was preempted for lack of memory.",
        lambda s: s.counts.num_preemptions,
    ),
    _by_source("drafted", "drafted_tokens", "Tokens drafted and verified, by source.", lambda d: d.num_drafted),
    _by_source(
        "draft_accepted", "accepted_draft_tokens", "Drafted tokens accepted, by source.", lambda d: d.num_accepted
    ),
    _gauge(
        "draft_saved_s",
        "draft_saved_seconds",
        "seconds",
        "Decode time saved by drafts, relative to passes over one token.",
        _drafts(lambda d: d.saved_s),
    ),
    _gauge(
        "draft_bytes",
        "draft_index_bytes",
        "bytes",
        "Memory of the text that drafts are looked up in.",
        _drafts(lambda d: d.nbytes),
    ),
    _counter("evictions", None, "items", "Items evicted from the prefix cache.", lambda s: s.counts.num_evictions),
    Metric(
        kind="counter",
        unit="items",
        help="Items evicted from the prefix cache, by reason.",
        read=lambda s: s.held.evicted_by_reason,
        field="evictions_by_reason",
        family="evictions",
        label="reason",
        expected=EVICTION_REASONS,
    ),
    _gauge(
        "ready", "model_ready", "", "1 while the model's weights are loaded.", lambda s: s.weights is WeightsState.READY
    ),
    _gauge(
        "bytes_weights",
        "weights_bytes",
        "bytes",
        "Weights in memory or being loaded. Weights shared with another model count once.",
        lambda s: s.weights_nbytes,
    ),
    _counter("loads", "loads", "loads", "Times the model's weights were loaded.", lambda s: s.num_loads),
    _counter("load_s", "load_seconds", "seconds", "Time spent loading weights.", lambda s: s.load_s),
    _server_gauge(
        "bytes_budget", "budget_bytes", "bytes", "Memory that layer state may take.", lambda s: s.held.budget_nbytes
    ),
    _gauge(
        "bytes_held",
        None,
        "bytes",
        "Memory that the cache holds: KV and snapshots.",
        lambda s: s.held.kv_nbytes + s.held.snapshot_nbytes,
    ),
    _state("bytes_kv", "kv", lambda s: s.held.kv_nbytes),
    _state("bytes_snapshots", "snapshots", lambda s: s.held.snapshot_nbytes),
    _gauge(
        "bytes_pinned",
        "pinned_bytes",
        "bytes",
        "Part of KV and snapshots that is pinned.",
        lambda s: s.held.pinned_nbytes,
    ),
    _state("bytes_live", "live", lambda s: s.held.live_nbytes),
    _gauge(
        "bytes_live_most",
        "live_bytes_most",
        "bytes",
        "The most that running requests have held beside the cache: what --cache-bytes needs besides prefixes.",
        lambda s: s.held.most_live_nbytes,
    ),
    _state("bytes_logits", "logits", lambda s: s.held.logits_nbytes),
    _state("bytes_index", "index", lambda s: s.held.index_nbytes),
    _gauge("tokens_held", "cached_tokens", "tokens", "Unique tokens in the prefix cache.", lambda s: s.held.num_tokens),
    _gauge("pins", "pins", "positions", "Pinned positions.", lambda s: s.held.num_pins),
    _counter(
        "audit.checked",
        "audited_answers",
        "answers",
        "Answers computed again, cold, while idle.",
        lambda s: s.audit.num_checked,
    ),
    _counter(
        "audit.different",
        "audit_differences",
        "answers",
        "Audited answers that differ from a cold run. Any is a bug.",
        lambda s: s.audit.num_different,
    ),
    _counter(
        "audit.near_ties",
        "audit_near_ties",
        "answers",
        "Audited answers where rounding chose between tokens about equally likely.",
        lambda s: s.audit.num_near_ties,
    ),
    _gauge(
        "audit.worst",
        "audit_worst_logprob_difference",
        "",
        "Largest difference of a token's log-probability that an audit has seen.",
        lambda s: s.audit.worst,
    ),
    _server_counter(
        "recorded",
        "recorded_requests",
        "requests",
        "Requests written to the `--record` file.",
        lambda s: s.num_recorded,
    ),
    _server_counter(
        "unrecorded",
        "unrecorded_requests",
        "requests",
        "Requests missing from the `--record` file: it could not be written, or not in time.",
        lambda s: s.num_unrecorded,
    ),
    _server_gauge(
        "disk.bytes_budget",
        "disk_budget_bytes",
        "bytes",
        "Disk space that may be used.",
        _on_disk(lambda d: d.budget_nbytes),
    ),
    _disk_bytes("disk.bytes_held", "this", _on_disk(lambda d: d.nbytes)),
    _disk_bytes("disk.bytes_of_other_models", "others", _on_disk(lambda d: d.others_nbytes)),
    _gauge(
        "disk.bytes_queued",
        "disk_queued_bytes",
        "bytes",
        "Bytes waiting to be written.",
        _on_disk(lambda d: d.queued_nbytes),
    ),
    _counter(
        "disk.bytes_written",
        "disk_written_bytes",
        "bytes",
        "Bytes written to disk.",
        _on_disk(lambda d: d.written_nbytes),
    ),
    _server_gauge(
        "disk.bytes_written_today",
        "disk_written_today_bytes",
        "bytes",
        "Bytes written to the directory today, by this server and those before it.",
        _on_disk(lambda d: d.today_nbytes),
    ),
    _server_gauge(
        "disk.bytes_written_daily",
        "disk_daily_bytes",
        "bytes",
        "Most bytes to be written to the directory in a day.",
        _on_disk(lambda d: d.daily_nbytes),
    ),
    _counter("disk.bytes_read", "disk_read_bytes", "bytes", "Bytes read from disk.", _on_disk(lambda d: d.read_nbytes)),
    _gauge("disk.files", "disk_files", "files", "Files on disk of this model.", _on_disk(lambda d: d.num_files)),
    _counter(
        "disk.evicted", "disk_evictions", "files", "Files removed to make room.", _on_disk(lambda d: d.num_evicted)
    ),
    _counter(
        "disk.quarantined",
        "disk_quarantined",
        "files",
        "Files that failed verification and were quarantined.",
        _on_disk(lambda d: d.num_quarantined),
    ),
    _counter("disk.errors", "disk_errors", "times", "Failed reads and writes.", _on_disk(lambda d: d.num_errors)),
)


def health_fields(status: Status) -> dict[str, object]:
    """Every metric by its field in /health; "disk" is None where nothing is kept on disk.

    Its "trouble" is a sentence, where an object store cannot be read.
    """
    body: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {"": body, "audit": {}, "disk": {}}
    for metric in METRICS:
        section, _, name = metric.field.rpartition(".")
        sections[section][name] = metric.read(status)
    on_disk = (
        None
        if status.disk is None
        else {**sections["disk"], "trouble": status.disk.trouble, "spared": status.disk.spared}
    )
    return body | {"audit": sections["audit"], "disk": on_disk}


def totals_line(status: Status) -> str:
    """The counters that are not zero, for the log."""
    readings = ((metric, metric.read(status)) for metric in METRICS if metric.kind == "counter")
    parts = [
        f"{metric.field.replace('.', ' ').replace('_', ' ')} {value:,}"
        for metric, value in readings
        if isinstance(value, int) and value > 0
    ]
    return ", ".join(parts) if parts else "nothing"
