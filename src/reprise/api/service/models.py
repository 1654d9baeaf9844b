"""The models of one server: resolves the model of a request, and has a service for each loaded model."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.api.http.errors import ErrorFormats, log_problem, problem_of
from reprise.api.http.sse import EVENT_STREAM, comment_line, data_line, event_lines, while_connected
from reprise.api.service.served import unknown_adapter
from reprise.api.service.service import ChatService
from reprise.core.backend import Backend, Status, WeightsState
from reprise.core.errors import BadRequest, ClientGone, UnknownModel

if TYPE_CHECKING:
    # At run time the API is used without MLX.
    from reprise.engine.models.load import LoadedModel


_AT_ONCE_S = 1.0
"""How long a stream's response waits for the model before it starts with comments."""
_NO_HEADERS: Mapping[str, str] = {}
_TOLD_S = 2.0
"""Interval between two comments about loading."""


class ModelBackend(Backend, Protocol):
    """The engine of a model that can be loaded and unloaded."""

    def ready(self) -> "Future[LoadedModel]":
        """Load the model if needed. Raises ShuttingDown; errors of loading are in the future."""
        ...

    def dismiss(self) -> Future[None]:
        """Unload the weights as soon as no request runs; the prefix cache stays."""
        ...

    def refuse_loads(self) -> None:
        """The server is about to stop: fail what waits for the weights, now and later. From any thread."""
        ...

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model loaded last; "" before."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """One of the models. Before it is loaded, `nbytes` and `layers` are those of its files.

    Models with the same weights and KV format share a `backend`, and so a prefix cache.
    """

    id: str
    backend: ModelBackend
    make_service: "Callable[[LoadedModel], ChatService]"
    """Called on a separate thread."""
    nbytes: int = 0
    layers: str = ""
    """The number of layers by kind, in words; "" if not known yet."""
    fault: str | None = None
    """Why it could not be loaded, as of the start of the server; None if it could."""
    engine: str = ""
    """The id of the first model with the same `backend`, under which their counters are reported."""
    base: str | None = None
    """The id of its base, if it is a model with an adapter."""
    adapter_names: tuple[str, ...] = ()
    """Names of its adapter in requests; empty without an adapter."""
    was_found: bool = False
    """Whether it is served for being in the hub's cache, and not by its name."""
    service: ChatService | None = None
    fingerprint: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> WeightsState:
        return self.backend.status().weights

    @property
    def is_ready(self) -> bool:
        """Whether `service` can answer with the loaded weights."""
        is_here = self.service is not None and self.state is WeightsState.READY
        return is_here and self.fingerprint == self.backend.fingerprint

    async def ready(self) -> ChatService:
        """Its service; loads the model if needed. Raises LoadFailed."""
        if self.service is not None and self.is_ready:
            return self.service
        loaded = await asyncio.wrap_future(self.backend.ready())
        async with self._making:
            # Not on the event loop: making a service runs trials of the chat template.
            return await asyncio.to_thread(self.take, loaded)

    async def unloaded(self) -> None:
        """Unload it, and wait until that is done, which it is as soon as no request runs."""
        await asyncio.wrap_future(self.backend.dismiss())

    def take(self, loaded: "LoadedModel") -> ChatService:
        """The service for a loaded model: the previous one unless its files have changed."""
        if self.service is None or self.fingerprint != loaded.fingerprint:
            self.service, self.fingerprint, self.nbytes = self.make_service(loaded), loaded.fingerprint, loaded.nbytes
        return self.service


class Models:
    """All models of a server. The first is the default."""

    def __init__(self, models: Sequence[ServedModel], *, accepts_any_name: bool = False) -> None:
        assert len({model.id for model in models}) == len(models) > 0, "model names are unique"
        self.all = tuple(models)
        firsts: dict[int, str] = {}
        for model in self.all:
            model.engine = firsts.setdefault(id(model.backend), model.id)
        self._accepts_any_name = accepts_any_name
        self.find: Callable[[str], ServedModel | None] = lambda name: None
        """A model that was not here at the start, by its id, or None. Not on the event loop: it looks at files."""
        self._removed: dict[str, ServedModel] = {}

    async def note_fetched(self, name: str) -> None:
        """A model of the hub is in its cache now: serve it from now on, if this server serves those."""
        if any(name == model.id for model in self.all):
            return
        found = self._removed.pop(name, None) or await asyncio.to_thread(self.find, name)
        if found is not None:
            found.engine = found.engine or found.id
            self.all = (*self.all, found)

    def note_removed(self, name: str) -> None:
        """A model has gone from the hub's cache: it is not served any more, unless it was named at the start."""
        gone = [model for model in self.all if model.id == name and model.was_found]
        self._removed |= {model.id: model for model in gone}
        self.all = tuple(model for model in self.all if model not in gone)

    def of(self, name: str | None, adapter: str | None = None) -> ServedModel:
        """The model that a request names, by id or the id's last part, and the adapter. Raises UnknownModel."""
        model = self._named(name)
        if adapter is None or adapter in model.adapter_names:
            return model
        adapted = [other for other in self.all if other.base == model.id]
        for other in adapted:
            if adapter in other.adapter_names:
                return other
        raise unknown_adapter(adapter, [each.adapter_names[0] for each in (model, *adapted) if each.adapter_names])

    def asked(self, name: str | None, adapter: str | None = None) -> ServedModel:
        """The model that has to answer. Raises UnknownModel, and BadRequest where none of several is named."""
        if name is None and adapter is None and len(self.all) > 1 and not self._accepts_any_name:
            raise BadRequest(f"Several models are served here. Send `model`: {self._ids}.", param="model")
        return self.of(name, adapter)

    @property
    def _ids(self) -> str:
        return ", ".join(model.id for model in self.all)

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
        raise UnknownModel(f"The model {name!r} is not served here. Ask for one of: {self._ids}.")

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
    """The last part of an id, such as a hub id."""
    return PurePath(model_id).name


_MOST_CLIENTLESS = 64
_CLIENTLESS: set[asyncio.Task[None]] = set()
"""Background answers whose model is still loaded, and whose clients have gone."""


class StreamWhileLoading(Response):
    """A stream that starts while its model is being loaded: comments about that, then the answer's events.

    Since the status has been sent, an error becomes its last event. `headers`: those of the answer, known before it.
    With `expected` it is a background answer, which begins when the model is there, whether or not its client still is;
    what `expected` encloses is the time until then.
    """

    def __init__(
        self,
        model: ServedModel,
        ready: "asyncio.Task[ChatService]",
        answer: Callable[[], Coroutine[Any, Any, Response]],
        *,
        shapes: ErrorFormats,
        headers: Mapping[str, str],
        expected: AbstractContextManager[None] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM, **headers})
        self._ready: asyncio.Task[ChatService] | None = ready
        self._model, self._answer, self._shapes = model, answer, shapes
        self._expected = expected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(text: str, *, has_more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})

        async def send_rest(message: Any) -> None:
            if message["type"] == "http.response.body":
                await send(message)

        waiting = ExitStack()
        if self._expected is not None:
            waiting.enter_context(self._expected)
        try:
            await while_connected(receive, self._wait(write))
            response = await self._answer()
            waiting.close()
        except (ClientGone, OSError):
            ready = self._ready
            if ready is not None and self._expected is not None and len(_CLIENTLESS) < _MOST_CLIENTLESS:
                self._ready = None
                _CLIENTLESS.add(task := asyncio.create_task(self._begin(ready, waiting.pop_all())))
                task.add_done_callback(_CLIENTLESS.discard)
        except Exception as error:
            problem = problem_of(error)
            log_problem(problem, error, where=self._model.id)
            body = self._shapes.of(scope)(problem)
            is_named = "type" in body
            await write(event_lines("error", body) if is_named else data_line(body), has_more=False)
        else:
            await response(scope, receive, send_rest)
        finally:
            waiting.close()
            if self._ready is not None:
                self._ready.cancel()

    async def _begin(self, ready: "asyncio.Task[ChatService]", waiting: ExitStack) -> None:
        """Begin the answer without its client, which can read it at its address."""
        try:
            with waiting:
                await ready
                await self._answer()
        except Exception as error:
            log_problem(problem_of(error), error, where=self._model.id)
        finally:
            ready.cancel()

    async def _wait(self, write: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        assert self._ready is not None, "a response is sent once"
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
    shapes: ErrorFormats,
    headers: Mapping[str, str] = _NO_HEADERS,
    expected: AbstractContextManager[None] | None = None,
) -> Response:
    """Answer a request once its model is loaded; a stream starts before. Raises what loading raises."""
    if model.is_ready:
        return await answer()
    ready = asyncio.create_task(model.ready())
    try:
        done, _ = await asyncio.wait((ready,), timeout=_AT_ONCE_S)
        if not done and is_stream:
            streamed, ready = (
                StreamWhileLoading(model, ready, answer, shapes=shapes, headers=headers, expected=expected),
                None,
            )
            return streamed
        await while_connected(request.receive, _result(ready))
        ready = None
        return await answer()
    finally:
        if ready is not None:
            ready.cancel()


async def _result(ready: "asyncio.Task[ChatService]") -> ChatService:
    return await ready
