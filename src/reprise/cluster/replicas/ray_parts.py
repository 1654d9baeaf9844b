"""What runs inside Ray Serve: the two deployments, the router and the scaling policy. All that knows Ray is here.

Of Ray's alpha and private parts this needs `RequestRouter` (`choose_replicas`, `on_request_routed`, `update_replicas`,
`on_replica_actor_died`), `RunningReplica.try_send_request` and `RequestMetadata`; tests/deploy/test_ray.py notices when
they change.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence, Set
from random import Random
from typing import Any
from uuid import uuid4

from cachetools import TTLCache
from ray.exceptions import ActorDiedError
from ray.serve import get_replica_context
from ray.serve._private.common import RequestMetadata
from ray.serve.config import AutoscalingContext
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.cluster.replicas.forwarded import REPLICA_HEADER, ForwardedRequest
from reprise.cluster.replicas.front import front_app
from reprise.cluster.replicas.routing import (
    MAX_ASKED,
    REFUSED,
    ChatMemory,
    Offer,
    SentWork,
    chat_keys,
    ranked,
    to_ask,
    wait_s,
)
from reprise.cluster.replicas.scaling import MEMORY, replicas_wanted
from reprise.core.settings import Settings

_CLEARED_S = 60.0
"""For what all replicas are to do."""
_UNASKED_S = 5.0
"""A replica that did not answer in time is not asked for so long."""
_OFFER_S = 1.0
_MAX_OFFERED = 4096


class EngineReplica:
    """The deployment of the engine. Methods are called through handles, and by Ray under its own names."""

    async def __init__(self, settings: Settings) -> None:
        from reprise.cluster.replicas.replica import ReplicaServer  # noqa: PLC0415 (imports MLX, which the front does without)

        self._replica = ReplicaServer(settings, name=get_replica_context().replica_id.unique_id)
        await self._replica.start()

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        """See `ReplicaServer.respond`."""
        async with contextlib.aclosing(self._replica.respond(request)) as batches:
            async for batch in batches:
                yield batch

    async def respond_whole(self, request: ForwardedRequest) -> list[Message]:
        """All of a response that is no stream."""
        return [message async for batch in self.respond(request) for message in batch]

    async def lookup(self, request: ForwardedRequest) -> Offer | None:
        """See `ReplicaServer.lookup`."""
        return await self._replica.lookup(request)

    async def leave(self) -> None:
        """See `ReplicaServer.leave`."""
        self._replica.leave()

    async def check_health(self) -> None:
        """Ray restarts the replica when this raises."""
        self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray's controller gives to the scaling policy."""
        return self._replica.load()

    async def __del__(self) -> None:
        """Called by Ray when the requests under way have ended."""
        await self._replica.stop()


class Front:
    """The deployment that has HTTP. It needs no accelerator and no model."""

    def __init__(self, settings: Settings, engine: DeploymentHandle) -> None:
        self._engine = engine
        self._app = front_app(settings, respond=self._respond, respond_all=self._respond_all)

    async def __call__(self, request: Request) -> Response:
        """Called by Ray with each request."""
        return _Forwarded(self._app)

    async def _respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        response = self._engine.options(method_name="respond", stream=True).remote(request)
        is_over = False
        try:
            async for batch in response:
                yield batch
            is_over = True
        finally:
            if not is_over:
                response.cancel()

    async def _respond_all(self, request: ForwardedRequest) -> list[list[Message]]:
        return await self._engine.broadcast("respond_whole", request).results_async(timeout_s=_CLEARED_S)


class _Forwarded(Response):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class LookupRouter(RequestRouter):
    """Asks replicas what a request would find there, and takes the one with the least time to the first token.

    Where that cannot be known (no prompt, no answer within `timeout_s`), two replicas at random and of these the
    one with the shorter queue.
    """

    def initialize_state(self, *, timeout_s: float = 2.0, **kwargs: Any) -> None:
        """Called by Ray with `request_router_kwargs`."""
        self._timeout_s = timeout_s
        self._random = Random()
        self._sent: SentWork[ReplicaID] = SentWork()
        self._chats: ChatMemory[ReplicaID] = ChatMemory()
        self._offers: TTLCache[str, tuple[float, dict[ReplicaID, Offer | None]]] = TTLCache(
            _MAX_OFFERED, _OFFER_S, time.monotonic
        )
        """By request: while all replicas are full, Ray asks for a choice again and again."""
        self._unasked: TTLCache[ReplicaID, bool] = TTLCache(_MAX_OFFERED, _UNASKED_S, time.monotonic)
        self._leaving: set[asyncio.Task[Any]] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray: replicas in groups, of which the first with a free place gets the request."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        request = None if pending_request is None or not pending_request.args else pending_request.args[0]
        if pending_request is None or not isinstance(request, ForwardedRequest):
            return _of(replicas, ranked(dict.fromkeys(replicas), {}, self._random))
        # Else Ray chooses again at once where all are full.
        pending_request.routing_context.should_backoff = True
        wanted = request.header(REPLICA_HEADER)
        named = [replica for replica_id, replica in replicas.items() if replica_id.unique_id == wanted]
        if named:
            return [named]
        request_id = pending_request.metadata.internal_request_id
        if len(replicas) == 1 or not request.has_prompt:
            return _of(replicas, ranked(dict.fromkeys(replicas), {}, self._random))
        if request_id not in self._offers:
            self._offers[request_id] = time.monotonic(), await self._ask(replicas, request)
        asked_s, offers = self._offers[request_id]
        # One that has appeared meanwhile was not asked; one that has gone is out.
        there = {replica_id: offers.get(replica_id) for replica_id in replicas}
        sent = {replica_id: self._sent.since(asked_s, replica_id) for replica_id in replicas}
        return _of(replicas, ranked(there, sent, self._random))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Called by Ray when the replica has accepted the request."""
        _, offers = self._offers.pop(pending_request.metadata.internal_request_id, (0.0, {}))
        offer = offers.get(replica_id)
        self._sent.add(replica_id, 0.0 if offer is None else offer.prefill_s, now_s=time.monotonic())
        if len(self.curr_replicas) > len(offers) > 0:
            self._chats.note(chat_keys(pending_request.args[0]), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with all that run now. Those that do no more are asked to finish, which Ray itself does not."""
        gone = [was for replica_id, was in self.curr_replicas.items() if replica_id not in _ids(replicas)]
        super().update_replicas(replicas)
        self._sent.keep_only(_ids(replicas))
        for replica in gone:
            leaving = asyncio.get_running_loop().create_task(_tell_to_leave(replica))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _ask(
        self, replicas: dict[ReplicaID, RunningReplica], request: ForwardedRequest
    ) -> dict[ReplicaID, Offer | None]:
        """The offers of those that are asked; None of one that gives none."""
        remembered = self._chats.replica_of(chat_keys(request)) if len(replicas) > MAX_ASKED else None
        ready = [replica_id for replica_id in replicas if replica_id not in self._unasked]
        asking = {
            asyncio.ensure_future(self._offer(replicas[replica_id], request)): replica_id
            for replica_id in to_ask(ready, remembered, self._random)
        }
        if not asking:
            return {}
        begun_s = time.monotonic()
        try:
            await asyncio.wait(asking, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            first_s = time.monotonic() - begun_s
            answered = [task.result() for task in asking if task.done()]
            late_s = wait_s(answered, first_s, self._timeout_s)
            done, late = await asyncio.wait(asking, timeout=max(0.0, late_s))
        finally:
            for task in asking:
                task.cancel()
        for task in late:
            self._unasked[asking[task]] = True
        return {asking[task]: task.result() for task in done}

    async def _offer(self, replica: RunningReplica, request: ForwardedRequest) -> Offer | None:
        try:
            offer: Offer | None = await _call(replica, "lookup", request)
            return REFUSED if offer is None else offer
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except Exception:
            # A router that raises stops routing: whatever it was, it will be seen by the request itself.
            return None
        return None


async def _tell_to_leave(replica: RunningReplica) -> None:
    # It may be dead already.
    with contextlib.suppress(Exception):
        await _call(replica, "leave")


async def _call(replica: RunningReplica, method: str, *args: Any) -> Any:
    """Call a method of one replica's EngineReplica."""
    metadata = RequestMetadata(request_id=str(uuid4()), internal_request_id=str(uuid4()), call_method=method)
    pending = PendingRequest(args=list(args), kwargs={}, metadata=metadata)
    result = replica.try_send_request(pending, with_rejection=False)
    try:
        return await result.get_async()
    except asyncio.CancelledError:
        result.cancel()
        raise


def _ids(replicas: Sequence[RunningReplica]) -> Set[ReplicaID]:
    return {replica.replica_id for replica in replicas}


def _of(replicas: dict[ReplicaID, RunningReplica], order: Sequence[Sequence[ReplicaID]]) -> list[list[RunningReplica]]:
    return [[replicas[replica_id] for replica_id in group] for group in order]


class ScalingPolicy:
    """By the queue and by what running requests hold of the memory."""

    def __init__(self, *, target_memory: float) -> None:
        self._target_memory = target_memory

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Called by Ray again and again; bounds, factors and delays are Ray's own."""
        memory = (context.aggregated_metrics or {}).get(MEMORY, {})
        wanted = replicas_wanted(
            num_requests=context.total_num_requests,
            per_replica=context.config.get_target_ongoing_requests(),
            memory=list(memory.values()),
            target_memory=self._target_memory,
            num_now=context.current_num_replicas,
        )
        return wanted, {}
