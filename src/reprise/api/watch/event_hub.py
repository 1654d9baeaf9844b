"""Publishes events to watchers. docs/events.md describes each event.

While nobody watches, the engine is not polled and no event is kept. Watchers share one ring of the latest events and
each has a position in it: a slow one costs no memory, and gets a new snapshot once its position is overwritten.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

from reprise.api.http.encoding import encode_json
from reprise.api.http.sse import comment_line
from reprise.api.service.exchange import Record
from reprise.api.service.models import model_body
from reprise.api.service.records import record_body
from reprise.api.service.service import ChatService
from reprise.core.errors import ShuttingDown
from reprise.core.inspection import InspectedRequest, Inspection
from reprise.core.metrics import health_fields

log = logging.getLogger(__name__)

_EVERY_S = 0.5
"""The interval at which the engine is polled while somebody watches. What changes more often is published once."""

_RING = 1024
"""Events that are kept for slow watchers, and for those that reconnect."""

_LINGER_S = 30.0
"""How long events are still kept after the last watcher has left, so that it can reconnect without a gap."""

_SILENCE_S = 15.0
"""A stream without events sends a comment at this interval."""

_OWN_TRACES = frozenset(("inspections", "inspection_s", "busy_s", "stalled_s"))
"""Counters that inspecting itself changes: sent only along with others."""

_GAP_S = 60.0
"""The longest gap between two tokens is published for the last one to two of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event. `namespace`: whose it is; None: everybody's."""

    number: int
    namespace: str | None
    name: str
    body: str


class EventHub:
    """Looks at the engine while somebody watches, and keeps the latest events. Belongs to the event loop's thread."""

    def __init__(self, service: ChatService, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._boot = uuid4().hex[:8]
        self._ring: deque[Happening] = deque(maxlen=_RING)
        self._number = 0
        self._num_watchers = 0
        self._entering = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Set, and replaced by another, when there is something to tell."""
        self._requests: dict[str, InspectedRequest] = {}
        self._trees: dict[str, dict[str, Any]] = {}
        """By model."""
        self._models: list[dict[str, Any]] = []
        """Where there are several: what `model_body` says of each."""
        self._model_of: dict[str, str] = {}
        """Of the requests under way, by id."""
        self._counters: dict[str, Any] = {}
        self._gaps = [0.0, 0.0]
        self._gap_since_s = 0.0

    @property
    def is_watched(self) -> bool:
        return self._looking is not None

    @property
    def longest_gap_s(self) -> float | None:
        """Between two tokens of an answer in the last minute or two; None while nobody watches."""
        return max(self._gaps) if self.is_watched else None

    # Watching.

    async def __aenter__(self) -> Self:
        # One at a time: who enters while another takes the first look waits for it.
        async with self._entering:
            if self._looking is None:
                await self._begin()
        self._num_watchers += 1
        return self

    async def _begin(self) -> None:
        """Take the first look and go on looking; leaves nothing behind where that fails."""
        self._gaps, self._gap_since_s = [0.0, 0.0], self._clock()
        self._service.watch(self)
        try:
            await self._look()
        except BaseException:
            self._service.unwatch(self)
            raise
        self._looking = asyncio.create_task(self._look_on())

    async def __aexit__(self, *_: object) -> None:
        self._num_watchers -= 1

    async def tell(self, namespace: str, last_id: str | None) -> AsyncGenerator[str, None]:
        """The events of a namespace: from behind `last_id` where that is known still, else from a snapshot on."""
        at = self._place_of(last_id)
        while not self._service.is_closing:
            first = self._ring[0].number if self._ring else self._number + 1
            if at is None or first > at + 1:
                at = self._number
                yield self._lines(at, "snapshot", encode_json(self._snapshot(namespace)))
                continue
            for each in list(self._ring)[max(0, at + 1 - first) :]:
                if each.namespace in (None, namespace):
                    yield self._lines(each.number, each.name, each.body)
                at = each.number
            if self._number > at:
                continue
            try:
                await asyncio.wait_for(self._news.wait(), _SILENCE_S)
            except TimeoutError:
                yield comment_line("still here")

    def _place_of(self, last_id: str | None) -> int | None:
        boot, _, number = (last_id or "").rpartition("-")
        is_ours = boot == self._boot and number.isascii() and number.isdigit() and len(number) < 19
        place = int(number) if is_ours and str(int(number)) == number else None
        # Events before the first in the ring are no longer known.
        is_known = place is not None and (not self._ring or self._ring[0].number <= place + 1 <= self._number + 1)
        return place if is_known and (self._ring or place == self._number) else None

    def _lines(self, number: int, name: str, body: str) -> str:
        return f"id: {self._boot}-{number}\nevent: {name}\ndata: {body}\n\n"

    def _snapshot(self, namespace: str) -> dict[str, Any]:
        own = [r for r in self._requests.values() if r.owner == namespace]
        return {
            "requests": [_request_body(r, self._model_of[r.id]) for r in own],
            "trees": list(self._trees.values()),
            "models": self._models,
            "counters": self._counters,
        }

    # What the service tells.

    def request_ended(self, record: Record) -> None:
        self._add("request.ended", record_body(record), namespace=record.namespace or None)

    def token_came(self, gap_s: float, model: str) -> None:
        self._gaps[0] = max(self._gaps[0], gap_s)

    # Looking.

    async def _look_on(self) -> None:
        unwatched_since_s: float | None = None
        try:
            while not self._service.is_closing:
                await asyncio.sleep(_EVERY_S)
                if self._num_watchers > 0:
                    unwatched_since_s = None
                elif unwatched_since_s is None:
                    unwatched_since_s = self._clock()
                elif self._clock() - unwatched_since_s > _LINGER_S:
                    break
                try:
                    await self._look()
                except ShuttingDown:
                    raise
                except Exception:
                    # A bug: those who watch go on, and the next look may succeed.
                    log.exception("cannot look at the engine for the event stream")
        except ShuttingDown:
            pass
        finally:
            self._service.unwatch(self)
            self._looking = None
            self._ring.clear()
            self._requests, self._model_of, self._trees, self._models, self._counters = {}, {}, {}, [], {}
            self._wake()

    async def _look(self) -> None:
        """Look at the engine once, and tell what has changed since the last time."""
        found = await self._service.inspections()
        if self._clock() - self._gap_since_s > _GAP_S:
            self._gaps, self._gap_since_s = [0.0, self._gaps[0]], self._clock()
        self._compare_requests(found)
        for model, inspected in found.items():
            tree = {
                "model": model,
                "edges": inspected.tree.num_nodes,
                "tokens": inspected.tree.num_tokens,
                "checkpoints": inspected.tree.num_checkpoints,
                "evictions": dict(inspected.tree.evictions),
                "reads": len(inspected.reads),
                "unwritten": inspected.num_unwritten,
                "files": 0 if inspected.disk is None else inspected.disk.num_files,
            }
            if tree != self._trees.get(model):
                self._trees[model] = tree
                self._add("tree", tree)
        models = [] if self._service.models is None else [model_body(each) for each in self._service.models.all]
        if models != self._models:
            self._models = models
            self._add("models", {"models": models})
        load = {"decode_groups": decode_groups(found), "longest_gap_s": self.longest_gap_s}
        counters = health_fields(self._service.status()) | load
        if any(counters[name] != self._counters.get(name) for name in counters.keys() - _OWN_TRACES):
            self._counters = counters
            self._add("counters", counters)
        self._wake()

    def _compare_requests(self, found: Mapping[str, Inspection]) -> None:
        before, models_before = self._requests, self._model_of
        self._requests = {request.id: request for each in found.values() for request in each.requests}
        self._model_of = {request.id: model for model, each in found.items() for request in each.requests}
        for request in self._requests.values():
            known, model = before.get(request.id), self._model_of[request.id]
            if known is None or _moved(known) != _moved(request):
                self._add("request", _request_body(request, model), namespace=request.owner)
        for gone in before.values():
            if gone.id not in self._requests:
                body = {"id": gone.id, "model": models_before[gone.id], "purpose": str(gone.purpose)}
                self._add("request.gone", body, namespace=gone.owner)

    def _add(self, name: str, body: dict[str, Any], *, namespace: str | None = None) -> None:
        self._number += 1
        self._ring.append(Happening(number=self._number, namespace=namespace, name=name, body=encode_json(body)))

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def decode_groups(found: Mapping[str, Inspection]) -> list[int]:
    """How many sequences decode together, group by group, of what was found of each model."""
    groups = [(model, each.decode_group) for model, told in found.items() for each in told.requests]
    return [num for (_, group), num in sorted(Counter(groups).items(), key=str) if group is not None]


def _moved(request: InspectedRequest) -> tuple[object, ...]:
    """What of a request is worth telling when it changes."""
    return request.phase, request.position, request.num_generated, request.decode_group


def _request_body(request: InspectedRequest, model: str) -> dict[str, Any]:
    return {
        "id": request.id,
        "model": model,
        "chat": request.chat,
        "purpose": str(request.purpose),
        "phase": str(request.phase),
        "prompt_tokens": request.num_prompt,
        "matched": request.num_matched,
        "reused": request.num_reused,
        "loaded": request.num_loaded,
        "position": request.position,
        "generated": request.num_generated,
        "decode_group": request.decode_group,
        "bytes": request.nbytes,
        "age_s": round(request.age_s, 3),
        "queued_s": round(request.queued_s, 3),
        "ttft_s": request.ttft_s,
    }
