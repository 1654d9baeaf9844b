"""Families of models that see: seven walks with images, warm against cold; batches; chunks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from reprise.cli.inspection import where_it_resumes
from reprise.core.prompt import Prompt
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.runner import Runner
from reprise.engine.states.seeing import Positions
from tests.vision.chats import CUT, SeenWalk, cold, picture, prompt_of, seeing, seven_walks
from tests.vision.families import FAMILIES, FURTHER
from tools.matrix.gaps import Gap

SEEING = (*FAMILIES, *FURTHER)
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingRow:
    """What one family showed. `faults` are those of our own, which must be none. `batched`: None if it runs alone."""

    name: str
    source: str
    caches: str
    resumes: str
    positions: str
    both_ways: str
    warm: Gap
    batched: Gap | None
    chunked: Gap
    faults: tuple[str, ...]


def measure_seeing(name: str) -> SeeingRow:
    """Load the tiny model and run all checks on it."""
    loaded = seeing(name)
    assert loaded.vision is not None
    sight, faults = loaded.vision.sight, list[str]()
    warm = _walk(loaded, faults)
    prompts = [prompt_of(loaded, ["Look: ", image, "What is it?"]) for image in (picture(1), picture(2, 64, 128))]
    prompts.append(prompt_of(loaded, "No picture."))
    batched, chunked = _together(loaded, prompts) if loaded.blueprint.joins else None, _chunked(loaded)
    for what, gap in (("warm", warm), ("in a batch", batched), ("in chunks", chunked)):
        if gap is not None and not gap.is_rounding:
            faults.append(f"differs {what} by {gap.difference:.1e}: {gap.where}")
    counted = Counter(type(cache).__name__ for cache in loaded.model.make_cache())  # type: ignore[attr-defined]
    return SeeingRow(
        name=name,
        source=sight.source,
        caches=", ".join(f"{num} × {kind}" if num > 1 else kind for kind, num in sorted(counted.items())),
        resumes=where_it_resumes(loaded.blueprint.layout),
        positions={Positions.OWN: "its own", Positions.INDEX: "told", Positions.GRID: "told, grid"}[sight.positions],
        both_ways=" and ".join(sorted(kind.__name__.lower() for kind in sight.both_ways)) or "no",
        warm=warm,
        batched=batched,
        chunked=chunked,
        faults=tuple(faults),
    )


def _walk(loaded: LoadedModel, faults: list[str]) -> Gap:
    walk, gap = SeenWalk(loaded), Gap()
    for name, (turns, num_behind) in seven_walks().items():
        prompt = prompt_of(loaded, *turns)
        if name == CUT:
            walk.cut(prompt)
        at, logits = walk.logits(prompt)
        if sum(each.span.stop <= at for each in prompt.images) != num_behind:
            faults.append(f"{name}: resumed at {at}")
        gap = gap.widened(_log(logits), _log(cold(loaded, prompt)[at:]), name)
    return gap


def _chunked(loaded: LoadedModel) -> Gap:
    prompt = prompt_of(loaded, ["Look: ", picture(1), "What is it?", picture(2, 64, 128), "And this?"])
    whole, gap = _log(cold(loaded, prompt)), Gap()
    for chunk in (1, 7, 64):
        gap = gap.widened(_log(cold(loaded, prompt, chunk=chunk)), whole, f"chunks of {chunk}")
    return gap


def _together(loaded: LoadedModel, prompts: Sequence[Prompt]) -> Gap:
    """Sequences with other images decode together, against each alone."""
    runner, gap = Runner(loaded, can_batch=True), Gap()
    lives = []
    for prompt in prompts:
        live = runner.begin()
        live.see(prompt.images)
        runner.logits(live, prompt.tokens)
        lives.append(live)
    batch = lives[0].rows
    batch.join([live.rows for live in lives[1:]])
    for step in range(_STEPS):
        tokens = [(20 + 5 * row + step) % loaded.vocab_size for row in range(len(prompts))]
        logits = batch.forward(loaded.model, mx.array(tokens)[:, None])
        mx.eval(logits, batch.arrays())
        for row, prompt in enumerate(prompts):
            said = [(20 + 5 * row + earlier) % loaded.vocab_size for earlier in range(step + 1)]
            alone = runner.begin()
            alone.see(prompt.images)
            runner.logits(alone, prompt.tokens)
            for token in said:
                expected = alone.rows.forward(loaded.model, mx.array([[token]]))
            gap = gap.widened(_log(logits[row]), _log(expected[0]), f"row {row}, step {step}")
            runner.drop(alone)
    return gap


def _log(logits: mx.array) -> mx.array:
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)
