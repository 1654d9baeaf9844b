"""Kinds of options, each declared once for the command line, the environment and the configuration file.

A kind reads what any of the three gives: text from the first two, TOML's own types from the file. What is wrong with a
value is the end of a sentence that names the option ("must be …").
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from reprise.core.sizes import Amount, Bytes, parse_amount

_SWITCH_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class OptionGroup(StrEnum):
    """A section of the help."""

    SERVER = "Server"
    ANSWERS = "Answers"
    REUSE = "Reuse"
    LOAD = "Load"


class TableFault(ValueError):
    """An error inside a table; `place` names the table and the key."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(text)
        self.place = place


def as_toml(value: object) -> str:
    """The value in TOML, on one line; what TOML has no type for is its text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(as_toml, cast(tuple[object, ...], value))) + "]"
    if isinstance(value, Mapping):
        return _inline_table({name: as_toml(each) for name, each in cast(Mapping[str, object], value).items()})
    # TOML allows JSON's escapes but also requires DEL to be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline_table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"{as_toml(name)} = {value}" for name, value in values.items()) + " }" if values else "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionKind:
    """The values of an option.

    `parse` reads one from what a source gives and the folder of its file (ValueError: it cannot be one), `fault` says
    what is wrong with one, `write` gives TOML that reads back the same. `is_repeated`: the flag may be given again.
    """

    parse: Callable[[object, Path], Any]
    fault: Callable[[Any], str | None] = lambda value: None
    write: Callable[[Any], str] = as_toml
    metavar: str = "TEXT"
    is_switch: bool = False
    is_repeated: bool = False

    def read(self, given: object, folder: Path) -> Any:
        """A value without a fault. Raises ValueError."""
        value = self.parse(given, folder)
        fault = self.fault(value)
        if fault is not None:
            raise ValueError(fault)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name` is `--name` on the command line, `REPRISE_NAME` in the environment, `name` in the file."""

    name: str
    group: OptionGroup
    help: str
    kind: OptionKind
    is_secret: bool = False
    """Never printed, and rejected if empty: an empty variable must not open a server to everybody."""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "REPRISE_" + self.name.upper().replace("-", "_")


def number(
    *,
    is_whole: bool = True,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    choices: Sequence[int] = (),
    metavar: str = "N",
) -> OptionKind:
    """A number from `least` to `most`, above `above`, or one of `choices`."""
    wanted = "a whole number" if is_whole else "a number"
    if choices:
        wanted = "one of " + ", ".join(map(str, choices))
    elif above is not None:
        wanted += f" above {above:g}" if most is None else f" above {above:g} and at most {most:g}"
    elif least is not None:
        wanted += f" of at least {least:g}" if most is None else f" from {least:g} to {most:.15g}"

    def parse(given: object, _: Path) -> int | float:
        try:
            if isinstance(given, bool) or not isinstance(given, str | int | (str if is_whole else float)):
                raise ValueError
            return int(given) if is_whole else float(given)
        except ValueError:
            raise ValueError(f"must be {wanted}, not {given!r}") from None

    def fault(value: float) -> str | None:
        is_within = (
            (least is None or value >= least)
            and (most is None or value <= most)
            and (above is None or value > above)
            and (not choices or value in choices)
        )
        return None if is_within else f"must be {wanted}, not {value}"

    return OptionKind(parse=parse, fault=fault, metavar=metavar)


def _switch(given: object, _: Path) -> bool:
    value = _SWITCH_WORDS.get(given.strip().lower()) if isinstance(given, str) else given
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {given!r}")
    return value


SWITCH = OptionKind(parse=_switch, metavar="", is_switch=True)
"""On or off: `--name` and `--no-name`."""


def _text(given: object, _: Path = Path()) -> str:
    if not isinstance(given, str):
        # Without the value, which may be a key.
        raise ValueError("must be text")
    return given


TEXT = OptionKind(parse=_text)


def one_of(*choices: str) -> OptionKind:
    """One of these texts."""

    def fault(value: str) -> str | None:
        return None if value in choices else f"must be one of {', '.join(choices)}, not {value!r}"

    return OptionKind(parse=_text, fault=fault)


def _texts(given: object, _: Path = Path()) -> tuple[str, ...]:
    parts: Sequence[object] = cast(list[object], given) if isinstance(given, list) else _text(given).split()
    texts = tuple(map(_text, parts))
    if not texts:
        raise ValueError(_EMPTY)
    return texts


def _empty_text(value: Sequence[str]) -> str | None:
    return None if all(part.strip() for part in value) else _EMPTY


def _no_host_name(value: Sequence[str]) -> str | None:
    wrong = next((part for part in value if set(part) & set(":/[]@")), None)
    if wrong is None:
        return _empty_text(value)
    return f"must be host names such as gpu.lan, without scheme and port, not {wrong}"


_EMPTY = "is empty: give a value, or leave the option out"
TEXTS = OptionKind(parse=_texts, fault=_empty_text, is_repeated=True)
"""Several texts: a repeated option, words in a variable, or a list in the file."""
HOST_NAMES = OptionKind(parse=_texts, fault=_no_host_name, metavar="NAME", is_repeated=True)
"""Several host names, without scheme and port."""


def _amount(given: object, _: Path) -> Amount:
    amount = _amount_of(given)
    if amount is None:
        raise ValueError(f"must be a size such as 8GB, 512MiB or 25%, not {given!r}")
    return amount


def _nbytes(given: object, _: Path) -> int:
    amount = _amount_of(given)
    if not isinstance(amount, Bytes) or amount.nbytes == 0:
        raise ValueError(f"must be a size such as 32MiB, not {given!r}")
    return amount.nbytes


def _amount_of(given: object) -> Amount | None:
    try:
        return parse_amount(str(given)) if isinstance(given, str | int) and not isinstance(given, bool) else None
    except ValueError:
        return None


def _no_bytes(value: Amount | int) -> str | None:
    nbytes = value if isinstance(value, int) else value.of(2**40)
    return None if nbytes > 0 else "must be more than zero bytes"


AMOUNT = OptionKind(parse=_amount, fault=_no_bytes, metavar="SIZE")
"""A number of bytes with a unit, or a percentage."""
AMOUNT_OR_ZERO = OptionKind(parse=_amount, metavar="SIZE")
NBYTES = OptionKind(parse=_nbytes, fault=_no_bytes, write=lambda nbytes: as_toml(Bytes(nbytes)), metavar="SIZE")
"""A number of bytes above zero, with a unit."""


def _table(given: object, _: Path) -> dict[str, Any]:
    value = _parsed_json(given)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return cast(dict[str, Any], value)


def _parsed_json(given: object) -> object:
    """What a text is as JSON; a value of another type as it is. Raises ValueError."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


# As JSON in a string: TOML has no null.
TABLE = OptionKind(
    parse=_table, write=lambda table: as_toml(json.dumps(dict(table), ensure_ascii=False)), metavar="JSON"
)
"""A JSON object, or a table in the file."""


def _template(given: object, folder: Path) -> str:
    text = _text(given)
    if "{%" in text or "{{" in text:
        return text
    try:
        return (folder / Path(text).expanduser()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"must be a readable file or a Jinja template, not {text!r}") from None


TEMPLATE = OptionKind(metavar="TEMPLATE", parse=_template)
"""A chat template: a file, or the template itself."""


def _path(text: str, folder: Path) -> Path:
    """The path, relative to `folder`; unchanged if that is the working directory."""
    path = Path(text).expanduser()
    return path if folder == Path() else folder / path


def _file(given: object, folder: Path) -> str:
    path = _path(_text(given), folder)
    if not path.is_file():
        raise ValueError(f"must be a file: {str(path)!r} does not exist or is a directory")
    return str(path)


FILE = OptionKind(metavar="FILE", parse=_file)
"""A file that exists."""


def _written_file(given: object, folder: Path) -> str:
    path = _path(_text(given), folder)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"must be a file in a directory that exists, not {str(path)!r}")
    return str(path)


WRITTEN_FILE = OptionKind(metavar="FILE", parse=_written_file)
"""A file that the server writes, in a directory that exists."""

AUTO = "auto"
OFF = "off"
"""Instead of a directory: none."""


def _directory(given: object, folder: Path) -> str:
    text = _text(given)
    if "://" in text or text == OFF:
        return text  # An object store; not contacted yet.
    path = _path(text, folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"must be a directory, not the file {str(path)!r}")
    return str(path)


DIRECTORY = OptionKind(metavar="DIR", parse=_directory)
"""A directory, which need not exist yet, or the URL of an object store."""


def _found_directory(given: object, folder: Path) -> str:
    text = _text(given)
    return text if text in (AUTO, OFF) else _directory(text, folder)


FOUND_DIRECTORY = OptionKind(metavar="auto|off|DIR", parse=_found_directory)
"""A directory; `auto`: wherever it is found."""


def _model(given: object, folder: Path) -> str:
    text = _text(given)
    if not text.strip():
        raise ValueError("is empty: give a model directory or a hub id")
    below = folder / Path(text).expanduser()
    return str(below) if folder != Path() and (text.startswith(".") or below.exists()) else text


MODEL = OptionKind(metavar="MODEL", parse=_model)
"""A model: a directory or a hub id. In a file, a directory may be relative to the file."""


def _named_directories(given: object, folder: Path) -> dict[str, str]:
    if isinstance(given, dict):
        pairs = list(cast(dict[str, object], given).items())
    else:
        words = cast(list[object], given) if isinstance(given, list) else _text(given).split()
        pairs = [_named_directory(_text(word)) for word in words]
    named: dict[str, str] = {}
    for name, directory in pairs:
        if name in named:
            raise ValueError(f"names two directories {name!r}")
        named[name] = _directory(directory, folder)
    return named


def _named_directory(word: str) -> tuple[str, str]:
    name, separator, directory = word.partition("=")
    if not word.strip() or (separator and not directory):
        raise ValueError(f"must be NAME=DIR, not {word!r}")
    return (name, directory) if separator else (Path(word).name, word)


def _no_adapter_name(value: Mapping[str, str]) -> str | None:
    wrong = [name for name in value if not is_plain_name(name) or name == "latest"]
    return None if not wrong else f"has the name {wrong[0]!r}: choose one without spaces, and not 'latest'"


NAMED_DIRECTORIES = OptionKind(parse=_named_directories, fault=_no_adapter_name, metavar="[NAME=]DIR", is_repeated=True)
"""Directories by name: a repeated `NAME=DIR`, words in a variable, or a table in the file.

A plain `DIR` is named after its last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTables:
    """Tables of options by a model's alias; a plain model is short for a table with only `model`.

    The value is a dictionary of option values by alias and option name.
    """

    options: Callable[[], Mapping[str, Option]]
    """The options that a table can set, by name, including the required `model`."""
    others: Callable[[], Sequence[str]]
    """Names of options that a table cannot set."""

    def kind(self) -> OptionKind:
        """The kind of an option with such tables."""
        return OptionKind(parse=self._parse, fault=self._fault, write=self._write, metavar="JSON")

    def _parse(self, given: object, folder: Path) -> dict[str, dict[str, Any]]:
        tables = _parsed_json(given)
        if not isinstance(tables, dict):
            raise ValueError("must be tables by alias, such as [models.fast]")
        return {
            alias: self._parse_table(alias, table, folder) for alias, table in cast(dict[str, object], tables).items()
        }

    def _fault(self, value: Mapping[str, Mapping[str, Any]]) -> str | None:
        for alias, table in value.items():
            if not _is_alias(alias):
                return f"has the alias {alias!r}: {_ALIASES}"
            if "model" not in table:
                return f"needs `model` in [models.{alias}]: a model directory or a hub id"
            for name, chosen in table.items():
                fault = self.options()[name].kind.fault(chosen)
                if fault is not None:
                    return f"has a {name} in [models.{alias}] that {fault}"
        return None

    def _write(self, value: Mapping[str, Mapping[str, Any]]) -> str:
        options = self.options()
        return _inline_table(
            {
                alias: _inline_table({name: options[name].kind.write(chosen) for name, chosen in table.items()})
                for alias, table in value.items()
            }
        )

    def _parse_table(self, alias: str, given: object, folder: Path) -> dict[str, Any]:
        place = f"[models.{alias}]"
        if not _is_alias(alias):
            raise TableFault(place, f"has an alias that cannot be served: {_ALIASES}")
        if isinstance(given, str):
            given = {"model": given}
        if not isinstance(given, dict):
            raise TableFault(place, "must be a table of options, or a model as text")
        options = self.options()
        values: dict[str, Any] = {}
        for key, value in cast(dict[str, object], given).items():
            name = key.replace("_", "-")
            if name not in options:
                raise TableFault(f"{place} {key}", self._unknown(name))
            if name in values:
                raise TableFault(f"{place} {key}", "is set twice")
            try:
                values[name] = options[name].kind.read(value, folder)
            except ValueError as error:
                raise TableFault(f"{place} {key}", str(error)) from error
        if "model" not in values:
            raise TableFault(place, "needs `model`: a model directory or a hub id")
        return values

    def _unknown(self, name: str) -> str:
        if name in self.others():
            return "is an option of the whole server: set it outside of [models]"
        near = get_close_matches(name, list(self.options()), n=1)
        if near:
            return f"is not an option of a model. Did you mean {near[0]!r}?"
        return f"is not an option of a model. Those are: {', '.join(sorted(self.options()))}"


_ALIASES = "choose one without spaces that does not begin with '.', '/' or '~'"


def _is_alias(name: str) -> bool:
    """Whether this can be an alias of a model: on the command line, what begins like a path is a path."""
    return is_plain_name(name) and not name.startswith((".", "/", "~"))


def is_plain_name(name: str) -> bool:
    """Whether this can be a name in requests, on a command line and in a log."""
    return name.isprintable() and name.split() == [name]
