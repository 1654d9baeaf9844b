"""`/api/pull` and `/api/delete`: models of the hub, fetched into its cache and removed from there.

Both change what is on the disk of the server, so they are for servers that were started with `--download`.
"""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.http.sse import EventStream, StreamSource
from reprise.api.ollama.body import DeleteBody, PullBody
from reprise.api.ollama.reply import NDJSON, OllamaErrorBody, line, ollama_shape
from reprise.api.ollama.request import model_name
from reprise.api.service.service import new_request_id
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, OfServer, RouteCall
from reprise.core.backend import WeightsState
from reprise.core.errors import BadRequest, NotAllowed, NotFound, QueueFull, ShuttingDown

if TYPE_CHECKING:
    # Imports MLX.
    from reprise.engine.models.hub import Download

_TOLD_EVERY_S = 0.25
_NO_TIME = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration of Go's that is none."""
_MOST = 4
"""Downloads at a time: each has a thread, which does not end with its client."""
_RUNNING = threading.BoundedSemaphore(_MOST)

router = api_router("Ollama", errors=OllamaErrorBody)


def ends_with_request(keep_alive: str | float | None) -> bool:
    """Whether a model that is kept so long is unloaded as soon as it has answered."""
    return keep_alive == 0 or (isinstance(keep_alive, str) and _NO_TIME.fullmatch(keep_alive) is not None)


def dismiss_after(name: str | None, keep_alive: str | float | None, call: RouteCall) -> None:
    """Have a model that was named so unloaded once no request runs on it, if it is not to be kept.

    One that is alone stays loaded.
    """
    models = call.context.models
    if ends_with_request(keep_alive) and models is not None:
        with suppress(ShuttingDown):
            models.of(model_name(name)).backend.dismiss()


@router.post("/api/pull", response_model=None)
async def pull(body: PullBody, call: OfServer) -> Response:
    """Fetch a model of the hub, by default with lines about its progress; served from then on with `--hub-cache`."""
    name = _named(body, call.context)
    steps = _pulled(name, call.context)
    if body.stream is False:
        return JsonResponse([step async for step in steps][-1])
    texts = (line(step) async for step in steps)
    source = StreamSource(
        reply=nullcontext(),
        texts=texts,
        request_id=new_request_id("ollama"),
        on_error=lambda problem: line(ollama_shape(problem)),
        headers=NDJSON,
    )
    return EventStream(source)


@router.delete("/api/delete", response_model=None)
async def delete(body: DeleteBody, call: OfServer) -> Response:
    """Remove a model from the hub's cache, with all its versions."""
    context = call.context
    name = _named(body, context)
    served = None if context.models is None else next((each for each in context.models.all if each.id == name), None)
    if served is None and name == context.service.served.id:
        raise NotAllowed(
            f"{name} is what this server serves, so it stays. Stop the server, and run `reprise rm {name}`."
        )
    if served is not None and served.state is not WeightsState.UNLOADED:
        await served.unloaded()
    if await asyncio.to_thread(_remove, name) is None:
        raise NotFound(f"{name} is not in the hub's cache.")
    if context.models is not None:
        context.models.note_removed(name)
    return Response()


async def _pulled(name: str, context: Context) -> AsyncGenerator[dict[str, Any], None]:
    """What there is to tell, until it is here. Raises LoadFailed."""
    if not _RUNNING.acquire(blocking=False):
        raise QueueFull(f"{_MOST} models are being downloaded. Try again later.")
    try:
        yield {"status": "pulling manifest"}
        download = await asyncio.to_thread(_plan, name)
    except BaseException:
        _RUNNING.release()
        raise
    fetching = asyncio.ensure_future(asyncio.to_thread(_fetch, name))
    # Who left does not hear of its failure, and nobody else has to.
    fetching.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    step = {"status": f"pulling {name}", "digest": name, "total": download.nbytes}
    while not fetching.done():
        yield {**step, "completed": await asyncio.to_thread(download.arrived_nbytes)}
        await asyncio.wait([fetching], timeout=_TOLD_EVERY_S)
    fetching.result()
    yield {**step, "completed": download.nbytes}
    if context.models is not None:
        await context.models.note_fetched(name)
    yield {"status": "success"}


def _named(body: PullBody | DeleteBody, context: Context) -> str:
    if not context.settings.downloads:
        raise NotAllowed(
            "This server neither downloads nor removes models for requests. `reprise pull` and `reprise rm` do; so "
            "does a server that was started with --download."
        )
    name = model_name(body.model or body.name)
    if name is None:
        raise BadRequest("Send `model`, the id of a model of the hub: owner/name.", param="model")
    return name


def _plan(name: str) -> "Download":
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415

    from reprise.engine.models.load import checked_download  # noqa: PLC0415 (imports MLX)

    disable_progress_bars()
    return checked_download(name)


def _fetch(name: str) -> None:
    from reprise.engine.models.hub import fetch  # noqa: PLC0415

    try:
        fetch(name)
    finally:
        _RUNNING.release()


def _remove(name: str) -> int | None:
    from reprise.engine.models.hub import cached_model, remove  # noqa: PLC0415

    found = cached_model(name)
    return None if found is None else remove(found)
