"""Vectors with `haystack-ai`. Arguments: the server's address, the model, the texts as JSON."""

import json
import sys

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
chosen = {"model": model, "api_base_url": f"{url}/v1", "api_key": Secret.from_token("none")}
documents = OpenAIDocumentEmbedder(**chosen).run([Document(content=text) for text in texts])["documents"]
query = OpenAITextEmbedder(**chosen).run(texts[0])["embedding"]
print(json.dumps({"vectors": [document.embedding for document in documents], "query": query}))
