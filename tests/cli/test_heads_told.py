"""What people read of a model's head: whether it has one, from where, what it takes, and what is missing."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.cli.engines import ServingEngines
from reprise.cli.inspection import Layers, describe_head, inspect_model
from reprise.cli.main import app
from reprise.cli.models import describe
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models.companion import with_companion
from reprise.engine.models.load import load_model
from reprise.engine.running.outline import outline_of
from reprise.engine.running.runner import footprint_of
from tests.models.headed import assistant, headed_model, loaded_with_head, plain_model, without_tensors_of_head
from tests.models.shared import loaded


def promising(tmp_path: Path) -> Path:
    """A model whose configuration promises a head that its files lack."""
    directory = without_tensors_of_head("qwen3_5", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_inspect_says_where_it_is_from_and_what_it_takes(tmp_path: Path) -> None:
    seen = inspect_model(loaded_with_head("qwen3_5"), Settings(model="any", drafts="off"), budget=10**9)
    assert seen.head.startswith("from qwen3_5: ") and "% of the model's; 512 B per token" in seen.head
    assert Layers(kind="full attention (head)", num=1) in seen.layers
    lacking = load_model(str(promising(tmp_path)), mtp="auto")
    assert "lack the head's tensors" in describe_head(lacking)
    assert describe_head(loaded("llama")) == "none"
    assert describe_head(with_companion(loaded("llama"), loaded("llama"))).startswith("draft model llama: ")


def test_the_list_of_models_has_its_layer(tmp_path: Path) -> None:
    outline = outline_of(headed_model("qwen3_5"), "it")
    loaded_one = loaded_with_head("qwen3_5")
    assert outline.blueprint == loaded_one.blueprint
    assert outline.footprint == footprint_of(loaded_one.model, loaded_one.blueprint)
    assert "full attention (head)" in describe(outline)
    assert "(head)" not in describe(outline_of(headed_model("qwen3_5"), "it", mtp="off"))
    beside = without_tensors_of_head("qwen3_5", tmp_path)
    folder = outline_of(beside, "it", mtp=str(headed_model("qwen3_5")))
    assert folder.nbytes > outline_of(beside, "it").nbytes
    with pytest.raises(LoadFailed, match="no such directory"):
        outline_of(beside, "it", mtp=str(tmp_path / "nowhere"))


def test_an_assistant_takes_nothing_per_token() -> None:
    seen = describe_head(load_model(str(plain_model("gemma4")), mtp=str(assistant("gemma4", "tied"))))
    assert "; it reads the model's own entries" in seen and "per token" not in seen


def test_doctor_finds_a_head_and_names_one_that_is_missing(tmp_path: Path) -> None:
    def told(directory: Path, *words: str) -> str:
        return CliRunner().invoke(app, ["doctor", "--port", "0", str(directory), *words]).stdout

    assert "head (MTP)" in told(headed_model("qwen3_5"))
    assert "head (MTP)" not in told(headed_model("qwen3_5"), "--mtp", "off")
    lacking = told(promising(tmp_path))
    assert "mtp_num_hidden_layers = 1" in lacking and "--mtp DIR" in lacking
    assert "has no config.json" in told(headed_model("qwen3_5"), "--mtp", str(tmp_path))


def test_the_first_lines_of_a_server_name_its_head(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(model=str(headed_model("qwen3_5")), settles=False, is_audit_off=True, disk_directory="off")
    engines = ServingEngines(settings)
    with caplog.at_level(logging.INFO):
        engines.load(url="http://127.0.0.1:1")
    engines.close()
    assert any("head (MTP): from qwen3_5" in record.getMessage() for record in caplog.records)
