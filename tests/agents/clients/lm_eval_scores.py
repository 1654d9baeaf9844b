"""Log-likelihoods with lm-eval's `local-completions`. Arguments: the server's address."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

address = f"{sys.argv[1]}/v1/completions"
texts = [(f"Number {number} is", " a number.") for number in range(40)]


def scores(batch_size: int, *, tokenized: bool) -> list[tuple[float, bool]]:
    # The tokenizer is the server's: nothing else is said about it.
    model = LocalCompletionsAPI(
        base_url=address, model="tiny", batch_size=batch_size, tokenized_requests=tokenized, max_retries=1
    )
    assert model.tokenizer_backend == "remote"
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number) for number, pair in enumerate(texts)
    ]
    return model.loglikelihood(asked, disable_tqdm=True)


def rounded(found: list[tuple[float, bool]]) -> list[float]:
    return [round(score, 2) for score, _ in found]


one, many = scores(1, tokenized=True), scores(40, tokenized=True)
told = {"num": len(one), "scores": rounded(one), "together": rounded(many)}
model = LocalCompletionsAPI(base_url=address, model="tiny", batch_size=1, max_retries=1)
until = Instance(
    request_type="generate_until", doc={}, arguments=("Say it.", {"until": ["."], "max_gen_toks": 5}), idx=0
)
told["generated"] = model.generate_until([until], disable_tqdm=True)
print(json.dumps(told))
