"""A tool loop and structured output with `ollama`. Arguments: the server's address."""

import json
import sys

import ollama

client = ollama.Client(host=sys.argv[1])


def look(path: str) -> str:
    """Read a file.

    Args:
      path: where it is
    """
    return f"hello from {path}"


messages: list = [{"role": "user", "content": "What does a.txt say?"}]
calls = 0
while True:
    parts = list(client.chat(model="tiny", messages=messages, tools=[look], stream=True, think=True))
    message = {"role": "assistant", "content": "".join(part.message.content or "" for part in parts)}
    found = [call for part in parts for call in part.message.tool_calls or []]
    if not found:
        break
    message["tool_calls"] = [call.model_dump() for call in found]
    messages.append(message)
    for call in found:
        calls += 1
        messages.append({"role": "tool", "tool_name": call.function.name, "content": look(**call.function.arguments)})
assert parts[-1].done and parts[-1].eval_count > 0 and parts[-1].total_duration > 0
told = {"calls": calls, "answer": message["content"].strip()}
schema = {"type": "object", "properties": {"says": {"type": "string"}}, "required": ["says"]}
whole = client.chat(model="tiny", messages=[{"role": "user", "content": "As JSON: what does it say?"}], format=schema)
told["structured"] = json.loads(whole.message.content)
assert client.generate(model="tiny", prompt="Say it.").response
assert client.list().models[0].model == client.ps().models[0].model
assert "tools" in client.show("tiny").capabilities
print(json.dumps(told))
