"""`GET /v1/cache/overview` and what belongs to it: savings, memory, what breaks prefixes, other budgets, events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Header, Query
from starlette.responses import Response

from reprise.api.http.errors import openai_shape
from reprise.api.http.off_loop import Stage
from reprise.api.http.sse import EventStream, StreamSource, event_lines
from reprise.api.service.models import model_body
from reprise.api.service.replay import replay
from reprise.api.service.service import new_request_id
from reprise.api.watch.event_hub import decode_groups
from reprise.api.watch.ledger import Ledger, Savings, breaker_bodies, change_bodies
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import ModelName, OfModel, OfServer
from reprise.core.backend import DraftSource
from reprise.core.inspection import InspectedMemory, OnDisk, TreePart
from reprise.core.metrics import health_fields
from reprise.quiet import why_quiet

router = api_router("Server")

_GIB = 1 << 30
_MOST_EVICTIONS = 64
_MOST_REPLAYED = 500


@router.get("/v1/events", response_model=None)
async def events(call: OfServer, last_event_id: Annotated[str | None, Header(max_length=64)] = None) -> Response:
    """What happens, as server-sent events: requests, the tree, counters. See docs/events.md.

    Continues after the event that `Last-Event-ID` names, if the server still has it; otherwise starts with a snapshot.
    """
    hub = call.context.events
    telling = hub.tell(call.namespace, last_event_id)
    return EventStream(
        StreamSource(
            reply=hub,
            texts=telling,
            request_id=new_request_id("events"),
            on_error=lambda problem: event_lines("error", openai_shape(problem)),
        )
    )


@router.get("/v1/cache/overview")
async def overview(call: OfServer, model: ModelName = None) -> dict[str, Any]:
    """What reuse saved, what the memory is used for, and what broken prefixes cost, of the caller's requests.

    Times in seconds, memory in bytes. `lost` are tokens that were computed again though the cache once knew them. All
    models together; `models` is there where there are several, `model` and what describes it are the first's. Of one
    model (`?model=`), `other` is all that the process holds besides, and what its files grew by today is null.
    `drafts` is null where answers are not drafted; accepted draft tokens took no separate pass.
    """
    context, namespace = call.context, call.namespace
    name = context.model_id(model)
    service = context.service if name is None else context.services(name)[0]
    part = TreePart(namespace=service.cache_namespace(namespace))
    if name is None:
        found, status = await service.inspections(part), service.status()
    else:
        inspected = await asyncio.wrap_future(service.backend.inspect(max_nodes=0, part=part))
        found, status = {name: inspected}, service.status_of_model()
    savings = context.ledger.of(namespace, name)
    memory = _together([each.memory for each in found.values()], weights_nbytes=status.weights_nbytes)
    return {
        "object": "cache.overview",
        "model": service.served.id,
        "architecture": service.served.architecture,
        "layers": service.served.layers,
        "context": service.served.context,
        "created": service.served.created,
        "shows_text": service.shows_text,
        "savings": _savings(savings) | {"prefilled_ahead": status.num_ahead.get(namespace, 0)},
        "memory": memory_body(memory),
        "drafts": None if status.drafts is None else _drafts(savings),
        "disk": None if status.disk is None else _disk(status.disk, context.ledger if name is None else None),
        "load": {
            "queued": status.num_waiting,
            "prefilling": status.num_prefilling,
            "decoding": status.num_decoding,
            "decode_groups": decode_groups(found),
            "idle_sequences": sum(len(each.idle) for each in found.values()),
            "longest_gap_s": context.events.longest_gap_s,
            "quiet": why_quiet(context.settings.background),
        },
        "breakers": breaker_bodies(savings),
        "changes": change_bodies(savings),
        "health": health_fields(status),
        "models": [] if context.models is None else [model_body(model) for model in context.models.all],
    }


def _together(memories: Sequence[InspectedMemory], *, weights_nbytes: int) -> InspectedMemory:
    """The memory of all models: what each holds is added up, and the process is one."""
    latest = memories[-1] if memories else InspectedMemory()
    return replace(
        latest,
        budget_nbytes=memories[0].budget_nbytes if memories else None,
        weights_nbytes=weights_nbytes,
        kv_nbytes=sum(each.kv_nbytes for each in memories),
        checkpoint_nbytes=sum(each.checkpoint_nbytes for each in memories),
        logits_nbytes=sum(each.logits_nbytes for each in memories),
        live_nbytes=sum(each.live_nbytes for each in memories),
        most_live_nbytes=sum(each.most_live_nbytes for each in memories),
        incoming_nbytes=sum(each.incoming_nbytes for each in memories),
        images_nbytes=sum(each.images_nbytes for each in memories),
        embeddings_nbytes=sum(each.embeddings_nbytes for each in memories),
    )


def _disk(disk: OnDisk, ledger: Ledger | None) -> dict[str, Any]:
    today = None if ledger is None else ledger.written.today(disk.written_nbytes)
    return {
        "bytes": disk.nbytes,
        "budget": disk.budget_nbytes,
        "bytes_written": disk.written_nbytes,
        "bytes_written_today": today if disk.today_nbytes is None else disk.today_nbytes,
        "bytes_written_daily": disk.daily_nbytes,
        "trouble": disk.trouble,
        "spared": disk.spared,
    }


def _savings(savings: Savings) -> dict[str, Any]:
    return {
        "saved_s": savings.saved_s,
        "saved_today_s": savings.today.today(savings.saved_s),
        "prompt": savings.prompt,
        "reused": savings.reused,
        "computed": savings.computed,
        "ahead": savings.ahead,
        "lost": savings.lost,
        "lost_s": savings.lost_s,
        "prefill_tokens_per_s": savings.computed / savings.prefill_s if savings.prefill_s > 0 else None,
    }


def _drafts(savings: Savings) -> dict[str, Any]:
    by_source = {str(source): savings.drafted.get(str(source)) for source in DraftSource}
    return {
        "saved_s": savings.draft_saved_s,
        "drafted": sum(drafted.num for drafted in savings.drafted.values()),
        "accepted": sum(drafted.num_accepted for drafted in savings.drafted.values()),
        "sources": {
            source: {"drafted": drafted.num, "accepted": drafted.num_accepted}
            for source, drafted in by_source.items()
            if drafted is not None
        },
    }


def memory_body(memory: InspectedMemory) -> dict[str, Any]:
    """The parts that add up to the memory that the system counts for the process.

    `untouched` is what the others hold on paper and the system has not given yet: such as weights that nobody has read.
    `running_most` is the most that running requests have held of the budget beside what is kept.
    """
    parts = {
        "weights": memory.weights_nbytes,
        "running": memory.live_nbytes,
        "kept": memory.kv_nbytes,
        "checkpoints": memory.checkpoint_nbytes,
        "incoming": memory.incoming_nbytes,
        "images": memory.images_nbytes,
        "pool": memory.pool_nbytes,
    }
    parts["work"] = max(0, memory.device_nbytes - sum(parts.values()) + memory.pool_nbytes)
    # Behind what the device holds: vectors are NumPy's.
    parts["embeddings"] = memory.embeddings_nbytes
    rest = memory.process_nbytes - sum(parts.values())
    return {
        "process": memory.process_nbytes,
        "budget": memory.budget_nbytes,
        "running_most": memory.most_live_nbytes,
        "parts": parts | {"other": max(0, rest)},
        "untouched": max(0, -rest),
    }


@router.get("/v1/cache/evictions")
async def next_evictions(call: OfModel, nbytes: Annotated[int, Query(alias="bytes", ge=1)] = _GIB) -> dict[str, Any]:
    """What would be evicted to make room for this many more bytes, in order; at most 64 items. Evicts nothing.

    `bytes_of_others` is what is not the caller's among them. Of several models, one: `model`, or the first.
    """
    service = call.service
    own = service.cache_namespace(call.namespace)
    found = await asyncio.wrap_future(service.backend.next_evictions(nbytes, most=_MOST_EVICTIONS))
    return {
        "object": "list",
        "model": service.served.id,
        "data": [
            {
                "edge": each.node,
                "position": each.position,
                "kind": str(each.kind),
                "bytes": each.nbytes,
                "cost_tokens": each.num_cost,
                "age_s": round(each.age_s, 3),
            }
            for each in found
            if each.namespace == own
        ],
        "bytes": sum(each.nbytes for each in found),
        "bytes_of_others": sum(each.nbytes for each in found if each.namespace != own),
        "has_more": len(found) == _MOST_EVICTIONS,
    }


@router.get("/v1/cache/budgets")
async def budgets(call: OfModel) -> dict[str, Any]:
    """What half, twice and four times the memory would have reused of the caller's latest requests, replayed.

    Counted in blocks of tokens, so a little less than what was reused; `saved_s` is the difference to the present
    budget at the prefill speed of these requests. Of several models, one: `model`, or the first. Refused with 429
    while another replay or search is running.
    """
    service = call.service
    with service.threads.alone(Stage.SURVEY):
        found = await asyncio.wrap_future(service.backend.inspect(max_nodes=0))
        page, _ = service.records.page(namespace=call.namespace, limit=_MOST_REPLAYED, model=service.served.id)
        chats = [(r.blocks, sum(o.num_generated for o in r.outcomes)) for r in reversed(page) if r.blocks is not None]
        replayed = await service.threads.run(Stage.SURVEY, lambda: replay(chats, found.memory))
    outcomes = [outcome for record in page for outcome in record.outcomes]
    prefill_s = sum(outcome.prefill_s - outcome.first_pass_s for outcome in outcomes)
    speed = sum(outcome.num_prefilled for outcome in outcomes) / prefill_s if prefill_s > 0 else None
    now = next((each.reused for each in replayed if each.factor == 1), 0)
    return {
        "object": "cache.budgets",
        "model": service.served.id,
        "requests": len(chats),
        "data": [
            {
                "factor": each.factor,
                "budget": each.budget,
                "prompt": each.prompt,
                "reused": each.reused,
                "saved_s": None if speed is None else (each.reused - now) / speed,
            }
            for each in replayed
        ],
    }
