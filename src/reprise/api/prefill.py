"""`POST /v1/prefill`: compute a prefix now, so that the request that needs it finds it."""

from typing import Any

from fastapi import APIRouter, Request

from reprise.api.body import Body
from reprise.api.context import InContext, Namespace
from reprise.api.errors import ErrorBody
from reprise.api.exchange import RawPrompt
from reprise.api.openai.chat_body import ChatMessage, ToolSpec
from reprise.api.openai.chat_request import chat_of
from reprise.api.openai.completions_body import prompts_of
from reprise.api.service import new_request_id
from reprise.api.sse import while_connected
from reprise.core.errors import BadRequest
from reprise.core.prompt import BoundaryKind

router = APIRouter(tags=["Tokens"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


class PrefillBody(Body):
    """A chat (a system prompt and tools alone will do), or a plain prompt."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | list[int] | None = None


@router.post("/v1/prefill")
async def prefill(body: PrefillBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """Compute the prompt into the prefix cache; nothing is sampled. The counts are tokens."""
    service = context.service
    service.served.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either `messages` or `prompt`.", param="messages")
    until = None
    if body.prompt is not None:
        prompt = RawPrompt(tokens=prompts_of(body.prompt, service.served)[0])
    else:
        messages = body.messages or []
        if messages and all(message.role in ("system", "developer") for message in messages):
            # Templates want a user: one is put there, and only what stands before it is computed.
            messages = [*messages, ChatMessage(role="user", content="Hello")]
            until = BoundaryKind.SYSTEM
        prompt = chat_of(
            messages,
            tools=body.tools or [],
            template_options=body.chat_template_kwargs or {},
            continue_final=False,
        )
    request_id = new_request_id("prefill")
    work = service.prefill(prompt, request_id=request_id, namespace=namespace, until=until)
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
