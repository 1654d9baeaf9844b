"""Messages where a template does not take them: system messages in the midst of a chat, several in a row.

They stay where they are if the template writes them there. If it refuses or drops them, they stay at their place in
another form, so that what stands before them is the same prompt as without them: moved to the head, they would cost
the whole chat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from reprise.chat.forms import joined_text
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.chat.standins import HEAD_ROLES, head_length
from reprise.chat.template import ChatTemplate, Scene
from reprise.chat.template_fault import explained
from reprise.core.errors import BadRequest, TemplateFailed

_JOINER = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A request as the template takes it, rendered. `notes` say what was changed."""

    scene: Scene
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to write messages: late system messages as user messages, and perhaps neighbours of one role as one."""

    joins_heads: bool = False
    joins_users: bool = False


# From the smallest change to the largest: what a chat's earlier requests did not need, a later one should not change.
_WAYS = (_Way(), _Way(joins_heads=True), _Way(joins_heads=True, joins_users=True))


def open_placed(template: ChatTemplate, request: ChatRequest, moment: datetime) -> Placed:
    """Render a request, its messages as they are if the template takes them.

    Raises BadRequest and TemplateFailed, with what the template said to the messages as they are.
    """
    refusal: TemplateFailed | None = None
    placed: Placed | None = None
    try:
        scene, text = template.open_scene(request, moment)
        placed = Placed(scene=scene, text=text)
        if _has_all(request, text):
            return placed
    except TemplateFailed as failed:
        refusal = failed
    for other in _rewritings(request):
        try:
            scene, text = template.open_scene(other, moment)
        except TemplateFailed:
            continue
        return Placed(scene=scene, text=text, notes=_notes(request, other))
    if placed is None:
        assert refusal is not None
        raise explained(refusal, request.messages, lambda messages: _complaint(template, request, messages, moment))
    return replace(placed, notes=("the chat template leaves out a system message",))


def _complaint(
    template: ChatTemplate, request: ChatRequest, messages: Sequence[Message], moment: datetime
) -> str | None:
    continues = request.continue_final and len(messages) == len(request.messages)
    try:
        template.open_scene(
            replace(request, messages=tuple(messages), continue_final=continues, breakpoints=(), cuts=()), moment
        )
    except BadRequest as failed:
        return str(failed)
    return None


def _has_all(request: ChatRequest, text: str) -> bool:
    """Whether the text has all system messages behind the first message."""
    late = (message for message in request.messages[1:] if message.get("role") in HEAD_ROLES)
    return all(joined_text(message.get("content")).strip() in text for message in late)


def _rewritings(request: ChatRequest) -> Iterator[ChatRequest]:
    """The request written in the other ways, as far as they differ."""
    seen = [request.messages]
    for way in _WAYS:
        other = _rewritten(request, way)
        if other.messages not in seen:
            seen.append(other.messages)
            yield other


def _rewritten(request: ChatRequest, way: _Way) -> ChatRequest:
    head = head_length(request.messages)
    out: list[Message] = []
    begins: list[Cut] = []
    """Where each message's text begins now."""
    for index, given in enumerate(request.messages):
        is_late = index >= head and given.get("role") in HEAD_ROLES
        message = {"role": "user", "content": joined_text(given.get("content"))} if is_late else given
        if out and _joins(out[-1], message, way, is_head=index < head):
            before = joined_text(out[-1].get("content")) + _JOINER
            begins.append(Cut(len(out) - 1, len(before)))
            out[-1] = {**out[-1], **message, "content": before + joined_text(message.get("content"))}
        else:
            begins.append(Cut(len(out), 0))
            out.append(message)
    breakpoints: list[int] = []
    cuts = [Cut(begins[cut.message].message, begins[cut.message].num_chars + cut.num_chars) for cut in request.cuts]
    for num_before in request.breakpoints:
        begin = Cut(len(out), 0) if num_before >= len(begins) else begins[num_before]
        if begin.num_chars == 0:
            breakpoints.append(begin.message)
        else:
            cuts.append(Cut(begin.message, begin.num_chars - len(_JOINER)))
    return replace(request, messages=tuple(out), breakpoints=tuple(breakpoints), cuts=tuple(cuts))


def _joins(last: Message, message: Message, way: _Way, *, is_head: bool) -> bool:
    if is_head:
        return way.joins_heads
    is_plain = all(m.get("role") == "user" and m.keys() <= {"role", "content", "name"} for m in (last, message))
    names = {m["name"] for m in (last, message) if "name" in m}
    return way.joins_users and is_plain and len(names) <= 1


def _notes(request: ChatRequest, other: ChatRequest) -> tuple[str, ...]:
    head, messages = head_length(request.messages), request.messages
    late = [str(index) for index in range(head, len(messages)) if messages[index].get("role") in HEAD_ROLES]
    notes: list[str] = []
    if late:
        notes.append(
            f"system messages given as user messages where they stand, since the chat template takes none there: "
            f"message {', '.join(late)}; nothing before them is computed again"
        )
    if head > 1 and head_length(other.messages) == 1:
        notes.append(f"the {head} system messages at the beginning given as one, since the chat template takes one")
    num_joined = len(messages) - len(other.messages) - (head - head_length(other.messages))
    if num_joined > 0:
        notes.append(f"user messages joined to the one before, since the chat template wants turns: {num_joined}")
    return tuple(notes)
