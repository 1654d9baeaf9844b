"""Models that see beside others on one engine thread: an image is one model's own, and outlives its weights."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from reprise.core.backend import WeightsState
from reprise.engine.models.load import LoadedModel, load_model
from reprise.loop.engine_thread import EngineThread
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import DrivenEngine
from tests.loop.restarts import words
from tests.models.shared import loaded, loaded_anew
from tests.vision.chats import picture, seeing
from tests.vision.test_seen_by_the_loop import SeeingEngine, stable
from tests.vision.tiny import seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ONE, OTHER = picture(1), picture(2, 64, 128)
SEES, TOO, BLIND = "qwen3_5", "gemma3", "llama"


def with_weights_of_its_own(name: str) -> Callable[[], LoadedModel]:
    return partial(loaded_anew, name) if name == BLIND else lambda: load_model(str(seeing_model(name)))


@contextmanager
def taking_turns(*names: str) -> Generator[list[Any]]:
    """Models in room for the weights of any one of them."""
    weights = [(loaded(name) if name == BLIND else seeing(name)).nbytes for name in names]
    limits = ModelLimits(most_nbytes=max(weights), turn_s=10.0)
    thread = EngineThread(SharedMemory(max(weights) + (64 << 20)), limits=limits)
    models = [
        (DrivenEngine if name == BLIND else SeeingEngine)(
            name, load=with_weights_of_its_own(name), thread=thread, nbytes=nbytes
        )
        for name, nbytes in zip(names, weights, strict=True)
    ]
    try:
        yield models
    finally:
        for each in models:
            each.close()


def state_of(engine: DrivenEngine) -> WeightsState:
    return engine.loop.status().weights


def test_two_that_see_take_turns_and_each_encodes_an_image_once() -> None:
    expected = {}
    for name in (SEES, TOO):
        alone = SeeingEngine(name)
        expected[name] = [alone.cold_answer(prompt) for prompt in turns(alone)]
        alone.close()
    with taking_turns(SEES, TOO) as models:
        answers: dict[str, list[list[int]]] = {SEES: [], TOO: []}
        for turn in range(3):
            for name, model in zip((SEES, TOO), models, strict=True):
                running = model.answer(stable(turns(model)[turn]))
                answers[name].append(running.tokens)
                assert [state_of(each) is WeightsState.READY for each in models] == [each is model for each in models]
                # What was encoded before the weights went is not encoded again, by the model that did it.
                assert model.num_encoded == (1 if turn < 2 else 2)
                assert (running.end.outcome.num_reused > 0) == (turn > 0)
        assert answers == expected


def turns(engine: SeeingEngine) -> list[Any]:
    """A chat that goes on behind its first image, and gets a second."""
    said = ["A dog.", "Yes."]
    first, further, last = ["Look: ", ONE, "What is on it?"], "Which colour?", ["And ", OTHER, "?"]
    return [
        engine.chat(first),
        engine.chat(first, said[0], further),
        engine.chat(first, said[0], further, said[1], last),
    ]


@pytest.mark.matrix
def test_one_that_sees_and_one_that_does_not_answer_as_alone() -> None:
    alone, text = SeeingEngine(SEES), list(words(7, 120))
    expected = [alone.cold_answer(prompt) for prompt in turns(alone)]
    alone.close()
    blind = DrivenEngine(BLIND)
    said = blind.run(text).tokens
    blind.close()
    with taking_turns(SEES, BLIND) as (sees, other):
        for turn in range(3):
            assert sees.answer(stable(turns(sees)[turn])).tokens == expected[turn]
            assert other.submit(text).wait().tokens == said
        assert sees.num_encoded == 2
        assert other.submit(text).wait().computed == 0
