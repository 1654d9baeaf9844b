"""A model and its adapters on one engine thread: their weights are there once, and their prefixes are their own."""

import json
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from bench.tiny.build import build_model
from reprise.core.backend import WeightsState
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models.adapters import SharedBases
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits
from tests.holding import active_memory
from tests.loop.driving import PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.restarts import words
from tests.matrix import now_and_later
from tests.models.adapters import write_adapter
from tests.models.tiny import CONFIGS, tiny_model

MODEL = "qwen3_5"


class Adapted(DrivenEngine):
    """One of several on a thread, driven like a single one."""

    def __init__(self, settings: Settings, thread: EngineThread) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.settings = settings
        name = settings.adapter_path or f"{Path(settings.model).name}{settings.kv_bits or ''}"
        self.loop = EngineClient(settings, thread=thread, name=name, nbytes=SharedBases().load(settings).nbytes)

    def ready(self) -> "Adapted":
        self.loop.ready().result(PATIENCE_S)
        return self


@pytest.fixture
def choices(tmp_path: Path) -> list[Settings]:
    """The base, and a LoRA and a DoRA on it."""
    paths = [
        str(write_adapter(tmp_path / kind, mlx_lm.load(str(tiny_model(MODEL)))[0], kind=kind, seed=seed))
        for seed, kind in enumerate(("lora", "dora"))
    ]
    return [
        Settings(model=str(tiny_model(MODEL)), adapter_path=path, is_audit_off=True, drafts="off")
        for path in (None, *paths)
    ]


@contextmanager
def serving(choices: list[Settings], *, most_nbytes: int) -> Generator[list[Adapted]]:
    thread = EngineThread(SharedMemory(most_nbytes * 20), limits=ModelLimits(most_nbytes=most_nbytes, turn_s=0.01))
    served = [Adapted(settings, thread) for settings in choices]
    served[0].loop.start()
    try:
        yield served
    finally:
        for each in served:
            each.loop.close(now=True, timeout_s=PATIENCE_S)


@pytest.mark.matrix
def test_they_answer_as_alone_in_the_memory_of_one(choices: list[Settings]) -> None:
    alone = [SharedBases().load(settings) for settings in choices]
    nbytes = alone[0].nbytes
    added = sum(each.nbytes - each.shared_nbytes for each in alone[1:])
    assert added < nbytes / 2
    del alone
    source = random.Random(1)
    prompts = [words(seed, 60) for seed in range(3)]
    asked = [(source.randrange(3), prompts[source.randrange(3)]) for _ in range(8)]
    before = active_memory()
    with serving(choices, most_nbytes=nbytes + added) as served:
        for each in served:
            each.ready()
        assert active_memory() - before < nbytes + added + 100_000
        running = [served[index].ready().submit(prompt) for index, prompt in asked]
        answers = [each.wait().tokens for each in running]
        assert all(each.loop.status().weights is WeightsState.READY for each in served), "nobody had to go"
        # Found again by each, and by nobody else.
        for index, prompt in asked:
            assert served[index].run(prompt).computed == 0
        served[0].loop.dismiss().result(PATIENCE_S)
        served[1].loop.dismiss().result(PATIENCE_S)
        assert served[0].ready().run(prompts[0]).tokens
        for each in served:
            each.loop.dismiss().result(PATIENCE_S)
    assert active_memory() - before < 100_000
    for choice, settings in enumerate(choices):
        engine = DrivenEngine(Path(settings.model), adapter_path=settings.adapter_path, has_prefix_cache=False)
        try:
            for (index, prompt), answer in zip(asked, answers, strict=True):
                assert index != choice or engine.run(prompt).tokens == answer
        finally:
            engine.close()


@pytest.mark.matrix
def test_two_kv_formats_have_the_weights_once_and_a_tree_each(tmp_path: Path) -> None:
    build_model(tmp_path / "wide", {**CONFIGS["llama"], "head_dim": 32}, vocab_size=512)
    plain = Settings(model=str(tmp_path / "wide"), is_audit_off=True)
    quantised = replace(plain, kv_bits=8, kv_group_size=32)
    nbytes = SharedBases().load(plain).nbytes
    prompt = words(3, 60)
    # Room for one.
    with serving([plain, quantised], most_nbytes=nbytes) as served:
        answers = [each.ready().run(prompt).tokens for each in served]
        assert [each.loop.status().weights for each in served] == [WeightsState.READY] * 2
        memory = served[0].ask(lambda worker: worker.memory.shared)
        assert memory.weights_nbytes == nbytes, "charged once"
        assert [each.run(prompt).computed for each in served] == [0, 0]
        assert served[1].run([*prompt, 5]).computed == 1
    for settings, answer in zip((plain, quantised), answers, strict=True):
        engine = DrivenEngine(Path(settings.model), kv_bits=settings.kv_bits, kv_group_size=settings.kv_group_size)
        try:
            assert engine.run(prompt).tokens == answer
        finally:
            engine.close()


def test_weights_that_an_adapter_replaces_are_charged_beside_the_base(tmp_path: Path) -> None:
    """`mlx_lm.lora --fine-tune-type full` writes the layers that it trained; the base stays whole."""
    base = SharedBases().load(Settings(model=str(tiny_model("llama"))))
    name = "model.layers.1.mlp.down_proj.weight"
    trained = dict(tree_flatten(base.model.parameters()))[name] * 2
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: trained})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    plain = Settings(model=str(tiny_model("llama")), is_audit_off=True)
    for choices in ([plain, replace(plain, adapter_path=str(tmp_path))], [replace(plain, adapter_path=str(tmp_path))]):
        with serving(choices, most_nbytes=base.nbytes + trained.nbytes) as served:
            for each in served:
                each.ready()
            memory = served[0].ask(lambda worker: worker.memory.shared)
            assert memory.weights_nbytes == base.nbytes + trained.nbytes


@pytest.mark.matrix
def test_preloading_sends_nobody_away() -> None:
    settings = [Settings(model=str(tiny_model(name)), is_audit_off=True) for name in ("llama", "qwen3_5")]
    nbytes = [SharedBases().load(each).nbytes for each in settings]
    with serving(settings, most_nbytes=max(nbytes)) as (first, second):
        first.ready()
        with pytest.raises(LoadFailed, match=r"qwen3_5 does not fit beside llama: its weights take .* are left\."):
            second.loop.preload().result(PATIENCE_S)
        assert first.loop.status().weights is WeightsState.READY
        assert second.ready().loop.status().weights is WeightsState.READY, "who asks for it has it"
        with pytest.raises(LoadFailed):
            first.loop.preload().result(PATIENCE_S)
    with serving(settings, most_nbytes=sum(nbytes)) as (first, second):
        second.loop.preload().result(PATIENCE_S)
        assert [each.loop.status().weights for each in (first, second)] == [WeightsState.READY] * 2


@pytest.mark.parametrize("seed", now_and_later([], [1]))
def test_adapters_are_swapped_under_load_and_answer_as_alone(choices: list[Settings], seed: int) -> None:
    """In room for the base and one adapter: chats of all three grow, and weights come and go by hand, too."""
    source = random.Random(seed)
    alone = [SharedBases().load(settings) for settings in choices]
    nbytes, added = alone[0].nbytes, max(each.nbytes - each.shared_nbytes for each in alone[1:])
    del alone
    chats = [words(seed + index, 60) for index in range(3)]
    answers: list[tuple[int, list[int], list[int]]] = []
    with serving(choices, most_nbytes=nbytes + added) as served:
        for _ in range(12):
            running: list[tuple[int, SubmittedJob]] = []
            for index in source.sample(range(3), 2):
                running.append((index, served[index].ready().submit(chats[index], num=source.randint(1, 8))))
                if source.random() < 0.3:
                    served[index].loop.dismiss()
            for index, each in running:
                answers.append((index, chats[index], each.wait().tokens))
                chats[index] = [*chats[index], *each.tokens, *words(source.randrange(1000), 10)]
            shared = served[0].ask(lambda worker: worker.memory.shared)
            assert shared.weights_nbytes <= nbytes + added and shared.fits(0)
            for each in served:
                if each.loop.status().num_loads > 0:
                    each.ask(Worker.check)
        assert sum(each.loop.status().num_loads for each in served) > 4, "they were swapped"
    for choice, settings in enumerate(choices):
        engine = DrivenEngine(Path(settings.model), adapter_path=settings.adapter_path)
        try:
            for index, prompt, answer in answers:
                assert index != choice or engine.run(prompt, num=len(answer)).tokens == answer
        finally:
            engine.close()
