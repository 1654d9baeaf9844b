"""Templates × chat shapes: prompts with their boundaries, and the tokens computed in each turn of a chat.

The goldens are for people to read. After a change that is meant, run this file with ``UPDATE_GOLDENS=1`` in the
environment and look at the difference.
"""

import os
from datetime import datetime
from pathlib import Path

import pytest

from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.chat.templates.rendered import Rendered
from reprise.core.errors import BadRequest
from tests.chat.replay import RenderedTurn, play
from tests.chat.shapes import CONVERSATION, PLAIN_CONVERSATION, SHAPES, WEATHER, system
from tests.chat.text_models import template_names, text_model
from tests.matrix import every_other

GOLDENS = Path(__file__).parent / "goldens"


def renderer(template: str) -> Renderer:
    return Renderer(text_model(template), clock=lambda: datetime(2026, 3, 1, 12))


def marked(rendered: Rendered, template: str) -> str:
    """The prompt's text with each boundary written where it is, as ⟦kind⟧."""
    decode = text_model(template).decode
    out, at = "", 0
    for boundary in rendered.prompt.boundaries:
        out += decode(rendered.prompt.tokens[at : boundary.position].tolist()) if boundary.position > at else ""
        out += f"⟦{boundary.kind}⟧"
        at = boundary.position
    return out + (decode(rendered.prompt.tokens[at:].tolist()) if at < len(rendered.prompt) else "")


def described(template: str, name: str, request: ChatRequest) -> str:
    try:
        rendered = renderer(template).render(request)
    except BadRequest as error:
        return f"##### {name}\nrefused: {error}\n"
    lines = [f"##### {name}: {len(rendered.prompt)} tokens"]
    lines += [f"note: {note}" for note in rendered.notes]
    lines += ["thinking is open"] if rendered.is_thinking_open else []
    lines += [f"{b.position:5} {b.kind}" for b in rendered.prompt.boundaries]
    return "\n".join([*lines, "-----", marked(rendered, template), ""])


def played(template: str) -> str:
    lines = ["##### a chat: tokens computed in each turn"]
    for title, settles, drops in (
        ("settle off", False, False),
        ("settle on", True, False),
        ("settle on, client drops thinking", True, True),
    ):
        request = ChatRequest(messages=(system(),), tools=(WEATHER,))
        try:
            turns = play(
                renderer(template),
                text_model(template),
                PLAIN_CONVERSATION if template == "alternates" else CONVERSATION,
                request=request,
                settles=settles,
                has_channels=template in ("channels", "thoughts_or_words"),
                drops_reasoning=drops,
            )
        except BadRequest as error:
            return "\n".join([*lines, f"refused: {error}", ""])
        lines += [f"{title}", "  prompt  oracle  computed  settled", *(_row(turn) for turn in turns)]
    return "\n".join([*lines, ""])


def _row(turn: RenderedTurn) -> str:
    return f"{turn.prompt:8}{turn.oracle:8}{turn.computed:10}{turn.settled:9}"


@pytest.mark.parametrize("template", every_other(template_names()))
def test_golden(template: str) -> None:
    actual = "\n".join([*(described(template, name, request) for name, request in SHAPES.items()), played(template)])
    path = GOLDENS / f"{template}.txt"
    if os.environ.get("UPDATE_GOLDENS") is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual)
    assert path.read_text() == actual
