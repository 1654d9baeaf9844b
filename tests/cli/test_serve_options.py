"""Every option of `reprise serve` reaches its field of `Settings`; what cannot be is refused in a sentence."""

import json
import re
import socket
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

import reprise.cli.engines
from reprise.api.http.listening import FirstAnswers
from reprise.cli.main import app
from reprise.core.errors import EngineLost, LoadFailed, RepriseError
from reprise.core.settings import OPTIONS as DECLARED
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes, Share
from tests.matrix import every_other

OPTIONS: dict[str, tuple[list[str], object]] = {
    "host": (["--host", "0.0.0.0"], "0.0.0.0"),
    "port": (["--port", "0"], 0),
    "log_level": (["--log-level", "debug"], "debug"),
    "log_format": (["--log-format", "json"], "json"),
    "log_file": (["--log-file", "server.log"], "server.log"),
    "is_quiet": (["--quiet"], True),
    "trusts_remote_code": (["--trust-remote-code"], True),
    "api_keys": (["--api-key", "a", "--api-key", "b"], ("a", "b")),
    "separates_keys": (["--key-namespaces"], True),
    "accepts_any_model": (["--any-model"], True),
    "other_models": (["another", "--with-model", "third"], ("another", "third")),
    "models_dir": (["--models-dir", "."], "."),
    "models": (["--models", '{"somewhere": "org/small"}'], {"somewhere": {"model": "org/small"}}),
    "has_hub_cache": (["--hub-cache"], True),
    "adapters": (["--adapter", "a=one", "--adapter", "two/b"], {"a": "one", "b": "two/b"}),
    "preloads": (["--preload"], True),
    "is_pinned": (["--pin"], True),
    "downloads": (["--download"], True),
    "keep_alive_s": (["--keep-alive", "60"], 60.0),
    "allowed_hosts": (["--allowed-host", "gpu.lan"], ("gpu.lan",)),
    "cors_origins": (["--cors-origin", "http://localhost:3000"], ("http://localhost:3000",)),
    "max_body_bytes": (["--max-body", "1MB"], 1_000_000),
    "max_images": (["--max-images", "9"], 9),
    "max_image_bytes": (["--max-image-bytes", "9MB"], 9_000_000),
    "max_image_pixels": (["--max-image-pixels", "9000"], 9000),
    "image_hosts": (["--allow-image-urls", "pics.lan"], ("pics.lan",)),
    "images": (["--images", "off"], "off"),
    "embedder": (["--embedder", "mean"], "mean"),
    "max_connections": (["--max-connections", "9"], 9),
    "request_timeout_s": (["--request-timeout", "5"], 5.0),
    "read_timeout_s": (["--read-timeout", "6.5"], 6.5),
    "background_s": (["--background-time", "8"], 8.0),
    "background_nbytes": (["--background-bytes", "2MB"], 2_000_000),
    "stall_after_s": (["--stall-after", "9"], 9.0),
    "is_tensor_parallel": (["--tensor-parallel"], True),
    "grace_s": (["--grace", "3"], 3.0),
    "max_tokens": (["--max-tokens", "7"], 7),
    "temperature": (["--temp", "0"], 0.0),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "0"], 0),
    "min_p": (["--min-p", "0.05"], 0.05),
    "chat_template": (["--chat-template", "{{ messages }}"], "{{ messages }}"),
    "chat_template_args": (["--chat-template-args", '{"enable_thinking": false}'], {"enable_thinking": False}),
    "thinking_budget": (["--thinking-budget", "0"], 0),
    "max_context": (["--max-context", "999"], 999),
    "kv_bits": (["--kv-bits", "8"], 8),
    "kv_group_size": (["--kv-group-size", "32"], 32),
    "has_prefix_cache": (["--no-prefix-cache"], False),
    "cache_bytes": (["--cache-bytes", "25%"], Share(Fraction(1, 4))),
    "memory": (["--memory", "50%"], Share(Fraction(1, 2))),
    "disk_directory": (["--disk-cache", "somewhere"], "somewhere"),
    "disk_daily_writes": (["--disk-daily-writes", "1GB"], Bytes(10**9)),
    "disk_bytes": (["--disk-bytes", "5%"], Share(Fraction(1, 20))),
    "warm_file": (["--warm", __file__], __file__),
    "adapter_path": (["--adapter-path", "somewhere"], "somewhere"),
    "settles": (["--no-settle"], False),
    "max_settle": (["--max-settle", "300"], 300),
    "canonical_tokens": (["--canonical-tokens"], True),
    "restore_reasoning": (["--restore-reasoning"], True),
    "normalizes": (["--no-normalize"], False),
    "stable_tools": (["--stable-tools"], True),
    "freeze_template_date": (["--freeze-template-date"], True),
    "audit_rate": (["--audit", "0.5"], 0.5),
    "is_audit_off": (["--no-audit"], True),
    "record_file": (["--record", "trace.jsonl"], "trace.jsonl"),
    "records_text": (["--record-text"], True),
    "max_queue": (["--max-queue", "3"], 3),
    "max_batch": (["--max-batch", "2"], 2),
    "drafts": (["--drafts", "exact"], "exact"),
    "learnt": (["--learnt", __file__], __file__),
    "mtp": (["--mtp", "off"], "off"),
    "draft_model": (["--draft-model", "small"], "small"),
    "background": (["--background", "never"], "never"),
    "prefill_chunk": (["--prefill-chunk", "64"], 64),
    "max_stall_ms": (["--max-stall-ms", "20"], 20),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that a server was asked to run with."""
    seen: list[Settings] = []
    monkeypatch.setattr(reprise.cli.engines, "run_server", lambda settings, *_: seen.append(settings))
    # As the launcher of --tensor-parallel does.
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", "hosts.json")
    for name in ("listen", "FirstAnswers", "url_of", "configure_logging"):
        monkeypatch.setattr(f"reprise.cli.serve.{name}", lambda *_: None)
    return seen


def test_every_setting_has_an_option() -> None:
    assert {field.name for field in fields(Settings)} == {*OPTIONS, "model", "api_key_file"}


def test_without_options_the_defaults_are_those_of_the_settings(served: list[Settings]) -> None:
    assert CliRunner().invoke(app, ["serve", "somewhere"]).exit_code == 0
    assert served == [Settings(model="somewhere")]


@pytest.mark.parametrize("field", every_other(OPTIONS))
def test_an_option_changes_its_field_and_no_other(field: str, served: list[Settings]) -> None:
    words, value = OPTIONS[field]
    assert CliRunner().invoke(app, ["serve", "somewhere", *words]).exit_code == 0
    changed = {f.name for f in fields(Settings) if getattr(served[0], f.name) != getattr(Settings(model="x"), f.name)}
    assert changed == {field, "model"}
    assert getattr(served[0], field) == value


def test_keys_come_from_a_file_too(tmp_path: Path, served: list[Settings]) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    CliRunner().invoke(app, ["serve", "somewhere", "--api-key", "zero", "--api-key-file", str(file)])
    assert served[0].api_keys == ("zero", "one", "two")


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "70000"],
        ["--cache-bytes", "8XB"],
        ["--cache-bytes", "0"],
        ["--cache-bytes", "0%"],
        ["--api-key", ""],
        ["--api-key", "good", "--api-key", " "],
        ["--disk-bytes", "lots"],
        ["--disk-cache", __file__],
        ["--record", "/nowhere/trace.jsonl"],
        ["--max-body", "10%"],
        ["--kv-bits", "7"],
        ["--kv-group-size", "48"],
        ["--log-level", "loud"],
        ["--max-batch", "0"],
        ["--api-key-file", "/nowhere"],
    ],
)
def test_a_value_that_cannot_be_is_refused(words: list[str], served: list[Settings]) -> None:
    result = CliRunner().invoke(app, ["serve", "somewhere", *words])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert served == []


def test_a_head_from_a_folder_and_a_draft_model_are_not_taken_together(tmp_path: Path, served: list[Settings]) -> None:
    both = ["--mtp", str(tmp_path), "--draft-model", "small"]
    result = CliRunner().invoke(app, ["serve", "somewhere", *both])
    assert result.exit_code == 2 and "only one can" in " ".join(result.output.split())
    table = {"fast": {"model": "somewhere", "mtp": str(tmp_path), "draft-model": "small"}}
    result = CliRunner().invoke(app, ["serve", "fast", "--models", json.dumps(table)])
    assert result.exit_code == 2 and "only one can" in " ".join(result.output.split())
    # What a table leaves out is the server's.
    table = {"fast": {"model": "somewhere", "draft-model": "small"}}
    result = CliRunner().invoke(app, ["serve", "fast", "--models", json.dumps(table), "--mtp", str(tmp_path)])
    assert result.exit_code == 2 and "only one can" in " ".join(result.output.split())
    assert served == []
    table["fast"]["mtp"] = "off"
    assert (
        CliRunner().invoke(app, ["serve", "fast", "--models", json.dumps(table), "--mtp", str(tmp_path)]).exit_code == 0
    )
    assert CliRunner().invoke(app, ["serve", "somewhere", "--mtp", "off", "--draft-model", "small"]).exit_code == 0


@pytest.mark.parametrize(("error", "status"), [(LoadFailed("No such model."), 2), (EngineLost("It has died."), 75)])
def test_an_engine_that_dies_while_it_loads_is_started_again(
    error: RepriseError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor may leave alone what ends with 2: nobody but the user can mend that."""

    def fail(settings: Settings, listener: socket.socket, first: FirstAnswers) -> None:
        first.stop()
        listener.close()
        raise error

    monkeypatch.setattr(reprise.cli.engines, "run_server", fail)
    result = CliRunner().invoke(app, ["serve", "somewhere", "--port", "0", "--disk-cache", "off"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (status, f"reprise: {error}")


def test_a_key_file_without_a_key_does_not_open_the_server(tmp_path: Path, served: list[Settings]) -> None:
    for content in (b"", b"\n  \n", b"\xff\xfe"):
        (tmp_path / "keys").write_bytes(content)
        for given in ([], ["--api-key", "one"]):
            result = CliRunner().invoke(app, ["serve", "somewhere", *given, "--api-key-file", str(tmp_path / "keys")])
            assert result.exit_code == 2
            assert "keys" in result.output
    assert served == []


def test_the_readme_names_no_option_that_is_not_there() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    known = {f"--{option.name}" for option in DECLARED.values()} | {
        f"--no-{option.name}" for option in DECLARED.values()
    }
    named = set(re.findall(r"--[a-z-]+[a-z]", readme))
    assert named <= known | {"--help", "--json", "--print", "--write", "--undo", "--vs", "--url"}, named - known


def test_a_chat_template_comes_from_a_file_too(tmp_path: Path, served: list[Settings]) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}")
    CliRunner().invoke(app, ["serve", "somewhere", "--chat-template", str(file)])
    assert served[0].chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--chat-template", "nowhere.jinja"], "readable file"),
        (["--chat-template-args", "{"], "not JSON"),
        (["--chat-template-args", "[1]"], "JSON object"),
        (["--top-p", "0"], "above 0"),
    ],
)
def test_what_is_no_template_is_refused(words: list[str], sentence: str, served: list[Settings]) -> None:
    refused = CliRunner().invoke(app, ["serve", "somewhere", *words], env={"COLUMNS": "200"})
    assert (refused.exit_code, served) == (2, [])
    assert sentence in re.sub(r"\x1b\[[0-9;]*m", "", refused.output)
