"""Responses that are kept for `previous_response_id` and `GET /v1/responses/{id}`: in memory, bounded."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprise.api.responses.items import item_nbytes
from reprise.core.errors import NotFound

MAX_NBYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A response and the items that led to it: those of earlier responses, and `num_input` of its own at the end."""

    body: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    num_input: int
    namespace: str
    nbytes: int

    @property
    def chat(self) -> tuple[dict[str, Any], ...]:
        """What a response that follows this one goes on from."""
        return (*self.items, *self.body["output"])


def stored(
    body: dict[str, Any], previous: Stored | None, input_items: Sequence[dict[str, Any]], *, namespace: str
) -> Stored:
    """A response with what led to it. Items are shared with the previous response, and counted in each."""
    own = sum(item_nbytes(item) for item in input_items) + item_nbytes(body)
    return Stored(
        body=body,
        items=(*(() if previous is None else previous.chat), *input_items),
        num_input=len(input_items),
        namespace=namespace,
        nbytes=own + (0 if previous is None else previous.nbytes),
    )


class ResponseStore:
    """At most `max_nbytes` bytes of responses; the oldest go first. A caller sees those of its own namespace only."""

    def __init__(self, *, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._by_id: OrderedDict[str, Stored] = OrderedDict()
        self._item_places: dict[str, str] = {}
        """Which response an output item belongs to, by its id."""
        self._nbytes = 0

    def add(self, entry: Stored) -> None:
        """Keep a response, unless it is larger than all of the store."""
        if entry.nbytes > self._max_nbytes:
            return
        self._by_id[entry.body["id"]] = entry
        self._item_places.update({item["id"]: entry.body["id"] for item in entry.body["output"]})
        self._nbytes += entry.nbytes
        while self._nbytes > self._max_nbytes:
            _, oldest = self._by_id.popitem(last=False)
            self._forget(oldest)

    def item(self, item_id: str, *, namespace: str) -> dict[str, Any] | None:
        """An output item of a response that is kept; None if there is none."""
        entry = self._by_id.get(self._item_places.get(item_id, ""))
        if entry is None or entry.namespace != namespace:
            return None
        return next(item for item in entry.body["output"] if item["id"] == item_id)

    def get(self, response_id: str, *, namespace: str) -> Stored:
        """Raises NotFound."""
        entry = self._by_id.get(response_id)
        if entry is None or entry.namespace != namespace:
            raise NotFound(
                f"There is no response {response_id[:80]!r}. Responses are kept in memory, unless `store` is false, "
                "and the oldest are dropped: send the whole chat in `input`."
            )
        return entry

    def delete(self, response_id: str, *, namespace: str) -> None:
        """Raises NotFound."""
        entry = self.get(response_id, namespace=namespace)
        del self._by_id[response_id]
        self._forget(entry)

    def _forget(self, entry: Stored) -> None:
        self._nbytes -= entry.nbytes
        for item in entry.body["output"]:
            del self._item_places[item["id"]]

    def check(self) -> None:
        """Recount everything; raises AssertionError on any difference."""
        assert self._nbytes == sum(entry.nbytes for entry in self._by_id.values())
        assert self._nbytes <= self._max_nbytes
        places = {item["id"]: key for key, entry in self._by_id.items() for item in entry.body["output"]}
        assert self._item_places == places
