"""Two turns about an image with `langchain-openai`. Arguments: the server's address, the image's file."""

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
data = base64.b64encode(Path(sys.argv[2]).read_bytes()).decode()
shown = {"type": "image", "base64": data, "mime_type": "image/png"}
asked = HumanMessage(content=[{"type": "text", "text": "What is this?"}, shown])
first = model.invoke([asked])
second = model.invoke([asked, first, HumanMessage(content="Are you sure?")])
print(second.content.strip())
