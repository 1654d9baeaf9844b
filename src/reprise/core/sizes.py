"""Amounts of memory as people write them: `8GB`, `512MiB`, `25%`, `1000000`."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_SPELLINGS = {
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_UNITS = {"": 1, "B": 1} | {unit.upper(): size for unit, size in _SPELLINGS.items()}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes."""

    nbytes: int

    def __post_init__(self) -> None:
        assert self.nbytes >= 0, self

    def of(self, total: int) -> int:
        """The amount in bytes, whatever the total."""
        del total
        return self.nbytes

    def __str__(self) -> str:
        """The largest unit that divides it, for `parse_amount`."""
        units = {size: unit for unit, size in _SPELLINGS.items() if self.nbytes % size == 0 and self.nbytes > 0}
        if not units:
            return str(self.nbytes)
        size = max(units)
        return f"{self.nbytes // size}{units[size]}"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a total; 1 is all of it."""

    share: Fraction

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1, self

    def of(self, total: int) -> int:
        """The amount in bytes, of a total in bytes."""
        return int(total * self.share)

    def __str__(self) -> str:
        percent = self.share * 100
        return f"{Decimal(percent.numerator) / Decimal(percent.denominator):f}%"


Amount = Bytes | Share


def parse_amount(text: str) -> Amount:
    """Parse an amount.

    Bytes, with a decimal (kB, MB, GB) or binary (KiB, MiB, GiB) unit or none, or a percentage.
    Raises ValueError with a sentence.
    """
    form = _FORM.fullmatch(text)
    unit = form.group(2).upper() if form is not None else None
    if form is None or (unit != "%" and unit not in _UNITS):
        raise ValueError(f"Invalid size {text!r}. Examples: 8GB, 512MiB, 25%.")
    number = Fraction(form.group(1))
    if unit == "%":
        if number > 100:
            raise ValueError(f"{text!r} is more than 100%.")
        return Share(number / 100)
    assert unit is not None
    return Bytes(int(number * _UNITS[unit]))


def nbytes_text(nbytes: int) -> str:
    """`1.5 GB`, with decimal units."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
