"""Vectors with `langchain-openai`. Arguments: the server's address, the model, the texts as JSON."""

import json
import sys

from langchain_openai import OpenAIEmbeddings

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
# Its default is to send tokens of OpenAI's models, whatever the model is.
embeddings = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
print(json.dumps({"vectors": embeddings.embed_documents(texts), "query": embeddings.embed_query(texts[0])}))
