"""Checks the links between the Markdown files of this repository, offline: `python -m tools.links`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def broken_links(files: list[Path]) -> Iterator[str]:
    """A sentence for each link to a file or a heading that is not there."""
    for file in files:
        for target in _LINK.findall(_without_code(file.read_text(encoding="utf-8"))):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            path, _, anchor = target.partition("#")
            there = file.parent / path if path else file
            if not there.exists():
                yield f"{file}: {target}: there is no such file"
            elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
                yield f"{file}: {target}: there is no such heading"


def anchors(text: str) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ +(.*)$", _without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    broken = list(broken_links([ROOT / name for name in listed.split()]))
    print("\n".join(broken), file=sys.stderr, end="\n" if broken else "")
    sys.exit(1 if broken else 0)
