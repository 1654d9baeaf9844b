"""One long stream and seven short ones: nobody pays for another's length."""

from collections.abc import Iterator, Sequence

import pytest

from reprise.core.events import Event, Sampled
from reprise.loop.requests import Decoding
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words

LONG = 1000
SHORT = 20
NUM_SHORT = 7
_TOKENS = 12


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param)
    yield engine
    engine.close()


class Watch:
    """Looks at the engine, on its thread, while all of the requests decode."""

    def __init__(self, engine: DrivenEngine, num: int) -> None:
        self._num = num
        self.nbytes: list[int] = []
        self.groups: list[tuple[int, ...]] = []
        self.worker: Worker = engine.ask(lambda worker: worker)

    def __call__(self, event: Event) -> None:
        decoding = [
            request
            for request in self.worker.requests.values()
            if isinstance(request.phase, Decoding) and request.phase.group is not None
        ]
        if isinstance(event, Sampled) and len(decoding) == self._num:
            live = sum(rows.nbytes for rows in {id(r): r for r in (t.live.rows for t in decoding if t.live)}.values())
            self.nbytes.append(live)
            self.groups.append(tuple(sorted(r.num_rows for r in {t.live.rows for t in decoding if t.live})))


def together(engine: DrivenEngine, prompts: Sequence[list[int]]) -> tuple[list[SubmittedJob], Watch]:
    """The first has a longer answer; when that has begun the others come, all at once."""
    watch = Watch(engine, len(prompts))
    later: list[SubmittedJob] = []

    def join(event: Event) -> None:
        if isinstance(event, Sampled) and not later:
            later.extend(engine.submit(prompt, num=_TOKENS, on_event=watch) for prompt in prompts[1:])

    first = engine.submit(prompts[0], num=_TOKENS * 8, on_event=join).wait()
    return [each.wait() for each in (first, *later)], watch


@pytest.mark.matrix
def test_a_long_stream_and_short_ones_take_the_bytes_that_each_takes_alone(engine: DrivenEngine) -> None:
    prompts = [words(600, LONG), *(words(601 + i, SHORT + i) for i in range(NUM_SHORT))]
    alone: list[int] = []
    for prompt in prompts:
        watch = Watch(engine, 1)
        engine.submit(prompt, num=_TOKENS, on_event=watch).wait()
        alone.append(max(watch.nbytes))
    cold = [engine.cold(prompt, num=_TOKENS) for prompt in prompts]
    running, watch = together(engine, prompts)
    assert [run.tokens[:_TOKENS] for run in running] == cold
    assert watch.nbytes, "all decoded at the same time"
    assert max(watch.nbytes) <= 1.1 * sum(alone)
    # Two passes: the long one's, and one for all short ones.
    assert watch.groups[-1] == (1, NUM_SHORT)
    engine.check()
