"""Random chats with images in a small memory and on disk: every answer is a cold run's, and no image is read twice."""

import random
from pathlib import Path
from typing import Any

import pytest

from reprise.core.prompt import Prompt
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span
from reprise.loop.read_ahead import MIN_TOKENS
from tests.loop.driving import SubmittedJob
from tests.soak.lengths import times
from tests.vision.chats import Part, picture
from tests.vision.test_seen_by_the_loop import NUM_BEHIND_STABLE, SeeingEngine, stable

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

SHAPES = ((96, 64), (64, 96), (64, 64), (128, 64))
WORDS = ("What is it? ", "Which colour has it? ", "How many are there? ", "Compare them. ", "Say more. ", "And now? ")
Chat = list[list[Part] | str]


def question(source: random.Random) -> list[Part]:
    """Words of a user, with an image in half of all cases; few images, so that they come again."""
    parts: list[Part] = ["".join(source.choices(WORDS, k=source.randint(4, 20)))]
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        seed = source.randrange(6)
        parts.insert(source.randint(0, len(parts)), picture(seed, *SHAPES[seed % len(SHAPES)]))
    return parts


def all_at_once(engine: SeeingEngine, prompts: list[Prompt]) -> list[SubmittedJob]:
    """Requests that are all there before the engine looks at the first."""
    return engine.ask(lambda worker: [engine.begin(prompt, num=6) for prompt in prompts])


def changed_chat(source: random.Random, chats: list[Chat]) -> Chat:
    """A new chat, or one of these with a further question, another last one, or without its latest turns."""
    if not chats or source.random() < 0.2:
        return [question(source)]
    chat = list(source.choice(chats))
    match source.randrange(4):
        case 0:
            return [*chat[:-1], question(source)]
        case 1 if len(chat) > 2:
            return [*chat[: 2 * source.randrange(1, len(chat) // 2 + 1)], question(source)]
        case _:
            return [*chat, source.choice(("A dog.", "A red one.", "Two of them.")), question(source)]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("gemma3", "qwen3_vl", "gemma4", "lfm2_vl")),
    ],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_random_chats_with_images_are_answered_as_cold(family: str, seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    plain = SeeingEngine(family, has_prefix_cache=False)
    # For the features of all images of a prompt. In less, memory may have the state at a prompt's end, which is for
    # exact repeats and not written, when the stable one before it was evicted: `known` below would be of that.
    states = plain.ask(lambda worker: worker.runner.most_live_nbytes(1024, chunk=64))
    room = states + plain.ask(lambda worker: worker.runner.features.most_nbytes_of_one([Span(0, 4 * 280)]))
    disk: dict[str, Any] = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(2 << 20), "disk_block": 16}
    small = SeeingEngine(family, cache_bytes=room, prefill_chunk=48, **disk)
    chats: list[Chat] = []
    loaded = num_evictions = 0
    for step in range(times(12)):
        asked = [changed_chat(source, chats) for _ in range(source.randint(1, 3))]
        known = 0
        if step % 6 == 5:
            # Alone: in this little room, others might take the place of what is read.
            asked = [[*chats[-1], "A dog.", question(source)]]
            known = small.loop.lookup(stable(small.chat(*asked[0])), namespace="").result(60).resume_at
            num_evictions += small.ask(lambda worker: worker.cache.stats.num_evictions)
            small.close()
            small = SeeingEngine(family, cache_bytes=room, prefill_chunk=48, **disk)
        # What outgrows the room is refused.
        asked = [chat for chat in asked if len(small.chat(*chat)) <= 1000]
        prompts = [stable(small.chat(*chat)) for chat in asked]
        running = all_at_once(small, prompts)
        answers = [job.wait() for job in running]
        assert [job.end.error for job in answers] == [None] * len(answers)
        small.check()
        for prompt, job in zip(prompts, answers, strict=True):
            assert job.tokens == plain.answer(prompt, num=6).tokens
            at, loaded = job.end.outcome.num_reused, loaded + job.end.outcome.num_loaded
            assert not any(each.span.start < at < each.span.stop for each in prompt.images)
        if known >= MIN_TOKENS and answers:
            # The state at a prompt's end is for exact repeats: of what others resume from, nothing is lost.
            assert answers[0].end.outcome.num_loaded >= known - NUM_BEHIND_STABLE
        chats = [*chats, *asked][-8:]
    assert num_evictions > 0
    # With other seeds, the room may have had nothing to write when it ended.
    assert loaded > 0 or seed != 1
    small.close()
    plain.close()
