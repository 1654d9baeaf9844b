"""`GET /v1/models`."""

from typing import Any

from fastapi import APIRouter

from reprise.api.context import InContext
from reprise.api.errors import ErrorBody
from reprise.api.served import Served

router = APIRouter(tags=["OpenAI"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


@router.get("/v1/models")
async def list_models(context: InContext) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(context.service.served)]}


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, context: InContext) -> dict[str, Any]:
    """The served model, by its id or the last part of it."""
    served = context.service.served
    served.check_name(model_id)
    return _model(served)


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "reprise",
        "max_model_len": served.context,
    }
