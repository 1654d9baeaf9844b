"""`create_agent` with and without `ProviderStrategy`, with `langchain`. Arguments: the server's address."""

import json
import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
calls = 0


class Said(BaseModel):
    says: str


def look(path: str) -> str:
    """Read a file."""
    global calls
    calls += 1
    return f"hello from {path}"


agent = create_agent(model, tools=[look], system_prompt="You read files.")
done = agent.invoke({"messages": [{"role": "user", "content": "What does a.txt say?"}]})
told = {"calls": calls, "answer": done["messages"][-1].content.strip()}
typed = create_agent(model, tools=[look], system_prompt="You read files.", response_format=ProviderStrategy(Said))
done = typed.invoke({"messages": [{"role": "user", "content": "As JSON: what does a.txt say?"}]})
told["structured"] = done["structured_response"].model_dump()
print(json.dumps(told))
