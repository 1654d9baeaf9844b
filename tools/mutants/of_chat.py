"""Planted bugs in tool calls: learning their format, their ids, reading them, and the answers of one request."""

from tools.mutants.mutant import Mutant

_LEARNT = ("tests/chat/test_learnt_calls.py",)
_LEARNT_THINKING = ("tests/chat/test_learnt_thinking.py",)
_FAMILIES = ("tests/chat/test_families.py",)
_IDS = ("tests/chat/test_call_ids.py",)
_GRAMMARS = ("tests/chat/test_grammars.py",)
_ABRIDGED = ("tests/chat/test_abridged.py",)
_MALFORMED = ("tests/api/test_malformed_calls.py",)
_OTHER_ROUTES = ("tests/api/test_other_routes.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


CHAT_MUTANTS = (
    _mutant(
        "with_calls_of_family",
        "a family's calls replace those that the template shows",
        "text_model.calls.format is not None",
        "False",
        _FAMILIES,
    ),
    _mutant(
        "with_calls_of_family",
        "calls are a family's although the template writes them otherwise",
        "is_not_refuted(text_model, calls.format)",
        "True",
        _FAMILIES,
    ),
    _mutant(
        "with_calls_of_family",
        "of two families that may be it, one is taken",
        "len(fitting) != 1",
        "not fitting",
        _FAMILIES,
    ),
    _mutant(
        "_middle",
        "a kind of message that only the middle of a chat has is left out",
        "last_new = index",
        "last_new = region",
        _ABRIDGED,
    ),
    _mutant(
        "AbridgedChat._short",
        "a chat whose middle was edited is rendered with the prompt's",
        "tuple(messages[:stop]) != own[:stop]",
        "False",
        _ABRIDGED,
    ),
    _mutant(
        "_call_start",
        "a call begins with what begins a message too",
        "any(start in text for text in probes.outside)",
        "False",
        _LEARNT,
    ),
    _mutant(
        "_until_turn_end",
        "what opens the result is taken for the end of the call",
        "(*probes.message_ends, marker, probes.opens_result)",
        "(*probes.message_ends, marker)",
        _LEARNT,
    ),
    _mutant(
        "_call_start",
        "a word of the instructions is never what calls begin with",
        "start[:1].isalpha()",
        "False",
        _LEARNT,
    ),
    _mutant(
        "stated_format",
        "a tool that is shown is taken for an example of a call",
        "any(name in example['name'] for name in names)",
        "False",
        _LEARNT,
    ),
    _mutant(
        "_learn",
        "a section that is ended only behind several calls has no end",
        "last_of_two if last_of_two.startswith(last.rstrip()) else last",
        "last",
        _LEARNT,
    ),
    _mutant(
        "_ThinkingProbes._end",
        "reasoning ends with what content begins with",
        "between.removesuffix(opening).rstrip()",
        "between",
        _LEARNT_THINKING,
    ),
    _mutant(
        "_ThinkingProbes._prompt",
        "without a generation prompt the role is what content begins with",
        "prompt if has_one else None",
        "prompt",
        _LEARNT_THINKING,
    ),
    _mutant(
        "_written_message",
        "reasoning that stands in a part of the content is left out",
        "_with_thinking_part(out.pop(REASONING), out.get('content'))",
        "joined_text(out.get('content'))",
        _LEARNT_THINKING,
    ),
    _mutant(
        "_sequence",
        "what stands before the first call is taken to stand before each",
        "lead[:head_at]",
        "lead",
        _LEARNT,
    ),
    _mutant(
        "shortened_id",
        "an id is another with every call",
        "hashlib.blake2b(f'{attempt}:{given}'.encode(errors='replace'), digest_size=40).digest()",
        "__import__('secrets').token_bytes(40)",
        _IDS,
    ),
    _mutant(
        "CallReader._step",
        "a call that the length cuts is text",
        "self.is_over, self.is_broken, self.is_cut = True, self._is_ended, not self._is_ended",
        "self.is_over, self.is_broken, self.is_cut = True, True, False",
        _LEARNT,
    ),
    _mutant(
        "Reader._leave_call",
        "the beginning of a streamed call that turns out malformed comes as text too",
        "call.raw[0 if self._holds_calls else call.num_emitted:]",
        "call.raw",
        _MALFORMED,
    ),
    _mutant(
        "Reader._leave_call",
        "a malformed call that was held vanishes as far as it was read",
        "0 if self._holds_calls else call.num_emitted",
        "call.num_emitted",
        _MALFORMED,
    ),
    _mutant(
        "AnswerParser._close_call",
        "the markers of a streamed call that turns out malformed are text",
        "call.text if call.text.strip() else ''",
        "raw",
        _MALFORMED,
    ),
    _mutant(
        "json_or_none",
        "a number beyond all becomes what is no JSON",
        "json.loads(text, parse_float=_finite, parse_constant=_refuse)",
        "json.loads(text, parse_constant=_refuse)",
        _LEARNT,
    ),
    _mutant(
        "end_of",
        "a value ends with the first of its own name within it",
        "depth += text.count(again, at, found) - 1",
        "depth -= 1",
        _LEARNT,
    ),
    _mutant(
        "GrammarCompiler._compile",
        "a grammar that was refused costs as much again",
        "self._refused[_digest(text)] = refusal",
        "pass",
        (*_GRAMMARS, "-k", "refused_costs_nothing"),
    ),
    _mutant(
        "_Rules._text",
        "text before a special token is no part of what ends a value",
        "self._terminal(f'{text} {before}') if before else text",
        "text",
        _GRAMMARS,
    ),
    _mutant(
        "create_completion",
        "all answers of a request are computed at a time",
        "max(1, service.limits.max_choices // requests[0].num_choices)",
        "len(requests)",
        _OTHER_ROUTES,
    ),
    _mutant(
        "words_at",
        "an answer that says what it thought is found where it is said again",
        "next(ends, within.stop)",
        "within.stop",
        ("tests/chat/test_explain.py", "-k", "said_again"),
    ),
)
