"""A namespace's renderer renders like the shared one, and remembers its own namespace only."""

from collections.abc import Sequence

from reprise.chat.rendering.render import Renderer, Renderers, RenderSettings
from reprise.chat.request import ChatRequest
from reprise.core.backend import StoredRun
from reprise.core.tokens import as_tokens
from tests.chat.text_models import text_model

CHAT = ChatRequest(messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}))


class StoredRuns:
    """What an earlier server has left."""

    def __init__(self, **runs: Sequence[StoredRun]) -> None:
        self.runs = runs
        self.notes: dict[str, str] = {}

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        return self.runs.get(namespace, ())

    def read_note(self, namespace: str) -> str | None:
        return self.notes.get(namespace)

    def keep_note(self, namespace: str, text: str) -> None:
        self.notes[namespace] = text


def test_every_key_is_served_with_the_settings_of_the_server() -> None:
    settings = RenderSettings(normalizes=False, sorts_tools=True, freezes_date=True)
    renderers = Renderers(text_model(), shared=Renderer(text_model(), settings), stored=StoredRuns())
    assert renderers.of("one").settings == settings
    assert renderers.of("one") is renderers.of("one") is not renderers.of("")


def test_what_is_on_disk_is_known_to_its_own_namespace() -> None:
    model = text_model()
    canonical = Renderer(model).render(CHAT).prompt.tokens.tolist()
    answer = model.encode("Hello there")
    at = next(i for i in range(len(canonical)) if canonical[i : i + len(answer)] == answer)
    odd = [*canonical[:at], *(token for letter in "Hello there" for token in model.encode(letter))]
    odd += canonical[at + len(answer) :]
    assert odd != canonical

    runs = (
        StoredRun(name="a", parent=None, tokens=as_tokens(odd[:7])),
        StoredRun(name="b", parent="a", tokens=as_tokens(odd[7:])),
    )
    renderers = Renderers(model, shared=Renderer(model), stored=StoredRuns(one=runs))
    assert renderers.of("one").render(CHAT).prompt.tokens.tolist() == odd
    assert renderers.of("two").render(CHAT).prompt.tokens.tolist() == canonical
    assert renderers.of("").render(CHAT).prompt.tokens.tolist() == canonical
