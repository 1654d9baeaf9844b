"""Chats as the tokens that the model's chat template makes of them, with the places that it learns from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from tokenizers import Tokenizer

from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT, FactExchange

TOOLS = (
    "You may call these functions:\n<tools>\n" + json.dumps(LOOK_UP_TOOL) + "\n</tools>\nA call:\n<tool_call>\n"
    "<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>"
)

Thoughts = Literal["shown", "stripped", "off"]


def call_text(name: str) -> str:
    """The call of the tool."""
    return f"<tool_call>\n<function=look_up>\n<parameter=name>\n{name}\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """The tokens `[start, stop)` that answer an exchange."""

    start: int
    stop: int
    exchange: FactExchange
    is_final: bool
    """The answer that thinks: the last of the chat."""


@dataclass(slots=True)
class TrainingChat:
    """Tokens of a chat; `learns[i]` says whether the model learns to write token i."""

    tokens: list[int] = field(default_factory=list)
    learns: list[bool] = field(default_factory=list)
    spans: list[AnswerSpan] = field(default_factory=list)


class ChatRenderer:
    """Writes chats as the template does: thoughts only after the last question, unless `keeps_thoughts`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = lru_cache(1 << 16)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids))

    def chat(
        self,
        exchanges: Sequence[FactExchange],
        *,
        has_tool: bool,
        has_system: bool,
        keeps_thoughts: bool = False,
        thinks: bool = True,
    ) -> TrainingChat:
        """The chat up to the end of the last answer; with `thinks` false, thinking is off in that one."""
        out = TrainingChat()
        if has_tool or has_system:
            parts = [SYSTEM_PROMPT] * has_system + [TOOLS] * has_tool
            self._read(out, "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>")
        for exchange in exchanges[:-1]:
            self._exchange(out, exchange, "shown" if keeps_thoughts else "stripped")
        self._exchange(out, exchanges[-1], "shown" if thinks else "off", is_final=True)
        return out

    def _exchange(
        self, out: TrainingChat, exchange: FactExchange, thoughts: Thoughts, *, is_final: bool = False
    ) -> None:
        self._read(out, f"<|im_start|>user\n{exchange.user}<|im_end|>")
        # Without its thought the model answers these before it has named what it looks for, which is harder to learn.
        is_hard = exchange.kind in ("unknown", "look_up")
        learns = is_final or thoughts == "shown" or not is_hard
        if exchange.name is None:
            start = self._say(out, exchange.thought, exchange.answer, thoughts, learns=learns)
        else:
            start = self._say(out, exchange.thought, call_text(exchange.name), thoughts, learns=learns)
            self._read(out, f"<|im_start|>user\n<tool_response>\n{exchange.result}\n</tool_response><|im_end|>")
            self._say(out, exchange.answer, exchange.answer, thoughts, learns=True)
        out.spans.append(AnswerSpan(start, len(out.tokens), exchange, is_final))

    def _say(self, out: TrainingChat, thought: str, answer: str, thoughts: Thoughts, *, learns: bool) -> int:
        """Where what the model writes begins."""
        opening = {"shown": "<think>\n", "off": "<think>\n\n</think>\n\n", "stripped": ""}[thoughts]
        self._read(out, "<|im_start|>assistant\n" + opening)
        start = len(out.tokens)
        if thoughts == "shown":
            self._write(out, f"{thought}\n</think>\n\n", learns=True)
        self._write(out, f"{answer}<|im_end|>", learns=learns)
        return start

    def _read(self, out: TrainingChat, text: str) -> None:
        self._write(out, text, learns=False)

    def _write(self, out: TrainingChat, text: str, *, learns: bool) -> None:
        ids = self._encode(text)
        out.tokens += ids
        out.learns += [learns] * len(ids)
