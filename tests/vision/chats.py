"""Chats with pictures, as prompts of a model that sees, and logits of their walks through a prefix cache."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.image_files import pixels_of
from reprise.core.images import ImageFile, PromptImage, outside, path_tokens
from reprise.core.job import Job, Sampling
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Span, as_tokens, join_tokens
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.models.vision import image_of_pixels
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner
from tests.engine.sequences import resumed
from tests.vision.tiny import seeing_model

_ids = itertools.count()


@functools.cache
def seeing(name: str) -> LoadedModel:
    """The tiny model of this family, loaded so that it sees."""
    loaded = load_model(str(seeing_model(name)))
    assert loaded.vision is not None, name
    return loaded


@functools.cache
def picture(seed: int, width: int = 96, height: int = 64) -> ImageFile:
    """A picture of noise, as a PNG file."""
    return image_of_pixels(np.random.default_rng(seed).bytes(3 * width * height), width, height)


Part = str | ImageFile


def prompt_of(loaded: LoadedModel, *turns: Sequence[Part] | str) -> Prompt:
    """A chat: turns of the user and the assistant by turns, each of texts and pictures."""
    messages: list[dict[str, Any]] = []
    images: list[ImageFile] = []
    for turn, role in zip(turns, itertools.cycle(("user", "assistant"))):
        parts = [turn] if isinstance(turn, str) else list(turn)
        images += [part for part in parts if isinstance(part, ImageFile)]
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        messages.append({"role": role, "content": content})
    text, reader = loaded.text, loaded.text.images
    assert text.render is not None and reader is not None
    first, *rest = text.render(messages, add_generation_prompt=True).split(reader.marker)
    pieces, seen, at, before = [], [], 0, first
    for index, (image, after) in enumerate(zip(images, rest, strict=True)):
        expansion = reader.expand(image)
        pieces.append(as_tokens(text.encode(before + expansion.before(index))))
        at += len(pieces[-1])
        pieces.append(path_tokens(expansion, image.digest))
        span = Span(at, at + len(pieces[-1]))
        seen.append(PromptImage(span=span, image=image, rows=expansion.rows, columns=expansion.columns))
        at, before = span.stop, expansion.text_after + after
    pieces.append(as_tokens(text.encode(before)))
    return Prompt(tokens=join_tokens(*pieces), images=tuple(seen))


def as_vlm_reads_it(family: str) -> tuple[Prompt, np.ndarray, dict[str, Any]]:
    """A prompt with two images as we make it, and its tokens and further inputs as mlx-vlm does."""
    from mlx_vlm.utils import load_processor, prepare_inputs  # noqa: PLC0415 (takes seconds)

    loaded, images = seeing(family), (picture(1), picture(2, 64, 128))
    prompt = prompt_of(loaded, ["One: ", images[0], " two: ", images[1], "Compare."])
    content: list[dict[str, str]] = [
        {"type": "text", "text": "One: "},
        {"type": "image"},
        {"type": "text", "text": " two: "},
        {"type": "image"},
        {"type": "text", "text": "Compare."},
    ]
    assert loaded.text.render is not None
    text = loaded.text.render([{"role": "user", "content": content}], add_generation_prompt=True)
    from reprise.engine.models.vlm_corrections import correct_processor  # noqa: PLC0415

    processor = load_processor(seeing_model(family), add_detokenizer=False)
    correct_processor(processor, family, seeing_model(family))
    raw = dict(prepare_inputs(processor, images=[pixels_of(image) for image in images], prompts=text))
    ids = np.array(raw.pop("input_ids")).reshape(-1)
    return prompt, ids, {name: value for name, value in raw.items() if value is not None}


def a_seeing_job(prompt: Prompt, *, num: int = 8, **more: Any) -> Job:
    more.setdefault("sampling", Sampling(temperature=0))
    return Job(id=f"seeing-{next(_ids)}", prompt=prompt, max_tokens=num, **more)


def fed(runner: Runner, live: LiveSequence, prompt: Prompt, stops: Sequence[int]) -> mx.array:
    """The logits behind each token from where the sequence is, in slices that end at `stops`."""
    logits: list[mx.array] = []
    for stop in stops:
        if stop > live.position:
            logits.append(runner.logits(live, prompt.tokens[live.position : stop]))
    return mx.concatenate(logits)


def cold(loaded: LoadedModel, prompt: Prompt, *, chunk: int | None = None) -> mx.array:
    """The logits of a prompt that nothing stored has touched, in one pass, or in chunks that hold images whole."""
    runner = Runner(loaded, can_batch=True)
    live = runner.begin()
    live.see(prompt.images)
    spans = [each.span for each in prompt.images] if loaded.blueprint.whole_images else []
    stops = {outside(at, spans) for at in range(0, len(prompt), chunk or len(prompt))}
    return fed(runner, live, prompt, sorted({*stops, *(span.stop for span in spans), len(prompt)} - {0}))


class SeenWalk:
    """Prompts one after the other through one prefix cache, as the loop resumes and stores them."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.runner = Runner(loaded, can_batch=True)
        self.cache = PrefixCache(loaded.blueprint.layout)

    def resume_at(self, prompt: Prompt) -> int:
        """Where the prompt resumes: behind or before images, never in one."""
        match, spans = self.cache.match(prompt.tokens), [each.span for each in prompt.images]
        limit = len(prompt) - 1
        while (at := self.cache.resume_at(match, limit=limit)) != outside(at, spans):
            limit = outside(at, spans)
        return at

    def resumed(self, prompt: Prompt) -> LiveSequence:
        """A sequence at the position where the prompt resumes."""
        restore = self.cache.read(self.cache.match(prompt.tokens), self.resume_at(prompt))
        live = resumed(self.runner, restore, reserve=len(prompt))
        live.see(prompt.images)
        return live

    def cut(self, prompt: Prompt) -> None:
        """The prompt is cancelled in the middle of its first image, or before it where a pass must hold it whole."""
        span = prompt.images[0].span
        live = self.runner.begin()
        live.see(prompt.images)
        stop = span.start if self.loaded.blueprint.whole_images else (span.start + span.stop) // 2
        fed(self.runner, live, prompt, [stop])
        self.cache.commit(prompt.tokens[:stop], self.runner.source(live), kind=BoundaryKind.INTERVAL)
        self.runner.stop(live)

    def logits(self, prompt: Prompt) -> tuple[int, mx.array]:
        """Where it resumed, and the logits of what was computed; stored around images and near the end."""
        live = self.resumed(prompt)
        at = live.position
        edges = {edge for each in prompt.images for edge in (each.span.start, each.span.stop)}
        near_end = outside(max(at + 1, len(prompt) - 7), [each.span for each in prompt.images])
        found: list[mx.array] = []
        for stop in sorted({*edges, near_end, len(prompt)}):
            if stop > live.position:
                found.append(fed(self.runner, live, prompt, [stop]))
                self.cache.commit(prompt.tokens[:stop], self.runner.source(live), kind=BoundaryKind.STABLE)
        self.runner.stop(live)
        self.cache.check()
        return at, mx.concatenate(found)


ONE, OTHER, THIRD = picture(1), picture(2, 64, 128), picture(3, 64, 64)
ASK = "What is on it?"

Turns = tuple[Sequence[Part] | str, ...]


def seven_walks() -> dict[str, tuple[Turns, int]]:
    """Turns of chats that share prefixes, behind a first, in an order in which each resumes behind so many images."""
    return {
        "first turn": ((["Look: ", ONE, ASK],), 0),
        "next turn": ((["Look: ", ONE, ASK], "A dog.", "Which colour?"), 1),
        "other question about the image": ((["Look: ", ONE, "How many legs has it?"],), 1),
        "other image, same words": ((["Look: ", OTHER, ASK],), 0),
        "a second image in the next turn": ((["Look: ", ONE, ASK], "A dog.", [THIRD, "And this?"]), 1),
        "the turn after it": ((["Look: ", ONE, ASK], "A dog.", [THIRD, "And this?"], "A cat.", "Compare them."), 2),
        "the images swapped": ((["Look: ", THIRD, ASK], "A dog.", [ONE, "And this?"]), 0),
        CUT: ((["Look: ", picture(9), ASK],), 0),
    }


CUT = "cut in the middle"
"""A walk before which the same prompt was cancelled in the middle of its image."""
