"""The model that a server serves, as the API sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from reprise.api.unread import RefusedQuestions
from reprise.chat.grammar import Grammars
from reprise.chat.render import Renderer
from reprise.chat.text_model import TextModel
from reprise.core.defaults import SamplingDefaults
from reprise.core.errors import UnknownModel, prompt_too_long

ENDLESS = 32_768
"""Tokens of an answer that nobody bounds, by a model whose context is not known: one that repeats itself has to end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """`id` is what `GET /v1/models` says. `context` is in tokens, prompt and answer together; None: not known.

    `created` is when the server started, in Unix seconds. With `accepts_any_name` a request may name any model.
    """

    id: str
    text: TextModel
    renderer: Renderer
    grammars: Grammars
    context: int | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Of requests that do not say."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For the chat template, where a request does not say otherwise."""
    created: int = 0
    architecture: str = ""
    """The model's type, as its configuration names it; empty: not known."""
    nbytes: int = 0
    """Of the weights; 0: not known."""
    accepts_any_name: bool = False
    refused_questions: RefusedQuestions = field(default_factory=RefusedQuestions)
    """Questions with images and the like that were refused, so that the chats they stand in can go on."""

    def check_name(self, name: str | None) -> None:
        """Raise UnknownModel unless a request that names this model can be served. None means the served model."""
        if name is None or self.accepts_any_name or name in (self.id, PurePath(self.id).name):
            return
        raise UnknownModel(
            f"The model {name!r} is not served here. Ask for {self.id!r}, leave `model` out, "
            "or start the server with --any-model."
        )

    def answer_room(self, num_prompt: int, wanted: int | None) -> int:
        """How many of the `wanted` tokens (None: as many as there are) fit after a prompt.

        Raises ContextTooLong if not even one does.
        """
        if self.context is None:
            return ENDLESS if wanted is None else wanted
        room = self.context - num_prompt
        if room < 1:
            raise prompt_too_long(num_prompt, self.context)
        return room if wanted is None else min(wanted, room)
