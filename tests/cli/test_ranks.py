"""`reprise serve --tensor-parallel` says what it does not do."""

from pathlib import Path
from typing import Any

import pytest
import typer

from reprise.cluster.ranks.launcher import backend_of, host_of_rank_0
from reprise.cluster.ranks.serve import check_rank, least_nbytes_of_rank
from reprise.core.settings import Settings

_LAUNCHED = {"MLX_RANK": "0", "MLX_HOSTFILE": "hosts.json"}


_JACCL = {"MLX_RANK": "1", "MLX_IBV_DEVICES": "devices.json", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}


def test_the_backend_and_rank_0_are_what_the_launcher_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (backend_of(_LAUNCHED), backend_of(_JACCL), backend_of({"MLX_RANK": "0"})) == ("ring", "jaccl", None)
    assert host_of_rank_0(_JACCL) == "10.0.0.1"
    assert host_of_rank_0({**_JACCL, "MLX_JACCL_COORDINATOR": "[fe80::1]:3"}) == "fe80::1"
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.7:5000"], ["10.0.0.2:5000"]]')
    assert host_of_rank_0({"MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}) == "10.0.0.7"
    devices = tmp_path / "devices.json"
    devices.write_text('[[null, "rdma_en5"], ["rdma_en5", null]]')
    assert least_nbytes_of_rank(900, {**_JACCL, "MLX_IBV_DEVICES": str(devices)}) == 450
    assert least_nbytes_of_rank(900, _JACCL) == 0
    # One sentence, and it goes on.
    check_rank(Settings(model="m"), _JACCL)
    assert capsys.readouterr().err == "reprise: the jaccl backend was not measured: the tests run with ring.\n"


@pytest.mark.parametrize(
    "environment", [{}, {"MLX_RANK": "0"}, {"MLX_HOSTFILE": "hosts.json"}, {"MLX_RANK": "0", "MLX_IBV_DEVICES": "d"}]
)
def test_it_needs_a_launcher(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        check_rank(Settings(model="m"), environment)
    assert "Start it with: mlx.launch -n 2 --backend ring" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("--with-model", {"other_models": ("n",)}),
        ("--models-dir", {"models_dir": "models"}),
        ("--keep-alive", {"keep_alive_s": 9.0}),
        ("--hub-cache", {"has_hub_cache": True}),
        ("--preload", {"preloads": True}),
        ("--pin", {"is_pinned": True}),
        ("--adapter", {"adapters": {"poet": "adapter"}}),
        ("[models]", {"models": {"m": {"model": "m"}}}),
        ("--adapter-path", {"adapter_path": "adapter"}),
        ("--draft-model", {"draft_model": "small"}),
        ("--mtp", {"mtp": "folder"}),
    ],
)
def test_what_it_does_not_do_is_refused(name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        check_rank(Settings(model="m", **options), _LAUNCHED)
    assert capsys.readouterr().err == f"reprise: {name} cannot be used with --tensor-parallel yet. Start it without.\n"


def test_an_object_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    check_rank(Settings(model="m", disk_directory="disk"), _LAUNCHED)
    with pytest.raises(typer.Exit):
        check_rank(Settings(model="m", disk_directory="s3://bucket/prefix"), _LAUNCHED)
    assert "keeps prefixes in directories only" in capsys.readouterr().err


def test_a_rank_holds_its_share_of_the_weights(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]')
    assert least_nbytes_of_rank(900, {"MLX_HOSTFILE": str(hosts)}) == 300
