"""The workloads: what is asked of a server, turn by turn. Small in the tests, large in `bench/workloads.py`."""

from itertools import pairwise

from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.core.tokens import common_prefix
from tests.workloads.serving import HttpTurn, Message, Serving, returned
from tests.workloads.talk import QUESTIONS, TOOLS, calling, prose, result, system, thoughtful, user

OPENINGS = (
    "What does the first paragraph say?",
    "What does the last one say?",
    "Who is named in it?",
    "How many numbers are there?",
    "Is it a letter?",
    "Write it again in one sentence.",
    "Which word is the longest?",
    "In what order are the things told?",
    "Say whether it rhymes.",
    "Name what is missing.",
)
"""Questions about a text. The first two begin alike, the others do not."""

EDITS = ("Yet another thing: is it so?", "Or rather: what would you do?", "Zero in on the price, please.")


def ratio(turns: list[HttpTurn]) -> float:
    """Tokens computed on path ÷ those of an oracle that remembers every state."""
    return sum(turn.computed for turn in turns) / sum(turn.oracle for turn in turns)


def counts(turns: list[HttpTurn]) -> list[tuple[int, int]]:
    """Computed and the oracle's, turn by turn."""
    return [(turn.computed, turn.oracle) for turn in turns]


def chat(server: Serving, num: int, *, waits: bool = False) -> tuple[list[Message], list[HttpTurn]]:
    """A chat of so many questions; gives the messages up to the last question. `waits`: until the server is idle."""
    messages: list[Message] = [system()]
    turns: list[HttpTurn] = []
    for number, text in enumerate(QUESTIONS[:num]):
        messages.append(user(text))
        turns.append(server.ask(messages, thoughtful(number)))
        messages.append(returned(turns[-1], has_reasoning=True))
        if waits:
            server.wait_until_idle()
    return messages[:-1], turns


def unknown_tokens(server: Serving, messages: list[Message]) -> int:
    """Of a whole chat: the tokens of its prompts from the first one on that depends on what the user types."""
    # A renderer of its own, or what nobody typed would be the latest rendering of the chat to the server's.
    renderer = Renderer(server.service.served.text)

    def prompt(until: int, typed: str) -> ChatRequest:
        return ChatRequest(messages=(*messages[:until], user(typed)))

    total = 0
    for until, message in enumerate(messages):
        if message["role"] != "user":
            continue
        whole, *others = (
            renderer.render(prompt(until, typed)).prompt.tokens for typed in (message["content"], "0", "~")
        )
        is_first = all(earlier["role"] != "user" for earlier in messages[:until])
        known = 0 if is_first else min(common_prefix(whole, other) for other in others)
        total += len(whole) - known
    return total


def agent(server: Serving, num_calls: int, *, has_reasoning: bool) -> list[HttpTurn]:
    """A task, so many tool calls, an answer, and a new message of the user."""
    messages: list[Message] = [system(), user("Find out why the count is wrong.")]
    turns: list[HttpTurn] = []
    for step in range(num_calls):
        turns.append(server.ask(messages, calling(step), tools=TOOLS))
        answer = returned(turns[-1], has_reasoning=has_reasoning)
        messages += [answer, result(answer, step)]
    turns.append(server.ask(messages, thoughtful(0), tools=TOOLS))
    messages += [returned(turns[-1], has_reasoning=has_reasoning), user("Now mend it, and say what you changed.")]
    turns.append(server.ask(messages, thoughtful(1), tools=TOOLS))
    return turns


def one_system_prompt(server: Serving) -> list[HttpTurn]:
    """Ten users with one long system prompt."""
    return [server.ask([system(prose()), user(text)], thoughtful(0)) for text in QUESTIONS[:10]]


def tools_alone(server: Serving) -> list[HttpTurn]:
    """Ten users with the same tools and no system prompt."""
    return [server.ask([user(text)], thoughtful(0), tools=TOOLS) for text in QUESTIONS[:10]]


def one_document(server: Serving, document: str) -> list[HttpTurn]:
    """Ten questions, each behind the same document."""
    return [server.ask([system(), user(f"{document}\n\n{text}")], thoughtful(0)) for text in OPENINGS]


def regenerated(server: Serving, messages: list[Message]) -> list[HttpTurn]:
    """The same request twice more."""
    return [server.ask(messages, thoughtful(number)) for number in (7, 8)]


def edited_last(server: Serving, messages: list[Message]) -> list[HttpTurn]:
    """Other words in place of the last message."""
    return [server.ask([*messages[:-1], user(text)], thoughtful(5)) for text in EDITS]


def edited_earlier(server: Serving, messages: list[Message], at: int) -> HttpTurn:
    """A few words more in the user's message number `at`, and all that came after it as it was."""
    where = [index for index, message in enumerate(messages) if message["role"] == "user"][at]
    edited = [*messages]
    edited[where] = user(f"{messages[where]['content']} No more than three, please.")
    return server.ask(edited, thoughtful(5))


def spacing(turns: list[HttpTurn]) -> int:
    """The longest stretch without a snapshot: from one prompt's end to the next."""
    ends = [0, *(turn.prompt for turn in turns)]
    return max(high - low for low, high in pairwise(ends))
