"""Planted bugs in tokens, spans, kinds and plans."""

from tools.mutants.mutant import Mutant

_CORE = ("tests/core/test_kinds.py", "tests/core/test_spans.py", "tests/core/test_tokens.py")
_COLLECTOR = ("tests/engine/test_collector.py",)
_PLAN = ("tests/plan/test_checkpoints.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


CORE_MUTANTS = (
    _mutant(
        "collect_all",
        "every unload searches the frozen heap",
        "models and all(model() is None for model in models)",
        "False",
        _COLLECTOR,
    ),
    _mutant(
        "common_prefix",
        "the common prefix is one too long",
        "return start + int(differs.argmax())",
        "return start + int(differs.argmax()) + 1",
        _CORE,
    ),
    _mutant(
        "common_prefix",
        "the common prefix skips between its steps",
        "start, step = stop, step * 4",
        "start, step = stop + 1, step * 4",
        _CORE,
    ),
    _mutant(
        "as_tokens",
        "a run that the caller can still write to",
        "run = given.astype(np.int32)",
        "run = given.astype(np.int32, copy=False).view()",
        _CORE,
    ),
    _mutant(
        "own_tokens",
        "a copy of a run that is a view",
        "copy = run.copy()",
        "copy = run.view()",
        _CORE,
    ),
    _mutant(
        "Window.recent",
        "a window that takes its kept entries for recent ones",
        "return self.size - self.keep",
        "return self.size",
        _CORE,
    ),
    _mutant(
        "Window.needs",
        "a window that forgets what it keeps",
        "kept = (Span(0, self.keep),) if self.keep > 0 else ()",
        "kept = ()",
        _CORE,
    ),
    _mutant(
        "Chunk.needs",
        "a chunk that looks into the one before",
        "position // self.size",
        "max(0, position - 1) // self.size",
        _CORE,
    ),
    _mutant(
        "best_position",
        "only the limit itself is tried",
        "run.stop < limit",
        "run.stop < 0",
        _CORE,
    ),
    _mutant(
        "union",
        "a union that shrinks",
        "Span(merged[-1].start, max(merged[-1].stop, span.stop))",
        "Span(merged[-1].start, span.stop)",
        _CORE,
    ),
    _mutant(
        "subtract",
        "a difference that loses its end",
        "at < span.stop",
        "at < span.stop - 1",
        _CORE,
    ),
    _mutant(
        "make_plan",
        "no checkpoint where the prompt branches",
        "[*prompt.boundaries, *(Boundary(at, BoundaryKind.BRANCH) for at in branches)]",
        "[*prompt.boundaries]",
        _PLAN,
    ),
    _mutant(
        "make_plan",
        "a checkpoint at the resume position",
        "resume_at < b.position <= end",
        "resume_at <= b.position <= end",
        _PLAN,
    ),
    _mutant(
        "make_plan",
        "no checkpoint at the last boundary before the end",
        "resume_at < b.position <= end",
        "resume_at < b.position < end - 1",
        _PLAN,
    ),
    _mutant(
        "make_plan",
        "the least reason for a checkpoint is kept",
        "best.setdefault(boundary.position, boundary)",
        "best[boundary.position] = boundary",
        _PLAN,
    ),
    _mutant(
        "make_plan",
        "interval checkpoints counted from the resume position",
        "range(first * interval, high - interval // 2, interval)",
        "range(low + interval, high - interval // 2, interval)",
        _PLAN,
    ),
)
