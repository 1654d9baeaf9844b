"""A head's entries follow from the tokens, as all others do, and what it guesses needs nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.errors import LoadFailed
from reprise.core.job import Job, Sampling
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Span, as_tokens
from reprise.engine.models.headed import HeadedModel, MtpHead
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner, TokenResult
from reprise.engine.states.layers import MOST_WAITING, FullLayer
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from tests.holding import active_memory, settled_memory
from tests.models.headed import (
    HEADED,
    PLACES,
    checkpoint_names,
    head_tensors,
    headed_model,
    loaded_with_head,
    read_weights,
    without_tensors_of_head,
    write_weights,
)

TOKENS = np.random.default_rng(3).integers(0, 500, 60).astype(np.int32)
KINDS = ("qwen3_5", "glm4_moe", "deepseek_v3")
"""With recurrent state, with attention alone, with latents."""
_SPARE = 20_000
"""MLX does not copy what would free less than 16 KB."""


def guesses(loaded: LoadedModel, rows: SequenceBatch, row: int, token: int, num: int = 3) -> list[mx.array]:
    """The head's outputs behind `token`, which is not fed, each from the one before; its entries are undone."""
    model = loaded.model
    assert isinstance(model, HeadedModel) and rows.hidden is not None
    rows.write_waiting()
    own = layers_of_head(rows)
    embeddings = model.embed_tokens(mx.array([[token]]))
    hidden, found = rows.hidden.last(embeddings)[row : row + 1], list[mx.array]()
    for _ in range(num):
        hidden = model.head.output(embeddings, hidden, own)
        found.append(hidden)
        embeddings = model.embed_tokens(mx.argmax(model.logits(hidden)[:, -1], axis=-1)[None])
    mx.eval(found)
    for layer in own:
        layer.undo_last(num)
    return found


def layers_of_head(rows: SequenceBatch) -> list[FullLayer]:
    return [state for state in rows.states if isinstance(state, FullLayer) and state.hides_first]


def singles(tokens: np.ndarray) -> list[np.ndarray]:
    """Chunks of one token."""
    return np.split(tokens, len(tokens))


def num_waiting(rows: SequenceBatch) -> int:
    assert rows.hidden is not None
    assert all(layer.num_unwritten == len(rows.hidden.waiting) for layer in layers_of_head(rows))
    return len(rows.hidden.waiting)


def entries(rows: SequenceBatch, row: int = 0) -> list[mx.array]:
    """Those of the head, without the first, which nobody sees."""
    return [plane for layer in layers_of_head(rows) for plane in layer.read(row, Span(1, rows.lengths[row]))]


def fed(loaded: LoadedModel, *chunks: np.ndarray) -> SequenceBatch:
    rows = SequenceBatch(loaded.blueprint)
    for chunk in chunks:
        rows.forward(loaded.model, mx.array(chunk[None]))
        mx.eval(rows.arrays())
    return rows


def prefilled(runner: Runner, text: np.ndarray) -> LiveSequence:
    live = runner.begin()
    runner.prefill([live], [text])
    return live


def gap(some: list[mx.array], others: list[mx.array]) -> float:
    return max(float(mx.abs(a - b).max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("architecture", HEADED)
def test_the_model_answers_as_without_its_head(architecture: str) -> None:
    with_head = loaded_with_head(architecture)
    plain = load_model(str(headed_model(architecture)), mtp="off")
    assert with_head.head is not None and with_head.head.is_there and plain.head is None
    assert with_head.fingerprint != plain.fingerprint
    rows, others = SequenceBatch(with_head.blueprint), SequenceBatch(plain.blueprint)
    for chunk in (TOKENS[:33], TOKENS[33:]):
        ours, theirs = (
            each.forward(loaded.model, mx.array(chunk[None])) for each, loaded in ((rows, with_head), (others, plain))
        )
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("architecture", HEADED)
def test_guesses_do_not_depend_on_how_the_text_was_cut(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    whole, cut = fed(loaded, TOKENS), fed(loaded, TOKENS[:1], TOKENS[1:20], TOKENS[20:59], TOKENS[59:])
    assert gap(guesses(loaded, whole, 0, 5), guesses(loaded, cut, 0, 5)) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_no_guess_sees_the_entry_of_the_first_token(architecture: str) -> None:
    """It would stand behind a hidden state that does not exist."""
    loaded = loaded_with_head(architecture)
    rows, changed = fed(loaded, TOKENS), fed(loaded, TOKENS)
    for layer in layers_of_head(changed):
        layer.planes = [mx.concatenate([plane[..., :1, :] + 3, plane[..., 1:, :]], axis=2) for plane in layer.planes]
    assert gap(guesses(loaded, rows, 0, 5), guesses(loaded, changed, 0, 5)) == 0


@pytest.mark.parametrize("architecture", KINDS)
def test_a_batch_of_rows_of_different_lengths_has_the_entries_of_each_alone(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    lengths = (11, 1, 7)
    alone = [fed(loaded, TOKENS[:n], TOKENS[n : n + 1], TOKENS[n + 1 : n + 4]) for n in lengths]
    batch, *others = [fed(loaded, TOKENS[:n]) for n in lengths]
    batch.join(others)
    for low, high in ((0, 1), (1, 4)):
        batch.forward(loaded.model, mx.array(np.stack([TOKENS[n + low : n + high] for n in lengths])))
        mx.eval(batch.arrays())
    for row, rows in enumerate(alone):
        single = batch.copy_rows([row])
        assert gap(guesses(loaded, single, 0, 5), guesses(loaded, rows, 0, 5)) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_after_a_resume_the_head_guesses_as_after_a_cold_run(architecture: str) -> None:
    """Models that resume anywhere lack the hidden state there: one entry is made of zeros, the answer is the same."""
    loaded = loaded_with_head(architecture)
    cold, cache = fed(loaded, TOKENS), PrefixCache(loaded.blueprint.layout)
    for stop in (33, 45):
        rows = fed(loaded, TOKENS[:stop])
        cache.commit(as_tokens(TOKENS[:stop]), SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
    match = cache.match(as_tokens(TOKENS))
    position = cache.resume_at(match, limit=59)
    assert position == 45
    warm = restored(loaded.blueprint, cache.read(match, position))
    warm.forward(loaded.model, mx.array(TOKENS[None, position:]))
    mx.eval(warm.arrays())
    distance = gap(guesses(loaded, warm, 0, 5), guesses(loaded, cold, 0, 5))
    if loaded.blueprint.layout.has_snapshots:
        assert distance < 1e-4
    else:
        assert 0 < distance < 3


@pytest.mark.parametrize("architecture", KINDS)
def test_undone_tokens_leave_nothing_behind(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    rows, plain = fed(loaded, TOKENS[:40]), fed(loaded, TOKENS[:40], TOKENS[40:42])
    before = rows.save_recurrent()
    rows.forward(loaded.model, mx.array(TOKENS[None, 40:46]))
    if loaded.blueprint.rewinds:
        rows.undo_last(4, before)
    else:
        rows.undo_last(6, before)
        rows.forward(loaded.model, mx.array(TOKENS[None, 40:42]))
    mx.eval(rows.arrays())
    assert gap(guesses(loaded, rows, 0, 5), guesses(loaded, plain, 0, 5)) < 1e-4


@pytest.mark.parametrize("architecture", HEADED)
def test_entries_of_tokens_that_came_one_by_one_are_written_later_and_are_the_same(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    rows, whole = fed(loaded, TOKENS[:20], *singles(TOKENS[20:])), fed(loaded, TOKENS)
    assert num_waiting(rows) == 40
    with pytest.raises(AssertionError, match="written before they are read"):
        entries(rows)
    rows.write_waiting()
    assert num_waiting(rows) == 0
    assert gap(entries(rows), entries(whole)) < 1e-4
    # A pass over several writes those before it.
    rows = fed(loaded, TOKENS[:20], *singles(TOKENS[20:50]), TOKENS[50:])
    assert num_waiting(rows) == 0
    assert gap(entries(rows), entries(whole)) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_entries_that_wait_are_undone_with_their_tokens(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    rows, whole = fed(loaded, TOKENS[:20], *singles(TOKENS[20:25])), fed(loaded, TOKENS[:30])
    for token in TOKENS[25:30]:
        before = rows.save_recurrent()
        rows.forward(loaded.model, mx.array([[7]]))
        rows.undo_last(1, before)
        rows.forward(loaded.model, mx.array([[int(token)]]))
    assert num_waiting(rows) == 10
    rows.write_waiting()
    assert gap(entries(rows), entries(whole)) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_rows_that_come_and_go_write_what_waits_before(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    lengths = (11, 20, 7)
    alone = [fed(loaded, TOKENS[:n], *singles(TOKENS[n : n + 9])) for n in lengths]
    batch, *others = [fed(loaded, TOKENS[:n], *singles(TOKENS[n : n + k])) for k, n in enumerate(lengths, start=1)]
    batch.join(others)
    assert num_waiting(batch) == 0
    # Each has its own text, from where it is.
    for step in range(4):
        batch.forward(loaded.model, mx.array([[int(TOKENS[length])] for length in batch.lengths]))
        assert num_waiting(batch) == step + 1
    twin = batch.copy_rows([1])
    assert num_waiting(batch) == 0
    batch.forward(loaded.model, mx.array([[int(TOKENS[length])] for length in batch.lengths]))
    batch.keep_rows([0, 2])
    assert num_waiting(batch) == num_waiting(twin) == 0
    for rows, row, of in ((batch, 0, 0), (batch, 1, 2), (twin, 0, 1)):
        alone[of].write_waiting()
        num = rows.lengths[row]
        expected = [plane for layer in layers_of_head(alone[of]) for plane in layer.read(0, Span(1, num))]
        assert gap(entries(rows, row), expected) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("shares", [False, True])
def test_what_waits_is_written_before_it_is_stored(architecture: str, shares: bool) -> None:
    loaded = loaded_with_head(architecture)
    runner, cache = Runner(loaded, can_batch=True), PrefixCache(loaded.blueprint.layout)
    live = prefilled(runner, TOKENS[:20])
    for token in singles(TOKENS[20:45]):
        runner.prefill([live], [token])
    assert num_waiting(live.rows) == 25
    cache.commit(as_tokens(TOKENS[:45]), runner.source(live, shares=shares), kind=BoundaryKind.STABLE)
    warm = restored(loaded.blueprint, cache.read(cache.match(as_tokens(TOKENS)), 45))
    assert gap(entries(warm), entries(fed(loaded, TOKENS[:45]))) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_what_waits_is_forgotten_where_an_idle_sequence_returns_to_before_it(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    runner, cache = Runner(loaded, can_batch=True), PrefixCache(loaded.blueprint.layout)
    live = prefilled(runner, TOKENS[:30])
    cache.commit(as_tokens(TOKENS[:30]), runner.source(live, shares=True), kind=BoundaryKind.STABLE)
    for token in singles(TOKENS[40:50]):
        runner.prefill([live], [token])
    runner.keep_idle(live)
    runner.begin_restore(live, 30, reserve=60, keeps_full=True)
    assert num_waiting(live.rows) == 0
    while live.restoration is not None:
        runner.restore_part(live, cache.read(cache.match(as_tokens(TOKENS)), 30))
    for token in singles(TOKENS[30:45]):
        runner.prefill([live], [token])
    live.rows.write_waiting()
    known = slice(None) if loaded.blueprint.layout.has_snapshots else slice(30, None)
    # Where snapshots are not needed, the hidden state behind a restored text is not known.
    cold = [plane[:, :, known] for plane in entries(fed(loaded, TOKENS[:45]))]
    assert gap([plane[:, :, known] for plane in entries(live.rows)], cold) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_what_waits_is_written_before_the_head_guesses(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    runner = Runner(loaded, can_batch=True)
    job = Job(id="it", prompt=Prompt(tokens=as_tokens(TOKENS)), max_tokens=40, sampling=Sampling(temperature=0))
    live = prefilled(runner, TOKENS[:-1])
    runner.begin_decode(live, job)
    answer: list[int] = []
    while len(answer) < 8:
        (result,) = runner.decode([live])
        assert isinstance(result, TokenResult)
        answer += [each.token for each in result.sampled]
    text = np.array([*TOKENS, *answer], dtype=np.int32)
    other = prefilled(runner, text[:-1])
    runner.begin_decode(other, replace(job, prompt=Prompt(tokens=as_tokens(text))))
    for _ in range(2):
        assert num_waiting(live.rows) > 0 or _ == 1
        assert runner.guess(live, 5) == runner.guess(other, 5)


def test_no_more_than_some_tokens_wait_and_their_bytes_are_counted_and_foreseen() -> None:
    # One of attention alone, of which nothing else grows within its reservation.
    loaded = loaded_with_head("glm4_moe")
    runner = Runner(loaded, can_batch=True)
    text = np.resize(TOKENS, 30 + MOST_WAITING + 4)
    runner.drop(prefilled(runner, text))
    memory = active_memory()
    live = prefilled(runner, text[:30])
    live.rows.reserve(len(text) + 1)
    most = runner.most_live_nbytes(len(text), chunk=len(text))
    waited: list[int] = []
    for token in singles(text[30:]):
        before, foreseen = runner.live_nbytes, runner.growth_to_decode([live], 1)
        runner.prefill([live], [token])
        waited.append(num_waiting(live.rows))
        assert runner.live_nbytes - before <= foreseen == runner.footprint.waiting
        assert runner.live_nbytes <= most
        if waited[-1] == MOST_WAITING - 1:
            assert settled_memory() - memory <= runner.live_nbytes + _SPARE
    assert waited == [*range(1, MOST_WAITING), 0, *range(1, 5)]
    live.rows.write_waiting()
    assert gap(entries(live.rows), entries(fed(loaded, text))) < 1e-3


@pytest.mark.parametrize("architecture", KINDS)
def test_rows_of_which_different_numbers_were_undone_guess_as_alone(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    starts, taken = (40, 31, 25), (2, 6, 0)
    rows, *others = [fed(loaded, TOKENS[:start]) for start in starts]
    rows.join(others)
    before = rows.save_recurrent()
    rows.forward(loaded.model, mx.array(np.stack([TOKENS[start : start + 6] for start in starts])))
    # Recurrent rows return as a whole.
    kept = taken if loaded.blueprint.rewinds else (0, 6, 0)
    rows.undo_last([6 - num for num in kept], before)
    mx.eval(rows.arrays())
    for row, (start, num) in enumerate(zip(starts, kept, strict=True)):
        plain = fed(loaded, TOKENS[:start], *([TOKENS[start : start + num]] if num > 0 else []))
        mine = rows.copy_rows([row])
        assert gap(guesses(loaded, mine, 0, 5), guesses(loaded, plain, 0, 5)) < 1e-4


@pytest.mark.parametrize("architecture", KINDS)
def test_rows_that_keep_a_token_which_waits_have_its_entry_where_others_lose_theirs(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    starts, kept = (20, 11), (3, 2)
    rows, *others = [fed(loaded, TOKENS[:start]) for start in starts]
    rows.join(others)
    before = rows.save_recurrent()
    for _ in range(3):
        before = rows.save_recurrent()
        rows.forward(loaded.model, mx.array([[int(TOKENS[length])] for length in rows.lengths]))
    rows.undo_last([3 - num for num in kept], before)
    for row, (start, num) in enumerate(zip(starts, kept, strict=True)):
        whole = fed(loaded, TOKENS[: start + num])
        assert gap(entries(rows, row), entries(whole)) < 1e-4
        assert gap(guesses(loaded, rows.copy_rows([row]), 0, 5), guesses(loaded, whole, 0, 5)) < 1e-4


def test_what_is_stored_with_one_head_is_not_for_another(tmp_path: Path) -> None:
    """Their entries have the same shapes, so the fingerprint alone tells them apart."""
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    found = {load_model(str(directory), mtp="off").fingerprint}
    for seed in (7, 8):
        folder = tmp_path / f"drafter-{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
        tensors = head_tensors(json.loads((directory / "config.json").read_text()), seed=seed)
        write_weights(folder / "model.safetensors", tensors)
        found.add(load_model(str(directory), mtp=str(folder)).fingerprint)
    assert len(found) == 3


@pytest.mark.every_model
@pytest.mark.parametrize("architecture", ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo", "mimo_v2_flash"])
def test_it_computes_the_formula_of_the_paper(architecture: str) -> None:
    """DeepSeek-V3 (2412.19437), equations 21 to 23, of the whole text at once and with the checkpoint's own names.

    ``h'_i = M [norm(h_i); norm(embedding of token i + 1)]`` through one layer of the model; MiMo takes these in the
    other order than its halves are stored for the others. Its place in the text is the same for all, so that counting
    from 0 makes no difference.
    """
    loaded = loaded_with_head(architecture)
    model = loaded.model
    assert isinstance(model, HeadedModel) and isinstance(model.head, MtpHead)
    config = json.loads((headed_model(architecture) / "config.json").read_text())
    stored = checkpoint_names(config, head_tensors(config))
    own = {".".join(name.split(".")[-2:]): array for name, array in stored.items()}
    rows = SequenceBatch(loaded.blueprint)
    rows.forward(model, mx.array(TOKENS[None, :-1]))
    assert rows.hidden is not None and rows.hidden.recent is not None
    hidden, embedded = rows.hidden.recent, model.embed_tokens(mx.array(TOKENS[None, 1:]))
    eps = float(config.get("rms_norm_eps") or config["layernorm_epsilon"])

    def normalised(x: mx.array, *names: str) -> mx.array:
        weight = next(own[f"{name}.weight"] for name in names if f"{name}.weight" in own)
        return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight

    token, state = normalised(embedded, "enorm", "token_layernorm"), normalised(hidden, "hnorm", "hidden_layernorm")
    if architecture == "mimo":
        x = mx.concatenate([state, token], axis=-1) @ own["input_proj.weight"].T
    else:
        x = mx.concatenate([token, state], axis=-1) @ own["eh_proj.weight"].T
    at = mx.arange(x.shape[1])
    window = int(config["sliding_window_size"]) if architecture == "mimo_v2_flash" else len(TOKENS)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
    expected = normalised(model.head.layers[0](x, mask=mask, cache=None), "shared_head.norm", "final_layernorm", "norm")
    own_layers = rows.caches[-2:-1]
    last = rows.hidden.last(mx.zeros((1, 1, 1)))
    ours = model.head.output(model.embed_tokens(mx.array(TOKENS[None, -1:])), last, own_layers)
    assert gap([ours[:, -1]], [expected[:, -1]]) < 1e-4


# Where a head comes from.


def moved(directory: Path, place: str, *, prefix: str) -> Path:
    """Put the head of a Qwen there, of which the weights have none; returns the model's directory."""
    file = directory / place
    file.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    tensors = {prefix + name: array for name, array in head_tensors(config).items()}
    write_weights(file, tensors)
    return directory


def same_head(loaded: LoadedModel, architecture: str = "qwen3_5") -> bool:
    return loaded.fingerprint == loaded_with_head(architecture).fingerprint


@pytest.mark.parametrize("place", ["mtp.safetensors", "optiq/mtp.safetensors"])
@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.mtp.", ""])
def test_a_head_beside_the_weights_is_found(tmp_path: Path, place: str, prefix: str) -> None:
    directory = moved(without_tensors_of_head("qwen3_5", tmp_path), place, prefix=prefix)
    loaded = load_model(str(directory), mtp="auto")
    assert loaded.head is not None and loaded.head.place == place
    assert same_head(loaded)


def test_a_folder_of_its_own_has_a_head_for_the_model(tmp_path: Path) -> None:
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
    tensors = head_tensors(json.loads((directory / "config.json").read_text()))
    write_weights(folder / "model.safetensors", tensors)
    assert same_head(load_model(str(directory), mtp=str(folder)))


def test_norms_that_were_not_converted_get_their_offset(tmp_path: Path) -> None:
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    tensors = {
        f"mtp.{name}": array - 1 if name.endswith("norm.weight") or "norm_" in name else array
        for name, array in head_tensors(json.loads((directory / "config.json").read_text())).items()
    }
    write_weights(directory / "mtp.safetensors", tensors, form="pt")
    ours, theirs = load_model(str(directory), mtp="auto"), loaded_with_head("qwen3_5")
    assert gap(guesses(ours, fed(ours, TOKENS), 0, 5), guesses(theirs, fed(theirs, TOKENS), 0, 5)) < 1e-4


@pytest.mark.every_model
@pytest.mark.parametrize("architecture", ["qwen3_5_moe", "qwen3_next", "glm4_moe"])
def test_experts_that_are_stored_one_by_one_are_stacked(architecture: str, tmp_path: Path) -> None:
    directory = without_tensors_of_head(architecture, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    place = directory / PLACES.get(architecture, "model.safetensors")
    weights = read_weights(place) if place.exists() else {}
    for name, array in checkpoint_names(config, head_tensors(config)).items():
        if "switch_mlp" in name:
            weights |= {name.replace("switch_mlp", f"experts.{at}"): array[at] for at in range(array.shape[0])}
        else:
            weights[name] = array
    write_weights(place, weights)
    assert same_head(load_model(str(directory), mtp="auto"), architecture)


def test_quantised_tensors_are_read_as_they_are(tmp_path: Path) -> None:
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    tensors: dict[str, mx.array] = {}
    for name, array in head_tensors(json.loads((directory / "config.json").read_text())).items():
        if name == "fc.weight" or name.endswith("_proj.weight"):
            path = "mtp." + name.removesuffix(".weight")
            quantised = mx.quantize(array, group_size=32, bits=8)
            tensors |= {f"{path}.{part}": a for part, a in zip(("weight", "scales", "biases"), quantised, strict=True)}
        else:
            tensors["mtp." + name] = array
    write_weights(directory / "mtp.safetensors", tensors)
    ours, theirs = load_model(str(directory), mtp="auto"), loaded_with_head("qwen3_5")
    assert ours.head is not None and theirs.head is not None and ours.head.nbytes < 0.5 * theirs.head.nbytes
    assert gap(guesses(ours, fed(ours, TOKENS), 0, 5, 1), guesses(theirs, fed(theirs, TOKENS), 0, 5, 1)) < 0.2


def test_a_promised_head_that_the_files_lack_is_named(tmp_path: Path) -> None:
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    assert load_model(str(directory), mtp="auto").head is None
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(directory), mtp="auto")
    assert loaded.head is not None and not loaded.head.is_there
    assert "mtp_num_hidden_layers = 1" in loaded.head.reason
    assert not isinstance(loaded.model, HeadedModel)


def test_a_head_that_does_not_fit_is_left_out_unless_it_was_asked_for(tmp_path: Path) -> None:
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    write_weights(directory / "mtp.safetensors", {"mtp.fc.weight": mx.zeros((3, 4))})
    loaded = load_model(str(directory), mtp="auto")
    assert loaded.head is not None and "does not fit" in loaded.head.reason
    (tmp_path / "drafter").mkdir()
    with pytest.raises(LoadFailed, match="has no config"):
        load_model(str(directory), mtp=str(tmp_path / "drafter"))
    with pytest.raises(LoadFailed, match="no such directory"):
        load_model(str(directory), mtp=str(tmp_path / "nowhere"))


def test_what_a_head_takes_is_counted() -> None:
    loaded = loaded_with_head("qwen3_5")
    plain = load_model(str(headed_model("qwen3_5")), mtp="off")
    assert loaded.head is not None
    assert loaded.head.nbytes == loaded.nbytes - plain.nbytes
    (layer,) = layers_of_head(fed(loaded, TOKENS))
    assert loaded.head.nbytes_per_token * layer.capacity == layer.nbytes


@pytest.mark.parametrize(
    "architecture", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS[1:])]
)
def test_of_a_pass_no_more_is_kept_than_the_last_hidden_state(architecture: str) -> None:
    runner = Runner(loaded_with_head(architecture), can_batch=True)
    long, short = np.resize(TOKENS, 2048), TOKENS[:30]
    runner.drop(prefilled(runner, long))
    before = active_memory()
    held = [prefilled(runner, long) for _ in range(2)]
    assert settled_memory() - before <= runner.live_nbytes + len(held) * _SPARE
    # Of a short one, as long as some of it may be undone.
    live = prefilled(runner, short[:-1])
    job = Job(id="it", prompt=Prompt(tokens=as_tokens(short)), max_tokens=9, sampling=Sampling(temperature=0))
    runner.begin_decode(live, job)
    for draft in ((), (1, 2, 3)):
        runner.verify([live], [draft])
        assert live.rows.hidden is not None and live.rows.hidden.recent is None
