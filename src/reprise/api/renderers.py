"""One renderer for each prefix cache namespace: what it remembers of one key's chats is not for another's."""

from threading import Lock

from reprise.chat.render import Renderer, RenderSettings
from reprise.chat.text_model import TextModel
from reprise.core.settings import Settings


class Renderers:
    """Renderers by namespace, made when they are first needed. Safe to use from several threads.

    There are no more of them than API keys, which bounds their memory. `shared` is that of the namespace "".
    """

    def __init__(self, text_model: TextModel, settings: Settings, *, shared: Renderer) -> None:
        self._text_model = text_model
        self._settings = RenderSettings(
            has_canonical_tokens=settings.canonical_tokens,
            freezes_date=settings.freeze_template_date,
            restores_reasoning=settings.restore_reasoning,
        )
        self._by_namespace = {"": shared}
        self._lock = Lock()

    def of(self, namespace: str) -> Renderer:
        """The renderer of this namespace. The first call tries out the tokenizer, which takes some milliseconds."""
        with self._lock:
            renderer = self._by_namespace.get(namespace)
            if renderer is None:
                renderer = self._by_namespace[namespace] = Renderer(self._text_model, self._settings)
            return renderer
