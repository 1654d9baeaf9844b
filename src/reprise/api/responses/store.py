"""Responses that are kept for `previous_response_id` and `GET /v1/responses/{id}`: in memory, bounded."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprise.api.responses.items import item_nbytes
from reprise.core.errors import NotFound

MAX_NBYTES = 64 * 1024 * 1024
_REFERENCE_NBYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A response and the items that led to it: those of earlier responses, and its own `num_input` at the end."""

    body: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    num_input: int
    namespace: str
    own_nbytes: int
    """About how much memory it takes besides the items of its chat, which other responses may share."""
    first_id: str
    """The id of the first response of its chain."""

    @property
    def chat(self) -> tuple[dict[str, Any], ...]:
        """The items that a response after this one continues."""
        return (*self.items, *self.body["output"])


def stored(
    body: dict[str, Any], previous: Stored | None, input_items: Sequence[dict[str, Any]], *, namespace: str
) -> Stored:
    """A response with what led to it. Its items are those of the previous response, not copies."""
    items = (*(() if previous is None else previous.chat), *input_items)
    return Stored(
        body=body,
        items=items,
        num_input=len(input_items),
        namespace=namespace,
        own_nbytes=item_nbytes({**body, "output": []}) + _REFERENCE_NBYTES * len(items),
        first_id=body["id"] if previous is None else previous.first_id,
    )


@dataclass(slots=True, kw_only=True)
class SharedItem:
    """An item of `num_holders` responses that are kept."""

    nbytes: int
    num_holders: int = 0


class ResponseStore:
    """At most `max_nbytes` bytes of responses; the oldest go first. A caller sees those of its own namespace only.

    An item counts once, however many responses of a chat hold it, and until the last of them is dropped.
    """

    def __init__(self, *, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._by_id: OrderedDict[str, Stored] = OrderedDict()
        self._item_places: dict[str, str] = {}
        """Which response an output item belongs to, by its id."""
        self._shared: dict[int, SharedItem] = {}
        """By the identity of the item, which is alive as long as it is held."""
        self._nbytes = 0

    def add(self, entry: Stored) -> None:
        """Keep a response, unless it is larger than all of the store. O(length of its chat)."""
        known = self._shared
        held = {id(item): known.get(id(item)) or SharedItem(nbytes=item_nbytes(item)) for item in entry.chat}
        if entry.own_nbytes + sum(item.nbytes for item in held.values()) > self._max_nbytes:
            return
        self._by_id[entry.body["id"]] = entry
        self._item_places.update({item["id"]: entry.body["id"] for item in entry.body["output"]})
        self._nbytes += entry.own_nbytes
        for key, item in held.items():
            self._nbytes += item.nbytes if item.num_holders == 0 else 0
            item.num_holders += 1
            self._shared[key] = item
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
        self._nbytes -= entry.own_nbytes
        for key in {id(item) for item in entry.chat}:
            item = self._shared[key]
            item.num_holders -= 1
            if item.num_holders == 0:
                del self._shared[key]
                self._nbytes -= item.nbytes
        for item in entry.body["output"]:
            del self._item_places[item["id"]]

    def check(self) -> None:
        """Recount everything; raises AssertionError on any difference."""
        held = [{id(item): item_nbytes(item) for item in entry.chat} for entry in self._by_id.values()]
        items = {key: nbytes for each in held for key, nbytes in each.items()}
        assert {key: item.nbytes for key, item in self._shared.items()} == items
        assert all(item.num_holders == sum(key in each for each in held) for key, item in self._shared.items())
        assert self._nbytes == sum(entry.own_nbytes for entry in self._by_id.values()) + sum(items.values())
        assert self._nbytes <= self._max_nbytes
        places = {item["id"]: key for key, entry in self._by_id.items() for item in entry.body["output"]}
        assert self._item_places == places
