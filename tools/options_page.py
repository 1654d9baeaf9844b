"""Writes docs/options.md from the declared options: `python -m tools.options_page`."""

from pathlib import Path

from reprise.cli.configuration import help_of
from reprise.core.options import OptionGroup
from reprise.core.settings import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

_HEAD = """# Options

This page is written by `python -m tools.options_page` from the declarations in `src/reprise/core/settings.py`.

Each option can be set in three places. The first that sets it wins:

1. the command line: `reprise serve MODEL --max-tokens 512`;
2. the environment: `REPRISE_MAX_TOKENS=512`. An empty variable counts as not set, except for API keys. Switches take
   `true` or `false`, lists take values separated by spaces;
3. the configuration file: `max-tokens = 512`. This is `reprise.toml` in the user's configuration directory
   (`~/.config/reprise` on Linux, `~/Library/Application Support/reprise` on macOS), or the file given by `--config` or
   `REPRISE_CONFIG`. Relative paths in it are relative to its directory.

`reprise config` prints every option with its value and where the value comes from; its output is itself a valid
configuration file. `reprise inspect` reads the same sources. A switch that is on in one place is turned off by a
`--no-…` flag. An unknown name in the file is an error; an unknown `REPRISE_…` variable gets a warning.

```toml
# reprise.toml
model = "mlx-community/Qwen3.5-4B-MLX-4bit"
cache-bytes = "25%"
disk-cache = "~/.cache/reprise"
settle = false
chat-template-args = { enable_thinking = false }
```

A table `[models.ALIAS]` gives a model a name and its own options: [Several models](several-models.md) has an example.
The command line and the environment take precedence over it, as over the rest of the file.

Sizes take a decimal (kB, MB, GB, TB) or binary (KiB, MiB, GiB, TiB) unit, or none for bytes. Where the table says so,
they can be a percentage.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for group in OptionGroup:
        lines += [f"## {group.value}\n", "| command line | environment | file | |", "|---|---|---|---|"]
        for field, option in OPTIONS.items():
            if option.group is group:
                flag = "MODEL" if option.name == "model" else f"--{option.name}"
                if option.kind.is_switch and not option.name.startswith("no-"):
                    flag = f"{flag}`, `--no-{option.name}"
                lines.append(f"| `{flag}` | `{option.variable}` | `{option.name}` | {help_of(field)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
