"""A tool loop and `output_type` with `openai-agents`. Arguments: the server's address, `responses` or `chat`."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
kind = OpenAIResponsesModel if sys.argv[2] == "responses" else OpenAIChatCompletionsModel
model = kind(model="tiny", openai_client=client)
calls = 0


class Said(BaseModel):
    says: str


@function_tool
def look(path: str) -> str:
    """Read a file.

    Args:
        path: where it is
    """
    global calls
    calls += 1
    return f"hello from {path}"


async def main() -> None:
    plain = Agent(name="reader", instructions="You read files.", model=model, tools=[look])
    result = await Runner.run(plain, "What does a.txt say?")
    told = {"calls": calls, "answer": result.final_output.strip()}
    typed = plain.clone(output_type=Said)
    result = await Runner.run(typed, "As JSON: what does a.txt say?")
    told["structured"] = result.final_output.model_dump()
    print(json.dumps(told))


asyncio.run(main())
