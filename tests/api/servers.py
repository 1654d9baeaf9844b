"""The whole API over a fake engine, with a real tokenizer, template, renderer and parser."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import httpx

from reprise.api.app import create_app
from reprise.api.http.limits import Limits
from reprise.api.service.image_parts import image_limits
from reprise.api.service.reply import LoopClock
from reprise.api.service.served import Served, names_of_adapter
from reprise.api.service.service import ChatService
from reprise.chat.grammars.grammar import Grammars
from reprise.chat.rendering.render import Renderer
from reprise.chat.text_model import TextModel
from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.server_thread import ServerThread
from tests.chat.text_models import fast_tokenizer, text_model

MODEL = "org/tiny-chat"
EOS = "<|im_end|>"


def says(text: str) -> Callable[[Job], list[int]]:
    """A script: every job answers with this text and ends its turn."""
    return lambda job: text_model().encode(text + EOS)


HELLO = says("Hello there.")


@dataclass(frozen=True, kw_only=True)
class Api:
    """A service over a fake engine, and a client for it."""

    service: ChatService
    backend: FakeBackend
    client: httpx.AsyncClient

    async def until_idle(self) -> None:
        """Asleep meanwhile: who does nothing but ask keeps the engine's thread from its work."""
        while not self.service.is_idle:
            await asyncio.sleep(0.005)


def make_service(
    backend: FakeBackend,
    *,
    settings: Settings,
    limits: Limits | None = None,
    context: int | None = 4096,
    template: str | None = "strips_thinking",
    text: TextModel | None = None,
    clock: LoopClock | None = None,
) -> ChatService:
    if text is None:
        text = replace(text_model(template), tokenizer_json=fast_tokenizer(template).backend_tokenizer.to_str)
    served = Served(
        id=MODEL,
        text=text,
        renderer=Renderer(text),
        grammars=Grammars(text),
        context=context,
        created=1_700_000_000,
        accepts_any_name=settings.accepts_any_model,
        adapter_names=names_of_adapter(settings.adapter_path),
        image_limits=None if text.images is None else image_limits(settings),
    )
    return ChatService(served=served, backend=backend, settings=settings, limits=limits, clock=clock)


class _Transport(httpx.ASGITransport):
    """Lets everybody else have their turn, as a socket would: who asks until something is so would ask forever."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        await asyncio.sleep(0)
        return response


@asynccontextmanager
async def api(
    script: Callable[[Job], list[int]] = HELLO,
    *,
    settings: Settings | None = None,
    limits: Limits | None = None,
    context: int | None = 4096,
    template: str | None = "strips_thinking",
    text: TextModel | None = None,
    headers: dict[str, str] | None = None,
    clock: LoopClock | None = None,
) -> AsyncGenerator[Api]:
    """The application in process, with the template of this name or another text model."""
    backend = FakeBackend(script=script)
    chosen = Settings(model=MODEL) if settings is None else settings
    service = make_service(
        backend, settings=chosen, limits=limits, context=context, template=template, text=text, clock=clock
    )
    transport = _Transport(create_app(service, chosen))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            yield Api(service=service, backend=backend, client=client)
    finally:
        backend.may_prefill.set()
        backend.may_decode.set()
        await service.close()
        backend.stop()


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    url: str
    service: ChatService
    backend: FakeBackend
    stop: Callable[[], None]


@contextmanager
def running_server(
    script: Callable[[Job], list[int]] = HELLO,
    *,
    settings: Settings | None = None,
    limits: Limits | None = None,
) -> Generator[RunningServer]:
    """The application on uvicorn, on a free port of this machine."""
    backend = FakeBackend(script=script)
    chosen = Settings(model=MODEL) if settings is None else settings
    service = make_service(backend, settings=chosen, limits=limits)
    server = ServerThread(service, chosen)
    try:
        yield RunningServer(url=server.url, service=service, backend=backend, stop=server.stop)
    finally:
        backend.may_prefill.set()
        backend.may_decode.set()
        server.stop()
        backend.stop()
