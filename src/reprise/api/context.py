"""What routes find in the application: the service and its limits, and whom a request comes from."""

from dataclasses import dataclass, replace
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from reprise.api.background import HEADER, BackgroundAnswers
from reprise.api.errors import Shapes
from reprise.api.event_hub import EventHub
from reprise.api.ledger import Ledger
from reprise.api.models import Models, ServedModel
from reprise.api.prometheus import Metrics
from reprise.api.responses.store import ResponseStore
from reprise.api.service import ChatService
from reprise.core.errors import NotFound
from reprise.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """What one application holds."""

    service: ChatService
    settings: Settings
    shapes: Shapes
    metrics: Metrics
    responses: ResponseStore
    ledger: Ledger
    events: EventHub
    background: BackgroundAnswers
    models: Models | None = None
    """All models of this server; None: there is one, which is always loaded."""

    def of(self, model: ServedModel) -> "Context":
        """The same for another model, which has been loaded."""
        service = model.service
        if service is None:
            raise NotFound(f"The model {model.id!r} has not been loaded yet. POST /v1/models/{model.id}/load loads it.")
        return self if service is self.service else replace(self, service=service, metrics=Metrics(service))


MODEL_IN_SCOPE = "reprise.model"
"""Where the model stands that a request's body names."""


def _context(request: Request) -> Context:
    context = cast(Context, request.app.state.context)
    if context.models is None:
        return context
    named = cast(ServedModel | None, request.scope.get(MODEL_IN_SCOPE))
    return context.of(named if named is not None else context.models.of(request.query_params.get("model")))


def _namespace(request: Request) -> str:
    return cast(str, request.scope.get("reprise.namespace", ""))


InContext = Annotated[Context, Depends(_context)]
Namespace = Annotated[str, Depends(_namespace)]
"""The namespace of the caller's API key: its responses, records and pins are its own.

The prefix cache is shared unless `ChatService.cache_namespace` says otherwise."""

GoesOn = Annotated[bool, Header(alias=HEADER)]
"""The header by which a stream goes on without its client (`api/background.py`)."""
