"""`python -m tools.matrix`: every architecture, warm against cold, into COMPATIBILITY.md.

With names (`python -m tools.matrix llama "qwen3_5 with images"`) only those, and the page goes to the terminal.
Ends with 1 if any check failed.
"""

import sys
import time
from pathlib import Path

from tests.zoo.caches import available
from tests.zoo.catalogue import ZOO
from tests.zoo.sizes import Unavailable
from tools.matrix.row import ArchitectureRow, measure
from tools.matrix.seeing import SEEING, SeeingRow, measure_seeing
from tools.matrix.table import render

_PAGE = Path(__file__).parents[2] / "COMPATIBILITY.md"


def main(names: list[str]) -> int:
    """Measure and write; gives the exit status."""
    rows: list[ArchitectureRow] = []
    seeing: list[SeeingRow] = []
    broken: dict[str, str] = {}
    for name in names if names else (*available(), *(f"{family} with images" for family in SEEING)):
        begun, family = time.monotonic(), name.removesuffix(" with images")
        try:
            row = measure(name) if family == name else measure_seeing(family)
            (rows if isinstance(row, ArchitectureRow) else seeing).append(row)  # type: ignore[arg-type]
            faults = list(row.faults)
        except Exception as error:  # one architecture must not hide the others
            faults = [f"{type(error).__name__}: {error}"]
            broken[name] = faults[0]
        print(f"{name}: {'; '.join(faults) or 'right'} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    unavailable = {name: entry for name, entry in ZOO.items() if isinstance(entry, Unavailable)}
    page = render(rows, {} if names else unavailable, broken, seeing)
    if names:
        print(page)
    else:
        _PAGE.write_text(page, encoding="utf-8")
    return 1 if broken or any(row.faults for row in (*rows, *seeing)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
