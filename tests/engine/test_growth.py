"""What buffers are said to grow by is what they grow by at most: for each layer kind, alone and in batches."""

import random

import pytest

from reprise.core.tokens import as_tokens
from reprise.engine.models.load import load_model
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner
from tests.matrix import now_and_later
from tests.models.tiny import tiny_model
from tests.zoo.load import of_zoo

_LONGEST = 700
_CHUNKS = (1, 2, 7, 40, 300)


_TINY = ("llama", "gemma3_text", "qwen3_5", "mamba2", "qwen3", "gpt_oss")


@pytest.fixture(scope="module", params=now_and_later([*_TINY[:4], "llama4", "qwen3, kept beginning"], _TINY[4:]))
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param in _TINY:
        return Runner(load_model(str(tiny_model(request.param)), kv_bits=None, kv_group_size=64), can_batch=True)
    # Chunks and windows with a kept beginning run one sequence at a time.
    return Runner(of_zoo(request.param)(), can_batch=False)


def _fresh(runner: Runner, *, reserve: int = 0) -> LiveSequence:
    live = runner.begin()
    live.rows.reserve(reserve)
    return live


def _feed(runner: Runner, lives: list[LiveSequence], num: int) -> int:
    """Feed `num` tokens to each of `lives`; gives by how many bytes the buffers grew."""
    before = runner.live_nbytes
    runner.prefill(lives, [as_tokens([1] * num) for _ in lives])
    return runner.live_nbytes - before


def test_growth_is_never_underestimated(runner: Runner) -> None:
    rng = random.Random(1)
    lives: list[LiveSequence] = []
    for _ in range(25):
        if not lives or (len(lives) < 4 and rng.random() < 0.3):
            lives.append(_fresh(runner, reserve=rng.choice([0, 300, _LONGEST])))
        alike = [live for live in lives if (live.position == 0) == (lives[-1].position == 0)]
        group = rng.sample(alike, rng.randint(1, len(alike)) if runner.can_batch else 1)
        num = rng.choice(_CHUNKS)
        said = runner.growth(group, num)
        assert _feed(runner, group, num) <= said
        if len(lives) > 2 and rng.random() < 0.2:
            runner.stop(lives.pop(0))
    for live in lives:
        runner.stop(live)


def test_a_sequence_alone_grows_as_said_and_stays_below_its_footprint(runner: Runner) -> None:
    rng = random.Random(2)
    live = _fresh(runner, reserve=_LONGEST)
    while live.position < _LONGEST - 300:
        num = rng.choice(_CHUNKS)
        said = runner.growth([live], num)
        grew = _feed(runner, [live], num)
        assert grew == said or (num == 1 and grew <= said)
        assert live.rows.nbytes <= runner.most_live_nbytes(_LONGEST, chunk=300)
    runner.stop(live)
