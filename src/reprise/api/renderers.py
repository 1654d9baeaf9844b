"""One renderer for each prefix cache namespace: what it remembers of one key's chats is not for another's."""

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from reprise.chat.render import Renderer
from reprise.chat.text_model import TextModel
from reprise.core.backend import StoredRun


class StoredChats(Protocol):
    """What servers leave to the next one, as in `Backend`."""

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]: ...
    def read_note(self, namespace: str) -> str | None: ...
    def keep_note(self, namespace: str, text: str) -> None: ...


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
        stored: StoredChats,
    ) -> None:
        self._text_model = text_model
        self._stored = stored
        self._settings = shared.settings
        self._by_namespace = {"": shared}
        self._lock = Lock()
        self._recall(shared, "")

    def of(self, namespace: str) -> Renderer:
        """The renderer of this namespace.

        The first call tries out the tokenizer, which takes some milliseconds, and reads what is stored.
        """
        with self._lock:
            known = self._by_namespace.get(namespace)
        if known is not None:
            return known
        made = Renderer(self._text_model, self._settings)
        self._recall(made, namespace)
        with self._lock:
            return self._by_namespace.setdefault(namespace, made)

    def save(self, namespace: str) -> None:
        """Leave to the next server what was learnt of this namespace's chats since the last time. Waits for a file."""
        compactions = self.of(namespace).compactions
        if compactions.is_saved:
            return
        # What other servers have left there since stays.
        note = self._stored.read_note(namespace)
        if note is not None:
            compactions.restore(note)
        text = compactions.save()
        if text is not None:
            self._stored.keep_note(namespace, text)

    def _recall(self, renderer: Renderer, namespace: str) -> None:
        renderer.recall(self._stored.stored_runs(namespace))
        note = self._stored.read_note(namespace)
        if note is not None:
            renderer.compactions.restore(note)
