"""An assistant reads the entries of the model's own layers: nothing is stored for it, and nothing is missing."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench.tiny.build import build_model
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.errors import LoadFailed
from reprise.core.kinds import Full, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens
from reprise.engine.models.headed import GuessingModel, GuessRequest
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from tests.models.headed import ASSISTED, assistant, config_of, plain_model
from tests.zoo.sizes import WINDOW

TOKENS = np.random.default_rng(3).integers(0, 250, 3 * WINDOW).astype(np.int32)
LENGTHS = (1, WINDOW - 1, WINDOW + 1, 2 * WINDOW + 5)
"""In the first window and behind it. Of a text as long as the window mlx-vlm sees one entry more than of any other."""


def assisted(architecture: str, kind: str = "tied", **more: Any) -> LoadedModel:
    folder = assistant(architecture, kind)
    return load_model(str(plain_model(architecture)), mtp=str(folder), **more)


def fed(loaded: LoadedModel, *chunks: np.ndarray) -> SequenceBatch:
    rows = SequenceBatch(loaded.blueprint)
    for chunk in chunks:
        rows.forward(loaded.model, mx.array(chunk[None]))
        mx.eval(rows.arrays())
    return rows


def guessed(loaded: LoadedModel, rows: SequenceBatch, token: int, num: int = 3) -> tuple[list[int], list[mx.array]]:
    """The tokens guessed behind this one, and the logits from which each was chosen."""
    model, seen = loaded.model, list[mx.array]()
    assert isinstance(model, GuessingModel)

    def choose(logits: mx.array, _: int) -> mx.array:
        seen.append(logits)
        return mx.argmax(logits)

    tokens = model.guess(GuessRequest(tokens=[token], num=num, choose=choose), rows.caches)
    mx.eval(seen)
    return [int(each) for each in np.array(tokens)], seen


def gap(some: list[mx.array], others: list[mx.array]) -> float:
    return max(float(mx.abs(a - b).max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", ["tied", "grouped"])
@pytest.mark.parametrize("architecture", ASSISTED)
def test_an_assistant_guesses_as_the_drafter_of_mlx_vlm(architecture: str, kind: str) -> None:
    pytest.importorskip("mlx_vlm")
    theirs: Any = importlib.import_module("mlx_vlm.speculative.drafters.gemma4_assistant.gemma4_assistant")
    loaded = assisted(architecture, kind)
    folder = assistant(architecture, kind)
    drafter = _drafter(theirs, folder)
    drafter.bind(load_model(str(plain_model(architecture))).model)
    for length in LENGTHS:
        rows = fed(loaded, TOKENS[:length])
        assert rows.hidden is not None
        tokens, ours = guessed(loaded, rows, 5)
        drafter.set_shared_kv(_shared(rows), length, position=max(length - 1, 0))
        seen: list[mx.array] = []

        def sampled(logits: mx.array, seen: list[mx.array] = seen) -> mx.array:
            seen.append(logits[0, -1])
            return mx.argmax(logits, axis=-1)

        last = rows.hidden.last(mx.zeros((1, 1, 1)))
        drafted = drafter.draft_block(5, last, None, len(tokens) + 1, sampled)
        assert gap(ours, seen) < 2e-5 * max(1.0, float(mx.abs(seen[0]).max()))
        assert tokens == np.array(drafted)[0].tolist()


def _drafter(theirs: Any, folder: Path) -> Any:
    config = theirs.Gemma4AssistantConfig.from_dict(json.loads((folder / "config.json").read_text()))
    drafter = theirs.Gemma4AssistantDraftModel(config)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    drafter.load_weights(list(drafter.sanitize(weights).items()), strict=True)
    return drafter


def _shared(rows: SequenceBatch) -> dict[str, tuple[mx.array, mx.array]]:
    """The entries of the model's last layer of each kind, as many as a cache of mlx-lm would have."""
    at, found = rows.lengths[0], {}
    for kind, name in ((Full(), "full_attention"), (Window(WINDOW), "sliding_attention")):
        span = Span(0 if name == "full_attention" else max(0, at - WINDOW), at)
        keys, values = rows.layers(kind)[-1].read(0, span)
        found[name] = keys, values
    return found


@pytest.mark.parametrize("architecture", ASSISTED)
def test_the_model_answers_as_without_its_assistant(architecture: str) -> None:
    with_head, plain = assisted(architecture), load_model(str(plain_model(architecture)))
    assert with_head.head is not None and with_head.head.is_there and with_head.head.nbytes_per_token == 0
    rows, others = SequenceBatch(with_head.blueprint), SequenceBatch(plain.blueprint)
    for chunk in (TOKENS[:33], TOKENS[33:]):
        ours, theirs = (
            each.forward(loaded.model, mx.array(chunk[None])) for each, loaded in ((rows, with_head), (others, plain))
        )
        assert mx.array_equal(ours, theirs)


def test_what_was_stored_without_an_assistant_is_found_with_it() -> None:
    plain = load_model(str(plain_model("gemma4")))
    assert assisted("gemma4").fingerprint == plain.fingerprint
    assert load_model(str(plain_model("gemma4_text"))).fingerprint != plain.fingerprint


@pytest.mark.parametrize("architecture", ASSISTED)
def test_after_a_resume_it_guesses_as_after_a_cold_run(architecture: str) -> None:
    loaded = assisted(architecture)
    cache = PrefixCache(loaded.blueprint.layout)
    rows = fed(loaded, TOKENS[:33])
    cache.commit(as_tokens(TOKENS[:33]), SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
    match = cache.match(as_tokens(TOKENS))
    position = cache.resume_at(match, limit=len(TOKENS) - 1)
    assert position == 33
    warm = restored(loaded.blueprint, cache.read(match, position))
    warm.forward(loaded.model, mx.array(TOKENS[None, position:]))
    mx.eval(warm.arrays())
    (tokens, ours), (others, theirs) = (
        guessed(loaded, rows, 5) for rows in (warm, fed(loaded, TOKENS[:33], TOKENS[33:]))
    )
    assert tokens == others and gap(ours, theirs) < 1e-5


def test_guesses_leave_the_layers_as_they_are() -> None:
    loaded = assisted("gemma4_text")
    rows, other = fed(loaded, TOKENS[:40]), fed(loaded, TOKENS[:40])
    guessed(loaded, rows, 5, 4)
    ours, theirs = (each.forward(loaded.model, mx.array(TOKENS[None, 40:])) for each in (rows, other))
    assert mx.array_equal(ours, theirs)


def test_it_reads_quantised_entries(tmp_path: Path) -> None:
    # Gemma's layers that share entries do not take quantised ones.
    directory = tmp_path / "alone"
    build_model(directory, {**config_of("gemma4_text"), "num_kv_shared_layers": 0}, vocab_size=512)
    folder = str(assistant("gemma4_text", "tied"))
    plain, quantised = (load_model(str(directory), mtp=folder, kv_bits=bits, kv_group_size=32) for bits in (None, 8))
    _, ours = guessed(plain, fed(plain, TOKENS[:30]), 5, 1)
    _, theirs = guessed(quantised, fed(quantised, TOKENS[:30]), 5, 1)
    assert 0 < gap(ours, theirs) < 0.1


def test_another_folder_is_refused() -> None:
    with pytest.raises(LoadFailed, match="no tensors of a head"):
        load_model(str(plain_model("gemma4")), mtp=str(plain_model("llama")))
