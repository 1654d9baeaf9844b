"""Vectors with `ollama`, in both forms. Arguments: the server's address, the model, the texts as JSON."""

import json
import sys

import ollama

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
client = ollama.Client(host=url)
vectors = [list(each) for each in client.embed(model=model, input=texts).embeddings]
old = list(client.embeddings(model=model, prompt=texts[0]).embedding)
print(json.dumps({"vectors": vectors, "query": old}))
