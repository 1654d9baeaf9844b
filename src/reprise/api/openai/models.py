"""`GET /v1/models`, in OpenAI's shape, or in Anthropic's where its headers are sent."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from reprise.api.body_route import api_router
from reprise.api.context import InContext
from reprise.api.served import Served

router = api_router("OpenAI")

PREFIX = "/v1/models"
ANTHROPIC_HEADER = b"anthropic-version"
"""Who speaks Anthropic's API names its version in every request."""


@router.get(PREFIX)
async def list_models(request: Request, context: InContext) -> dict[str, Any]:
    """The served model."""
    served = context.service.served
    if _is_anthropic(request):
        return {"data": [_anthropic_model(served)], "has_more": False, "first_id": served.id, "last_id": served.id}
    return {"object": "list", "data": [_model(served)]}


@router.get(f"{PREFIX}/{{model_id:path}}")
async def get_model(model_id: str, request: Request, context: InContext) -> dict[str, Any]:
    """The served model, by its id or the last part of it."""
    served = context.service.served
    served.check_name(model_id)
    return _anthropic_model(served) if _is_anthropic(request) else _model(served)


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC_HEADER.decode() in request.headers


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "reprise",
        "max_model_len": served.context,
    }


def _anthropic_model(served: Served) -> dict[str, Any]:
    return {
        "type": "model",
        "id": served.id,
        "display_name": served.id,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": served.context,
        # Prompt and answer share the context.
        "max_tokens": served.context,
    }
