"""Records what transformers makes of the tiny embedders of the tests: `tests/engine/embedders.json`.

Run in two steps, since PyTorch is in no environment of this project: `python -m tools.record_embedders write FOLDER`
here, then `python tools/record_embedders.py read FOLDER` where torch and transformers are.
"""

import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "tests" / "engine" / "embedders.json"


def write(folder: Path) -> None:
    from tests.models.embedders import NAMES, RERANKERS, texts, write_embedder  # noqa: PLC0415

    for name in (*NAMES, *RERANKERS, "yes-no"):
        write_embedder(name, folder / name)
    facts = {"names": NAMES, "rerankers": RERANKERS, "texts": texts()}
    (folder / "facts.json").write_text(json.dumps(facts))


def read(folder: Path) -> None:
    import torch  # noqa: PLC0415 -- not here
    import transformers as hf  # noqa: PLC0415

    facts = json.loads((folder / "facts.json").read_text())
    found: dict[str, list[list[float]]] = {}

    def one(name, *given):
        tokenizer = hf.AutoTokenizer.from_pretrained(folder / name)
        return tokenizer(*given, return_tensors="pt", return_token_type_ids=True)

    with torch.no_grad():
        _name_sizes(folder / "nomic_bert" / "config.json")
        for name in facts["names"]:
            model = hf.AutoModel.from_pretrained(folder / name, dtype=torch.float32).eval()
            rows = []
            for text in facts["texts"]:
                inputs = one(name, text)
                kept = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
                rows.append(_vector(torch, folder / name, model(**kept).last_hidden_state[0]))
            found[name] = rows
        for name in facts["rerankers"]:
            model = hf.AutoModelForSequenceClassification.from_pretrained(folder / name, dtype=torch.float32).eval()
            rows = []
            for text in facts["texts"]:
                inputs = one(name, "the boat", text)
                if not name.startswith("bert"):
                    del inputs["token_type_ids"]
                rows.append(torch.sigmoid(model(**inputs).logits[0]).tolist())
            found[name] = rows
        model = hf.AutoModelForCausalLM.from_pretrained(folder / "yes-no", dtype=torch.float32).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder / "yes-no")
        rows = []
        for text in facts["texts"]:
            asked = (
                "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
                f"<Query>: the boat\n<Document>: {text}"
            )
            system = (
                "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
                'Note that the answer can only be "yes" or "no".'
            )
            chat = [{"role": "system", "content": system}, {"role": "user", "content": "MARK"}]
            rendered = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            start, stop = rendered.split("MARK")
            ids = [i for part in (start, asked, stop) for i in tokenizer.encode(part, add_special_tokens=False)]
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
            rows.append([torch.softmax(logits[[no, yes]], dim=-1)[1].item()])
        found["yes-no"] = rows
    rounded = {name: [[round(x, 6) for x in row] for row in rows] for name, rows in found.items()}
    RECORDED.write_text(json.dumps(rounded) + "\n")


def _name_sizes(file: Path) -> None:
    """Nomic's folders have names of their own, which transformers takes from its own configuration alone."""
    config = json.loads(file.read_text())
    ours = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    ours |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    config |= {name: config[given] for name, given in ours.items()}
    rope = {"rope_type": "default", "rope_theta": config["rotary_emb_base"]}
    config |= {"hidden_act": "silu", "layer_norm_eps": config["layer_norm_epsilon"], "rope_parameters": rope}
    file.write_text(json.dumps(config))


def _vector(torch, folder: Path, hidden):
    """As sentence-transformers would: pooled, through its matrix, of length 1."""
    modules = json.loads((folder / "modules.json").read_text()) if (folder / "modules.json").exists() else None
    if modules is None:
        pooled = hidden.mean(0)
        return (pooled / pooled.norm()).tolist()
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    if pooling["pooling_mode_cls_token"]:
        pooled = hidden[0]
    elif pooling["pooling_mode_lasttoken"]:
        pooled = hidden[-1]
    else:
        pooled = hidden.mean(0)
    for module in modules:
        if module["type"].endswith("Dense"):
            from safetensors.torch import load_file  # noqa: PLC0415

            weights = load_file(folder / module["path"] / "model.safetensors")
            pooled = torch.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"])
        if module["type"].endswith("Normalize"):
            pooled = pooled / pooled.norm()
    return pooled.tolist()


if __name__ == "__main__":
    step, folder = sys.argv[1:]
    {"write": write, "read": read}[step](Path(folder))
