"""Two turns about an image with `pydantic-ai`. Arguments: the server's address, the image's file, the provider."""

import sys
from pathlib import Path

from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

address, file, provider = sys.argv[1:]
if provider == "anthropic":
    model = AnthropicModel("claude-sonnet-4-5", provider=AnthropicProvider(base_url=address, api_key="none"))
else:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{address}/v1", api_key="none"))
agent = Agent(model)
shown = BinaryContent(data=Path(file).read_bytes(), media_type="image/png")
first = agent.run_sync(["What is this?", shown])
second = agent.run_sync("Are you sure?", message_history=first.all_messages())
print(second.output.strip())
