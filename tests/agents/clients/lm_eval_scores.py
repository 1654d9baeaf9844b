"""`loglikelihood` as `lm-eval` asks for it. Arguments: the server's address."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

lm = LocalCompletionsAPI(
    base_url=f"{sys.argv[1]}/v1/completions", model="tiny", tokenizer_backend="remote", max_retries=1
)
asked = [("The sky is", " blue"), ("The sky is", " green")]
found = lm.loglikelihood(
    [Instance("loglikelihood", doc={}, arguments=pair, idx=at) for at, pair in enumerate(asked)], disable_tqdm=True
)
print(json.dumps({"scores": [score for score, _ in found]}))
