"""Request bodies of any API, distinguished by fields that only one of them has; sent here, or in a file."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from reprise.api.anthropic.body import CountBody
from reprise.api.anthropic.request import prompt_of
from reprise.api.http.limits import Limits
from reprise.api.ollama.body import GenerateBody, OllamaChatBody
from reprise.api.ollama.request import request_of as ollama_request_of
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_request import service_request_of as chat_request_of
from reprise.api.openai.completions_body import CompletionsBody
from reprise.api.openai.completions_body import service_requests_of as completion_requests_of
from reprise.api.responses.body import ResponsesBody
from reprise.api.responses.items import Item
from reprise.api.responses.request import service_request_of as response_request_of
from reprise.api.service.exchange import RawPrompt
from reprise.api.service.image_parts import image_limits
from reprise.api.service.served import Asked, Served
from reprise.chat.grammars.grammar import Grammars
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from reprise.core.settings import Settings

_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})
_OLLAMA_FIELDS = frozenset({"options", "keep_alive"})


def prompt_in(body: Mapping[str, Any], asked: Asked, *, earlier: Sequence[Item] = ()) -> ChatRequest | RawPrompt:
    """The prompt that a body asks to be answered, of all prompts of a completions body the first.

    `earlier`: the items of the response that a body of `/v1/responses` continues. Raises BadRequest, and pydantic's
    ValidationError.
    """

    def known(model: type[Any]) -> Any:
        return model.model_validate(body)

    if "input" in body:
        request = response_request_of(known(ResponsesBody), earlier, asked)
    elif _is_anthropic(body):
        return prompt_of(known(CountBody), asked).chat
    elif _OLLAMA_FIELDS.intersection(body):
        request = ollama_request_of(known(OllamaChatBody if "messages" in body else GenerateBody), asked)
    elif "messages" in body:
        request = chat_request_of(known(ChatBody), asked)
    elif "prompt" in body:
        request = completion_requests_of(known(CompletionsBody), asked)[0]
    else:
        raise BadRequest("Send the body of a chat request: `messages`, `input` or `prompt`.", param="messages")
    return request.prompt


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether it has what only Anthropic's has: the system prompt apart, `input_schema`, or its kinds of blocks."""
    if "messages" not in body:
        return False
    tools, messages = _objects(body.get("tools")), _objects(body.get("messages"))
    if "system" in body or any("input_schema" in tool for tool in tools[:1]):
        return True
    return any(block.get("type") in _ANTHROPIC_BLOCKS for m in messages for block in _objects(m.get("content")))


def _objects(value: object) -> list[Mapping[str, Any]]:
    """The JSON objects of a list; none of anything else."""
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], item) for item in items if isinstance(item, Mapping)]


def chat_in(file: Path, text_model: TextModel) -> ChatRequest:
    """The chat of a request body that was sent to chat completions, messages or responses.

    Raises BadRequest with a sentence that names the file.
    """
    try:
        body: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise BadRequest(f"{file} is not a request body: expected a JSON object.")
    served = Served(
        id="",
        text=text_model,
        renderer=Renderer(text_model),
        grammars=Grammars(text_model),
        created=int(time.time()),
        accepts_any_name=True,
        image_limits=None if text_model.images is None else image_limits(Settings(model="")),
    )
    try:
        prompt = prompt_in(cast(Mapping[str, Any], body), Asked(served=served, limits=Limits()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file} is not a request body: {where}: {first['msg']}.") from error
    except BadRequest as error:
        raise BadRequest(f"{file}: {error}", param=error.param) from error
    if not isinstance(prompt, ChatRequest):
        raise BadRequest(f"{file} is not a chat request: expected `messages` or `input`.")
    return prompt
