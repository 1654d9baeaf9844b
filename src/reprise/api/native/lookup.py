"""`POST /v1/cache/lookup`: what a request would find in the cache, without sending it."""

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from reprise.api.http.body import Body, Needs
from reprise.api.http.sse import while_connected
from reprise.api.native.any_body import prompt_in
from reprise.api.responses.items import Item
from reprise.api.responses.store import Stored
from reprise.api.service.exchange import RawPrompt
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, InContext, Namespace
from reprise.chat.request import ChatRequest
from reprise.core.backend import Lookup, WeightsState

router = api_router("Server")


class LookupBody(Body):
    """The body of a request to chat completions, completions, messages, responses or Ollama's API."""

    needs = Needs.NOTHING
    previous_response_id: str | None = None


@router.post("/v1/cache/lookup")
async def lookup(body: LookupBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """What this request would reuse if it were sent now, and an estimate of the time to its first token.

    Computes, reads and stores nothing. `matched`: tokens that the cache knows; the request would resume at
    `resume_at`, with state `from` memory or disk (null: from nothing), and compute `to_compute` tokens. `est_ttft_s`
    has `queue_s` in it, and what loading the model's weights takes, where `state` says that they are not loaded.
    """
    found = await while_connected(request.receive, _lookup(body, context, namespace))
    status = context.service.status_of_model()
    is_ready = status.weights is WeightsState.READY
    weights_s = 0.0 if is_ready else status.load_s / max(1, status.num_loads)
    return {
        "object": "cache.lookup",
        "model": context.service.served.id,
        "state": str(status.weights),
        "prompt_tokens": found.num_prompt,
        "matched": found.num_matched,
        "resume_at": found.resume_at,
        "from": _source(found),
        "to_compute": found.num_prompt - found.resume_at,
        "est_ttft_s": round(weights_s + found.queue_s + found.load_s + found.prefill_s, 6),
        "queue_s": round(found.queue_s, 6),
    }


def _source(found: Lookup) -> str | None:
    if found.resume_at == 0:
        return None
    return "disk" if found.num_loaded > 0 else "memory"


async def _lookup(body: LookupBody, context: Context, namespace: str) -> Lookup:
    service, previous_id = context.service, body.previous_response_id
    previous = None if previous_id is None else context.responses.get(previous_id, namespace=namespace)
    prompt = await service.off_loop(lambda: _prompt(body, context, previous, namespace))
    return await service.lookup(prompt, namespace=namespace)


def _prompt(body: LookupBody, context: Context, previous: Stored | None, namespace: str) -> ChatRequest | RawPrompt:
    fields = body.model_dump(exclude_unset=True)
    earlier = () if previous is None else [Item.model_validate(item) for item in previous.chat]
    served, limits = context.service.served, context.service.limits
    try:
        return prompt_in(fields, served=served, limits=limits, namespace=namespace, earlier=earlier)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found, body=fields) from None
