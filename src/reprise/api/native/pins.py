"""`/v1/cache/pin`: prefixes that stay in the cache under any load."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from reprise.api.http.body import Needs
from reprise.api.native.prefill import PrefillBody, prefix_of
from reprise.api.service.service import ChatService, new_request_id
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import ModelName, OfModel, OfServer, RouteCall
from reprise.core.errors import BadRequest, NotFound, OutOfMemory
from reprise.core.pin import Pin, PinList, pin_id
from reprise.core.prompt import Boundary, BoundaryKind, Prompt


class PinBody(PrefillBody):
    """What to pin."""

    ttl: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds; null: until it is unpinned."""


class UnpinBody(PrefillBody):
    """What to unpin: the body that was pinned, or the `id` of the answer."""

    needs = Needs.NOTHING
    id: Annotated[str, Field(max_length=200)] | None = None


async def pinned_prefix(body: PrefillBody, call: RouteCall) -> Prompt:
    """The prefix that a body pins, with an explicit boundary at its end. Raises BadRequest, QueueFull, ShuttingDown.

    Of a system prompt with tools: where they end. Of another chat: what its next turn has in common with it. Of a plain
    prompt: all of it.
    """
    call.service.served.check_name(body.model)
    prefix, until = await call.service.off_loop(lambda: prefix_of(body, call.asked))
    prompt = await call.service.prefix(prefix, namespace=call.namespace, until=until)
    ends = [b.position for b in prompt.boundaries if b.kind is BoundaryKind.STABLE and b.position > 0]
    end = max(ends, default=len(prompt)) if until is None else len(prompt)
    return prompt.up_to(end, {*prompt.boundaries, Boundary(end, BoundaryKind.EXPLICIT)})


router = api_router("Server")


@router.post("/v1/cache/pin")
async def pin(body: PinBody, call: OfModel) -> dict[str, Any]:
    """Keep a prefix in the cache, and compute it first if it is not there.

    It stays until its `ttl` is over, counted from when it is there, it is unpinned, or the cache is cleared; a running
    request that has no room otherwise takes precedence. All pins together keep half of the memory budget at most.
    """
    service, namespace = call.service, call.namespace
    if not call.context.settings.has_prefix_cache:
        raise BadRequest("This server was started with --no-prefix-cache: there is nothing to pin.")
    prefix = await pinned_prefix(body, call)
    seconds = float("inf") if body.ttl is None else body.ttl
    work = service.prefill(prefix, request_id=new_request_id("pin"), namespace=namespace, pin_for_s=seconds)
    outcome = await call.while_connected(work)
    if outcome.pin is None:
        raise OutOfMemory(
            f"There is no room to pin {len(prefix)} tokens: pins can use at most half of --cache-bytes, and running "
            "requests take precedence. Unpin something, pin less, or raise --cache-bytes."
        )
    # Asked behind the job, so that whoever has the answer finds the pin in all that the server tells. A short one may
    # be over by then.
    listed = (await _pins(service, namespace)).pins
    made = next((each for each in listed if each.id == outcome.pin.id), replace(outcome.pin, expires_in_s=0.0))
    counts = {"cached_tokens": outcome.num_reused, "prefilled_tokens": outcome.num_prefilled}
    return _pin_body(made) | {"model": service.served.id} | counts


@router.get("/v1/cache/pin")
async def list_pins(call: OfServer, model: ModelName = None) -> dict[str, Any]:
    """What is pinned, oldest first, whatever pinned it, model by model. `bytes` counts what pins share once."""
    services = call.context.services(model)
    listed = [(service.served.id, await _pins(service, call.namespace)) for service in services]
    found = [_pin_body(each) | {"model": name} for name, pins in listed for each in pins.pins]
    return {"object": "list", "data": found, "bytes": sum(pins.nbytes for _, pins in listed)}


@router.delete("/v1/cache/pin")
async def unpin_body(body: UnpinBody, call: OfModel) -> dict[str, Any]:
    """Let a prefix go. It stays in the cache for as long as it is worth its memory."""
    if body.id is not None:
        return await _unpin(call.context.services(body.model), body.id, call.namespace)
    prefix = await pinned_prefix(body, call)
    return await _unpin([call.service], pin_id(prefix.tokens), call.namespace)


@router.delete("/v1/cache/pin/{name}")
async def unpin(name: str, call: OfServer, model: ModelName = None) -> dict[str, Any]:
    """Let a prefix go, by the `id` of its pin: in every model that has one of this id, or in the one that is named."""
    return await _unpin(call.context.services(model), name, call.namespace)


async def _pins(service: ChatService, namespace: str) -> PinList:
    return await asyncio.wrap_future(service.backend.pins(service.cache_namespace(namespace), owner=namespace))


async def _unpin(services: Sequence[ChatService], name: str, namespace: str) -> dict[str, Any]:
    unpinned: list[str] = []
    for service in services:
        lifting = service.backend.unpin(name, namespace=service.cache_namespace(namespace), owner=namespace)
        if await asyncio.wrap_future(lifting):
            unpinned.append(service.served.id)
    if not unpinned:
        raise NotFound("This prefix is not pinned. GET /v1/cache/pin lists what is.")
    return {"id": name, "object": "cache.pin", "unpinned": True, "models": unpinned}


def _pin_body(pin: Pin) -> dict[str, Any]:
    return {
        "id": pin.id,
        "object": "cache.pin",
        "tokens": pin.num_tokens,
        "bytes": pin.nbytes,
        "expires_in_s": None if pin.expires_in_s is None else round(pin.expires_in_s, 3),
        "follows_chat": pin.follows_chat,
    }
