"""What routes find in the application: the service, its limits, and the sender of a request."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Header, Query, Request
from pydantic import BeforeValidator

from reprise.api.http.errors import ErrorFormats
from reprise.api.service.caller import Caller, caller_of
from reprise.api.service.models import Models, ServedModel
from reprise.api.service.service import ChatService
from reprise.api.watch.event_hub import EventHub
from reprise.api.watch.ledger import Ledger
from reprise.api.watch.prometheus import Metrics
from reprise.api.wire.background import HEADER, BackgroundAnswers
from reprise.core.errors import BadRequest, NotFound
from reprise.core.settings import Settings

if TYPE_CHECKING:
    from reprise.api.responses.store import ResponseStore


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


# All `async`: FastAPI calls each of the others on another thread, for every request.


async def _context(request: Request) -> Context:
    context = cast(Context, request.app.state.context)
    if context.models is None:
        context.service.served.check_name(request.query_params.get("model"))
        return context
    named = cast(ServedModel[ChatService] | None, request.scope.get(MODEL_IN_SCOPE))
    return context.of(named if named is not None else context.models.of(request.query_params.get("model")))


async def _server(request: Request) -> Context:
    return cast(Context, request.app.state.context)


async def _namespace(request: Request) -> str:
    return cast(str, request.scope.get("reprise.namespace", ""))


async def _caller(request: Request) -> Caller:
    return caller_of(request.headers)


InContext = Annotated[Context, Depends(_context)]
"""With the service of the model that is meant, which has been loaded at least once."""

OfServer = Annotated[Context, Depends(_server)]
"""With the service of the first model, for what is asked of all of them."""

ModelName = Annotated[
    str | None, Query(alias="model", max_length=500, description="One of several models; without it, all of them.")
]

Namespace = Annotated[str, Depends(_namespace)]
"""The namespace of the caller's API key: its responses, records and pins are its own.

The prefix cache is shared unless `ChatService.cache_namespace` says otherwise."""


def _event_number(given: object) -> int:
    if not isinstance(given, str) or re.fullmatch(r"-1|0|[1-9][0-9]{0,14}", given) is None:
        raise BadRequest(
            "`Last-Event-ID` and `starting_after` take the number of an event, such as 41, or -1 for all events; "
            f"not {str(given)[:80]!r}."
        )
    return int(given)


EventNumber = Annotated[int, BeforeValidator(_event_number)]
"""After which event of a background answer its stream continues, written as the server writes it."""

FromCaller = Annotated[Caller, Depends(_caller)]
"""Which agent sends it, as far as the headers say."""

BackgroundHeader = Annotated[bool, Header(alias=HEADER)]
"""The header that lets a stream continue without its client (`api/wire/background.py`)."""
