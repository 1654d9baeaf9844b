"""What a release is checked for, and its formula: without a build, which `make release` does."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import reprise
from tools.release import MOST_NBYTES, NEEDED, best_file, contents_faults, formula, main, required, version_fault

ROOT = Path(__file__).parents[2]
FILES = "https://files.example.org"


def _package(name: str, *needs: dict[str, Any], files: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    wheels = [{"url": f"{FILES}/{file}", "hash": f"sha256:{number:064x}"} for number, file in enumerate(files)]
    sdist = {"url": f"{FILES}/{name}-1.0.tar.gz", "hash": f"sha256:{'f' * 64}"}
    return {"name": name, "version": "1.0", "dependencies": list(needs), "sdist": sdist, "wheels": wheels, **more}


LOCK = {
    "package": [
        _package(
            "mlx-reprise",
            {"name": "mlx"},
            {"name": "extras", "extra": ["fast"]},
            {"name": "on-windows", "marker": "sys_platform == 'win32'"},
            {"name": "on-macs", "marker": "sys_platform == 'darwin' and platform_machine == 'arm64'"},
            **{"optional-dependencies": {"dev": [{"name": "for-developers"}]}},
        ),
        _package(
            "mlx",
            files=(
                "mlx-1.0-cp311-cp311-macosx_14_0_arm64.whl",
                "mlx-1.0-cp312-cp312-macosx_13_0_arm64.whl",
                "mlx-1.0-cp312-cp312-macosx_14_0_arm64.whl",
                "mlx-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
            ),
        ),
        _package("extras", **{"optional-dependencies": {"fast": [{"name": "speed"}], "slow": [{"name": "sloth"}]}}),
        _package("speed", files=("speed-1.0-py3-none-any.whl",)),
        *map(_package, ("on-windows", "on-macs", "for-developers", "sloth")),
    ]
}


def test_version_and_changelog_are_in_step() -> None:
    """A number in the changelog is that of the package, until the next one is released."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    numbered = re.findall(r"^## (\d+\.\d+\.\d+)\b", changelog, re.MULTILINE)
    assert numbered[:1] in ([], [reprise.__version__])


def test_a_release_is_refused_where_they_are_not() -> None:
    assert version_fault("0.2.0", "# Changelog\n\n## 0.2.0\n\n- One.\n") is None
    assert version_fault("0.2.0", "# Changelog\n\n## Unreleased\n\n## 0.2.0\n\n- One.\n") is None
    for changelog, said in (
        ("## Unreleased\n\n- One.\n", "no section 0.2.0"),
        ("## 0.1.0\n\n- One.\n", "is at 0.1.0"),
        ("## Unreleased\n\n- Two.\n\n## 0.2.0\n\n- One.\n", "entries under `Unreleased`"),
    ):
        assert said in (version_fault("0.2.0", changelog) or ""), changelog


def test_what_does_not_belong_into_a_release_is_named() -> None:
    whole = {**dict.fromkeys(NEEDED, 1), "mlx_reprise-0.1.0.dist-info/METADATA": 1}
    assert list(contents_faults(whole, is_wheel=True)) == []
    for name, nbytes, said in (
        ("tests/test_house.py", 1, "`reprise` alone"),
        ("reprise/page/film.mp4", MOST_NBYTES + 1, "no file above"),
        ("reprise/core/job.pyc", 1, "is in the wheel"),
    ):
        (fault,) = contents_faults({**whole, name: nbytes}, is_wheel=True)
        assert said in fault
    lacking = {name: nbytes for name, nbytes in whole.items() if name != NEEDED[1]}
    assert list(contents_faults(lacking, is_wheel=True)) == [f"{NEEDED[1]} is missing in the wheel"]
    assert list(contents_faults({"mlx_reprise-0.1.0/tests/test_house.py": 1}, is_wheel=False)) == []


def test_every_file_of_the_tree_is_small_enough_for_a_release() -> None:
    large = [file for file in (ROOT / "src").rglob("*") if file.is_file() and file.stat().st_size > MOST_NBYTES]
    assert large == []


def test_a_formula_has_what_is_needed_on_a_mac_and_nothing_else() -> None:
    assert [package["name"] for package in required(LOCK)] == ["extras", "mlx", "on-macs", "speed"]


def test_it_takes_the_newest_wheel_for_a_mac_or_else_the_sdist() -> None:
    by_name = {package["name"]: package for package in LOCK["package"]}
    assert best_file(by_name["mlx"]) == (f"{FILES}/mlx-1.0-cp312-cp312-macosx_14_0_arm64.whl", f"{2:064x}")
    assert best_file(by_name["speed"])[0].endswith("any.whl")
    assert best_file(by_name["extras"]) == (f"{FILES}/extras-1.0.tar.gz", "f" * 64)
    with pytest.raises(SystemExit, match="no file for macOS"):
        best_file({"name": "odd", "wheels": [{"url": f"{FILES}/odd-1-cp312-cp312-win_amd64.whl", "hash": ""}]})


def test_a_formula_is_ruby_with_each_resource_once(tmp_path: Path) -> None:
    text = formula(LOCK, url=f"{FILES}/mlx-reprise-0.1.0.tar.gz", sha256="a" * 64)
    assert re.findall(r'resource "(.+)" do', text) == ["extras", "mlx", "on-macs", "speed"]
    opened = re.findall(r"^ *(?:class |def |.* do(?: \|\w+\|)?$)", text, re.MULTILINE)
    assert len(opened) == len(re.findall(r"^ *end$", text, re.MULTILINE))
    assert f'url "{FILES}/mlx-reprise-0.1.0.tar.gz"\n  sha256 "{"a" * 64}"' in text
    ruby = shutil.which("ruby")
    if ruby is not None:
        (tmp_path / "reprise.rb").write_text(text)
        subprocess.run([ruby, "-c", str(tmp_path / "reprise.rb")], check=True, capture_output=True)


def test_what_is_out_of_step_is_not_uploaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--publish", "--any-version"])
    assert "leave out --any-version" in capsys.readouterr().err
