"""Models from the hub: finding them in its cache, downloading and removing them, with errors as one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from huggingface_hub import (
    CacheNotFound,
    HfApi,
    constants,
    scan_cache_dir,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType] -- an argument that is not used here
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from reprise.core.errors import LoadFailed, first_line
from reprise.core.sizes import nbytes_text
from reprise.engine.models.embedders import EMBEDDER_FILES
from reprise.engine.models.model_files import HEADS_BESIDE, WEIGHTS, no_weights

_FILES = [*DEFAULT_ALLOW_PATTERNS, *HEADS_BESIDE, *EMBEDDER_FILES]
"""Of a model, those that are fetched."""
_PATIENCE_S = 10.0
"""How long a hub may take to say that it is there."""
_SPARE = 1 << 30
"""Bytes that a download leaves free on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model in the hub's cache: the directory of its newest snapshot, and the bytes of all of it on disk."""

    id: str
    directory: Path
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A download: its total bytes, those still missing, and the folder it goes to."""

    id: str
    nbytes: int
    missing_nbytes: int
    folder: Path

    def arrived_nbytes(self) -> int:
        """The bytes downloaded so far, from the files in its folder."""
        there = sum(file.stat().st_size for file in self.folder.glob("blobs/*") if file.is_file())
        return min(there, self.nbytes)


def cached_models() -> tuple[CachedModel, ...]:
    """The models in the cache, by name."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return ()
    found: list[CachedModel] = []
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            # The current `main`, or the latest revision.
            newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
            found.append(
                CachedModel(id=repository.repo_id, directory=newest.snapshot_path, nbytes=repository.size_on_disk)
            )
    return tuple(sorted(found, key=lambda model: model.id))


def cached_model(model: str) -> CachedModel | None:
    """The cached model with this id, or None."""
    return next((each for each in cached_models() if each.id == model), None)


def local_directory(model: str) -> Path | None:
    """Where the cache has a model of the hub; None where it does not. The hub is not asked."""
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def fetch(model: str, *, downloads: bool = True) -> Path:
    """The directory of a model of the hub, fetched as far as it is not here. Raises LoadFailed.

    What the hub has newer is fetched; where it cannot be reached, a model that is here as a whole is taken as it is.
    Without `downloads` the hub is not asked.
    """
    if not downloads:
        directory = local_directory(model)
        if directory is None:
            raise LoadFailed(
                f"{model} has not been downloaded, and this server does not download models for requests. "
                f"`reprise pull {model}` downloads it; with --download the server does."
            )
        return directory
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except Exception as error:
        # The library does not wrap the errors of its dependencies.
        raise _failed(model, error) from error


def fetch_config(model: str) -> bytes:
    """Download only `config.json`, to check a model before downloading its weights. Raises LoadFailed."""
    try:
        names = [file.rfilename for file in HfApi().model_info(model).siblings or ()]
        if not any(fnmatch(name, WEIGHTS) for name in names):
            raise no_weights(names, model)
        if "config.json" not in names:
            raise LoadFailed(f"{model} has no config.json, so mlx-lm cannot load it.")
        return (Path(snapshot_download(model, allow_patterns=["config.json"])) / "config.json").read_bytes()
    except LoadFailed:
        raise
    except Exception as error:
        raise _failed(model, error) from error


def plan_download(model: str) -> Download:
    """What downloading a model would take. Raises LoadFailed, also if it does not fit on the disk."""
    try:
        files = snapshot_download(model, allow_patterns=_FILES, dry_run=True)
    except Exception as error:
        raise _failed(model, error) from error
    cache = Path(constants.HF_HUB_CACHE)
    download = Download(
        id=model,
        nbytes=sum(file.file_size or 0 for file in files),
        missing_nbytes=sum(file.file_size or 0 for file in files if file.will_download),
        folder=cache / f"models--{model.replace('/', '--')}",
    )
    existing = next(path for path in (cache.absolute(), *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if download.missing_nbytes > 0 and download.missing_nbytes + _SPARE > free:
        raise LoadFailed(
            f"{model} needs {nbytes_text(download.missing_nbytes)} of disk space in {cache}, where {nbytes_text(free)} "
            "are free. Free some space, or set HF_HUB_CACHE to a directory on another disk."
        )
    return download


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model that the hub has: the bytes of its weights (None: not known), its type, and how often it was fetched."""

    id: str
    nbytes: int | None
    kind: str | None
    num_downloads: int


_ELEMENT_NBYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""By type of element; others have one byte."""


def search(word: str, *, limit: int) -> tuple[HubModel, ...]:
    """The models for MLX whose names contain the word, the most fetched first. Raises LoadFailed."""
    try:
        # Where nobody answers, the library tries for half a minute, and says so each time.
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:
        raise LoadFailed(f"{constants.ENDPOINT} cannot be reached: {first_line(error)} Check the network.") from error
    try:
        found = HfApi().list_models(
            search=word, filter="mlx", sort="downloads", limit=limit, expand=["safetensors", "config", "downloads"]
        )
        return tuple(
            HubModel(
                id=model.id,
                nbytes=None
                if model.safetensors is None
                else sum(num * _ELEMENT_NBYTES.get(kind, 1) for kind, num in model.safetensors.parameters.items()),
                kind=cast(dict[str, Any], vars(model).get("config") or {}).get("model_type"),
                num_downloads=model.downloads or 0,
            )
            for model in found
        )
    except Exception as error:
        raise _failed(word, error) from error


def remove(model: CachedModel) -> int:
    """Delete a cached model; returns the bytes freed."""
    found = scan_cache_dir(constants.HF_HUB_CACHE)
    revisions: Sequence[str] = [
        revision.commit_hash
        for repository in found.repos
        if (repository.repo_type, repository.repo_id) == ("model", model.id)
        for revision in repository.revisions
    ]
    strategy = found.delete_revisions(*revisions)
    strategy.execute()
    return strategy.expected_freed_size


def _failed(model: str, error: Exception) -> LoadFailed:
    """The error of a failed hub operation, as a sentence that says what to do."""
    hub = constants.ENDPOINT
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        # The hub refused, then the library looked in the cache.
        error = error.__cause__
    match error:
        case HFValidationError():
            text = f"{model} is neither a local directory nor a hub id (owner/name)."
        case GatedRepoError():
            text = f"{model} is gated: accept its terms at {hub}/{model}, and log in with `hf auth login`."
        case RepositoryNotFoundError():
            text = (
                f"{model} is neither a local directory nor a public model at {hub}. Check the name; for a private "
                "model, log in with `hf auth login`."
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            text = f"The hub refused {model}: {first_line(error)} Log in with `hf auth login`, or check HF_TOKEN."
        case HfHubHTTPError():
            text = f"The hub failed to serve {model}: {first_line(error)} Try again later."
        case OSError() if error.errno is not None:
            text = f"Cannot store {model} in {constants.HF_HUB_CACHE}: {error.strerror}."
        case _:
            text = (
                f"{model} is neither a local directory nor a complete model in the hub's cache, and {hub} cannot be "
                f"reached. Check the path or the name, or connect to the network."
            )
    return LoadFailed(text)
