"""What the cache's policy is told of a request."""

import pytest

from reprise.cache.node import subtree
from reprise.cache.policy import ExpectedSaving
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine


class ListeningPolicy(ExpectedSaving):
    """Writes down what it hears of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, float]] = []

    def answered(
        self, number: int, num_tokens: float, *, calls_tool: bool | None = None, at_s: float | None = None
    ) -> None:
        self.answers.append((number, num_tokens))
        assert at_s is not None, "silence is counted from there"
        super().answered(number, num_tokens, calls_tool=calls_tool, at_s=at_s)


def test_how_long_an_answer_was_and_where_the_next_turn_may_differ() -> None:
    heard = ListeningPolicy()

    def listen(worker: Worker) -> None:
        worker.cache.order.policy = heard

    def ends(worker: Worker) -> list[tuple[int, int | None]]:
        nodes = [node for root in worker.cache.tree.roots.values() for node in subtree(root)]
        return [
            (mark.position, mark.stable_at) for node in nodes for mark in node.checkpoints.values() if mark.stable_at
        ]

    engine = DrivenEngine("llama")
    try:
        engine.ask(listen)
        engine.run(
            list(range(100)), num=8, boundaries=[Boundary(40, BoundaryKind.STABLE), Boundary(90, BoundaryKind.STABLE)]
        )
        assert heard.answers == [(1, 8)]
        # The last token of an answer was sampled, but not fed.
        assert engine.ask(ends) == [(107, 90)]
    finally:
        engine.close()


@pytest.mark.parametrize(("architecture", "stays"), [("gemma3_text", True), ("llama", False)])
def test_how_far_apart_the_places_are_that_a_chat_falls_back_on(architecture: str, *, stays: bool) -> None:
    engine = DrivenEngine(architecture)
    try:
        assert (engine.ask(lambda worker: worker.cache.tree.sizes.fallback) > 0) is stays
    finally:
        engine.close()
