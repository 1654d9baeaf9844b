"""Request bodies: the base of their models, and errors in JSON that is valid but not usable."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from math import isfinite
from typing import Annotated, Any, ClassVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from reprise.core.errors import BadRequest, InvalidValue


def _stop_at_first_error(schema: object) -> None:
    """Have every list in a schema end its validation at its first wrong item: a million of them have a million errors,
    each of which costs more than the item, and one is reported."""
    if isinstance(schema, dict):
        fields = cast(dict[str, object], schema)
        if fields.get("type") == "list":
            fields["fail_fast"] = True
        for inner in fields.values():
            _stop_at_first_error(inner)
    elif isinstance(schema, list | tuple):
        for inner in cast(Sequence[object], schema):
            _stop_at_first_error(inner)


def _not_zero(bound: int) -> int:
    if bound == 0:
        raise ValueError("must be at least 1, or -1 for the rest of the context")
    return bound


class Needs(Enum):
    """What of a model has to be loaded before a request is answered, where models are loaded when asked for."""

    WEIGHTS = auto()
    TOKENIZER = auto()
    """Which stays when the weights are unloaded."""
    NOTHING = auto()
    """It only looks: a model that was never loaded is not loaded for it."""
    NO_MODEL = auto()
    """The name that it has may be of none that is served."""


class Body(BaseModel):
    """A JSON object. Types are exact; fields that are not named here are kept aside, see `unknown_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    needs: ClassVar[Needs] = Needs.WEIGHTS

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        is_known = isinstance(cls.__dict__.get("__pydantic_core_schema__"), dict)
        schema = handler(source)
        if not is_known:
            # Else it is the one that was walked when the class was made.
            _stop_at_first_error(schema)
        return schema


AnswerBound = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""Tokens of an answer; -1: as many as there is room for, the default."""


def answer_bound(bound: int | None) -> int | None:
    """The bound that a request sets itself; None: it sets none."""
    return None if bound == -1 else bound


def unknown_fields(body: Body, *, ignored: frozenset[str], refused: Mapping[str, str]) -> tuple[str, ...]:
    """The fields of a body that have no effect, as notes for the record.

    `ignored` are documented to be without effect; any other unknown field is noted by name, so that a misspelt one
    can be found. `refused` would change the answer in a way that is not offered: a sentence for each. Null is absence,
    as are an empty list and "none".
    """
    notes: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if value is None or value in ([], "none"):
            continue
        if name in refused:
            raise BadRequest(f"`{name}` is not supported. {refused[name]}", param=name)
        if name in ignored:
            notes.append(f"field without effect: {name}")
        else:
            notes.append(f"unknown field ignored: {name[:64]}")
    return tuple(notes)


def check_numbers(value: object) -> None:
    """Raise BadRequest for numbers that are not finite: what a client sent may be sent back. O(size)."""
    level: list[object] = [value]
    while level:
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast(dict[str, object], item).values())
            elif isinstance(item, list):
                below.extend(cast(list[object], item))
            elif isinstance(item, float) and not isfinite(item):
                raise BadRequest("The body contains NaN, Infinity or a number beyond 1.8e308. Send valid JSON numbers.")
        level = below


def invalid_body(body: object, errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """What pydantic's errors about a body say, in one sentence that names the field."""
    # A value that fits no branch of a union gives one error for each; the deepest tells most.
    first = max(errors, key=lambda e: len(_path(body, e)))
    path = _path(body, first)
    sentence = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if not path:
        if not isinstance(body, dict):
            return BadRequest("The body must be a JSON object.")
        return BadRequest(f"Invalid body: {sentence}.")
    name = field_name(path)
    return InvalidValue(f"`{name}`: {sentence}.", param=name)


def _path(body: Any, error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """The part of a validation error's location that names places in the body, without names of union branches."""
    path: list[str | int] = []
    here = body
    where, *rest = cast(Sequence[str | int], error["loc"])
    if where != "body":
        return tuple(rest)
    is_missing = error["type"] == "missing"
    for at, step in enumerate(rest):
        if isinstance(here, dict) and step in here:
            here = cast(dict[Any, Any], here)[step]
            path.append(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(cast(list[Any], here)):
            here = cast(list[Any], here)[step]
            path.append(step)
        elif is_missing and at == len(rest) - 1:
            path.append(step)
    return tuple(path)


def field_name(path: Sequence[str | int]) -> str:
    """A place in a body as people write it: ``messages[0].content``."""
    name = ""
    for step in path:
        if isinstance(step, int):
            name += f"[{step}]"
        else:
            name += f".{step}" if name != "" else step
    return name


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without fields that are null."""
    return {key: item for key, item in value.items() if item is not None}
