"""The values of a call's arguments: where they end in a text, and what they say, in each language that models write.

Pure functions of text; the reader (`call_reader`) says where a value begins and waits for more of it.
"""

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from reprise.chat.call_format import KeyedArguments
from reprise.chat.calls.tool_types import read_json, schema_of_part, typed, types_of


class NotACall(Exception):
    """The text is not of the format."""


_JSON_CHARS = frozenset(" \t\r\n,:.+-0123456789aeflnrstuE")
"""Those of values, outside of strings and brackets."""
UNREAD = object()


class JsonScan:
    """Where a JSON object ends. It does not say whether the text is JSON."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_over = False
        self._has_content = False

    @property
    def is_sure(self) -> bool:
        """Whether it begins as a JSON object does."""
        return self._has_content and not self._is_escaped

    def take(self, char: str) -> str:
        """The character as it stands in JSON."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
            elif char < " " or self._spell(char) != char:
                return inside_string(self._spell(char))
            return char
        if char == '"':
            self._is_string = self._has_content = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._has_content = True
            self.is_over = self._depth == 0
        elif (self._depth > 0 and not self._has_content and not char.isspace()) or char not in _JSON_CHARS:
            raise NotACall
        return char


def end_of(text: str, at: int, ending: str, again: str) -> int:
    """Where the ending stands that closes what is open at `at`; -1 if it does not. O(text)."""
    depth = 1
    while (found := text.find(ending, at)) >= 0 and again:
        depth += text.count(again, at, found) - 1
        if depth == 0:
            break
        at = found + len(ending)
    return found


def read_nested(text: str, keyed: KeyedArguments, schema: dict[str, Any], *, spell: Callable[[str], str]) -> Any:
    """A value whose parts are written as arguments are; its schema has the definitions that it refers to.

    Raises NotACall.
    """
    kinds, body = types_of(schema), text.strip()
    if kinds == frozenset(("string",)):
        return spell(text)
    parts: list[tuple[str, str]] = []
    at = 0
    while body.startswith(keyed.key_opening.strip(), at):
        at += len(keyed.key_opening.strip())
        key_end = body.find(keyed.value_opening, at)
        key = body[at:key_end]
        start = key_end + len(keyed.value_opening)
        ending = keyed.ending(key)
        stop = end_of(body, start, ending, keyed.key_opening + key + keyed.value_opening)
        if key_end < 0 or key == "" or stop < 0:
            raise NotACall
        parts.append((spell(key), body[start:stop]))
        at = _after_space(f"{body}.", stop + len(ending))
    if at < len(body) and parts:
        raise NotACall
    is_list = "object" not in kinds if "array" in kinds else not kinds
    if parts and is_list and all(key == keyed.item for key, _ in parts):
        return [read_nested(part, keyed, schema_of_part(schema, None), spell=spell) for _, part in parts]
    if parts:
        return {key: read_nested(part, keyed, schema_of_part(schema, key), spell=spell) for key, part in parts}
    if body == "" and kinds in (frozenset(("object",)), frozenset(("array",))):
        return {} if "object" in kinds else []
    return typed(spell(body), schema)


def read_native(text: str, *, quote: str) -> Any:
    """A value whose objects have bare keys and whose text stands between `quote`s; `UNREAD` if it is none."""
    parts = text.split(quote) if quote else [text]
    strings = parts[1::2]
    if len(parts) % 2 == 0:
        return UNREAD
    source = "".join(part if i % 2 == 0 else f"\0{i // 2}\0" for i, part in enumerate(parts))
    try:
        value, at = _native_at(source, 0, strings)
    except (ValueError, IndexError, RecursionError):
        return UNREAD
    return value if source[at:].strip() == "" else UNREAD


def _native_at(source: str, at: int, strings: Sequence[str]) -> tuple[Any, int]:
    at = _after_space(source, at)
    char = source[at]
    if char == "{":
        made: dict[str, Any] = {}
        at = _after_space(source, at + 1)
        while source[at] != "}":
            colon = source.index(":", at)
            key = source[at:colon].strip().strip("\"'")
            key = strings[int(key[1:-1])] if key.startswith("\0") else key
            made[key], at = _native_at(source, colon + 1, strings)
            at = _after_comma(source, at, "}")
        return made, at + 1
    if char == "[":
        items: list[Any] = []
        at = _after_space(source, at + 1)
        while source[at] != "]":
            item, at = _native_at(source, at, strings)
            items.append(item)
            at = _after_comma(source, at, "]")
        return items, at + 1
    end = at
    while end < len(source) and source[end] not in ",]}":
        end += 1
    word = source[at:end].strip()
    if word.startswith("\0") and word.endswith("\0"):
        return strings[int(word[1:-1])], end
    value = read_literal(word)
    if value is UNREAD:
        raise ValueError(word)
    return value, end


def _after_space(source: str, at: int) -> int:
    while source[at].isspace():
        at += 1
    return at


def _after_comma(source: str, at: int, closing: str) -> int:
    at = _after_space(source, at)
    if source[at] == ",":
        return _after_space(source, at + 1)
    if source[at] != closing:
        raise ValueError(source)
    return at


class _JsonWords(ast.NodeTransformer):
    """JSON's words in Python's syntax: templates write either."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words: dict[str, Any] = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words[node.id]), node) if node.id in words else node


def read_literal(text: str) -> Any:
    """A value in JSON or in Python's syntax, or `UNREAD`."""
    value = json_or_none(text)
    if value is not None or text.strip() == "null":
        return value
    try:
        tree = _JsonWords().visit(ast.parse(text.strip(), mode="eval"))
        value = ast.literal_eval(tree.body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return UNREAD
    return value


def json_or_none(text: str) -> Any:
    """JSON, or None."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return None


def spelled(value: Any, spell: Callable[[str], str]) -> Any:
    """The value with its special tokens written out."""
    match value:
        case str():
            return spell(value)
        case list():
            return [spelled(item, spell) for item in cast("list[Any]", value)]
        case dict():
            return {spell(key): spelled(item, spell) for key, item in cast("dict[str, Any]", value).items()}
        case _:
            return value


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
