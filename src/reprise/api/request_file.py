"""Request bodies in files, of whatever API: the chat that each asks to be answered."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from reprise.api.any_body import prompt_in
from reprise.api.limits import Limits
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
    )
    try:
        prompt = prompt_in(cast(Mapping[str, Any], body), served=served, limits=Limits())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file} is not a request body: {where}: {first['msg']}.") from error
    except BadRequest as error:
        raise BadRequest(f"{file}: {error}", param=error.param) from error
    if not isinstance(prompt, ChatRequest):
        raise BadRequest(f"{file} is not a chat request: expected `messages` or `input`.")
    return prompt
