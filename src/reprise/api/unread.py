"""Images, files and sounds in a chat with a model that reads text only.

In a tool result or an older message such a part becomes a short text in its place, and the chat goes on: it would be
refused with every later request otherwise. In the newest user message it is what the user asks about, and is refused.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from reprise.core.errors import BadRequest

Speaker = Literal["system", "user", "assistant", "tool"]
"""Who says a message; a user's message that carries tool results is the tool's."""

_KINDS = {
    "image": ("image", "image_url", "input_image", "image_file", "computer_screenshot"),
    "audio": ("audio", "input_audio", "audio_url"),
    "video": ("video", "video_url", "input_video"),
    "file": ("file", "input_file", "document", "container_upload"),
}
_NAMES = {kind: name for name, kinds in _KINDS.items() for kind in kinds}


def newest_question_at(speakers: Sequence[Speaker]) -> int | None:
    """The index of the user's newest message, if the model is to answer it; None if it is to answer a tool's result.

    What follows a tool's result in a user's message belongs to it: many clients hand on a tool's image like that.
    """
    newest: int | None = None
    # An assistant message at the end is the beginning of the answer.
    end = len(speakers) - 1 if speakers and speakers[-1] == "assistant" else len(speakers)
    for index in range(end - 1, -1, -1):
        match speakers[index]:
            case "user" if newest is None:
                newest = index
            case "tool":
                return None
            case "assistant":
                return newest
            case _:
                continue
    return newest


class UnreadParts:
    """Writes the texts that stand for parts that cannot be read, and counts them. `question_at`: the newest question.

    The texts say nothing but the kind, so they are the same in every later request.
    """

    def __init__(self, question_at: int | None) -> None:
        self._question_at = question_at
        self._counts: Counter[str] = Counter()

    def text(self, kind: str, *, message_at: int | None, where: str) -> str:
        """What stands for a part of this type. Raises BadRequest if it is in the newest question."""
        name = _NAMES.get(kind, kind[:40])
        if message_at is not None and message_at == self._question_at:
            raise BadRequest(
                f"This model reads text only, and cannot take a part of type {kind[:40]!r} in a new user message. "
                "Send the message without it; in older messages and in tool results it is left out.",
                param=where,
            )
        self._counts[name] += 1
        return f"[{name} omitted: this model reads text only]"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        return tuple(
            f"left out, since this model reads text only: parts of kind {name}: {count}"
            for name, count in sorted(self._counts.items())
        )
