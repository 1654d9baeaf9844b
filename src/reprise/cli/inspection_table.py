"""An inspection as a table for a person."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from reprise.chat.templates.template_behavior import Dates, Place, TemplateBehavior, Thoughts
from reprise.cli.inspection import Images, TemplateReport, ToolCalls

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table_of(inspection: TemplateReport) -> RenderableType:
    """All of it, to be printed with rich."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in (*_model(inspection), *_memory(inspection), *_template(inspection)):
        facts.add_row(name, escape(value))
    parts: list[RenderableType] = [facts, Text()]
    if inspection.sample is not None and inspection.sample.checkpoints:
        parts += [_checkpoints(inspection), Text()]
    return Group(*parts, _chats(inspection))


def size(nbytes: int) -> str:
    """Bytes with the largest unit that leaves a whole number before the point."""
    amount, unit = float(nbytes), 0
    while amount >= 1024 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{nbytes:,} B" if unit == 0 else f"{amount:,.1f} {_UNITS[unit]}"


def _model(inspection: TemplateReport) -> Iterator[tuple[str, str]]:
    context = f"{inspection.context:,} tokens" if inspection.context is not None else "not in its configuration"
    yield "model", f"{inspection.name} ({inspection.architecture}, {size(inspection.weights)})"
    yield "context", context
    yield "layers", ", ".join(f"{layers.num} × {layers.kind}" for layers in inspection.layers)
    yield "head (MTP)", inspection.head
    yield "drafts", inspection.drafts
    yield "resumes at", inspection.resumes
    yield "batches", "together" if inspection.alone is None else f"alone: {inspection.alone}"
    yield "images", "none: text alone" if inspection.images is None else _images(inspection.images)


def _images(images: Images) -> str:
    ways = " and ".join(images.sees_itself_in)
    return (
        f"by {images.source}; positions {images.positions}; an image sees "
        f"{'itself both ways in ' + ways if ways else 'what is before it'}; 1024 x 1024 pixels are {images.tokens:,} "
        f"tokens, {size(images.nbytes)} of features and {images.tower_s:.2g} s of the tower here"
    )


def _memory(inspection: TemplateReport) -> Iterator[tuple[str, str]]:
    per_token = [f"{size(nbytes)} ({kind})" for kind, nbytes in inspection.per_token.items()]
    yield "KV per token", ", ".join(per_token) if per_token else "none"
    yield "per snapshot", size(inspection.snapshot) if inspection.snapshot > 0 else "none needed"
    if inspection.interval is not None:
        yield "long prompts", f"a checkpoint every {inspection.interval:,} tokens"


def _template(inspection: TemplateReport) -> Iterator[tuple[str, str]]:
    behavior, sample = inspection.behavior, inspection.sample
    if behavior is None:
        yield "chat template", inspection.refusal or "none"
        return
    yield "thinking", _thinking(behavior)
    if behavior.in_tool_loop is not None and behavior.thoughts is not Thoughts.NONE:
        yield "in tool loops", f"{behavior.in_tool_loop}; after the next user message {behavior.after_tool_loop}"
    if behavior.to_keep:
        options = " or ".join(f"{name}={str(value).lower()}" for name, value in behavior.to_keep.items())
        yield "to keep it", f"template option {options}"
    yield "prompt's end", _prompt_end(behavior)
    yield "system prompt", behavior.system
    yield "tools", _tools(behavior)
    yield from _tool_calls(inspection.tool_calls)
    yield "today's date", behavior.dates if behavior.dates is not Dates.NONE else "not written"
    if sample is not None and not sample.checkpoints:
        yield "checkpoints", "none needed: every position can be resumed"


def _thinking(behavior: TemplateBehavior) -> str:
    opened = "; the prompt opens it" if behavior.opens_thinking else ""
    where = "" if behavior.thoughts is Thoughts.NONE else " in earlier turns"
    return f"{behavior.thoughts}{where}{opened}"


def _prompt_end(behavior: TemplateBehavior) -> str:
    if behavior.keeps_prompt_end is None:
        return "unknown: the template refuses a second turn"
    return "stays in the next turn" if behavior.keeps_prompt_end else "is rendered differently in the next turn"


def _tools(behavior: TemplateBehavior) -> str:
    return "not taken" if behavior.tools in (Place.ABSENT, Place.REFUSED) else behavior.tools


def _tool_calls(calls: ToolCalls) -> Iterator[tuple[str, str]]:
    if not calls.is_understood:
        yield "tool calls", "not understood: the chat template shows no readable call"
        return
    forced = "can be forced" if calls.is_forcible else "cannot be forced"
    yield "tool calls", f"understood, {forced}, {'several' if calls.is_parallel else 'one'} at a time"
    if calls.example:
        yield "a call", calls.example


def _checkpoints(inspection: TemplateReport) -> Table:
    sample = inspection.sample
    assert sample is not None
    table = Table(title=f"Checkpoints of a sample chat of {sample.tokens} tokens", title_justify="left")
    table.add_column("position", justify="right")
    table.add_column("kind")
    table.add_column("the text before it ends with")
    for checkpoint in sample.checkpoints:
        table.add_row(str(checkpoint.position), checkpoint.kind, escape(repr(checkpoint.ends_with)))
    return table


def _chats(inspection: TemplateReport) -> Table:
    table = Table(title=f"Idle chats that fit in {size(inspection.cache_bytes)}", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("each", justify="right")
    table.add_column("chats", justify="right")
    for chats in inspection.chats:
        too_long = inspection.context is not None and chats.tokens > inspection.context
        num = "longer than its context" if too_long else f"{chats.num:,}"
        table.add_row(f"{chats.tokens:,}", size(chats.nbytes), num)
    return table
