"""What a server responds while its model is loading: it listens from the start, and says when to retry."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from reprise.api.app import create_app, protected, shapes_of_apis
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import Problem, error_response
from reprise.api.native.server_routes import Health
from reprise.api.service.service import ChatService
from reprise.core.settings import Settings
from reprise.core.sizes import nbytes_text

log = logging.getLogger(__name__)

_MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingProgress:
    """How far loading is after `seconds`: `nbytes_read` of the `nbytes_total` that the weights have on disk (0: not
    known)."""

    seconds: float
    nbytes_read: int
    nbytes_total: int

    def __post_init__(self) -> None:
        assert self.nbytes_read >= 0 and self.nbytes_total >= 0, self
        assert self.nbytes_total == 0 or self.nbytes_read <= self.nbytes_total, self

    @property
    def share(self) -> float | None:
        """The part that is loaded, in [0, 1]; None where it is not known."""
        return None if self.nbytes_total == 0 else self.nbytes_read / self.nbytes_total

    @property
    def retry_after_s(self) -> int:
        """When it may be over, by the pace until now."""
        if not self.share:
            return _UNKNOWN_RETRY_S
        return min(_MAX_RETRY_S, max(1, math.ceil(self.seconds * (1 / self.share - 1))))

    def __str__(self) -> str:
        part = "" if self.share is None else f" of {nbytes_text(self.nbytes_total)} ({self.share:.0%})"
        return f"{nbytes_text(self.nbytes_read)}{part} in {self.seconds:.0f} s"


class LoadingClock:
    """Measures the progress, from when it is made, by how much the process grows."""

    def __init__(self, nbytes_total: int) -> None:
        self._nbytes_total = nbytes_total
        self._begun_s = time.monotonic()
        self._before = psutil.Process().memory_info().rss

    def progress(self) -> LoadingProgress:
        grown = max(0, psutil.Process().memory_info().rss - self._before)
        return LoadingProgress(
            seconds=time.monotonic() - self._begun_s,
            # Libraries and tokenizers are part of what it grows by.
            nbytes_read=grown if self._nbytes_total == 0 else min(grown, self._nbytes_total),
            nbytes_total=self._nbytes_total,
        )


class LoadingApp:
    """The application of a server whose model is still loaded: `load` does that on a separate thread. Until it has,
    every request gets a 503, or waits with `holds`; from then on the API answers, on the same connections.

    `on_loaded` and `on_failed` are called on the event loop; `failure` is then what `load` raised.
    """

    def __init__(
        self,
        load: Callable[[], ChatService],
        settings: Settings,
        *,
        progress: Callable[[], LoadingProgress],
        on_loaded: Callable[[ChatService], None],
        holds: bool = False,
    ) -> None:
        self._load = load
        self._settings = settings
        self._progress = progress
        self._on_loaded = on_loaded
        self.on_failed: Callable[[], None] = lambda: None
        self._shapes = shapes_of_apis()
        self._while_loading: ASGIApp = protected(self._hold, settings, shapes=self._shapes, context=None)
        self._app = self._while_loading
        self._holds = holds
        self._has_answers = asyncio.Event()
        """Set when the API answers, or never will."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = asyncio.Event()
        self.failure: BaseException | None = None
        self.service: ChatService | None = None

    def begin_close(self) -> None:
        """See `ChatService`."""
        if self._loop is not None:
            # Who waits for the model does not hold up the end.
            self._loop.call_soon_threadsafe(self._has_answers.set)
        if self.service is not None:
            for each in self.service.beside:
                each.begin_close()
            for model in () if self.service.models is None else self.service.models.all:
                model.backend.refuse_loads()

    def cut_off(self) -> None:
        """See `ChatService`."""
        if self.service is not None:
            for each in self.service.beside:
                each.cut_off()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        self._loop = loop
        apps: list[FastAPI] = []

        def make() -> None:
            try:
                self.service = self._load()
                apps.append(create_app(self.service, self._settings))
            except BaseException as error:
                self.failure = error
            finally:
                # The server may have ended meanwhile.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(made.set)

        # Not a thread of the event loop's own: the end of the process does not wait for a large model.
        threading.Thread(target=make, name="reprise-load", daemon=True).start()
        serving = asyncio.create_task(self._serve(made, apps))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._is_over.set()
        if not made.is_set():
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, made: asyncio.Event, apps: list[FastAPI]) -> None:
        await made.wait()
        if self.failure is not None or self.service is None:
            self._has_answers.set()
            self.on_failed()
            return
        (app,) = apps
        async with app.router.lifespan_context(app):
            self._app = app
            self._has_answers.set()
            self._on_loaded(self.service)
            await self._is_over.wait()

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer once the model is loaded; what asks how the server is, at once."""
        if self._holds and not scope["path"].startswith("/health"):
            await self._has_answers.wait()
            if self._app is not self._while_loading:
                await self._app(scope, receive, send)
                return
        await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        progress = self._progress()
        headers = {"Retry-After": str(progress.retry_after_s)}
        response = JsonResponse(
            {
                "status": Health.LOADING,
                "loading": {
                    "seconds": round(progress.seconds, 3),
                    "bytes_read": progress.nbytes_read,
                    "bytes_total": progress.nbytes_total,
                },
            },
            status_code=200 if scope["path"] == "/health/live" else 503,
            headers=headers,
        )
        if not scope["path"].startswith("/health"):
            log.info("%s %s: 503, the model is loading", scope["method"], scope["path"][:200])
            message = f"The model is loading ({progress}). Try again in {progress.retry_after_s} s."
            problem = Problem(status=503, code="model_loading", message=message, retry_after_s=progress.retry_after_s)
            response = error_response(problem, self._shapes.of(scope))
        await response(scope, receive, send)
