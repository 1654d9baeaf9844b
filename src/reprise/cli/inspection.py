"""What to know about a model before serving it: layers, bytes, template, checkpoints."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from reprise.chat.answers.markup import is_harmony
from reprise.chat.families.family import Likeness, most_like
from reprise.chat.learnt import FILE_NAME, learnt_toml
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.template import ChatTemplate
from reprise.chat.templates.template_behavior import TemplateBehavior, find_behavior
from reprise.chat.text_model import TextModel
from reprise.core.clock import monotonic
from reprise.core.errors import BadRequest
from reprise.core.kinds import Chunk, Footprint, Full, KvKind, Layout, Window
from reprise.core.settings import Settings
from reprise.core.sizes import nbytes_text
from reprise.engine.models.load import LoadedModel, find_vision, load_text_model, model_type_of
from reprise.engine.models.vision import blank_image
from reprise.engine.running.batching import reason_to_run_alone
from reprise.engine.running.runner import Runner
from reprise.engine.states.blueprint import HiddenSpec, KvSpec, PartsSpec, Spec, StateSpec
from reprise.engine.states.seeing import Positions, Vision
from reprise.loop.draft_trial import drafting_at_once
from reprise.plan.checkpoints import interval_tokens, make_plan
from reprise.schedule.state import LAST_SLICE

CHAT_TOKENS = (8 * 1024, 32 * 1024, 128 * 1024)
"""Chat lengths for which capacity is reported."""

_SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The number of layers of one kind."""

    kind: str
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """How many idle chats of `tokens` tokens, of `nbytes` bytes each, the cache holds."""

    tokens: int
    nbytes: int
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheckpoint:
    """A checkpoint of the sample chat; `ends_with` is the text right before it."""

    position: int
    kind: str
    ends_with: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A chat of two turns for this model. No checkpoints if it can resume at every position."""

    tokens: int
    checkpoints: tuple[PlannedCheckpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """Whether calls are read, can be forced, and can be several at once; `example` is one as the template writes it."""

    is_understood: bool
    is_forcible: bool
    is_parallel: bool
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """How a model sees. `tokens`, `nbytes` and `tower_s` are of an image of 1024 x 1024 pixels: how many it takes, what
    is kept of it beside its entries, and how long the tower took here."""

    source: str
    positions: str
    sees_itself_in: tuple[str, ...]
    """The kinds of layers in which an image attends to itself both ways."""
    tokens: int
    nbytes: int
    tower_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """Everything that `reprise inspect` says. Sizes in bytes; `interval` in tokens, None where none is needed.

    `behavior` and `sample` are None where the model has no chat template or its template refuses the probes; then
    `refusal` says why.
    """

    name: str
    architecture: str
    context: int | None
    weights: int
    layers: tuple[Layers, ...]
    resumes: str
    per_token: Mapping[str, int]
    snapshot: int
    alone: str | None
    behavior: TemplateBehavior | None
    tool_calls: ToolCalls
    sample: Sample | None
    refusal: str | None
    interval: int | None
    cache_bytes: int
    chats: tuple[Chats, ...]
    head: str
    drafts: str
    """What a trial on this device says of them."""
    images: Images | None = None
    """None: it takes text alone."""


def inspect_model(loaded: LoadedModel, settings: Settings, *, budget: int) -> TemplateReport:
    """Look at a loaded model; `budget` is what the cache may hold, in bytes. Runs it on a few tokens.

    `settings`: say whether drafts are tried, which takes some hundred short passes.
    """
    alone = reason_to_run_alone(loaded)
    runner = Runner(loaded, can_batch=alone is None)
    footprint = runner.footprint
    layout = loaded.blueprint.layout
    interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)
    behavior: TemplateBehavior | None = None
    sample: Sample | None = None
    refusal: str | None = None
    try:
        behavior = find_behavior(loaded.text)
        sample = sample_chat(loaded.text, layout, interval)
    except BadRequest as error:
        refusal = str(error)
    return TemplateReport(
        name=loaded.name,
        architecture=loaded.architecture,
        context=loaded.context,
        weights=loaded.nbytes,
        layers=count_layers(loaded.blueprint.specs),
        resumes=where_it_resumes(layout),
        per_token={describe_kind(kind): nbytes for kind, nbytes in footprint.by_kind.items()},
        snapshot=footprint.snapshot,
        alone=alone,
        behavior=behavior,
        tool_calls=tool_calls_of(loaded.text),
        sample=sample,
        refusal=refusal,
        interval=None if layout.resumes_anywhere else interval,
        cache_bytes=budget,
        chats=tuple(idle_chats(tokens, footprint, budget) for tokens in CHAT_TOKENS),
        head=describe_head(loaded),
        drafts=drafting_at_once(runner, settings, clock=monotonic),
        images=images_of(loaded),
    )


def embedder_facts(loaded: LoadedModel) -> dict[str, Any]:
    """What is to be known of a model that makes vectors or scores."""
    embedder = loaded.embedder
    assert embedder is not None, loaded.name
    return {
        "model": loaded.name,
        "architecture": loaded.architecture,
        "weights": loaded.nbytes,
        "makes": embedder.summary,
        "dimensions": embedder.num_dimensions,
        "longest": embedder.max_tokens,
        "prompts": ", ".join(embedder.prompts) or "none",
    }


def images_of(loaded: LoadedModel) -> Images | None:
    """How a model sees, found out with a picture; None if it takes text alone."""
    vision, layout = loaded.vision, loaded.blueprint.layout
    if vision is None:
        return None
    picture = blank_image(_PIXELS, _PIXELS)
    expansion, runner = vision.reader.expand(picture), Runner(loaded, can_batch=False)
    # Once before: the first run also compiles.
    runner.encode(picture)
    started_s = monotonic()
    features = runner.encode(picture)
    return Images(
        source=vision.sight.source,
        positions=_POSITIONS[vision.sight.positions],
        sees_itself_in=tuple(describe_kind(kind) for kind in layout.kinds if type(kind) in vision.sight.both_ways),
        tokens=len(expansion.tokens),
        nbytes=features.nbytes,
        tower_s=monotonic() - started_s,
    )


_PIXELS = 1024
_TRIAL = (96, 64)
_POSITIONS = {
    Positions.OWN: "counted by its layers",
    Positions.INDEX: "told to it",
    Positions.GRID: "told to it, by rows and columns in images",
}


def describe_head(loaded: LoadedModel) -> str:
    """The model's head: where it came from and what it takes, or why there is none."""
    head = loaded.head
    if head is None:
        return "none"
    if not head.is_there:
        return f"none: {head.reason}"
    share = 100 * head.nbytes / loaded.nbytes
    weights, each = nbytes_text(head.nbytes), nbytes_text(head.nbytes_per_token)
    kind, entries = "from", f"; {each} per token"
    if head.nbytes_per_token == 0:
        entries = "; it reads the model's own entries"
    if head.is_model:
        kind, entries = "draft model", ""  # Its layers are counted with the model's.
    return f"{kind} {head.place}: {weights} of weights, {share:.1f} % of the model's{entries}"


def tool_calls_of(text_model: TextModel) -> ToolCalls:
    """What is known about the model's tool calls."""
    if is_harmony(text_model):
        return ToolCalls(is_understood=True, is_forcible=True, is_parallel=False, example="")
    calls = text_model.calls
    return ToolCalls(
        is_understood=calls.format is not None or text_model.parse_tool_call is not None,
        is_forcible=calls.format is not None,
        is_parallel=calls.format is not None and calls.format.is_parallel,
        example=calls.example,
    )


def where_it_resumes(layout: Layout) -> str:
    """Where a model of this layout can resume, in a few words."""
    if layout.has_snapshots:
        return "checkpoints"
    if layout.resumes_anywhere:
        return "everywhere"
    words = {"window" if isinstance(kind, Window) else "chunk" for kind in layout.kinds if not isinstance(kind, Full)}
    return "everywhere that its " + " and ".join(sorted(words)) + " is stored"


def describe_kind(kind: KvKind) -> str:
    """A layer kind in words."""
    match kind:
        case Full():
            return "full attention"
        case Window(size=size, keep=0):
            return f"window of {size:,}"
        case Window(size=size, keep=keep):
            return f"window of {size:,} with the first {keep:,}"
        case Chunk(size=size):
            return f"chunks of {size:,}"


def layers_text(specs: Sequence[Spec], embedder: str) -> str:
    """How many layers of which kind, or how an `embedder` makes its vectors."""
    if embedder != "":
        return f"embedder: {embedder}" if not embedder.startswith("reranker") else embedder
    return ", ".join(f"{layers.num} × {layers.kind}" for layers in count_layers(specs))


def count_layers(specs: Sequence[Spec]) -> tuple[Layers, ...]:
    """How many layers of which kind, in the order in which each kind first occurs."""
    counted = Counter(_describe(spec) for spec in specs)
    return tuple(Layers(kind=kind, num=num) for kind, num in counted.items())


def _describe(spec: Spec) -> str:
    match spec:
        case KvSpec(kind=kind, is_of_head=True):
            return f"{describe_kind(kind)} (head)"
        case KvSpec(kind=kind, bits=int(bits)):
            return f"{describe_kind(kind)}, {bits}-bit KV"
        case KvSpec(kind=kind):
            return describe_kind(kind)
        case StateSpec():
            return "recurrent state"
        case HiddenSpec():
            return "last hidden state"
        case PartsSpec(parts=parts):
            return " and ".join(_describe(part) for part in parts)
        case _:
            return f"own cache class ({type(spec.prototype).__name__})"


def learnt_file(model: str) -> str:
    """What the chat template of a model taught, as `--learnt FILE` takes it; in remarks what is found by trying, and
    cannot be set. Of the weights, reads what it takes to try an image. Raises LoadFailed."""
    text, vision = load_text_model(model), find_vision(model)
    learnt = learnt_toml(text)
    lines = [f"# What the chat template of {Path(model).name} taught. Beside the model, as {FILE_NAME}, or with"]
    lines += ["# --learnt FILE, this says so instead of the template; a table that is left out is learnt."]
    lines += _compared(text, most_like(learnt, model_type_of(model)))
    try:
        behavior = find_behavior(text)
    except BadRequest as error:
        lines += [f"# It could not be rendered: {error}"]
    else:
        lines += ["#", "# Boundaries are found by rendering each chat with made-up next turns. This template's:"]
        template = ChatTemplate(text)
        found = {**_of_behavior(behavior), "reasoning is given as": template.reasoning_key}
        ids = template.id_length
        found["ids of calls"] = "as they are" if ids is None else f"letters and digits, {ids} of them"
        lines += [f"#   {name}: {value}" for name, value in found.items()]
    if text.calls.example:
        lines += ["#", "# A call:", *(f"#   {line}" for line in text.calls.example.splitlines())]
    if vision is not None:
        lines += ["#", *_of_images(text, vision)]
    return "\n".join(lines) + "\n\n" + learnt


def _compared(text: TextModel, likeness: Likeness | None) -> list[str]:
    """Remarks on the family whose template is most like this one."""
    if likeness is None:
        return []
    name = likeness.family
    if text.calls.family:
        return ["#", f"# The template shows tools and no call: [calls] is of the family {name}."]
    if not likeness.differences:
        return ["#", f"# The same as the template of the family {name} taught."]
    lines = [f"#   {each.key}: {_value(each.learnt)}, not {_value(each.of_family)}" for each in likeness.differences]
    return ["#", f"# The template of the family {name} taught the same, but for:", *lines]


def _value(value: object) -> str:
    return (
        "nothing" if value is None else "a table" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)
    )


def _of_images(text: TextModel, vision: Vision) -> list[str]:
    """Remarks on what stands in a prompt for an image, found with a small one."""
    found = vision.reader.expand(blank_image(*_TRIAL))
    tokens, place = found.tokens.tolist(), text.decode([found.placeholder])
    runs = [(token, len(list(run))) for token, run in groupby(tokens)]
    shown = "".join(text.decode([token]) + (f" × {num} " if num > 1 else "") for token, num in runs)
    facts = {
        "the template writes": vision.reader.marker,
        f"an image of {_TRIAL[0]} x {_TRIAL[1]} pixels is": f"{found.text_before}{shown.rstrip()}{found.text_after}",
        "what the tower sees stands at": f"{place} (token {found.placeholder})",
        "positions": _POSITIONS[vision.sight.positions],
    }
    return ["# Images, found by trying:", *(f"#   {name}: {_value(value)[1:-1]}" for name, value in facts.items())]


def _of_behavior(behavior: TemplateBehavior) -> Mapping[str, str]:
    loop = behavior.in_tool_loop
    keeps = behavior.keeps_prompt_end
    return {
        "thinking of earlier turns": str(behavior.thoughts),
        "thinking in a tool loop": "no calls are written" if loop is None else str(loop),
        "the generation prompt": "opens thinking" if behavior.opens_thinking else "ends before the answer",
        "its end in the next turn": "refused" if keeps is None else "kept" if keeps else "rewritten",
        "system text": str(behavior.system),
        "tools": str(behavior.tools),
        "dates": str(behavior.dates),
    }


def idle_chats(tokens: int, footprint: Footprint, budget: int) -> Chats:
    """How many chats of this length fit, on a model that makes text."""
    # Under pressure an idle chat keeps the snapshots of two positions: its end, and what survives the next turn.
    nbytes = footprint.at(tokens) + footprint.snapshot
    return Chats(tokens=tokens, nbytes=nbytes, num=budget // nbytes)


def sample_chat(text_model: TextModel, layout: Layout, interval: int) -> Sample:
    """Render a chat of two turns and plan it. Raises BadRequest if the template rejects it."""
    renderer = Renderer(text_model)
    try:
        prompt = renderer.render(ChatRequest(messages=(_SYSTEM, *_TURNS))).prompt
    except BadRequest:
        prompt = renderer.render(ChatRequest(messages=_TURNS)).prompt
    plan = make_plan(
        prompt,
        layout=layout,
        resume_at=0,
        end=len(prompt) - 1,
        branches=(),
        interval=interval,
        end_within=LAST_SLICE,
    )
    return Sample(
        tokens=len(prompt),
        checkpoints=tuple(
            PlannedCheckpoint(
                position=checkpoint.position,
                kind=checkpoint.kind.value,
                ends_with=text_model.decode(prompt.tokens[: checkpoint.position].tolist())[-_SHOWN:],
            )
            for checkpoint in plan.checkpoints
        ),
    )


_SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "Which sea lies between Sweden and Finland?"},
    {"role": "assistant", "content": "The Gulf of Bothnia.", "reasoning_content": "It is the northern Baltic."},
    {"role": "user", "content": "How deep is it?"},
)
