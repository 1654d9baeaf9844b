"""Sampling parameters that a request does not set: from the command line, or from the model's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reprise.core.job import Sampling

Number = int | float


class Origin(StrEnum):
    """Where a parameter comes from."""

    REQUEST = "request"
    FLAG = "flag"
    """An option of the command line."""
    GENERATION_CONFIG = "generation_config"
    """The model's own `generation_config.json`."""
    DEFAULT = "default"


REPORTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that a model or the command line can set; the record always reports them."""

_REPETITION_CONTEXT = 8192
"""The context of a `repetition_penalty` in `generation_config.json`, which has no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults for requests, by the field names of `Sampling`; `by_flag` overrides `by_model`."""

    by_flag: Mapping[str, Number] = field(default_factory=dict[str, Number])
    by_model: Mapping[str, Number] = field(default_factory=dict[str, Number])

    def sampling(
        self, given: Mapping[str, Any], *, logit_bias: Mapping[int, float] | None = None, logprobs: int | None = None
    ) -> tuple[Sampling, dict[str, Origin]]:
        """The sampling of a request with the parameters `given` (None: not set), and their origins by name."""
        said = {name: value for name, value in given.items() if value is not None}
        values: dict[str, Any] = {**self.by_model, **self.by_flag, **said}
        origins = {
            name: Origin.REQUEST
            if name in said
            else Origin.FLAG
            if name in self.by_flag
            else Origin.GENERATION_CONFIG
            if name in self.by_model
            else Origin.DEFAULT
            for name in dict.fromkeys((*REPORTED, *values))
        }
        return Sampling(**values, logit_bias=dict(logit_bias or {}), logprobs=logprobs), origins


def read_generation_config(config: Mapping[str, Any], *, vocab_size: int) -> dict[str, Number]:
    """The sampling of a `generation_config.json`, by the field names of `Sampling`, without values out of range.

    `do_sample: false` is greedy, as in transformers, which defines the format.
    """
    ranges: dict[str, tuple[float, float]] = {
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "top_k": (0, vocab_size),
        "min_p": (0, 1),
        "repetition_penalty": (1e-9, 100),
    }
    found: dict[str, Number] = {}
    for name, (low, high) in ranges.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else float(value)
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("repetition_penalty", 1) != 1:
        found["repetition_context_size"] = _REPETITION_CONTEXT
    return found
