"""Renderings of a long chat's variants that leave the middle out and put its text back.

Most of a long chat is far from what a made-up turn changes, and each message costs the template about as much as any
other. So the middle is left out once to see that the prompt lacks just one stretch of text then; variants that begin as
the prompt does are rendered without it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from reprise.chat.images import images_in
from reprise.chat.messages.system_placement import Placement
from reprise.chat.request import Message
from reprise.chat.scan import common_length
from reprise.chat.templates.probe_turns import head_length
from reprise.chat.templates.template import RenderContext
from reprise.core.tokens import Span

LEAST_LEFT_OUT = 8
"""Messages that are worth the trial."""
_NUM_LAST = 2
"""Turns (or rounds of the last turn's tool loop) before the end that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """The messages that are left out, and where their text stands in the prompt.

    The prompt without them could be cut at any character from `first_cut` to `chars.start`.
    """

    messages: Span
    chars: Span
    first_cut: int


class AbridgedChat:
    """Renders the messages of a context, and others that begin as they do. `text`: the context's own rendering.

    Nothing is left out where that would be fewer than `least` messages.
    """

    def __init__(
        self,
        placement: Placement,
        context: RenderContext,
        text: str,
        *,
        think_end: str | None,
        least: int = LEAST_LEFT_OUT,
    ) -> None:
        self._placement = placement
        self._context = context
        self._text = text
        self._stretch = self._left_out(think_end, least)

    def try_text(self, messages: Sequence[Message]) -> str | None:
        """The text of these messages, rewritten if they are refused as they are; None if both are."""
        return self._whole(messages, self._short(messages))

    def compared_text(self, messages: Sequence[Message]) -> str | None:
        """The same, or a text that differs from the prompt at the same character for the first time."""
        short, stretch = self._short(messages), self._stretch
        if short is not None and stretch is not None and common_length(short, self._text) < stretch.first_cut:
            return short
        return self._whole(messages, short)

    def _whole(self, messages: Sequence[Message], short: str | None) -> str | None:
        stretch = self._stretch
        if short is not None and stretch is not None and short.startswith(self._text[: stretch.chars.start]):
            return self._text[: stretch.chars.stop] + short[stretch.chars.start :]
        return self._placement.try_text(self._context, messages)

    def _short(self, messages: Sequence[Message]) -> str | None:
        """The text without the messages that are left out; None if these do not begin as the context's do."""
        if self._stretch is None:
            return None
        first, stop = self._stretch.messages.start, self._stretch.messages.stop
        own = self._context.request.messages
        if len(messages) <= stop or tuple(messages[:stop]) != own[:stop]:
            return None
        if len(images_in(messages)) != len(images_in(own)):
            # Where images are numbered, those that are left out count.
            return None
        return self._placement.try_text(self._context, (*messages[:first], *messages[stop:]))

    def _left_out(self, think_end: str | None, least: int) -> _Stretch | None:
        request = self._context.request
        messages = None if request.continue_final else _middle(request.messages, think_end)
        if messages is None or len(messages) < least:
            return None
        kept = (*request.messages[: messages.start], *request.messages[messages.stop :])
        short = self._placement.try_text(self._context, kept)
        if short is None or len(short) >= len(self._text):
            return None
        start = common_length(short, self._text)
        stop = start + len(self._text) - len(short)
        if self._text[stop:] != short[start:]:
            return None
        num_behind = common_length(short[::-1], self._text[::-1])
        return _Stretch(messages=messages, chars=Span(start, stop), first_cut=len(short) - num_behind)


def _middle(messages: Sequence[Message], think_end: str | None) -> Span | None:
    """The messages to leave out: whole turns before the last, or whole rounds of a tool loop in the last one.

    Every shape of message among them also stands before them, so a template that writes a shape in another way than
    before (at a distance from the end, say) does so there, too, where it is seen.
    """
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return None
    rounds = [i for i in range(users[-1] + 1, len(messages)) if messages[i].get("role") == "assistant"]
    is_in_loop = len(messages) - users[-1] > users[-1]
    begins = rounds if is_in_loop else users
    if len(begins) <= _NUM_LAST:
        return None
    region, stop = users[-1] if is_in_loop else head_length(messages), begins[-_NUM_LAST]
    seen = set[object]()
    last_new = region
    for index in range(region, stop):
        shape = _shape(messages[index], think_end)
        if shape not in seen:
            seen.add(shape)
            last_new = index
    first = next((index for index in begins if index > last_new), stop)
    return Span(first, stop) if first < stop else None


def _shape(message: Message, think_end: str | None) -> tuple[object, ...]:
    """What a template may tell messages apart by, beside their words."""
    content: Any = message.get("content")
    calls: Any = message.get("tool_calls")
    keys = frozenset(key for key, value in message.items() if value not in (None, "", [], ()))
    has_thought = think_end is not None and isinstance(content, str) and think_end in content
    num_calls = min(2, len(cast(Sequence[Any], calls))) if isinstance(calls, Sequence) else 0
    return message.get("role"), keys, isinstance(content, str), has_thought, num_calls
