"""Each flag of `mlx_lm.server` means the same here, is rewritten, is ignored with a sentence, or refused with one."""

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from reprise.cli.mlx_lm_flags import IGNORED, REFUSED, REWRITTEN, translated
from reprise.cli.other_flags import FLAGS, instead_of
from reprise.core.settings import OPTIONS

SAME = frozenset(
    {
        "host",
        "port",
        "trust-remote-code",
        "adapter-path",
        "chat-template",
        "temp",
        "top-p",
        "top-k",
        "min-p",
        "max-tokens",
        "chat-template-args",
        "kv-bits",
        "kv-group-size",
        "draft-model",
    }
)
"""Flags that both have, and that mean the same."""


def test_every_flag_is_known() -> None:
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "server.py").read_text(encoding="utf-8")
    flags = set(re.findall(r"add_argument\(\s*\"--([a-z-]+)\"", source))
    assert len(flags) > 20
    assert flags == SAME | set(REWRITTEN) | set(IGNORED) | set(REFUSED)
    ours = {option.name for option in OPTIONS.values()}
    assert ours >= SAME
    for rewrite in REWRITTEN.values():
        assert {word[2:] for word in rewrite("x") if word.startswith("--")} <= ours


def test_a_script_that_starts_it_works_unchanged() -> None:
    script = (
        "--model m --port 9 --log-level INFO --allowed-origins=http://a,http://b --decode-concurrency 4 "
        "--prompt-concurrency 2 --prefill-step-size 512 --prompt-cache-size 10 --prompt-cache-bytes 2GB "
        "--temp 0.5 --use-default-chat-template --quantized-kv-start 0"
    )
    made = translated(script.split())
    assert made.refusal is None
    assert made.words == [
        "m",
        "--port",
        "9",
        "--log-level",
        "info",
        "--cors-origin",
        "http://a",
        "--cors-origin",
        "http://b",
        "--max-batch",
        "4",
        "--prefill-chunk",
        "512",
        "--cache-bytes",
        "2GB",
        "--temp",
        "0.5",
    ]
    assert len(made.notes) == 3 and all(note.endswith(".") for note in made.notes)


@pytest.mark.parametrize("words", ["--quantized-kv-start 5000", "--pipeline"])
def test_what_would_change_answers_is_refused(words: str) -> None:
    result = CliRunner().invoke(app, ["serve", "m", *words.split()])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("reprise: ") and result.stderr.endswith(".\n")


def test_other_servers_names_point_to_ours() -> None:
    ours = {f"--{option.name}" for option in OPTIONS.values()} | {"--no-prefix-cache"}
    theirs = {*REWRITTEN, *IGNORED, *REFUSED, *SAME}
    for flag, instead in FLAGS.items():
        assert flag not in ours and flag.removeprefix("--") not in theirs, flag
        assert set(re.findall(r"--[a-z-]+", instead)) <= ours, flag
        assert not instead.endswith("."), flag
    result = CliRunner().invoke(app, ["serve", "m", "--ctx-size=4096"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--ctx-size is an option of another server. Use --max-context" in result.stderr
    installed = CliRunner().invoke(app, ["service", "install", "m", "-ngl", "99", "--print"])
    assert (installed.exit_code, "Leave it out" in installed.stderr) == (2, True)
    assert instead_of(["m", "--max-tokens", "4"]) is None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str) -> None:
    words = {
        "bash": {"COMP_WORDS": "reprise serve --prefill-", "COMP_CWORD": "2"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "reprise serve --prefill-"},
        "fish": {"_TYPER_COMPLETE_ARGS": "reprise serve --prefill-", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    result = CliRunner().invoke(app, env={"_REPRISE_COMPLETE": f"complete_{shell}", **words}, prog_name="reprise")
    assert "--prefill-chunk" in result.stdout
