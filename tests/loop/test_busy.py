"""A chat on a server that is never idle: its path is tidied all the same."""

import pytest

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.events import Sampled
from reprise.core.tokens import as_tokens
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.test_reuse import words
from tests.matrix import now_and_later

TURNS = 12


def num_pieces(engine: DrivenEngine, tokens: list[int]) -> int:
    """The most pieces of any layer kind on the path."""

    def count(cache: PrefixCache) -> int:
        nodes = cache.match(as_tokens(tokens)).walk.nodes
        return max(sum(len(node.segments.get(kind, ())) for node in nodes) for kind in cache.layout.kinds)

    return engine.ask(lambda worker: count(worker.cache))


@pytest.mark.parametrize("shares_from", now_and_later([50], [10**9]))
@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text"])
def test_turns_beside_a_long_answer_leave_few_pieces(model: str, shares_from: int) -> None:
    engine = DrivenEngine(model, shares_from=shares_from)
    try:
        engine.submit(words(900, 30), num=5000, namespace="other").wait_for(Sampled)
        prompt = words(901, 60)
        for turn in range(TURNS):
            prompt = [*prompt, *engine.run(prompt).tokens, *words(902 + turn, 10)]
        assert engine.loop.status().num_decoding == 1, "it is still answering"
        assert num_pieces(engine, prompt) <= 5, "some for each power of two turns"
    finally:
        engine.loop.close(now=True, timeout_s=PATIENCE_S)


def test_what_cannot_be_joined_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise MemoryError("unable to allocate")

    engine = DrivenEngine("llama")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "compact_path", fail)
            prompt = words(920, 60)
            first = engine.run(prompt)
            assert first.end.error is None
            beside = engine.submit(words(921, 40), num=30)
            assert engine.run([*prompt, *first.tokens, 1]).computed == 2
            assert beside.wait().end.error is None
    finally:
        engine.close()
