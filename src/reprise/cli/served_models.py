"""The models of a server by name, with their settings, and which of them share an engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reprise.api.service.served import names_of_adapter
from reprise.cli.models import model_directories
from reprise.cli.process_limits import weights_nbytes
from reprise.core.errors import LoadFailed
from reprise.core.settings import ONE_MODEL, Settings, settings_of
from reprise.engine.models.hub import cached_models, local_directory
from reprise.engine.models.load import is_loadable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model by the name that requests ask for it, and its settings, in which `model` is a path or a hub id."""

    id: str
    settings: Settings
    is_named: bool = True
    """Whether the user named it; otherwise it was found in a directory or the hub's cache."""
    base: str | None = None
    """The id of the model that it is with an adapter; None: it is that model."""
    adapter: str | None = None
    """How requests call the adapter."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What requests may call the adapter; none: it has no adapter."""
        named = () if self.adapter is None else (self.adapter,)
        return (*named, *names_of_adapter(self.settings.adapter_path))

    @property
    def is_directory(self) -> bool:
        return Path(self.settings.model).expanduser().is_dir()

    @property
    def directory(self) -> Path | None:
        """The directory of its files; None if they are not local."""
        return _directory(self.settings.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Models with the same weights, adapter and KV format, which one engine computes for all."""

    settings: Settings
    entries: tuple[ModelEntry, ...]
    directory: Path | None

    @property
    def name(self) -> str:
        return self.entries[0].id

    @property
    def nbytes(self) -> int:
        """Of the weights that it loads, a draft model's too, as far as their files are here."""
        draft = self.settings.draft_model if self.settings.drafts != "off" else None
        found = [self.directory, None if draft is None else _directory(draft)]
        return sum(weights_nbytes(directory) for directory in found if directory is not None)


def _directory(source: str) -> Path | None:
    """The directory of a path's or hub id's files; None if they are not local."""
    path = Path(source).expanduser()
    return path if path.is_dir() else local_directory(source)


def served_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """The models of a server, starting with the one loaded first. Raises LoadFailed if two have the same name."""
    entries: dict[str, ModelEntry] = {}
    for entry in (*_named(settings), *_found(settings)):
        for each in (entry, *_with_adapters(entry)):
            known = entries.get(each.id)
            if known is None:
                entries[each.id] = each
            elif not _is_same(known, each) and (each.is_named or each.is_directory):
                # A name given by the user takes precedence over the same name in the hub's cache.
                raise LoadFailed(
                    f"{known.settings.model} and {each.settings.model} would both be called {known.id}. Rename one of "
                    "the directories, or give the models aliases: tables [models.ALIAS] in the configuration file."
                )
    return tuple(entries.values())


def engine_groups(entries: Sequence[ModelEntry]) -> tuple[EngineGroup, ...]:
    """The engines that these models need, in the order of the models."""
    groups: dict[tuple[Any, ...], list[ModelEntry]] = {}
    directories = {entry.settings.model: entry.directory for entry in entries}
    for entry in entries:
        groups.setdefault(_engine_key(entry.settings, directories[entry.settings.model]), []).append(entry)
    return tuple(
        EngineGroup(
            settings=_joint([entry.settings for entry in group]),
            entries=tuple(group),
            directory=directories[group[0].settings.model],
        )
        for group in groups.values()
    )


def _named(settings: Settings) -> Iterable[ModelEntry]:
    """The models that the user named; without one on the command line, all with an alias."""
    names = dict.fromkeys((settings.model, *settings.other_models, *settings.models))
    for name in names:
        if name in settings.models:
            yield ModelEntry(id=name, settings=settings_of(settings, name))
        else:
            path = Path(name).expanduser()
            own = replace(settings, models={}, model=name, **({} if name == settings.model else ONE_MODEL))
            yield ModelEntry(id=path.name if path.exists() else name, settings=own)


def _found(settings: Settings) -> Iterable[ModelEntry]:
    """The loadable models in a directory or in the hub's cache."""
    below = () if settings.models_dir is None else model_directories(Path(settings.models_dir).expanduser())
    own = replace(settings, models={}, **ONE_MODEL)
    for directory in below:
        yield ModelEntry(id=directory.name, settings=replace(own, model=str(directory)), is_named=False)
    for cached in cached_models() if settings.has_hub_cache else ():
        if is_loadable(cached.directory):
            yield ModelEntry(id=cached.id, settings=replace(own, model=cached.id), is_named=False)


def _with_adapters(entry: ModelEntry) -> Iterable[ModelEntry]:
    for name, directory in entry.settings.adapters.items():
        own = replace(entry.settings, adapter_path=directory, adapters={})
        yield replace(entry, id=f"{entry.id}:{name}", settings=own, base=entry.id, adapter=name)


def _engine_key(settings: Settings, directory: Path | None) -> tuple[Any, ...]:
    """What layer states are a function of, before anything was loaded; and whether code of the model's is run."""
    adapter = settings.adapter_path
    return (
        settings.model if directory is None else directory.resolve(),
        None if adapter is None else Path(adapter).expanduser().resolve(),
        settings.kv_bits,
        settings.kv_group_size if settings.kv_bits is not None else None,
        settings.trusts_remote_code,
        settings.images,
        settings.embedder,
        # Not `head_source`: where one of them has a draft model, it is that of all.
        "off" if settings.drafts == "off" else settings.mtp,
    )


def _joint(each: Sequence[Settings]) -> Settings:
    """What an engine has to do for all of these: the longest context, and to keep its weights the longest."""
    contexts = [settings.max_context for settings in each]
    times = [settings.keep_alive_s for settings in each]
    return replace(
        each[0],
        max_context=None if None in contexts else max(context for context in contexts if context is not None),
        # Drafts do not change answers, so one draft model serves all.
        draft_model=next((settings.draft_model for settings in each if settings.draft_model is not None), None),
        keep_alive_s=None if None in times else max(time_s for time_s in times if time_s is not None),
        is_pinned=any(settings.is_pinned for settings in each),
        preloads=any(settings.preloads for settings in each),
        downloads=any(settings.downloads for settings in each),
    )


def _is_same(one: ModelEntry, other: ModelEntry) -> bool:
    paths = [Path(entry.settings.model).expanduser().resolve() for entry in (one, other)]
    return paths[0] == paths[1] and one.adapter == other.adapter
