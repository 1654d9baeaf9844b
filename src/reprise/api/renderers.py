"""One renderer for each prefix cache namespace: what it remembers of one key's chats is not for another's."""

from collections.abc import Callable, Iterable
from threading import Lock

from reprise.chat.render import Renderer
from reprise.chat.text_model import TextModel
from reprise.core.backend import StoredRun


class Renderers:
    """Renderers by namespace, made when they are first needed. Safe to use from several threads.

    There are no more of them than API keys, which bounds their memory. `shared` is that of the namespace "", and says
    how all of them render.
    """

    def __init__(
        self,
        text_model: TextModel,
        *,
        shared: Renderer,
        stored_runs: Callable[[str], Iterable[StoredRun]],
    ) -> None:
        """`stored_runs`: what an earlier server has left of a namespace on disk."""
        shared.recall(stored_runs(""))
        self._text_model = text_model
        self._stored_runs = stored_runs
        self._settings = shared.settings
        self._by_namespace = {"": shared}
        self._lock = Lock()

    def of(self, namespace: str) -> Renderer:
        """The renderer of this namespace.

        The first call tries out the tokenizer, which takes some milliseconds, and reads what is stored.
        """
        with self._lock:
            known = self._by_namespace.get(namespace)
        if known is not None:
            return known
        made = Renderer(self._text_model, self._settings)
        made.recall(self._stored_runs(namespace))
        with self._lock:
            return self._by_namespace.setdefault(namespace, made)
