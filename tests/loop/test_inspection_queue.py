"""Inspections take at most a hundredth of the engine thread's time, and nothing while nobody asks for one."""

from concurrent.futures import Future
from typing import Any

from reprise.core.events import Sampled
from reprise.loop.inspection_queue import InspectionQueue
from tests.loop.driving import PATIENCE_S, DrivenEngine


def test_an_inspection_waits_for_a_hundred_times_what_the_last_one_took_while_there_is_work() -> None:
    now_s, answered = [0.0], list[int]()
    queue = InspectionQueue(clock=lambda: now_s[0])

    def inspect(number: int) -> None:
        now_s[0] += 0.002
        answered.append(number)

    for number in range(4):
        queue.add(lambda number=number: inspect(number))
    queue.answer(has_work=True)
    assert answered == [0]
    now_s[0] = 0.199
    queue.answer(has_work=True)
    assert answered == [0]
    now_s[0] = 0.2
    queue.answer(has_work=True)
    assert answered == [0, 1]
    queue.answer(has_work=False)
    assert answered == [0, 1, 2, 3] and len(queue) == 0
    assert queue.num_answered == 4 and round(queue.spent_s, 9) == 0.008


def test_inspections_are_counted_and_hold_up_no_work_however_many_ask() -> None:
    engine = DrivenEngine("llama")
    try:
        engine.run([1, 2, 3], num=2)
        before = engine.loop.status()
        assert (before.num_inspections, before.inspection_s) == (0, 0.0) and before.busy_s > 0
        asked: list[Future[Any]] = []
        answered: list[int] = []

        def ask(event: object) -> None:
            # Several watchers at each token.
            if isinstance(event, Sampled):
                asked.extend(engine.loop.inspect() for _ in range(5))
                answered.append(engine.loop.status().num_inspections)

        engine.submit([1, 2, 3, 4], num=60, on_event=ask).wait()
        for inspection in asked:
            inspection.result(PATIENCE_S)
        # A hundredth of the time of sixty steps is less than one inspection in each.
        assert answered[-1] < 60
        status = engine.loop.status()
        assert status.num_inspections == len(asked) == 300
        assert 0 < status.inspection_s < status.busy_s
    finally:
        engine.close()
