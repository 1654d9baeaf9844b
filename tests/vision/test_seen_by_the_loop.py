"""Images through the whole engine loop: each is encoded once, and answers are those of cold runs."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest

from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.vision.chats import Part, a_seeing_job, picture, prompt_of, seeing
from tests.vision.families import FAMILIES, FURTHER
from tests.vision.tiny import seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ONE, OTHER, THIRD = picture(1), picture(2, 64, 128), picture(3, 64, 64)
_names = itertools.count()


class SeeingEngine(DrivenEngine):
    """An engine loop on a tiny model that sees."""

    def __init__(self, family: str, **settings: object) -> None:
        self.loaded = seeing(family)
        super().__init__(seeing_model(family), load=partial(seeing, family), **settings)  # type: ignore[arg-type]

    def begin(self, prompt: Prompt, **more: object) -> SubmittedJob:
        running = SubmittedJob(a_seeing_job(prompt, **more))  # type: ignore[arg-type]
        self.loop.submit(running.job, running)
        return running

    def answer(self, prompt: Prompt, **more: object) -> SubmittedJob:
        running = self.begin(prompt, **more).wait()
        assert running.end.error is None, running.end.error
        self.ask(lambda worker: worker.check())
        return running

    def cold_answer(self, prompt: Prompt) -> list[int]:
        return self.answer(prompt, namespace=f"cold-{next(_names)}").tokens

    @property
    def num_encoded(self) -> int:
        return self.ask(lambda worker: worker.runner.features.num_encoded)

    def chat(self, *turns: list[Part] | str) -> Prompt:
        return prompt_of(self.loaded, *turns)

    def spoken(self, job: SubmittedJob) -> str:
        return self.loaded.text.decode(job.tokens)


@pytest.fixture(params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER)])
def engine(request: pytest.FixtureRequest) -> Iterator[SeeingEngine]:
    made = SeeingEngine(request.param)
    yield made
    made.close()


def stable(prompt: Prompt) -> Prompt:
    """With a boundary a little before the end, as a template's."""
    return Prompt(
        tokens=prompt.tokens, images=prompt.images, boundaries=(Boundary(len(prompt) - 5, BoundaryKind.STABLE),)
    )


def test_a_chat_that_gets_images_encodes_each_once_and_answers_as_cold(engine: SeeingEngine) -> None:
    turns: list[list[Part] | str] = [["Look: ", ONE, "What is on it?"]]
    for image in (None, OTHER, None, ONE):
        prompt = stable(engine.chat(*turns))
        warm = engine.answer(prompt)
        turns += [engine.spoken(warm), ["And this? ", image, "Say."] if image is not None else "Go on."]
    encoded = engine.num_encoded
    assert encoded == 2
    last = engine.chat(*turns)
    assert engine.answer(last).tokens == engine.cold_answer(last)
    assert engine.num_encoded == encoded, "what was encoded is kept"


def test_requests_with_other_images_decode_together_as_alone(engine: SeeingEngine) -> None:
    prompts = [engine.chat(["Look: ", image, "What is on it?"]) for image in (ONE, OTHER, THIRD)]
    prompts.append(engine.chat("No picture at all."))
    together = engine.ask(lambda worker: [engine.begin(prompt, num=12) for prompt in prompts])
    answers = [job.wait().tokens for job in together]
    assert answers == [engine.answer(prompt, num=12, namespace="alone").tokens for prompt in prompts]


def test_the_same_image_elsewhere_is_encoded_no_more(engine: SeeingEngine) -> None:
    engine.answer(engine.chat(["Look: ", ONE, "What is on it?"]))
    other = engine.answer(engine.chat(["Another question about ", ONE, "How large is it?"]))
    assert engine.num_encoded == 1
    assert other.end.outcome.num_prefilled > len(other.job.prompt.images[0].span)
