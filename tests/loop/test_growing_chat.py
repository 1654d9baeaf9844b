"""One chat that grows on a small budget: what it has left behind gives way to what its next turn needs."""

import pytest

from reprise.core.prompt import Boundary, BoundaryKind
from tests.loop.driving import DrivenEngine
from tests.loop.test_reuse import words

_TURNS = 14
_CHUNK = 128


def bytes_of(architecture: str, num_prompt: int) -> tuple[int, int]:
    """What a request with so many prompt tokens takes, and a resumable position."""
    engine = DrivenEngine(architecture, prefill_chunk=_CHUNK)
    try:
        return engine.ask(lambda worker: (worker.sequences.estimate(num_prompt), worker.runner.footprint.checkpoint))
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3_text", "mamba2"])
def test_each_turn_computes_what_is_new_whatever_the_chat_has_left_behind(architecture: str) -> None:
    needed, checkpoint = bytes_of(architecture, 300)
    engine = DrivenEngine(architecture, prefill_chunk=_CHUNK, cache_bytes=2 * needed + 5 * checkpoint)
    try:
        chat, computed = words(820, 60), []
        for turn in range(_TURNS):
            marks = [Boundary(40, BoundaryKind.SYSTEM), Boundary(len(chat) - 2, BoundaryKind.STABLE)]
            answer = engine.run(chat, num=4, boundaries=marks)
            computed.append(answer.computed)
            chat = [*chat, *answer.tokens, *words(821 + turn, 8)]
        # The last token of an answer is not fed, and eight are new.
        assert computed == [60, *[9] * (_TURNS - 1)]
        held = engine.loop.status().held
        assert held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes <= held.budget_nbytes
    finally:
        engine.close()
