"""The grammar of a whole answer: a forced call, an output that was asked for, or either of both."""

from collections.abc import Mapping, Sequence
from typing import Any

from reprise.chat.grammar import Grammar, either
from reprise.chat.text_model import TextModel
from reprise.chat.tool_grammar import ToolChoice, call_grammar
from reprise.core.errors import BadRequest


def answer_grammar(
    text_model: TextModel,
    wanted: Grammar | None,
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    parallel: bool = True,
) -> Grammar | None:
    """What the answer has to be: `wanted` is the output that was asked for. None: anything.

    With tools that the model may call, the answer is the output or a call, from its first token on: words before a
    call could go on for ever, where the model has neither in mind. A call that is forced comes first: the output is
    for the answer to its result. Raises BadRequest for a choice that is none, and for calls whose format the model's
    grammar cannot have.
    """
    forced = call_grammar(text_model, tools=tools, tool_choice=tool_choice, parallel=parallel)
    if forced is not None:
        return forced
    if wanted is None or len(tools) == 0 or tool_choice == "none":
        return wanted
    try:
        call = call_grammar(text_model, tools=tools, tool_choice="required", parallel=parallel)
    except BadRequest as error:
        raise BadRequest(
            f"`{wanted.param}` with tools needs a grammar for this model's tool calls, but there is none ({error}) "
            "Set tool_choice to 'none', or leave out the tools.",
            param=wanted.param,
        ) from error
    assert call is not None, "'required' forces a call"
    return either(wanted, call)
