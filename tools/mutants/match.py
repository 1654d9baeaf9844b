"""Whether a piece of source reads as a pattern, but for names that were changed throughout.

`job.live_nbytes > room` reads as `request.nbytes > free`: the same operations, and each name of the one always stands
where the same name of the other does. Variables and functions are one set of names, attributes and keywords another.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Names:
    """Which name of the source stands for which of the pattern."""

    variables: dict[str, str] = field(default_factory=dict[str, str])
    attributes: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def num_changed(self) -> int:
        pairs = [*self.variables.items(), *self.attributes.items()]
        return sum(old != new for old, new in pairs)

    @property
    def is_alike(self) -> bool:
        """Whether at least half of the names are what they were."""
        return 2 * self.num_changed <= len(self.variables) + len(self.attributes)


def places(pattern: Sequence[ast.stmt] | ast.expr, inside: ast.AST) -> Iterator[tuple[list[ast.AST], Names]]:
    """Where the pattern stands in a function: one expression, or a run of statements."""
    for node in ast.walk(inside):
        if isinstance(pattern, ast.expr):
            if (names := _match(pattern, node)) is not None:
                yield [node], names
            continue
        for block in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for start in range(len(block) - len(pattern) + 1):
                run = block[start : start + len(pattern)]
                if (names := _match(list(pattern), run)) is not None:
                    yield run, names


def renamed(node: ast.AST, names: Names) -> ast.AST:
    """The node in the names of the source. Changes it."""
    for each in ast.walk(node):
        match each:
            case ast.Name():
                each.id = names.variables.get(each.id, each.id)
            case ast.Attribute():
                each.attr = names.attributes.get(each.attr, each.attr)
            case ast.keyword(arg=str()):
                each.arg = names.attributes.get(each.arg, each.arg)
            case _:
                pass
    return node


def _match(pattern: object, found: object) -> Names | None:
    names = Names()
    if not _agree(pattern, found, names):
        return None
    # Two names of the pattern are not one name of the source.
    for mapping in (names.variables, names.attributes):
        if len(set(mapping.values())) < len(mapping):
            return None
    return names if names.is_alike else None


def _agree(pattern: object, found: object, names: Names) -> bool:
    if isinstance(pattern, list):
        return (
            isinstance(found, list)
            and len(pattern) == len(found)
            and all(_agree(one, other, names) for one, other in zip(pattern, found, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(found) and pattern == found
    if type(pattern) is not type(found):
        return False
    match pattern, found:
        case ast.Name(), ast.Name():
            return names.variables.setdefault(pattern.id, found.id) == found.id
        case ast.Attribute(), ast.Attribute():
            same = names.attributes.setdefault(pattern.attr, found.attr) == found.attr
            return same and _agree(pattern.value, found.value, names)
        case ast.keyword(arg=str() as mine), ast.keyword(arg=str() as theirs):
            same = names.attributes.setdefault(mine, theirs) == theirs
            return same and _agree(pattern.value, found.value, names)
        case _:
            fields = [name for name in pattern._fields if name not in ("ctx", "type_comment")]
            return all(_agree(getattr(pattern, name), getattr(found, name), names) for name in fields)
