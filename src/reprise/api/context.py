"""What routes find in the application: the service and its limits, and whom a request comes from."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from reprise.api.background import HEADER, BackgroundAnswers
from reprise.api.errors import Shapes
from reprise.api.event_hub import EventHub
from reprise.api.ledger import Ledger
from reprise.api.prometheus import Metrics
from reprise.api.responses.store import ResponseStore
from reprise.api.service import ChatService
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


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


def _namespace(request: Request) -> str:
    return cast(str, request.scope.get("reprise.namespace", ""))


InContext = Annotated[Context, Depends(_context)]
Namespace = Annotated[str, Depends(_namespace)]
"""The namespace of the caller's API key: its responses, records and pins are its own.

The prefix cache is shared unless `ChatService.cache_namespace` says otherwise."""

GoesOn = Annotated[bool, Header(alias=HEADER)]
"""The header by which a stream goes on without its client (`api/background.py`)."""
