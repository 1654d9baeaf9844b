"""`tool_runner` and structured output with `anthropic`. Arguments: the server's address."""

import json
import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
calls = 0


class Said(BaseModel):
    says: str


@beta_tool
def look(path: str) -> str:
    """Read a file.

    Args:
        path: where it is
    """
    global calls
    calls += 1
    return f"hello from {path}"


question = {"role": "user", "content": "What does a.txt say?"}
runner = client.beta.messages.tool_runner(model="tiny", max_tokens=500, tools=[look], messages=[question])
last = runner.until_done()
told = {"calls": calls, "answer": "".join(block.text for block in last.content if block.type == "text").strip()}
ask = {"role": "user", "content": "As JSON: what does it say?"}
parsed = client.beta.messages.parse(model="tiny", max_tokens=500, tools=[look], messages=[ask], output_format=Said)
told["structured"] = parsed.parsed_output.model_dump()
(model,) = client.models.list().data
assert client.models.retrieve(model.id).id == model.id
print(json.dumps(told))
