"""What we lean on in mlx-vlm: if one of these fails after an upgrade, layers, blueprint or source have to follow."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reprise.core.kinds import Chunk, Full, Window
from reprise.engine.models.load import load_model
from reprise.engine.running.cold_run import ColdRun, GivenAnswer
from reprise.engine.running.image_features import inputs_of
from reprise.engine.running.runner import Runner
from reprise.engine.states.blueprint import KvSpec, OpaqueSpec, PartsSpec, Spec, StateSpec, blueprint_of
from reprise.engine.states.layers import FullLayer, StateLayer
from reprise.engine.states.seeing import Positions, SeeingModel
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.engine.states.windows import ChunkLayer, WindowLayer
from tests.vision.chats import a_seeing_job, as_vlm_reads_it, cold, picture, prompt_of, seeing
from tests.vision.families import FAMILIES, FURTHER
from tests.vision.tiny import seeing_model

vlm_cache: Any = pytest.importorskip("mlx_vlm.models.cache", reason="the extra `vision` is not installed")

ALL = (*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER))
MADE: dict[str, tuple[dict[str, Any], Spec]] = {
    "KVCache": ({}, KvSpec(Full())),
    "ConcatenateKVCache": ({}, KvSpec(Full())),
    "QuantizedKVCache": ({"group_size": 32, "bits": 4}, KvSpec(Full(), 4, 32)),
    "RotatingKVCache": ({"max_size": 24, "keep": 3}, KvSpec(Window(24, 3))),
    "ChunkedKVCache": ({"chunk_size": 8192}, KvSpec(Chunk(8192))),
    "ArraysCache": ({"size": 2}, StateSpec(2)),
}
UNKNOWN = ("PoolingCache", "SimpleKVCache", "StaticPrefixKVCache", "BufferedRotatingKVCache")
"""Classes that mlx-lm does not have: used as they are."""
OWN_WAY = ("BatchKVCache", "BatchRotatingKVCache", "BatchQuantizedKVCache", "BatchPoolingCache")
"""What our layers do instead."""


class MakesVlmCaches:
    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def make_cache(self) -> list[Any]:
        return list(self.caches)


def specs_of_vlm(*caches: Any) -> tuple[Spec, ...]:
    return blueprint_of(MakesVlmCaches(*caches)).specs  # type: ignore[arg-type]


def test_no_class_of_caches_has_come_or_gone_in_vlm() -> None:
    base = vlm_cache._BaseCache
    classes = {name for name, cls in inspect.getmembers(vlm_cache, inspect.isclass) if issubclass(cls, base)}
    assert classes - {"_BaseCache"} == {*MADE, "CacheList", *UNKNOWN, *OWN_WAY}


@pytest.mark.parametrize("name", MADE)
def test_vlm_caches_are_recognised_exactly(name: str) -> None:
    given, spec = MADE[name]
    cls = getattr(vlm_cache, name)
    assert specs_of_vlm(cls(**given)) == (spec,)
    both = vlm_cache.CacheList(cls(**given), vlm_cache.KVCache())
    assert specs_of_vlm(both) == (PartsSpec((spec, KvSpec(Full()))),)
    (changed,) = specs_of_vlm(type("Changed", (cls,), {})(**given))
    assert isinstance(changed, OpaqueSpec)


def test_what_is_not_known_stays_opaque() -> None:
    (spec,) = specs_of_vlm(vlm_cache.SimpleKVCache())
    assert isinstance(spec, OpaqueSpec)


@pytest.mark.parametrize("family", ALL)
def test_an_image_alone_gives_the_rows_that_it_has_in_a_prompt(family: str) -> None:
    """Bit for bit: so that there is no code for a family."""
    loaded = seeing(family)
    prompt, ids, named = as_vlm_reads_it(family)
    assert loaded.vision is not None
    assert isinstance(loaded.model, SeeingModel)
    rows, reader, model = SequenceBatch(loaded.blueprint), loaded.vision.reader, loaded.model
    rows.images = [prompt.images]
    made = inputs_of(model, rows, prompt.tokens[None], lambda image: model.encode(reader.prepare(image)))
    at = np.flatnonzero(prompt.tokens < 0)
    theirs = np.flatnonzero(ids == reader.expand(picture(1)).placeholder)
    # A processor may put a token before the text that the template has written already.
    assert len(theirs) == len(at)
    assert np.array_equal(theirs - theirs[0], at - at[0])
    whole: Any = model.whole  # type: ignore[attr-defined]
    mask = named.pop("attention_mask", None)
    found = whole.get_input_embeddings(mx.array(ids[None]), named.pop("pixel_values"), mask=mask, **named)
    assert mx.array_equal(made.embedded.embeds[0][mx.array(at)], found.inputs_embeds[0][mx.array(theirs)])
    deep = found.deepstack_visual_embeds
    assert len(made.deep) == (0 if deep is None else len(deep))
    assert all(mx.array_equal(mine, other) for mine, other in zip(made.deep, deep or (), strict=True))
    if found.per_layer_inputs is not None:
        assert made.embedded.per_layer is not None
        assert mx.array_equal(made.embedded.per_layer[0], found.per_layer_inputs[0][int(theirs[0] - at[0]) :])


@pytest.mark.parametrize("family", [each for each in ALL if each not in ("gemma3", "gemma4")])
def test_a_prompt_with_images_is_what_mlx_vlm_makes_of_it(family: str) -> None:
    """Its positions, and where deep rows are added. Gemma's own answer is another one: see the masks."""
    loaded = seeing(family)
    prompt, ids, named = as_vlm_reads_it(family)
    whole: Any = loaded.model.whole  # type: ignore[attr-defined]
    whole.language_model._position_ids = None
    named.pop("attention_mask", None)
    out = whole(mx.array(ids[None]), named.pop("pixel_values"), mask=None, cache=loaded.model.make_cache(), **named)  # type: ignore[attr-defined]
    theirs = out.logits[0][-len(prompt) :]
    ours = cold(loaded, prompt)
    assert float((mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item()) < 1e-4


TOLD = [name for name in (*FAMILIES, *FURTHER) if name.startswith(("qwen", "glm")) or name == "minicpmv4_6"]
"""Families that have to be told where tokens stand."""


@pytest.mark.parametrize("family", TOLD)
def test_every_pass_is_told_where_it_stands_and_nothing_is_read_off_the_model(family: str) -> None:
    """Prefill, decode, passes run ahead, verification, undoing and audits, on a model object that lies."""
    loaded = seeing(family)
    assert loaded.blueprint.positions is not Positions.OWN
    language: Any = loaded.model.whole.language_model  # type: ignore[attr-defined]
    lie, lies = mx.array([[-40]]), mx.full((3, 1, 500), 7)
    language._rope_deltas, language._position_ids = lie, lies
    prompt = prompt_of(loaded, ["Look: ", picture(1), "What is it?"])
    runner = Runner(loaded, can_batch=True)
    live = runner.begin()
    live.see(prompt.images)
    runner.prefill([live], [prompt.tokens[:-1]])
    job = a_seeing_job(prompt, num=12)
    runner.begin_decode(live, job)
    said: list[int] = []
    logprobs: list[float] = []
    for draft in ((), (), (5, 6), (), (7, 7, 7), ()):
        for result in runner.decode([live], drafts=[draft]):
            said += [sampled.token for sampled in result.sampled]  # type: ignore[union-attr]
    assert language._rope_deltas is lie
    assert language._position_ids is lies
    logprobs = [0.0] * len(said)
    given = GivenAnswer(job=_seeded(job), tokens=tuple(said), logprobs=tuple(logprobs), outcome=None)  # type: ignore[arg-type]
    cold = ColdRun(Runner(loaded, can_batch=True), given, chunk=7)
    while not cold.is_over:
        cold.step()
    assert cold.others == []
    assert language._rope_deltas is lie
    assert language._position_ids is lies


def _seeded(job: Any) -> Any:
    return replace(job, sampling=replace(job.sampling, seed=1))


@pytest.mark.parametrize("family", TOLD)
def test_a_pass_that_is_told_nothing_is_refused(family: str) -> None:
    loaded = seeing(family)
    with pytest.raises(AssertionError, match="told where its tokens stand"):
        loaded.model(mx.array([[1, 2]]), cache=loaded.blueprint.build())


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma4"])
def test_text_is_what_mlx_lm_makes_of_it(family: str) -> None:
    """Whoever turns images off loses nothing else."""
    seen, blind = seeing(family), load_model(str(seeing_model(family)), images="off")
    assert blind.vision is None
    assert blind.text.images is None
    assert blind.fingerprint != seen.fingerprint
    tokens = mx.array([seen.text.encode("Words without any picture, which both read alike.")])
    mine, theirs = (SequenceBatch(each.blueprint).forward(each.model, tokens) for each in (seen, blind))
    assert float((mx.abs(mine - theirs).max() / mx.abs(theirs).max()).item()) < 1e-5


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_an_image_sees_all_of_itself_where_its_family_does(family: str) -> None:
    """Without the layers' masks the answer is the causal one, which is mlx-vlm's in every resumed pass."""
    loaded = seeing(family)
    prompt = prompt_of(loaded, ["Look: ", picture(1), "What is it?"])
    causal = replace(loaded, blueprint=replace(loaded.blueprint, both_ways=frozenset()))
    seen, blind = cold(loaded, prompt), cold(causal, prompt)
    first = prompt.images[0].span.start
    assert mx.array_equal(seen[:first], blind[:first])
    assert float((mx.abs(seen - blind).max() / mx.abs(seen).max()).item()) > 1e-2


@pytest.mark.matrix
def test_llama4s_patches_are_cut_at_once_and_are_mlx_vlms() -> None:
    cut: Any = seeing("llama4").model.whole.vision_model.patch_embedding  # type: ignore[attr-defined]
    pixels = mx.random.normal((2, 3, 56, 56), key=mx.random.key(0))
    assert mx.array_equal(cut.unfold(pixels), type(cut).unfold(cut, pixels))
    assert cut.unfold.func is not type(cut).unfold, "mlx-vlm's takes seconds for a published model"


def test_an_audit_holds_an_image_whole() -> None:
    loaded = seeing("gemma3")
    prompt = prompt_of(loaded, ["Look: ", picture(1), "What is it?", picture(2), "And this?"])
    job = _seeded(a_seeing_job(prompt))
    given = GivenAnswer(job=job, tokens=(5,), logprobs=(0.0,), outcome=None)  # type: ignore[arg-type]
    for chunk in (1, 7, 20, 1000):
        run = ColdRun(Runner(loaded, can_batch=True), given, chunk=chunk)
        while not run.is_over:
            run.step()


def _read_off_caches(path: Path) -> Iterator[str]:
    """The attributes of something called a cache that a file of mlx-vlm reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            value = node.value
            if isinstance(value, ast.Name) and value.id in ("cache", "c", "c0", "fa_cache", "cache_entry"):
                yield node.attr


DEFAULTED = {"__class__", "append", "_idx", "left_padding", "metadata_revision", "cache", "extract", "merge"}
"""Read only where a cache has them, which ours do not."""


@pytest.mark.parametrize("family", ALL)
def test_models_read_off_caches_what_ours_have(family: str) -> None:
    module = {"gemma4_shared": "gemma4", "minicpmv4_6": "qwen3_5"}.get(family, family)
    folder = Path(inspect.getfile(vlm_cache)).parent / module
    read = {name for file in folder.glob("language.py") for name in _read_off_caches(file)}
    ours = {
        name
        for layer in (FullLayer(), StateLayer(1), WindowLayer(Window(4)), ChunkLayer(Chunk(4)))
        for name in dir(layer)
    }
    speculative = {
        name
        for name in read
        if "speculat" in name or name.startswith("_qwen3_5") or name in ("trim", "copy", "rollback", "values", "keys")
    }
    assert read - ours - DEFAULTED - speculative == set()
