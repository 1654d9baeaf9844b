"""All benches by name: `python -m bench NAME [OPTIONS]`. Without a name: the list of them, and then the workloads.

`NAME --help` says what a bench shows and takes.
"""

import ast
import importlib
import sys
from pathlib import Path

GATE = "workloads"
"""What runs without a name: it needs no file and no other server, and its exact counts gate."""


def benches() -> dict[str, str]:
    """The modules beside this one that can be run, each with the first line of what it says of itself."""
    found: dict[str, str] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body) and file.stem[0] != "_":
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def listing() -> str:
    """The benches, one on each line."""
    known = benches()
    width = max(map(len, known))
    return "\n".join(f"  {name:{width}}  {line}" for name, line in known.items())


def run(name: str, options: list[str]) -> int:
    """Run a bench with its own options; gives its exit status."""
    sys.argv = [f"python -m bench {name}", *options]
    return importlib.import_module(f"bench.{name}").main() or 0


def main(given: list[str]) -> int:
    """Run what the command line names; gives the exit status."""
    if given and given[0] in benches():
        return run(given[0], given[1:])
    if not given:
        print(f"{listing()}\n\npython -m bench {GATE}\n", flush=True)
        return run(GATE, [])
    is_help = given[0] in ("-h", "--help")
    print(f"{__doc__}\n\n{listing()}" if is_help else f"There is no bench {given[0]!r}:\n\n{listing()}")
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
