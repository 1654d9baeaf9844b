"""Planted bugs in tokens, spans, kinds and plans."""

from tools.mutants.mutant import Mutant

_CORE = ("tests/core/test_kinds.py", "tests/core/test_spans.py", "tests/core/test_tokens.py")
_PLAN = ("tests/plan/test_checkpoints.py",)

CORE_MUTANTS = (
    Mutant(
        name="the common prefix is one too long",
        file="core/tokens.py",
        old="return start + int(differs.argmax())",
        new="return start + int(differs.argmax()) + 1",
        tests=_CORE,
    ),
    Mutant(
        name="the common prefix skips between its steps",
        file="core/tokens.py",
        old="start, step = stop, step * 4",
        new="start, step = stop + 1, step * 4",
        tests=_CORE,
    ),
    Mutant(
        name="a run that the caller can still write to",
        file="core/tokens.py",
        old="run = given.astype(np.int32)",
        new="run = given.astype(np.int32, copy=False).view()",
        tests=_CORE,
    ),
    Mutant(
        name="a copy of a run that is a view",
        file="core/tokens.py",
        old="copy = run.copy()",
        new="copy = run.view()",
        tests=_CORE,
    ),
    Mutant(
        name="a window one entry short",
        file="core/kinds.py",
        old="low = max(0, position - self.recent + 1)",
        new="low = max(0, position - self.recent + 2)",
        tests=_CORE,
    ),
    Mutant(
        name="a window that takes its kept entries for recent ones",
        file="core/kinds.py",
        old="return self.size - self.keep",
        new="return self.size",
        tests=_CORE,
    ),
    Mutant(
        name="a window that forgets what it keeps",
        file="core/kinds.py",
        old="kept = (Span(0, self.keep),) if self.keep > 0 else ()",
        new="kept = ()",
        tests=_CORE,
    ),
    Mutant(
        name="a chunk that looks into the one before",
        file="core/kinds.py",
        old="low = self.size * (position // self.size)\n        return (Span(low, position),)",
        new="low = self.size * (max(0, position - 1) // self.size)\n        return (Span(low, position),)",
        tests=_CORE,
    ),
    Mutant(
        name="a chunk's own start is no place to resume",
        file="core/kinds.py",
        old="candidates.add(kind.size * (limit // kind.size))",
        new="pass",
        tests=_CORE,
    ),
    Mutant(
        name="only the limit itself is tried",
        file="core/kinds.py",
        old="*(run.stop for run in runs if run.stop < limit)",
        new="*(run.stop for run in runs if run.stop < 0)",
        tests=_CORE,
    ),
    Mutant(
        name="spans that touch stay apart",
        file="core/spans.py",
        old="if merged and span.start <= merged[-1].stop:",
        new="if merged and span.start < merged[-1].stop:",
        tests=_CORE,
    ),
    Mutant(
        name="a union that shrinks",
        file="core/spans.py",
        old="Span(merged[-1].start, max(merged[-1].stop, span.stop))",
        new="Span(merged[-1].start, span.stop)",
        tests=_CORE,
    ),
    Mutant(
        name="a difference that loses its end",
        file="core/spans.py",
        old="if at < span.stop:\n            rest.append(Span(at, span.stop))",
        new="if at < span.stop - 1:\n            rest.append(Span(at, span.stop))",
        tests=_CORE,
    ),
    Mutant(
        name="no checkpoint where the prompt branches",
        file="plan/checkpoints.py",
        old="wanted.append(Boundary(branch_at, BoundaryKind.BRANCH))",
        new="pass",
        tests=_PLAN,
    ),
    Mutant(
        name="a checkpoint at the resume position",
        file="plan/checkpoints.py",
        old="if resume_at < b.position <= end]",
        new="if resume_at <= b.position <= end]",
        tests=_PLAN,
    ),
    Mutant(
        name="no checkpoint at the last boundary before the end",
        file="plan/checkpoints.py",
        old="if resume_at < b.position <= end]",
        new="if resume_at < b.position < end - 1]",
        tests=_PLAN,
    ),
    Mutant(
        name="the least reason for a checkpoint is kept",
        file="plan/checkpoints.py",
        old="best.setdefault(boundary.position, boundary)",
        new="best[boundary.position] = boundary",
        tests=_PLAN,
    ),
    Mutant(
        name="interval checkpoints counted from the resume position",
        file="plan/checkpoints.py",
        old="range(first * interval, high - interval // 2, interval)",
        new="range(low + interval, high - interval // 2, interval)",
        tests=_PLAN,
    ),
)
