"""Puts a server together: engine loop, renderer, grammars, service, HTTP."""

import json
import logging
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from reprise.api.ending import Ending, end_at_once
from reprise.api.listening import FirstAnswers, url_of
from reprise.api.loading import LoadingClock
from reprise.api.models import Models, ServedModel
from reprise.api.repeats import OncePerSecond
from reprise.api.run import run_while_loading
from reprise.api.served import served_model
from reprise.api.service import ChatService
from reprise.chat.template import syntax_fault
from reprise.cli.agents import AGENTS
from reprise.cli.inspection import CHAT_TOKENS, count_layers, idle_chats
from reprise.cli.models import model_directories
from reprise.cli.process_limits import weights_nbytes
from reprise.cli.server_url import DEFAULT_URL
from reprise.core.backend import total_of
from reprise.core.errors import LoadFailed, memory_too_small
from reprise.core.follow import bound_for
from reprise.core.metrics import totals_line
from reprise.core.settings import Settings
from reprise.core.sizes import nbytes_text
from reprise.engine.hub import cached_models
from reprise.engine.load import LoadedModel
from reprise.engine.machine import read_machine
from reprise.engine.memory import budget_of_all, most_state, process_nbytes
from reprise.engine.runner import Footprint
from reprise.loop import EngineLoop
from reprise.loop.engine_thread import EngineThread
from reprise.loop.heartbeat import watchdog
from reprise.loop.watch import following_machine
from reprise.memory import SharedMemory

log = logging.getLogger(__name__)

LOADING_REPORTED_S = 5.0
_CLOSE_S = 40.0
_OF_FIRST: Mapping[str, Any] = {"adapter_path": None, "chat_template": None}
"""What is the first model's alone of several."""


def run_server(settings: Settings, listener: socket.socket, first: FirstAnswers) -> None:
    """Load the model and serve it on the listener, where `first` has answered, until the user ends it.

    Closes the listener. Raises LoadFailed.
    """
    write_log(settings)
    # Before the model is loaded, which may take minutes.
    bound = memory_bound(settings)
    engines = _engines(settings)
    engine = next(iter(engines.values()))
    clock = LoadingClock(weights_nbytes(Path(settings.model).expanduser()))
    with ExitStack() as while_serving:

        def load() -> ChatService:
            with reported_loading(settings.model, clock):
                loaded = engine.start()
            for line in banner(
                loaded, _footprint(engine), budget=engine.status().held.budget_nbytes, url=url_of(listener)
            ):
                log.info("%s", line)
            others = [each for each in engines.values() if each is not engine]
            while_serving.enter_context(following_machine(engine, others=others, bound=bound))
            while_serving.enter_context(watchdog(engine, after_s=settings.stall_after_s))
            service = _service(loaded, settings, engine)
            if len(engines) > 1 or settings.keep_alive_s is not None:
                service.models = _models(engines, service, loaded, settings)
            return service

        try:
            with Ending(settings.grace_s) as ending:
                is_loaded = run_while_loading(
                    load, settings, listener=listener, ending=ending, progress=clock.progress, first=first
                )
                if not is_loaded:
                    # There is nothing to keep, and a large model is not worth the wait.
                    end_at_once(0)
                while_serving.close()
                # The responses under way have ended by now, and what the disk lacks is written.
                _close(engines, timeout_s=ending.left_s)
            log.info("totals: %s", totals_line(total_of([each.status() for each in engines.values()])))
        finally:
            listener.close()
            # MLX aborts a process that ends before the engine's thread has.
            _close(engines, timeout_s=_CLOSE_S)


def _engines(settings: Settings) -> dict[str, EngineLoop]:
    """An engine for each model, by its name: all on one thread, in one memory. Raises LoadFailed."""
    sources = model_sources(settings)
    if len(sources) == 1 and settings.keep_alive_s is None:
        return {name: EngineLoop(settings) for name in sources}
    directories = {cached.id: cached.directory for cached in cached_models()}
    thread = EngineThread(SharedMemory(budget_of_all(settings), most_state=most_state(settings)))
    return {
        name: EngineLoop(
            settings if source == settings.model else replace(settings, model=source, **_OF_FIRST),
            thread=thread,
            name=name,
            nbytes=weights_nbytes(directories.get(source, Path(source).expanduser())),
            keep_alive_s=settings.keep_alive_s,
        )
        for name, source in sources.items()
    }


def model_sources(settings: Settings) -> dict[str, str]:
    """The path or hub id of each model of a server by its name, the one that is loaded first at first.

    Raises LoadFailed where two have one name.
    """
    below = () if settings.models_dir is None else model_directories(Path(settings.models_dir).expanduser())
    sources: dict[str, str] = {}
    for source in dict.fromkeys((settings.model, *settings.other_models, *map(str, below))):
        path = Path(source).expanduser()
        name = path.name if path.exists() else source
        known = sources.setdefault(name, source)
        if Path(known).expanduser() != path:
            raise LoadFailed(f"{known} and {source} would both be called {name}. Rename one of the directories.")
    return sources


def _service(
    loaded: LoadedModel, settings: Settings, engine: EngineLoop, beside: ChatService | None = None
) -> ChatService:
    fault = syntax_fault(loaded.text)
    if fault is not None:
        log.error("%s: the chat template does not parse, so chats are refused: %s", loaded.name, fault)
    served = replace(served_model(loaded, settings), layers=_layers_text(loaded))
    return ChatService(served=served, backend=engine, settings=settings, beside=beside)


def _models(engines: Mapping[str, EngineLoop], first: ChatService, loaded: LoadedModel, settings: Settings) -> Models:
    """All of them, the first of which is loaded."""
    listed = [
        ServedModel(
            id=name,
            backend=engine,
            make_service=lambda loaded, engine=engine: _service(loaded, settings, engine, beside=first),
            nbytes=engine.nbytes,
        )
        for name, engine in engines.items()
    ]
    listed[0].service, listed[0].fingerprint, listed[0].nbytes = first, loaded.fingerprint, loaded.nbytes
    return Models(listed, accepts_any_name=settings.accepts_any_model)


def _close(engines: Mapping[str, EngineLoop], *, timeout_s: float) -> None:
    for engine in engines.values():
        engine.close(now=True, timeout_s=timeout_s)


def memory_bound(settings: Settings) -> int | None:
    """`--memory` in bytes, None without. Raises LoadFailed where the weights alone are more."""
    if settings.memory is None:
        return None
    bound = settings.memory.of(read_machine().total)
    needed = process_nbytes() + weights_nbytes(Path(settings.model).expanduser())
    if needed > bound:
        raise memory_too_small(settings.model, bound=bound, needed=bound_for(needed, 0))
    return bound


@contextmanager
def reported_loading(
    model: str, clock: LoadingClock | None = None, *, every_s: float = LOADING_REPORTED_S
) -> Generator[None]:
    """Log that a model is being loaded, a line every few seconds while it is, and how long it took."""
    clock = LoadingClock(weights_nbytes(Path(model).expanduser())) if clock is None else clock
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(every_s):
            log.info("loading %s: %s so far", model, clock.progress())

    reporter = threading.Thread(target=report, name="reprise-loading", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()
    log.info("loaded %s in %.1f s", model, clock.progress().seconds)


def write_log(settings: Settings) -> None:
    """Log to standard error: standard output says where the server is, and nothing else."""
    if settings.log_format == "json":
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    elif sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
    else:
        # A file or a journal: one line for each record, whatever its length.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(OncePerSecond())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    logging.getLogger("reprise").setLevel(max(level, logging.WARNING) if settings.is_quiet else level)


class JsonLines(logging.Formatter):
    """A record as a JSON object on a line: time (ISO 8601, UTC), level, logger, message, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)


def banner(loaded: LoadedModel, footprint: Footprint, *, budget: int, url: str) -> list[str]:
    """What is served, in lines for a person: the model and its layers, what memory holds, and how to get there."""
    context = "" if loaded.context is None else f"; context of {loaded.context:,} tokens"
    lengths = [tokens for tokens in CHAT_TOKENS if loaded.context is None or tokens <= loaded.context]
    fits = [idle_chats(tokens, footprint, budget) for tokens in lengths or CHAT_TOKENS[:1]]
    chats = ", ".join(f"{chats.num:,} chats of {chats.tokens // 1024}k tokens" for chats in fits)
    at = "" if url == DEFAULT_URL else f" --url {url.removeprefix('http://')}"
    return [
        f"{loaded.name}: {_layers_text(loaded)}{context}",
        f"{nbytes_text(budget)} for the cache and running requests: about {chats.replace(', ', ', or ')}",
        f"page: {url}/   OpenAI: {url}/v1   Anthropic, Ollama: {url}",
        f"terminal: reprise chat{'' if at == '' else ' ' + url}   agents: reprise launch {'|'.join(AGENTS)}{at}",
    ]


def _layers_text(loaded: LoadedModel) -> str:
    return ", ".join(f"{layers.num} × {layers.kind}" for layers in count_layers(loaded.blueprint.specs))


def _footprint(engine: EngineLoop) -> Footprint:
    answer: Future[Footprint] = Future()
    engine.call(lambda worker: answer.set_result(worker.runner.footprint))
    return answer.result()
