"""How an option is declared: once, for the command line, the environment and the configuration file.

A kind reads what any of the three gives: text from the first two, TOML's own types from the file. `read` raises
ValueError with the end of a sentence that names the option ("must be …"); `write` gives TOML that reads back the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

from reprise.core.sizes import Amount, Bytes, parse_amount

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class OptionGroup(StrEnum):
    """What the help lists together."""

    SERVER = "Server"
    ANSWERS = "Answers"
    REUSE = "Reuse"
    LOAD = "Load"


class OptionKind(Protocol):
    """What values an option takes, and how they are written."""

    @property
    def metavar(self) -> str: ...

    def read(self, given: object, folder: Path) -> object:
        """The value, with relative paths taken from `folder`. Raises ValueError."""
        ...

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, or None."""
        ...

    def write(self, value: Any) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name` is `--name` on the command line, `REPRISE_NAME` in the environment, `name` in the file."""

    name: str
    group: OptionGroup
    help: str
    kind: OptionKind
    is_secret: bool = False
    """Never printed, and refused where it is empty: an empty variable must not open a server to everybody."""

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
            return f"{noun} from {self.least:g} to {self.most:g}"
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
    """Text, or one of `choices`."""

    choices: tuple[str, ...] = ()
    metavar: str = "TEXT"

    def read(self, given: object, folder: Path) -> str:
        del folder
        text = _text(given)
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
    """Several texts: an option given several times, words in a variable, a list in the file."""

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
class AmountKind:
    """A number of bytes with a unit, or a share of what there is."""

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
    """A JSON object, or a table of the file."""

    metavar: str = "JSON"

    def read(self, given: object, folder: Path) -> dict[str, Any]:
        del folder
        value: object = given
        if isinstance(given, str):
            try:
                value = json.loads(given)
            except ValueError as error:
                raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return cast(dict[str, Any], value)

    def fault(self, value: Mapping[str, Any]) -> str | None:
        del value
        return None

    def write(self, value: Mapping[str, Any]) -> str:
        # As JSON in a string: TOML has no null.
        return _quoted(json.dumps(dict(value), ensure_ascii=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateKind:
    """A chat template: a file, or the template itself."""

    metavar: str = "TEMPLATE"

    def read(self, given: object, folder: Path) -> str:
        text = _text(given)
        if "{%" in text or "{{" in text:
            return text
        try:
            return (folder / Path(text).expanduser()).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"must be a readable file or a Jinja template, not {text!r}") from None

    def fault(self, value: str) -> str | None:
        del value
        return None

    def write(self, value: str) -> str:
        return _quoted(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathKind:
    """A file that exists, or a directory or a written file that may be made."""

    is_directory: bool = False
    is_written: bool = False

    @property
    def metavar(self) -> str:
        return "DIR" if self.is_directory else "FILE"

    def read(self, given: object, folder: Path) -> str:
        if self.is_directory and "://" in _text(given):
            return _text(given)  # An object store, which nothing is asked of yet.
        # One that is relative to where the command runs stays as it was written.
        path = Path(_text(given)).expanduser()
        path = path if folder == Path() else folder / path
        if self.is_directory and path.exists() and not path.is_dir():
            raise ValueError(f"must be a directory, not the file {str(path)!r}")
        if self.is_written and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"must be a file in a directory that exists, not {str(path)!r}")
        if not self.is_directory and not self.is_written and not path.is_file():
            raise ValueError(f"must be a file: {str(path)!r} does not exist or is a directory")
        return str(path)

    def fault(self, value: str) -> str | None:
        del value
        return None

    def write(self, value: str) -> str:
        return _quoted(value)


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
    """A basic string of TOML: JSON's escapes are among its own, but DEL has to be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
