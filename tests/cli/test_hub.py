"""`reprise pull`, `models` and `rm`, with a hub on this machine and directories."""

import json
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner, Result

from reprise.cli.main import app
from reprise.cli.served_models import engine_groups, served_models
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models import hub as hub_module
from reprise.engine.models.load import load_model
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.memory import SharedMemory
from tests.cli.fake_hub import FakeHub, running_hub
from tests.models.tiny import tiny_model

ID = "someone/tiny-llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add(ID, tiny_model("llama"), **{"README.md": b"# Tiny", "pytorch_model.bin": b"x" * 9999})
        yield hub


def run(*words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=answer)


def sentence_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    sentence = result.stderr.strip()
    assert sentence.startswith("reprise: ") and "\n" not in sentence and sentence.endswith((".", "?", "`"))
    return sentence


def test_a_model_is_pulled_listed_served_and_removed(hub: FakeHub) -> None:
    pulled = run("pull", ID)
    assert pulled.exit_code == 0, pulled.output
    assert f"{ID}: llama, 232 kB, float32, 2 × full attention; context that fits: all 8,192 tokens" in pulled.stdout
    # Only what is needed, and each file once.
    assert hub.fetched() == dict.fromkeys(
        ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"), 1
    )
    assert load_model(ID).name == ID
    (listed,) = json.loads(run("models", "--json").stdout)
    assert (listed["name"], listed["architecture"], listed["context_that_fits"]) == (ID, "llama", 8192)
    assert run("rm", ID, answer="n\n").exit_code == 1
    assert len(json.loads(run("models", "--json").stdout)) == 1
    removed = run("rm", ID, "--yes")
    assert removed.exit_code == 0 and "freed" in removed.stdout
    assert run("models").stdout.startswith("No models found.")
    assert "is not in the hub's cache" in sentence_of(run("rm", ID))


def test_the_hub_is_searched(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    hub.add("someone/tiny-sounds-and-voices", tmp_path)
    found = run("models", "search", "tiny")
    assert found.exit_code == 0, found.output
    assert found.output.splitlines() == [
        "someone/tiny-sounds-and-voices  4.2 GB, whisper: cannot be served",
        f"{ID}  4.2 GB",
        "reprise pull someone/tiny-sounds-and-voices",
    ]
    monkeypatch.setattr("reprise.engine.memory.device_bytes", lambda: 10**9)
    assert f"{ID}  4.2 GB, too large for this machine" in run("models", "search", "llama").output
    (listed,) = json.loads(run("models", "search", "llama", "--json").stdout)
    assert listed == {"id": ID, "nbytes": 4_200_000_000, "kind": "llama", "num_downloads": len(ID)}
    assert "no model for MLX with 'qwen'" in run("models", "search", "qwen").output
    assert "one word" in sentence_of(run("models", "search"))
    assert not hub.fetched()


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached: " in sentence_of(run("models", "search", "llama"))


@pytest.mark.matrix
def test_a_connection_that_breaks_goes_on_where_it_was(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.breaks["model.safetensors"] = 200_000
    assert run("pull", ID).exit_code == 0
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 2 and ranges[0] == "" and 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 200_000
    assert load_model(ID).fingerprint == load_model(str(tiny_model("llama"))).fingerprint


def test_what_is_here_is_not_fetched_again(hub: FakeHub) -> None:
    assert run("pull", ID).exit_code == 0
    hub.asked.clear()
    assert run("pull", ID).exit_code == 0
    assert not hub.fetched()
    # As where it was stopped after the first files.
    (link,) = Path(huggingface_hub.constants.HF_HUB_CACHE).glob("*/snapshots/*/model.safetensors")
    link.resolve().unlink()
    link.unlink()
    assert run("pull", ID).exit_code == 0
    assert hub.fetched() == {"model.safetensors": 1}


def test_offline_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("pull", ID).exit_code == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_model(ID).name == ID
    with pytest.raises(LoadFailed, match="cannot be reached"):
        load_model("someone/else")
    assert "cannot be reached" in sentence_of(run("pull", "someone/else"))


def test_the_cache_is_served_by_id_and_requests_download_nothing(hub: FakeHub, tmp_path: Path) -> None:
    here = Settings(model=str(tiny_model("qwen3_5")), has_hub_cache=True)
    assert [entry.id for entry in served_models(here)] == ["qwen3_5"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "whisper"}')
    hub.add("someone/sounds", other, **{"model.safetensors": b""})
    for model in (ID, "someone/sounds"):
        hub_module.fetch(model)
    hub.asked.clear()
    assert [entry.id for entry in served_models(here)] == ["qwen3_5", ID], "what mlx-lm can load"
    assert [entry.id for entry in served_models(replace(here, has_hub_cache=False))] == ["qwen3_5"]
    # What the user calls by this name goes before it; an alias of the same files is computed by the same engine.
    named = replace(here, model=ID, models={"small": {"model": ID}, ID.partition("/")[2]: {"model": "x/y"}})
    groups = [[entry.id for entry in group.entries] for group in engine_groups(served_models(named))]
    assert groups == [[ID, "small"], ["tiny-llama"]]
    assert load_model(ID, downloads=False).name == ID
    hub.add("someone/absent", tiny_model("llama"))
    thread = EngineThread(SharedMemory())
    first, kept, fetched = (
        EngineClient(Settings(model=model, is_audit_off=True, downloads=downloads), thread=thread, name=name)
        for name, model, downloads in (
            ("first", ID, False),
            ("kept", "someone/absent", False),
            ("fetched", "someone/absent", True),
        )
    )
    try:
        first.start()
        hub.asked.clear()
        with pytest.raises(LoadFailed, match=r"someone/absent has not been downloaded.*`reprise pull someone/absent`"):
            kept.ready().result(60)
        first.dismiss().result(60)
        first.ready().result(60)
        assert hub.asked == [], "nor looked for something newer"
        assert fetched.ready().result(60).name == "someone/absent"
    finally:
        for each in (first, kept, fetched):
            each.close(now=True, timeout_s=60)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo"), "is gated: accept its terms at"),
        ((404, "RepoNotFound"), "Check the name"),
        ((401, "RepoNotFound"), "Check the name"),
        ((401, ""), "Log in"),
        ((503, ""), "Try again later"),
    ],
)
def test_why_the_hub_gives_nothing_is_said(hub: FakeHub, refusal: tuple[int, str], words: str) -> None:
    hub.refusals["someone/closed"] = refusal
    said = sentence_of(run("pull", "someone/closed"))
    assert words in said
    with pytest.raises(LoadFailed) as raised:
        load_model("someone/closed")
    assert words in str(raised.value)
    assert run("models").stdout.startswith("No models found.")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "sherlock"}, "of type 'sherlock', which mlx-lm"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized with bitsandbytes"),
        ({"model_type": None}, "has no model_type"),
        ({"model_file": "own.py"}, "its own Python code"),
        (None, "config.json is broken"),
    ],
)
def test_what_cannot_be_run_is_not_fetched(hub: FakeHub, config: dict[str, object] | None, words: str) -> None:
    whole = json.loads(hub.models[ID]["config.json"])
    hub.models[ID]["config.json"] = b"{" if config is None else json.dumps({**whole, **config}).encode()
    assert words in sentence_of(run("pull", ID))
    assert set(hub.fetched()) == {"config.json"}
    with pytest.raises(LoadFailed, match=words):
        load_model(ID)


def test_files_for_others_are_not_fetched(hub: FakeHub) -> None:
    hub.models[ID] = {"config.json": b"{}", "model-Q4_K_M.gguf": b"GGUF"}
    assert "GGUF files, which are for llama.cpp" in sentence_of(run("pull", ID))
    assert not hub.fetched()


def test_a_disk_without_room_is_said_before(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)

    def disk_usage(_: Path) -> SimpleNamespace:
        return full

    monkeypatch.setattr(hub_module.shutil, "disk_usage", disk_usage)
    assert "Free some space" in sentence_of(run("pull", ID))
    assert set(hub.fetched()) == {"config.json"}


def test_names_that_are_none(hub: FakeHub, tmp_path: Path) -> None:
    assert "neither a local directory nor a hub id" in sentence_of(run("pull", "a/b/c"))
    assert "is already a local directory" in sentence_of(run("pull", str(tmp_path)))
    assert "is a local directory" in sentence_of(run("rm", str(tmp_path), "--yes"))
    assert tmp_path.is_dir()


def test_a_directory_to_list_that_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    assert "nowhere is not a directory" in sentence_of(run("models", str(tmp_path / "nowhere")))
    (tmp_path / "file").touch()
    assert "file is not a directory" in sentence_of(run("models", str(tmp_path / "file"), "--json"))


def test_directories_are_listed_with_what_is_wrong(hub: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(tiny_model("gpt_oss"), tmp_path / "here" / "owner" / "good")
    cut = shutil.copytree(tiny_model("llama"), tmp_path / "here" / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    shown = run("models", str(tmp_path / "here"))
    assert shown.exit_code == 0, shown.output
    assert "gpt_oss" in shown.stdout
    assert "model.safetensors is cut off" in shown.stdout.replace("\n", " ")
    good, bad = sorted(
        json.loads(run("models", str(tmp_path / "here"), "--json").stdout), key=lambda each: "fault" in each
    )
    assert good["layers"] == "2 × window of 32, 1 × full attention"
    assert bad["name"].endswith("here/cut")
