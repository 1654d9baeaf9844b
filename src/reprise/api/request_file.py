"""Request bodies in files, of whatever API: the chat that each asks to be answered."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from reprise.api.anthropic.body import CountBody
from reprise.api.anthropic.request import asked_of
from reprise.api.limits import Limits
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_request import service_request_of
from reprise.api.responses.body import ResponsesBody
from reprise.api.responses.request import service_request_of as response_request_of
from reprise.api.served import Served
from reprise.chat.grammar import Grammars
from reprise.chat.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest


def chat_in(file: Path, text_model: TextModel) -> ChatRequest:
    """The chat of a request body that was sent to chat completions, messages or responses.

    Raises BadRequest with a sentence that names the file.
    """
    try:
        body: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(body, dict):
        raise BadRequest(f"{file} is no request body: it has to be a JSON object.")
    try:
        return _chat_of(cast(Mapping[str, Any], body), text_model)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file} is no request body: {where}: {first['msg']}.") from error
    except BadRequest as error:
        raise BadRequest(f"{file}: {error}", param=error.param) from error


def _chat_of(body: Mapping[str, Any], text_model: TextModel) -> ChatRequest:
    served = Served(
        id="",
        text=text_model,
        renderer=Renderer(text_model),
        grammars=Grammars(text_model),
        created=int(time.time()),
        accepts_any_name=True,
    )
    limits = Limits()
    if "input" in body:
        asked = response_request_of(
            ResponsesBody.model_validate(body), (), request_id="", namespace="", served=served, limits=limits
        )
    elif _is_anthropic(body):
        return asked_of(CountBody.model_validate(body), served=served, limits=limits).chat
    else:
        asked = service_request_of(
            ChatBody.model_validate(body), request_id="", namespace="", served=served, limits=limits
        )
    assert isinstance(asked.prompt, ChatRequest), "both APIs ask for chats"
    return asked.prompt


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether the body has what only Anthropic's has: the system prompt apart, tools with an `input_schema`."""
    tools: Any = body.get("tools")
    first: Any = cast(list[Any], tools)[0] if isinstance(tools, list) and tools else None
    return "system" in body or (isinstance(first, Mapping) and "input_schema" in first)
