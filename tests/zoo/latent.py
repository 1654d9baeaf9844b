"""Multi-head latent attention, some with an indexer that picks what is attended to."""

from tests.zoo.sizes import LATENT, WINDOW, Config, Unavailable, sized, without_type

_INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": WINDOW}

# `factor` 1.0 keeps the positions as they are: minicpm3 takes no configuration without these entries.
_LONG_ROPE = {
    "rope_type": "longrope",
    "type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
    "original_max_position_embeddings": 4096,
}

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_ROPE_LLAMA4 = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_LONGCAT: Config = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 48,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

LATENT_ATTENTION: dict[str, Config | Unavailable] = {
    "deepseek_v2": sized("deepseek_v2", LATENT, topk_method="greedy", rope_scaling=_YARN),
    "deepseek_v3": sized("deepseek_v3", LATENT),
    # `CacheList(KVCache, KVCache)`: the latents and the keys of the indexer.
    "deepseek_v32": sized("deepseek_v32", LATENT, _INDEXER),
    # A cache class of its own: a window, closed groups, and the group that is still open.
    "deepseek_v41": sized(
        "deepseek_v41",
        LATENT,
        num_hidden_layers=3,
        head_dim=64,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=WINDOW,
        compress_ratios=[0, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=1,
        candidate_topk_blocks=2,
        candidate_block_size=4,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        rms_norm_eps=1e-6,
        scoring_func="sqrtsoftplus",
    ),
    "glm4_moe_lite": sized("glm4_moe_lite", LATENT, num_nextn_predict_layers=0),
    "glm_moe_dsa": sized(
        "glm_moe_dsa", LATENT, _INDEXER, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}
    ),
    "kimi_k25": {"model_type": "kimi_k25", "text_config": sized("deepseek_v3", LATENT)},
    "kimi_vl": {"model_type": "kimi_vl", "text_config": without_type(sized("", LATENT))},
    "longcat_flash": sized("longcat_flash", _LONGCAT),
    "minicpm3": sized("minicpm3", LATENT, dim_model_base=64, scale_depth=1.4, scale_emb=2.0, rope_scaling=_LONG_ROPE),
    "mistral4": sized("mistral4", LATENT, head_dim=None, rope_parameters=_ROPE_LLAMA4),
    "youtu_llm": sized("youtu_llm", LATENT),
    # The n-gram embedding looks back a few tokens: `ArraysCache` beside `CacheList(KVCache, KVCache)`.
    "longcat_flash_ngram": sized(
        "longcat_flash_ngram", _LONGCAT, ngram_vocab_size_ratio=4, emb_neighbor_num=3, emb_split_num=2
    ),
    # Block-sparse attention with an indexer: `CacheList` of one or two `KVCache`.
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "text_config": without_type(
            sized(
                "",
                dense_intermediate_size=96,
                shared_intermediate_size=48,
                intermediate_size=48,
                num_local_experts=4,
                num_experts_per_tok=2,
                num_hidden_layers=3,
                moe_layer_freq=[0, 1, 1],
                sparse_attention_config={
                    "sparse_num_index_heads": 2,
                    "sparse_index_dim": 32,
                    "sparse_block_size": 8,
                    "sparse_topk_blocks": 2,
                    "sparse_local_block": 1,
                    "sparse_attention_freq": [0, 1, 1],
                },
            )
        ),
    },
}
