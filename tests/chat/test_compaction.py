"""What is learnt of a chat that goes on after a summary, and what is not mistaken for one."""

import pytest

from reprise.chat.messages.compaction import Answered, Compactions
from reprise.chat.request import ChatRequest, Message

TEXT = "We read the file a.txt together, and it says hello. Nothing else is left to do."
OTHER = "This time the parser was mended, and all the tests of the folder were run again."
SYSTEM: Message = {"role": "system", "content": "You are an agent."}
READ = ({"type": "function", "function": {"name": "read", "parameters": {}}},)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def chat(*messages: Message, tools: tuple[dict[str, object], ...] = ()) -> ChatRequest:
    return ChatRequest(messages=(SYSTEM, *messages), tools=tools)


def asked(*turns: Message, text: str) -> Answered:
    instruction = user("Sum up all that was said so far, so that somebody else can go on.")
    return Answered(request=chat(*turns, instruction), previous=chat(*turns, tools=READ), text=text)


def learnt(*requests: ChatRequest, answered: Answered) -> Compactions:
    memory = Compactions()
    memory.note(answered)
    for request in requests:
        memory.observe(request)
    return memory


def test_the_next_time_all_but_the_users_words_is_known() -> None:
    first = asked(user("one"), assistant("1"), user("two"), assistant("2"), text=TEXT)
    told = user(f"So far:\n{TEXT}\nGo on.")
    after = chat(user("one"), user("two"), told, assistant("2"), user("<note>n</note>\nthree"), tools=READ)
    memory = learnt(after, answered=first)
    turns = (user("five"), assistant("5"), user("six"), assistant("6"), user("seven"), assistant("7"))
    predicted = memory.predict(asked(*turns, text=OTHER))
    assert predicted is not None and not predicted.is_whole
    assert predicted.request.tools == READ
    assert predicted.request.messages == (
        SYSTEM, user("five"), user("six"), user("seven"), user(f"So far:\n{OTHER}\nGo on."), assistant("7"),
        user("<note>n</note>\n"),
    )  # fmt: skip
    # A checkpoint right behind the summary: what follows it may change.
    (cut,) = predicted.request.cuts
    assert (cut.message, cut.num_chars) == (4, len(f"So far:\n{OTHER}"))
    # Another instruction is another habit.
    assert memory.predict(Answered(request=chat(user("What is it?")), previous=None, text=OTHER)) is None


def test_a_part_of_the_answer_and_a_prompt_that_is_known_whole() -> None:
    first = asked(user("one"), text=f"<thoughts>Hm.</thoughts>\n<summary>\n{TEXT}\n</summary>")
    memory = learnt(chat(user(f"Earlier: {TEXT} Go on.")), answered=first)
    predicted = memory.predict(asked(user("two"), text=f"<summary>{OTHER}</summary>"))
    assert predicted is not None and predicted.is_whole
    assert predicted.request.messages == (SYSTEM, user(f"Earlier: {OTHER} Go on."))
    # The form has changed: nothing is known.
    assert memory.predict(asked(user("two"), text=OTHER)) is None


def test_what_is_no_summary() -> None:
    first = asked(user("one"), text=TEXT)
    instruction = first.request.messages[-1]
    goes_on = ChatRequest(messages=(*first.request.messages, assistant(TEXT), user("Thanks.")))
    rewritten = chat(user("one, edited"), instruction, assistant(TEXT), user("Thanks."))
    of_a_tool = chat(user("main"), {"role": "tool", "tool_call_id": "c", "content": TEXT}, user("Thanks."))
    others_tools = chat(user(TEXT), tools=({"type": "function", "function": {"name": "write"}},))
    for request in (goes_on, rewritten, of_a_tool, others_tools, chat(user("something else"))):
        assert learnt(request, answered=first).predict(asked(user("two"), text=OTHER)) is None
    short = asked(user("one"), text="Yes.")
    assert learnt(chat(user("Yes.")), answered=short).predict(asked(user("two"), text=OTHER)) is None


def apart(told: str, *, text: str) -> Answered:
    """A request for a summary that has a system prompt of its own, and the chat as text."""
    system: Message = {"role": "system", "content": "You write summaries."}
    return Answered(
        request=ChatRequest(messages=(system, user(f"<chat>{told}</chat> Sum it up."))), previous=None, text=text
    )


def test_a_summary_that_is_asked_for_apart_from_its_chat() -> None:
    goes_on = (user("What did we do?"), assistant(TEXT), user("Go on."))
    one = chat(user("mend the parser"), assistant("It is mended."), user("and test it"), tools=READ)
    other = chat(user("another thing"), assistant("Yes, I see what it is."), user("well then"), tools=READ)
    memory = Compactions()
    memory.observe(one)
    memory.observe(other)
    memory.note(apart("[User]: mend the parser [You]: It is mended. [User]: and test it", text=TEXT))
    memory.observe(chat(*goes_on, tools=READ))
    asked_again = apart("[User]: another thing [You]: Yes, I see what it is. [User]: well then", text=OTHER)
    predicted = memory.predict(asked_again)
    assert predicted is not None and predicted.request.tools == READ
    assert predicted.request.messages == (SYSTEM, user("What did we do?"), assistant(OTHER), user(""))
    # A chat that was never seen is not guessed at.
    assert memory.predict(apart("[User]: who are you?", text=OTHER)) is None
    # What was right goes on being expected, whatever of it the chat has in it by now.
    memory.observe(predicted.request)
    memory.note(apart(f"What did we do? {TEXT} Go on.", text=OTHER))
    memory.observe(chat(user("What did we do?"), assistant(OTHER), user("Next."), tools=READ))
    again = memory.predict(apart(f"What did we do? {OTHER} Next.", text=TEXT))
    assert again is not None and again.request.messages[1:3] == (user("What did we do?"), assistant(TEXT))


def test_what_was_learnt_is_saved_once_and_read_again(caplog: pytest.LogCaptureFixture) -> None:
    memory = Compactions()
    assert memory.save() is None
    first = asked(user("one"), assistant("1"), user("two"), assistant("2"), text=f"<summary>{TEXT}</summary>")
    told = user(f"So far: {TEXT} Go on.")
    after = chat(user("one"), user("two"), told, assistant("2"), user("<note>n</note>\nthree"), tools=READ)
    memory = learnt(after, answered=first)
    saved = memory.save()
    assert saved is not None and memory.save() is None
    restarted = Compactions()
    restarted.restore(saved)
    second = asked(user("five"), assistant("5"), user("six"), assistant("6"), text=f"<summary>{OTHER}</summary>")
    one, same = memory.predict(second), restarted.predict(second)
    assert one is not None and same is not None and same.request == one.request
    assert restarted.save() is None
    # What another server has learnt joins what is known here.
    sum_up = Answered(request=chat(user("one"), user("Sum up.")), previous=chat(user("one"), tools=READ), text=TEXT)
    joined = learnt(chat(user(f"Then: {TEXT}"), user("go")), answered=sum_up)
    joined.restore(saved)
    both = joined.save()
    assert both is not None and saved[1:-1] in both and "Sum up." in both
    for text in ("", "{", "[1]", '[["x", true, [{"odd": 1}]]]', saved[:-20]):
        Compactions().restore(text)
    assert caplog.text.count("will be learnt again") == 5
