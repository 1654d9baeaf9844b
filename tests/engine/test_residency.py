"""On macOS the engine keeps its buffers wired, and says what to do where the weights leave no room for that."""

from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from reprise.core.settings import Settings
from reprise.engine.memory import keep_resident, paging_hint
from reprise.loop import EngineClient
from tests.models.shared import loaded
from tests.models.tiny import tiny_model

GB = 10**9


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Mac whose GPU may keep 96 GB; gives the limits that were set."""
    limits: list[int] = []
    info: dict[str, Any] = {"max_recommended_working_set_size": 96 * GB, "memory_size": 128 * GB}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    return limits


def test_the_limit_is_what_metal_recommends(wired: list[int]) -> None:
    keep_resident()
    assert wired == [96 * GB]


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch, wired: list[int]) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    keep_resident()
    assert wired == []
    assert paging_hint(10**15) == ""


def test_a_system_that_refuses_is_served_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wired: list[int]
) -> None:
    def refuse(limit: int) -> None:
        raise RuntimeError("[metal::set_wired_limit] not here")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    keep_resident()
    assert "not here" in caplog.text and wired == []


@pytest.mark.parametrize(("weights", "wanted_mb"), [(80 * GB, None), (90 * GB, 95368), (110 * GB, 116561)])
def test_weights_that_would_be_paged_out(wired: list[int], weights: int, wanted_mb: int | None) -> None:
    hint = paging_hint(weights)
    if wanted_mb is None:
        assert hint == ""
    else:
        assert f"iogpu.wired_limit_mb={wanted_mb}`" in hint
        # As large as the hint says, it is silent.
        assert weights <= wanted_mb * 2**20 * 0.9


def test_the_engine_wires_its_memory_and_says_what_is_too_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wired: list[int]
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    engine = EngineClient(Settings(model="llama"), load=lambda: loaded("llama"))
    engine.start()
    engine.ready().result(60)
    engine.close(now=True, timeout_s=60)
    assert wired == [1000]
    assert "iogpu.wired_limit_mb" in caplog.text


def test_doctor_says_so_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    told = CliRunner().invoke(app, ["doctor", str(tiny_model("llama")), "--port", "0"]).stdout
    assert "sudo sysctl iogpu.wired_limit_mb=" in told
