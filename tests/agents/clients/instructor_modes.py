"""Structured output with `instructor`. Arguments: the server's address, the mode's name."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Said(BaseModel):
    says: str


mode = instructor.Mode[sys.argv[2]]
client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0), mode=mode)
ask = [{"role": "user", "content": "What does a.txt say?"}]
print(
    json.dumps(
        {"structured": client.create(model="tiny", messages=ask, response_model=Said, max_retries=0).model_dump()}
    )
)
