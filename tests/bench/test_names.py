"""Every bench is found by its name, with a line that says what it is."""

import sys
from pathlib import Path

import pytest

from bench import __main__ as bench


def test_every_bench_that_can_be_run_is_listed_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    listed = capsys.readouterr().out
    runnable = {
        file.stem
        for file in Path(bench.__file__).parent.glob("*.py")
        if 'if __name__ == "__main__":' in file.read_text() and file.stem != "__main__"
    }
    assert set(bench.benches()) == runnable
    assert {bench.GATE, "tau", "memory"} <= runnable
    for name, line in bench.benches().items():
        assert len(line) > 20
        assert f"  {name} " in listed
        assert line in listed


def test_a_bench_gets_its_options_and_its_exit_status_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as ended:
        bench.main(["tau", "--no-such-option"])
    assert ended.value.code == 2
    assert "usage: python -m bench tau" in capsys.readouterr().err


def test_a_name_that_is_none_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["no-such-bench"]) == 2
    assert "workloads" in capsys.readouterr().out
