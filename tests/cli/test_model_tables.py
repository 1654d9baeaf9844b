"""Tables of models in the settings: what each model of a server is started with, and what is refused."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import reprise.cli.engines
from reprise.cli.main import app
from reprise.cli.served_models import EngineGroup, ModelEntry, engine_groups, served_models
from reprise.core.errors import LoadFailed
from reprise.core.settings import MODEL_OPTIONS, OPTIONS, Settings
from tests.models.tiny import tiny_model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []
    monkeypatch.setattr(reprise.cli.engines, "run_server", lambda settings, *_: seen.append(settings))
    for name in ("listen", "FirstAnswers", "url_of", "configure_logging"):
        monkeypatch.setattr(f"reprise.cli.serve.{name}", lambda *_: None)
    return seen


def serve(file: Path, content: str, *words: str, **environment: str) -> Result:
    file = file / "reprise.toml" if file.is_dir() else file
    file.write_text(content)
    return CliRunner().invoke(app, ["serve", *words, "--config", str(file)], env=environment)


def entries(served: Sequence[Settings]) -> dict[str, Settings]:
    return {entry.id: entry.settings for entry in served_models(served[-1])}


TWO = """
temp = 0.1
max-tokens = 100

[models.main]
model = "org/large"
temp = 0.7
chat-template-args = { enable_thinking = false }

[models.fast]
model = "org/small"
kv_bits = 8
keep-alive = 60
pin = true
"""


def test_a_table_is_a_model_with_options_of_its_own(tmp_path: Path, served: list[Settings]) -> None:
    assert serve(tmp_path, TWO).exit_code == 0
    models = entries(served)
    assert list(models) == ["main", "fast"], "the first one is loaded at the start"
    main, fast = models.values()
    assert (main.model, main.temperature, main.chat_template_args) == ("org/large", 0.7, {"enable_thinking": False})
    assert (main.kv_bits, main.keep_alive_s, main.is_pinned) == (None, None, False)
    assert (fast.model, fast.temperature, fast.chat_template_args) == ("org/small", 0.1, {})
    assert (fast.kv_bits, fast.keep_alive_s, fast.is_pinned) == (8, 60.0, True)
    assert main.max_tokens == fast.max_tokens == 100


def test_what_goes_before_the_file_goes_before_its_tables(tmp_path: Path, served: list[Settings]) -> None:
    assert serve(tmp_path, TWO, "--temp", "0", REPRISE_KV_BITS="4").exit_code == 0
    main, fast = entries(served).values()
    assert (main.temperature, fast.temperature) == (0.0, 0.0)
    assert (main.kv_bits, fast.kv_bits) == (4, 4)


def test_models_on_the_command_line_say_which_are_served(tmp_path: Path, served: list[Settings]) -> None:
    assert serve(tmp_path, TWO, "fast").exit_code == 0
    assert {name: each.model for name, each in entries(served).items()} == {"fast": "org/small"}
    assert serve(tmp_path, TWO, "other/one", "main").exit_code == 0
    models = entries(served)
    assert {name: each.model for name, each in models.items()} == {"other/one": "other/one", "main": "org/large"}
    assert models["other/one"].temperature == 0.1
    assert serve(tmp_path, 'model = "fast"\n' + TWO).exit_code == 0
    assert list(entries(served)) == ["fast", "main"], "in the file it says which one is first"


def test_a_model_alone_is_a_table_with_nothing_else(tmp_path: Path, served: list[Settings]) -> None:
    (tmp_path / "weights").mkdir()
    assert serve(tmp_path, '[models]\na = "weights"\n"b:4" = "org/small"\n').exit_code == 0
    assert {name: each.model for name, each in entries(served).items()} == {
        "a": str(tmp_path / "weights"),
        "b:4": "org/small",
    }


def test_what_is_one_models_own_is_the_first_ones(tmp_path: Path, served: list[Settings]) -> None:
    content = 'adapter-path = "one"\nchat-template = "{{ 1 }}"\nadapter = { legal = "two" }\n' + TWO
    assert serve(tmp_path, content).exit_code == 0
    models = entries(served)
    assert list(models) == ["main", "main:legal", "fast"]
    assert [each.adapter_path for each in models.values()] == [str(tmp_path / "one"), str(tmp_path / "two"), None]
    assert [each.chat_template for each in models.values()] == ["{{ 1 }}", "{{ 1 }}", None]
    # Its table says otherwise, and the command line says otherwise again.
    content = content.replace("[models.main]", '[models.main]\nadapter-path = "three"\n')
    assert serve(tmp_path, content).exit_code == 0
    assert entries(served)["main"].adapter_path == str(tmp_path / "three")
    assert serve(tmp_path, content, "--adapter-path", "four").exit_code == 0
    assert entries(served)["main"].adapter_path == "four"


@pytest.mark.parametrize(
    ("key", "place", "sentence"),
    [
        ("kvbits = 4", " kvbits", "is not an option of a model. Did you mean 'kv-bits'?"),
        ("port = 4", " port", "is an option of the whole server: set it outside of [models]."),
        ("xyzzy = 4", " xyzzy", "is not an option of a model. Those are: adapter, adapter-path, "),
        ("kv-bits = 7", " kv-bits", "must be one of 2, 3, 4, 5, 6, 8, not 7."),
        ("temp = 'hot'", " temp", "must be a number from 0 to 100, not 'hot'."),
        ("max_context = 1\nmax-context = 2", " max-context", "is set twice."),
        ("chat-template = 'gone.jinja'", " chat-template", "must be a readable file or a Jinja template"),
        ("adapter = { latest = 'a' }", " adapter", "has the name 'latest': choose one without spaces"),
        ("model = ' '", " model", "is empty: give a model directory or a hub id."),
        ("", "", "needs `model`: a model directory or a hub id."),
    ],
)
def test_what_is_wrong_in_a_table_is_one_sentence(
    key: str, place: str, sentence: str, tmp_path: Path, served: list[Settings]
) -> None:
    model = "model = 'x'\n" if "model = " not in key and key else ""
    refused = serve(tmp_path, f"[models.fast]\n{model}{key}")
    assert (refused.exit_code, served) == (2, [])
    assert f"reprise: Invalid [models.fast]{place} from {tmp_path / 'reprise.toml'}: it {sentence}" in refused.output


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[models]\nfast = 3", "[models.fast] from FILE: it must be a table of options, or a model as text."),
        ("[models.'a b']\nmodel = 'x'", "[models.a b] from FILE: it has an alias that cannot be served: choose one"),
        ("[models.'./a']\nmodel = 'x'", "[models../a] from FILE: it has an alias that cannot be served: choose one"),
        ("[[models]]\nmodel = 'x'", "--models from FILE: it must be tables by alias, such as [models.fast]."),
    ],
)
def test_what_is_no_table_by_alias(content: str, sentence: str, tmp_path: Path, served: list[Settings]) -> None:
    refused = serve(tmp_path, content)
    assert (refused.exit_code, served) == (2, [])
    assert f"reprise: Invalid {sentence.replace('FILE', str(tmp_path / 'reprise.toml'))}" in refused.output


def test_an_alias_cannot_be_used_twice(tmp_path: Path, served: list[Settings]) -> None:
    refused = serve(tmp_path, "[models.a]\nmodel='x'\n[models.a]\nmodel='y'")
    assert refused.exit_code == 2 and "Cannot declare ('models', 'a') twice (at line 3" in refused.output
    one = Settings(model="a:b", models={"a": {"model": "x", "adapter": {"b": "dir"}}, "a:b": {"model": "x"}})
    with pytest.raises(LoadFailed, match="would both be called a:b"):
        served_models(one)


def test_tables_can_be_written_and_read_back() -> None:
    models = {
        "fast": {"model": "org/a", "temp": 0.5, "pin": True, "adapter": {"l": "/x"}, "chat-template-args": {"a": None}},
        "b:4": {"model": "org/b"},
    }
    kind = OPTIONS["models"].kind
    written: Any = tomllib.loads(f"models = {kind.write(models)}")["models"]
    assert kind.read(written, Path()) == models


def test_the_example_of_the_docs_is_what_they_say(tmp_path: Path, served: list[Settings]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "several-models.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert serve(tmp_path, example).exit_code == 0
    models = entries(served)
    assert list(models) == ["coder", "coder:legal", "coder:brief", "creative", "title"]
    assert [[each.id for each in group.entries] for group in engine_groups(served_models(served[-1]))] == [
        ["coder", "creative"], ["coder:legal"], ["coder:brief"], ["title"]
    ]  # fmt: skip
    assert [each.max_tokens for each in models.values()] == [4096, 4096, 4096, 4096, 32]
    assert models["coder:legal"].adapter_path == str(tmp_path / "adapters" / "legal")
    described = set(re.findall(r"`([\w-]+)`", page[page.index("| `model` |") : page.index("An option outside")]))
    assert described >= set(MODEL_OPTIONS), "the page has all of them"


# Which of them share an engine.


def groups(*models: tuple[str, dict[str, Any]], first: str = "") -> list[list[str]]:
    tables = {alias: {"model": str(tiny_model("llama")), **table} for alias, table in models}
    grouped = engine_groups(served_models(Settings(model=first or models[0][0], models=tables)))
    return [[entry.id for entry in group.entries] for group in grouped]


def test_what_computes_the_same_is_computed_by_one_engine(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_model("llama"))
    assert groups(
        ("plain", {}),
        ("warm", {"temp": 0.9, "max-tokens": 9, "max-context": 99}),
        ("said", {"chat-template": "{{ messages[0].content }}", "chat-template-args": {"a": 1}}),
        ("linked", {"model": str(link)}),
        ("small", {"kv-bits": 8}),
        ("small-too", {"kv-bits": 8, "kv-group-size": 64}),
        ("smaller", {"kv-bits": 8, "kv-group-size": 32}),
        ("adapted", {"adapter-path": str(tmp_path / "one")}),
        ("other", {"model": str(tiny_model("qwen3_5"))}),
    ) == [
        ["plain", "warm", "said", "linked"], ["small", "small-too"], ["smaller"], ["adapted"], ["other"]
    ]  # fmt: skip


def group(*tables: dict[str, Any]) -> EngineGroup:
    each = [
        ModelEntry(id=str(number), settings=Settings(model=str(tiny_model("llama")), **table))
        for number, table in enumerate(tables)
    ]
    (found,) = engine_groups(each)
    return found


def test_an_engine_does_what_all_of_its_models_need() -> None:
    both = group({"max_context": 10, "keep_alive_s": 5.0}, {"max_context": 20, "keep_alive_s": 50.0, "is_pinned": True})
    assert (both.settings.max_context, both.settings.keep_alive_s, both.settings.is_pinned) == (20, 50.0, True)
    free = group({"max_context": 10, "keep_alive_s": 5.0}, {})
    assert (free.settings.max_context, free.settings.keep_alive_s, free.settings.is_pinned) == (None, None, False)


def test_a_draft_model_of_one_is_that_of_all_on_its_weights() -> None:
    assert group({"draft_model": "small"}, {}).settings.draft_model == "small"
    assert group({}, {"draft_model": "small"}).settings.head_source == "off"
    # No head is read, wherever it would be.
    group({"drafts": "off"}, {"drafts": "off", "mtp": "off"})
    assert groups(("headed", {}), ("plain", {"mtp": "off"})) == [["headed"], ["plain"]]


def test_commands_about_one_model_know_its_alias(tmp_path: Path) -> None:
    file = tmp_path / "reprise.toml"
    model = str(tiny_model("qwen3_5"))
    file.write_text(
        f'[models.main]\nmodel = "nowhere/at-all"\n[models.fast]\nmodel = "{model}"\nkv-bits = 8\nkv-group-size = 32\n'
    )

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--config", str(file)])

    def per_token(*words: str) -> int:
        return sum(json.loads(run("inspect", *words, "--json").stdout)["per_token"].values())

    assert per_token("fast", "--kv-bits", "4") < per_token("fast") < per_token(model)
    assert "qwen3_5" in run("doctor", "fast", "--port", "0").stdout
    assert "nowhere/at-all" in run("doctor", "--port", "0").stdout, "without a name all are checked"
    said = run("chat", "unknown")
    assert said.exit_code != 0 and "unknown" in said.output
    answered = CliRunner().invoke(app, ["chat", "fast", "--config", str(file), "--max-tokens", "2"], input="Hi")
    assert answered.exit_code == 0, answered.output
