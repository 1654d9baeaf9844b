"""Which of several models steps next, and which are loaded and unloaded: a pure function of their states.

Models take turns, one step each, so a stream waits for at most one step of every other model. A model is loaded when a
request waits for it, the longest waiting first. To make room, models that are not in use are unloaded, least recently
used first. One that is always in use is unloaded once another has waited for `turn_s`: it admits no further requests,
and is unloaded when its last answer has ended. So no request waits forever, and two models that do not fit together are
not swapped for every request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits for all models together."""

    most_nbytes: int | None = None
    """For the weights of all loaded models; None: unlimited. Layer states get the rest of the memory."""
    turn_s: float = 10.0
    """How long a model in use stays loaded while another one waits for its memory."""
    arrival_s: float = 2.0
    """How long a newly loaded model is kept for the request that it was loaded for."""

    def __post_init__(self) -> None:
        assert self.turn_s >= 0 and self.arrival_s >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The state of one model. Times are in seconds of one clock."""

    name: str
    nbytes: int
    """Of its weights."""
    base: int | None = None
    """Models with the same number share `shared_nbytes` of their weights: a model and its adapters."""
    shared_nbytes: int = 0
    is_loaded: bool = False
    is_loading: bool = False
    is_pinned: bool = False
    """Never unloaded."""
    waits_since_s: float | None = None
    """Since when a request waits for it to be loaded, or to be admitted; None: none does."""
    num_running: int = 0
    """Requests that have live state."""
    num_asked: int = 0
    """Requests since it was loaded."""
    loaded_s: float = 0.0
    """When it was last loaded."""
    asked_s: float = 0.0
    """When a request for it last arrived or ended."""
    keep_alive_s: float | None = None
    """Unloaded after this long without a request; None: only when its memory is needed."""
    is_dismissed: bool = False
    """A client asked to unload it."""
    has_requests: bool = False
    """Whether a step would serve a request."""
    has_idle_work: bool = False
    """Whether a step would do background work."""
    last_step: int = 0
    """The number of its last step."""

    def __post_init__(self) -> None:
        assert not (self.is_loaded and self.is_loading), self
        assert 0 <= self.shared_nbytes <= self.nbytes, self
        assert self.is_loaded or not (self.num_running or self.has_idle_work), self

    @property
    def is_used(self) -> bool:
        return self.num_running > 0 or self.waits_since_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """What to do, in this order: unload, load, and run a step of a model, which admits no request if it is `closed`."""

    unload: tuple[str, ...] = ()
    load: str | None = None
    closed: frozenset[str] = frozenset()
    run: str | None = None
    wakes_in_s: float | None = None
    """Seconds after which the decision changes without an event; None: never."""


def decide_models(models: Sequence[ModelState], limits: ModelLimits, *, now_s: float) -> ModelStep:
    """The next step. O(models log models)."""
    due = tuple(model.name for model in models if _is_due(model, now_s))
    closed = frozenset(model.name for model in models if model.is_loaded and model.is_dismissed)
    # One at a time: a model being loaded takes the memory that was freed for it.
    wanted = None if any(model.is_loading for model in models) else _longest_waiting(models)
    others = [model for model in models if model.name not in due]
    swap = ModelStep() if wanted is None else _swap(wanted, others, limits, now_s)
    unload, closed = due + swap.unload, closed | swap.closed
    stays = [model for model in models if model.is_loaded and model.name not in unload]
    return ModelStep(
        unload=unload,
        load=swap.load,
        closed=closed - set(unload),
        run=_next(stays, closed),
        wakes_in_s=_wakes_in(stays, wanted if swap.load is None else None, limits, now_s),
    )


def room_for(name: str, models: Sequence[ModelState], limits: ModelLimits) -> int | None:
    """The most bytes that the weights of a model may have besides the pinned models; None: unlimited."""
    if limits.most_nbytes is None:
        return None
    pinned = [model for model in models if model.is_pinned and model.is_loaded and model.name != name]
    return limits.most_nbytes - sum(weights_nbytes(pinned).values())


def weights_nbytes(models: Iterable[ModelState]) -> dict[str, int]:
    """Bytes of these models' weights by name; shared weights count for the first model that has them."""
    bases: set[int] = set()
    taken: dict[str, int] = {}
    for model in models:
        taken[model.name] = model.nbytes - (model.shared_nbytes if model.base in bases else 0)
        if model.base is not None:
            bases.add(model.base)
    return taken


def _is_due(model: ModelState, now_s: float) -> bool:
    """Whether to unload the model even if no other one needs its memory."""
    if not model.is_loaded or model.num_running > 0:
        return False
    if model.is_dismissed:
        return True
    return not model.is_pinned and not model.is_used and _is_over(model, now_s)


def _is_over(model: ModelState, now_s: float) -> bool:
    """Whether its `keep_alive_s` is over."""
    return model.keep_alive_s is not None and now_s >= max(model.asked_s, model.loaded_s) + model.keep_alive_s


def _longest_waiting(models: Sequence[ModelState]) -> ModelState | None:
    waiting = [(m.waits_since_s, m.name, m) for m in models if m.waits_since_s is not None and not m.is_loaded]
    return min(waiting, key=lambda each: each[:2])[2] if waiting else None


def _swap(wanted: ModelState, others: Sequence[ModelState], limits: ModelLimits, now_s: float) -> ModelStep:
    """The step that loads `wanted` in place of others, or closes those until that is possible."""
    most_nbytes = limits.most_nbytes
    if most_nbytes is None:
        return ModelStep(load=wanted.name)
    loaded = [model for model in others if model.is_loaded]

    def fits(leaving: Sequence[ModelState]) -> bool:
        stays = [model for model in loaded if model not in leaving]
        return sum(weights_nbytes([*stays, wanted]).values()) <= most_nbytes

    movable = [model for model in loaded if not model.is_pinned]
    # Unused ones first, then those past their keep-alive time; least recently used first.
    order = sorted(movable, key=lambda m: (m.is_used, not _is_over(m, now_s), m.asked_s, m.name))
    leaving: list[ModelState] = []
    for model in order:
        if not fits(leaving) and _may_go(model, wanted, limits, now_s):
            leaving.append(model)
    if not fits(leaving):
        # Unload nothing if the model would still not fit.
        return ModelStep()
    for model in tuple(leaving):
        # Unloading weights that another model shares frees nothing.
        if fits([other for other in leaving if other is not model]):
            leaving.remove(model)
    closed = frozenset(model.name for model in leaving if model.num_running > 0)
    if closed:
        # Unused models stay until the last answer has ended: a request may come for them meanwhile.
        return ModelStep(closed=closed)
    return ModelStep(unload=tuple(model.name for model in leaving), load=wanted.name)


def _may_go(model: ModelState, wanted: ModelState, limits: ModelLimits, now_s: float) -> bool:
    if not model.is_used and (model.num_asked > 0 or now_s >= model.loaded_s + limits.arrival_s):
        return True
    assert wanted.waits_since_s is not None
    return now_s >= max(wanted.waits_since_s, model.loaded_s) + limits.turn_s


def _next(models: Sequence[ModelState], closed: frozenset[str]) -> str | None:
    """The model to step: those with requests before those with idle work, then least recently stepped."""
    busy = [m for m in models if m.has_requests and (m.num_running > 0 or m.name not in closed)]
    turn = min(busy or [m for m in models if m.has_idle_work], key=lambda m: (m.last_step, m.name), default=None)
    return None if turn is None else turn.name


def _wakes_in(
    loaded: Sequence[ModelState], wanted: ModelState | None, limits: ModelLimits, now_s: float
) -> float | None:
    """Seconds until the next keep-alive, arrival or turn time ends."""
    times: list[float] = []
    for model in loaded:
        if model.keep_alive_s is not None and not model.is_pinned and not model.is_used:
            times.append(max(model.asked_s, model.loaded_s) + model.keep_alive_s)
        if wanted is not None and wanted.waits_since_s is not None:
            times.append(model.loaded_s + limits.arrival_s)
            times.append(max(wanted.waits_since_s, model.loaded_s) + limits.turn_s)
    later = [at_s - now_s for at_s in times if at_s > now_s]
    return min(later, default=None)
