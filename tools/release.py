"""Makes what a release consists of, in `dist/`, and checks it; uploads it where that is asked for.

`make release URL=…` builds wheel and sdist, has `twine` check them, looks at their contents, locks what the package
requires, and writes a Homebrew formula for a tap from that lock. `URL` is where the sdist will be. With `PUBLISH=yes`
wheel and sdist are then uploaded by `twine`, whose environment (`TWINE_REPOSITORY_URL`, `TWINE_PASSWORD`, …) says where
and as whom.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

import reprise

ROOT = Path(__file__).parent.parent
NAME = "mlx-reprise"
PYTHON = (3, 12)
MOST_NBYTES = 3 << 20
NEEDED = (
    "reprise/cli/entry.py",
    "reprise/page/index.html",
    "reprise/chat/families/qwen3.toml",
    "reprise/lab/demo/model/model.safetensors",
)
"""Of the wheel: code, and files that are no code."""
ENVIRONMENT = {
    "sys_platform": "darwin",
    "platform_system": "Darwin",
    "platform_machine": "arm64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "python_version": f"{PYTHON[0]}.{PYTHON[1]}",
    "python_full_version": f"{PYTHON[0]}.{PYTHON[1]}.0",
    "extra": "",
}
"""The machine of a formula, for markers."""


def version_fault(version: str, changelog: str) -> str | None:
    """Why this version cannot be released with this changelog; None: it can."""
    numbered = re.findall(r"^## (\d+\.\d+\.\d+)\b", changelog, re.MULTILINE)
    if not numbered:
        return f"CHANGELOG.md has no section {version}: name its `Unreleased` so."
    if numbered[0] != version:
        return f"CHANGELOG.md is at {numbered[0]}, and `reprise.__version__` at {version}."
    unreleased = re.search(r"^## Unreleased\n(.*?)^## ", changelog, re.MULTILINE | re.DOTALL)
    if unreleased is not None and unreleased.group(1).strip():
        return f"CHANGELOG.md has entries under `Unreleased`: they belong to {version}, or to the version after it."
    return None


def contents_faults(sizes: Mapping[str, int], *, is_wheel: bool) -> Iterator[str]:
    """What is wrong with the files of a wheel or an sdist, by their names in it."""
    for name, nbytes in sizes.items():
        if nbytes > MOST_NBYTES:
            yield f"{name} has {nbytes:,} bytes; a release has no file above {MOST_NBYTES:,}"
    if not is_wheel:
        return
    for name in sizes:
        top = name.split("/")[0]
        if top != "reprise" and not top.endswith(".dist-info"):
            yield f"{name} is in the wheel, which has `reprise` alone"
        if name.endswith(".pyc") or "/tests/" in name:
            yield f"{name} is in the wheel"
    for name in NEEDED:
        if name not in sizes:
            yield f"{name} is missing in the wheel"


def contents(archive: Path) -> dict[str, int]:
    """The files of a wheel or an sdist, with their sizes."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {each.filename: each.file_size for each in opened.infolist() if not each.is_dir()}
    with tarfile.open(archive) as opened:
        return {each.name: each.size for each in opened.getmembers() if each.isfile()}


def required(lock: Mapping[str, Any], name: str = NAME) -> list[Mapping[str, Any]]:
    """The packages of a lock (`uv.lock`) that `name` needs in `ENVIRONMENT`, by name, without itself and its extras."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for package in lock["package"]:
        by_name.setdefault(package["name"], []).append(package)
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    waiting = [(name, None, frozenset[str]())]
    seen: set[tuple[str, str | None, frozenset[str]]] = set()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        wanted, version, extras = each
        package = next(one for one in by_name[wanted] if version is None or one.get("version") == version)
        found[wanted, package.get("version", "")] = package
        optional = [one for extra in extras for one in package.get("optional-dependencies", {}).get(extra, ())]
        for needed in (*package.get("dependencies", ()), *optional):
            if "marker" not in needed or Marker(needed["marker"]).evaluate(ENVIRONMENT):
                waiting.append((needed["name"], needed.get("version"), frozenset(needed.get("extra", ()))))
    return [package for (each, _), package in sorted(found.items()) if each != name]


def best_file(package: Mapping[str, Any]) -> tuple[str, str]:
    """Where the file of a package is that a formula installs, and its sha256: the best wheel, or else the sdist."""
    tags = _tags()
    ranked: list[tuple[int, Mapping[str, Any]]] = []
    for wheel in package.get("wheels", ()):
        *_, its = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        ranks = [tags.index(tag) for tag in its if tag in tags]
        if ranks:
            ranked.append((min(ranks), wheel))
    chosen = min(ranked, key=lambda each: each[0])[1] if ranked else package.get("sdist")
    if chosen is None:
        raise SystemExit(f"{package['name']} has no file for macOS on Apple silicon.")
    return chosen["url"], chosen["hash"].removeprefix("sha256:")


def _tags() -> list[Tag]:
    platforms = [f"macosx_{major}_0_{kind}" for major in (14, 13, 12, 11) for kind in ("arm64", "universal2")]
    platforms += [f"macosx_10_{minor}_universal2" for minor in range(16, 8, -1)]
    return [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, platforms=platforms)]


def formula(lock: Mapping[str, Any], *, url: str, sha256: str) -> str:
    """A Homebrew formula for a tap. `url`, `sha256`: of the sdist."""
    resources = "\n".join(_resource(package["name"], *best_file(package)) for package in required(lock))
    python = f"python{PYTHON[0]}.{PYTHON[1]}"
    return f'''\
class Reprise < Formula
  include Language::Python::Virtualenv

  desc "Chat server and library for MLX language models that never prefills a token twice"
  homepage "{url.split("/" + NAME, maxsplit=1)[0]}"
  url "{url}"
  sha256 "{sha256}"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "{python.replace("python", "python@")}"

{resources}
  def install
    virtualenv_create(libexec, "{python}")
    pip = ["{python}", "-m", "pip", "--python=#{{libexec}}/bin/python", "install", "--no-deps"]
    resources.each do |each|
      each.stage {{ system(*pip, "--no-index", *Dir["*"]) }}
    end
    system(*pip, buildpath)
    bin.install_symlink libexec/"bin/reprise"
  end

  service do
    run [opt_bin/"reprise", "serve"]
    keep_alive crashed: true
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/reprise --version")
  end
end
'''


def _resource(name: str, url: str, sha256: str) -> str:
    return f'''\
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
'''


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--url", help="where the sdist will be; without it no formula is written")
    parser.add_argument("--any-version", action="store_true", help="also where version and changelog are not in step")
    parser.add_argument("--publish", action="store_true", help="upload wheel and sdist when all checks have passed")
    arguments = parser.parse_args(given)
    if arguments.publish and arguments.any_version:
        parser.error("--publish needs version and changelog in step: leave out --any-version")
    fault = version_fault(reprise.__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if fault is not None and not arguments.any_version:
        raise SystemExit(fault)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run("-m", "build", "--outdir", str(dist), str(ROOT))
    archives = sorted(dist.glob(f"{NAME.replace('-', '_')}-*"))
    _run("-m", "twine", "check", "--strict", *map(str, archives))
    faults = [
        f"{archive.name}: {fault}"
        for archive in archives
        for fault in contents_faults(contents(archive), is_wheel=archive.suffix == ".whl")
    ]
    if faults:
        raise SystemExit("\n".join(faults))
    if arguments.url is not None:
        (sdist,) = dist.glob("*.tar.gz")
        _write_formula(sdist, arguments.url)
    if arguments.publish:
        _run("-m", "twine", "upload", "--non-interactive", *map(str, archives))
    print(f"{NAME} {reprise.__version__} is in {dist}{' and uploaded' if arguments.publish else ''}.")


def _write_formula(sdist: Path, url: str) -> None:
    """Lock what the sdist requires, beside it, and write the formula."""
    folder = sdist.parent / "locked"
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    _run("-m", "uv", "lock", "--project", str(source))
    lock = tomllib.loads((source / "uv.lock").read_text(encoding="utf-8"))
    sha256 = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (sdist.parent / "reprise.rb").write_text(formula(lock, url=url, sha256=sha256), encoding="utf-8")
    shutil.rmtree(folder)


def _run(*arguments: str) -> None:
    if subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode != 0:
        raise SystemExit(f"python {' '.join(arguments[:3])} has failed.")


if __name__ == "__main__":
    main(sys.argv[1:])
