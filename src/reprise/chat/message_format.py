"""The forms in which templates want messages, and ids of tool calls: what one template takes, another refuses.

Some templates insist on ids of letters and digits and a fixed length, and refuse the chat otherwise. The id that a
template gets is a hash of the client's, so that it stays the same from turn to turn and the prefix with it.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reprise.chat.request import Message

REASONING = "reasoning_content"
"""The key of an assistant message's reasoning in a request, and in most templates."""

THINKING_PART = "content"
"""For templates that look for it in a part of the content, as Mistral's do."""

REASONING_KEYS = (REASONING, "reasoning", "thinking", THINKING_PART)
"""The keys under which templates look for it, as far as any are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How messages are written for a template.

    The API gives tool arguments as text, most templates want them as a mapping, some as text after all. Some templates
    read `content` from a message that has none: it is empty text if `fills_content`, and None if `has_null_content`.
    `joins_parts`: content that is a list of text parts becomes one text.
    `reasoning_as`: the key under which the template looks for reasoning. `joins_reasoning`: content before a tool
    call becomes part of the reasoning, for templates that refuse to have both. `id_length`: ids of tool calls are so
    many letters and digits; None: they are as the client gave them.
    """

    has_text_arguments: bool = False
    fills_content: bool = False
    has_null_content: bool = False
    joins_parts: bool = False
    reasoning_as: str = REASONING
    joins_reasoning: bool = False
    id_length: int | None = None


def forms(
    messages: Sequence[Message], *, takes_parts: bool, reasoning_as: str = REASONING, id_length: int | None = None
) -> tuple[Form, ...]:
    """The forms worth trying for these messages, the usual one first. Forms that would write the same are left out."""
    joins = not takes_parts
    argument_forms = (False, True) if any(m.get("tool_calls") is not None for m in messages) else (False,)
    lacks_content = any(m.get("content") is None for m in messages)
    content_forms = ("absent", "null", "empty") if lacks_content else ("absent",)
    reasoning_forms = (False, True) if any(_thinks_aloud(m) for m in messages) else (False,)
    return tuple(
        Form(
            has_text_arguments=as_text,
            fills_content=content == "empty",
            has_null_content=content == "null",
            joins_parts=joins,
            reasoning_as=reasoning_as,
            joins_reasoning=joins_reasoning,
            id_length=id_length,
        )
        for joins_reasoning in reasoning_forms
        for as_text in argument_forms
        for content in content_forms
    )


def written(messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
    """The messages in this form; keys without a value are left out, as templates expect."""
    ids: Mapping[str, str] = {} if form.id_length is None else shortened_ids(messages, form.id_length)
    return [_written_message(message, form, ids) for message in messages]


def calls_in(message: Message) -> list[Mapping[str, Any]]:
    """The tool calls of a message, as far as they are objects."""
    calls = cast(Sequence[Any], message.get("tool_calls") or ())
    return [cast(Mapping[str, Any], call) for call in calls if isinstance(call, Mapping)]


def function_in(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name and the arguments of a tool call, as far as it has them."""
    function = call.get("function")
    return cast(Mapping[str, Any], function) if isinstance(function, Mapping) else {}


def parsed_arguments(arguments: Any) -> Any:
    """The mapping that a call's arguments are. No arguments are an empty one; what is no JSON object is text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        is_mapping = isinstance(arguments, Mapping)
        return cast(Any, arguments) if is_mapping else json.dumps(arguments, ensure_ascii=False, default=str)
    if arguments.strip() == "":
        return {}
    value = _json(arguments)
    # Some clients write the text of the arguments as JSON once more.
    inner = _json(value) if isinstance(value, str) else value
    return cast(Any, inner) if isinstance(inner, dict) else arguments


def unquoted_arguments(arguments: str) -> str:
    """The text that is parsed: some clients write it as a JSON string once more. Makes no list and no object."""
    value = _json(arguments) if arguments.lstrip().startswith('"') else None
    return value if isinstance(value, str) else arguments


def text_runs(content: Any) -> list[str | Mapping[str, Any]]:
    """The text of content in any form, cut at the parts that are no text; these stand between."""
    runs: list[str | Mapping[str, Any]] = []
    for part in cast(list[Any], content) if isinstance(content, list) else [content]:
        text = _part_text(part)
        if text is None and isinstance(part, Mapping):
            runs.append(cast(Mapping[str, Any], part))
        elif text is not None and runs and isinstance(runs[-1], str):
            runs[-1] += text
        elif text is not None:
            runs.append(text)
    return runs


def content_of(runs: Sequence[str | Mapping[str, Any]]) -> str | list[Any]:
    """Content with these texts and other parts: one text where there is nothing else."""
    if all(isinstance(run, str) for run in runs):
        return "".join(cast(Sequence[str], runs))
    return [{"type": "text", "text": run} if isinstance(run, str) else run for run in runs if run != ""]


def joined_lines(runs: Sequence[str | Mapping[str, Any]], joiner: str) -> str | list[Any]:
    """Content with these texts and other parts; between two texts that follow each other stands the joiner."""
    joined: list[str | Mapping[str, Any]] = []
    for run in runs:
        if isinstance(run, str) and joined and isinstance(joined[-1], str):
            joined[-1] += joiner + run
        else:
            joined.append(run)
    return content_of(joined)


def content_up_to(content: Any, *, num_chars: int, num_images: int) -> list[str | Mapping[str, Any]]:
    """The runs of content before the place after `num_chars` characters and `num_images` other parts."""
    begun: list[str | Mapping[str, Any]] = []
    for run in text_runs(content):
        if isinstance(run, str):
            begun.append(run[:num_chars])
            num_chars -= len(begun[-1])
            if len(begun[-1]) < len(run):
                break
        elif num_images > 0:
            begun.append(run)
            num_images -= 1
        else:
            break
    return begun


def is_text_only(content: Any) -> bool:
    """Whether content is text, nothing, or parts that all are text."""
    return not isinstance(content, list) or all(_part_text(part) is not None for part in cast(list[Any], content))


def joined_text(content: Any) -> str:
    """The text of content in any form; parts that are no text count as nothing."""
    if isinstance(content, list):
        return "".join(_part_text(part) or "" for part in cast(list[Any], content))
    return content if isinstance(content, str) else ""


def _json(text: str) -> object:
    """The JSON value of the text; None where it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = cast(Mapping[str, Any], part).get("text")
        return text if isinstance(text, str) else None
    return None


def _thinks_aloud(message: Message) -> bool:
    """Whether a message has a tool call, reasoning and words."""
    has_both = joined_text(message.get(REASONING)) != "" and joined_text(message.get("content")) != ""
    return has_both and message.get("tool_calls") is not None


def _written_message(message: Message, form: Form, ids: Mapping[str, str]) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None}
    if form.joins_reasoning and _thinks_aloud(message):
        out[REASONING] = f"{message[REASONING]}\n\n{joined_text(out.pop('content'))}"
    if REASONING in out and form.reasoning_as == THINKING_PART:
        out["content"] = _with_thinking_part(out.pop(REASONING), out.get("content"))
    elif REASONING in out:
        out[form.reasoning_as] = out.pop(REASONING)
    content = out.get("content")
    if isinstance(content, list):
        out["content"] = content = [_written_part(part) for part in cast(list[Any], content)]
    if form.joins_parts and isinstance(content, list) and form.reasoning_as != THINKING_PART:
        out["content"] = joined_text(cast(Any, content))
    if form.fills_content or form.has_null_content:
        out.setdefault("content", "" if form.fills_content else None)
    calls = out.get("tool_calls")
    if calls is not None:
        out["tool_calls"] = [_written_call(call, form, ids) for call in calls]
    if "tool_call_id" in out:
        out["tool_call_id"] = ids.get(out["tool_call_id"], out["tool_call_id"])
    return out


def _written_part(part: Any) -> Any:
    """Of an image a template gets that it is one."""
    is_image = isinstance(part, Mapping) and cast(Mapping[str, Any], part).get("type") == "image"
    return {"type": "image"} if is_image else cast(Any, part)


def _with_thinking_part(thought: Any, content: Any) -> list[Any]:
    words = joined_text(content)
    return [{"type": "thinking", "thinking": thought}, *([{"type": "text", "text": words}] if words else [])]


def _written_call(call: Any, form: Form, ids: Mapping[str, str]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(cast(Any, call).get("function"), Mapping):
        return cast(Any, call)
    whole = cast(Mapping[str, Any], call)
    function = cast(Mapping[str, Any], whole["function"])
    arguments = parsed_arguments(function.get("arguments"))
    if form.has_text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call_id = {"id": ids.get(whole["id"], whole["id"])} if "id" in whole else {}
    return {**whole, **call_id, "function": {**function, "arguments": arguments}}


_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase

USUAL_IDS = (
    "call_9f8e7d6c5b4a39281706f5e4",
    "toolu_01A09q90qw90lq917835lq9z",
    "chatcmpl-tool-5f2b7c1e8d9a4b6c8e0f1a2b3c4d5e6f",
    "0f1d8f5e-6a0c-4a6b-9d51-7f1c2b3a4d5e",
)
"""Ids as OpenAI, Anthropic, vLLM and many others make them."""

ID_LENGTHS = (9, *(length for length in range(1, 41) if length != 9))
"""Lengths that a template may insist on, the one that is known first."""


def shortened_id(given: str, length: int, *, attempt: int = 0) -> str:
    """An id of `length` letters and digits that stands for `given`. Another attempt gives another one."""
    digest = hashlib.blake2b(f"{attempt}:{given}".encode(errors="replace"), digest_size=40).digest()
    number = int.from_bytes(digest)
    out = ""
    while len(out) < length:
        number, digit = divmod(number, len(_DIGITS))
        out += _DIGITS[digit]
    return out


def shortened_ids(messages: Sequence[Message], length: int) -> Mapping[str, str]:
    """For each id in these messages the one of `length` letters and digits that stands for it.

    An id that has the form already stays as it is. Each is settled where it first appears, so later messages
    never change it, and no two ids become one. O(messages).
    """
    out: dict[str, str] = {}
    taken: set[str] = set()
    for given in _ids(messages):
        if given in out:
            continue
        made, attempt = given, 0
        while not _is_of(made, length) or made in taken:
            made, attempt = shortened_id(given, length, attempt=attempt), attempt + 1
        out[given] = made
        taken.add(made)
    return out


def _is_of(text: str, length: int) -> bool:
    return len(text) == length and text.isascii() and text.isalnum()


def _ids(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for call in calls_in(message):
            if isinstance(given := call.get("id"), str):
                yield given
        if isinstance(given := message.get("tool_call_id"), str):
            yield given
