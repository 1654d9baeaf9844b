"""What happened to past requests, newest first, bounded."""

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reprise.api.service.exchange import RawPrompt, Record, RecordedImage
from reprise.api.service.replay import blocks_of
from reprise.api.service.reply import Reply
from reprise.chat.reasons.explain import Explanation
from reprise.core.backend import Verdict
from reprise.core.errors import NotFound, RequestCancelled
from reprise.core.images import PromptImage
from reprise.core.outcome import Outcome
from reprise.core.prompt import Prompt


def record_body(record: Record, verdicts: Mapping[str, Verdict] | None = None) -> dict[str, Any]:
    """The record as `GET /v1/cache/requests` gives it. Counts are tokens over all choices; the prompt counts once.

    `verdicts`: of the latest audits, by job. `audit` is that of each choice that was audited.
    """
    outcomes = record.outcomes
    body: dict[str, Any] = {
        "id": record.id,
        "object": "cache.request",
        "api": record.api,
        "model": record.model,
        "created": round(record.created, 3),
        "ended": record.ended,
        "error": record.error,
        "status": record.status,
        "chat": record.chat,
        "session": record.caller.session,
        "agent": record.caller.agent,
        "parent_agent": record.caller.parent,
        "choices": len(outcomes),
        "notes": list(record.notes),
        "audit": _audits(record, verdicts or {}),
        "sampling": {name: {"value": used.value, "from": str(used.origin)} for name, used in record.used.items()},
    }
    if outcomes:
        first = min(outcomes, key=lambda outcome: outcome.num_reused)
        body |= {
            "prompt_tokens": first.num_prompt,
            "matched": first.num_matched,
            "reused": first.num_reused,
            "settled": first.num_settled,
            "loaded": first.num_loaded,
            "awaited": first.num_awaited,
            "prefilled": sum(outcome.num_prefilled for outcome in outcomes),
            "generated": sum(outcome.num_generated for outcome in outcomes),
            "drafted": sum(outcome.num_drafted for outcome in outcomes),
            "accepted": sum(outcome.num_accepted for outcome in outcomes),
            "drafts": drafts_by_source(outcomes),
            "draft_saved_s": sum(outcome.draft_saved_s for outcome in outcomes),
            "stored": sum(outcome.num_stored for outcome in outcomes),
            "sources": sources(first),
            "reason": str(first.reason),
            "checkpoints": list(first.checkpoints),
            "queued_s": first.queued_s,
            "prefill_s": first.prefill_s,
            "ttft_s": first.ttft_s,
            "spans": spans(first, render_s=record.render_s),
            "images": [_image_body(image, first) for image in record.images],
            "images_encoded": sum(outcome.num_images_encoded for outcome in outcomes),
            "images_foreseen_s": first.tower_foreseen_s,
            "saved_s": sum(outcome.saved_s for outcome in outcomes),
            "total_s": max(outcome.total_s for outcome in outcomes),
            "prefill_tokens_per_s": _rounded(prefill_rate(outcomes)),
            "decode_tokens_per_s": _rounded(decode_rate(outcomes)),
        }
    if record.explanation is not None:
        body["reason"] = str(record.explanation.reason)
        body["computed_at_best"] = record.explanation.num_at_best
        body["explanation"] = explanation_body(record.explanation)
    return body


def _image_body(image: RecordedImage, outcome: Outcome) -> dict[str, Any]:
    return {
        "width": image.width,
        "height": image.height,
        "tokens": len(image.span),
        "start": image.span.start,
        "digest": image.digest,
        "reused": image.span.stop <= outcome.num_reused,
    }


def drafts_by_source(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """How many tokens each source drafted, and how many of them were right; what drafted nothing is left out."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for source, drafted in outcome.drafted.items():
            counts = found.setdefault(source, {"drafted": 0, "accepted": 0})
            counts["drafted"] += drafted.num
            counts["accepted"] += drafted.num_accepted
    return found


def sources(outcome: Outcome) -> dict[str, int]:
    """Where the state of the prompt's tokens came from, in tokens; together they are the prompt.

    A token that was prefilled ahead and read from the disk later was read from the disk, and so on: the first counts.
    """
    loaded = min(outcome.num_loaded, outcome.num_reused)
    shared = min(outcome.num_awaited, outcome.num_reused - loaded)
    ahead = min(outcome.num_settled, outcome.num_reused - loaded - shared)
    return {
        "memory": outcome.num_reused - loaded - shared - ahead,
        "disk": loaded,
        "ahead": ahead,
        "shared": shared,
        "computed": outcome.num_prompt - outcome.num_reused,
    }


def spans(outcome: Outcome, *, render_s: float) -> dict[str, float] | None:
    """What the time to the first token was spent on, in seconds; None: there was no first token."""
    if outcome.ttft_s is None:
        return None
    return {
        "render": render_s,
        "queue": outcome.queued_s - outcome.loading_s,
        "load": outcome.loading_s,
        "images": outcome.tower_s,
        "prefill": outcome.prefill_s - outcome.tower_s - outcome.first_pass_s,
        "first_token": outcome.first_pass_s,
    }


def _audits(record: Record, verdicts: Mapping[str, Verdict]) -> list[str]:
    # As `Choice` names them.
    jobs = (record.id, *(f"{record.id}-{index}" for index in range(len(record.outcomes))))
    return [str(verdicts[job]) for job in jobs if job in verdicts]


def prefill_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Prompt tokens computed per second, in the choice that computed most; None where nothing measurable was."""
    most = max(outcomes, key=lambda outcome: outcome.num_prefilled)
    return most.num_prefilled / most.prefill_s if most.num_prefilled > 0 and most.prefill_s > 0 else None


def decode_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Tokens per second behind the first one, over all choices; None where there is only that one."""
    spans = [
        (outcome.num_generated - 1, outcome.total_s - outcome.ttft_s)
        for outcome in outcomes
        if outcome.ttft_s is not None and outcome.num_generated > 1
    ]
    longest_s = max((seconds for _, seconds in spans), default=0.0)
    return sum(num for num, _ in spans) / longest_s if longest_s > 0 else None


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def explanation_body(explanation: Explanation) -> dict[str, Any]:
    """An explanation as JSON; texts as the model reads them."""
    accounts = [
        {"start": account.span.start, "stop": account.span.stop, "reason": str(account.reason)}
        for account in explanation.accounts
    ]
    return {
        "diverged_at": explanation.diverged_at,
        "part": None if explanation.part is None else str(explanation.part),
        "shared_text": explanation.shared_text,
        "expected_text": explanation.expected_text,
        "actual_text": explanation.actual_text,
        "advice": explanation.advice,
        "accounts": accounts,
    }


def record_lines(record: Mapping[str, Any]) -> list[str]:
    """A `record_body` in lines for people: counts, the reason, and where the prompt diverged."""
    status = f" with status {record['status']}" if record.get("status") is not None else ""
    model = f", {record['model']}" if record.get("model") else ""
    lines = [f"{record['id']} ({record['api']}{model}): {record['ended']}{status}"]
    if record.get("error"):
        lines.append(f"error: {record['error']}")
    if "prompt_tokens" in record:
        lines += [
            f"prompt {record['prompt_tokens']:,} tokens: {record['reused']:,} reused, {record['prefilled']:,} computed",
            f"of the reused tokens, {record['settled']:,} were computed while idle, {record['awaited']:,} by another "
            f"request, and {record['loaded']:,} were read from disk",
            f"reason: {record['reason']}",
        ]
        lines += _image_lines(record)
    if record.get("audit"):
        lines.append(f"audit: {', '.join(record['audit'])}")
    return [*lines, *explanation_lines(record)]


def _image_lines(record: Mapping[str, Any]) -> list[str]:
    """A line for each image, and one for what the tower did. An image may be prefilled again without being encoded."""
    images = record.get("images", ())
    lines = [
        f"image {image['width']} x {image['height']} ({image['digest']}) at token {image['start']:,}: "
        f"{image['tokens']:,} tokens, {'reused' if image['reused'] else 'computed'}"
        for image in images
    ]
    if images and (spans := record.get("spans")) is not None:
        foreseen_ms = 1000 * record["images_foreseen_s"]
        lines.append(
            f"images encoded: {record['images_encoded']}, in {1000 * spans['images']:.0f} ms"
            + (f" ({foreseen_ms:.0f} ms foreseen)" if foreseen_ms > 0 else "")
        )
    return lines


def explanation_lines(body: Mapping[str, Any]) -> list[str]:
    """The `explanation` of a body, if it has one, and its `notes`, in lines for people."""
    explanation = body.get("explanation")
    lines: list[str] = []
    if explanation is not None:
        for account in explanation["accounts"] if len(explanation["accounts"]) > 1 else ():
            lines.append(f"  tokens [{account['start']:,}, {account['stop']:,}): {account['reason']}")
        if explanation["diverged_at"] is not None:
            where = f" in {explanation['part']}" if explanation["part"] is not None else ""
            lines += [
                f"diverged at token {explanation['diverged_at']:,}{where}",
                f"  after    {explanation['shared_text']!r}",
                f"  expected {explanation['expected_text']!r}",
                f"  came     {explanation['actual_text']!r}",
            ]
        if explanation["advice"] != "":
            lines.append(explanation["advice"])
    return [*lines, *(f"note: {note}" for note in body["notes"])]


def record_of(reply: Reply, *, model: str, explanation: Explanation | None) -> Record:
    """The record of a reply whose jobs are over."""
    request, rendered = reply.request, reply.rendered
    if isinstance(request.prompt, RawPrompt):
        prompt = Prompt(tokens=request.prompt.tokens)
    else:
        assert rendered is not None
        prompt = rendered.prompt
    # What was odd about the answers, each once.
    odd = dict.fromkeys(note for choice in reply.choices for note in choice.parser.notes)
    return Record(
        id=request.id,
        api=request.api,
        model=model,
        created=reply.created,
        namespace=request.namespace,
        ended=_how_ended(reply),
        outcomes=reply.outcomes,
        error=None if reply.error is None else str(reply.error),
        chat=request.chat_name,
        caller=request.caller,
        explanation=explanation,
        notes=(*request.notes, *(() if rendered is None else rendered.notes), *odd),
        used=reply.used,
        render_s=reply.render_s,
        images=tuple(map(_recorded, prompt.images)),
        blocks=blocks_of(prompt),
    )


def _recorded(image: PromptImage) -> RecordedImage:
    file = image.image
    return RecordedImage(width=file.width, height=file.height, digest=file.digest.hex()[:_NUM_DIGITS], span=image.span)


_NUM_DIGITS = 12
"""Of an image's digest."""


def _how_ended(reply: Reply) -> str:
    if reply.error is not None:
        return "cancelled" if isinstance(reply.error, RequestCancelled) else "failed"
    if len(reply.ended) < len(reply.choices):
        return "cancelled"
    return str(reply.ended[-1].reason)


def log_line(record: Record, *, names_model: bool = False) -> str:
    """The record in one line of the log."""
    head = f"{record.id} {record.api}{f' {record.model}' if names_model else ''}"
    if not record.outcomes:
        return f"{head}: {record.ended} before it started"
    first = record.outcomes[0]
    reason = first.reason if record.explanation is None else record.explanation.reason
    ttft = "-" if first.ttft_s is None else f"{first.ttft_s:.3f} s"
    loaded = f" ({first.num_loaded} of them from disk)" if first.num_loaded > 0 else ""
    return (
        f"{head}: {record.ended}, prompt {first.num_prompt}, reused {first.num_reused}{loaded}, "
        f"prefilled {first.num_prefilled} ({reason}{_speed(prefill_rate(record.outcomes))}), "
        f"generated {sum(o.num_generated for o in record.outcomes)}{_speed(decode_rate(record.outcomes))}, "
        f"first token {ttft}"
    )


def _speed(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"


class Records:
    """The latest records. A caller sees those of its own namespace, and of requests that came without a known key."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        self._by_id[record.id] = record
        if record.ended == "refused":
            self._bound_refusals()
        while len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)

    def _bound_refusals(self) -> None:
        """Who only asks for what is not there does not push out the records of those who were answered."""
        refused = [record.id for record in self._by_id.values() if record.ended == "refused"]
        for record_id in refused[: max(0, len(refused) - max(1, self._limit // 10))]:
            del self._by_id[record_id]

    def get(self, record_id: str, *, namespace: str) -> Record:
        record = self._by_id.get(record_id)
        if record is None or record.namespace not in (namespace, ""):
            raise NotFound(f"There is no record of request {record_id!r}; only the latest {self._limit} are kept.")
        return record

    def page(
        self, *, namespace: str, limit: int, before: str | None = None, model: str | None = None
    ) -> tuple[tuple[Record, ...], bool]:
        """At most `limit` records, newest first, older than the record `before`; and whether older ones remain.

        `model`: of this one alone.
        """
        rest = (record for record in reversed(self._by_id.values()) if record.namespace in (namespace, ""))
        if before is not None:
            anchor = self.get(before, namespace=namespace)
            rest = itertools.islice(itertools.dropwhile(lambda record: record is not anchor, rest), 1, None)
        page = list(itertools.islice((record for record in rest if model in (None, record.model)), limit + 1))
        return tuple(page[:limit]), len(page) > limit
