"""The server about itself: `GET /health` and `/metrics`, past requests, cancelling, and the prefix cache."""

import asyncio
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Header, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.service.models import model_body
from reprise.api.service.records import record_body
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, EventNumber, ModelName, OfServer
from reprise.core.backend import Status
from reprise.core.metrics import health_fields
from reprise.quiet import why_quiet

router = api_router("Server")


class Health(StrEnum):
    """How a server is, in one word."""

    OK = "ok"
    LOADING = "loading"
    """Its model is not there yet (`api/loading.py`)."""
    CLOSING = "closing"
    """It finishes what runs and takes nothing new."""
    STALLED = "stalled"
    """The engine has had work and got nothing done for `--stall-after` seconds."""
    DEAD = "dead"
    """The engine's thread has ended."""


_ILL = frozenset({Health.STALLED, Health.DEAD})


def health_of(status: Status, *, stall_after_s: float) -> Health:
    """The health of a server whose engine says this of itself."""
    if status.has_died:
        return Health.DEAD
    if status.stalled_s >= stall_after_s:
        return Health.STALLED
    return Health.CLOSING if status.is_closing else Health.OK


@router.get("/health/live", responses={503: {"description": "The engine hangs: restart the server."}})
async def live(call: OfServer) -> JsonResponse:
    """Whether the engine makes progress. 503: it does not, and a restart is all that helps."""
    health = _health(call.context)
    return JsonResponse({"status": health}, status_code=503 if health in _ILL else 200)


@router.get("/health/ready", responses={503: {"description": "The server does not accept requests."}})
async def ready(call: OfServer) -> JsonResponse:
    """Whether to send requests here. 503: the server is shutting down, or its engine hangs."""
    health = _health(call.context)
    return JsonResponse({"status": health}, status_code=200 if health is Health.OK else 503)


def _health(context: Context) -> Health:
    return health_of(context.service.status(), stall_after_s=context.settings.stall_after_s)


@router.get("/health", response_model=None, responses={503: {"description": "The engine hangs."}})
async def health(call: OfServer, model: ModelName = None) -> JsonResponse:
    """Whether the engine makes progress, and the server's metrics (docs/metrics.md). 503: it does not.

    `bytes_held` is what the cache holds: `bytes_kv` and `bytes_snapshots`; of that `bytes_pinned` stays for `pins`.
    `bytes_live` is what running requests hold beside it, and `bytes_live_most` the most that it has been; `bytes_held`
    and `bytes_live` keep within `bytes_budget`. `audit` says how many answers were recomputed cold while idle, and how
    many of these differed. `disk` is null where nothing is kept on disk; of `reused`, `loaded` were read from there.
    `quiet` says why nothing is done in the background, and `drafting` which passes verify drafts on this device.
    Several models are added up, and each is in `models`. Answers at once, whatever the engine is doing.
    """
    context = call.context
    named, models = context.model_id(model), context.models
    if named is None or models is None:
        status = context.service.status()
    else:
        status = context.service.statuses()[models.of(named).engine]
    health = health_of(status, stall_after_s=context.settings.stall_after_s)
    body = {"status": health, "model": named or context.service.served.id, **health_fields(status)}
    body |= {"quiet": why_quiet(context.settings.background), "drafting": status.drafting}
    if context.models is not None:
        body["models"] = [model_body(each) for each in context.models.all if named in (None, each.id)]
    return JsonResponse(body, status_code=503 if health in _ILL else 200)


@router.get("/metrics", response_class=Response)
async def get_metrics(call: OfServer) -> Response:
    """The server's metrics in Prometheus' text format."""
    return Response(call.context.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/v1/loads")
async def get_loads(call: OfServer) -> dict[str, Any]:
    """How busy the engine is, in the form of SGLang's servers: gateways balance by it.

    `token_usage` is the share of the memory budget that running requests hold.
    """
    load = load_of(call.service.status())
    return {"timestamp": datetime.now(UTC).isoformat(), "dp_rank_count": 1, "loads": [load]}


def load_of(status: Status) -> dict[str, float]:
    """The load of a server whose engine says this of itself."""
    running, waiting = status.num_prefilling + status.num_decoding, status.num_waiting
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "token_usage": status.held.live_nbytes / max(1, status.held.budget_nbytes),
    }


@router.get("/v1/cache/requests")
async def list_requests(
    call: OfServer,
    model: ModelName = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """What happened to the latest requests, newest first; `before` is the last id of the page before."""
    service = call.service
    await service.recorded()
    verdicts, of = service.status().audit.verdicts, call.context.model_id(model)
    page, has_more = service.records.page(namespace=call.namespace, limit=limit, before=before, model=of)
    return {"object": "list", "data": [record_body(record, verdicts) for record in page], "has_more": has_more}


@router.get("/v1/cache/requests/{request_id}")
async def get_request(request_id: str, call: OfServer) -> dict[str, Any]:
    """What happened to one request."""
    await call.service.recorded_as(request_id)
    verdicts = call.service.status().audit.verdicts
    return record_body(call.service.records.get(request_id, namespace=call.namespace), verdicts)


@router.get("/v1/requests/{request_id}/stream", response_model=None)
async def read_on(request_id: str, call: OfServer, last_event_id: Annotated[EventNumber, Header()] = -1) -> Response:
    """The stream of an answer in the background, from behind the event that `Last-Event-ID` names, or from the first.

    For requests with the header `X-Reprise-Background: true`; see docs/background.md.
    """
    background, namespace = call.context.background, call.namespace
    await call.while_connected(background.begun(request_id, namespace=namespace))
    return background.get(request_id, namespace=namespace).stream(after=last_event_id)


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, call: OfServer) -> dict[str, Any]:
    """Cancel a request that is under way; what was computed stays in the cache.

    Of an answer in the background, also one that is over, the events are dropped as well.
    """
    kept = call.context.background.find(request_id, namespace=call.namespace)
    if kept is None or not kept.is_over:
        call.service.cancel(request_id, namespace=call.namespace)
    if kept is not None:
        call.context.background.drop(kept, "The request was cancelled.")
    return {"id": request_id, "object": "request", "cancelled": kept is None or not kept.is_over}


@router.delete("/v1/cache")
async def clear_cache(call: OfServer, model: ModelName = None) -> dict[str, Any]:
    """Drop everything from the prefix cache that no running request uses, the caller's pins included.

    Of all models, or of the one that is named. Where API keys have namespaces, only what the caller's key stored; where
    they share one, what other keys have pinned stays.
    """
    context, namespace = call.context, call.namespace
    services = context.services(model)
    for service in services:
        for alias in context.services_beside(service):
            alias.forget_settles(namespace)
        await asyncio.wrap_future(service.backend.clear(service.cache_namespace(namespace), owner=namespace))
    return {"object": "cache", "cleared": True, "models": [service.served.id for service in services]}
