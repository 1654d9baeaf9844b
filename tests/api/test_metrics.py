"""Each number is declared once: /health, /metrics and their page have all of them, under the names they always had."""

from dataclasses import fields, replace
from itertools import count
from typing import Any

from reprise.api.watch.prometheus import families
from reprise.core.backend import (
    AuditTotals,
    Counts,
    DraftStatus,
    Held,
    Status,
    WeightsState,
    total_of,
)
from reprise.core.inspection import OnDisk
from reprise.core.metrics import METRICS, health_fields, totals_line
from tools.metrics_page import PAGE, page

FAMILIES = {
    "idle",
    "running_requests",
    "prompt_tokens",
    "reused_tokens",
    "prefilled_tokens",
    "settled_tokens",
    "loaded_tokens",
    "generated_tokens",
    "cancellations",
    "pauses",
    "drafted_tokens",
    "accepted_draft_tokens",
    "draft_saved_seconds",
    "evictions",
    "state_bytes",
    "pinned_bytes",
    "pins",
    "budget_bytes",
    "cached_tokens",
    "disk_written_bytes",
    "disk_read_bytes",
    "disk_evictions",
    "disk_quarantined",
    "disk_errors",
    "disk_budget_bytes",
    "disk_bytes",
}
FIELDS = {
    "idle",
    "queued",
    "prefilling",
    "decoding",
    "requests",
    "finished",
    "cancelled",
    "failed",
    "prompt_tokens",
    "reused",
    "prefilled",
    "settled",
    "loaded",
    "generated",
    "paused",
    "drafted",
    "draft_accepted",
    "draft_saved_s",
    "evictions",
    "evictions_by_reason",
    "bytes_budget",
    "bytes_held",
    "bytes_kv",
    "bytes_snapshots",
    "bytes_pinned",
    "bytes_live",
    "bytes_index",
    "tokens_held",
    "pins",
    "disk",
}
DISK_FIELDS = {
    "bytes_budget",
    "bytes_held",
    "bytes_of_other_models",
    "bytes_queued",
    "bytes_written",
    "bytes_read",
    "files",
    "evicted",
    "quarantined",
    "errors",
    "bytes_written_today",
    "bytes_written_daily",
}


def full_status(*, has_disk: bool) -> Status:
    """A status in which every number is another."""
    number = count(1000)

    def filled(kind: Any, **given: Any) -> Any:
        return kind(**{f.name: next(number) for f in fields(kind) if f.name not in given} | given)

    return filled(
        Status,
        is_idle=False,
        is_closing=False,
        has_died=False,
        weights=WeightsState.READY,
        drafting="not made",
        num_ahead={"key": next(number)},
        counts=filled(Counts),
        audit=filled(AuditTotals, verdicts={}),
        held=filled(Held, evicted_by_reason={"budget": next(number)}),
        drafts=filled(
            DraftStatus,
            num_drafted={"history": next(number)},
            num_accepted={"history": next(number)},
        ),
        disk=filled(OnDisk, trouble="The disk is full.", spared="The battery is low.") if has_disk else None,
    )


def numbers_in(status: Status) -> set[int]:
    parts = (status, status.counts, status.held, status.drafts, status.audit, status.disk)
    found = (getattr(part, f.name) for part in parts if part is not None for f in fields(part))
    return {value for value in found if isinstance(value, int) and not isinstance(value, bool)}


def test_every_number_of_the_status_is_declared_and_told() -> None:
    status = full_status(has_disk=True)
    told: dict[str, Any] = health_fields(status)
    sections = {*told["audit"].values(), *told["disk"].values()}
    assert numbers_in(status) <= {v for v in told.values() if isinstance(v, int)} | sections
    samples = {sample.value for family in families({"m": status}) for sample in family.samples}
    only_in_health = {metric.read(status) for metric in METRICS if metric.family is None}
    assert numbers_in(status) - only_in_health <= samples


def test_models_are_added_up_and_what_they_share_counts_once() -> None:
    one, other = full_status(has_disk=True), full_status(has_disk=True)
    assert one.disk is not None and other.disk is not None
    # Both in one directory, with 7 bytes of a third model.
    one = replace(one, disk=replace(one.disk, others_nbytes=other.disk.nbytes + 7))
    other = replace(other, disk=replace(other.disk, others_nbytes=one.disk.nbytes + 7))
    total = total_of([one, other])
    assert total_of([one]) is one and total.disk is not None
    assert total.counts.num_prompt == one.counts.num_prompt + other.counts.num_prompt
    assert total.held.kv_nbytes == one.held.kv_nbytes + other.held.kv_nbytes
    assert total.held.budget_nbytes == one.held.budget_nbytes
    assert (total.disk.nbytes, total.disk.others_nbytes) == (one.disk.nbytes + other.disk.nbytes, 7)
    assert total.held.evicted_by_reason["budget"] == sum(s.held.evicted_by_reason["budget"] for s in (one, other))
    assert (total.busy_s, total.stalled_s) == (max(one.busy_s, other.busy_s), max(one.stalled_s, other.stalled_s))
    told = {family.name: family.samples for family in families({"a": one, "b": other})}
    assert [s.labels for s in told["reprise_budget_bytes"]] == [{}], "one budget"
    assert [s.labels["model"] for s in told["reprise_pins"]] == ["a", "b"]


def test_names_stay() -> None:
    status = full_status(has_disk=True)
    assert {family.name.removeprefix("reprise_") for family in families({"m": status})} >= FAMILIES
    told: dict[str, Any] = health_fields(status)
    assert set(told) >= FIELDS
    assert set(told["disk"]) >= DISK_FIELDS and told["disk"]["trouble"] == "The disk is full."
    assert set(told["audit"]) == {"checked", "different", "near_ties", "worst"}


def test_without_a_disk_nothing_is_told_of_one() -> None:
    status = full_status(has_disk=False)
    assert health_fields(status)["disk"] is None
    assert not any("disk" in family.name for family in families({"m": status}))


def test_an_eviction_has_a_series_before_the_first() -> None:
    evictions = next(family for family in families({"m": Status()}) if family.name == "reprise_evictions")
    seen = {(sample.labels["reason"], sample.value) for sample in evictions.samples}
    assert seen == {("budget", 0), ("cleared", 0), ("audit", 0)}


def test_the_log_has_what_is_not_zero() -> None:
    assert totals_line(Status()) == "nothing"
    assert totals_line(Status(counts=Counts(num_requests=1200))) == "requests 1,200"


def test_the_page_of_metrics_is_the_one_that_the_declarations_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.metrics_page`"
