"""`reprise doctor`: what a server on this machine lacks, and how to fix it."""

import os
import platform
import resource
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import typer

from reprise.cli.configuration import Configuration, with_options
from reprise.cli.fitting import (
    CHAT,
    SMALL_MACHINES,
    FittingChats,
    advice,
    on_a_small_machine,
    suggestion,
    working_set,
)
from reprise.cli.installation import mlx_fault
from reprise.cli.process_limits import LEAST_DESCRIPTORS, weights_nbytes
from reprise.cli.server_url import is_reprise_at
from reprise.core.errors import DiskUnusable, LoadFailed
from reprise.core.installation import install_line, mend_line, this_installation
from reprise.core.options import OFF
from reprise.core.sizes import Amount, nbytes_text
from reprise.disk.default_place import default_directory, default_nbytes, why_unusable


class Severity(StrEnum):
    FINE = "ok"
    ODD = "note"
    """It works, and could be better."""
    WRONG = "wrong"
    """A server would not start, or not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """The result of one check; `mend` says what to do about it."""

    subject: str
    verdict: Severity
    text: str
    mend: str = ""


def _fine(subject: str, text: str) -> DoctorFinding:
    return DoctorFinding(subject=subject, verdict=Severity.FINE, text=text)


def _odd(subject: str, text: str, mend: str = "") -> DoctorFinding:
    return DoctorFinding(subject=subject, verdict=Severity.ODD, text=text, mend=mend)


def _wrong(subject: str, text: str, mend: str = "") -> DoctorFinding:
    return DoctorFinding(subject=subject, verdict=Severity.WRONG, text=text, mend=mend)


@with_options(["model", "host", "port", "memory", "disk_directory", "disk_bytes", "draft_model", "drafts", "mtp"])
def doctor(configuration: Configuration) -> None:
    """Show what is missing on this machine and how to fix it.

    Checks Python, MLX, mlx-lm, memory, limits, the port, the disk directory and the model. Exit status 1 if a server
    would not start.
    """
    findings = list(examine(configuration))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.verdict:5}  {finding.subject:{width}}  {finding.text}")
        if finding.mend:
            typer.echo(f"{'':5}  {'':{width}}  -> {finding.mend}")
    if any(finding.verdict is Severity.WRONG for finding in findings):
        raise typer.Exit(1)


def examine(configuration: Configuration) -> Iterator[DoctorFinding]:
    """The results of all checks, even if some fail."""
    yield _python()
    yield _mlx_lm()
    yield _mlx()
    sources = _sources(configuration["model"], configuration["models"])
    draft_model = None if configuration["drafts"] == "off" else configuration["draft_model"]
    yield _memory(configuration["memory"], [source for source in (sources[0], draft_model) if source is not None])
    yield _descriptors()
    yield _port(configuration["host"], configuration["port"])
    yield _disk(configuration["disk_directory"], configuration["disk_bytes"])
    heads = "off" if configuration["drafts"] == "off" else configuration["mtp"]
    for source in sources:
        yield _model(source)
        yield from _head(source, mtp=heads)
        if source is not None:
            yield from _room(source)
    if draft_model is not None:
        yield _model(draft_model, subject="draft model")


def _head(model: str | None, *, mtp: str) -> Iterator[DoctorFinding]:
    """What a local model's files say of its head; nothing if it has none and promises none."""
    path = Path(model or "").expanduser()
    if model is None or not (path / "config.json").is_file():
        return
    try:
        from reprise.engine.models.heads import look_for_head  # noqa: PLC0415 (imports MLX)
        from reprise.engine.models.model_files import read_config  # noqa: PLC0415

        found = look_for_head(read_config(path, model), path, mtp=mtp)
    except ImportError:
        return  # A separate finding.
    except (LoadFailed, RuntimeError, OSError) as error:
        yield _wrong("head (MTP)", str(error), "Or use --mtp off.")
        return
    if found is not None and found.is_there:
        text = f"in {found.place}, {nbytes_text(found.nbytes)}"
        yield _fine("head (MTP)", text)
    elif found is not None:
        mend = "A conversion that keeps it, or a drafter folder with --mtp DIR, makes answers faster."
        yield _odd("head (MTP)", f"none: {found.reason}", mend)


def _python() -> DoctorFinding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return _fine("Python", text)
    mend = "Install with Python 3.11, 3.12 or 3.13, for example: uv tool install --python 3.13 ."
    return _wrong("Python", text, mend)


def _mlx_lm() -> DoctorFinding:
    """The installed mlx-lm against what this package asks for."""
    wanted = next(
        (line.partition(";")[0] for line in metadata.requires("mlx-reprise") or () if line.startswith("mlx-lm")),
        "mlx-lm",
    )
    try:
        version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return _wrong("mlx-lm", "not installed", mend_line())
    from packaging.requirements import Requirement  # noqa: PLC0415 (only this command needs it)

    if Requirement(wanted).specifier.contains(version, prereleases=True):
        return _fine("mlx-lm", version)
    return _wrong("mlx-lm", f"{version}, but {wanted.strip()} is required", mend_line())


def _mlx() -> DoctorFinding:
    """Whether MLX computes, and on what."""
    if fault := mlx_fault():
        text, _, line = fault.partition(". Install it with: ")
        return _wrong("MLX", text, line)
    try:
        from reprise.engine.memory import computing_device  # noqa: PLC0415 (imports MLX)

        device = computing_device()
    except RuntimeError as error:
        return _wrong("MLX", f"fails to compute: {error}", mend_line())
    version = metadata.version("mlx")
    if device == "cpu":
        mend = f"With an NVIDIA GPU: {install_line('cuda', this_installation())}" if sys.platform == "linux" else ""
        return _odd("MLX", f"{version}, on the CPU", mend)
    return _fine("MLX", f"{version}, on the {device}")


def _paging_hint(weights_nbytes: int) -> str:
    try:
        from reprise.engine.memory import paging_hint  # noqa: PLC0415 (imports MLX)
    except ImportError:
        return ""  # Reported by another check.
    return paging_hint(weights_nbytes)


def _memory(bound: Amount | None, models: Sequence[str]) -> DoctorFinding:
    """`models`: those that are in memory together."""
    memory = psutil.virtual_memory()
    text = f"{nbytes_text(memory.total)}, {nbytes_text(memory.available)} free"
    weights = sum(weights_nbytes(Path(model).expanduser()) for model in models)
    most = memory.total if bound is None else bound.of(memory.total)
    if weights > most:
        return _wrong(
            "memory",
            f"{text}; the weights alone take {nbytes_text(weights)}, but only {nbytes_text(most)} may be used",
            "Use a smaller or more heavily quantized model, or raise --memory.",
        )
    if hint := _paging_hint(weights):
        return _odd("memory", text, hint)
    if weights > memory.available:
        mend = "Close other programs: a server started now would be swapped out."
        return _odd("memory", text, mend)
    return _fine("memory", text)


def _descriptors() -> DoctorFinding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        mend = f"ulimit -Hn {LEAST_DESCRIPTORS}, or LimitNOFILE= of a systemd unit"
        return _wrong("open files", f"{most} at most", mend)
    return _fine("open files", "enough")


def _port(host: str, port: int) -> DoctorFinding:
    subject = f"port {port}"
    if is_reprise_at(f"http://{host}:{port}"):
        return _odd(subject, "a Reprise server is already running there")
    try:
        with socket.create_server((host, port)):
            return _fine(subject, "free")
    except OSError as error:
        mend = "Stop the program that uses it, or choose another port with --port."
        text = f"cannot listen: {error.strerror or error}"
        return _wrong(subject, text, mend)


def _disk(directory: str | None, nbytes: Amount) -> DoctorFinding:
    if directory is None:
        place = default_directory()
        reason = why_unusable(place)
        if reason is None:
            text = f"{place}, at most {nbytes_text(default_nbytes(place))}"
            return _fine("disk cache", text)
        mend = f"Prefixes are kept in memory alone, since {reason}. Choose a place: --disk-cache DIRECTORY."
        return _odd("disk cache", "not used", mend)
    if directory == OFF:
        mend = "With --disk-cache DIRECTORY, prefixes survive a restart."
        return _odd("disk cache", "not used", mend)
    from reprise.disk.folders.bucket import is_url  # noqa: PLC0415 (imports NumPy)

    if is_url(directory):
        return _bucket(directory)
    place = Path(directory).expanduser()
    existing = next(each for each in (place, *place.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            room = os.statvfs(existing).f_bavail * os.statvfs(existing).f_frsize
    except OSError as error:
        return _wrong(
            "disk cache",
            f"{existing} is not writable: {error.strerror}",
            "chown or chmod it, or choose another directory: mkdir -p ~/.cache/reprise",
        )
    total = os.statvfs(existing).f_blocks * os.statvfs(existing).f_frsize
    if room < nbytes.of(total):
        text = f"{place}: {nbytes_text(room)} free, but --disk-bytes allows {nbytes_text(nbytes.of(total))}"
        return _odd("disk cache", text, "Free some space, or lower --disk-bytes.")
    return _fine("disk cache", f"{place}, {nbytes_text(room)} free")


def _bucket(url: str) -> DoctorFinding:
    """Whether an object store can be written, read and cleared."""
    from reprise.disk.folders.bucket import open_bucket  # noqa: PLC0415

    try:
        bucket = open_bucket(url)
    except DiskUnusable as error:
        return _wrong("disk cache", url, str(error))
    try:
        name = f"doctor/{uuid.uuid4().hex}"
        bucket.put(name, b"reprise")
        is_same = bytes(bucket.get(name, 7)) == b"reprise"
        bucket.delete([name])
    except OSError as error:
        return _wrong(
            "disk cache",
            f"{bucket.url}: {error.strerror}",
            "Set the credentials, region and endpoint in the environment: docs/cluster.md.",
        )
    verdict, text = (Severity.FINE, "can be written and read") if is_same else (Severity.WRONG, "returns other bytes")
    return DoctorFinding(subject="disk cache", verdict=verdict, text=f"{bucket.url}: {text}")


def _sources(named: str | None, tables: Mapping[str, Mapping[str, Any]]) -> list[str | None]:
    """The path or hub id of the model that was named; without one, of all that have an alias. [None]: of none."""
    if named is None and tables:
        return [table["model"] for table in tables.values()]
    return [tables[named]["model"] if named is not None and named in tables else named]


def _hub_model(model: str, subject: str) -> DoctorFinding:
    try:
        from reprise.engine.models.hub import local_directory  # noqa: PLC0415 (imports MLX)
    except ImportError:
        text = f"{model} was not looked for: that needs MLX"
        return _odd(subject, text)
    if local_directory(model) is not None:
        return _fine(subject, f"{model}, in the hub's cache")
    return _odd(
        subject,
        f"{model} is neither an alias nor a local directory nor a complete model in the hub's cache",
        f"`reprise pull {model}` downloads it if it is a hub id; so does `reprise serve`.",
    )


def _model(model: str | None, *, subject: str = "model") -> DoctorFinding:
    if model is None:
        return _odd(subject, "none named", f"`reprise doctor MODEL` checks one.{_suggested()}")
    path = Path(model).expanduser()
    if not path.exists():
        is_path = model.startswith((".", "/", "~"))
        if is_path:
            mend = "Give the path of a model directory, or a hub id."
            return _wrong(subject, f"{model} does not exist", mend)
        return _hub_model(model, subject)
    missing: list[str] = [name for name in ("config.json", "tokenizer_config.json") if not (path / name).is_file()]
    if weights_nbytes(path) == 0:
        missing.append("*.safetensors")
    if missing:
        text = f"{model} is missing {', '.join(missing)}"
        mend = "Is the download complete? The hub has models for MLX; mlx_lm.convert converts others."
        return _wrong(subject, text, mend)
    return _fine(subject, f"{model}, {nbytes_text(weights_nbytes(path))}")


def _room(model: str) -> Iterator[DoctorFinding]:
    """How long, and how many, the chats are that fit beside a model, here and on small machines; nothing if it is not
    here, or cannot be served."""
    try:
        from reprise.cli.inspection import idle_chats  # noqa: PLC0415 (imports MLX)
        from reprise.core.errors import LoadFailed  # noqa: PLC0415
        from reprise.engine.memory import device_bytes, room_beside  # noqa: PLC0415
        from reprise.engine.models.load import model_directory  # noqa: PLC0415
        from reprise.engine.running.outline import ModelOutline, outline_of  # noqa: PLC0415
    except ImportError:
        return  # A separate finding.

    def fit(outline: ModelOutline, device_nbytes: int) -> FittingChats:
        room = room_beside(outline.nbytes, device_nbytes=device_nbytes)
        kept = max(0, device_nbytes - outline.nbytes - room)
        num = idle_chats(CHAT, outline.footprint, max(0, room)).num
        longest = outline.tokens_within(room, kept_for_passes=kept)
        return FittingChats(longest=longest, num_chats=num, context=outline.context)

    try:
        directory = model_directory(model, downloads=False)
        whole = packed = outline_of(directory, model)
    except (LoadFailed, OSError):
        return  # As the finding about the model says.
    if whole.embedder:
        return
    with suppress(LoadFailed):
        # Heads of some models are too small for it.
        packed = outline_of(directory, model, kv_bits=8)
    plain, quantised = fit(whole, device_bytes()), fit(packed, device_bytes())
    if plain.longest == 0:
        text = "the weights leave no room for a single token"
    else:
        text = f"{plain} fit{'s' if plain.num_chats <= 1 else ''} beside the weights"
    mend = advice(plain, quantised, room=device_bytes())
    verdict = Severity.WRONG if plain.longest == 0 else Severity.ODD if mend else Severity.FINE
    yield DoctorFinding(subject="chats", verdict=verdict, text=text, mend=mend)
    for num_gb in SMALL_MACHINES:
        there, more = working_set(num_gb), num_gb * 2**30 * 3 // 4
        told = on_a_small_machine(fit(whole, there), fit(packed, there), fit(packed, more), num_gb=num_gb)
        yield _fine(f"on {num_gb} GB", told)


def _suggested() -> str:
    """A sentence with a model for this machine's memory; "": MLX is not here to say how much there is."""
    try:
        from reprise.engine.memory import device_bytes  # noqa: PLC0415 (imports MLX)
    except ImportError:
        return ""
    room = device_bytes()
    found = suggestion(room)
    if found is None:
        return f" {nbytes_text(room)} for models hold none of those that we know."
    num = found.num_chats(room)
    chats = f"{num} {'chat' if num == 1 else 'chats'} of {CHAT // 1024}k tokens"
    return f" In this memory: `reprise serve {found.id}` ({nbytes_text(found.nbytes)}, about {chats} beside it)."
