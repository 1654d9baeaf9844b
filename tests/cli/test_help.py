"""The help of every command, as a terminal shows it."""

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app


def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "(REPRISE_MAX_TOKENS for --max-tokens) or in a configuration file (max-tokens = 512)." in shown
