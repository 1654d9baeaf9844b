"""Runs the mutants: each in a copy of the source, with the tests that should notice it.

    python -m tools.mutants [--only WORD] [--list]
    python -m tools.mutants --random N [--seed S] [--below cache/] [--since REV]

`--list` says in a second where each is planted, and runs nothing. `--random` draws bugs from small slips at any place
of the source instead, judged by the tests of their package. Exits with 1 if one survives or has no place.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from tools.mutants.mutant import Mutant
from tools.mutants.of_api import API_MUTANTS
from tools.mutants.of_bench import BENCH_MUTANTS
from tools.mutants.of_cache import CACHE_MUTANTS
from tools.mutants.of_chat import CHAT_MUTANTS
from tools.mutants.of_core import CORE_MUTANTS
from tools.mutants.of_deploy import DEPLOY_MUTANTS
from tools.mutants.of_disk import DISK_MUTANTS
from tools.mutants.of_drafts import DRAFTS_MUTANTS
from tools.mutants.of_engine import ENGINE_MUTANTS
from tools.mutants.of_images import IMAGE_MUTANTS
from tools.mutants.of_loop import LOOP_MUTANTS
from tools.mutants.of_ranks import RANK_MUTANTS
from tools.mutants.of_schedule import SCHEDULE_MUTANTS
from tools.mutants.of_vision import VISION_MUTANTS
from tools.mutants.operators import random_mutants
from tools.mutants.place import PlantedText, Unplaced, placed
from tools.mutants.source import functions_below

MUTANTS = (
    *API_MUTANTS,
    *CORE_MUTANTS,
    *DEPLOY_MUTANTS,
    *SCHEDULE_MUTANTS,
    *CACHE_MUTANTS,
    *CHAT_MUTANTS,
    *DISK_MUTANTS,
    *DRAFTS_MUTANTS,
    *ENGINE_MUTANTS,
    *LOOP_MUTANTS,
    *RANK_MUTANTS,
    *BENCH_MUTANTS,
    *VISION_MUTANTS,
    *IMAGE_MUTANTS,
)
ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 180

# With every model, of which `make test` takes one each. A failing example need not be made smaller: that it fails is
# all that counts. Nothing is left in the working tree.
RUN_TESTS = """
import sys
import pytest

class Quick:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", phases=phases, database=None, deadline=None, derandomize=True)
        settings.load_profile("mutants")

options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "not soak"]
sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[Quick()]))
"""


class MutantVerdict(StrEnum):
    KILLED = "killed"
    NO_END = "no end"
    """The tests ran into the time limit, which counts as noticed: on a busy machine they may just be slow."""
    UNCLEAR = "UNCLEAR"
    """The process that ran the tests ended in another way than pytest does."""
    SURVIVED = "SURVIVED"
    UNPLACED = "UNPLACED"


_NOTICED = (MutantVerdict.KILLED, MutantVerdict.NO_END)
_NO_END = "no end"


def failure_of(source: Path, tests: tuple[str, ...]) -> str | None:
    """What pytest says if the tests fail with this copy of the source. One that comes to no end has failed."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN_TESTS, *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _NO_END
    # 1: tests failed; 2: interrupted by an error while collecting. Anything else says nothing about the mutant.
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest could not run {' '.join(tests)}:\n{done.stdout}{done.stderr}")
    return None if done.returncode == 0 else done.stdout


def judge(place: PlantedText, source: Path, tests: tuple[str, ...]) -> MutantVerdict:
    """Plant the bug in the copy, run the tests, and take it out again."""
    healthy = place.file.read_text()
    place.file.write_text(place.text)
    try:
        failure = failure_of(source, tests)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return MutantVerdict.UNCLEAR
    finally:
        place.file.write_text(healthy)
    if failure is None:
        return MutantVerdict.SURVIVED
    return MutantVerdict.NO_END if failure == _NO_END else MutantVerdict.KILLED


def run(chosen: Sequence[Mutant], places: Mapping[str, PlantedText | Unplaced], source: Path) -> int:
    """Judge each in a copy of the source. How many were killed; -1 where nothing can be said."""
    for tests in sorted({mutant.tests for mutant in chosen if isinstance(places[mutant.name], PlantedText)}):
        failure = failure_of(source, tests)
        if failure is not None:
            print(f"{failure}\n{' '.join(tests)}: red without any planted bug; nothing can be said.")
            return -1
    verdicts: list[MutantVerdict] = []
    for mutant in chosen:
        start = time.monotonic()
        place = places[mutant.name]
        verdicts.append(
            judge(place, source, mutant.tests) if isinstance(place, PlantedText) else MutantVerdict.UNPLACED
        )
        elapsed_s = time.monotonic() - start
        reason = f": {place.reason}" if isinstance(place, Unplaced) else ""
        print(f"{verdicts[-1]:9} {elapsed_s:5.1f} s  {mutant.function:32} {mutant.name}{reason}", flush=True)
    return sum(verdict in _NOTICED for verdict in verdicts)


def show(chosen: Sequence[Mutant], source: Path) -> int:
    """Say where each is planted; how many have a place."""
    functions = functions_below(source)
    places = [placed(mutant, functions) for mutant in chosen]
    for mutant, place in zip(chosen, places, strict=True):
        is_placed = isinstance(place, PlantedText)
        where = str(place.file.relative_to(source)) if is_placed else f"UNPLACED: {place.reason}"
        print(f"{mutant.function:32} {mutant.name:80} {where}", file=sys.stdout if is_placed else sys.stderr)
    return sum(isinstance(place, PlantedText) for place in places)


def lines_since(revision: str) -> dict[Path, set[int]]:
    """The lines of each source file that the working tree has otherwise than this revision."""
    command = ["git", "diff", "--unified=0", "--relative=src/reprise", revision, "--", "src/reprise"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    changed: dict[Path, set[int]] = {}
    file = Path()
    for line in text.splitlines():
        if line.startswith("+++ "):
            file = Path(line.removeprefix("+++ b/"))
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, num = int(found[1]), int(found[2] or 1)
            changed.setdefault(file, set()).update(range(start, start + num))
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name or function has this word")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="this many random bugs instead")
    parser.add_argument("--seed", type=int, default=0, help="with --random")
    parser.add_argument("--below", default="", help="with --random: only in files whose path begins with this")
    parser.add_argument("--since", metavar="REV", help="with --random: only in lines that were changed since then")
    parser.add_argument("--list", action="store_true", help="say where each is planted and stop")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.name or options.only in m.function]
    if options.list:
        num_placed = show(chosen, ROOT / "src" / "reprise")
        print(f"{num_placed} of {len(chosen)} have a place")
        return 0 if num_placed == len(chosen) else 1
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        functions = functions_below(source / "reprise")
        if options.random > 0:
            drawn = random_mutants(
                functions,
                source / "reprise",
                num=options.random,
                seed=options.seed,
                below=options.below,
                changed=None if options.since is None else lines_since(options.since),
            )
            chosen = [mutant for mutant, _ in drawn.values()]
            places = {name: place for name, (_, place) in drawn.items()}
        else:
            places = {mutant.name: placed(mutant, functions) for mutant in chosen}
        num_killed = run(chosen, places, source)
    if num_killed >= 0:
        print(f"{num_killed} of {len(chosen)} killed")
    return 0 if num_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
