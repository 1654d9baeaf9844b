"""A model that sees keeps its head, which sees an image's rows where the model does."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import pytest

from reprise.core.prompt import Prompt
from reprise.engine.models.headed import GuessingModel, GuessRequest, HeadedSeeingModel
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.image_features import inputs_of
from reprise.engine.running.runner import LiveSequence, Runner
from tests.loop.test_head_drafts import guess_always, num_guessed
from tests.models.headed import head_tensors
from tests.vision.chats import ASK, ONE, OTHER, SeenWalk, cold, picture, prompt_of
from tests.vision.headed import HEADED, loaded_headed, seeing_headed
from tests.vision.test_seen_by_the_loop import SeeingEngine

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")


def behind(loaded: LoadedModel, prompt: Prompt, *, chunk: int | None = None) -> tuple[Runner, LiveSequence]:
    runner = Runner(loaded, can_batch=True)
    live = runner.begin()
    live.see(prompt.images)
    stops = [len(prompt)] if chunk is None else [*range(chunk, len(prompt), chunk), len(prompt)]
    for stop in stops:
        runner.prefill([live], [prompt.tokens[live.position : stop]])
    return runner, live


def guessed(loaded: LoadedModel, live: LiveSequence, num: int = 3) -> list[mx.array]:
    """The logits from which the tokens behind token 5 are guessed."""
    model, seen = loaded.model, list[mx.array]()
    assert isinstance(model, GuessingModel)

    def choose(logits: mx.array, _: int) -> mx.array:
        seen.append(logits)
        return mx.argmax(logits)

    request = GuessRequest(tokens=[5], num=num, choose=choose, positions=live.rows.positions(num))
    mx.eval(model.guess(request, live.rows.caches), seen)
    return seen


def gap(some: Sequence[mx.array], others: Sequence[mx.array]) -> float:
    return max(float(mx.abs(a - b).max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("family", HEADED)
def test_a_model_that_sees_answers_as_without_its_head(family: str) -> None:
    with_head = loaded_headed(family)
    plain = load_model(str(seeing_headed(family)[0]), mtp="off")
    assert with_head.head is not None and with_head.head.is_there and with_head.vision is not None
    assert plain.head is None and plain.vision is not None
    prompt = prompt_of(with_head, ["Look: ", ONE, ASK, OTHER, "Compare them."])
    assert mx.array_equal(cold(with_head, prompt), cold(plain, prompt))


@pytest.mark.parametrize("family", HEADED)
def test_what_it_guesses_depends_on_the_image(family: str) -> None:
    loaded = loaded_headed(family)
    one, other = (prompt_of(loaded, ["Look: ", image, ASK]) for image in (ONE, picture(4)))
    # What is wide is counted otherwise than what is high, though both have as many placeholders.
    wide, high = (prompt_of(loaded, ["Look: ", picture(4, *size), ASK]) for size in ((128, 64), (64, 128)))
    for a, b in ((one, other), (wide, high)):
        ours, theirs = (guessed(loaded, behind(loaded, each)[1]) for each in (a, b))
        assert gap(ours, theirs) > 0.01


def test_it_guesses_behind_an_image_as_the_drafter_of_mlx_vlm_does_of_the_same_rows() -> None:
    """Which is told here where the tokens stand: by itself it counts them."""
    theirs: Any = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    loaded = loaded_headed("qwen3_5")
    model = loaded.model
    assert isinstance(model, HeadedSeeingModel)
    config = json.loads((seeing_headed("qwen3_5")[0] / "config.json").read_text())
    drafter = theirs.Model(
        theirs.ModelConfig.from_dict({"text_config": cast(Any, model.model).whole.config.text_config.to_dict()})
    )
    drafter.load_weights(list(drafter.sanitize(head_tensors(config)).items()))
    prompt = prompt_of(loaded, ["Look: ", picture(4, 64, 128), ASK])
    runner, live = behind(loaded, prompt)
    fresh = runner.begin()
    fresh.see(prompt.images)
    where = fresh.rows.positions(len(prompt) + 1)
    inputs = inputs_of(
        model, fresh.rows, prompt.tokens[None], lambda image: runner.features.find(image) or runner.encode(image)
    )
    caches = model.model.make_cache()
    _, hidden = model.model.with_hidden(
        mx.array(prompt.tokens[None]), cache=caches, positions=where[..., :-1], inputs=inputs
    )
    embeddings = mx.concatenate([inputs.embedded.embeds[:, 1:], model.embed_tokens(mx.array([[5]]))], axis=1)
    found = drafter._forward_hidden(embeddings, hidden, None, where[..., 1:])
    assert gap([model.logits(found)[0, -1]], guessed(loaded, live, 1)) < 1e-4


@pytest.mark.parametrize("family", HEADED)
def test_guesses_behind_a_resumed_prefix_with_images_are_those_of_a_cold_run(family: str) -> None:
    loaded = loaded_headed(family)
    walk = SeenWalk(loaded)
    first = prompt_of(loaded, ["Look: ", ONE, ASK])
    walk.logits(first)
    prompt = prompt_of(loaded, ["Look: ", ONE, ASK], "A cat.", ["And ", OTHER, "this?"])
    live = walk.resumed(prompt)
    assert any(each.span.stop <= live.position for each in prompt.images)
    walk.runner.prefill([live], [prompt.tokens[live.position :]])
    _, other = behind(loaded, prompt)
    assert gap(guessed(loaded, live), guessed(loaded, other)) < 2e-3


@pytest.mark.parametrize("family", HEADED)
def test_tokens_that_come_one_by_one_behind_an_image_stand_where_they_stand(family: str) -> None:
    loaded = loaded_headed(family)
    prompt = prompt_of(loaded, ["Look: ", picture(4, 64, 128), ASK])
    _, whole = behind(loaded, prompt)
    stop = max(image.span.stop for image in prompt.images)
    runner = Runner(loaded, can_batch=True)
    live = runner.begin()
    live.see(prompt.images)
    runner.prefill([live], [prompt.tokens[:stop]])
    for at in range(stop, len(prompt)):
        runner.prefill([live], [prompt.tokens[at : at + 1]])
    assert gap(guessed(loaded, live), guessed(loaded, whole)) < 2e-3


@pytest.mark.parametrize("family", HEADED)
def test_chats_with_images_are_answered_as_without_the_head(family: str) -> None:
    directory, mtp = seeing_headed(family)
    drafting = SeeingEngine(family, load=partial(loaded_headed, family), drafts="always")
    plain = SeeingEngine(family, load=partial(load_model, str(directory), mtp="off"))
    drafting.ask(guess_always)
    try:
        for turns in (
            [["Look: ", ONE, ASK]],
            [["Look: ", ONE, ASK], "A cat.", ["And ", OTHER, "this?"]],
            [["Look: ", OTHER, ASK], "A dog."],
            [["Look: ", ONE, ASK]],
        ):
            ours, theirs = (each.answer(each.chat(*turns), num=24) for each in (drafting, plain))
            assert ours.tokens == theirs.tokens
        assert num_guessed(drafting) > 0, mtp
    finally:
        drafting.close()
        plain.close()
