"""`POST /v1/prefill`: compute a prefix now, so that the request that needs it finds it."""

from typing import Any

from fastapi import Request

from reprise.api.body_route import api_router
from reprise.api.context import InContext, Namespace
from reprise.api.service import new_request_id
from reprise.api.sse import while_connected
from reprise.api.warm import PrefillBody, prefix_of
from reprise.chat.request import ChatRequest
from reprise.core.record import Outcome

router = api_router("Tokens")


@router.post("/v1/prefill")
async def prefill(body: PrefillBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """Compute the prompt into the prefix cache; nothing is sampled. The counts are tokens."""
    service = context.service
    service.served.check_name(body.model)
    request_id = new_request_id("prefill")

    async def compute() -> Outcome:
        prompt, until = await service.off_loop(lambda: prefix_of(body, service))
        if body.partial is True and isinstance(prompt, ChatRequest):
            prefix = await service.typed_prefix(prompt, namespace=namespace)
        else:
            prefix = await service.prefix(prompt, namespace=namespace, until=until)
        return await service.prefill(prefix, request_id=request_id, namespace=namespace)

    outcome = await while_connected(request.receive, compute())
    return {
        "id": request_id,
        "object": "prefill",
        "model": service.served.id,
        "prompt_tokens": outcome.num_prompt,
        "cached_tokens": outcome.num_reused,
        "prefilled_tokens": outcome.num_prefilled,
        "stored_tokens": outcome.num_stored,
    }
