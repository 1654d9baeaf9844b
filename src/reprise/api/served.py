"""The model that a server serves, as the API sees it."""

from dataclasses import dataclass
from pathlib import PurePath

from reprise.chat.grammar import Grammars
from reprise.chat.render import Renderer
from reprise.chat.text_model import TextModel
from reprise.core.errors import ContextTooLong, UnknownModel


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
    created: int = 0
    accepts_any_name: bool = False

    def check_name(self, name: str | None) -> None:
        """Raise UnknownModel unless a request that names this model can be served. None means the served model."""
        if name is None or self.accepts_any_name or name in (self.id, PurePath(self.id).name):
            return
        raise UnknownModel(
            f"The model {name!r} is not served here. Ask for {self.id!r}, leave `model` out, "
            "or start the server with --any-model."
        )

    def answer_room(self, num_prompt: int, wanted: int) -> int:
        """How many of the `wanted` tokens fit after a prompt. Raises ContextTooLong if not even one does."""
        if self.context is None:
            return wanted
        room = self.context - num_prompt
        if room < 1:
            raise ContextTooLong(
                f"The prompt has {num_prompt} tokens; this model takes {self.context}, prompt and answer together. "
                "Shorten the chat.",
                param="messages",
            )
        return min(wanted, room)
