"""Scores with `cohere`. Arguments: the server's address, the model, the query, the documents as JSON."""

import json
import sys

import cohere

url, model, query, documents = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
ranked = cohere.ClientV2(api_key="none", base_url=url).rerank(model=model, query=query, documents=documents, top_n=3)
print(json.dumps([[result.index, result.relevance_score] for result in ranked.results]))
