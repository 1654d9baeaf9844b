"""What is run where a device is at hand, on models of no size."""

import json
import sys
from pathlib import Path

import pytest

from bench import device


@pytest.mark.matrix
def test_every_line_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device.json"
    monkeypatch.setattr(sys, "argv", ["device", "--tiny", "--model", "experts 3B", "--json", str(file)])
    device.main()
    told = json.loads(file.read_text())
    lines = {(line["model"], line["what"]): line for line in told["lines"]}
    experts = ["prefill of 256", "decode", "host time of a decode step", "restore", "store"]
    assert list(lines) == [("no size", "decode step"), *(("experts 3B", what) for what in experts)]
    assert all(line["ours"] > 0 and line["theirs"] > 0 for line in lines.values()), lines
    assert told["head"]["tiny"] is True and told["head"]["device"] in ("cpu", "gpu")
    assert "experts 3B   decode" in capsys.readouterr().out


def test_what_does_not_fit_into_the_memory_or_the_time_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "device_bytes", lambda: 10**8)
    lines = device.run({"dense 1B": device.LLAMA}, device.TINY, minutes=8)
    assert [(line.model, line.ours) for line in lines] == [("no size", None), ("dense 1B", None)]
    assert "it needs 2.5 GB, and 0.1 GB are there" in capsys.readouterr().out
    lines = device.run({"dense 1B": device.LLAMA}, device.TINY, minutes=0)
    assert lines[-1].note == "left out: the time is over"
