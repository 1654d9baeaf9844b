"""The format of tool calls that a template asks for in words, where it writes none itself.

Such a template describes calls to the model beside the tools: by an example with placeholders, as in
`<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>`, or by a special token alone.
"""

import re
from collections.abc import Collection, Sequence

from reprise.chat.call_format import CallFormat, known_formats
from reprise.chat.scan import common_length

_EXAMPLE = re.compile(
    r"""\{\s*"(?:name|tool_name|function)"\s*:\s*(?P<name>[^,{}\n]{1,80}?)(?P<middle>\s*,\s*"(?:arguments|parameters)"\s*:\s*)"""
    r"""(?P<arguments>[^{}]{1,200}?|\{[^{}]*\})(?P<tail>\s*\})"""
)
_IN_TAGS = re.compile(
    r"\bjson object with (?:the )?function name and arguments within <(?P<tag>[\w:.-]+)></(?P=tag)> XML tags", re.I
)
_IN_JSON = '{"name": <function-name>, "arguments": <args-json-object>}'
_TAG = re.compile(r"<(?P<name>[\w:.-]+)>\s*$")
_LIST = re.compile(r"(?P<start>[\w<>|\[\]/:-]*[\w>|\]:])?(?P<opening>\s*\[\s*)$")
_CALL_TOKEN = re.compile(r"^<\|tool_?calls?\|>$")


def stated_format(shown: str, plain: str, *, splitters: Sequence[str], names: Collection[str]) -> CallFormat | None:
    """The format in a prompt with tools (of these `names`) that is not in the same prompt without; None if none is.

    `splitters` are the special tokens. O(length).
    """
    stated = _added(shown, plain)
    for example in _EXAMPLE.finditer(stated):
        # The tools themselves are shown in much the same way.
        if not any(name in example["name"] for name in names):
            found = _around(example, stated)
            if found is not None:
                return found
    described = _IN_TAGS.search(stated)
    if described is not None:
        tag = described["tag"]
        shape = f"<{tag}>\n{_IN_JSON}\n</{tag}>"
        example = _EXAMPLE.search(shape)
        assert example is not None, shape
        return _around(example, shape)
    named = [text for text in splitters if _CALL_TOKEN.search(text) and text in shown and text not in plain]
    # Only the token is named: models with it write a list of calls behind it.
    return known_formats(named[0], "")[-1] if len(named) == 1 else None


def _added(shown: str, plain: str) -> str:
    start = common_length(shown, plain)
    stop = common_length(shown[start:][::-1], plain[start:][::-1])
    return shown[start : len(shown) - stop]


def _around(example: re.Match[str], stated: str) -> CallFormat | None:
    """The format of calls that look like the example, by the markup around it."""
    before, after = stated[: example.start()], stated[example.end() :]
    lead = example[0][: example.start("name") - example.start()]
    tag = _TAG.search(before)
    if tag is not None:
        end = f"</{tag['name']}>"
        space = after[: len(after) - len(after.lstrip())]
        if not after.startswith(end, len(space)):
            return None
        opening = before[tag.end("name") + 1 :]
        return _format(f"<{tag['name']}>", "", opening + lead, example, tail=space, between="\n", ending="", end=end)
    listed = _LIST.search(before)
    if listed is None or not listed["start"] or "]" not in after:
        return None
    return _format(listed["start"] + "[", "", lead, example, tail="", between=", ", ending="]", end="")


def _format(
    start: str, opening: str, head: str, example: re.Match[str], *, tail: str, between: str, ending: str, end: str
) -> CallFormat:
    return CallFormat(
        start=start,
        opening=opening,
        head=head + '"',
        middle='"' + example["middle"],
        arguments=None,
        tail=example["tail"] + tail,
        between=between,
        ending=ending,
        end=end,
        has_own_section=end != "",
    )
