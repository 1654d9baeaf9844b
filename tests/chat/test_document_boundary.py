"""A long document at the head of a user message ends at a boundary of its own, whatever is asked about it."""

from typing import Any

import pytest

from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.core.prompt import BoundaryKind
from tests.chat.shapes import SHAPES, system
from tests.chat.text_models import text_model

DOCUMENT = "The weather was sunny in the morning, and in the evening it cleared up again.\n" * 10
TEMPLATE = "strips_thinking"


def branch_texts(content: Any) -> list[str]:
    """What stands before each branch boundary of a chat with this user message."""
    message = {"role": "user", "content": content}
    rendered = Renderer(text_model(TEMPLATE)).render(ChatRequest(messages=(system(), message)))
    positions = [b.position for b in rendered.prompt.boundaries if b.kind is BoundaryKind.BRANCH]
    return [text_model(TEMPLATE).decode(rendered.prompt.tokens[:position].tolist()) for position in positions]


@pytest.mark.parametrize("question", ["What is said?", "One line.\nAnd another."])
def test_it_ends_before_the_last_paragraph(question: str) -> None:
    (text,) = branch_texts(f"{DOCUMENT}\n{question}")
    assert text.endswith(f"{DOCUMENT}\n")


def test_it_ends_before_the_last_line_where_there_is_no_paragraph() -> None:
    (text,) = branch_texts(f"{DOCUMENT}What is said?")
    assert text.endswith(DOCUMENT)


def test_it_ends_before_the_last_part() -> None:
    parts = [{"type": "text", "text": DOCUMENT + " "}, {"type": "text", "text": "What is said?\n\nIn one word."}]
    (text,) = branch_texts(parts)
    assert text.rstrip().endswith("again.")


@pytest.mark.parametrize("content", ["A line.\n\nA question?", DOCUMENT.replace("\n", " "), "What?" * 200])
def test_what_is_short_or_in_one_piece_has_none(content: str) -> None:
    assert branch_texts(content) == []


def test_other_shapes_have_none() -> None:
    renderer = Renderer(text_model(TEMPLATE))
    for request in SHAPES.values():
        assert all(b.kind is not BoundaryKind.BRANCH for b in renderer.render(request).prompt.boundaries)


def test_questions_share_it_to_the_token() -> None:
    texts = {branch_texts(f"{DOCUMENT}\n{question}")[0] for question in ("What?", "Who?", "How many?", "1 or 2?")}
    assert len(texts) == 1
