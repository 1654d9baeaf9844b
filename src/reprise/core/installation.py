"""The installation that this process runs from: which program made it, and how to install it again."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_PACKAGE = "mlx-reprise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The environment of an installed package, and the JSON of what it was installed from (PEP 610); null: an index."""

    prefix: Path
    direct_url: str


def this_installation() -> Installation:
    try:
        found = metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        found = None
    return Installation(prefix=Path(sys.prefix), direct_url=found or "null")


def install_line(extras: str | None, installation: Installation) -> str:
    """The shell command that installs the package again the same way, with extras (`cpu,s3`) or none."""
    place, is_editable = _source(json.loads(installation.direct_url))
    bracket = "" if extras is None else f"[{extras}]"
    # Names and paths take extras behind them, other addresses before them.
    wanted = f"{_PACKAGE}{bracket} @ {place}" if "://" in place else f"{place}{bracket}"
    return shlex.join((*_installer(installation.prefix), *(("--editable",) if is_editable else ()), wanted))


def mend_line(extra: str | None = None) -> str:
    """The command that installs this installation again with the MLX that the machine needs, and with an extra."""
    mlx = None if sys.platform != "linux" else "cuda" if _has_nvidia_gpu() else "cpu"
    return install_line(",".join(each for each in (mlx, extra) if each is not None) or None, this_installation())


def _installer(prefix: Path) -> tuple[str, ...]:
    if (prefix / "uv-receipt.toml").is_file():
        return ("uv", "tool", "install", "--force")
    if (prefix / "pipx_metadata.json").is_file():
        return ("pipx", "install", "--force")
    python = str(prefix / "bin" / "python")
    has_pip = any(prefix.glob("lib/python3*/site-packages/pip"))
    return (python, "-m", "pip", "install") if has_pip else ("uv", "pip", "install", "--python", python)


def _source(found: dict[str, Any] | None) -> tuple[str, bool]:
    """What was installed (a path, an address or a name), and whether as editable."""
    if found is None:
        return _PACKAGE, False
    address: str = found["url"]
    url = urlsplit(address)
    if url.scheme != "file":
        kind: str | None = found.get("vcs_info", {}).get("vcs")
        return address if kind is None else f"{kind}+{address}", False
    return url2pathname(url.path), bool(found.get("dir_info", {}).get("editable"))


def _has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
