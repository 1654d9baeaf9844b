"""Full attention in every layer, one dense feed-forward network each: plain `KVCache`."""

from tests.zoo.sizes import Config, Unavailable, sized

_ROPE_LLAMA4 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_GPT2_NAMES = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 4096, "n_ctx": 4096, "n_inner": 96}

DENSE: dict[str, Config | Unavailable] = {
    "apertus": sized("apertus", post_norm=False, qk_norm=True),
    "bitnet": Unavailable("its 1.58-bit linear layers exist only for Metal"),
    "cohere": sized("cohere", logit_scale=1.0, use_qk_norm=True),
    "ernie4_5": sized("ernie4_5", use_bias=False),
    "exaone": sized("exaone", num_layers=2),
    "gemma": sized("gemma"),
    "gemma2": sized("gemma2", query_pre_attn_scalar=32.0),
    "glm": sized("glm"),
    "glm4": sized("glm4", partial_rotary_factor=0.5),
    "gpt2": sized("gpt2", _GPT2_NAMES),
    "gpt_bigcode": sized("gpt_bigcode", _GPT2_NAMES, num_key_value_heads=None),
    "gpt_neox": sized("gpt_neox", rotary_emb_base=10000, rotary_pct=0.5),
    "gptj": sized("gptj", _GPT2_NAMES, rotary_dim=16),
    "granite": sized(
        "granite",
        logits_scaling=1.0,
        attention_multiplier=0.2,
        embedding_multiplier=2.0,
        residual_multiplier=0.8,
    ),
    "helium": sized("helium"),
    "hunyuan_v1_dense": sized("hunyuan_v1_dense"),
    "internlm2": sized("internlm2"),
    "internlm3": sized("internlm3"),
    "lille-130m": sized("lille-130m", _GPT2_NAMES, block_size=4096, n_kv_heads=2),
    "mimo": sized("mimo"),
    "minicpm": sized("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=2.0),
    "ministral3": sized("ministral3", rope_parameters=_ROPE_LLAMA4),
    "nanbeige": sized("nanbeige", num_loops=2),
    "nanochat": sized("nanochat"),
    "nemotron": sized("nemotron", hidden_act="relu2"),
    # One block with attention left out: its cache list is shorter than its list of layers.
    "nemotron-nas": sized(
        "nemotron-nas",
        num_hidden_layers=3,
        block_configs=[
            {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        ],
    ),
    "olmo": Unavailable("its module needs the package ai2-olmo and exits the process without it"),
    "olmo2": sized("olmo2"),
    "openelm": sized(
        "openelm",
        num_transformer_layers=2,
        model_dim=64,
        ffn_dim_divisor=16,
        num_query_heads=[2, 4],
        num_kv_heads=[1, 2],
        ffn_multipliers=[1.0, 2.0],
    ),
    "phi": sized("phi", partial_rotary_factor=0.5),
    "phi3": sized("phi3"),
    "phi3small": sized(
        "phi3small",
        # It writes to the logits of fixed token ids, the last of them 100351.
        vocab_size=100352,
        ff_intermediate_size=96,
        gegelu_limit=20.0,
        dense_attention_every_n_layers=2,
        mup_embedding_multiplier=1.0,
        mup_width_multiplier=1.0,
        mup_attn_multiplier=5.0,
        # The smallest blocks that it takes, one of them local.
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=1,
        blocksparse_vert_stride=2,
    ),
    "plamo": sized("plamo", n_shared_head=1),
    "qwen": sized("qwen", kv_channels=32, intermediate_size=192),
    "qwen2": sized("qwen2"),
    "qwen3": sized("qwen3", num_attention_heads=4),
    "seed_oss": sized("seed_oss", num_attention_heads=4),
    "smollm3": sized("smollm3", num_hidden_layers=2, no_rope_layer_interval=2),
    "stablelm": sized("stablelm", use_qkv_bias=True, partial_rotary_factor=0.25),
    "starcoder2": sized("starcoder2", norm_epsilon=1e-5),
    "talkie": sized("talkie"),
    "telechat3": sized("telechat3"),
}
