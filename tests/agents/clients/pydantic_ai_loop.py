"""A tool loop and `NativeOutput` with `pydantic-ai`. Arguments: the server's address, `openai` or `anthropic`."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

if sys.argv[2] == "openai":
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
else:
    # By the name it decides whether there is structured output.
    model = AnthropicModel("claude-sonnet-4-6", provider=AnthropicProvider(base_url=sys.argv[1], api_key="none"))
calls = 0


class Said(BaseModel):
    says: str


def look(path: str) -> str:
    """Read a file."""
    global calls
    calls += 1
    return f"hello from {path}"


plain = Agent(model, instructions="You read files.", tools=[look])
told = {"answer": plain.run_sync("What does a.txt say?").output.strip(), "calls": calls}
typed = Agent(model, instructions="You read files.", tools=[look], output_type=NativeOutput(Said))
told["structured"] = typed.run_sync("As JSON: what does a.txt say?").output.model_dump()
print(json.dumps(told))
