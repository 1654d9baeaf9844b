"""What a request held is given back when it ends, and not when Python happens to look for circles."""

import gc
from collections.abc import Iterator

import pytest

from reprise.core.events import FinishReason
from tests.holding import active_memory, settled_memory
from tests.loop.driving import DrivenEngine
from tests.loop.test_reuse import words


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5", "mamba2"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param)
    gc.collect()
    gc.disable()
    yield engine
    gc.enable()
    engine.close()


def unaccounted(engine: DrivenEngine, before: int) -> int:
    """Bytes that MLX holds beside those in the books, when nobody protects anything any more."""
    assert engine.num_leases() == 0
    held = engine.loop.status().held
    return (
        engine.ask(lambda worker: settled_memory()) - before - held.kv_nbytes - held.snapshot_nbytes - held.live_nbytes
    )


def test_memory_is_what_the_books_say_after_every_way_to_end(engine: DrivenEngine) -> None:
    # The allocator's rounding, a few kilobytes for each array.
    before = engine.ask(lambda worker: active_memory())
    rounding = 150_000
    engine.run(words(700, 300))
    assert unaccounted(engine, before) <= rounding
    together = [engine.submit(words(701 + i, 300 + i), num=10 + 7 * i) for i in range(4)]
    for running in together:
        running.wait()
    assert unaccounted(engine, before) <= rounding
    seen: list[int] = []
    engine.run(words(710, 300), num=40, watch=lambda token: seen.append(token) or len(seen) == 9)
    assert unaccounted(engine, before) <= rounding
    gone = engine.submit(words(711, 300), num=500, cancel_when=lambda gone: len(gone.tokens) == 5)
    assert gone.wait().end.reason is FinishReason.CANCELLED
    assert unaccounted(engine, before) <= rounding
    engine.loop.clear()
    assert unaccounted(engine, before) <= rounding


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_an_engine_that_is_closed_leaves_nothing(architecture: str) -> None:
    # The first leaves what is made once and stays, such as compiled functions.
    left = [left_by_an_engine(architecture) for _ in range(2)]
    assert left[1] < 10_000


def left_by_an_engine(architecture: str) -> int:
    """What MLX holds more once an engine has come, worked and gone."""
    before = active_memory()
    gc.disable()
    try:
        engine = DrivenEngine(architecture, shares_from=64)
        engine.run(words(720, 300))
        engine.close()
        del engine
        return settled_memory() - before
    finally:
        gc.enable()
