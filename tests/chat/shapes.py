"""Chat shapes: the ways in which requests look, to be rendered with every template."""

from typing import Any

from reprise.chat.answer import Answer, ToolCall
from reprise.chat.request import ChatRequest, Message

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SEARCH: dict[str, Any] = {"type": "function", "function": {"name": "search", "description": "Search the web."}}


def system(content: str = "Be brief.") -> Message:
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content, "name": "ada"}


def assistant(content: str | None, reasoning: str | None = None, *, city: str | None = None) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if city is not None:
        function = {"name": "get_weather", "arguments": '{"city": "' + city + '"}'}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


def tool(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "get_weather"}


ASK = user("What is the weather in Paris?")
CALL = assistant(None, "I need the weather tool.", city="Paris")
RESULT = tool("sunny, 20 degrees")
TOLD = assistant("It is sunny.", "The tool says sunny.")

SHAPES: dict[str, ChatRequest] = {
    "one message": ChatRequest(messages=(ASK,)),
    "system and message": ChatRequest(messages=(system(), ASK)),
    "second turn": ChatRequest(messages=(system(), ASK, assistant("Sunny.", "Let me think."), user("And tomorrow?"))),
    "second turn, client drops thinking": ChatRequest(
        messages=(system(), ASK, assistant("Sunny."), user("And tomorrow?"))
    ),
    "tools without system": ChatRequest(messages=(ASK,), tools=(WEATHER,)),
    "tool result": ChatRequest(messages=(system(), ASK, CALL, RESULT), tools=(WEATHER, SEARCH)),
    "tool result, client drops thinking": ChatRequest(
        messages=(system(), ASK, assistant(None, city="Paris"), RESULT), tools=(WEATHER, SEARCH)
    ),
    "after a tool loop": ChatRequest(messages=(system(), ASK, CALL, RESULT, TOLD, user("Thanks!")), tools=(WEATHER,)),
    "answer to continue": ChatRequest(messages=(system(), ASK, assistant("The weather is")), continue_final=True),
    "list of parts": ChatRequest(
        messages=(system(), user([{"type": "text", "text": "What is this? "}, {"type": "text", "text": "A test."}]))
    ),
    "system in the middle": ChatRequest(
        messages=(system(), ASK, assistant("Sunny."), system("Now be long."), user("And tomorrow?"))
    ),
    "thinking off": ChatRequest(messages=(system(), ASK), template_options={"enable_thinking": False}),
    "thinking preserved": ChatRequest(
        messages=(system(), ASK, assistant("Sunny.", "Let me think."), user("And tomorrow?")),
        template_options={"preserve_thinking": True},
    ),
    "breakpoints": ChatRequest(
        messages=(system(), ASK, assistant("Sunny."), user("And tomorrow?")), tools=(WEATHER,), breakpoints=(0, 1, 3, 4)
    ),
}

CONVERSATION: tuple[tuple[tuple[Message, ...], Answer], ...] = (
    ((ASK,), Answer(content="It is sunny.", reasoning="They ask for the weather.")),
    (
        (user("Please look it up."),),
        Answer(
            content=None,
            reasoning="I need the weather tool.",
            tool_calls=(ToolCall(id="call00001", name="get_weather", arguments='{"city": "Paris"}'),),
        ),
    ),
    ((RESULT,), Answer(content="Sunny, 20 degrees.", reasoning="The tool says sunny.")),
    ((user("And tomorrow?"),), Answer(content="Tomorrow it will rain.", reasoning="Let me think.")),
    ((user("Thank you."),), Answer(content="You are welcome.", reasoning="They thank me.")),
)
"""A chat: what comes in, and what the model answers."""

PLAIN_CONVERSATION = (CONVERSATION[0], CONVERSATION[3], CONVERSATION[4])
"""The same without tools."""
