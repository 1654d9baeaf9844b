"""Two turns about an image with `ollama`. Arguments: the server's address, the image's file."""

import sys

from ollama import Client

client = Client(host=sys.argv[1])
chat = [{"role": "user", "content": "What is this?", "images": [sys.argv[2]]}]
first = client.chat(model="tiny", messages=chat)
chat += [first.message, {"role": "user", "content": "Are you sure?"}]
print(client.chat(model="tiny", messages=chat).message.content.strip())
