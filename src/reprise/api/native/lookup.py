"""`POST /v1/cache/lookup`: what a request would find in the cache, without sending it."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from reprise.api.http.body import Body, Needs
from reprise.api.native.any_body import prompt_in
from reprise.api.responses.request import earlier_items, previous_of
from reprise.api.responses.store import Stored
from reprise.api.service.exchange import RawPrompt
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall
from reprise.chat.request import ChatRequest
from reprise.core.backend import Lookup, WeightsState

router = api_router("Server")


class LookupBody(Body):
    """The body of a request to chat completions, completions, messages, responses or Ollama's API."""

    needs = Needs.NOTHING
    previous_response_id: str | None = None


@router.post("/v1/cache/lookup")
async def lookup(body: LookupBody, call: OfModel) -> dict[str, Any]:
    """What this request would reuse if it were sent now, and an estimate of the time to its first token.

    Computes, reads and stores nothing. `matched`: tokens that the cache knows; the request would resume at
    `resume_at`, with state `from` memory or disk (null: from nothing), and compute `to_compute` tokens. `est_ttft_s`
    has `queue_s` in it, and what loading the model's weights takes, where `state` says that they are not loaded.
    """
    found = await call.while_connected(_lookup(body, call))
    status = call.service.status_of_model()
    is_ready = status.weights is WeightsState.READY
    weights_s = 0.0 if is_ready else status.load_s / max(1, status.num_loads)
    return {
        "object": "cache.lookup",
        "model": call.service.served.id,
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


async def _lookup(body: LookupBody, call: RouteCall) -> Lookup:
    previous = previous_of(body.previous_response_id, call)
    prompt = await call.service.off_loop(lambda: _prompt(body, previous, call))
    return await call.service.lookup(prompt, namespace=call.namespace)


def _prompt(body: LookupBody, previous: Stored | None, call: RouteCall) -> ChatRequest | RawPrompt:
    fields = body.model_dump(exclude_unset=True)
    try:
        return prompt_in(fields, call.asked, earlier=earlier_items(previous))
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found, body=fields) from None
