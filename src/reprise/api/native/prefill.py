"""Prompts that are computed before anybody asks for an answer, so that the request that needs them finds them.

`POST /v1/prefill` does it on request. At the start of a server it is done for a file (`--warm`): plain text (one system
prompt), a JSON object, or JSON lines; an object is a body of `POST /v1/prefill`: `{"messages": [...], "tools": [...]}`
or `{"prompt": "..."}`.
"""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from reprise.api.openai.chat_body import ChatFields, ChatMessage
from reprise.api.openai.chat_request import PLACEHOLDER, rendered_chat
from reprise.api.openai.completions_body import prompts_of
from reprise.api.service.exchange import RawPrompt
from reprise.api.service.served import Asked
from reprise.api.service.service import ChatService, new_request_id
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest, LoadFailed, RepriseError
from reprise.core.outcome import Outcome
from reprise.core.prompt import BoundaryKind


class PrefillBody(ChatFields):
    """A chat (a system prompt and tools alone will do), or a plain prompt."""

    prompt: str | list[int] | None = None
    partial: bool | None = None
    """The last user message is still being typed: computed is what cannot change any more."""


log = logging.getLogger(__name__)


def read_warm_file(file: Path) -> tuple[PrefillBody, ...]:
    """The bodies that the file asks for. Raises LoadFailed with a sentence."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"Cannot read {file}: {error}.") from error
    if not text.lstrip().startswith("{"):
        if not text.strip():
            raise LoadFailed(f"{file} is empty. Put a system prompt or POST /v1/prefill bodies into it.")
        return (PrefillBody(messages=[ChatMessage(role="system", content=text.strip())]),)
    try:
        return tuple(PrefillBody.model_validate(entry) for entry in _objects(text))
    except (json.JSONDecodeError, ValidationError) as error:
        raise LoadFailed(f"{file} has an invalid POST /v1/prefill body: {str(error).splitlines()[0]}.") from error


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a text, one after the other."""
    decoder, found, at = json.JSONDecoder(), list[dict[str, Any]](), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        entry, at = decoder.raw_decode(text, at)
        found.append(cast(dict[str, Any], entry))
    return found


def prefix_of(body: PrefillBody, asked: Asked) -> tuple[ChatRequest | RawPrompt, BoundaryKind | None]:
    """What a body asks to compute, and the boundary where to stop (None: at its end). Raises BadRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either `messages` or `prompt`.", param="messages")
    if body.prompt is not None:
        return RawPrompt(tokens=prompts_of(body.prompt, asked.served)[0]), None
    messages = body.messages or []
    if not messages or any(message.role not in ("system", "developer") for message in messages):
        return rendered_chat(body, asked), None
    body = body.model_copy(update={"messages": [*messages, PLACEHOLDER]})
    return rendered_chat(body, asked), BoundaryKind.SYSTEM


async def warm_up(service: ChatService, bodies: Sequence[PrefillBody]) -> None:
    """Compute the prompts one after the other. One that fails is logged, and the next is tried."""
    asked = Asked(served=service.served, limits=service.limits)
    for number, body in enumerate(bodies, start=1):
        try:
            prompt, until = await service.off_loop(partial(prefix_of, body, asked))
            prefix = await service.prefix(prompt, until=until)
            outcome = await service.prefill(prefix, request_id=new_request_id("warm"))
        except RepriseError as error:
            log.warning("warming up: prompt %d of %d: %s", number, len(bodies), error)
        else:
            log.info("warmed up: prompt %d of %d, %d tokens computed", number, len(bodies), outcome.num_prefilled)


router = api_router("Tokens")


@router.post("/v1/prefill")
async def prefill(body: PrefillBody, call: OfModel) -> dict[str, Any]:
    """Compute the prompt into the prefix cache; nothing is sampled. The counts are tokens."""
    service, namespace = call.service, call.namespace
    service.served.check_name(body.model)
    request_id = new_request_id("prefill")

    async def compute() -> Outcome:
        prompt, until = await service.off_loop(lambda: prefix_of(body, call.asked))
        if body.partial is True and isinstance(prompt, ChatRequest):
            prefix = await service.typed_prefix(prompt, namespace=namespace)
        else:
            prefix = await service.prefix(prompt, namespace=namespace, until=until)
        return await service.prefill(prefix, request_id=request_id, namespace=namespace)

    outcome = await call.while_connected(compute())
    return {
        "id": request_id,
        "object": "prefill",
        "model": service.served.id,
        "prompt_tokens": outcome.num_prompt,
        "cached_tokens": outcome.num_reused,
        "prefilled_tokens": outcome.num_prefilled,
        "stored_tokens": outcome.num_stored,
    }
