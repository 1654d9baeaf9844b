"""Long chats at random, and where their boundaries are when all of them is rendered and when the middle is left out."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from reprise.chat.messages.system_placement import Placement
from reprise.chat.rendering.abridged import AbridgedChat
from reprise.chat.rendering.boundaries import find_boundaries
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.piecewise_tokenizer import PieceTokenizer
from reprise.chat.templates.probe_turns import known_turns
from reprise.chat.templates.template import ChatTemplate
from reprise.chat.text_model import TextModel
from tests.chat.shapes import WEATHER, assistant, system, tool, user

ENDLESS = 10**9

_Found = tuple[object, str | None, str | None]
"""Boundaries with notes, the next turn and an edited chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    """Boundaries, and the texts of the next turn and of an edited chat: all rendered (`whole`), and abridged.

    `whole_chars`, `abridged_chars`: how many characters were rendered for boundaries and next turn."""

    whole: _Found
    abridged: _Found
    whole_chars: int
    abridged_chars: int


def long_chat(rng: random.Random) -> ChatRequest:
    """Of 20 to 60 messages: turns with or without thinking and tool loops, perhaps most of it one loop."""
    thinks, loops, has_system = rng.random() < 0.7, rng.random() < 0.6, rng.random() < 0.5
    messages: list[Message] = [system()] if has_system else []
    num = rng.randrange(20, 60)
    while len(messages) < num:
        messages.append(user(_words(rng)))
        for _ in range(rng.choice((0, 1, 3, 30)) if loops else 0):
            messages += [assistant(None, _thought(rng, thinks), city=_words(rng)), tool(_words(rng))]
        if len(messages) < num or rng.random() < 0.5:
            messages.append(assistant(_words(rng), _thought(rng, thinks)))
    if messages[-1]["role"] == "assistant":
        messages.append(user(_words(rng)))
    breakpoints = tuple(sorted(rng.sample(range(len(messages) + 1), 3)))
    return ChatRequest(messages=tuple(messages), tools=(WEATHER,) if loops else (), breakpoints=breakpoints)


def both_ways(model: TextModel, request: ChatRequest) -> BothWays:
    """Raises BadRequest where the template refuses the chat."""
    num_chars = 0

    def counted(render: Callable[..., str]) -> Callable[..., str]:
        def text(*given: Any, **options: Any) -> str:
            nonlocal num_chars
            made = render(*given, **options)
            num_chars += len(made)
            return made

        return text

    assert model.render is not None
    model = replace(model, render=counted(model.render))
    placement, tokenizer = Placement(ChatTemplate(model), model), PieceTokenizer(model)
    placed = placement.open(request, datetime(2026, 3, 1, 12))
    context, text = placed.context, placed.text
    prompt = tokenizer.tokenize(text)
    messages = context.request.messages
    edited = tuple({**m, "content": "Edited."} if n == len(messages) // 2 else m for n, m in enumerate(messages))
    found: list[_Found] = []
    chars: list[int] = []
    for least in (ENDLESS, 1, ENDLESS, 1):
        # The first two rounds are for what is learnt once of a template.
        num_chars = 0
        chat = AbridgedChat(placement, context, text, think_end=model.think_end, least=least)
        boundaries = find_boundaries(chat, context.request, tokenizer, prompt)
        next_turn = chat.try_text(known_turns(context.request, assistant("So."), 0))
        chars.append(num_chars)
        found.append((boundaries, next_turn, chat.try_text(edited)))
    return BothWays(whole=found[2], abridged=found[3], whole_chars=chars[2], abridged_chars=chars[3])


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(("heron", "harbour", "kettle", "Alps", "brass")) for _ in range(rng.randrange(1, 12)))


def _thought(rng: random.Random, thinks: bool) -> str | None:
    return _words(rng) if thinks and rng.random() < 0.8 else None
