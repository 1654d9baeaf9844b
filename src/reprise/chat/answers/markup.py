"""The markup of a model's answers as a table: which marker leads from which part of an answer to which.

A marker that is a special token is found by its token, so that the same letters written out by the model are text.
For this every special token that stands in a marker becomes one character, its *atom*. Atoms are lone surrogates,
which no decoded text can contain, so that a marker of special tokens and letters is still a plain string.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reprise.chat.call_format import CallFormat
from reprise.chat.text_model import TextModel

NORMAL, REASONING, TOOL, HEADER = "normal", "reasoning", "tool", "header"
TOOL_IN_REASONING = "tool in reasoning"
_FIRST_ATOM = 0xD800

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""The special tokens of the channel markup of gpt-oss."""


class Channel(StrEnum):
    """What the text of a state is to a user."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    HEADER = "header"
    """Between two parts; no text of the answer."""


_PARTS = {
    NORMAL: Channel.CONTENT,
    REASONING: Channel.REASONING,
    TOOL: Channel.CALL,
    TOOL_IN_REASONING: Channel.CALL,
}


def part_of(state: str) -> Channel:
    """The channel of text in this state. A state that the table lacks is a header."""
    return _PARTS.get(state, Channel.HEADER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`marker` (with atoms) leads to the state `to`, or to the one that the header before it names (None).

    The marker is no text, unless `is_kept`.
    """

    marker: str
    to: str | None
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """The table: state → edges. `atoms` by token, `spellings` from an atom's code point to its text.

    `header_starts` are the beginnings of an answer that begins with a header; another beginning is content.
    """

    edges: Mapping[str, tuple[Edge, ...]]
    initial: str
    atoms: Mapping[int, str]
    spellings: Mapping[int, str]
    header_starts: tuple[str, ...] = ()
    calls: CallFormat | None = None
    """The format of the calls, with atoms; None: a call is whatever stands between the tool markers."""
    needs_tool_end: bool = True
    """Whether a call that has no end is cut short."""
    begun: str = ""
    """What the prompt has written of the answer's first marker."""

    def spell(self, text: str) -> str:
        """The text with its atoms written out."""
        return text.translate(self.spellings)


def is_harmony(text_model: TextModel) -> bool:
    """Whether the model answers in channels as gpt-oss does."""
    return all(token in text_model.splitters for token in HARMONY)


def markup_of(text_model: TextModel, *, has_tools: bool, is_thinking_open: bool, is_content_open: bool) -> Markup:
    """The table of this model for one answer.

    Without `has_tools` tool markup is text. `is_thinking_open`: the prompt ends inside thinking; `is_content_open`: it
    ends inside content that the model continues.
    """
    if is_harmony(text_model):
        table, initial, needs_tool_end = _harmony_edges(), HEADER, False
    else:
        known = text_model.calls.format
        table = _tag_edges(text_model, has_tools=has_tools or (known is not None and known.words_name != ""))
        initial = text_model.initial_state or NORMAL
        needs_tool_end = _tool_markers(text_model)[1] != ""
    if is_content_open:
        initial = NORMAL
    elif is_thinking_open:
        initial = REASONING

    starts = ("to=", "<|channel|>", "<|start|>", *(edge.marker for edge in table.get(initial, ())))
    form = None if is_harmony(text_model) else text_model.calls.format
    is_addressed = form is not None and form.words_name != ""
    calls = form if has_tools or is_addressed else None
    texts = {edge.marker for edges in table.values() for edge in edges} | set(starts)
    texts |= set() if calls is None else set(calls.texts())
    tokens = _atomic_tokens(text_model, texts)
    atoms = {text: chr(_FIRST_ATOM + i) for i, text in enumerate(sorted(tokens))}
    return Markup(
        edges={
            state: tuple(replace(edge, marker=_to_atoms(edge.marker, atoms)) for edge in edges)
            for state, edges in table.items()
        },
        initial=initial,
        atoms={tokens[text]: atom for text, atom in atoms.items()},
        spellings={ord(atom): text for text, atom in atoms.items()},
        header_starts=tuple(_to_atoms(start, atoms) for start in starts),
        calls=None if calls is None else calls.mapped(lambda text: _to_atoms(text, atoms)),
        needs_tool_end=needs_tool_end,
        begun=form.start if form is not None and is_addressed and not (is_content_open or is_thinking_open) else "",
    )


def _tag_edges(text_model: TextModel, *, has_tools: bool) -> dict[str, list[Edge]]:
    """Tags, and the transitions of models that mlx-lm has a table for, as in its `make_text_state_machine`."""
    table: dict[str, list[Edge]] = {NORMAL: [], REASONING: []}
    if text_model.think_start and text_model.think_end:
        # A start inside thinking and an end outside of it are slips: the tag is dropped, the state stays.
        for state in (NORMAL, REASONING):
            table[state].append(Edge(marker=text_model.think_start, to=REASONING))
            table[state].append(Edge(marker=text_model.think_end, to=NORMAL))
    table[NORMAL] += [Edge(marker=marker, to=NORMAL) for marker in text_model.structural_markers]
    leads_to_tool = any(to == TOOL for edges in text_model.transitions.values() for _, to in edges)
    start, _ = _tool_markers(text_model)
    if has_tools and start:
        table |= _tool_edges(text_model)
        if not leads_to_tool:
            table[NORMAL].append(Edge(marker=start, to=TOOL))
        table[REASONING].append(Edge(marker=start, to=TOOL_IN_REASONING))
    for state, transitions in text_model.transitions.items():
        for marker, to in transitions:
            is_text = to == TOOL and not has_tools
            table.setdefault(state, []).append(Edge(marker=marker, to=NORMAL if is_text else to, is_kept=is_text))
    return table


def _tool_markers(text_model: TextModel) -> tuple[str | None, str | None]:
    """What calls begin and end with; calls that begin like any text have no marker."""
    form = text_model.calls.format
    if form is None:
        return text_model.tool_start, text_model.tool_end
    return (None, "") if form.is_bare else (form.start, form.end)


def _tool_edges(text_model: TextModel) -> dict[str, list[Edge]]:
    """How a call ends: with its end marker, and where there is none or it was forgotten, with the next start."""
    start, end = _tool_markers(text_model)
    assert start, "only for models with tool markup"
    form = text_model.calls.format
    is_plain = start[0].isalpha() or (form is not None and form.words_name != "")
    table: dict[str, list[Edge]] = {}
    for state, outside in ((TOOL, NORMAL), (TOOL_IN_REASONING, REASONING)):
        table[state] = [Edge(marker=end, to=outside)] if end else []
        # A start that is not a single token can stand in an argument; plain text that no call follows is text.
        if start in text_model.splitters or not (end or is_plain):
            table[state].append(Edge(marker=start, to=state))
    return table


def _harmony_edges() -> dict[str, list[Edge]]:
    ends = [Edge(marker=marker, to=HEADER) for marker in ("<|end|>", "<|call|>", "<|return|>", "<|start|>")]
    # A message whose end was forgotten ends where the next header begins.
    body = [*ends, Edge(marker="<|channel|>", to=HEADER, is_kept=True)]
    return {
        HEADER: [*ends, Edge(marker="<|message|>", to=None)],
        NORMAL: body,
        REASONING: body,
        TOOL: body,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The content of a channel header: the state of its message, and the function that it calls."""

    state: str
    function: str | None = None


def read_header(header: str, *, tool_names: Sequence[str]) -> Header:
    """The meaning of a harmony header, spelled out: `<|channel|>commentary to=functions.x <|constrain|>json`.

    A recipient that is neither one of `functions` nor a tool of the request is none.
    """
    channel = re.search(r"<\|channel\|>\s*(\w+)", header)
    recipient = re.search(r"\bto=([^\s<]+)", header)
    if recipient is not None and len(tool_names) > 0:
        name = recipient[1].removeprefix("functions.")
        if name and (name != recipient[1] or name in tool_names):
            return Header(state=TOOL, function=name)
    is_analysis = channel is not None and channel[1] == "analysis"
    return Header(state=REASONING if is_analysis else NORMAL)


def _atomic_tokens(text_model: TextModel, markers: set[str]) -> dict[str, int]:
    """The special tokens that stand in a marker, by text.

    A word that is a single token is no markup where it stands in a marker: with others around it, it may be
    written with other tokens.
    """
    # One search for each token: a model may have a thousand of them, and this is done for each answer.
    joined = "\0".join(markers)
    tokens = {
        text: token
        for text, token in text_model.splitters.items()
        if text in markers or (not text.isalnum() and text in joined)
    }
    for text, ids in (
        (text_model.think_start, text_model.think_start_tokens),
        (text_model.think_end, text_model.think_end_tokens),
    ):
        if text and len(ids) == 1:
            tokens[text] = ids[0]
    return {text: token for text, token in tokens.items() if text}


def _to_atoms(marker: str, atoms: Mapping[str, str]) -> str:
    # The longest first, as a tokenizer splits.
    for text in sorted(atoms, key=len, reverse=True):
        marker = marker.replace(text, atoms[text])
    return marker
