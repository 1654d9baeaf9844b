"""`GET /v1/models`, in OpenAI's shape, or in Anthropic's where its headers are sent."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from reprise.api.service.models import ServedModel
from reprise.api.service.served import Served
from reprise.api.service.service import ChatService
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, OfModel
from reprise.core.errors import BadRequest

router = api_router("OpenAI")

PREFIX = "/v1/models"
ANTHROPIC_HEADER = b"anthropic-version"
"""Who speaks Anthropic's API names its version in every request."""


@router.get(PREFIX)
async def list_models(call: OfModel) -> dict[str, Any]:
    """The models that are served. `state`, `bytes`, `layers` are there where models are loaded when asked for, and
    `error` where a model's files cannot be loaded. A model with an adapter is listed separately, with `base`.
    """
    request, context = call.request, call.context
    if context.models is not None:
        listed = [_of(model, request) for model in context.models.all]
        ids = [model.id for model in context.models.all]
        if _is_anthropic(request):
            return {"data": listed, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        return {"object": "list", "data": listed}
    served = context.service.served
    if _is_anthropic(request):
        return {"data": [_anthropic_model(served)], "has_more": False, "first_id": served.id, "last_id": served.id}
    return {"object": "list", "data": [_model(served)]}


@router.get(f"{PREFIX}/{{model_id:path}}")
async def get_model(model_id: str, call: OfModel) -> dict[str, Any]:
    """One of the served models, by its id or the last part of it."""
    if call.context.models is not None:
        return _of(call.context.models.of(model_id), call.request)
    served = call.service.served
    served.check_name(model_id)
    return _anthropic_model(served) if _is_anthropic(call.request) else _model(served)


@router.post(f"{PREFIX}/{{model_id:path}}/load")
async def load_model(model_id: str, call: OfModel) -> dict[str, Any]:
    """Load a model's weights, if they are not here. Answers when they are."""
    model = _one_of_several(call.context, model_id)
    await call.while_connected(model.ready())
    return _of(model, call.request)


@router.post(f"{PREFIX}/{{model_id:path}}/unload")
async def unload_model(model_id: str, call: OfModel) -> dict[str, Any]:
    """Unload a model's weights as soon as nothing runs on them. Answers when they are gone; what is stored stays."""
    model = _one_of_several(call.context, model_id)
    await call.while_connected(model.unloaded())
    return _of(model, call.request)


def _one_of_several(context: Context, model_id: str) -> ServedModel[ChatService]:
    if context.models is None:
        context.service.served.check_name(model_id)
        raise BadRequest(
            "This server has one model, which is always loaded. Start it with several models, --models-dir or "
            "--keep-alive to load and unload them."
        )
    return context.models.of(model_id)


def _of(model: ServedModel[ChatService], request: Request) -> dict[str, Any]:
    if model.service is not None:
        body = _anthropic_model(model.service.served) if _is_anthropic(request) else _model(model.service.served)
    elif _is_anthropic(request):
        body = {"type": "model", "display_name": model.id, "created_at": _time(model.created), "lifecycle": "active"}
    else:
        body = {"object": "model", "created": model.created, "owned_by": "reprise"}
    layers = model.layers if model.service is None else model.service.served.layers
    fault = model.fault if model.service is None else None
    more = {"layers": layers, "base": model.base, "error": fault}
    known = {name: value for name, value in more.items() if value}
    return {**body, "id": model.id, "state": model.state, "bytes": model.nbytes, **known}


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC_HEADER.decode() in request.headers


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "reprise",
        "max_model_len": served.context,
        "input_modalities": ["text"] if served.image_limits is None else ["text", "image"],
        **({} if served.embedder is None else {"type": "rerank" if served.embedder.is_reranker else "embedding"}),
    }


def _anthropic_model(served: Served) -> dict[str, Any]:
    return {
        "type": "model",
        "id": served.id,
        "display_name": served.id,
        "created_at": _time(served.created),
        "lifecycle": "active",
        "max_input_tokens": served.context,
        # Prompt and answer share the context.
        "max_tokens": served.context,
    }


def _time(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
