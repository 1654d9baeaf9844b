"""`POST /v1/prefill`: compute a prefix now, so that the request that needs it finds it."""

from typing import Any

from fastapi import APIRouter, Request

from reprise.api.context import InContext, Namespace
from reprise.api.errors import ErrorBody
from reprise.api.prefill_body import PrefillBody
from reprise.api.service import new_request_id
from reprise.api.sse import while_connected
from reprise.api.warm import prefix_of

router = APIRouter(tags=["Tokens"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


@router.post("/v1/prefill")
async def prefill(body: PrefillBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """Compute the prompt into the prefix cache; nothing is sampled. The counts are tokens."""
    service = context.service
    service.served.check_name(body.model)
    prompt, until = prefix_of(body, service)
    request_id = new_request_id("prefill")
    prefix = await service.prefix(prompt, namespace=namespace, until=until)
    work = service.prefill(prefix, request_id=request_id, namespace=namespace)
    outcome = await while_connected(request.receive, work)
    return {
        "id": request_id,
        "object": "prefill",
        "model": service.served.id,
        "prompt_tokens": outcome.prompt,
        "cached_tokens": outcome.reused,
        "prefilled_tokens": outcome.prefilled,
        "stored_tokens": outcome.stored,
    }
