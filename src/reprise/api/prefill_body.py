"""The body of `POST /v1/prefill`."""

from typing import Any

from reprise.api.body import Body
from reprise.api.openai.chat_body import ChatMessage, ToolSpec


class PrefillBody(Body):
    """A chat (a system prompt and tools alone will do), or a plain prompt."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | list[int] | None = None
    partial: bool | None = None
    """The last user message is still being typed: computed is what cannot change any more."""
