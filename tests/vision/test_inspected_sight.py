"""What `reprise inspect`, `models` and `pull` say of models that see."""

import io
import json
import shutil
import tomllib
from pathlib import Path

import pytest

from reprise.cli.inspection import inspect_model, learnt_file
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models import vision
from reprise.engine.models.load import check_config, load_model
from reprise.engine.running.outline import outline_of
from reprise.engine.running.runner import footprint_of
from tests.models.tiny import tiny_model
from tests.vision.chats import seeing
from tests.vision.families import FAMILIES, FURTHER
from tests.vision.tiny import seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ALL = (*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER))


@pytest.mark.every_model
@pytest.mark.parametrize("family", ALL)
def test_the_layers_are_known_without_loading(family: str) -> None:
    loaded = seeing(family)
    outline = outline_of(seeing_model(family), family)
    assert outline.blueprint.layout == loaded.blueprint.layout
    assert outline.footprint == footprint_of(loaded.model, loaded.blueprint)


@pytest.mark.parametrize(
    ("family", "tokens", "ways"),
    [
        pytest.param("qwen3_5", 1024, (), marks=pytest.mark.matrix),
        ("gemma3", 18, ("window of 24", "full attention")),
        ("gemma4", 62, ("window of 24",)),
    ],
)
def test_inspect_says_how_a_model_sees(family: str, tokens: int, ways: tuple[str, ...]) -> None:
    images = inspect_model(seeing(family), Settings(model="any", drafts="off"), budget=1 << 30).images
    assert images is not None
    assert images.source.startswith("mlx-vlm ")
    assert images.sees_itself_in == ways
    assert ("rows and columns" in images.positions) == (family == "qwen3_5")
    if family != "gemma4":
        assert images.tokens == tokens
    assert images.nbytes > 0 and images.tower_s > 0


@pytest.mark.parametrize(
    ("family", "written", "told"),
    [
        ("qwen3_5", "<|image_pad|> × 6", "<|image_pad|> (token 5)"),
        (
            "gemma3",
            r"\n\n<start_of_image><image_soft_token> × 16 <end_of_image>\n\n",
            "<image_soft_token> (token 7)",
        ),
    ],
)
def test_what_is_printed_of_learning_has_images(family: str, written: str, told: str) -> None:
    text = learnt_file(str(seeing_model(family)))
    lines = text.splitlines()
    assert f"#   an image of 96 x 64 pixels is: {written}" in lines
    assert f"#   what the tower sees stands at: {told}" in lines
    assert tomllib.loads(text)["calls"] == "none", "remarks are no TOML"
    assert "Images" not in learnt_file(str(tiny_model("qwen3_5")))


def test_inspect_says_that_a_model_takes_text_alone() -> None:
    blind = load_model(str(seeing_model("qwen3_5")), images="off")
    assert inspect_model(blind, Settings(model="any", drafts="off"), budget=1 << 30).images is None


def test_a_family_that_only_the_extra_has_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(seeing_model("internvl_chat"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    assert check_config(config, "it") is config
    monkeypatch.setattr(vision, "has_source", lambda: False)
    with pytest.raises(LoadFailed, match="which mlx-lm"):
        load_model(str(folder))


def test_an_image_of_one_colour_is_a_picture() -> None:
    from PIL import Image as Pictures  # noqa: PLC0415 (an extra)

    blank = vision.blank_image(30, 20)
    with Pictures.open(io.BytesIO(blank.content)) as opened:
        assert opened.size == (30, 20)
        assert opened.getextrema() == ((0, 0),) * 3
