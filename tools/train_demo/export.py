"""Writes what training has saved as a directory for mlx-lm: `python -m tools.train_demo.export RUN DIRECTORY`."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import reprise.lab.demo
from tools.train_demo.vocabulary import demo_tokenizer

EOS = "<|im_end|>"
TEMPLATE = Path(reprise.lab.demo.__file__).parent / "model" / "chat_template.jinja"


def export(run: Path, directory: Path) -> None:
    """Write the model into `directory`, with the chat template of the one that ships."""
    directory.mkdir(parents=True, exist_ok=True)
    template = directory / TEMPLATE.name
    if not template.exists():
        template.write_text(TEMPLATE.read_text())
    tokenizer = demo_tokenizer()
    text_config = json.loads((run / "config.json").read_text())
    text_config["eos_token_id"] = eos = tokenizer.token_to_id(EOS)
    config = {"model_type": "qwen3_5", "text_config": text_config, "tie_word_embeddings": True, "eos_token_id": eos}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        # mlx-lm keeps a convolution's channels last.
        f"language_model.model.{name}": value.transpose(1, 2).contiguous() if "conv1d" in name else value
        for name, value in torch.load(run / "model.pt").items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    export(options.run, options.directory)
