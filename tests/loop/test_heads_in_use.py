"""Heads among everything else: settled turns, several models, and whatever a request may ask of its sampling."""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from reprise.core.backend import WeightsState
from reprise.core.events import Sampled
from reprise.core.job import Purpose, Sampling, Thinking
from reprise.engine.models.load import LoadedModel, load_model
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import GREEDY, PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.several import OneOfSeveral
from tests.loop.test_drafts import OneText
from tests.loop.test_head_drafts import Guesses, guess_always, num_guessed, with_head, without_head
from tests.loop.test_reuse import words
from tests.matrix import now_and_later
from tests.models.headed import ASSISTED, assistant, headed_model, plain_model

KINDS = ("qwen3_5", "glm4_moe", "gemma4")


def drafting_engine(kind: str, **settings: Any) -> DrivenEngine:
    """Always guessing, by a head or an assistant of random weights."""
    if kind not in ASSISTED:
        return with_head(kind, **settings)
    engine = DrivenEngine(plain_model(kind), mtp=str(assistant(kind, "tied")), drafts="always", **settings)
    engine.ask(guess_always)
    return engine


def plain_engine(kind: str, **settings: Any) -> DrivenEngine:
    return (
        DrivenEngine(plain_model(kind), mtp="off", **settings) if kind in ASSISTED else without_head(kind, **settings)
    )


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DrivenEngine, DrivenEngine]]:
    with closing(drafting_engine(request.param)) as drafting, closing(plain_engine(request.param)) as plain:
        yield drafting, plain


def test_a_settled_turn_is_warm_and_drafted(pair: tuple[DrivenEngine, DrivenEngine]) -> None:
    drafting, plain = pair
    prompt = words(4100, 70)
    said = drafting.run(prompt, num=9).tokens
    # Thinking is stripped: the next turn does not continue what was computed.
    following = [*prompt, *said[5:], *words(4101, 40)]
    settled = drafting.run(following, purpose=Purpose.SETTLE)
    assert settled.computed > 0
    turn = [*following, *words(4102, 12)]
    before = num_guessed(drafting)
    answer = drafting.run(turn, num=20)
    assert answer.end.outcome.num_reused >= len(following) - 1
    assert answer.tokens == plain.cold(turn, num=20)
    assert num_guessed(drafting) > before
    assert answer.end.outcome.num_settled > 0


class OneWithHead(OneOfSeveral):
    """A model of several, with its head, in the place of a tiny one."""

    def __init__(self, kind: str, thread: EngineThread) -> None:
        super().__init__(f"qwen3_5:{kind}", thread, drafts="always")
        self.kind = kind

    def load(self) -> LoadedModel:
        if self.kind in ASSISTED:
            return load_model(str(plain_model(self.kind)), mtp=str(assistant(self.kind, "tied")))
        return load_model(str(headed_model(self.kind)), mtp="auto")


@pytest.mark.parametrize("names", now_and_later([("qwen3_5", "glm4_moe")], [("gemma4", "qwen3_5")]))
def test_models_with_heads_that_come_and_go_answer_as_alone_and_draft(names: tuple[str, str]) -> None:
    """Each turn computes what is new, though the weights of the other model, head and all, were there in between."""
    new = 20
    engines = [drafting_engine(name) for name in names]
    sizes = [engine.model.nbytes for engine in engines]
    for engine in engines:
        engine.close()
    room = max(sizes)
    thread = EngineThread(SharedMemory(room + (64 << 20)), limits=ModelLimits(most_nbytes=room))
    models = [OneWithHead(name, thread) for name in names]
    for model, nbytes in zip(models, sizes, strict=True):
        model.loop.nbytes = nbytes
    models[0].loop.start()
    chats = {name: list(words(4200 + at, 300)) for at, name in enumerate(names)}
    warm: dict[str, list[list[int]]] = {name: [] for name in names}
    try:
        for turn, model in itertools.product(range(3), models):
            other = next(each for each in models if each is not model)
            model.ready().ask(guess_always)
            before = num_guessed(model)
            running = model.submit(chats[model.kind], num=12).wait()
            assert (model.state, other.state) == (WeightsState.READY, WeightsState.UNLOADED)
            assert num_guessed(model) > before
            if turn > 0:
                assert running.computed == new + 1
            warm[model.kind].append(running.tokens)
            chats[model.kind] += running.tokens + list(words(4250 + turn, new))
            model.check()
    finally:
        for each in models:
            each.loop.close(now=True, timeout_s=PATIENCE_S)
    for at, name in enumerate(names):
        chat = list(words(4200 + at, 300))
        with closing(plain_engine(name)) as plain:
            for turn, answer in enumerate(warm[name]):
                assert plain.cold(chat, num=12) == answer
                chat += answer + list(words(4250 + turn, new))


def a_request(rng: random.Random) -> dict[str, Any]:
    """Any sampling, and any of what cuts or bends an answer."""
    sampling = GREEDY
    if rng.random() < 0.75:
        penalties = rng.sample(["repetition_penalty", "presence_penalty", "frequency_penalty"], rng.randrange(3))
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.3, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            top_k=rng.choice([0, 0, 5, 40]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            xtc_probability=rng.choice([0.0, 0.0, 0.5]),
            logit_bias={rng.randrange(500): rng.choice([-100.0, 2.0]) for _ in range(rng.choice([0, 0, 3]))},
            seed=rng.randrange(1 << 30),
            logprobs=rng.choice([None, 0, 3]),
            **{
                name: rng.uniform(1.05, 1.5) if name.startswith("rep") else rng.uniform(-0.5, 0.9) for name in penalties
            },
        )
    asked: dict[str, Any] = {"sampling": sampling, "num": rng.choice([1, 2, 15, 40])}
    if rng.random() < 0.3:
        asked["stop_tokens"] = frozenset(rng.sample(range(512), 40))
        asked["min_tokens"] = min(asked["num"], rng.choice([0, 6]))
    if rng.random() < 0.3:
        asked["thinking"] = Thinking(start=(3,), end=(4, 6), budget=rng.randrange(12), is_open=rng.random() < 0.7)
    elif rng.random() < 0.3:
        text = words(rng.randrange(1000), asked["num"])
        asked["constraint"] = lambda: OneText(text)
    if rng.random() < 0.2:
        stop = rng.randrange(1, 30)
        asked["watch"] = CountdownWatch(stop)
    return asked


class CountdownWatch:
    """A reader who has found its stop string after so many tokens."""

    def __init__(self, num: int) -> None:
        self.left = num

    def __call__(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


def heard(job: SubmittedJob) -> list[tuple[int, float | None, tuple[int, ...]]]:
    """The tokens with their log-probabilities, to rounding, and those of the likeliest others."""
    events = [event for event in job.events if isinstance(event, Sampled)]
    return [
        (e.token, None if e.logprob is None else round(e.logprob, 2), tuple(token for token, _ in e.top))
        for e in events
    ]


@pytest.mark.parametrize("seed", now_and_later([0], range(1, 6)))
def test_whatever_is_asked_the_answer_is_the_one_without_be_the_guesses_right_or_wrong(
    pair: tuple[DrivenEngine, DrivenEngine], seed: int
) -> None:
    drafting, plain = pair
    rng = random.Random(seed)
    guesses = Guesses()
    before = num_guessed(drafting)
    for number in range(12):
        prompt = words(4300 + 100 * seed + rng.randrange(4), 50)
        state = rng.getstate()
        asked = a_request(rng)
        expected = plain.run(prompt, **asked)
        # The head says what it says, or what is right, or that with an error now and then.
        guesses.told = {}
        if number % 3 > 0:
            guesses.know(prompt, expected.tokens, wrong_each=0 if number % 3 == 1 else rng.choice([2, 3, 5]))
        rng.setstate(state)
        answer = drafting.run(prompt, **a_request(rng))
        assert heard(answer) == heard(expected), (number, asked)
        assert answer.end.reason == expected.end.reason
    assert num_guessed(drafting) > before
    drafting.ask(Worker.check)
