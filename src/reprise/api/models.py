"""The models of one server: which one a request means, and a service for each, made when it is loaded first."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.api.errors import Shapes, log_problem, problem_of
from reprise.api.served import unknown_adapter
from reprise.api.service import ChatService
from reprise.api.sse import EVENT_STREAM, comment_line, data_line, event_lines, while_connected
from reprise.core.backend import Backend, Status, WeightsState
from reprise.core.errors import ClientGone, UnknownModel

if TYPE_CHECKING:
    # At run time the API is used without MLX.
    from reprise.engine.load import LoadedModel

log = logging.getLogger(__name__)

_AT_ONCE_S = 1.0
"""A stream waits so long for its status before it begins with comments: a model that is there answers as ever."""
_TOLD_S = 2.0
"""Between two comments on how long it has been loading."""


class ModelBackend(Backend, Protocol):
    """The engine side of a model whose weights come and go."""

    def ready(self) -> "Future[LoadedModel]":
        """The model, once its weights are here. Raises ShuttingDown; the future has what went wrong."""
        ...

    def dismiss(self) -> Future[None]:
        """Unload the weights when nothing runs on them; what is stored stays."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of what was loaded last; "" before that."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """One of the models. Before it is loaded, `nbytes` is of its files, and `layers` what they say.

    Models with the same weights and KV format have the same `backend`, and with it one cache.
    """

    id: str
    backend: ModelBackend
    make_service: "Callable[[LoadedModel], ChatService]"
    """Called on a thread apart."""
    nbytes: int = 0
    layers: str = ""
    """So many of which kind, in words; "" while nobody has looked."""
    fault: str | None = None
    """Why it could not be loaded as its files were at the start of the server."""
    engine: str = ""
    """The id of the first model with the same `backend`, under which what that counts is told."""
    base: str | None = None
    """The id of the model that it is with an adapter."""
    adapter_names: tuple[str, ...] = ()
    """What requests may call the adapter; none: it has no adapter."""
    service: ChatService | None = None
    fingerprint: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> WeightsState:
        return self.backend.status().weights

    @property
    def is_ready(self) -> bool:
        """Whether `service` answers with the weights that are here."""
        is_here = self.service is not None and self.state is WeightsState.READY
        return is_here and self.fingerprint == self.backend.fingerprint

    async def ready(self) -> ChatService:
        """Its service, once its weights are here: they are loaded now if they are not. Raises LoadFailed."""
        if self.service is not None and self.is_ready:
            return self.service
        loaded = await asyncio.wrap_future(self.backend.ready())
        async with self._making:
            # Templates are tried out when a service is made.
            return await asyncio.to_thread(self.take, loaded)

    async def unloaded(self) -> None:
        """Wait until its weights are gone, which they are as soon as nothing runs on them."""
        await asyncio.wrap_future(self.backend.dismiss())

    def take(self, loaded: "LoadedModel") -> ChatService:
        """The service of what was loaded: the same as before unless its files have changed."""
        if self.service is None or self.fingerprint != loaded.fingerprint:
            self.service, self.fingerprint, self.nbytes = self.make_service(loaded), loaded.fingerprint, loaded.nbytes
        return self.service


class Models:
    """All models of a server. The first is the one that requests mean that name none."""

    def __init__(self, models: Sequence[ServedModel], *, accepts_any_name: bool = False) -> None:
        assert len({model.id for model in models}) == len(models) > 0, "every model has a name of its own"
        self.all = tuple(models)
        firsts: dict[int, str] = {}
        for model in self.all:
            model.engine = firsts.setdefault(id(model.backend), model.id)
        self._accepts_any_name = accepts_any_name

    def of(self, name: str | None, adapter: str | None = None) -> ServedModel:
        """The model that a request names, by its id or the last part of it, and by the adapter that it is to have.

        Raises UnknownModel with the list.
        """
        model = self._named(name)
        if adapter is None or adapter in model.adapter_names:
            return model
        adapted = [other for other in self.all if other.base == model.id]
        for other in adapted:
            if adapter in other.adapter_names:
                return other
        raise unknown_adapter(adapter, [each.adapter_names[0] for each in (model, *adapted) if each.adapter_names])

    def _named(self, name: str | None) -> ServedModel:
        if name is None:
            return self.all[0]
        for model in self.all:
            if name in (model.id, f"{model.id}:latest"):
                return model
        short = [model for model in self.all if name in (short_name(model.id), f"{short_name(model.id)}:latest")]
        if len(short) == 1:
            return short[0]
        if self._accepts_any_name:
            return self.all[0]
        raise UnknownModel(
            f"The model {name!r} is not served here. Ask for one of: {', '.join(model.id for model in self.all)}."
        )

    @property
    def services(self) -> list[ChatService]:
        """Of the models that were loaded, those that are unloaded by now among them."""
        return [model.service for model in self.all if model.service is not None]

    def by_engine(self) -> dict[str, ServedModel]:
        """One of the models of each engine, one that was loaded if there is one, by the id of the first of them.

        What is counted by engine is counted once for all aliases of the same weights.
        """
        found: dict[str, ServedModel] = {}
        for model in self.all:
            if model.engine not in found or (found[model.engine].service is None and model.service is not None):
                found[model.engine] = model
        return found

    def statuses(self) -> dict[str, Status]:
        """What each engine publishes, by the id of its first model."""
        return {
            name: model.backend.status() if model.service is None else model.service.status_of_model()
            for name, model in self.by_engine().items()
        }


def model_body(model: ServedModel) -> dict[str, Any]:
    """Where a model's weights are, and what it holds now. `bytes` are those of its weights when they are loaded.

    What models of one `engine` hold is the same: to add up, take each engine once.
    """
    status = model.backend.status()
    held = status.held
    return {
        "id": model.id,
        "engine": model.engine,
        "state": str(status.weights),
        "bytes": model.nbytes,
        "bytes_weights": status.weights_nbytes,
        "bytes_kv": held.kv_nbytes,
        "bytes_snapshots": held.snapshot_nbytes,
        "bytes_live": held.live_nbytes,
        "bytes_on_disk": None if status.disk is None else status.disk.nbytes,
        "tokens_held": held.num_tokens,
        "queued": status.num_waiting,
        "running": status.num_prefilling + status.num_decoding,
        "loads": status.num_loads,
        "load_s": round(status.load_s, 3),
        # Before the first load nobody knows which tokens it has.
        "has_been_loaded": model.service is not None,
    }


def short_name(model_id: str) -> str:
    """The last part of an id, such as a hub's."""
    return PurePath(model_id).name


class StreamWhileLoading(Response):
    """A stream whose model is being loaded: it begins with comments that say so, and goes on with the answer's events.

    What goes wrong from then on is its last event, since the status was sent.
    """

    def __init__(
        self,
        model: ServedModel,
        ready: "asyncio.Task[ChatService]",
        answer: Callable[[], Coroutine[Any, Any, Response]],
        *,
        shapes: Shapes,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_STREAM)
        self._model, self._ready, self._answer, self._shapes = model, ready, answer, shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(text: str, *, has_more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})

        async def send_rest(message: Any) -> None:
            if message["type"] == "http.response.body":
                await send(message)

        try:
            await while_connected(receive, self._wait(write))
            response = await self._answer()
        except (ClientGone, OSError):
            return
        except Exception as error:
            problem = problem_of(error)
            log_problem(problem, error, where=self._model.id)
            body = self._shapes.of(scope)(problem)
            is_named = "type" in body
            await write(event_lines("error", body) if is_named else data_line(body), has_more=False)
        else:
            await response(scope, receive, send_rest)
        finally:
            self._ready.cancel()

    async def _wait(self, write: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        since_s = time.monotonic()
        while True:
            done, _ = await asyncio.wait((self._ready,), timeout=_TOLD_S)
            if done:
                await self._ready
                return
            waits = "being loaded" if self._model.state is WeightsState.LOADING else "waiting for room"
            await write(comment_line(f"{self._model.id} is {waits} ({time.monotonic() - since_s:.0f} s)"))


async def answer_when_ready(
    model: ServedModel,
    request: Request,
    answer: Callable[[], Coroutine[Any, Any, Response]],
    *,
    is_stream: bool,
    shapes: Shapes,
) -> Response:
    """Answer a request once its model is loaded; a stream begins meanwhile. Raises what loading raises."""
    if model.is_ready:
        return await answer()
    ready = asyncio.create_task(model.ready())
    try:
        done, _ = await asyncio.wait((ready,), timeout=_AT_ONCE_S)
        if not done and is_stream:
            streamed, ready = StreamWhileLoading(model, ready, answer, shapes=shapes), None
            return streamed
        await while_connected(request.receive, _result(ready))
        ready = None
        return await answer()
    finally:
        if ready is not None:
            ready.cancel()


async def _result(ready: "asyncio.Task[ChatService]") -> ChatService:
    return await ready
