"""The files of families: to compare a model's template with its family's, and for calls that a template never shows.

Each file is what `learnt_toml` says of the family's own template, and `--learnt FILE` takes it as it is. What a
template shows is never replaced by its family's file.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, cast

from reprise.chat.calls.call_learning import is_not_refuted
from reprise.chat.learnt import calls_in
from reprise.chat.text_model import TextModel

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "deepseek-r1": ("deepseek_v3",),
    "deepseek-v3.1": ("deepseek_v3",),
    "devstral": ("ministral3", "mistral", "mistral3"),
    "gemma-4": ("gemma4", "gemma4_text", "gemma4_unified"),
    "glm-4.6": ("glm4_moe", "glm4v_moe"),
    "glm-4.7": ("glm4_moe", "glm4_moe_lite"),
    "gpt-oss": ("gpt_oss",),
    "llama-3": ("llama", "mllama"),
    "minimax-m2": ("minimax", "minimax_m2"),
    "mistral-small-3.2": ("mistral", "mistral3"),
    "qwen3": ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    "qwen3-coder": ("qwen3_moe", "qwen3_next"),
    "qwen3.5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
}
"""Family → the `model_type` of its models. Some types have several families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A line or table that a model's template teaches otherwise than its family's; None: it has none."""

    key: str
    learnt: Any
    of_family: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """A family of a model's type whose template is most like the model's, and what is different."""

    family: str
    differences: tuple[Difference, ...]


def family_file(family: str) -> str:
    """The content of a family's file."""
    return (files("reprise.chat.families") / f"{family}.toml").read_text(encoding="utf-8")


def most_like(learnt: str, model_type: str) -> Likeness | None:
    """The family of this type whose file is most like what was learnt, in the same format; None: none has the type."""
    own = tomllib.loads(learnt)
    found = [
        Likeness(family=family, differences=tuple(_differences(own, _read(family)))) for family in _families(model_type)
    ]
    return min(found, key=lambda likeness: len(likeness.differences), default=None)


def with_calls_of_family(text_model: TextModel, model_type: str) -> TextModel:
    """The model with the format of its family's calls, where its template shows tools and no call.

    One family's alone: where several of this type have calls that this tokenizer has the first marker of, as a special
    token, nothing says which one it is.
    """
    if text_model.calls.format is not None or text_model.render is None or not text_model.calls.shows_tools:
        return text_model
    fitting = [family for family in _families(model_type) if _read(family)["calls"]["start"] in text_model.splitters]
    if len(fitting) != 1:
        return text_model
    (family,) = fitting
    calls = calls_in(_read(family)["calls"], shows_tools=True)
    if calls.format is None or not is_not_refuted(text_model, calls.format):
        return text_model
    return replace(text_model, calls=replace(calls, family=family))


def _families(model_type: str) -> list[str]:
    return [family for family, types in FAMILIES.items() if model_type in types]


def _read(family: str) -> dict[str, Any]:
    return tomllib.loads(family_file(family))


def _differences(own: Mapping[str, Any], of_family: Mapping[str, Any], place: str = "") -> Iterator[Difference]:
    # Arguments in another form have other lines.
    keys = ("form",) if own.get("form") != of_family.get("form") else (*own, *of_family)
    for key in dict.fromkeys(keys):
        one, other = own.get(key), of_family.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(cast("dict[str, Any]", one), cast("dict[str, Any]", other), f"{place}{key}.")
        elif one != other:
            yield Difference(key=place + key, learnt=one, of_family=other)
