"""Checks that a draft model has the same vocabulary as the model it drafts for: tokens are not translated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from reprise.chat.text_model import TextModel
from reprise.core.errors import LoadFailed
from reprise.engine.models.load import LoadedModel


def check_draft_model(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise LoadFailed if `draft` cannot draft for `target`. O(vocabulary)."""
    if not draft.blueprint.can_undo:
        raise LoadFailed(
            f"{draft.name} cannot be a draft model: a layer of its type ({draft.architecture}) cannot undo tokens that "
            "turned out to be wrong. Choose another --draft-model."
        )
    drafts, wanted = vocabulary(draft.text), vocabulary(target.text)
    if drafts == wanted:
        return
    differing = min(i for i in drafts.keys() | wanted.keys() if drafts.get(i) != wanted.get(i))
    raise LoadFailed(
        f"{draft.name} cannot draft for {target.name}: their vocabularies differ. Token {differing} is "
        f"{_shown(drafts.get(differing))} in the draft model and {_shown(wanted.get(differing))} in the model. "
        "Choose a --draft-model with the same tokenizer."
    )


def vocabulary(text: TextModel) -> Mapping[int, str]:
    """The tokens by id, as the tokenizer spells them."""
    if text.tokenizer_json is None:
        # Without a tokenizer file, tokens are identified by what they decode to.
        decoded = {token: text.decode([token]) for token in range(text.vocab_size)}
        # Padding tokens decode to nothing.
        return {token: content for token, content in decoded.items() if content != ""}
    description = cast(dict[str, Any], json.loads(text.tokenizer_json()))
    listed = description.get("model", {}).get("vocab", {})
    if isinstance(listed, dict):
        found = {int(index): token for token, index in cast(dict[str, int], listed).items()}
    else:
        # Unigram models have pairs of a token and its score, in the order of their ids.
        found = {index: str(pair[0]) for index, pair in enumerate(cast(list[list[Any]], listed))}
    found |= {int(added["id"]): str(added["content"]) for added in description.get("added_tokens", [])}
    return found


def _shown(token: str | None) -> str:
    return "unused" if token is None else repr(token)
