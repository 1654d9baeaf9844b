"""Fields that other local model servers add to the APIs, accepted by every API: grammars, stops, thinking."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast
from uuid import uuid4

from pydantic import Field, PrivateAttr

from reprise.api.http.body import Body, unknown_fields
from reprise.api.service.served import Asked
from reprise.chat.grammars.grammar import Grammar, choice, context_free, json_object, json_schema, regex
from reprise.core.errors import BadRequest


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ThinkingSwitch(Body):
    """`thinking` as several hosts of open models accept it in chat completions."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class AnswerControls(Body):
    """Fields of vLLM, SGLang and llama.cpp that say what an answer looks like."""

    id_prefix: ClassVar[str] = ""
    _request_id: str | None = PrivateAttr(default=None)

    model: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    grammar: str | None = None
    """llama.cpp's: GBNF. Lark is taken too."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's."""
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    enable_thinking: bool | None = None

    @property
    def request_id(self) -> str:
        """The id of the request and its answer. The same whenever it is asked for: a stream's headers may be sent
        before its model is there."""
        if self._request_id is None:
            self._request_id = f"{self.id_prefix}{uuid4().hex}"
        return self._request_id


def checked_notes(
    body: AnswerControls, asked: Asked, *, ignored: frozenset[str], refused: Mapping[str, str]
) -> tuple[str, ...]:
    """Notes on the fields that have no effect, see `unknown_fields`.

    Raises UnknownModel, and BadRequest for a field that would change the answer in a way that is not offered.
    """
    asked.served.check_name(body.model)
    notes = unknown_fields(body, ignored=ignored, refused=refused)
    for name, (harmless, advice) in FOREIGN.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise BadRequest(f"`{name}` is not supported. {advice}", param=name)
    return notes


def grammar_of(controls: AnswerControls, own: Iterable[Grammar | None] = ()) -> Grammar | None:
    """The one grammar that a body asks for; `own`: those of the API's own fields. Raises BadRequest."""
    grammars = [grammar for grammar in own if grammar is not None]
    if controls.structured_outputs is not None:
        grammars += _structured(controls.structured_outputs)
    if controls.guided_json is not None:
        grammars.append(_schema(controls.guided_json, param="guided_json"))
    if controls.guided_regex is not None:
        grammars.append(regex(controls.guided_regex))
    if controls.guided_grammar is not None:
        grammars.append(context_free(controls.guided_grammar))
    if controls.guided_choice is not None:
        grammars.append(choice(controls.guided_choice))
    if controls.grammar is not None and controls.grammar.strip() != "":
        grammars.append(context_free(controls.grammar, param="grammar"))
    if controls.json_schema is not None:
        grammars.append(json_schema(controls.json_schema, param="json_schema"))
    if len(grammars) > 1:
        fields = " and ".join(f"`{grammar.param}`" for grammar in grammars)
        raise BadRequest(f"{fields} cannot be used together.", param=grammars[1].param)
    return grammars[0] if grammars else None


def _structured(wanted: StructuredOutputs) -> list[Grammar]:
    harmless = ("disable_fallback", "backend", "_backend")
    for name, value in (wanted.model_extra or {}).items():
        if value not in (None, False) and name not in harmless:
            raise BadRequest(
                f"`structured_outputs.{name[:40]}` is not supported. Use json, json_object, regex, choice or grammar.",
                param="structured_outputs",
            )
    param = "structured_outputs"
    grammars: list[Grammar] = []
    if wanted.json_ is not None:
        grammars.append(_schema(wanted.json_, param=param))
    if wanted.json_object is True:
        grammars.append(json_object())
    if wanted.regex is not None:
        grammars.append(regex(wanted.regex, param=param))
    if wanted.choice is not None:
        grammars.append(choice(wanted.choice, param=param))
    if wanted.grammar is not None:
        grammars.append(context_free(wanted.grammar, param=param))
    if not grammars:
        raise BadRequest("`structured_outputs` needs json, json_object, regex, choice or grammar.", param=param)
    return grammars


def _schema(schema: Mapping[str, Any] | str, *, param: str) -> Grammar:
    if not isinstance(schema, str):
        return json_schema(schema, param=param)
    try:
        read: object = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"`{param}` is not valid JSON: {error}.", param=param) from error
    if not isinstance(read, dict):
        raise BadRequest(f"`{param}` must be a JSON schema: an object.", param=param)
    return json_schema(cast(dict[str, Any], read), param=param)


def stop_tokens_of(controls: AnswerControls, asked: Asked) -> frozenset[int]:
    """The tokens that end the answer beside the model's own. Raises BadRequest for one that the model does not have."""
    wanted = frozenset(controls.stop_token_ids or ())
    vocab_size = asked.served.text.vocab_size
    if any(not 0 <= token < vocab_size for token in wanted):
        raise BadRequest(
            f"`stop_token_ids` contains an invalid token id (valid: 0 to {vocab_size - 1}).", param="stop_token_ids"
        )
    return wanted


def thinking_options(*switches: bool | None) -> dict[str, Any]:
    """The template options for thinking on or off: the last switch that is set. Templates know one of two names."""
    given = [switch for switch in switches if switch is not None]
    return {} if not given else {"enable_thinking": given[-1], "thinking": given[-1]}


def is_on(thinking: ThinkingSwitch | bool | None) -> bool | None:
    """Whether thinking is switched on; None: not specified."""
    if thinking is None or isinstance(thinking, bool):
        return thinking
    return None if thinking.type == "auto" else thinking.type != "disabled"


def check_stream_options(options: object, *, stream: bool | None) -> None:
    """Raise BadRequest for options of a stream that is not asked for."""
    if options is not None and stream is not True:
        raise BadRequest("`stream_options` needs `stream: true`.", param="stream_options")


FOREIGN: Mapping[str, tuple[Sequence[object], str]] = {
    "add_special_tokens": ((True, False), ""),
    "allowed_token_ids": (([],), "Use a grammar (`structured_outputs`) or `logit_bias`."),
    "bad_words": (([],), "Use `logit_bias`."),
    "chat_template": ((), "Start the server with --chat-template."),
    "dry_multiplier": ((0,), "Use `repetition_penalty`."),
    "dynatemp_range": ((0,), "Use `temperature`."),
    "include_stop_str_in_output": ((False,), "Answers never include stop strings."),
    "length_penalty": ((1,), "There is no beam search."),
    "logits_processors": (([],), "This server does not run client code."),
    "mirostat": ((0,), "Use `temperature`, `top_p` or `min_p`."),
    "prompt_logprobs": ((), "Use `echo` with `logprobs` at /v1/completions."),
    "skip_special_tokens": ((True,), "Answers never include special tokens."),
    "tfs_z": ((1,), "Use `top_p` or `min_p`."),
    "top_n_sigma": ((-1, 0), "Use `top_p` or `min_p`."),
    "truncate_prompt_tokens": ((-1,), "Prompts that are too long are refused: shorten the chat."),
    "typical_p": ((0, 1), "Use `top_p` or `min_p`."),
    "use_beam_search": ((False,), "Use `n` to get several answers."),
}
"""Fields of other servers that change an answer and are not offered: values that change nothing, and what to do."""
