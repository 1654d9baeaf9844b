"""Images in a chat: where they stand in the prompt, what survives the next turn, and who may be taken for one."""

from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import numpy as np
import pytest

from reprise.chat.answer import Answer
from reprise.chat.images import SeenImages, image_part, shown, with_images
from reprise.chat.messages.system_placement import Placement
from reprise.chat.rendering.abridged import AbridgedChat
from reprise.chat.rendering.compare_requests import compare_requests
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.chat.templates.rendered import PartKind, Rendered
from reprise.chat.templates.template import ChatTemplate
from reprise.chat.text_model import TextModel
from reprise.core.backend import StoredRun
from reprise.core.errors import BadRequest
from reprise.core.images import ImageFile, path_tokens
from reprise.core.outcome import Reason
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, as_tokens, common_prefix
from tests.chat.seeing import FAMILIES, SizeReader, picture, seeing, shows
from tests.chat.shapes import CALL, assistant, system, user

CAT, DOG = picture("cat"), picture("dog", 64, 16)
ANY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},)


def render(model: TextModel, *messages: Message, **more: object) -> Rendered:
    return Renderer(model).render(ChatRequest(messages=messages, **more))  # type: ignore[arg-type]


def text_of(rendered: Rendered, model: TextModel) -> str:
    return shown(rendered.prompt.tokens, model.decode, images=rendered.prompt.images)


def by_hand(model: TextModel, text: str, images: list[ImageFile]) -> Tokens:
    """The tokens of a text with a mark for each image, whose run is put into its place."""
    reader = cast(SizeReader, model.images)
    ids = model.encode(text)
    out: list[int] = []
    left = iter(images)
    mark = reader.vocab[reader.family.marker]
    for token in ids:
        if token == mark:
            image = next(left)
            out += path_tokens(reader.expand(image), image.digest).tolist()
        else:
            out.append(token)
    return as_tokens(out)


@ANY_FAMILY
def test_an_image_stands_where_the_template_puts_it(family: str) -> None:
    model = seeing(family)
    rendered = render(model, shows("Look: ", CAT, " and ", DOG, "."))
    marker, before, after = FAMILIES[family].marker, FAMILIES[family].before, FAMILIES[family].after
    written = marker if family != "marks" else f"<|vision_start|>{marker}<|vision_end|>"
    numbers = ("", "") if family != "numbered" else ("0", "1")
    one, other = (f"{before}{number}{written}{after}" for number in numbers)
    text = f"<|im_start|>user\nLook: {one} and {other}.<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.prompt.tokens.tolist() == by_hand(model, text, [CAT, DOG]).tolist()
    assert [image.image for image in rendered.prompt.images] == [CAT, DOG]
    for image in rendered.prompt.images:
        run = rendered.prompt.tokens[image.span.start : image.span.stop]
        assert (run < 0).sum() == image.rows * image.columns
    rest = np.concatenate([rendered.prompt.tokens[:0], *_outside(rendered)])
    assert (rest >= 0).all()


def test_an_image_has_its_number_also_where_the_middle_of_the_chat_is_left_out() -> None:
    model = seeing("numbered")
    assert model.images is not None
    placement = Placement(ChatTemplate(model, images := SeenImages(model.images)), model)
    turns = [turn for at in range(20) for turn in (user(f"Turn {at}."), assistant("Yes."))]
    seen = (shows("This?", CAT), assistant("A cat."))
    shown_before = with_images((*seen, *turns[:20], *seen, *turns[20:]), images.see)
    context, text = (
        (placed := placement.open(ChatRequest(messages=shown_before), datetime(2026, 3, 1))).context,
        placed.text,
    )
    chat = AbridgedChat(placement, context, text, think_end=model.think_end, least=1)
    (shown_behind,) = with_images((shows("And this?", DOG),), images.see)
    for messages in ((*shown_before, user("Go on.")), (*shown_before, shown_behind)):
        assert chat.try_text(messages) == placement.try_text(context, messages)


def _outside(rendered: Rendered) -> list[Tokens]:
    at, runs = 0, []
    for span in rendered.prompt.spans:
        runs.append(rendered.prompt.tokens[at : span.start])
        at = span.stop
    return [*runs, rendered.prompt.tokens[at:]]


@ANY_FAMILY
@pytest.mark.parametrize("has_image", [False, True])
def test_a_marker_in_somebodys_words_is_no_image(family: str, *, has_image: bool) -> None:
    model = seeing(family)
    reader = cast(SizeReader, model.images)
    marker = reader.family.marker
    words = f"Explain {marker} and {marker}{marker}."
    rendered = render(
        model,
        system(f"You know {marker}."),
        shows(words, CAT) if has_image else user(words),
        assistant(f"It is {marker}."),
        user("Go on."),
        tools=({"type": "function", "function": {"name": "look", "description": marker, "parameters": {}}},),
    )
    assert len(rendered.prompt.images) == int(has_image)
    outside = np.concatenate(_outside(rendered))
    assert reader.vocab[marker] not in outside
    # The model reads the same characters, in ordinary tokens.
    assert words in text_of(rendered, model)


@ANY_FAMILY
def test_a_marker_that_a_template_joins_is_no_image(family: str) -> None:
    """Not even with what stands for an image that the server has just seen."""
    model = seeing(family)
    reader = cast(SizeReader, model.images)
    marker = reader.family.marker
    renderer = Renderer(model)
    seen = renderer.render(ChatRequest(messages=(shows("Look.", CAT),)))
    for tag in ("", "\ufdd1ab\ufdd2", f"\ufdd1{CAT.digest.hex()}\ufdd2"):
        parts = [{"type": "text", "text": text} for text in (marker[:3], marker[3:] + tag)]
        rendered = renderer.render(ChatRequest(messages=({"role": "user", "content": parts},)))
        assert rendered.prompt.images == ()
        assert reader.vocab[marker] not in rendered.prompt.tokens
        assert (rendered.prompt.tokens >= 0).all()
        assert marker in text_of(rendered, model)
    assert len(seen.prompt.images) == 1


@ANY_FAMILY
def test_a_marker_that_a_template_joins_beside_an_image_is_no_image(family: str) -> None:
    model = seeing(family)
    reader = cast(SizeReader, model.images)
    marker = reader.family.marker
    halves: list[Any] = [{"type": "text", "text": text} for text in (f"I say {marker[:3]}", f"{marker[3:]} and")]
    for before, behind in (([], halves), (halves, []), (halves, halves)):
        parts = [*before, image_part(CAT), *behind]
        rendered = render(model, {"role": "user", "content": parts}, assistant("Yes."), user("And now?"))
        assert [image.image for image in rendered.prompt.images] == [CAT]
        assert reader.vocab[marker] not in np.concatenate(_outside(rendered))
        assert f"I say {marker} and" in text_of(rendered, model)


@ANY_FAMILY
def test_a_marker_in_a_name_is_no_image(family: str) -> None:
    model = seeing(family)
    reader = cast(SizeReader, model.images)
    marker = reader.family.marker
    parameters: dict[str, Any] = {"type": "object", "properties": {marker: {"type": "string"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    rendered = render(model, shows("Look.", CAT), tools=(tool,))
    assert [image.image for image in rendered.prompt.images] == [CAT]
    assert reader.vocab[marker] not in np.concatenate(_outside(rendered))


@ANY_FAMILY
def test_the_same_words_have_the_tokens_they_had(family: str) -> None:
    model = seeing(family)
    messages = (system("Be brief."), user("Hello, world!"), assistant("Hi."), user("And?"))
    blind = render(replace(model, images=None), *messages)
    assert render(model, *messages).prompt.tokens.tolist() == blind.prompt.tokens.tolist()


@ANY_FAMILY
def test_the_next_turn_begins_with_all_of_the_image(family: str) -> None:
    model = seeing(family)
    renderer = Renderer(model)
    asked = (system("Be brief."), shows("What is this?", CAT))
    first = renderer.render(ChatRequest(messages=asked))
    settled = renderer.next_turn(first, Answer(content="A cat."), branch="user")
    second = renderer.render(ChatRequest(messages=(*asked, assistant("A cat."), shows("And this?", DOG))))
    stable = max(b.position for b in first.prompt.boundaries if b.kind is BoundaryKind.STABLE)
    assert first.prompt.images[0].span.stop <= stable <= common_prefix(first.prompt.tokens, second.prompt.tokens)
    assert settled is not None and len(settled) > stable
    assert settled.tokens.tolist() == second.prompt.tokens[: len(settled)].tolist()
    assert [image.image for image in settled.images] == [CAT]
    assert second.prompt.images[0].span == first.prompt.images[0].span


@ANY_FAMILY
def test_boundaries_are_outside_of_images(family: str) -> None:
    model = seeing(family)
    rendered = render(
        model,
        system("Be brief."),
        shows("One", CAT, "two", DOG),
        assistant("Yes."),
        shows(DOG, "Three"),
        cuts=(Cut(1, 3, 0), Cut(1, 3, 1), Cut(1, 6, 1), Cut(1, 6, 2)),
    )
    spans = rendered.prompt.spans
    assert len(spans) == 3
    assert not any(span.start < b.position < span.stop for b in rendered.prompt.boundaries for span in spans)
    explicit = [b.position for b in rendered.prompt.boundaries if b.kind is BoundaryKind.EXPLICIT]
    texts = [shown(rendered.prompt.tokens[:at], model.decode, images=rendered.prompt.images) for at in explicit]
    cat, dog = "[image 48 x 32]", "[image 64 x 16]"
    # Before the first image, behind it, before the second, and behind that.
    assert [(cat in text, text.count("two"), dog in text) for text in texts] == [
        (False, 0, False),
        (True, 0, False),
        (True, 1, False),
        (True, 1, True),
    ]


@ANY_FAMILY
def test_the_message_with_an_image_is_found_in_the_prompt(family: str) -> None:
    model = seeing(family)
    rendered = render(model, system("Be brief."), shows(CAT, "What?"), assistant("A cat."), shows("And?", DOG))
    for number, image in enumerate(rendered.prompt.images):
        char = rendered.char_at(image.span.start, model.decode)
        part = rendered.part_at_char(char)
        assert part is not None and part.kind is PartKind.MESSAGE and part.index == (1, 3)[number]
        # Nobody can stand in it.
        assert rendered.char_at(image.span.stop - 1, model.decode) == char
    tail = rendered.prompt.images[1].span.stop
    assert rendered.text[rendered.char_at(tail, model.decode) :].startswith(("<|im_end|>", "<|vision_end|>", "\n\n"))


@pytest.mark.parametrize("shown_by", ["tool", "system", "assistant"])
def test_an_image_is_shown_where_the_template_takes_it_and_else_by_the_user_behind(shown_by: str) -> None:
    chats = {
        "tool": (user("Look."), CALL, shows("Seen.", CAT, role="tool", tool_call_id="call_1"), assistant("A cat.")),
        "system": (shows("Be brief.", CAT, role="system"), user("Look."), assistant("A cat.")),
        "assistant": (user("Look."), shows("Here.", CAT, role="assistant")),
    }
    for family, is_moved in (("lines", False), ("marks", False), ("rows", True)):
        model = seeing(family)
        rendered = render(model, *chats[shown_by], user("Why?"), tools=TOOLS)
        assert [image.image for image in rendered.prompt.images] == [CAT]
        assert any("chat template accepts none" in note for note in rendered.notes) is is_moved
        text = text_of(rendered, model)
        before = text[: text.index("[image 48 x 32]")]
        assert before.rsplit("<|im_start|>", 1)[1].startswith("user" if is_moved else shown_by)


@pytest.mark.parametrize("family", ["rows", "rows without calls"])
def test_a_moved_image_stays_where_it_is_as_the_chat_grows(family: str) -> None:
    model = seeing(family)
    renderer = Renderer(model)
    seen = shows("Seen.", CAT, role="tool", tool_call_id="call_1")
    loop = (user("Look."), CALL, seen)
    first = renderer.render(ChatRequest(messages=loop, tools=TOOLS))
    second = renderer.render(ChatRequest(messages=(*loop, assistant("A cat."), user("Why?")), tools=TOOLS))
    stable = max(b.position for b in first.prompt.boundaries if b.kind is BoundaryKind.STABLE)
    assert first.prompt.images[0].span.stop <= stable
    assert second.prompt.tokens[:stable].tolist() == first.prompt.tokens[:stable].tolist()


@pytest.mark.parametrize("family", ["lines", "rows without calls"])
def test_a_system_prompt_with_an_image_or_a_marker_is_not_said_to_be_left_out(family: str) -> None:
    model = seeing(family)
    marker = cast(SizeReader, model.images).family.marker
    for head in (shows("Be", CAT, "brief.", role="system"), system(f"The marker is {marker}.")):
        rendered = render(model, head, shows("Look.", DOG))
        assert not any("leaves out" in note for note in rendered.notes), rendered.notes


def test_a_file_that_cannot_be_decoded_is_a_sentence() -> None:
    with pytest.raises(BadRequest, match="cannot be decoded"):
        render(seeing(), shows("Look.", picture("broken")))


def test_a_model_that_sees_nothing_takes_no_images() -> None:
    with pytest.raises(BadRequest, match="reads text only"):
        render(replace(seeing(), images=None), shows("Look.", CAT))


def test_sampled_tokens_are_kept_behind_an_image() -> None:
    model = seeing()
    renderer = Renderer(model)
    asked = shows(CAT, "What?")
    first = renderer.render(ChatRequest(messages=(asked,)))
    # Another spelling of the same text than the tokenizer's own.
    said = [token for letter in "A cat." for token in model.encode(letter)]
    assert said != model.encode("A cat.")
    renderer.learn(first, said, Answer(content="A cat."))
    then = renderer.render(ChatRequest(messages=(asked, assistant("A cat."), user("Why?"))))
    sampled = len(first.prompt.tokens) + len(said)
    assert then.prompt.tokens[:sampled].tolist() == [*first.prompt.tokens.tolist(), *said]
    # The same words behind another image are other words.
    other = renderer.render(ChatRequest(messages=(shows(DOG, "What?"), assistant("A cat."), user("Why?"))))
    assert model.encode("A cat.")[0] in other.prompt.tokens.tolist()
    assert said[-3:] != other.prompt.tokens[: len(other.prompt) - 1].tolist()[-3:]


@ANY_FAMILY
@pytest.mark.parametrize("record", [1, 7, 1000])
def test_what_was_sampled_behind_images_is_recalled_from_what_is_stored(family: str, record: int) -> None:
    model = seeing(family)
    asked = (system("Be brief."), shows("Look: ", CAT, "What?"))
    first = render(model, *asked)
    said = [token for letter in "A cat." for token in model.encode(letter)]
    stored = as_tokens([*first.prompt.tokens.tolist(), *said, *model.encode("<|im_end|>\n<|im_start|>user\n")])
    runs = [
        StoredRun(
            name=str(number), parent=str(number - 1) if number > 0 else None, tokens=stored[start : start + record]
        )
        for number, start in enumerate(range(0, len(stored), record))
    ]
    renderer = Renderer(model)
    renderer.recall(runs)
    then = renderer.render(ChatRequest(messages=(*asked, assistant("A cat."), shows("And?", DOG))))
    assert common_prefix(then.prompt.tokens, stored) >= len(first.prompt) + len(said)
    # Behind another image the same words are spelled as the tokenizer does.
    other = renderer.render(ChatRequest(messages=(asked[0], shows("Look: ", DOG, "What?"), assistant("A cat."))))
    spelled = other.prompt.tokens.tolist()
    assert not any(spelled[at : at + len(said)] == said for at in range(len(spelled)))


def test_why_behind_a_changed_image_all_is_computed() -> None:
    model = seeing()
    before = ChatRequest(
        messages=(system("Be brief."), shows("What is this?", CAT, "Say."), assistant("A."), user("B"))
    )
    now = replace(before, messages=(before.messages[0], shows("What is this?", DOG, "Say."), *before.messages[2:]))
    compared = compare_requests(model, before, now)
    explanation = compared.explanation
    assert explanation.reason is Reason.IMAGE_CHANGED
    assert explanation.expected_text.startswith("[image 48 x 32]")
    assert explanation.actual_text.startswith("[image 64 x 16]")
    assert explanation.part is not None and explanation.part.index == 1
    assert "Another image (64 x 16) stands where 48 x 32 stood" in explanation.advice


def test_why_behind_an_image_that_was_left_out_all_is_computed() -> None:
    model = seeing()
    shots = [picture(f"shot {number}") for number in range(3)]
    turns = [(shows(f"Step {n}", shot), assistant(f"Did {n}.")) for n, shot in enumerate(shots)]
    before = ChatRequest(messages=(system("Be brief."), *(m for turn in turns[:2] for m in turn), user("Go on.")))
    # A client that keeps the latest images only.
    kept = (user("Step 0"), turns[0][1], *turns[1], *turns[2], user("Go on."))
    compared = compare_requests(model, before, ChatRequest(messages=(system("Be brief."), *kept)))
    assert compared.explanation.reason is Reason.IMAGE_DROPPED


def test_a_screenshot_that_is_encoded_again_is_noted() -> None:
    model = seeing()
    before = ChatRequest(messages=(shows("Look.", picture("one")), assistant("Yes."), user("And?")))
    now = ChatRequest(messages=(shows("Look.", picture("two")), *before.messages[1:], assistant("No."), user("Why?")))
    compared = compare_requests(model, before, now)
    assert any("encodes an image again" in note for note in compared.notes)
    assert "Another image of 48 x 32 stands where one of this size stood" in compared.explanation.advice
    assert "it should send the same bytes" in compared.explanation.advice
    assert not any("encodes an image again" in note for note in compare_requests(model, before, before).notes)


def test_images_in_another_order_or_detail_are_not_said_to_be_encoded_again() -> None:
    model = seeing()
    one, two = picture("one"), picture("two")
    low = replace(one, digest=bytes(16), detail="low")
    for before, now in (((one, two), (two, one)), ((one, two), (one, one)), ((low,), (one,))):
        chats = [
            ChatRequest(messages=(shows("Look.", *images), assistant("Yes."), user("And?"))) for images in (before, now)
        ]
        assert compare_requests(model, *chats).notes == ()


def test_ids_below_zero_are_shown_as_images() -> None:
    model = seeing()
    hello = model.encode("Hello")
    assert shown(as_tokens([*hello, -5, -6, *hello, -7]), model.decode) == "Hello[image]Hello[image]"


def test_a_summary_of_a_chat_with_images_is_learnt_and_saved() -> None:
    model = seeing()
    renderer = Renderer(model)
    summary = "The picture showed a cat that sat on a table beside a lamp, and nothing else at all."
    chat = (system("Be brief."), shows("What is this?", CAT), assistant("A cat."), user("Summarise this chat."))
    for _ in range(2):
        asked = renderer.render(ChatRequest(messages=chat))
        renderer.learn(asked, model.encode(summary), Answer(content=summary))
        renderer.render(ChatRequest(messages=(chat[0], user(f"Go on from here: {summary}"), shows("And now?", DOG))))
    # An image of one chat is in no shape of others, and what was learnt can be written down.
    text = renderer.compactions.save()
    assert text is None or "image" not in text
