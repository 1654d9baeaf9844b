"""The sampling parameters that a request leaves open: from the command line, or as the model's makers meant them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reprise.core.job import Sampling

Number = int | float


class Origin(StrEnum):
    """Who chose a parameter."""

    REQUEST = "request"
    FLAG = "flag"
    """An option of the command line."""
    GENERATION_CONFIG = "generation_config"
    """The model's own `generation_config.json`."""
    DEFAULT = "default"


REPORTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that a model or the command line can choose, and that the record always names."""

_REPETITION_CONTEXT = 8192
"""What `repetition_penalty` of a `generation_config.json` is about: everything so far, within reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What requests get that do not say: `by_flag` comes before `by_model`, both by the names of `Sampling`."""

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
    """The sampling that a `generation_config.json` asks for, by the names of `Sampling`; what is out of range is not.

    `do_sample: false` is greedy, as in transformers, which made the format.
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
