"""Which folders are loaded so that they see, what is said where they are not, and what is refused."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest, LoadFailed
from reprise.core.images import ImageFile, digest_of
from reprise.core.settings import Settings
from reprise.engine.models import vision
from reprise.engine.models.adapters import with_adapter
from reprise.engine.models.load import load_model, with_template
from reprise.engine.running.runner import Runner
from tests.chat.seeing import shows
from tests.matrix import now_and_later
from tests.vision.chats import picture, prompt_of, seeing
from tests.vision.families import FAMILIES
from tests.vision.tiny import seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

Change = Callable[[Path], None]


def changed(directory: Path, name: str, change: Change) -> Path:
    """A copy of a tiny model's folder with a change."""
    copy = Path(shutil.copytree(seeing_model(name), directory / name))
    change(copy)
    return copy


def without_tower(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    text = {name: array for name, array in weights.items() if not name.startswith("vision_tower")}
    mx.save_safetensors(str(folder / "model.safetensors"), text, metadata={"format": "mlx"})


@pytest.mark.every_model
@pytest.mark.parametrize("name", now_and_later(["qwen3_5", "gemma3"], sorted({*FAMILIES} - {"qwen3_5", "gemma3"})))
@pytest.mark.parametrize("has_image", [False, True])
def test_no_family_takes_its_markers_in_somebodys_words_for_an_image(name: str, *, has_image: bool) -> None:
    text = seeing(name).text
    assert text.images is not None
    expansion = text.images.expand(picture(1))
    marks = {text.decode([token]) for token in expansion.tokens.tolist()}
    words = " and ".join(("Explain", text.images.marker, *sorted(marks), text.images.marker))
    question = shows(words, picture(1)) if has_image else shows(words)
    prompt = Renderer(text).render(ChatRequest(messages=(question,))).prompt
    assert len(prompt.images) == int(has_image)
    outside = np.delete(prompt.tokens, [at for span in prompt.spans for at in range(span.start, span.stop)])
    # What stands for an image in the path is below 0; other special tokens are the tokenizer's, as in any text.
    assert (outside >= 0).all() and not {*text.encode(text.images.marker)} <= {*outside.tolist()}
    assert text.decode(outside.tolist()).count(text.images.marker) >= 2, "the model reads the words"


def test_a_folder_without_a_tower_takes_text_alone(tmp_path: Path) -> None:
    loaded = load_model(str(changed(tmp_path, "qwen3_5", without_tower)))
    assert loaded.vision is None
    assert loaded.text.images is None


def test_without_the_extra_the_log_names_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vision, "has_source", lambda: False)
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(seeing_model("qwen3_5")))
    assert loaded.vision is None
    (line,) = [record.message for record in caplog.records if "could see images" in record.message]
    assert "vision" in line.split(":")[-1]


def test_a_rank_of_several_takes_text_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(seeing_model("qwen3_5")), shard=lambda model: None)
    assert loaded.vision is None
    assert any("several ranks" in record.message for record in caplog.records)


def test_a_family_whose_source_is_wrong_takes_text_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vision, "TEXT_ALONE", {"qwen3_5": "its source reads past the cache"})
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(seeing_model("qwen3_5")))
    assert loaded.vision is None
    assert any("reads past the cache" in record.message for record in caplog.records)


def test_a_model_with_states_of_an_unknown_class_takes_text_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlx_vlm.models.cache import KVCache  # noqa: PLC0415 (an extra)

    from reprise.engine.models.vlm_source import VlmModel  # noqa: PLC0415 (the same)

    monkeypatch.setattr(VlmModel, "make_cache", lambda model: [type("ItsOwn", (KVCache,), {})() for _ in range(2)])
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(seeing_model("qwen3_5")))
    assert loaded.vision is None and loaded.text.images is None
    assert any("class of their own (ItsOwn)" in record.message for record in caplog.records)


def test_a_template_without_a_place_for_images_takes_none() -> None:
    seen = seeing("qwen3_5")
    source = str(seeing_model("qwen3_5"))
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = with_template(seen, Settings(model=source, chat_template=plain))
    assert text.images is None
    again = with_template(seen, Settings(model=source))
    assert again.images is not None


def test_adapters_are_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(LoadFailed, match="--images off"):
        with_adapter(seeing("qwen3_5"), str(tmp_path))


def other_pixels(folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1] * 3}))


def test_other_settings_of_the_processor_are_another_model(tmp_path: Path) -> None:
    """What is stored for an image depends on how it is cut and scaled."""
    before = seeing("qwen3_5").fingerprint
    same = load_model(str(changed(tmp_path / "same", "qwen3_5", lambda folder: None)))
    other = load_model(str(changed(tmp_path / "other", "qwen3_5", other_pixels)))
    assert same.fingerprint == before != other.fingerprint


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_tiles_are_as_large_as_either_file_of_the_folder_says(name: str, tmp_path: Path) -> None:
    from PIL import Image as Pictures  # noqa: PLC0415 (an extra)

    from reprise.engine.models.vlm_corrections import correct_processor  # noqa: PLC0415 (the same)

    settings = {"size": {"height": 28, "width": 28}, "max_patches": 2}
    joined = {"image_processor": settings}
    (tmp_path / name).write_text(json.dumps(settings if name.startswith("pre") else joined))
    processor = SimpleNamespace()
    correct_processor(processor, "llama4", tmp_path)
    made = processor.image_processor([Pictures.new("RGB", (40, 20))])
    assert made["aspect_ratios"] == [(1, 2)]
    assert made["pixel_values"].shape == (3, 3, 28, 28)


def other_tower(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    name = next(name for name in weights if name.startswith("vision_tower"))
    weights[name] = weights[name] + 1
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def test_another_tower_is_another_model(tmp_path: Path) -> None:
    loaded = load_model(str(changed(tmp_path, "qwen3_5", other_tower)))
    assert loaded.vision is not None
    assert loaded.fingerprint != seeing("qwen3_5").fingerprint


def with_code(folder: Path) -> None:
    (folder / "planted.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass Planted: pass\n")
    file = folder / "tokenizer_config.json"
    auto = {"auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | auto))


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    """mlx-vlm's processor of Kimi would run it."""
    folder = changed(tmp_path, "kimi_vl", with_code)
    loaded = load_model(str(folder))
    assert loaded.vision is not None
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a picture", picture(1).content[:200]])
def test_what_is_no_picture_is_refused_with_a_sentence(content: bytes) -> None:
    loaded = seeing("qwen3_5")
    assert loaded.text.images is not None
    broken = ImageFile(content=content, digest=digest_of(content), width=96, height=64)
    with pytest.raises(BadRequest, match="image"):
        loaded.text.images.expand(broken)


def test_a_shape_that_the_processor_does_not_take_is_refused_with_a_sentence() -> None:
    loaded = seeing("qwen3_5")
    assert loaded.text.images is not None
    with pytest.raises(BadRequest, match="1 x 3000 pixels"):
        loaded.text.images.expand(picture(1, 1, 3000))


def test_a_picture_is_read_once_where_its_prompt_is_and_once_more_when_that_was_long_ago() -> None:
    loaded = seeing("qwen3_5")
    assert loaded.vision is not None
    reader, image = loaded.vision.reader, picture(77)
    assert reader.expand(image) is reader.expand(image)
    first, second = reader.prepare(image), reader.prepare(image)
    assert first is not second
    assert first.places.tolist() == second.places.tolist()
    assert mx.array_equal(mx.array(first.inputs["pixel_values"]), mx.array(second.inputs["pixel_values"]))


def test_a_model_without_sight_gets_no_placeholder() -> None:
    seen, blind = seeing("qwen3_5"), load_model(str(seeing_model("qwen3_5")), images="off")
    prompt = prompt_of(seen, ["Look: ", picture(1), "What is it?"])
    runner = Runner(replace(blind, vision=None), can_batch=True)
    with pytest.raises(AssertionError, match="below 0"):
        runner.prefill([runner.begin()], [prompt.tokens])
    runner = Runner(seen, can_batch=True)
    with pytest.raises(AssertionError, match="each placeholder"):
        runner.prefill([runner.begin()], [prompt.tokens])
