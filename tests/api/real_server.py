"""The whole server over a tiny model that says what it likes: HTTP on a free port, the engine loop, no script."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from reprise.api.run import ServerThread
from reprise.api.served import served_model
from reprise.api.service import ChatService
from reprise.core.settings import Settings
from reprise.loop import EngineLoop
from tests.models.shared import loader
from tests.models.tiny import tiny_model


@contextmanager
def real_server(architecture: str = "llama", **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server of this tiny model."""
    chosen = Settings(model=str(tiny_model(architecture)), **settings)
    loop = EngineLoop(chosen, load=loader(chosen))
    loaded = loop.start()
    server = ServerThread(ChatService(served=served_model(loaded, chosen), backend=loop, settings=chosen), chosen)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
    finally:
        server.stop()
        loop.close(now=True, timeout_s=120)
