"""A text model whose tokens are whatever pieces a test cuts a text into, for any markup."""

import codecs
import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reprise.chat.answer import Answer, ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.text_model import TextModel

EOS = "<|eos|>"


class Vocabulary:
    """Gives every piece of bytes a token, when it is first asked for; special tokens stand apart from equal text."""

    def __init__(self, specials: Sequence[str]) -> None:
        self.specials = {text: index for index, text in enumerate(specials)}
        self._pieces: list[bytes] = [text.encode() for text in specials]
        self._tokens: dict[bytes, int] = {}

    def token(self, piece: bytes) -> int:
        if piece not in self._tokens:
            self._tokens[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._tokens[piece]

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def split(self, text: str) -> list[str]:
        """The text cut at its special tokens, which stand alone."""
        if not self.specials:
            return [text]
        pattern = "|".join(re.escape(s) for s in sorted(self.specials, key=len, reverse=True))
        return [part for part in re.split(f"({pattern})", text) if part]

    def encode(self, text: str, cuts: Sequence[int] = (1,)) -> list[int]:
        """Tokens of the text: special tokens, and between them pieces of `cuts` bytes, in turn."""
        tokens: list[int] = []
        turn = 0
        for part in self.split(text):
            if part in self.specials:
                tokens.append(self.specials[part])
                continue
            rest = part.encode()
            while rest:
                size = cuts[turn % len(cuts)]
                turn += 1
                tokens.append(self.token(rest[:size]))
                rest = rest[size:]
        return tokens


class PieceDetokenizer:
    """Whole characters only; ends with replacements for what stays unfinished."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def add_token(self, token: int) -> None:
        self._text += self._decoder.decode(self.vocabulary.piece(token))

    def finalize(self) -> None:
        self._text += self._decoder.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        text, self._text = self._text, ""
        return text


def piece_model(specials: Sequence[str] = (), **fields: Any) -> TextModel:
    """A text model with these special tokens; `fields` as in TextModel."""
    vocabulary = Vocabulary([EOS, *specials])

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(vocabulary.piece(token) for token in tokens).decode(errors="replace")

    model = TextModel(
        encode=vocabulary.encode,
        decode=decode,
        render=None,
        detokenizer=lambda: PieceDetokenizer(vocabulary),
        splitters=vocabulary.specials,
        eos=frozenset({0}),
        **fields,
    )
    return replace(model, calls=learn_calls(model))


def thinking_fields(start: str = "<think>", end: str = "</think>") -> dict[str, Any]:
    return {"think_start": start, "think_end": end}


def tool_fields(parser: str) -> dict[str, Any]:
    """The tool markup of mlx-lm's parser of this name."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return {
        "tool_start": module.tool_call_start,
        "tool_end": module.tool_call_end,
        "parse_tool_call": module.parse_tool_call,
    }


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})


def counting_ids() -> Any:
    ids = iter(range(10**9))
    return lambda: f"call_{next(ids)}"


def read(
    model: TextModel, text: str, *, cuts: Sequence[int] = (1,), is_ended: bool = True, **facts: Any
) -> tuple[Answer, list[Delta], AnswerParser]:
    """The answer in this text and the deltas it came in; `is_ended`: the model ended it itself."""
    parser = AnswerParser(AnswerFormat(model, **facts), new_id=counting_ids())
    deltas: list[Delta] = []
    encode: Any = model.encode
    for token in encode(text, cuts):
        deltas += parser.feed(token)
    if is_ended:
        deltas += parser.feed(0, is_stop=True)
    deltas += parser.finish()
    answer = parser.answer
    told = replace(answer, tool_calls=tuple(replace(call, is_whole=True) for call in answer.tool_calls))
    assert joined(deltas) == told
    return parser.answer, deltas, parser


def joined(deltas: Sequence[Delta]) -> Answer:
    """The answer that a client puts together from the deltas."""
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls: list[ToolCall] = []
    for delta in deltas:
        if not isinstance(delta, ToolCallDelta):
            continue
        if delta.index == len(calls):
            assert delta.id is not None, "the first piece of a call has its id"
            assert delta.name is not None, "and its name"
            calls.append(ToolCall(id=delta.id, name=delta.name, arguments=delta.arguments))
        else:
            assert delta.index == len(calls) - 1, "one call after the other"
            last = calls[-1]
            calls[-1] = ToolCall(id=last.id, name=last.name, arguments=last.arguments + delta.arguments)
    return Answer(
        content=None if not content and calls else content, reasoning=reasoning or None, tool_calls=tuple(calls)
    )
