"""Kinds of options, each declared once for the command line, the environment and the configuration file.

A kind reads what any of the three gives: text from the first two, TOML's own types from the file. `read` raises
ValueError with the end of a sentence that names the option ("must be …"); `write` gives TOML that reads back the same.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from reprise.core.sizes import Amount, Bytes, parse_amount

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name` is `--name` on the command line, `REPRISE_NAME` in the environment, `name` in the file."""

    name: str
    group: OptionGroup
    help: str
    kind: "OptionKind"
    is_secret: bool = False
    """Never printed, and rejected if empty: an empty variable must not open a server to everybody."""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "REPRISE_" + self.name.upper().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberKind:
    """A number from `least` to `most`, above `above`, or one of `choices`."""

    is_whole: bool = True
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[int, ...] = ()
    metavar: str = "N"

    def read(self, given: object, folder: Path) -> int | float:
        del folder
        try:
            value = self._number(given)
        except ValueError:
            raise ValueError(f"must be {self._wanted()}, not {given!r}") from None
        fault = self.fault(value)
        if fault is not None:
            raise ValueError(fault)
        return value

    def fault(self, value: float) -> str | None:
        is_within = (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (not self.choices or value in self.choices)
        )
        return None if is_within else f"must be {self._wanted()}, not {value}"

    def write(self, value: float) -> str:
        return repr(value)

    def _number(self, given: object) -> int | float:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError
        if self.is_whole:
            if isinstance(given, float):
                raise ValueError
            return int(given)
        return float(given)

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        noun = "a whole number" if self.is_whole else "a number"
        if self.above is not None:
            noun += f" above {self.above:g}"
            return noun if self.most is None else f"{noun} and at most {self.most:g}"
        if self.least is not None and self.most is not None:
            return f"{noun} from {self.least:g} to {self.most:.15g}"
        return noun if self.least is None else f"{noun} of at least {self.least:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchKind:
    """On or off: `--name` and `--no-name`."""

    metavar: str = ""

    def read(self, given: object, folder: Path) -> bool:
        del folder
        if isinstance(given, bool):
            return given
        text = given.strip().lower() if isinstance(given, str) else ""
        if text not in (*_TRUE, *_FALSE):
            raise ValueError(f"must be true or false, not {given!r}")
        return text in _TRUE

    def fault(self, value: bool) -> str | None:
        del value
        return None

    def write(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextKind:
    """Text, or one of `choices`. `parse`: gives the value from a text and the file's folder; may raise ValueError."""

    choices: tuple[str, ...] = ()
    metavar: str = "TEXT"
    parse: Callable[[str, Path], str] = lambda text, folder: text

    def read(self, given: object, folder: Path) -> str:
        text = self.parse(_text(given), folder)
        fault = self.fault(text)
        if fault is not None:
            raise ValueError(fault)
        return text

    def fault(self, value: str) -> str | None:
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        return None

    def write(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsKind:
    """Several texts: a repeated option, words in a variable, or a list in the file."""

    metavar: str = "TEXT"

    def read(self, given: object, folder: Path) -> tuple[str, ...]:
        del folder
        parts: Sequence[object] = cast(list[object], given) if isinstance(given, list) else _text(given).split()
        if not parts:
            raise ValueError("is empty: give a value, or leave the option out")
        values = tuple(_text(part) for part in parts)
        fault = self.fault(values)
        if fault is not None:
            raise ValueError(fault)
        return values

    def fault(self, value: tuple[str, ...]) -> str | None:
        return None if all(part.strip() for part in value) else "is empty: give a value, or leave the option out"

    def write(self, value: tuple[str, ...]) -> str:
        return "[" + ", ".join(map(_quoted, value)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNamesKind(TextsKind):
    """Several host names, without scheme and port."""

    metavar: str = "NAME"

    def fault(self, value: tuple[str, ...]) -> str | None:
        # The named base: `super()` without arguments knows the class from before it had slots.
        fault = TextsKind.fault(self, value)
        wrong = next((part for part in value if set(part) & set(":/[]@")), None)
        return fault if wrong is None else f"must be host names such as gpu.lan, without scheme and port, not {wrong}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AmountKind:
    """A number of bytes with a unit, or a percentage."""

    may_be_zero: bool = False
    metavar: str = "SIZE"

    def read(self, given: object, folder: Path) -> Amount:
        del folder
        amount = _amount(given)
        if amount is None:
            raise ValueError(f"must be a size such as 8GB, 512MiB or 25%, not {given!r}")
        fault = self.fault(amount)
        if fault is not None:
            raise ValueError(fault)
        return amount

    def fault(self, value: Amount) -> str | None:
        return None if self.may_be_zero or value.of(2**40) > 0 else "must be more than zero bytes"

    def write(self, value: Amount) -> str:
        return _quoted(str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class NbytesKind:
    """A number of bytes above zero, with a unit."""

    metavar: str = "SIZE"

    def read(self, given: object, folder: Path) -> int:
        del folder
        amount = _amount(given)
        if not isinstance(amount, Bytes) or amount.nbytes == 0:
            raise ValueError(f"must be a size such as 32MiB, not {given!r}")
        return amount.nbytes

    def fault(self, value: int) -> str | None:
        return None if value > 0 else "must be more than zero bytes"

    def write(self, value: int) -> str:
        return _quoted(str(Bytes(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKind:
    """A JSON object, or a table in the file."""

    metavar: str = "JSON"

    def read(self, given: object, folder: Path) -> dict[str, Any]:
        del folder
        value = _parsed(given)
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return cast(dict[str, Any], value)

    def fault(self, value: Mapping[str, Any]) -> str | None:
        del value
        return None

    def write(self, value: Mapping[str, Any]) -> str:
        # As JSON in a string: TOML has no null.
        return _quoted(json.dumps(dict(value), ensure_ascii=False))


def _parsed(given: object) -> object:
    """What a text is as JSON; a value of another kind as it is. Raises ValueError."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _template(text: str, folder: Path) -> str:
    if "{%" in text or "{{" in text:
        return text
    try:
        return (folder / Path(text).expanduser()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"must be a readable file or a Jinja template, not {text!r}") from None


TEMPLATE = TextKind(metavar="TEMPLATE", parse=_template)
"""A chat template: a file, or the template itself."""


def _file(text: str, folder: Path) -> str:
    path = _path(text, folder)
    if not path.is_file():
        raise ValueError(f"must be a file: {str(path)!r} does not exist or is a directory")
    return str(path)


FILE = TextKind(metavar="FILE", parse=_file)
"""A file that exists."""


def _written_file(text: str, folder: Path) -> str:
    path = _path(text, folder)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"must be a file in a directory that exists, not {str(path)!r}")
    return str(path)


WRITTEN_FILE = TextKind(metavar="FILE", parse=_written_file)
"""A file that the server writes, in a directory that exists."""


OFF = "off"
"""Instead of a directory: none."""


def _directory(text: str, folder: Path) -> str:
    if "://" in text or text == OFF:
        return text  # An object store; not contacted yet.
    path = _path(text, folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"must be a directory, not the file {str(path)!r}")
    return str(path)


DIRECTORY = TextKind(metavar="DIR", parse=_directory)
"""A directory, which need not exist yet, or the URL of an object store."""


def _path(text: str, folder: Path) -> Path:
    """The path, relative to `folder`; unchanged if that is the working directory."""
    path = Path(text).expanduser()
    return path if folder == Path() else folder / path


def _model(text: str, folder: Path) -> str:
    if not text.strip():
        raise ValueError("is empty: give a model directory or a hub id")
    below = folder / Path(text).expanduser()
    return str(below) if folder != Path() and (text.startswith(".") or below.exists()) else text


MODEL = TextKind(metavar="MODEL", parse=_model)
"""A model: a directory or a hub id. In a file, a directory may be relative to the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPathsKind:
    """Directories by name: a repeated `NAME=DIR`, words in a variable, or a table in the file.

    A plain `DIR` is named after its last part.
    """

    metavar: str = "[NAME=]DIR"

    def read(self, given: object, folder: Path) -> dict[str, str]:
        if isinstance(given, dict):
            pairs = list(cast(dict[str, object], given).items())
        else:
            words = cast(list[object], given) if isinstance(given, list) else _text(given).split()
            pairs = [self._pair(_text(word)) for word in words]
        named: dict[str, str] = {}
        for name, directory in pairs:
            if name in named:
                raise ValueError(f"names two directories {name!r}")
            named[name] = DIRECTORY.read(directory, folder)
        fault = self.fault(named)
        if fault is not None:
            raise ValueError(fault)
        return named

    def fault(self, value: Mapping[str, str]) -> str | None:
        wrong = [name for name in value if not is_plain_name(name) or name == "latest"]
        return None if not wrong else f"has the name {wrong[0]!r}: choose one without spaces, and not 'latest'"

    def write(self, value: Mapping[str, str]) -> str:
        return _inline({name: _quoted(directory) for name, directory in value.items()})

    def _pair(self, word: str) -> tuple[str, str]:
        name, separator, directory = word.partition("=")
        if not word.strip() or (separator and not directory):
            raise ValueError(f"must be NAME=DIR, not {word!r}")
        return (name, directory) if separator else (Path(word).name, word)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTablesKind:
    """A table of options for each model, by alias; a plain model is short for a table with only `model`.

    The value is a dictionary of option values by alias and option name.
    """

    options: Callable[[], Mapping[str, Option]]
    """The options that a table can set, by name, including the required `model`."""
    others: Callable[[], Sequence[str]]
    """Names of options that a table cannot set."""
    metavar: str = "JSON"

    def read(self, given: object, folder: Path) -> dict[str, dict[str, Any]]:
        tables = _parsed(given)
        if not isinstance(tables, dict):
            raise ValueError("must be tables by alias, such as [models.fast]")
        return {
            alias: self._read_table(alias, table, folder) for alias, table in cast(dict[str, object], tables).items()
        }

    def fault(self, value: Mapping[str, Mapping[str, Any]]) -> str | None:
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

    def write(self, value: Mapping[str, Mapping[str, Any]]) -> str:
        options = self.options()
        return _inline(
            {
                alias: _inline({name: options[name].kind.write(chosen) for name, chosen in table.items()})
                for alias, table in value.items()
            }
        )

    def _read_table(self, alias: str, given: object, folder: Path) -> dict[str, Any]:
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


OptionKind = (
    NumberKind
    | SwitchKind
    | TextKind
    | TextsKind
    | AmountKind
    | NbytesKind
    | TableKind
    | NamedPathsKind
    | ModelTablesKind
)
"""The values of an option: `read` parses one, `fault` says what is wrong with one, `write` formats it as TOML."""


_ALIASES = "choose one without spaces that does not begin with '.', '/' or '~'"


def _is_alias(name: str) -> bool:
    """Whether this can be an alias of a model: on the command line, what begins like a path is a path."""
    return is_plain_name(name) and not name.startswith((".", "/", "~"))


def is_plain_name(name: str) -> bool:
    """Whether this can be a name in requests, on a command line and in a log."""
    return name.isprintable() and name.split() == [name]


def _inline(values: Mapping[str, str]) -> str:
    """An inline table in TOML, of values in TOML."""
    return "{ " + ", ".join(f"{_quoted(name)} = {value}" for name, value in values.items()) + " }" if values else "{}"


def _amount(given: object) -> Amount | None:
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    try:
        return parse_amount(str(given))
    except ValueError:
        return None


def _text(given: object) -> str:
    if not isinstance(given, str):
        # Without the value, which may be a key.
        raise ValueError("must be text")
    return given


def _quoted(text: str) -> str:
    """A basic string in TOML, which allows JSON's escapes but also requires DEL to be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
