"""Vectors with `llama-index`. Arguments: the server's address, the model, the texts as JSON."""

import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
embedding = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none")
vectors = embedding.get_text_embedding_batch(texts)
print(json.dumps({"vectors": vectors, "query": embedding.get_query_embedding(texts[0])}))
