"""A rendered request, and which part of it stands where: found by looking for the messages' own words, in order."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from reprise.chat.images import seen_part
from reprise.chat.message_format import calls_in, function_in, parsed_arguments, text_runs
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.piecewise_tokenizer import TokenizedText
from reprise.chat.templates.probe_turns import head_length
from reprise.chat.templates.template import RenderContext
from reprise.core.prompt import Prompt
from reprise.core.tokens import Span


class PartKind(StrEnum):
    HEAD = "head"
    """What the template writes before the first message: a default system prompt, a date."""
    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGE = "message"
    GENERATION_PROMPT = "generation prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of the prompt: the characters `chars` of its text. `index` and `role` name the message, if it is one."""

    kind: PartKind
    chars: Span
    index: int | None = None
    role: str | None = None

    def __str__(self) -> str:
        return str(self.kind) if self.index is None else f"message {self.index} ({self.role})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rendered:
    """A request as the model reads it.

    `context` is how it was rendered, `history` the messages before they were put into the form that the template takes.
    `parts_of`: finds its parts when they are first asked for, which is after the answer.
    `is_thinking_open`: the prompt ends inside thinking; `is_thinking_over`: behind it. `dates` are the date texts that
    the template was given. `previous` is the latest rendering known of the same chat, for explanations; it has no
    `previous` itself. `number`: later renderings have a higher one. `follows_summary`: it quotes one of the last
    answers, as a chat does that continues from its summary.
    """

    context: RenderContext
    history: tuple[Message, ...]
    prompt: Prompt
    text: str
    tokenized: TokenizedText
    is_thinking_open: bool
    is_thinking_over: bool
    parts_of: Callable[[], tuple[PromptPart, ...]]
    notes: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    previous: "Rendered | None" = None
    number: int = 0
    follows_summary: bool = False

    @property
    def request(self) -> ChatRequest:
        """What was rendered, with the reasoning that was put back."""
        return self.context.request

    @cached_property
    def parts(self) -> tuple[PromptPart, ...]:
        """What stands where, as far as it can be found."""
        return self.parts_of()

    def part_at_char(self, char: int) -> PromptPart | None:
        """The smallest part that holds this character."""
        holding = [part for part in self.parts if part.chars.start <= char < part.chars.stop]
        return min(holding, key=lambda part: len(part.chars), default=None)

    def char_at(self, position: int, decode: Callable[[Sequence[int]], str]) -> int:
        """Where in `text` the token at `position` begins. Decodes at most the one piece that holds it."""
        piece = self.tokenized.piece_of_token(position)
        if piece is None:
            return len(self.text)
        return piece.char_at + piece.num_chars(position - piece.token_at, decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A piece begins at this character, with a token that ends a message if `is_end`."""

    char: int
    is_end: bool


def find_parts(
    request: ChatRequest, tokenized: TokenizedText, eos: frozenset[int], *, text: str, prompt_at: int
) -> tuple[PromptPart, ...]:
    """The parts of `text`, as far as they can be found; `prompt_at` is where the generation prompt begins.

    A message whose words cannot be found (a template may drop or rewrite it) has no part, and its text falls to the
    next one. O(text + messages).
    """
    seams = [Seam(char=piece.char_at, is_end=int(piece.tokens[0]) in eos) for piece in tokenized.pieces]
    head = head_length(request.messages)
    parts: list[PromptPart] = []
    begins_at, ended_at = 0, 0
    for index, message in enumerate(request.messages):
        words = words_at(message, text, seams, Span(ended_at, prompt_at))
        if words is None:
            continue
        start = (
            _start(seams, ended_at, words.start)
            if parts
            else _first_start(seams, words.start, is_message=index >= head)
        )
        if parts:
            parts[-1] = replace(parts[-1], chars=Span(parts[-1].chars.start, start))
        elif start > begins_at:
            parts.append(PromptPart(kind=PartKind.HEAD, chars=Span(begins_at, start)))
        kind = PartKind.SYSTEM if index < head else PartKind.MESSAGE
        parts.append(PromptPart(kind=kind, chars=Span(start, words.stop), index=index, role=str(message.get("role"))))
        ended_at = words.stop
    if parts:
        parts[-1] = replace(parts[-1], chars=Span(parts[-1].chars.start, prompt_at))
    if prompt_at < len(text):
        parts.append(PromptPart(kind=PartKind.GENERATION_PROMPT, chars=Span(prompt_at, len(text))))
    tools = _tools_at(request.tools, text, seams, prompt_at)
    return (*parts, PromptPart(kind=PartKind.TOOLS, chars=tools)) if tools is not None else tuple(parts)


def words_at(message: Message, text: str, seams: Sequence[Seam], within: Span) -> Span | None:
    """From the first to the last word of the message, or None if nothing of it is found in these characters.

    Reasoning stands before the content, or was stripped. Then the same words may be the answer's own, or stand in a
    later message.
    """
    said, reasoning = _words(message), str(message.get("reasoning_content") or "").strip()
    found = _found(said, text, within)
    if reasoning == "":
        return found
    stop = within.stop if found is None else min(within.stop, found.start + len(reasoning))
    char = text.find(reasoning, within.start, stop)
    if char < 0:
        return found
    thought = Span(char, char + len(reasoning))
    if found is None or thought.stop <= found.start:
        return Span(char, thought.stop if found is None else found.stop)
    # It begins as the answer does: it is there too if the answer follows it in the same message.
    ends = (seam.char for seam in seams[_first_from(seams, thought.stop) :] if seam.is_end)
    behind = _found(said, text, Span(thought.stop, max(thought.stop, min(within.stop, next(ends, within.stop)))))
    return found if behind is None else Span(char, behind.stop)


def _found(said: Sequence[str], text: str, within: Span) -> Span | None:
    found: list[Span] = []
    at = within.start
    for words in said:
        char = text.find(words, at, within.stop)
        if char >= 0:
            found.append(Span(char, char + len(words)))
            at = char + len(words)
    return Span(found[0].start, found[-1].stop) if found else None


def _words(message: Message) -> list[str]:
    """The words of the message after its reasoning, in the order in which templates write it; of an image its tag."""
    runs = text_runs(message.get("content"))
    said = [run if isinstance(run, str) else seen.tag if (seen := seen_part(run)) is not None else "" for run in runs]
    for function in map(function_in, calls_in(message)):
        said.append(str(function.get("name", "")))
        arguments = parsed_arguments(function.get("arguments"))
        values = cast(Mapping[str, Any], arguments).values() if isinstance(arguments, Mapping) else ()
        said += [value if isinstance(value, str) else json.dumps(value) for value in values]
    return [words for words in (said_words.strip() for said_words in said) if words != ""]


def _start(seams: Sequence[Seam], ended_at: int, words_at: int) -> int:
    """Where a message begins whose words begin at `words_at`, when those of the one before end at `ended_at`.

    That is behind the token that ends a message; where there is none, of several seams in between the first closes the
    message before and the second opens this one.
    """
    between = seams[_first_from(seams, ended_at) : _first_from(seams, words_at + 1)]
    behind_end = [seam.char for before, seam in pairwise(between) if before.is_end]
    if behind_end:
        return behind_end[0]
    return between[1].char if len(between) > 1 else ended_at


def _first_start(seams: Sequence[Seam], words_at: int, *, is_message: bool) -> int:
    """Where the first message begins: what a template writes before a chat without a system message is none."""
    num_before = _first_from(seams, words_at + 1)
    return seams[num_before - 1].char if is_message and num_before > 0 else 0


def _first_from(seams: Sequence[Seam], char: int) -> int:
    """The number of the first seam at or behind this character. O(log seams)."""
    return bisect_left(seams, char, key=lambda seam: seam.char)


def _tools_at(tools: Sequence[Mapping[str, Any]], text: str, seams: Sequence[Seam], stop: int) -> Span | None:
    """From the name of the first tool to the seam behind the name of the last one."""
    names = [json.dumps(str(cast(Mapping[str, Any], tool.get("function", tool)).get("name", ""))) for tool in tools]
    found = [char for char in (text.find(name, 0, stop) for name in names) if char >= 0]
    if not found:
        return None
    return Span(min(found), next((seam.char for seam in seams if seam.char > max(found)), stop))
