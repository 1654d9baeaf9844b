"""What takes longer to read than to compute is computed, by what was measured; and read again when that changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.core.outcome import Reason
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.disk.store import store
from reprise.disk.store.link import LinkSpeed
from reprise.loop import read_ahead
from tests.loop.driving import DrivenEngine
from tests.loop.restarts import Restarts, disk_of, words


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Restarts]:
    restarts = Restarts(tmp_path)
    yield restarts
    restarts.end()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[LinkSpeed]:
    """What the disks that are opened have measured, the latest last."""
    made: list[LinkSpeed] = []

    def make() -> LinkSpeed:
        made.append(LinkSpeed())
        return made[-1]

    monkeypatch.setattr(store, "LinkSpeed", make)
    return made


def seem(engine: DrivenEngine, link: LinkSpeed, *, nbytes: int, seconds: float, times: int = 60) -> None:
    """Have the disk look as if every record so far had taken this long."""

    def note(worker: object) -> None:
        for _ in range(times):
            link.note(nbytes, seconds)

    engine.ask(note)


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_what_is_slower_to_read_is_computed_and_says_so(
    start: Restarts, model: str, links: list[LinkSpeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MEASURED_EVERY_S", 3600.0)
    engine = start(model)
    prompt = words(1, 300)
    turn = [*prompt, *engine.run(prompt).tokens, 1, 2]
    engine = start(model)
    engine.run(words(2, 200))
    seem(engine, links[-1], nbytes=1000, seconds=3600.0)
    looked_up = engine.loop.lookup(Prompt(tokens=as_tokens(turn)), namespace="").result(120)
    assert (looked_up.resume_at, looked_up.num_loaded) == (0, 0)
    answer = engine.run(turn)
    outcome = answer.end.outcome
    assert answer.computed == len(turn) and outcome.num_loaded == 0
    assert outcome.reason is Reason.SLOWER_TO_READ and outcome.num_matched >= 300
    assert answer.tokens == engine.cold(turn)


def test_a_disk_that_is_fast_again_is_read_again(
    start: Restarts, links: list[LinkSpeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    prompts = [words(seed, 300) for seed in (1, 2)]
    turns = [[*prompt, *engine.run(prompt).tokens, 1, 2] for prompt in prompts]
    engine = start()
    engine.run(words(3, 200))
    seem(engine, links[-1], nbytes=1000, seconds=3600.0, times=3)
    monkeypatch.setattr(read_ahead, "MEASURED_EVERY_S", 0.0)
    assert engine.run(turns[0]).computed == len(turns[0])
    for _ in range(10_000):
        if disk_of(engine).read_nbytes > 0:
            break
    else:
        raise AssertionError("no record is read for its time")
    seem(engine, links[-1], nbytes=1000, seconds=1e-6, times=300)
    assert engine.run(turns[1]).computed < 10
