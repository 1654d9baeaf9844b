"""The application: routes, and the layers around them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import reprise
from reprise.api.anthropic import routes as messages
from reprise.api.http import page
from reprise.api.http.auth import ApiKeys, Guard
from reprise.api.http.errors import ErrorFormats, UnhandledErrors, install_error_handlers
from reprise.api.http.web_access import WebAccess
from reprise.api.native import llama_cpp, lookup, overview, pins, prefill, server_routes, tokenize, tree
from reprise.api.native.prefill import read_warm_file, warm_up
from reprise.api.native.refusals import Refusals
from reprise.api.ollama import embed, library
from reprise.api.ollama import routes as ollama
from reprise.api.openai import chat, completions, embeddings, models
from reprise.api.responses import compact
from reprise.api.responses import routes as responses
from reprise.api.responses.store import ResponseStore
from reprise.api.service.service import ChatService
from reprise.api.watch.event_hub import EventHub
from reprise.api.watch.ledger import Ledger
from reprise.api.watch.prometheus import Metrics
from reprise.api.watch.recording import RecordedCalls, Recorder
from reprise.api.wire.background import ADDRESS_HEADER, BackgroundAnswers
from reprise.api.wire.body_reading import BodyLimits, max_body_nbytes
from reprise.api.wire.context import Context
from reprise.core.errors import RepriseError
from reprise.core.settings import Settings

_INSPECT_S = 5.0
"""How long the first line of a recording waits for the engine to say what a model's state takes."""
_APIS = (chat, completions, embeddings, messages, responses, compact, ollama, embed, library, models)
_WATCHING = (page, lookup, tree, overview)
_NATIVE = (prefill, tokenize, llama_cpp, pins, *_WATCHING, server_routes)
ROUTES: Sequence[BaseRoute] = tuple(route for module in (*_APIS, *_NATIVE) for route in module.router.routes)
"""As they were declared: `include_router` would analyse each of them again at the first request behind it."""


def shapes_of_apis() -> ErrorFormats:
    """How each API writes its errors."""
    shapes = ErrorFormats()
    shapes.register(messages.PREFIX, messages.MessagesWire.error_format)
    shapes.register(ollama.PREFIX, ollama.OllamaWire.error_format)
    shapes.register(models.PREFIX, messages.MessagesWire.error_format, header=models.ANTHROPIC_HEADER)
    return shapes


def protected(app: ASGIApp, settings: Settings, *, shapes: ErrorFormats, context: int | None) -> ASGIApp:
    """An application behind the layers that every body and every caller passes. What it serves may see images."""
    for layer, options in _layers(settings, shapes=shapes, context=context, sees=True):
        app = layer(app, **options)
    return app


def _layers(
    settings: Settings, *, shapes: ErrorFormats, context: int | None, sees: bool
) -> list[tuple[Any, dict[str, Any]]]:
    """Innermost first."""
    layers: list[tuple[Any, dict[str, Any]]] = [
        (BodyLimits, {"max_bytes": max_body_nbytes(settings, context, sees=sees), "shapes": shapes}),
        (Guard, {"access": WebAccess(settings), "keys": ApiKeys(settings.api_keys), "shapes": shapes}),
        (UnhandledErrors, {"shapes": shapes}),
    ]
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        allowed = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        layers.append((CORSMiddleware, {**allowed, "expose_headers": ["x-request-id", ADDRESS_HEADER]}))
    return layers


def create_app(service: ChatService, settings: Settings) -> FastAPI:
    """The HTTP application of one server. It closes the service when it is shut down.

    Raises LoadFailed if the file of prompts to warm up with, or the one to record to, cannot be used.
    """
    bodies = () if settings.warm_file is None else read_warm_file(Path(settings.warm_file))
    recorder = None if settings.record_file is None else _recorder(service, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        warming = asyncio.create_task(warm_up(service, bodies))
        yield
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        await background.close()
        for each in service.beside:
            await each.close()
        if recorder is not None:
            recorder.close()

    app = FastAPI(
        title="Reprise",
        version=reprise.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        routes=[*ROUTES],
    )
    shapes = shapes_of_apis()
    background = BackgroundAnswers(keep_s=settings.background_s, max_nbytes=settings.background_nbytes)
    ledger = Ledger(service.status)
    service.watch(ledger)
    app.state.context = Context(
        service=service,
        settings=settings,
        shapes=shapes,
        metrics=Metrics(service),
        responses=ResponseStore(),
        ledger=ledger,
        events=EventHub(service),
        background=background,
        models=service.models,
    )
    install_error_handlers(app, shapes)
    # The last one added is the outermost.
    if recorder is not None:
        app.add_middleware(RecordedCalls, recorder=recorder)
    # Another model may have a longer context, and may see; an embedder reads many texts at a time.
    is_alone = service.models is None and service.served.embedder is None
    context = service.served.context if is_alone else None
    sees = service.models is not None or service.served.image_limits is not None
    for layer, options in _layers(settings, shapes=shapes, context=context, sees=sees):
        app.add_middleware(layer, **options)
    app.add_middleware(CanonicalPaths, paths=[route.path for route in ROUTES if isinstance(route, Route)])
    app.add_middleware(Refusals, service=service)
    return app


def _recorder(service: ChatService, settings: Settings) -> Recorder:
    assert settings.record_file is not None

    def about(model: str) -> dict[str, Any]:
        """The sizes of a model's state, and whose prefix cache it has if the server has several."""
        served = None if service.models is None else service.models.of(model)
        backend = service.backend if served is None else served.backend
        try:
            memory = backend.inspect(max_nodes=0).result(_INSPECT_S).memory
        except (RepriseError, TimeoutError):
            return {}
        sizes = {"token_nbytes": memory.token_nbytes, "snapshot_nbytes": memory.snapshot_nbytes}
        return sizes if served is None else {"engine": served.engine, **sizes}

    recorder = Recorder(Path(settings.record_file), with_text=settings.records_text, about=about)
    service.watch(recorder)
    service.recorder = recorder
    return recorder


_VERSION = "/v1"


class CanonicalPaths:
    """Serves `/chat/completions` and `/v1/v1/chat/completions` as `/v1/chat/completions`.

    Clients write such addresses where a base URL was given in another form than they expect. `paths`: those that the
    application serves. One that is served as it stands, or is not known either way, stays.
    """

    def __init__(self, app: ASGIApp, *, paths: Iterable[str]) -> None:
        self._app = app
        given = tuple(paths)
        under_version = {_first(path.removeprefix(_VERSION)) for path in given if path.startswith(f"{_VERSION}/")}
        self._short = under_version - {_first(path) for path in given}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self.canonical(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    def canonical(self, path: str) -> str:
        """The path under which the application serves this one."""
        while path.startswith(f"{_VERSION}{_VERSION}/"):
            path = path.removeprefix(_VERSION)
        return f"{_VERSION}{path}" if _first(path) in self._short else path


def _first(path: str) -> str:
    """The first part of a path."""
    return path.removeprefix("/").partition("/")[0]
