"""Models of the zoo as an engine gets them from a directory."""

from collections.abc import Callable
from dataclasses import replace

from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.states.blueprint import blueprint_of
from tests.models.tiny import tiny_model
from tests.zoo.caches import build_any


def of_zoo(name: str) -> Callable[[], LoadedModel]:
    """What loads an architecture or a variant, with the tokenizer of a tiny Llama."""

    def load() -> LoadedModel:
        model = build_any(name)
        loaded = load_model(str(tiny_model("llama")))
        architecture = name.partition(",")[0]
        return replace(loaded, model=model, blueprint=blueprint_of(model), architecture=architecture, vocab_size=256)

    return load
