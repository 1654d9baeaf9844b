"""Which sampling parameters a request ran with, and who chose each: for its record."""

from dataclasses import dataclass

from reprise.api.exchange import ServiceRequest
from reprise.core.defaults import REPORTED, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """One parameter."""

    value: float | int
    origin: Origin


def used_of(request: ServiceRequest, *, max_tokens: int, has_flag: bool) -> dict[str, Used]:
    """The parameters of a request by name. `max_tokens` is what it may write; `has_flag`: the server has a bound."""
    names = dict.fromkeys((*REPORTED, *request.origins))
    used = {
        name: Used(value=getattr(request.sampling, name), origin=request.origins.get(name, Origin.DEFAULT))
        for name in names
    }
    unsaid = Origin.FLAG if has_flag else Origin.DEFAULT
    origin = unsaid if request.max_tokens is None else Origin.REQUEST
    return used | {"max_tokens": Used(value=max_tokens, origin=origin)}
