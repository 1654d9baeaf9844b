"""`GET /v1/cache/tree`: what the prefix cache holds, in pages, and the text of its edges."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query
from pydantic import StringConstraints

from reprise.api.http.off_loop import Stage
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall
from reprise.core.errors import BadRequest, NotFound
from reprise.core.inspection import EdgeTokens, InspectedCheckpoint, InspectedNode, TreePart
from reprise.core.tokens import Span, as_tokens

router = api_router("Server")

EdgeId = Annotated[str, StringConstraints(pattern=r"^([0-9]{1,15}|[0-9a-f]{64}-[0-9]{1,9}-[0-9]{1,9})$")]
"""A number: it is in memory. The key of a record, and from where to where on its path: it is on disk alone."""

MOST_NODES = 1000
"""Nodes of one page."""

MOST_SKIPPED = 5_000
"""Limits how long the engine thread walks the tree; `under` names an edge to start deeper."""

_SEARCHED = 5_000
"""Nodes that a search looks at, those used last."""
_SEARCH_S = 1.0
_MOST_FOUND = 50
_AROUND = 60
"""Characters shown on each side of what was found."""

_NO_TEXT = (
    "The API keys of this server share one prefix cache, so its text is not shown. Start it with "
    "--key-namespaces to give each key a separate cache."
)


@router.get("/v1/cache/tree")
async def tree(
    call: OfModel,
    limit: Annotated[int, Query(ge=1, le=MOST_NODES)] = 300,
    under: Annotated[EdgeId | None, Query()] = None,
    skip: Annotated[int, Query(ge=0, le=MOST_SKIPPED)] = 0,
) -> dict[str, Any]:
    """The edges of the prefix tree that were used last, parents before children; `under`: those below one edge.

    Edges whose `in_memory` is false are on disk alone; their ids are texts. The next page begins behind `skip` edges.
    `children` of an edge counts those that are on no page yet, too; `totals` count what memory has of the caller's. Of
    several models, one: `model`, or the first. Its weights need not be loaded.
    """
    service, namespace = call.service, call.namespace
    part = await _part(call, under=under, skip=skip)
    found = await asyncio.wrap_future(service.backend.inspect(max_nodes=limit, part=part))
    if under is not None and not found.tree.nodes and skip == 0:
        raise NotFound(f"Edge {under} no longer exists. GET /v1/cache/tree lists the edges.")
    shows_text = service.shows_text

    def nodes() -> list[dict[str, Any]]:
        return [
            _node(node, text=service.shown(as_tokens(node.first_tokens), namespace=namespace) if shows_text else "")
            for node in found.tree.nodes
        ]

    return {
        "object": "cache.tree",
        "model": service.served.id,
        "data": await service.threads.run(Stage.VIEW, nodes),
        "has_more": found.tree.has_more,
        "totals": {
            "edges": found.tree.num_nodes,
            "tokens": found.tree.num_tokens,
            "checkpoints": found.tree.num_checkpoints,
            "bytes": found.tree.nbytes,
            "evictions": dict(found.tree.evictions),
        },
    }


async def _part(call: RouteCall, *, under: str | None = None, skip: int = 0) -> TreePart:
    """A part of what memory and disk have of the caller's namespace."""
    service = call.service
    own = service.cache_namespace(call.namespace)
    on_disk = await service.threads.run(Stage.VIEW, lambda: service.backend.disk_tree(own))
    name = int(under) if under is not None and under.isdigit() else under
    return TreePart(namespace=own, under=name, skip=skip, on_disk=on_disk)


def _node(node: InspectedNode, *, text: str) -> dict[str, Any]:
    return {
        "id": node.id,
        "in_memory": isinstance(node.id, int),
        "parent": node.parent,
        "start": node.start,
        "tokens": node.num_tokens,
        "text": text,
        "bytes": node.nbytes,
        "disk_bytes": node.disk_nbytes,
        "age_s": round(node.age_s, 3),
        "last_use": str(node.last_use),
        "uses": node.num_uses,
        "children": node.num_children,
        "checkpoints": [_checkpoint(each) for each in node.checkpoints],
        "requests": list(node.request_ids),
    }


def _checkpoint(each: InspectedCheckpoint) -> dict[str, Any]:
    is_pinned, seconds = each.pinned_for_s is not None, each.pinned_for_s
    return {
        "position": each.position,
        "kind": None if each.kind is None else str(each.kind),
        "bytes": each.nbytes,
        "disk_bytes": each.disk_nbytes,
        "uses": each.num_uses,
        "superseded": each.is_superseded,
        "pinned": is_pinned,
        "pin_expires_in_s": None if seconds is None or seconds == float("inf") else round(seconds, 3),
    }


@router.get("/v1/cache/tree/search")
async def search(call: OfModel, q: Annotated[str, Query(min_length=2, max_length=200)]) -> dict[str, Any]:
    """The edges whose text contains `q`, those used last first: as many as are found within a second.

    Refused with 429 while another search or replay is running.
    """
    service = call.service
    _check_text(call)
    with service.threads.alone(Stage.SURVEY):
        asking = service.backend.edge_tokens(await _part(call), max_nodes=_SEARCHED)
        edges = await asyncio.wrap_future(asking)
        return await service.threads.run(Stage.SURVEY, lambda: _search(call, edges, q))


def _search(call: RouteCall, edges: Sequence[EdgeTokens], wanted: str) -> dict[str, Any]:
    until_s = time.monotonic() + _SEARCH_S
    found: list[dict[str, Any]] = []
    num_searched = 0
    for edge in edges:
        if time.monotonic() > until_s or len(found) == _MOST_FOUND:
            break
        num_searched += 1
        text = call.service.shown(edge.tokens, namespace=call.namespace)
        at = text.casefold().find(wanted.casefold())
        if at >= 0:
            around = text[max(0, at - _AROUND) : at + len(wanted) + _AROUND]
            found.append({"id": edge.id, "start": edge.start, "text": around})
    has_more = num_searched < len(edges) or len(edges) == _SEARCHED
    model = call.service.served.id
    return {"object": "list", "model": model, "data": found, "searched": num_searched, "has_more": has_more}


@router.get("/v1/cache/tree/{edge}")
async def edge_text(
    edge: EdgeId,
    call: OfModel,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=4096)] = 1024,
) -> dict[str, Any]:
    """The text of one edge, `limit` tokens from `offset` on."""
    service, namespace = call.service, call.namespace
    _check_text(call)
    own = service.cache_namespace(namespace)
    if edge.isdigit():
        asking = service.backend.edge_tokens(TreePart(namespace=own, under=int(edge)), max_nodes=1)
        found = next(iter(await asyncio.wrap_future(asking)), None)
    else:
        found = await service.threads.run(Stage.VIEW, lambda: _edge_on_disk(call, own, edge))
    if found is None:
        raise NotFound(f"Edge {edge} no longer exists. GET /v1/cache/tree lists the edges.")
    tokens = found.tokens[offset : offset + limit]
    text = await service.threads.run(Stage.VIEW, lambda: service.shown(tokens, namespace=namespace))
    return {
        "object": "cache.edge",
        "model": service.served.id,
        "id": found.id,
        "start": found.start,
        "tokens": len(found.tokens),
        "offset": offset,
        "text": text,
        "has_more": offset + limit < len(found.tokens),
    }


def _edge_on_disk(call: RouteCall, namespace: str, edge: str) -> EdgeTokens | None:
    key, start, stop = edge.split("-")
    if int(start) >= int(stop):
        return None
    tokens = call.service.backend.disk_tokens(namespace, key, Span(int(start), int(stop)))
    return None if tokens is None else EdgeTokens(id=edge, start=int(start), tokens=tokens)


def _check_text(call: RouteCall) -> None:
    if not call.service.shows_text:
        raise BadRequest(_NO_TEXT)
