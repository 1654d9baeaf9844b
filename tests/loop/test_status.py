"""What the engine says of itself to other threads."""

from reprise.core.backend import Status
from reprise.core.events import Event, Finished
from tests.loop.driving import DrivenEngine
from tests.loop.restarts import words


def test_who_has_an_answer_and_finds_nothing_to_do_finds_it_counted() -> None:
    engine = DrivenEngine("llama")
    try:
        engine.run(words(1, 20))
        before = engine.loop.status()
        assert before.is_idle
        found: list[Status] = []

        def look(event: Event) -> None:
            if isinstance(event, Finished):
                found.append(engine.loop.status())

        engine.run(words(2, 20), on_event=look)
        after = engine.loop.status()
        assert after.is_idle and after.counts.num_prefilled == before.counts.num_prefilled + 20
        # On the engine's thread, before it has told anybody what it has counted.
        assert [each.is_idle for each in found] == [False]
    finally:
        engine.close()
