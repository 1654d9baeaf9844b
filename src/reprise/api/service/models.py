"""The models of one server: resolves the model of a request, and has a service for each loaded model."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from reprise.api.service.served import unknown_adapter
from reprise.core.backend import Backend, Status, WeightsState
from reprise.core.errors import BadRequest, UnknownModel

if TYPE_CHECKING:
    # At run time the API is used without MLX.
    from reprise.engine.models.load import LoadedModel


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


class ModelService(Protocol):
    """What answers for a model that was loaded, as far as the list of models needs to know it."""

    def status_of_model(self) -> Status:
        """What the engine publishes of this model, with what is under way here."""
        ...


S = TypeVar("S", bound=ModelService)


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel(Generic[S]):
    """One of the models, with what answers for it. Before it is loaded, `nbytes` and `layers` are those of its files.

    Models with the same weights and KV format share a `backend`, and so a prefix cache.
    """

    id: str
    backend: ModelBackend
    make_service: "Callable[[LoadedModel], S]"
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
    service: S | None = None
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

    async def ready(self) -> S:
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

    def take(self, loaded: "LoadedModel") -> S:
        """The service for a loaded model: the previous one unless its files have changed."""
        if self.service is None or self.fingerprint != loaded.fingerprint:
            self.service, self.fingerprint, self.nbytes = self.make_service(loaded), loaded.fingerprint, loaded.nbytes
        return self.service


class Models(Generic[S]):
    """All models of a server. The first is the default."""

    def __init__(self, models: Sequence[ServedModel[S]], *, accepts_any_name: bool = False) -> None:
        assert len({model.id for model in models}) == len(models) > 0, "model names are unique"
        self.all = tuple(models)
        firsts: dict[int, str] = {}
        for model in self.all:
            model.engine = firsts.setdefault(id(model.backend), model.id)
        self._accepts_any_name = accepts_any_name
        self.find: Callable[[str], ServedModel[S] | None] = lambda name: None
        """A model that was not here at the start, by its id, or None. Not on the event loop: it looks at files."""
        self._removed: dict[str, ServedModel[S]] = {}

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

    def of(self, name: str | None, adapter: str | None = None) -> ServedModel[S]:
        """The model that a request names, by id or the id's last part, and the adapter. Raises UnknownModel."""
        model = self._named(name)
        if adapter is None or adapter in model.adapter_names:
            return model
        adapted = [other for other in self.all if other.base == model.id]
        for other in adapted:
            if adapter in other.adapter_names:
                return other
        raise unknown_adapter(adapter, [each.adapter_names[0] for each in (model, *adapted) if each.adapter_names])

    def asked(self, name: str | None, adapter: str | None = None) -> ServedModel[S]:
        """The model that has to answer. Raises UnknownModel, and BadRequest where none of several is named."""
        if name is None and adapter is None and len(self.all) > 1 and not self._accepts_any_name:
            raise BadRequest(f"Several models are served here. Send `model`: {self._ids}.", param="model")
        return self.of(name, adapter)

    @property
    def _ids(self) -> str:
        return ", ".join(model.id for model in self.all)

    def _named(self, name: str | None) -> ServedModel[S]:
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
    def services(self) -> list[S]:
        """Of the models that were loaded, those that are unloaded by now among them."""
        return [model.service for model in self.all if model.service is not None]

    def by_engine(self) -> dict[str, ServedModel[S]]:
        """One of the models of each engine, one that was loaded if there is one, by the id of the first of them.

        What is counted by engine is counted once for all aliases of the same weights.
        """
        found: dict[str, ServedModel[S]] = {}
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


def model_body(model: ServedModel[Any]) -> dict[str, Any]:
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
        "drafting": status.drafting,
        "loads": status.num_loads,
        "load_s": round(status.load_s, 3),
        # Before the first load nobody knows which tokens it has.
        "has_been_loaded": model.service is not None,
    }


def short_name(model_id: str) -> str:
    """The last part of an id, such as a hub id."""
    return PurePath(model_id).name
