"""The server about itself: `GET /health`, past requests, cancelling, and the prefix cache."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from reprise.api.context import InContext, Namespace
from reprise.api.errors import ErrorBody
from reprise.api.records import record_body
from reprise.core.metrics import health_fields

router = APIRouter(tags=["Server"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


@router.get("/health")
async def health(context: InContext) -> dict[str, Any]:
    """Whether the server is up and idle, and its metrics (docs/metrics.md).

    `bytes_held` is what the cache holds: `bytes_kv` and `bytes_snapshots`; of that `bytes_pinned` stays for `pins`.
    `bytes_live` is what running requests hold beside it. Both together keep within `bytes_budget`. `disk` is null
    where nothing is kept on disk; of `reused`, `loaded` were read from there. Answers at once, whatever the engine is
    doing.
    """
    status = context.service.status()
    return {
        "status": "closing" if status.is_closing else "ok",
        "model": context.service.served.id,
        **health_fields(status),
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
