"""Images through the whole engine loop: each is encoded once, and answers are those of cold runs."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from reprise.core.backend import Verdict
from reprise.core.errors import BadRequest, ContextTooLong
from reprise.core.events import FinishReason, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.images import PromptImage, digest_of
from reprise.core.job import Purpose, Sampling
from reprise.core.pass_price import PassPrice
from reprise.core.pin import pin_id
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span, as_tokens, join_tokens
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.runner import Runner, TokenFailure
from reprise.engine.states.seeing import ImageFeatures, PreparedImage
from reprise.loop.scheduler_state import scheduler_state
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.test_drafts import make_passes_free
from tests.matrix import rows_now_and_later
from tests.vision.chats import Part, a_seeing_job, picture, prompt_of, seeing
from tests.vision.families import FAMILIES, FURTHER
from tests.vision.tiny import seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from reprise.engine.models.vlm_source import VlmModel

ONE, OTHER, THIRD = picture(1), picture(2, 64, 128), picture(3, 64, 64)
_names = itertools.count()


class SeeingEngine(DrivenEngine):
    """An engine loop on a tiny model that sees."""

    def __init__(self, family: str, **settings: Any) -> None:
        self.loaded = seeing(family)
        super().__init__(seeing_model(family), **{"load": partial(seeing, family), **settings})

    def begin(self, prompt: Prompt, **more: Any) -> SubmittedJob:
        running = SubmittedJob(a_seeing_job(prompt, **more))
        self.loop.submit(running.job, running)
        return running

    def answer(self, prompt: Prompt, **more: Any) -> SubmittedJob:
        running = self.begin(prompt, **more).wait()
        assert running.end.error is None, running.end.error
        self.ask(lambda worker: worker.check())
        return running

    def cold_answer(self, prompt: Prompt, **more: Any) -> list[int]:
        return self.answer(prompt, namespace=f"cold-{next(_names)}", **more).tokens

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


NUM_BEHIND_STABLE = 5
"""Tokens between the boundary of `stable` and the end of the prompt."""


def stable(prompt: Prompt) -> Prompt:
    """With a boundary a little before the end, as a template's."""
    return Prompt(
        tokens=prompt.tokens,
        images=prompt.images,
        boundaries=(Boundary(len(prompt) - NUM_BEHIND_STABLE, BoundaryKind.STABLE),),
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


def test_an_exact_repeat_computes_nothing(engine: SeeingEngine) -> None:
    prompt = engine.chat(["Look: ", ONE, "What is on it?"])
    first, again = engine.answer(prompt), engine.answer(prompt)
    assert again.computed == 0
    assert again.tokens == first.tokens


def test_other_images_at_the_same_place_are_other_answers(engine: SeeingEngine) -> None:
    """No tokens differ but the images' own."""
    answers = {}
    for seed in range(1, 5):
        prompt = engine.chat(["Look: ", picture(seed), "What is on it?"])
        answers[seed] = engine.answer(prompt, num=16).tokens
        assert answers[seed] == engine.cold_answer(prompt, num=16)
    assert len({tuple(answer) for answer in answers.values()}) > 1


MAIN = ["qwen3_5", "gemma3"]


@pytest.mark.parametrize("family", [*MAIN, pytest.param("gemma4", marks=pytest.mark.matrix)])
def test_a_chat_is_warm_after_a_restart_and_its_images_are_not_encoded_again(family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(1 << 30), "disk_block": 16}
    engine = SeeingEngine(family, **options)
    ask = "What is on it? " * 12
    first = engine.answer(stable(engine.chat(["Look: ", ONE, ask])))
    said = engine.spoken(first)
    engine.close()
    engine = SeeingEngine(family, **options)
    prompt = engine.chat(["Look: ", ONE, ask], said, "Which colour?")
    again = engine.answer(prompt)
    assert engine.num_encoded == 0, again.end.outcome
    assert again.end.outcome.num_loaded == again.end.outcome.num_reused > prompt.images[0].span.stop
    assert again.tokens == engine.cold_answer(prompt)
    other = engine.answer(engine.chat(["Look: ", OTHER, ask]))
    assert other.end.outcome.num_reused <= other.job.prompt.images[0].span.start
    engine.close()


@pytest.mark.parametrize(("family", "rooms"), rows_now_and_later([("qwen3_5", 2.5)], [("gemma3", 2.2)]))
def test_requests_that_take_turns_in_a_small_memory_encode_each_image_once(family: str, rooms: float) -> None:
    """A request that is preempted still needs its images."""
    plain = SeeingEngine(family)
    ask = "Say all that you see. " * 12
    prompts = [plain.chat([f"Picture {seed}: ", picture(seed), ask]) for seed in range(1, 4)]
    expected = [plain.cold_answer(prompt, num=300) for prompt in prompts]
    room = plain.ask(lambda worker: worker.runner.most_live_nbytes(400, chunk=64))
    plain.close()
    tight = SeeingEngine(family, cache_bytes=int(rooms * room), prefill_chunk=64)

    def preempt(worker: Worker) -> None:
        # Whether they ever lack memory at once depends on time.
        running = worker.requests.running
        if len(running) > 1 and worker.requests.counts["num_preemptions"] == 0 and all(r.generated for r in running):
            worker.preemption.preempt(max(running, key=lambda request: request.arrived_s))

    ACTIONS[Failpoint.STEPPED] = preempt
    running = tight.ask(lambda worker: [tight.begin(prompt, num=300) for prompt in prompts])
    assert [each.wait().tokens for each in running] == expected
    assert tight.loop.status().counts.num_preemptions > 0
    assert tight.num_encoded == 3
    tight.check()
    tight.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_memory_with_room_for_one_sequence_encodes_each_image_once(family: str) -> None:
    """And for the features of one image: the next one is encoded when the one before it is computed."""
    plain = SeeingEngine(family)
    prompt = plain.chat(["These: ", ONE, OTHER, THIRD, "Compare them. " * 12])
    expected = plain.cold_answer(prompt)
    states = plain.ask(lambda worker: worker.runner.most_live_nbytes(len(prompt) + 9, chunk=1))
    room = states + plain.ask(lambda worker: worker.runner.features.most_nbytes_of_one(prompt.spans))
    plain.close()
    tight = SeeingEngine(family, cache_bytes=room)
    most: list[int] = []
    ACTIONS[Failpoint.STEPPED] = lambda worker: most.append(worker.memory.held)
    assert tight.answer(prompt).tokens == expected
    assert tight.num_encoded == 3
    assert max(most) <= room
    tight.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_the_disk_is_read_where_memory_has_room_for_one_image_of_several(family: str, tmp_path: Path) -> None:
    """Whoever is alone is read and admitted, although a request counts with the features of all its images."""
    options: dict[str, Any] = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(1 << 30), "disk_block": 16}
    roomy = SeeingEngine(family, **options)
    turn: list[Part] = ["These: ", ONE, OTHER, THIRD, "Compare them. " * 12]
    said = roomy.spoken(roomy.answer(stable(roomy.chat(turn))))
    prompt = roomy.chat(turn, said, [picture(5), picture(6), "And with these?"])
    expected = roomy.cold_answer(prompt)
    states = roomy.ask(lambda worker: worker.runner.most_live_nbytes(len(prompt) + 9, chunk=1))
    room = states + roomy.ask(lambda worker: worker.runner.features.most_nbytes_of_one(prompt.spans))
    roomy.close()
    tight = SeeingEngine(family, cache_bytes=room, **options)
    counted = tight.ask(lambda worker: worker.sequences.estimate_to_admit(len(prompt), 0, images=prompt.images))
    assert counted > room
    again = tight.answer(prompt)
    assert again.tokens == expected
    assert again.end.outcome.num_loaded == again.end.outcome.num_reused > prompt.images[2].span.stop
    assert tight.num_encoded == 2
    tight.close()


@pytest.mark.parametrize("is_encoded", [False, True])
def test_what_a_request_holds_of_images_and_will_is_not_given_to_another(*, is_encoded: bool) -> None:
    plain = SeeingEngine("qwen3_vl")
    first, second = (plain.chat(["These: ", *pictures]) for pictures in ((ONE, OTHER), (THIRD, picture(4))))
    states = plain.ask(lambda worker: worker.sequences.estimate(len(first)))
    features = plain.ask(lambda worker: worker.runner.features.nbytes_to_hold(first.images))
    plain.close()
    engine = SeeingEngine("qwen3_vl", cache_bytes=2 * states + features)
    jobs = [SubmittedJob(a_seeing_job(prompt, num=20)) for prompt in (first, second)]
    together: list[int] = []

    def stepped(worker: Worker) -> None:
        together.append(len(worker.requests.running))
        if len(jobs) > 1 and together[-1] == 1 and worker.runner.features.num_encoded == 2 * is_encoded:
            engine.loop.submit(jobs[1].job, jobs.pop())

    ACTIONS[Failpoint.STEPPED] = stepped
    waiting = list(jobs)
    engine.loop.submit(jobs[0].job, jobs[0])
    assert [job.wait().end.error for job in waiting] == [None, None]
    assert max(together) == 1
    engine.close()


def test_features_that_a_request_has_still_to_be_prefilled_with_are_never_released() -> None:
    engine = SeeingEngine("qwen3_vl")
    ACTIONS[Failpoint.STEPPED] = lambda worker: worker.preemption.release_features()
    engine.answer(engine.chat(["These: ", ONE, OTHER, THIRD, "Compare them."]))
    assert engine.num_encoded == 3
    engine.close()


def test_a_prompt_whose_images_do_not_fit_beside_it_is_refused() -> None:
    plain = SeeingEngine("qwen3_vl")
    prompt = plain.chat(["These: ", ONE, OTHER, THIRD, "Compare them. " * 12])
    room = plain.ask(lambda worker: worker.runner.most_live_nbytes(len(prompt) + 9, chunk=1))
    plain.close()
    tight = SeeingEngine("qwen3_vl", cache_bytes=room)
    with pytest.raises(ContextTooLong):
        tight.answer(prompt)
    text = Prompt(tokens=as_tokens(np.maximum(prompt.tokens, 20)))
    assert tight.answer(text).end.error is None
    tight.close()


# What the tower takes while it runs.


def keep_for_passes(engine: SeeingEngine, nbytes: int) -> None:
    engine.ask(lambda worker: setattr(worker.memory, "kept_for_passes", nbytes))


def make_dear(engine: SeeingEngine, nbytes: int) -> None:
    """As if the tower took so much for each placeholder."""
    engine.ask(lambda worker: setattr(worker.runner.features, "tower", PassPrice(per_token=nbytes)))


@pytest.mark.parametrize(("family", "pixels"), [("qwen3_vl", 1024), ("gemma3", 0)])
def test_what_the_tower_takes_is_known_before_the_first_image_and_learnt_from_each(family: str, pixels: int) -> None:
    engine = SeeingEngine(family)
    features = engine.ask(lambda worker: worker.runner.features)
    before = features.tower
    assert before.of(64, 0) > 64 * 1000
    assert (features.num_encoded, features.pixels_per_row) == (0, pixels)
    engine.answer(engine.chat(["Look: ", picture(9, 256, 256)]))
    assert len(features.tower.seen) == 1
    assert 0.5 < features.tower.of(64, 0) / before.of(64, 0) < 2
    engine.close()


def test_a_tower_that_was_never_measured_is_priced_by_its_first_run() -> None:
    engine = SeeingEngine("qwen3_vl")
    make_dear(engine, 0)
    engine.answer(engine.chat(["Look: ", ONE]))
    assert engine.ask(lambda worker: worker.runner.features.tower.of(4, 0)) > 4 * 1000
    engine.close()


def test_the_tower_is_charged_while_it_runs_and_makes_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SeeingEngine("qwen3_vl", cache_bytes=3_000_000, prefill_chunk=64)
    for seed in range(100):
        engine.answer(engine.chat(f"Number {seed}. " + "Words and words. " * 30))
        if engine.loop.status().counts.num_evictions > 0:
            break
    worker: Worker = engine.ask(lambda worker: worker)
    charged, over = list[int](), list[int]()
    encode = VlmModel.encode

    def look(model: VlmModel, prepared: PreparedImage) -> ImageFeatures:
        assert worker.memory.budget is not None
        charged.append(worker.memory.nbytes(Account.PASSES))
        over.append(worker.memory.held - worker.memory.budget)
        return encode(model, prepared)

    monkeypatch.setattr(VlmModel, "encode", look)
    prompt = engine.chat(["Look: ", ONE, "What is on it?"])
    (span,) = prompt.spans
    keep_for_passes(engine, 100_000)
    make_dear(engine, 1_500_000 // len(span))
    before = engine.loop.status().counts.num_evictions
    engine.answer(prompt)
    assert charged == [pytest.approx(1_400_000, abs=1_500_000 // len(span))]
    assert max(over) <= 0
    assert engine.loop.status().counts.num_evictions > before
    assert worker.memory.nbytes(Account.PASSES) == 0
    engine.close()


@pytest.mark.parametrize("is_dear", [False, True])
def test_a_request_whose_tower_has_no_room_beside_others_waits(*, is_dear: bool) -> None:
    plain = SeeingEngine("qwen3_vl")
    prompts = [plain.chat(["These: ", picture(seed)]) for seed in (1, 4)]
    state = plain.ask(lambda worker: worker.sequences.estimate(len(prompts[0])))
    plain.close()
    engine = SeeingEngine("qwen3_vl", cache_bytes=3 * state)
    keep_for_passes(engine, 10_000_000)
    make_dear(engine, (10_000_000 + 3 * state // 2) // len(prompts[0].spans[0]) if is_dear else 1)
    together: list[int] = []
    ACTIONS[Failpoint.STEPPED] = lambda worker: together.append(len(worker.requests.running))
    jobs = engine.ask(lambda worker: [engine.begin(prompt, num=40) for prompt in prompts])
    assert [job.wait().end.error for job in jobs] == [None, None]
    assert max(together) == (1 if is_dear else 2)
    engine.close()


def test_an_image_whose_tower_never_fits_is_refused_with_a_size_that_is_served() -> None:
    engine = SeeingEngine("qwen3_vl", cache_bytes=4_000_000)
    keep_for_passes(engine, 0)
    make_dear(engine, 20_000)
    words = ["What is on it?"]
    with pytest.raises(ContextTooLong, match="Send smaller images, or raise --cache-bytes") as refused:
        engine.begin(engine.chat(["Look: ", picture(5, 640, 480), *words]))
    found = re.search(r": images of about (\d+) x (\d+) pixels would fit\.", str(refused.value))
    assert found is not None, refused.value
    width, height = map(int, found.groups())
    assert width / height == pytest.approx(4 / 3, rel=0.2)
    assert engine.num_encoded == 0
    assert engine.answer(engine.chat(["Look: ", picture(5, width, height), *words])).end.error is None
    with pytest.raises(ContextTooLong):
        engine.begin(engine.chat(["Look: ", picture(5, width + 96, height + 96), *words]))
    engine.close()


def test_where_images_of_all_sizes_are_scaled_to_one_a_refusal_advises_none() -> None:
    engine = SeeingEngine("gemma3", cache_bytes=4_000_000)
    keep_for_passes(engine, 0)
    make_dear(engine, 4_000_000)
    with pytest.raises(ContextTooLong, match=r"its largest image does not fit\. Raise --cache-bytes\.$"):
        engine.begin(engine.chat(["Look: ", ONE]))
    assert engine.answer(engine.chat("Words.")).end.error is None
    engine.close()


@pytest.mark.parametrize("family", MAIN)
def test_a_pinned_prefix_keeps_its_image_while_others_fill_the_memory(family: str) -> None:
    plain = SeeingEngine(family)
    room = plain.ask(lambda worker: worker.runner.most_live_nbytes(512, chunk=64))
    plain.close()
    engine = SeeingEngine(family, cache_bytes=2 * room, prefill_chunk=64)
    words = "What is on it? " * 12
    chats = [[[f"Picture {seed}: ", picture(seed), words]] for seed in range(8)]
    prompt = engine.chat(*chats[0])
    boundary = Boundary(len(prompt) - NUM_BEHIND_STABLE, BoundaryKind.EXPLICIT)
    pinned = replace(prompt, boundaries=(boundary,))
    engine.answer(pinned, pin_for_s=float("inf"))
    (pin,) = engine.loop.pins("").result(PATIENCE_S).pins
    assert (pin.num_tokens, pin.id) == (boundary.position, pin_id(pinned.tokens[: boundary.position]))
    assert pin.num_tokens > pinned.images[0].span.stop
    for chat in chats[1:] * 2:
        engine.answer(stable(engine.chat(*chat)))
    assert engine.ask(lambda worker: worker.cache.stats.num_evictions) > 0
    encoded = engine.num_encoded
    warm = engine.answer(engine.chat(*chats[0], "Noise.", "Which colour?"))
    assert warm.end.outcome.num_reused >= pin.num_tokens
    assert engine.num_encoded == encoded, "what is resumed behind an image needs no rows of it"
    assert warm.tokens == engine.cold_answer(warm.job.prompt)
    assert engine.loop.unpin(pin.id, namespace="").result(PATIENCE_S)
    engine.close()


@pytest.mark.parametrize("family", MAIN)
def test_drafts_behind_images_change_no_answer(family: str) -> None:
    plain, drafting = SeeingEngine(family, drafts="off"), SeeingEngine(family, drafts="always")
    drafting.ask(make_passes_free)
    prompt = plain.chat(["Look: ", ONE, "Say it, say it, say it again and again."])
    expected = plain.cold_answer(prompt, num=40)
    for _ in range(2):
        assert drafting.cold_answer(prompt, num=40) == expected
    right = drafting.answer(prompt, num=40, namespace="predicted", prediction=prompt.tokens[:0])
    assert right.tokens == expected
    plain.close()
    drafting.close()


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER)])
def test_drafts_of_several_chats_that_are_right_to_different_lengths_change_no_answer(family: str) -> None:
    loaded, num = seeing(family), 24
    if not loaded.blueprint.joins or not loaded.blueprint.can_undo:
        pytest.skip("it decodes one sequence at a time")
    prompts = [prompt_of(loaded, ["Look: ", ONE, "What is on it?"]), prompt_of(loaded, "Say it again.")]
    alone = [decoded_beside(loaded, [prompt], num, []) for prompt in prompts]
    truth = [answer for (answer,) in alone]
    # Rows end further and further apart, and the one that is behind is another each time.
    for right in ([(7, 0)] * 3, [(0, 7), (7, 2), (0, 0)]):
        drafts = [[(row, num_right) for row, num_right in enumerate(each)] for each in right]
        assert decoded_beside(loaded, prompts, num, drafts, truth) == truth


def decoded_beside(
    loaded: LoadedModel,
    prompts: list[Prompt],
    num: int,
    drafts: list[list[tuple[int, int]]],
    truth: list[list[int]] | None = None,
) -> list[list[int]]:
    """Answers to these prompts in one batch. `drafts`: of each pass, by row, how many tokens are right of eight."""
    runner = Runner(loaded, can_batch=True)
    lives = [runner.begin() for _ in prompts]
    for live, prompt in zip(lives, prompts, strict=True):
        live.see(prompt.images)
        runner.prefill([live], [prompt.tokens[:-1]])
        runner.begin_decode(live, a_seeing_job(prompt, num=num))
    said: list[list[int]] = [[] for _ in lives]
    while min(map(len, said)) < num:
        if drafts and truth is not None:
            rows = drafts.pop(0)
            made = [truth[row][len(said[row]) :][:num_right] + [3] * (8 - num_right) for row, num_right in rows]
            results = runner.verify(lives, made)
        else:
            results = runner.decode(lives)
        for result in results:
            assert not isinstance(result, TokenFailure), result
            said[lives.index(result.live)] += [each.token for each in result.sampled]
    return [answer[:num] for answer in said]


@pytest.mark.parametrize("family", MAIN)
def test_what_settles_behind_an_image_is_reused(family: str) -> None:
    engine = SeeingEngine(family)
    turns: list[Any] = [["Look: ", ONE, "What is on it?"]]
    answer = engine.answer(engine.chat(*turns))
    prompt = engine.chat(*turns, engine.spoken(answer), "Which colour?")
    known = Prompt(tokens=prompt.tokens[:-12], images=prompt.images)
    engine.answer(known, num=0, purpose=Purpose.SETTLE)
    warm = engine.answer(prompt)
    assert warm.end.outcome.num_settled > 0
    assert warm.tokens == engine.cold_answer(prompt)
    assert engine.num_encoded == 1
    engine.close()


@pytest.mark.parametrize("family", MAIN)
def test_a_request_that_is_cancelled_within_an_image_leaves_no_half_of_it(family: str) -> None:
    engine = SeeingEngine(family, prefill_chunk=8)
    long = engine.chat(["Look: ", picture(8, 320, 320), "What is on it?"])
    (image,) = long.images
    running = SubmittedJob(a_seeing_job(long))

    def cancel(event: object) -> None:
        if running.progress and running.progress[-1] > image.span.start:
            engine.loop.cancel(running.job.id)

    running.on_event = cancel
    engine.loop.submit(running.job, running)
    assert running.wait().end.reason is FinishReason.CANCELLED
    again = engine.answer(long)
    assert again.end.outcome.num_reused in range(image.span.start + 1) or (
        again.end.outcome.num_reused >= image.span.stop
    )
    assert again.tokens == engine.cold_answer(long)
    assert engine.num_encoded == 1
    engine.close()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl", "gemma3", "gemma4"])
def test_answers_about_images_are_audited_and_found_right(family: str) -> None:
    engine = SeeingEngine(family, is_audit_off=False, audit_rate=1.0)
    turns: list[Any] = [["Look: ", ONE, "What is on it?"]]
    first = engine.answer(engine.chat(*turns), num=16)
    engine.answer(engine.chat(*turns, engine.spoken(first), ["And ", OTHER, "?"]), num=16)

    def hurry(worker: Worker) -> dict[str, Verdict]:
        while not worker.requests and worker.audit.due_in_s is not None:
            worker.audit.hurry()
            worker.step()
        return dict(worker.audit.totals.verdicts)

    verdicts = engine.ask(hurry)
    assert len(verdicts) == 2
    assert Verdict.DIFFERENT not in verdicts.values()
    assert engine.num_encoded == 2, "an audit finds what was encoded"
    engine.close()


@pytest.mark.parametrize("family", MAIN)
def test_quantised_entries_answer_warm_as_cold(family: str) -> None:
    quantised = load_model(str(seeing_model(family)), kv_bits=8, kv_group_size=32)
    assert quantised.vision is not None
    engine = SeeingEngine(family, load=lambda: quantised, kv_bits=8, kv_group_size=32)
    turns: list[Any] = [["Look: ", ONE, "What is on it?"]]
    first = engine.answer(stable(engine.chat(*turns)))
    prompt = engine.chat(*turns, engine.spoken(first), "Which colour?")
    warm = engine.answer(prompt)
    assert warm.end.outcome.num_reused > prompt.images[0].span.stop
    assert warm.tokens == engine.cold_answer(prompt)
    engine.close()


def test_a_broken_picture_fails_its_request_alone() -> None:
    """A file whose header is right and whose pixels are not is found out when it is read."""
    engine = SeeingEngine("qwen3_5")
    good = engine.chat(["Look: ", ONE, "What is on it?"])
    content = ONE.content[:300]
    broken = replace(ONE, content=content, digest=digest_of(content))
    (image,) = good.images
    bad = replace(good, images=(replace(image, image=broken),))
    jobs = engine.ask(lambda worker: [engine.begin(bad), engine.begin(good, namespace="beside")])
    failed, answered = (job.wait() for job in jobs)
    assert isinstance(failed.end.error, BadRequest)
    assert answered.end.error is None
    engine.check()
    engine.close()


def test_one_image_is_encoded_a_step_and_running_answers_go_on_between() -> None:
    engine = SeeingEngine("qwen3_5")
    steps: list[tuple[int, int]] = []

    counts: list[tuple[int, int]] = [(0, 0)]

    def counted(worker: Worker) -> None:
        counts.append((worker.runner.features.num_encoded, worker.requests.counts["num_generated"]))
        (num_before, said_before), (num, said) = counts[-2:]
        steps.append((num - num_before, said - said_before))

    ACTIONS[Failpoint.STEPPED] = counted
    talking = engine.begin(engine.chat("Talk on and on."), num=400)
    talking.wait_for(Sampled)
    looking = engine.begin(engine.chat(["These: ", ONE, OTHER, THIRD, "Compare."]))
    looking.wait()
    engine.loop.cancel(talking.job.id)
    talking.wait()
    encoding = [step for step in steps if step[0] > 0]
    assert [num for num, _ in encoding] == [1, 1, 1]
    assert all(said > 0 for _, said in encoding), "who talks gets a token in a step that encodes"
    engine.close()


def test_random_answers_about_images_repeat_with_their_seed(engine: SeeingEngine) -> None:
    prompt = engine.chat(["Look: ", ONE, "What is on it?"])
    sampling = Sampling(temperature=0.9, seed=5)
    first = engine.answer(prompt, sampling=sampling)
    assert engine.cold_answer(prompt, sampling=sampling) == first.tokens


def test_a_request_that_has_ended_holds_no_image() -> None:
    engine = SeeingEngine("qwen3_5")
    engine.answer(engine.chat(["Look: ", ONE, "What is on it?"]))

    def released(worker: Worker) -> list[bool]:
        features = worker.runner.features
        # Held ones go last: with a younger one beside it, the first to go says whether it was held.
        worker.runner.encode(OTHER)
        features.release_one()
        return [features.find(image) is None for image in (ONE, OTHER)]

    assert engine.ask(released) == [True, False]
    engine.close()


def test_weights_come_and_go_with_their_tower_and_what_was_seen_stays() -> None:
    directory = str(seeing_model("qwen3_5"))
    engine = SeeingEngine("qwen3_5", load=lambda: load_model(directory))
    tower = ref(engine.model.model)
    del engine.model
    turns: list[Any] = [["Look: ", ONE, "What is on it?"]]
    first = engine.answer(stable(engine.chat(*turns)))
    engine.loop.dismiss().result(PATIENCE_S)
    assert tower() is None, "nothing beside the model holds its weights"
    prompt = engine.chat(*turns, engine.spoken(first), ["And ", ONE, "?"])
    warm = engine.answer(prompt)
    assert warm.end.outcome.num_reused > prompt.images[0].span.stop
    assert engine.num_encoded == 1
    assert warm.tokens == engine.cold_answer(prompt)
    engine.close()


def test_features_that_have_to_go_again_stop_nobody() -> None:
    """In a memory so small that they are released before the slice that waits for them."""
    engine = SeeingEngine("qwen3_5")
    prompt = engine.chat(["These: ", ONE, OTHER, "Compare."])

    def forgetting(worker: Worker) -> None:
        worker.runner.features.clear()
        assert worker.runner.features.num_encoded < 20, "it does not come to an end"

    expected = engine.cold_answer(prompt)
    ACTIONS[Failpoint.STEP] = forgetting
    assert engine.answer(prompt, namespace="forgetful").tokens == expected
    engine.close()


@pytest.mark.parametrize(("family", "is_whole"), [("qwen3_5", False), ("gemma3", True)])
def test_an_image_that_a_pass_holds_whole_counts_before_its_request_is_admitted(family: str, *, is_whole: bool) -> None:
    """It has more tokens than a chunk, so the buffers of a window grow by more than a chunk."""
    engine = SeeingEngine(family, prefill_chunk=64)
    words = engine.chat("Words. " * 300).tokens[:800]
    run = as_tokens(np.arange(-600, 0))
    image = PromptImage(span=Span(100, 700), image=ONE, rows=1, columns=600)
    seen = Prompt(tokens=join_tokens(words[:100], run, words[:100]), images=(image,))

    def needed(worker: Worker) -> list[int]:
        estimates: list[int] = []
        for prompt in (Prompt(tokens=words), seen):
            job = a_seeing_job(prompt)
            worker.arrive(job, SubmittedJob(job), 0.0)
            present, speed = worker.prefixes.present(), worker.executor.speed
            state = scheduler_state(present, worker.sequences, speed, worker.cache.layout, now_s=0.0, price=PassPrice())
            estimates.append(state.waiting[0].live_nbytes)
            worker.cancel(job.id)
        return estimates

    text, pictured = engine.ask(needed)
    features = engine.ask(lambda worker: worker.runner.features.most_nbytes_of_one(seen.spans))
    assert features > 0
    assert pictured > text + features if is_whole else pictured == text + features
    engine.close()
