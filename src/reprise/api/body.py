"""Request bodies: the base of their models, and what is wrong with JSON that is valid and still of no use."""

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from reprise.core.errors import BadRequest

log = logging.getLogger(__name__)


class Body(BaseModel):
    """A JSON object. Types are exact; fields that are not named here are kept aside, see `unknown_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def unknown_fields(body: Body, *, ignored: frozenset[str], refused: Mapping[str, str]) -> tuple[str, ...]:
    """The fields of a body that have no effect, as notes for the record.

    `ignored` are documented to be without effect; any other unknown field is noted by name, so that a misspelt one
    can be found. `refused` would change the answer in a way that is not offered: a sentence for each. Null is absence.
    """
    notes: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if value is None:
            continue
        if name in refused:
            raise BadRequest(f"`{name}` is not supported. {refused[name]}", param=name)
        if name in ignored:
            log.debug("field %s has no effect here", name)
        else:
            notes.append(f"unknown field ignored: {name[:64]}")
    return tuple(notes)


def check_json(value: object, *, max_depth: int) -> None:
    """Raise BadRequest for JSON nested deeper than `max_depth`, and for text and numbers that are none. O(size).

    Text has to be Unicode, and numbers finite: what a client sent may be sent back.
    """
    level: list[object] = [value]
    for _ in range(max_depth + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                fields = cast(dict[str, object], item)
                below.extend(fields.keys())
                below.extend(fields.values())
            elif isinstance(item, list):
                below.extend(cast(list[object], item))
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
            elif isinstance(item, float) and not isfinite(item):
                raise BadRequest(
                    "The body holds NaN, Infinity or a number beyond 1.8e308; send numbers as JSON has them."
                )
        if not below:
            return
        level = below
    raise BadRequest(f"The body is nested more than {max_depth} levels deep. Flatten it.")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("A text holds half a character (a lone surrogate); send whole Unicode characters.") from error


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without fields that are null."""
    return {key: item for key, item in value.items() if item is not None}
