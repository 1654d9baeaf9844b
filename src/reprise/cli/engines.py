"""The engines of a server: loaded, put together with what answers for their models, watched over, and closed."""

import logging
import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprise.api.http.ending import RESTARTABLE, Ending, end_at_once
from reprise.api.http.listening import FirstAnswers, url_of
from reprise.api.loading import LoadingClock
from reprise.api.run import run_while_loading
from reprise.api.service.models import Models, ServedModel
from reprise.api.service.served import Served, served_model
from reprise.api.service.service import ChatService
from reprise.chat.templates.template import syntax_fault
from reprise.cli.agents import AGENTS
from reprise.cli.inspection import CHAT_TOKENS, describe_head, idle_chats, layers_text
from reprise.cli.process_limits import weights_nbytes
from reprise.cli.served_models import EngineGroup, ModelEntry, engine_groups, served_models
from reprise.cli.server_url import DEFAULT_URL
from reprise.cli.wings import ranks
from reprise.core.backend import Status, total_of
from reprise.core.clock import repeating
from reprise.core.errors import LoadFailed, RepriseError, ShuttingDown, memory_too_small
from reprise.core.follow import bound_for
from reprise.core.inspection import OnDisk
from reprise.core.kinds import Footprint
from reprise.core.metrics import totals_line
from reprise.core.settings import OFF, Settings
from reprise.core.sizes import nbytes_text
from reprise.engine.machine import read_machine
from reprise.engine.memory import budget_of_all, freeze_heap, leave_thread, max_state_nbytes, process_nbytes
from reprise.engine.models.adapters import check_adapter
from reprise.engine.models.load import LoadedModel, is_local, model_directory, with_template
from reprise.engine.running.outline import ModelOutline, outline_of
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.loop.heartbeat import watchdog
from reprise.loop.watch import following_machine
from reprise.memory import SharedMemory
from reprise.quiet import MACHINE

log = logging.getLogger(__name__)

LOADING_REPORTED_S = 5.0
_CLOSE_S = 40.0
_LOOKS_EVERY_S = 0.5
"""While a model is loaded at the start, whether the server is to end."""
_TOLD_S = 1.0
"""The time for the engine thread to fail its requests, and for these errors to be sent."""


def run_server(settings: Settings, listener: socket.socket, first: FirstAnswers | None) -> None:
    """Load the model and serve it on the listener, where `first` has answered, until the user ends it.

    Without `first`, requests wait for the model. Closes the listener. Raises LoadFailed.
    """
    engines = ServingEngines(settings)
    try:
        with Ending(settings.grace_s) as ending:
            is_loaded = run_while_loading(
                lambda: engines.load(url=url_of(listener)),
                settings,
                listener=listener,
                ending=ending,
                progress=engines.clock.progress,
                first=first,
                holds=first is None,
            )
            if not is_loaded:
                # There is nothing to keep, and a large model is not worth the wait.
                end_at_once(0)
            # The responses under way have ended by now, and what the disk lacks is written.
            engines.stop(timeout_s=ending.left_s)
        log.info("totals: %s", totals_line(engines.status()))
        if engines.is_loading:
            # MLX aborts a process that ends while a thread computes, and a large model is not worth the wait.
            end_at_once(0)
    finally:
        listener.close()
        engines.close()


class ServingEngines:
    """All of a server but HTTP: the engines of the models that the settings name, and what watches over them.

    Raises LoadFailed where `--memory` is less than the weights.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._entries = served_models(settings)
        first_group, *others = engine_groups(self._entries)
        of_first = self._of_first = first_group.settings
        # Before the model is loaded, which may take minutes.
        self._bound = memory_bound(of_first)
        self._ranks = ranks().leading_rank(of_first) if of_first.is_tensor_parallel else None
        self._shares = len(self._entries) > 1 or of_first.keep_alive_s is not None or _may_grow(settings)
        if self._shares:
            memory = SharedMemory(budget_of_all(settings), max_state_nbytes=max_state_nbytes(settings))
            self._thread = EngineThread(memory)
            self._served = [_sharing(group, self._thread) for group in (first_group, *others)]
        else:
            load = None if self._ranks is None else self._ranks.load
            self._served = [_ServingEngine(group=first_group, engine=EngineClient(of_first, load=load))]
        self._engines = [each.engine for each in self._served]
        self._others = self._engines[1:]
        self._watching = ExitStack()
        self.clock = LoadingClock(weights_nbytes(Path(of_first.model).expanduser()))

    def load(self, *, url: str | None = None) -> ChatService:
        """Load the first model. Returns what answers for it, and for the others. Raises LoadFailed.

        `url`: where it is served, for the log; None: not known here.
        """
        settings, group = self._settings, self._ranks
        engine, first = self._engines[0], self._served[0]
        with reported_loading(self._of_first.model, self.clock):
            loaded = engine.start()
        if group is not None:
            group.when_failed(lambda failure: _end_with_ranks(engine, failure))
        is_only = len(self._entries) == 1 and not _may_grow(settings)
        service = _service(loaded, first, first.group.entries[0], is_only=is_only)
        if url is not None:
            budget = engine.status().held.budget_nbytes
            for line in banner(service.served, engine.footprint().result(), budget=budget, url=url):
                log.info("%s", line)
            if loaded.head is not None:
                log.info("head (MTP): %s", describe_head(loaded))
            if loaded.embedder is None:
                log.info("drafts: %s", engine.status().drafting or OFF)
            if (line := disk_line(self._of_first, engine.status().disk)) is not None:
                log.info("%s", line)
        read = read_machine if group is None else group.read_machines
        watch = self._watching.enter_context
        watch(MACHINE.followed(settings.background))
        watch(following_machine(engine, others=self._others, bound=self._bound, read=read))
        watch(watchdog(engine, after_s=settings.stall_after_s, on_death=_end_to_be_restarted))
        if self._shares:
            service.models = _models(self._served, self._entries, service, loaded)
            if _may_grow(settings):
                service.models.find = self._find_fetched
            watch(_looking(self._served, service.models))
        freeze_heap()
        return service

    def _find_fetched(self, name: str) -> ServedModel[ChatService] | None:
        """A model that has come into the hub's cache since the start, served from now on; None: it cannot be."""
        known = {entry.id for entry in self._entries}
        entry = next((each for each in served_models(self._settings) if each.id == name and name not in known), None)
        first = self._served[0].services[self._entries[0].id][1]
        if entry is None:
            return None
        (group,) = engine_groups([entry])
        served = _sharing(group, self._thread)
        self._entries = (*self._entries, entry)
        self._served.append(served)
        self._engines.append(served.engine)
        self._others.append(served.engine)
        model = _listed(served, entry, first, is_only=False)
        _look(served, [model])
        return model

    def status(self) -> Status:
        """That of all models together."""
        return total_of([engine.status() for engine in self._engines])

    @property
    def is_loading(self) -> bool:
        """Whether the weights of a model are being read."""
        return any(engine.is_loading for engine in self._engines)

    def stop(self, *, timeout_s: float) -> None:
        """End the engines, once the disk has what they computed."""
        self._watching.close()
        for engine in self._engines:
            engine.close(now=True, timeout_s=timeout_s)

    def close(self) -> None:
        """Release what is left, also where loading failed."""
        # MLX aborts a process that ends before the engine's thread has.
        self.stop(timeout_s=_CLOSE_S)
        if self._ranks is not None:
            self._ranks.close()


def _end_with_ranks(engine: EngineClient, failure: RepriseError) -> None:
    """A rank has gone, or hangs: fail all requests, and end, since no rank can do anything alone."""

    def end() -> None:
        engine.give_up(failure, within_s=_TOLD_S)
        _end_to_be_restarted()

    threading.Thread(target=end, name="reprise-end", daemon=True).start()


def _end_to_be_restarted() -> None:
    """End a process whose engine has failed: a supervisor starts it again."""
    # The errors of open requests are sent meanwhile, and `/health` reports it.
    time.sleep(_TOLD_S)
    end_at_once(RESTARTABLE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ServingEngine:
    """An engine, and the models that it computes for."""

    group: EngineGroup
    engine: EngineClient
    services: dict[str, tuple[str, ChatService]] = field(default_factory=dict[str, tuple[str, ChatService]])
    """What was made for each of its models last, by id, and the fingerprint of what was loaded."""
    making: threading.Lock = field(default_factory=threading.Lock)


def _may_grow(settings: Settings) -> bool:
    """Whether a request may fetch a model that is served from then on."""
    return settings.has_hub_cache and settings.downloads


def _sharing(group: EngineGroup, thread: EngineThread) -> _ServingEngine:
    """The engine of these models, on a thread and in a memory that it shares."""
    engine = EngineClient(
        group.settings,
        thread=thread,
        name=group.name,
        nbytes=group.nbytes,
        is_pinned=group.settings.is_pinned,
        keep_alive_s=group.settings.keep_alive_s,
    )
    return _ServingEngine(group=group, engine=engine)


def _service(
    loaded: LoadedModel,
    served: _ServingEngine,
    entry: ModelEntry,
    *,
    is_only: bool,
    beside: ChatService | None = None,
) -> ChatService:
    """What answers for one of the models of an engine. What it renders as another one does, it remembers with it."""
    own, engines = entry.settings, served.group.settings
    text = loaded.text
    if _written_by(own) != _written_by(engines):
        text = with_template(loaded, own)
    fault = syntax_fault(text)
    if fault is not None:
        log.error("%s: the chat template does not parse, so chats are refused: %s", entry.id, fault)
    seen = replace(
        served_model(loaded, own, text=text),
        id=entry.id,
        layers=_layers_text(loaded),
        # Its model was chosen before a request reaches the engine.
        accepts_any_name=own.accepts_any_model or not is_only,
        adapter_names=entry.adapter_names,
    )
    with served.making:
        same = next((other for other in served.services.values() if _renders_alike(other, loaded, seen, own)), None)
        renderers = None
        if same is not None:
            _, other = same
            shared, renderers = other.served, other.renderers
            seen = replace(seen, text=shared.text, renderer=shared.renderer, grammars=shared.grammars)
        service = ChatService(served=seen, backend=served.engine, settings=own, beside=beside, renderers=renderers)
        served.services[entry.id] = loaded.fingerprint, service
    return service


def _written_by(settings: Settings) -> tuple[str | None, str | None]:
    """What decides how a model's prompts and answers are written."""
    return settings.chat_template, settings.learnt


def _renders_alike(other: tuple[str, ChatService], loaded: LoadedModel, seen: Served, settings: Settings) -> bool:
    fingerprint, service = other
    is_same_text = fingerprint == loaded.fingerprint and _written_by(service.settings) == _written_by(settings)
    return is_same_text and service.served.renderer.settings == seen.renderer.settings


def _models(
    served: Sequence[_ServingEngine], entries: Sequence[ModelEntry], first: ChatService, loaded: LoadedModel
) -> Models[ChatService]:
    """All of them, the first of which is loaded."""
    order = [entry.id for entry in entries]
    is_only = len(entries) == 1
    listed = [_listed(each, entry, first, is_only=is_only) for each in served for entry in each.group.entries]
    listed.sort(key=lambda model: order.index(model.id))
    listed[0].service, listed[0].fingerprint, listed[0].nbytes = first, loaded.fingerprint, loaded.nbytes
    return Models(listed, accepts_any_name=first.settings.accepts_any_model)


def _listed(
    served: _ServingEngine, entry: ModelEntry, first: ChatService, *, is_only: bool
) -> ServedModel[ChatService]:
    return ServedModel(
        id=entry.id,
        backend=served.engine,
        make_service=lambda loaded: _service(loaded, served, entry, is_only=is_only, beside=first),
        nbytes=served.engine.nbytes,
        base=entry.base,
        adapter_names=entry.adapter_names,
        was_found=not entry.is_named and not entry.is_directory,
    )


@contextmanager
def _looking(served: Sequence[_ServingEngine], models: Models[ChatService]) -> Generator[None]:
    """Meanwhile find out what the models are that are not loaded, and load those that are to be."""
    is_over = threading.Event()

    def look() -> None:
        try:
            for each in served[1:]:
                if each.group.settings.preloads and not is_over.is_set():
                    _preload(each, is_over)
            for each in served:
                if not is_over.is_set():
                    _look(each, [model for model in models.all if model.backend is each.engine])
        except ShuttingDown:
            return
        finally:
            leave_thread()

    looker = threading.Thread(target=look, name="reprise-preload", daemon=True)
    looker.start()
    try:
        yield
    finally:
        is_over.set()
        looker.join(_CLOSE_S)


def _look(served: _ServingEngine, models: Sequence[ServedModel[ChatService]]) -> None:
    group = served.group
    fault = layers = None
    try:
        if group.directory is None and not is_local(group.settings.model):
            fault = f"{group.settings.model} has not been downloaded: `reprise pull {group.settings.model}`."
        else:
            directory = model_directory(group.settings.model, downloads=False)
            wanted = group.settings
            outline = outline_of(
                directory, wanted.model, kv_bits=wanted.kv_bits, mtp=wanted.head_source, embedder=wanted.embedder
            )
            layers = _layers_text(outline)
        if group.settings.adapter_path is not None:
            check_adapter(group.settings.adapter_path)
    except LoadFailed as error:
        fault = str(error)
    if fault is not None:
        log.warning("%s cannot be loaded: %s", group.name, fault)
    for model in models:
        model.layers, model.fault = layers or "", fault


def _preload(served: _ServingEngine, is_over: threading.Event) -> None:
    engine, source = served.engine, served.group.settings.model
    try:
        engine.nbytes = max(engine.nbytes, weights_nbytes(model_directory(source)))
        ready = engine.preload()
        while not is_over.is_set() and not wait([ready], timeout=_LOOKS_EVERY_S).done:
            pass
        if ready.done():
            ready.result()
    except LoadFailed as error:
        log.warning("%s was not preloaded; the first request for it loads it: %s", engine.name, error)


def memory_bound(settings: Settings) -> int | None:
    """`--memory` in bytes, None without. Raises LoadFailed where the weights alone are more."""
    if settings.memory is None:
        return None
    bound = settings.memory.of(read_machine().total)
    weights = weights_nbytes(Path(settings.model).expanduser())
    least = ranks().least_nbytes_of_rank(weights, os.environ) if settings.is_tensor_parallel else weights
    needed = process_nbytes() + least
    if needed > bound:
        raise memory_too_small(settings.model, bound=bound, needed=bound_for(needed, 0))
    return bound


@contextmanager
def reported_loading(
    model: str, clock: LoadingClock | None = None, *, every_s: float = LOADING_REPORTED_S
) -> Generator[None]:
    """Log that a model is being loaded, a line every few seconds while it is, and how long it took."""
    clock = LoadingClock(weights_nbytes(Path(model).expanduser())) if clock is None else clock

    def report() -> None:
        log.info("loading %s: %s so far", model, clock.progress())

    with repeating(report, every_s=every_s, name="reprise-loading"):
        yield
    log.info("loaded %s in %.1f s", model, clock.progress().seconds)


def banner(served: Served, footprint: Footprint, *, budget: int, url: str) -> list[str]:
    """What is served, in lines for a person: the model and its layers, what memory holds, and how to get there."""
    context = "" if served.context is None else f"; context of {served.context:,} tokens"
    if served.embedder is not None:
        what = "rerank" if served.embedder.is_reranker else "embeddings"
        return [f"{served.id}: {served.layers}{context}", f"OpenAI: {url}/v1/{what}   page: {url}/"]
    lengths = [tokens for tokens in CHAT_TOKENS if served.context is None or tokens <= served.context]
    fits = [idle_chats(tokens, footprint, budget) for tokens in lengths or CHAT_TOKENS[:1]]
    chats = ", ".join(f"{chats.num:,} chats of {chats.tokens // 1024}k tokens" for chats in fits)
    at = "" if url == DEFAULT_URL else f" --url {url.removeprefix('http://')}"
    return [
        f"{served.id}: {served.layers}{context}",
        f"{nbytes_text(budget)} for the cache and running requests: about {chats.replace(', ', ', or ')}",
        f"page: {url}/   OpenAI: {url}/v1   Anthropic, Ollama: {url}",
        f"terminal: reprise chat{'' if at == '' else ' ' + url}   agents: reprise launch {'|'.join(AGENTS)}{at}",
    ]


def disk_line(settings: Settings, disk: OnDisk | None) -> str | None:
    """What is kept on disk, and how to turn that off; None: nothing is."""
    if disk is None or settings.disk_directory is None:
        return None
    daily = "" if disk.daily_nbytes is None else f", and {nbytes_text(disk.daily_nbytes)} written in a day"
    most = nbytes_text(disk.budget_nbytes)
    return f"prefixes also in {settings.disk_directory}, at most {most}{daily}; in memory alone: --disk-cache off"


def _layers_text(model: LoadedModel | ModelOutline) -> str:
    if isinstance(model, ModelOutline):
        return layers_text(model.blueprint.specs, model.embedder)
    return layers_text(model.blueprint.specs, "" if model.embedder is None else model.embedder.summary)
