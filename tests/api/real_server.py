"""The whole server over a tiny model that says what it likes: HTTP on a free port, the engine loop, no script."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from reprise.api.service.models import Models, ServedModel
from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.settings import Settings
from reprise.engine.models.load import LoadedModel
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from tests.api.server_thread import ServerThread
from tests.models.embedders import embedder
from tests.models.shared import loader
from tests.models.tiny import CONFIGS, tiny_model


def _folder(name: str) -> Path:
    """A tiny model, or a tiny embedder by its name behind "embed-"."""
    return tiny_model(name) if name in CONFIGS else embedder(name.removeprefix("embed-"))


@contextmanager
def real_server(
    architecture: str = "llama", prepare: Callable[[Worker], None] | None = None, **settings: Any
) -> Generator[httpx.Client]:
    """A client of a server of this tiny model. `prepare` is called on its engine thread before the first request."""
    chosen = Settings(model=str(_folder(architecture)), **settings)
    loop = EngineClient(chosen, load=loader(chosen))
    loaded = loop.start()
    if prepare is not None:
        loop.call(prepare)
    server = ServerThread(ChatService(served=served_model(loaded, chosen), backend=loop, settings=chosen), chosen)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
    finally:
        server.stop()
        loop.close(now=True, timeout_s=120)


@contextmanager
def server_of_several(*architectures: str, **settings: Any) -> Generator[httpx.Client]:
    """A client of a server of these tiny models: the first is loaded, the others when they are asked for."""
    thread = EngineThread(SharedMemory())
    chosen = {name: Settings(model=str(_folder(name)), **settings) for name in architectures}
    loops = {
        name: EngineClient(each, load=loader(each), thread=thread, name=name, nbytes=1 << 20)
        for name, each in chosen.items()
    }
    first, *_ = architectures
    loaded = loops[first].start()
    service = ChatService(served=served_model(loaded, chosen[first]), backend=loops[first], settings=chosen[first])

    def make(name: str, loaded: LoadedModel) -> ChatService:
        served = replace(served_model(loaded, chosen[name]), id=name)
        return ChatService(served=served, backend=loops[name], settings=chosen[name], beside=service)

    models = [ServedModel(id=name, backend=loops[name], make_service=partial(make, name)) for name in architectures]
    models[0].service, models[0].fingerprint, models[0].nbytes = service, loaded.fingerprint, loaded.nbytes
    service.models = Models(models)
    server = ServerThread(service, chosen[first])
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
    finally:
        server.stop()
        for loop in loops.values():
            loop.close(now=True, timeout_s=120)
