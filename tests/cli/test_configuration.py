"""Each option from the command line, the environment and a file, in this order; what is wrong is one sentence."""

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import reprise.cli.engines
from reprise.cli.configuration import choose, read_file
from reprise.cli.main import app
from reprise.core.settings import OPTIONS, Settings
from tests.matrix import every_other
from tools.options_page import PAGE, page

FILE = str(Path(__file__).resolve())
RECORD = str(Path(__file__).with_name("trace.jsonl"))

VALUES: dict[str, tuple[str, object, object]] = {
    # Field: as text, in TOML, and the setting.
    "model": ("elsewhere", "elsewhere", "elsewhere"),
    "host": ("0.0.0.0", "0.0.0.0", "0.0.0.0"),
    "port": ("0", 0, 0),
    "log_level": ("debug", "debug", "debug"),
    "log_format": ("json", "json", "json"),
    "log_file": (RECORD, RECORD, RECORD),
    "is_quiet": ("1", True, True),
    "trusts_remote_code": ("1", True, True),
    "adapter_path": ("/anywhere", "/anywhere", "/anywhere"),
    "api_keys": ("a b", ["a", "b"], ("a", "b")),
    "separates_keys": ("true", True, True),
    "accepts_any_model": ("1", True, True),
    "other_models": ("another third", ["another", "third"], ("another", "third")),
    "models_dir": ("/anywhere", "/anywhere", "/anywhere"),
    "models": (
        '{"somewhere": {"model": "org/small"}}',
        {"somewhere": {"model": "org/small"}},
        {"somewhere": {"model": "org/small"}},
    ),
    "has_hub_cache": ("on", True, True),
    "adapters": ("a=/one /elsewhere/b", {"a": "/one", "b": "/elsewhere/b"}, {"a": "/one", "b": "/elsewhere/b"}),
    "preloads": ("1", True, True),
    "is_pinned": ("1", True, True),
    "downloads": ("1", True, True),
    "is_tensor_parallel": ("1", True, True),
    "keep_alive_s": ("60", 60, 60.0),
    "allowed_hosts": ("a.lan b.lan", ["a.lan", "b.lan"], ("a.lan", "b.lan")),
    "cors_origins": ("http://x http://y", ["http://x", "http://y"], ("http://x", "http://y")),
    "max_body_bytes": ("1MB", 1_000_000, 1_000_000),
    "max_images": ("9", 9, 9),
    "max_image_bytes": ("9MB", "9MB", 9_000_000),
    "max_image_pixels": ("9000", 9000, 9000),
    "image_hosts": ("a.lan b.lan", ["a.lan", "b.lan"], ("a.lan", "b.lan")),
    "max_connections": ("9", 9, 9),
    "request_timeout_s": ("5", 5, 5.0),
    "background_s": ("8", 8, 8.0),
    "background_nbytes": ("2MB", 2_000_000, 2_000_000),
    "stall_after_s": ("9", 9, 9.0),
    "read_timeout_s": ("6.5", 6.5, 6.5),
    "grace_s": ("3", 3, 3.0),
    "max_tokens": ("7", 7, 7),
    "temperature": ("0", 0, 0.0),
    "top_p": ("0.9", 0.9, 0.9),
    "top_k": ("0", 0, 0),
    "min_p": ("0.05", 0.05, 0.05),
    "chat_template": ("{{ messages }}", "{{ messages }}", "{{ messages }}"),
    "learnt": (FILE, FILE, FILE),
    "chat_template_args": ('{"a": null}', {"a": {"b": [1]}}, None),
    "thinking_budget": ("0", 0, 0),
    "max_context": ("999", 999, 999),
    "has_prefix_cache": ("off", False, False),
    "cache_bytes": ("25%", "25%", None),
    "memory": ("50%", "50%", None),
    "disk_directory": ("/somewhere", "/somewhere", "/somewhere"),
    "disk_daily_writes": ("1GiB", 2**30, None),
    "disk_bytes": ("1GiB", 2**30, None),
    "warm_file": (FILE, FILE, FILE),
    "settles": ("no", False, False),
    "max_settle": ("300", 300, 300),
    "canonical_tokens": ("yes", True, True),
    "restore_reasoning": ("TRUE", True, True),
    "normalizes": ("0", False, False),
    "stable_tools": ("on", True, True),
    "freeze_template_date": ("true", True, True),
    "audit_rate": ("0.5", 0.5, 0.5),
    "is_audit_off": ("true", True, True),
    "record_file": (RECORD, RECORD, RECORD),
    "records_text": ("true", True, True),
    "images": ("off", "off", "off"),
    "embedder": ("last", "last", "last"),
    "kv_bits": ("8", 8, 8),
    "kv_group_size": ("32", 32, 32),
    "max_queue": ("3", 3, 3),
    "max_batch": ("2", 2, 2),
    "drafts": ("exact", "exact", "exact"),
    "mtp": ("off", "off", "off"),
    "draft_model": ("small", "small", "small"),
    "background": ("never", "never", "never"),
    "prefill_chunk": ("64", 64, 64),
    "max_stall_ms": ("20", 20, 20),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []

    def serve(settings: Settings, *_: object) -> None:
        seen.append(settings)

    def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(reprise.cli.engines, "run_server", serve)
    # What else a server is refused for is not of this file, and a launcher would say which rank it is.
    for name in (
        "cli.serve.listen",
        "cli.serve.FirstAnswers",
        "cli.serve.url_of",
        "cli.serve.configure_logging",
        "cluster.ranks.serve.check_rank",
    ):
        monkeypatch.setattr(f"reprise.{name}", nothing)
    monkeypatch.setenv("MLX_RANK", "0")
    return seen


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, words, env=environment)


def written(folder: Path, name: str, value: object) -> Path:
    file = folder / "reprise.toml"
    text = re.sub(r'"(\w+)":', r"\1 =", json.dumps(value)) if isinstance(value, dict) else json.dumps(value)
    file.write_text(f"{name} = {text}\n")
    return file


def changed(settings: Settings) -> set[str]:
    default = Settings(model="somewhere")
    return {field.name for field in fields(Settings) if getattr(settings, field.name) != getattr(default, field.name)}


@pytest.mark.parametrize("field", every_other(VALUES))
def test_an_option_is_read_from_the_environment_and_from_a_file(
    field: str, tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    option = OPTIONS[field]
    if field == "disk_directory":
        monkeypatch.delenv(option.variable)
    text, in_toml, value = VALUES[field]
    model = () if field == "model" else ("somewhere",)
    assert run("serve", *model, **{option.variable: text}).exit_code == 0
    file = written(tmp_path, option.name, in_toml)
    assert run("serve", *model, "--config", str(file)).exit_code == 0
    assert [changed(settings) for settings in served] == [{field}, {field}]
    if value is not None:
        assert [getattr(settings, field) for settings in served] == [value, value]


def test_every_option_is_in_all_three_and_documented() -> None:
    assert {field.name for field in fields(Settings)} == {*VALUES, "api_key_file"} == set(OPTIONS)
    help_text = re.sub(
        r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "1000"}).output
    )
    documented = PAGE.read_text(encoding="utf-8")
    for option in OPTIONS.values():
        flag = "MODEL" if option.name == "model" else f"--{option.name}"
        assert re.search(rf"{flag}\b", help_text), option
        assert option.help in help_text
        assert f"| `{option.variable}` | `{option.name}` |" in documented


def test_the_page_of_options_is_the_one_that_the_declarations_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.options_page`"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, served: list[Settings]
) -> None:
    file = tmp_path / "reprise.toml"
    file.write_text('model = "filed"\nport = 1\nmax-batch = 1\nmax_queue = 1\nany-model = true\n')
    result = run(
        "serve", "--port", "3", "--no-any-model", "--config", str(file), REPRISE_PORT="2", REPRISE_MAX_BATCH="2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    s = served[0]
    assert (s.model, s.port, s.max_batch, s.max_queue, s.accepts_any_model) == ("filed", 3, 2, 1, False)


def test_the_file_in_the_configuration_directory_is_read_and_need_not_be_there(
    tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def user_config_path(*_: object, **__: object) -> Path:
        return tmp_path

    monkeypatch.setattr("platformdirs.user_config_path", user_config_path)
    assert run("serve", "somewhere", REPRISE_CONFIG="").exit_code == 0
    (tmp_path / "reprise.toml").write_text("port = 7")
    assert run("serve", "somewhere", REPRISE_CONFIG="").exit_code == 0
    assert [settings.port for settings in served] == [8080, 7]


def test_paths_in_a_file_are_relative_to_it(
    tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPRISE_DISK_CACHE")
    (tmp_path / "chat.jinja").write_text("{{ messages[0] }}")
    file = tmp_path / "reprise.toml"
    file.write_text('disk-cache = "kept"\nchat-template = "chat.jinja"\n')
    assert run("serve", "somewhere", "--config", str(file)).exit_code == 0
    assert served[0].disk_directory == str(tmp_path / "kept")
    assert served[0].chat_template == "{{ messages[0] }}"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("port = 70000", ["--port", "reprise.toml", "0 to 65535", "70000"]),
        ('port = "many"', ["--port", "whole number"]),
        ("port = true", ["--port", "whole number"]),
        ("port = 1.5", ["--port", "whole number"]),
        ("settle = 3", ["--settle", "true or false"]),
        ("model = 3", ["MODEL", "text"]),
        ("prot = 3", ["'prot'", "'port'"]),
        ("max-batch = 3\nmax_batch = 4", ["max-batch", "twice"]),
        ("port = ", ["TOML"]),
        ('api-key = ""', ["--api-key", "empty"]),
        ("grace = inf", ["--grace", "a number from 0.1 to 1000000, not inf"]),
    ],
)
def test_a_bad_file_is_one_sentence(content: str, named: list[str], tmp_path: Path, served: list[Settings]) -> None:
    (tmp_path / "reprise.toml").write_text(content)
    assert_refused(run("serve", "--config", str(tmp_path / "reprise.toml")), *named)
    assert served == []


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("REPRISE_PORT", "x", ["--port from REPRISE_PORT"]),
        ("REPRISE_API_KEY", "", ["--api-key from REPRISE_API_KEY"]),
        ("REPRISE_SETTLE", "maybe", ["--settle from REPRISE_SETTLE"]),
        ("REPRISE_CONFIG", "/nowhere.toml", ["/nowhere.toml"]),
    ],
)
def test_a_bad_variable_is_one_sentence(variable: str, value: str, named: list[str], served: list[Settings]) -> None:
    assert_refused(run("serve", "somewhere", **{variable: value}), *named)
    assert served == []


@pytest.mark.parametrize("endless", ["inf", "nan", "1e300"])
def test_no_option_takes_a_number_without_an_end(endless: str) -> None:
    for field, (_, _, value) in VALUES.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with pytest.raises(ValueError, match="must be"):
                OPTIONS[field].kind.read(endless, Path())
    for words in (["bench", "--minutes", endless], ["bench", "--size", endless]):
        assert run(*words).exit_code == 2, words


def test_an_empty_variable_is_not_set_and_an_unknown_one_is_named(served: list[Settings]) -> None:
    result = run("serve", "somewhere", REPRISE_PORT="", REPRISE_MAX_TOKEN="3")
    assert (result.exit_code, served) == (0, [Settings(model="somewhere")])
    assert "REPRISE_MAX_TOKEN." in result.output
    assert "REPRISE_MAX_TOKENS" in result.output


def test_without_a_model_there_is_no_server(served: list[Settings]) -> None:
    assert_refused(run("serve"), "MODEL", "REPRISE_MODEL")
    assert served == []


def test_config_says_where_each_value_comes_from_and_hides_keys(tmp_path: Path) -> None:
    (tmp_path / "reprise.toml").write_text("max-batch = 3")
    words = ["--config", str(tmp_path / "reprise.toml"), "--port", "9"]
    shown = run("config", *words, "--json", REPRISE_API_KEY="secret", REPRISE_GRACE="4")
    options = json.loads(shown.output)["options"]
    assert {name: (option["value"], option["source"]) for name, option in options.items()}.items() >= {
        "port": (9, "command line"),
        "grace": (4.0, "REPRISE_GRACE"),
        "max-batch": (3, str(tmp_path / "reprise.toml")),
        "max-queue": (64, "default"),
        "disk-bytes": ("20GB", "default"),
    }.items()
    assert len(options) == len(OPTIONS)
    for form in ((), ("--json",)):
        assert "secret" not in run("config", *words, *form, REPRISE_API_KEY="secret").output


def test_what_config_prints_is_a_file_with_the_same_settings(tmp_path: Path, served: list[Settings]) -> None:
    environment = {
        OPTIONS[field].variable: text for field, (text, _, _) in VALUES.items() if not OPTIONS[field].is_secret
    }
    environment["REPRISE_CHAT_TEMPLATE"] = '{{ "ü\x7f\\n" }}\n{{ 1 }}'
    printed = run("config", **environment)
    assert printed.exit_code == 0, printed.output
    assert set(tomllib.loads(printed.output)) == {
        option.name for field, option in OPTIONS.items() if field not in ("api_keys", "api_key_file")
    }
    (tmp_path / "reprise.toml").write_text(printed.output)
    run("serve", **environment)
    run("serve", "--config", str(tmp_path / "reprise.toml"))
    assert served[0] == served[1]


def assert_refused(result: Result, *named: str) -> None:
    assert result.exit_code == 2, result.output
    sentence = result.output.strip()
    assert "\n" not in sentence
    assert sentence.startswith("reprise: ")
    assert sentence.endswith((".", "?"))
    for word in named:
        assert word in sentence


@pytest.mark.parametrize("given", [{"model": "./gone"}, {"model": "org/one", "other_models": ["org/two", "/no/where"]}])
def test_a_path_to_no_model_is_refused_at_once_also_that_of_another_model(
    given: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = choose(["model", "other_models"], given, {}, read_file(Path("none.toml"), is_required=False))
    with pytest.raises(typer.Exit):
        chosen.settings()
    assert "no such directory. Give the path of a model directory, or a hub id." in capsys.readouterr().err


def test_a_name_that_is_no_alias_is_looked_up_on_the_hub_and_not_silently(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[models.quick]\nmodel = "org/quick"\n')
    chosen = choose(["model"], {"model": "quikc"}, {}, read_file(file, is_required=True))
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr(typer, "echo", lambda text, err: told.append(text))
        chosen.settings()
        assert told == [
            f"reprise: quikc is not a directory and not an alias in {file} (quick): looking for it on the hub."
        ]
        for name in ("quick", "org/quick", str(tmp_path)):
            choose(["model"], {"model": name}, {}, read_file(file, is_required=True)).settings()
        assert len(told) == 1
