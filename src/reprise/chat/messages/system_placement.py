"""Rewrites messages into the closest form that a template accepts.

Which shapes a template takes is found by trying, once for each: small chats that have the shape are rendered, and each
of their words must come out. A chat is rewritten only where it has a shape that its template does not take, and always
then, so that each turn is written as the turns before it were.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from reprise.chat.images import PROBE, image_part
from reprise.chat.message_format import USUAL_IDS, joined_text, text_runs
from reprise.chat.messages import rewriting
from reprise.chat.request import ChatRequest, Message, call_of, result_of
from reprise.chat.templates.probe_turns import HEAD_ROLES, PROBE_TOOL, PROBE_TOOL_NAME
from reprise.chat.templates.template import ChatTemplate, RenderContext
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest, TemplateFailed

Complaint = Callable[[Sequence[Message]], str | None]
"""The template's error for these messages; None: it takes them."""


def refused_message(messages: Sequence[Message], complaint: Complaint, *, sentence: str) -> int | None:
    """The first message that makes the template say `sentence`; None where no single message does.

    A shorter chat may be refused for another reason (it has no user message yet), which is not counted. O(log n)
    renderings, for n messages.
    """
    # The shortest beginning `messages[:stop]` that is refused in these words; the whole chat is.
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        if complaint(messages[:middle]) == sentence:
            bad = middle
        else:
            good = middle
    # What the chat lacks as a whole is the fault of no message: then it is missed from the first one on.
    is_missed = bad == 1 and (len(messages) == 1 or complaint(messages[1:]) == sentence)
    return None if is_missed else bad - 1


def explained(failed: TemplateFailed, messages: Sequence[Message], complaint: Complaint) -> TemplateFailed:
    """The same failure in words that say where they come from and which message they mean."""
    sentence = str(failed)
    at = refused_message(messages, complaint, sentence=sentence)
    where = "" if at is None else f" at messages[{at}] (role {str(messages[at].get('role'))!r})"
    if not sentence.endswith((".", "!", "?")):
        sentence += "."
    error = TemplateFailed(
        f"The model's chat template refused the chat{where}: {sentence}",
        param="messages" if at is None else f"messages[{at}]",
    )
    error.__cause__ = failed
    return error


_Chat = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A request as the template takes it, rendered. `notes` say what was changed."""

    context: RenderContext
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeRule:
    """A shape, `rewrite` for where it is not taken, and what is noted then.

    A template takes the shape if it renders all `probes` with all their words; without probes none does. `baseline` is
    a chat without the shape: where that is refused as well, the probes say nothing.
    """

    probes: tuple[_Chat, ...]
    baseline: _Chat
    rewrite: rewriting.Rewrite
    note: str


class Placement:
    """Places the messages of requests for one template. Safe to use from several threads."""

    def __init__(self, template: ChatTemplate, text_model: TextModel) -> None:
        self._template = template
        writer = _call_writer(text_model)
        sees = text_model.images is not None
        self._rules = (*(_IMAGE_RULES if sees else ()), *_rules(writer, sees=sees))
        self._verdicts: dict[tuple[int, bool], bool] = {}

    def open(self, request: ChatRequest, moment: datetime) -> Placed:
        """Render a request in the nearest form that the template takes.

        Raises BadRequest and TemplateFailed, with the template's error for the messages as they are.
        """
        other, notes = self.rewritten(request)
        try:
            context, text = self._template.open_scene(other, moment)
        except TemplateFailed as failed:
            raise self._explained(failed, request, moment) from failed
        if not _has_systems(other, self._template.plain(text)):
            notes = (*notes, "the chat template leaves out a system message")
        return Placed(context=context, text=text, notes=notes)

    def try_text(self, context: RenderContext, messages: Sequence[Message]) -> str | None:
        """The text of other messages in a context, rewritten if they are refused as they are; None if both are."""
        text = self._template.try_text(context, messages)
        if text is not None:
            return text
        request = replace(context.request, messages=tuple(messages), continue_final=False, breakpoints=(), cuts=())
        other, _ = self.rewritten(request)
        return None if other is request else self._template.try_text(context, other.messages)

    def rewritten(self, request: ChatRequest) -> tuple[ChatRequest, tuple[str, ...]]:
        """The request without the shapes that the template does not take, and notes on what was rewritten."""
        notes: list[str] = []
        for number, rule in enumerate(self._rules):
            # Asked first: then a long chat is not searched for shapes that are taken as they are.
            other = request if self._takes(number, has_tools=len(request.tools) > 0) else rule.rewrite(request)
            if other is not request:
                notes.append(_noted(rule.note, request, other))
                request = other
        return request, tuple(notes)

    def _takes(self, number: int, *, has_tools: bool) -> bool:
        """Whether the template takes the shape of this rule. Found out by trying, once."""
        key = (number, has_tools)
        if key not in self._verdicts:
            rule = self._rules[number]
            is_taken = len(rule.probes) > 0 and all(self._shows(probe, has_tools=has_tools) for probe in rule.probes)
            self._verdicts[key] = is_taken or not self._shows(rule.baseline, has_tools=has_tools)
        return self._verdicts[key]

    def _shows(self, chat: _Chat, *, has_tools: bool) -> bool:
        request = ChatRequest(messages=chat, tools=(PROBE_TOOL,) if has_tools else ())
        try:
            _, text = self._template.open_scene(request, datetime(2000, 1, 1))
        except BadRequest:
            return False
        return all(word in text for message in chat for word in _words(message))

    def _explained(self, failed: TemplateFailed, request: ChatRequest, moment: datetime) -> TemplateFailed:
        try:
            self._template.open_scene(request, moment)
        except TemplateFailed as original:
            failed = original
        return explained(failed, request.messages, lambda messages: self._complaint(request, messages, moment))

    def _complaint(self, request: ChatRequest, messages: Sequence[Message], moment: datetime) -> str | None:
        continues = request.continue_final and len(messages) == len(request.messages)
        part = replace(request, messages=tuple(messages), continue_final=continues, breakpoints=(), cuts=())
        try:
            self._template.open_scene(part, moment)
        except BadRequest as failed:
            return str(failed)
        return None


def _call_writer(text_model: TextModel) -> rewriting.CallWriter:
    """Calls in the model's own format where it is known; else as JSON."""
    form = text_model.calls.format

    def write(calls: Sequence[tuple[str, Any]]) -> str:
        if form is None:
            plain = ({"name": name, "arguments": arguments} for name, arguments in calls)
            return "\n".join(json.dumps(call, ensure_ascii=False, default=str) for call in plain)
        return form.written([(name, _in_mapping(arguments)) for name, arguments in calls])

    return write


def _in_mapping(arguments: Any) -> Mapping[str, Any]:
    """Arguments that are not a JSON object stand in one."""
    return cast("Mapping[str, Any]", arguments) if isinstance(arguments, Mapping) else {"arguments": arguments}


def _has_systems(request: ChatRequest, text: str) -> bool:
    systems = (message for message in request.messages if message.get("role") in HEAD_ROLES)
    runs = (run for message in systems for run in text_runs(message.get("content")))
    return all(run.strip() in text for run in runs if isinstance(run, str))


def _noted(note: str, before: ChatRequest, after: ChatRequest) -> str:
    """The note, with the messages that were rewritten as far as they kept their places."""
    if len(before.messages) != len(after.messages):
        return note
    changed = [str(index) for index, message in enumerate(before.messages) if message != after.messages[index]]
    return f"{note}: message {', '.join(changed)}"


def _words(message: Message) -> list[str]:
    called = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [function["arguments"] for function in called]
    values = [value if isinstance(value, str) else value["gate"] for value in arguments]
    # One letter is no word: many templates write calls alone, without the words beside them.
    return [word for word in (joined_text(message.get("content")), *values) if len(word) > 1]


def _says(role: str, word: str) -> Message:
    return {"role": role, "content": word}


def _calls(*calls: tuple[str, Any], content: str | None = None) -> Message:
    made = [call_of(call_id, PROBE_TOOL_NAME, arguments) for call_id, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _sees(call_id: str, word: str) -> Message:
    return result_of(call_id, PROBE_TOOL_NAME, word)


def _with_image(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}, image_part(PROBE)]}


_SYSTEM, _ASKED, _ASKED_THEN = _says("system", "Sycamore"), _says("user", "Falcon"), _says("user", "Saffron")
_SYSTEM_THEN, _ANSWERED, _ANSWERED_THEN = (
    _says("system", "Juniper"),
    _says("assistant", "Rowboat"),
    _says("assistant", "Tamarind"),
)
_ONE, _TWO = USUAL_IDS[:2]
_LOOKS, _SEEN, _SEEN_THEN = _calls((_ONE, {"gate": "Thimble"})), _sees(_ONE, "Razorbill"), _sees(_TWO, "Pelican")
_LONE: Message = {"role": "tool", "tool_call_id": _TWO, "content": "Pelican"}
_LOOKS_TWICE = _calls((_ONE, {"gate": "Thimble"}), (_TWO, {"gate": "Lantern"}))
_ONE_TURN, _TWO_TURNS = (_ASKED,), (_ASKED, _ANSWERED, _ASKED_THEN)
_LOOP = (_ASKED, _LOOKS, _SEEN)


_IMAGE_RULES = (
    _ShapeRule(
        probes=((_ASKED, _LOOKS, _with_image(_SEEN)),),
        baseline=_LOOP,
        rewrite=rewriting.images_to_users("tool"),
        note="images of tool results put into a user message behind them: the chat template accepts none there",
    ),
    _ShapeRule(
        probes=((_with_image(_SYSTEM), _ASKED),),
        baseline=_ONE_TURN,
        rewrite=rewriting.images_to_users(*HEAD_ROLES),
        note="images of system messages put into a user message behind them: the chat template accepts none there",
    ),
    _ShapeRule(
        probes=((_ASKED, _with_image(_ANSWERED), _ASKED_THEN),),
        baseline=_TWO_TURNS,
        rewrite=rewriting.images_to_users("assistant"),
        note="images of answers put into a user message behind them: the chat template accepts none in answers",
    ),
)
"""For models that see, before the others."""


_LONE_IMAGE_RULE = _ShapeRule(
    probes=((_ASKED, _ANSWERED, _with_image(_LONE), _ASKED_THEN),),
    baseline=(_ASKED, _ANSWERED, _LONE, _ASKED_THEN),
    rewrite=rewriting.images_of_lone_results_to_users,
    note="images of tool results put into a user message behind them: the chat template accepts none there",
)
"""For models that see, once calls are text where the template accepts none."""


def _rules(write_call: rewriting.CallWriter, *, sees: bool) -> tuple[_ShapeRule, ...]:
    """The rules in order: what one leaves, a later one may have to mend."""
    return (
        _ShapeRule(
            probes=(
                (_SYSTEM, _ASKED, _ANSWERED, _SYSTEM_THEN, _ASKED_THEN),
                (_SYSTEM, _ASKED, _ANSWERED, _ASKED_THEN, _SYSTEM_THEN),
            ),
            baseline=_TWO_TURNS,
            rewrite=rewriting.late_systems_as_users,
            note="system messages sent as user messages in place, since the chat template accepts none there",
        ),
        _ShapeRule(
            probes=((_SYSTEM, _SYSTEM_THEN, _ASKED),),
            baseline=_ONE_TURN,
            rewrite=rewriting.joined_systems,
            note="the system messages at the beginning merged, since the chat template accepts one",
        ),
        _ShapeRule(
            probes=((_SYSTEM, _ASKED),),
            baseline=_ONE_TURN,
            rewrite=rewriting.system_in_question,
            note="the system prompt put before the first user message, since the chat template accepts none",
        ),
        _ShapeRule(
            probes=(),
            baseline=_ONE_TURN,
            rewrite=rewriting.results_in_order,
            # Most templates write no ids: only the order shows which result belongs to which call.
            note="tool results sorted in the order of their calls",
        ),
        _ShapeRule(
            probes=((_ASKED, _calls((_ONE, {"gate": "Thimble"}), content="!"), _SEEN), _LOOP),
            baseline=_ONE_TURN,
            rewrite=lambda request: rewriting.calls_as_text(request, write_call),
            note="tool calls sent as text, since the chat template accepts none",
        ),
        _ShapeRule(
            probes=((_ASKED, _ANSWERED, _LONE, _ASKED_THEN), (_LONE, _ASKED)),
            baseline=_TWO_TURNS,
            rewrite=rewriting.lone_results_as_users,
            note="tool results without their call sent as user messages, since the chat template needs the call",
        ),
        *((_LONE_IMAGE_RULE,) if sees else ()),
        _ShapeRule(
            probes=((_ASKED, _LOOKS_TWICE, _SEEN, _SEEN_THEN),),
            baseline=_LOOP,
            rewrite=rewriting.one_call_at_a_time,
            note="parallel tool calls sent one after the other, since the chat template accepts one at a time",
        ),
        _ShapeRule(
            probes=((_ASKED, _calls((_ONE, "Thimble")), _SEEN),),
            baseline=_LOOP,
            rewrite=rewriting.text_in_mapping,
            note="tool arguments that are not a JSON object wrapped in one, since the chat template needs it",
        ),
        _ShapeRule(
            probes=((_ASKED, _says("assistant", ""), _ASKED_THEN),),
            baseline=_TWO_TURNS,
            rewrite=rewriting.without_empty_answers,
            note="empty assistant messages left out, since the chat template accepts none",
        ),
        _ShapeRule(
            probes=((_SYSTEM,), (_ANSWERED,)),
            baseline=_ONE_TURN,
            rewrite=rewriting.with_a_user,
            note="an empty user message added to the chat, since the chat template needs one",
        ),
        _ShapeRule(
            probes=((_ANSWERED, _ASKED),),
            baseline=_TWO_TURNS,
            rewrite=rewriting.user_first,
            note="an empty user message put before the first answer, since the chat template needs one",
        ),
        _ShapeRule(
            probes=((_ASKED, _ASKED_THEN),),
            baseline=_ONE_TURN,
            rewrite=rewriting.joined_users,
            note="user messages in a row joined, since the chat template needs alternating turns",
        ),
        _ShapeRule(
            probes=((_ASKED, _ANSWERED, _ANSWERED_THEN, _ASKED_THEN),),
            baseline=_TWO_TURNS,
            rewrite=rewriting.joined_answers,
            note="assistant messages in a row joined, since the chat template needs alternating turns",
        ),
        _ShapeRule(
            probes=((*_LOOP, _ASKED_THEN), (_ASKED, _LOOKS, _ASKED_THEN)),
            baseline=(*_LOOP, _ANSWERED, _ASKED_THEN),
            rewrite=rewriting.bridged,
            note="a short answer put between a tool loop and the next user message, since the template needs turns",
        ),
    )
