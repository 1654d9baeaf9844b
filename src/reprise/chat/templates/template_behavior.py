"""What a chat template does to earlier turns, found by rendering small chats and comparing the texts.

Nothing depends on a template's name or source: each message of a probe has a unique word, and the position of that word
in the text, if it is there, is the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from reprise.chat.message_format import USUAL_IDS
from reprise.chat.request import ChatRequest, Message, call_of, result_of
from reprise.chat.templates.probe_turns import PROBE_TOOL, PROBE_TOOL_NAME
from reprise.chat.templates.template import ChatTemplate
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest

_SYSTEM, _FIRST, _THOUGHT, _REPLY, _SECOND = "Sycamore", "Falcon", "Thimble", "Rowboat", "Saffron"
_RESULT, _TOLD = "Razorbill", "Tamarind"

_DAY, _OTHER_DAY = datetime(2031, 3, 4, 5, 6), datetime(2032, 9, 17, 18, 19)

_TO_KEEP: Sequence[tuple[str, bool]] = (
    ("preserve_thinking", True),
    ("clear_thinking", False),
    ("truncate_history_thinking", False),
    ("drop_thinking", False),
)
"""Options that make templates keep earlier thinking, all that are known; each is tried."""


class Thoughts(StrEnum):
    """The fate of the thinking in an earlier answer once a user message follows."""

    NONE = "the template writes no thinking"
    KEPT = "kept"
    STRIPPED = "stripped"
    EMPTIED = "stripped, with an empty block in its place"


class Place(StrEnum):
    """Where a part that all turns share stands in a chat of two turns."""

    HEAD = "at the beginning"
    LAST_TURN = "moved to the last user message"
    ABSENT = "not written"
    REFUSED = "refused"


class Dates(StrEnum):
    """Whether the prompt changes with the day."""

    NONE = "none"
    ALWAYS = "always"
    WITHOUT_SYSTEM = "only in chats without a system message"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBehavior:
    """What a template does as a chat grows.

    `opens_thinking`: the generation prompt ends inside thinking. `keeps_prompt_end`: what the generation prompt writes
    is still there in the next turn. `in_tool_loop` and `after_tool_loop`: what becomes of thinking beside a tool call,
    while the loop runs and behind the next user message (None: the template takes no tool calls). `to_keep`: template
    options with which earlier thinking stays.
    """

    thoughts: Thoughts
    opens_thinking: bool
    keeps_prompt_end: bool | None
    in_tool_loop: Thoughts | None
    after_tool_loop: Thoughts | None
    to_keep: Mapping[str, bool]
    system: Place
    tools: Place
    dates: Dates


def find_behavior(text_model: TextModel) -> TemplateBehavior:
    """Render the probes. Raises BadRequest for a model without a chat template."""
    probes = _Probes(text_model)
    first, later = probes.text(_first_turn()), probes.text(_two_turns())
    if first is None:
        raise BadRequest("The chat template refuses a chat of one user message.")
    loop, after_loop = probes.text(_tool_loop(), tools=True), probes.text(_after_loop(), tools=True)
    knows = any(text is not None and _THOUGHT in text for text in (later, loop, probes.text(_thought_last())))
    opens_thinking = text_model.opens_thinking(first)
    knows = knows or opens_thinking
    if not knows:
        # Thinking that a client leaves in the text of the answer.
        inline = probes.text(_two_turns(text_model.think_start, text_model.think_end))
        knows = later is not None and inline is not None and _THOUGHT not in inline and _REPLY in inline
    thoughts = probes.thoughts(later, knows=knows)
    return TemplateBehavior(
        thoughts=thoughts,
        opens_thinking=opens_thinking,
        keeps_prompt_end=later.startswith(first) if later is not None else None,
        in_tool_loop=probes.loop_thoughts(loop, knows=knows),
        after_tool_loop=probes.loop_thoughts(after_loop, knows=knows),
        to_keep=probes.options_to_keep() if thoughts in (Thoughts.STRIPPED, Thoughts.EMPTIED) else {},
        system=_place(probes.text(_with_system(_two_turns())), _SYSTEM),
        tools=_place(probes.text(_two_turns(), tools=True), PROBE_TOOL_NAME),
        dates=probes.dates(),
    )


class _Probes:
    """Renders probes and reads them."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self._template = ChatTemplate(text_model)

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = False,
        options: Mapping[str, Any] | None = None,
        moment: datetime = _DAY,
    ) -> str | None:
        """The prompt of a probe, or None if the template refuses it."""
        request = ChatRequest(
            messages=tuple(messages), tools=(PROBE_TOOL,) if tools else (), template_options=options or {}
        )
        try:
            return self._template.open_scene(request, moment)[1]
        except BadRequest:
            if self._text_model.render is None:
                raise
            return None

    def thoughts(self, text: str | None, *, knows: bool) -> Thoughts:
        """What became of the thinking before the first answer."""
        if text is None or not knows:
            return Thoughts.NONE
        if _THOUGHT in text:
            return Thoughts.KEPT
        return Thoughts.EMPTIED if self._has_marks(_between(text, _FIRST, _REPLY)) else Thoughts.STRIPPED

    def loop_thoughts(self, text: str | None, *, knows: bool) -> Thoughts | None:
        """What became of the thinking before the tool call; None where no call is written."""
        called = None if text is None else _between(text, _FIRST, _RESULT)
        if text is None or called is None or PROBE_TOOL_NAME not in called:
            return None
        if not knows:
            return Thoughts.NONE
        if _THOUGHT in text:
            return Thoughts.KEPT
        return Thoughts.EMPTIED if self._has_marks(called.partition(PROBE_TOOL_NAME)[0]) else Thoughts.STRIPPED

    def options_to_keep(self) -> Mapping[str, bool]:
        found: dict[str, bool] = {}
        for name, value in _TO_KEEP:
            text = self.text(_two_turns(), options={name: value})
            if text is not None and _THOUGHT in text:
                found[name] = value
        return found

    def dates(self) -> Dates:
        plain, led = self._has_date(_first_turn()), self._has_date(_with_system(_first_turn()))
        if led or (plain and led is None):
            return Dates.ALWAYS
        return Dates.WITHOUT_SYSTEM if plain else Dates.NONE

    def _has_date(self, messages: Sequence[Message]) -> bool | None:
        """Whether two days give two texts; None where the template refuses the chat."""
        text, other = self.text(messages), self.text(messages, moment=_OTHER_DAY)
        if text is None or other is None:
            return None
        dates = self._template.dates
        if dates.has_dates and not dates.is_controlled:
            # Its clock cannot be set, so look for what the real clock would write.
            return str(datetime.now().year) in text
        return text != other

    def _has_marks(self, text: str | None) -> bool:
        marks = (self._text_model.think_start, self._text_model.think_end)
        return text is not None and any(mark is not None and mark in text for mark in marks)


def _place(text: str | None, word: str) -> Place:
    if text is None:
        return Place.REFUSED
    if word not in text:
        return Place.ABSENT
    return Place.HEAD if text.index(word) < text.index(_FIRST) else Place.LAST_TURN


def _between(text: str, start: str, stop: str) -> str | None:
    """What stands between two words; None if they do not stand there in this order."""
    low = text.find(start)
    high = text.find(stop, low)
    return text[low + len(start) : high] if 0 <= low < high else None


def _first_turn() -> tuple[Message, ...]:
    return ({"role": "user", "content": _FIRST},)


def _thought_last() -> tuple[Message, ...]:
    return (*_first_turn(), {"role": "assistant", "content": _REPLY, "reasoning_content": _THOUGHT})


def _two_turns(start: str | None = None, end: str | None = None) -> tuple[Message, ...]:
    """Two turns; with the marks of thinking, the thought stands between them in the text of the answer."""
    asked, answered = _thought_last()
    if start is not None and end is not None:
        answered = {"role": "assistant", "content": f"{start}{_THOUGHT}{end}{_REPLY}"}
    return (asked, answered, {"role": "user", "content": _SECOND})


def _with_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    return ({"role": "system", "content": _SYSTEM}, *messages)


def _tool_loop() -> tuple[Message, ...]:
    call = call_of(USUAL_IDS[0], PROBE_TOOL_NAME, {"gate": "north"})
    return (
        *_first_turn(),
        {"role": "assistant", "content": "", "reasoning_content": _THOUGHT, "tool_calls": [call]},
        result_of(USUAL_IDS[0], PROBE_TOOL_NAME, _RESULT),
    )


def _after_loop() -> tuple[Message, ...]:
    return (*_tool_loop(), {"role": "assistant", "content": _TOLD}, {"role": "user", "content": _SECOND})
