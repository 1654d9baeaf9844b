"""Where the value of an option comes from: command line, then environment, then configuration file, then default.

The options themselves are declared in `core/settings.py`. A command that is decorated with `with_options` has them as
flags, and is called with what is in force.
"""

import inspect
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast

import platformdirs
import typer

from reprise.cli.models import model_directories
from reprise.cli.refuse import refuse
from reprise.core.options import AUTO, NBYTES, OFF, Option, TableFault
from reprise.core.settings import ONE_MODEL, OPTIONS, Settings, settings_of
from reprise.core.sizes import Bytes

DEFAULT = "default"
COMMAND_LINE = "command line"
FILE_NAME = "reprise.toml"
FILE_VARIABLE = "REPRISE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The value of an option, and its source: the command line, a variable, a file, or the default."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationFile:
    """What a configuration file sets, by option name. `is_found` is False where the default one does not exist."""

    path: Path
    is_found: bool
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The effective options: each field of Settings that the command has, and the source of its value."""

    chosen: Mapping[str, Chosen]
    file: ConfigurationFile

    def __getitem__(self, field: str) -> Any:
        """The value of a field of Settings."""
        return self.chosen[field].value

    def model(self) -> str:
        """The model; exits the command if none is given."""
        model: str | None = self["model"]
        if model is None:
            refuse(
                f"No model given: pass MODEL, set REPRISE_MODEL, or set `model` or tables [models.ALIAS] in "
                f"{self.file.path}."
            )
        return model

    def settings(self) -> Settings:
        """The settings of a server. Exits the command if there is no model, or no key in the key file."""
        values: dict[str, Any] = {name: chosen.value for name, chosen in self.chosen.items()}
        values["models"] = self._tables()
        if values["model"] is None and values["models"]:
            values["model"] = next(iter(values["models"]))
        elif values["model"] is None and values.get("models_dir") is not None:
            values["model"] = _first_below(values["models_dir"])
        else:
            self.model()
        if values.get("api_key_file") is not None:
            values["api_keys"] = (*values["api_keys"], *_keys_in(Path(values["api_key_file"])))
        settings = Settings(**values)
        for name in (settings.model, *settings.other_models):
            self._check_place(name)
        return settings

    def _check_place(self, name: str) -> None:
        """Refuse a path at which nothing is, and say that a name without an owner is looked up on the hub."""
        aliases: Mapping[str, object] = self["models"]
        if name.startswith((".", "/", "~")) and name not in aliases and not Path(name).expanduser().exists():
            refuse(f"{name}: no such directory. Give the path of a model directory, or a hub id.")
        if "/" not in name and name not in aliases and not name.startswith("~") and not Path(name).exists():
            others = f" ({', '.join(aliases)})" if aliases else ""
            typer.echo(
                f"reprise: {name} is not a directory and not an alias in {self.file.path}{others}: looking for it on "
                "the hub.",
                err=True,
            )

    def one_model(self) -> Settings:
        """The settings of a command about one model, whose alias may have been given. Ends it where there is none."""
        settings = self.settings()
        if settings.model in settings.models:
            return settings_of(settings, settings.model)
        return replace(settings, models={})

    def _tables(self) -> dict[str, dict[str, Any]]:
        """The tables of the models that are served, without the options that a stronger source than the file sets.

        A model on the command line selects which ones are served.
        """
        tables: Mapping[str, Mapping[str, Any]] = self["models"]
        others: Sequence[str] = self["other_models"] if "other_models" in self.chosen else ()
        named = [self["model"], *others]
        if self.chosen["model"].source == COMMAND_LINE:
            tables = {alias: table for alias, table in tables.items() if alias in named}
        first = self["model"] if self["model"] in tables else next(iter(tables), None)
        stronger = [
            name for name, chosen in self.chosen.items() if chosen.source in (COMMAND_LINE, OPTIONS[name].variable)
        ]
        for_all = {OPTIONS[name].name for name in stronger if name not in ("model", *ONE_MODEL)}
        for_first = for_all | {OPTIONS[name].name for name in stronger if name in ONE_MODEL}
        return {
            alias: {
                name: value for name, value in table.items() if name not in (for_first if alias == first else for_all)
            }
            for alias, table in tables.items()
        }


def choose(
    names: Iterable[str], given: Mapping[str, object], environment: Mapping[str, str], file: ConfigurationFile
) -> Configuration:
    """Choose a value for each of these fields of Settings, and for `models`, since a model may be named by its alias.

    Raises ValueError with a sentence for a bad value.
    """
    chosen = {name: _choose(name, OPTIONS[name], given, environment, file) for name in (*names, "models")}
    _check_who_drafts({name: each.value for name, each in chosen.items()})
    return Configuration(chosen=chosen, file=file)


def _check_who_drafts(values: Mapping[str, Any]) -> None:
    """Refuse two that would draft for one model. Raises ValueError."""
    tables = cast(Mapping[str, Mapping[str, Any]], values.get("models") or {}).values()
    of_all = values.get("mtp", AUTO), values.get("draft_model")
    both = [(table.get("mtp", of_all[0]), table.get("draft-model", of_all[1])) for table in tables]
    for head, small in (of_all, *both):
        if small is not None and head not in (AUTO, OFF):
            raise ValueError(
                f"--mtp {head} and --draft-model {small} would both draft for the model, and only one "
                "can. Leave one of them out."
            )


def read_file(path: Path, *, is_required: bool) -> ConfigurationFile:
    """Read a configuration file. Raises ValueError with a message."""
    if not is_required and not path.exists():
        return ConfigurationFile(path=path, is_found=False, values={})
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Can't read the configuration file {path}: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"The configuration file {path} is not valid TOML: {error}.") from error
    known = {option.name for option in OPTIONS.values()}
    values: dict[str, object] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ValueError(f"Unknown option {key!r} in {path}.{_suggestion(name, known)}")
        if name in values:
            raise ValueError(f"The option {name!r} is set twice in {path}.")
        values[name] = value
    return ConfigurationFile(path=path, is_found=True, values=values)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like an option but is not one."""
    known = {option.variable for option in OPTIONS.values()} | {FILE_VARIABLE}
    strange = sorted(name for name in environment if name.startswith("REPRISE_") and name not in known)
    return [f"Ignoring the unknown environment variable {name}.{_suggestion(name, known)}" for name in strange]


def default_of(field: str) -> Any:
    """The default of a field of Settings; None for the model, which has no default."""
    return _DEFAULTS[field]


def with_options(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these fields of Settings, and `--config`. It is called with a Configuration."""
    chosen_names = tuple(names)
    has_several = "other_models" in chosen_names

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(*, config: Path | None, **given: object) -> None:
            own = {name: given.pop(name) for name in own_parameters}
            if has_several:
                given["model"], given["other_models"] = _first_and_rest(given["model"], given["other_models"])
            run(_configuration(chosen_names, config, given), **own)

        _, *own_list = inspect.signature(run, eval_str=True).parameters.values()
        own_parameters = {parameter.name: parameter for parameter in own_list}
        shared = [_parameter(name, OPTIONS[name], has_several=has_several) for name in chosen_names]
        parameters = [*shared, _parameter_of("config", Path | None, _CONFIG), *own_list]
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__annotations__ = {}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


_CONFIG: Any = typer.Option(
    "--config",
    metavar="FILE",
    help=f"Configuration file ({FILE_VARIABLE}). Default: {FILE_NAME} in the user's configuration directory.",
)
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    if field.default is not MISSING
    else field.default_factory()
    if field.default_factory is not MISSING
    else None
    for field in fields(Settings)
}


def _configuration(names: tuple[str, ...], config: Path | None, given: Mapping[str, object]) -> Configuration:
    for sentence in unknown_variables(os.environ):
        typer.echo(f"reprise: {sentence}", err=True)
    named = config if config is not None else os.environ.get(FILE_VARIABLE) or None
    path = Path(named) if named is not None else platformdirs.user_config_path("reprise", appauthor=False) / FILE_NAME
    try:
        return choose(names, given, os.environ, read_file(path.expanduser(), is_required=named is not None))
    except ValueError as error:
        refuse(str(error))


def _choose(
    field: str, option: Option, given: Mapping[str, object], environment: Mapping[str, str], file: ConfigurationFile
) -> Chosen:
    typed = given.get(field)
    if typed is not None and typed != []:
        return _read(option, typed, source=COMMAND_LINE)
    variable = environment.get(option.variable)
    if variable is not None and (variable != "" or option.is_secret):
        return _read(option, variable, source=option.variable)
    if option.name in file.values:
        return _read(option, file.values[option.name], source=str(file.path), folder=file.path.parent)
    return Chosen(value=_DEFAULTS[field], source=DEFAULT)


def _read(option: Option, given: object, *, source: str, folder: Path = Path()) -> Chosen:
    try:
        return Chosen(value=option.kind.read(given, folder), source=source)
    except ValueError as error:
        flag = "MODEL" if option.name == "model" else f"--{option.name}"
        place = error.place if isinstance(error, TableFault) else flag
        end = "" if str(error).endswith("?") else "."
        raise ValueError(f"Invalid {place} from {_described(source)}: it {error}{end}") from error


def _described(source: str) -> str:
    return f"the {COMMAND_LINE}" if source == COMMAND_LINE else source


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else " `reprise config` lists all options."


def _first_below(directory: str) -> str:
    found = model_directories(Path(directory).expanduser())
    if not found:
        refuse(f"There is no model in {directory}: none of its folders has a config.json.")
    return str(found[0])


def _keys_in(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"Can't read the API key file {file}: {error}.")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        refuse(f"The API key file {file} contains no key. Write one key per line.")
    return keys


def _first_and_rest(models: Any, others: Any) -> tuple[str | None, list[str] | None]:
    """The model that is loaded first and the other models; None if not given."""
    given: list[str] = [*(models or ())]
    return given[0] if given else None, [*given[1:], *(others or ())] or None


def _parameter(field: str, option: Option, *, has_several: bool) -> inspect.Parameter:
    """The parameter that typer makes a flag of: as text, which `OptionKind.read` reads as it does all sources.

    `has_several`: the command takes more models than one.
    """
    if option.name == "model":
        metavar, kind = ("MODEL...", list[str] | None) if has_several else ("MODEL", str | None)
        return _parameter_of(field, kind, typer.Argument(metavar=metavar, help=option.help, show_default=False))
    is_switch = option.kind.is_switch
    has_opposite = is_switch and not option.name.startswith("no-")
    flag: Any = typer.Option(
        f"--{option.name}/--no-{option.name}" if has_opposite else f"--{option.name}",
        metavar=option.kind.metavar,
        help=help_of(field).replace("[", r"\["),  # Rich takes brackets for markup.
        rich_help_panel=option.group.value,
        show_default=False,
    )
    if is_switch:
        return _parameter_of(field, bool | None, flag)
    return _parameter_of(field, list[str] | None if option.kind.is_repeated else str | None, flag)


def _parameter_of(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )


def help_of(field: str) -> str:
    """The help of an option, with its default."""
    option, default = OPTIONS[field], default_of(field)
    if default is None or default in ((), {}):
        return option.help
    if option.kind is NBYTES:
        default = Bytes(default)
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    return f"{option.help} Default: {f'{shown:g}' if isinstance(shown, float) else shown}."
