"""The server about itself: `GET /health`, past requests, cancelling, and the prefix cache."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from reprise.api.context import InContext, Namespace
from reprise.api.errors import ErrorBody
from reprise.api.records import record_body
from reprise.core.backend import OnDisk

router = APIRouter(tags=["Server"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


@router.get("/health")
async def health(context: InContext) -> dict[str, Any]:
    """Whether the server is up and idle, and its counts so far, in tokens unless the name says otherwise.

    `bytes_held` is what the cache holds: `bytes_kv` and `bytes_snapshots`; of that `bytes_pinned` stays for `pins`.
    `bytes_live` is what running requests hold beside it. Both together keep within `bytes_budget`. `disk` is null
    where nothing is kept on disk; of `reused`, `loaded` were read from there. Answers at once, whatever the engine is
    doing.
    """
    service = context.service
    status = service.backend.status()
    counts, held = status.counts, status.held
    return {
        "status": "closing" if service.is_closing or status.is_closing else "ok",
        "model": service.served.id,
        "idle": service.is_idle,
        "queued": status.queued,
        "prefilling": status.prefilling,
        "decoding": status.decoding,
        "requests": counts.requests,
        "finished": counts.finished,
        "cancelled": counts.cancelled,
        "failed": counts.failed,
        "prompt_tokens": counts.prompt,
        "reused": counts.reused,
        "prefilled": counts.prefilled,
        "settled": counts.settled,
        "loaded": counts.loaded,
        "generated": counts.generated,
        "paused": counts.paused,
        "evictions": counts.evictions,
        "evictions_by_reason": held.evicted_by_reason,
        "bytes_budget": held.budget,
        "bytes_held": held.kv + held.snapshots,
        "bytes_kv": held.kv,
        "bytes_snapshots": held.snapshots,
        "bytes_pinned": held.pinned,
        "bytes_live": held.live,
        "bytes_index": held.index,
        "tokens_held": held.tokens,
        "pins": held.pins,
        "disk": None if status.disk is None else disk_body(status.disk),
    }


def disk_body(disk: OnDisk) -> dict[str, Any]:
    """What is kept on disk, as JSON."""
    return {
        "bytes_budget": disk.budget,
        "bytes_held": disk.held,
        "bytes_of_other_models": disk.others,
        "bytes_queued": disk.queued,
        "bytes_written": disk.written,
        "bytes_read": disk.read,
        "files": disk.files,
        "evicted": disk.evicted,
        "quarantined": disk.quarantined,
        "errors": disk.errors,
    }


@router.get("/v1/cache/requests")
async def list_requests(
    context: InContext,
    namespace: Namespace,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """What happened to the latest requests, newest first; `before` is the last id of the page before."""
    page, has_more = context.service.records.page(namespace=namespace, limit=limit, before=before)
    return {"object": "list", "data": [record_body(record) for record in page], "has_more": has_more}


@router.get("/v1/cache/requests/{request_id}")
async def get_request(request_id: str, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """What happened to one request."""
    return record_body(context.service.records.get(request_id, namespace=namespace))


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """Cancel a request that is under way; what was computed stays in the cache."""
    context.service.cancel(request_id, namespace=namespace)
    return {"id": request_id, "object": "request", "cancelled": True}


@router.delete("/v1/cache")
async def clear_cache(context: InContext, namespace: Namespace) -> dict[str, Any]:
    """Drop everything from the prefix cache that no running request uses, the caller's pins included.

    Where API keys have namespaces, only what the caller's key stored; where they share one, what other keys have pinned
    stays.
    """
    service = context.service
    await asyncio.wrap_future(service.backend.clear(service.cache_namespace(namespace), owner=namespace))
    return {"object": "cache", "cleared": True}
