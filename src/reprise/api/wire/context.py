"""What routes find in the application: the service, its limits, and the sender of a request."""

import re
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from fastapi import Depends, Header, Query, Request
from pydantic import BeforeValidator

from reprise.api.http.errors import ErrorFormats
from reprise.api.http.sse import while_connected
from reprise.api.service.caller import Caller, caller_of
from reprise.api.service.embedding import embed
from reprise.api.service.models import Models, ServedModel
from reprise.api.service.served import Asked
from reprise.api.service.service import ChatService
from reprise.api.watch.event_hub import EventHub
from reprise.api.watch.ledger import Ledger
from reprise.api.watch.prometheus import Metrics
from reprise.api.wire.background import HEADER, BackgroundAnswers
from reprise.core.embedding import EmbeddingInput, EmbeddingResult
from reprise.core.errors import BadRequest, NotFound
from reprise.core.settings import Settings

if TYPE_CHECKING:
    from reprise.api.responses.store import ResponseStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """What one application holds."""

    service: ChatService
    settings: Settings
    shapes: ErrorFormats
    metrics: Metrics
    responses: "ResponseStore"
    ledger: Ledger
    events: EventHub
    background: BackgroundAnswers
    models: Models[ChatService] | None = None
    """All models of this server; None: there is one, which is always loaded."""

    def of(self, model: ServedModel[ChatService]) -> "Context":
        """The same for another model, which has been loaded."""
        service = model.service
        if service is None:
            raise NotFound(f"The model {model.id!r} has not been loaded yet. POST /v1/models/{model.id}/load loads it.")
        return self if service is self.service else replace(self, service=service)

    def services(self, model: str | None) -> list[ChatService]:
        """Of the model that is named, or one for each engine whose model was loaded. Raises UnknownModel, and NotFound
        as `of` does."""
        if self.models is None:
            self.service.served.check_name(model)
            return [self.service]
        if model is not None:
            return [self.of(self.models.of(model)).service]
        return [each.service for each in self.models.by_engine().values() if each.service is not None]

    def services_beside(self, service: ChatService) -> list[ChatService]:
        """Those with the same engine, and so the same prefix cache: this one and its aliases."""
        if self.models is None:
            return [service]
        return [each for each in self.models.services if each.backend is service.backend]

    def model_id(self, name: str | None) -> str | None:
        """The id of the model that is named; None: none is, or the only one. Raises UnknownModel."""
        if self.models is None:
            self.service.served.check_name(name)
            return None
        return None if name is None else self.models.of(name).id


MODEL_IN_SCOPE = "reprise.model"
"""Where the model stands that a request's body names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteCall:
    """One request to a route: what it finds in the application, and who sends it.

    `namespace` is that of the caller's API key: its responses, records and pins are its own, and the prefix cache is
    shared unless `ChatService.cache_namespace` says otherwise. `is_background`: a stream continues without its client.
    """

    request: Request
    context: Context
    is_background: bool = False

    @property
    def namespace(self) -> str:
        return cast(str, self.request.scope.get("reprise.namespace", ""))

    @property
    def caller(self) -> Caller:
        """Which agent sends it, as far as the headers say."""
        return caller_of(self.request.headers)

    @property
    def service(self) -> ChatService:
        return self.context.service

    @property
    def asked(self) -> Asked:
        """What its body is read for."""
        return Asked(served=self.service.served, limits=self.service.limits, namespace=self.namespace)

    async def embed(
        self, inputs: tuple[EmbeddingInput, ...], *, request_id: str, api: str, notes: tuple[str, ...] = ()
    ) -> EmbeddingResult:
        """The vectors or scores of its texts; see `embed`."""
        return await embed(
            self.service,
            inputs,
            request_id=request_id,
            api=api,
            namespace=self.namespace,
            caller=self.caller,
            notes=notes,
        )

    async def while_connected(self, work: Awaitable[T]) -> T:
        """Await the work; see `while_connected`."""
        return await while_connected(self.request.receive, work)


# All `async`: FastAPI calls each of the others on another thread, for every request.


async def _of_model(request: Request) -> RouteCall:
    context = cast(Context, request.app.state.context)
    if context.models is None:
        context.service.served.check_name(request.query_params.get("model"))
        return RouteCall(request=request, context=context)
    named = cast(ServedModel[ChatService] | None, request.scope.get(MODEL_IN_SCOPE))
    model = named if named is not None else context.models.of(request.query_params.get("model"))
    return RouteCall(request=request, context=context.of(model))


async def _of_server(request: Request) -> RouteCall:
    return RouteCall(request=request, context=request.app.state.context)


async def _to_answer(request: Request, is_background: Annotated[bool, Header(alias=HEADER)] = False) -> RouteCall:
    return replace(await _of_model(request), is_background=is_background)


OfModel = Annotated[RouteCall, Depends(_of_model)]
"""With the service of the model that is meant, which has been loaded at least once."""

OfServer = Annotated[RouteCall, Depends(_of_server)]
"""With the service of the first model, for what is asked of all of them."""

ToAnswer = Annotated[RouteCall, Depends(_to_answer)]
"""As `OfModel`, with the header that lets a stream continue without its client (`api/wire/background.py`)."""

ModelName = Annotated[
    str | None, Query(alias="model", max_length=500, description="One of several models; without it, all of them.")
]


def _event_number(given: object) -> int:
    if not isinstance(given, str) or re.fullmatch(r"-1|0|[1-9][0-9]{0,14}", given) is None:
        raise BadRequest(
            "`Last-Event-ID` and `starting_after` take the number of an event, such as 41, or -1 for all events; "
            f"not {str(given)[:80]!r}."
        )
    return int(given)


EventNumber = Annotated[int, BeforeValidator(_event_number)]
"""After which event of a background answer its stream continues, written as the server writes it."""
