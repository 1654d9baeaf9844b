"""The flags of `mlx_lm.server`, so that a script that starts it starts this server.

Those that mean the same have the same name here. The others are rewritten, ignored with a sentence where they only
tune, or refused with one if ignoring them would change answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import typer
from typer.core import TyperCommand

from reprise.cli.other_flags import instead_of
from reprise.cli.refuse import refuse


def _renamed(name: str) -> Callable[[str], list[str]]:
    return lambda value: [f"--{name}", value]


def _log_level(value: str) -> list[str]:
    level = value.lower()
    return ["--log-level", "error" if level == "critical" else level]


def _origins(value: str) -> list[str]:
    return [word for origin in value.split(",") if origin for word in ("--cors-origin", origin.strip())]


REWRITTEN: dict[str, Callable[[str], list[str]]] = {
    "model": lambda value: [value],
    "allowed-origins": _origins,
    "log-level": _log_level,
    "decode-concurrency": _renamed("max-batch"),
    "prefill-step-size": _renamed("prefill-chunk"),
    "prompt-cache-bytes": _renamed("cache-bytes"),
}
IGNORED = {
    "num-draft-tokens": "how many tokens are drafted follows from how often they are right and what a pass costs",
    "prompt-concurrency": "prompts that share a prefix wait for each other, all others take turns",
    "prompt-cache-size": "the cache is limited in bytes, not in chats: --cache-bytes",
    "use-default-chat-template": "transformers no longer has default templates; use --chat-template",
}
"""What only tunes, and why it has no effect here."""
REFUSED = {
    "quantized-kv-start": "KV is always quantized from the first token. Omit --quantized-kv-start.",
    "pipeline": "Splitting a model by layers is not supported. --tensor-parallel splits it over several machines.",
}
_WITHOUT_VALUE = frozenset({"pipeline", "use-default-chat-template"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The arguments for `reprise serve`, what to say about the others, and why to refuse them all."""

    words: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    refusal: str | None = None


def translated(words: Sequence[str]) -> Translation:
    """Rewrite the flags of `mlx_lm.server` among these words. What is not one of them stays."""
    made = Translation()
    at = 0
    while at < len(words):
        name, equals, value = words[at].removeprefix("--").partition("=")
        at += 1
        if not words[at - 1].startswith("--") or name not in {*REWRITTEN, *IGNORED, *REFUSED}:
            made.words.append(words[at - 1])
            continue
        if equals == "" and name not in _WITHOUT_VALUE and at < len(words):
            value = words[at]
            at += 1
        if name in IGNORED:
            made.notes.append(f"--{name} has no effect: {IGNORED[name]}.")
        elif name in REWRITTEN:
            made.words.extend(REWRITTEN[name](value))
        elif (name, value) != ("quantized-kv-start", "0"):
            return Translation(refusal=REFUSED[name])
    return made


class ServeCommand(TyperCommand):
    """`reprise serve`, which takes the flags of `mlx_lm.server` too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Rewrite them first. Those of other servers are refused with what says the same here."""
        made = translated(args)
        refusal = made.refusal or instead_of(made.words)
        if refusal is not None:
            refuse(refusal)
        for note in made.notes:
            typer.echo(f"reprise: {note}", err=True)
        return super().parse_args(ctx, made.words)
