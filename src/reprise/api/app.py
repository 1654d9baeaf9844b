"""The application: routes, and the layers around them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import Route

import reprise
from reprise.api import lookup, metrics, pins, prefill, server_routes, tokenize
from reprise.api.anthropic import routes as messages
from reprise.api.anthropic.errors import anthropic_shape
from reprise.api.auth import ApiKeys, Authentication
from reprise.api.body_limits import BodyLimits, max_body_nbytes
from reprise.api.context import Context
from reprise.api.encoding import JsonResponse
from reprise.api.errors import LastResort, Shapes, install_error_handlers
from reprise.api.ollama import routes as ollama
from reprise.api.ollama.reply import ollama_shape
from reprise.api.openai import chat, completions, models
from reprise.api.paths import CanonicalPaths
from reprise.api.prometheus import Metrics
from reprise.api.refusals import Refusals
from reprise.api.responses import routes as responses
from reprise.api.responses.store import ResponseStore
from reprise.api.service import ChatService
from reprise.api.warm import read_warm_file, warm_up
from reprise.core.settings import Settings


def create_app(service: ChatService, settings: Settings) -> FastAPI:
    """The HTTP application of one server. It closes the service when it is shut down.

    Raises LoadFailed if the file of prompts to warm up with cannot be used.
    """
    bodies = () if settings.warm_file is None else read_warm_file(Path(settings.warm_file))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        warming = asyncio.create_task(warm_up(service, bodies))
        yield
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        await service.close()

    app = FastAPI(
        title="Reprise",
        version=reprise.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JsonResponse,
    )
    shapes = Shapes()
    app.state.context = Context(
        service=service, settings=settings, shapes=shapes, metrics=Metrics(service), responses=ResponseStore()
    )
    shapes.register(messages.PREFIX, anthropic_shape)
    shapes.register(ollama.PREFIX, ollama_shape)
    shapes.register(models.PREFIX, anthropic_shape, header=models.ANTHROPIC_HEADER)
    apis = (chat, completions, messages, responses, ollama, models)
    routes = (*apis, prefill, tokenize, pins, lookup, server_routes, metrics)
    for module in routes:
        app.include_router(module.router)
    install_error_handlers(app, shapes)
    # The last one added is the outermost.
    app.add_middleware(BodyLimits, max_bytes=max_body_nbytes(settings, service.served.context), shapes=shapes)
    keys = ApiKeys(settings.api_keys)
    app.add_middleware(Authentication, keys=keys, shapes=shapes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(LastResort, shapes=shapes)
    paths = [route.path for module in routes for route in module.router.routes if isinstance(route, Route)]
    app.add_middleware(CanonicalPaths, paths=paths)
    app.add_middleware(Refusals, service=service)
    return app
