"""Models that hold a text model of another family (the text side of vision models)."""

from tests.zoo.dense import DENSE
from tests.zoo.experts import EXPERTS_ONLY
from tests.zoo.sizes import Config, Unavailable, sized

WRAPPED: dict[str, Config | Unavailable] = {
    "mistral3": {"model_type": "mistral3", "text_config": DENSE["ministral3"]},
    "pixtral": {"model_type": "pixtral", "text_config": sized("llama")},
    "qwen2_vl": {"model_type": "qwen2_vl", "text_config": DENSE["qwen2"]},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": DENSE["qwen3"]},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "text_config": EXPERTS_ONLY["qwen3_moe"]},
}
