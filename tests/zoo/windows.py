"""Sliding windows and chunked attention, beside full attention."""

from tests.zoo.sizes import EXPERTS, WINDOW, Config, Unavailable, sized

_TWO_TYPES = ["sliding_attention", "full_attention"]
_MIXED: Config = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_OF_TYPE = dict.fromkeys(_TWO_TYPES, _DEFAULT_ROPE)

# The last two of six layers reuse the keys and values of earlier ones and have no cache.
_GEMMA3N: Config = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [*_TWO_TYPES, *_TWO_TYPES, *_TWO_TYPES],
    "num_kv_shared_layers": 2,
    "intermediate_size": [96] * 6,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4: Config = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [*_TWO_TYPES, *_TWO_TYPES, *_TWO_TYPES],
    "num_kv_shared_layers": 2,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "tie_word_embeddings": True,
}
_GEMMA3: Config = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 32,
}
_MUSE: Config = {**_MIXED, "layer_rope_theta": [10000.0, 0, 10000.0], "post_norm_eps": 1e-8}

WINDOWS: dict[str, Config | Unavailable] = {
    # The layers behind the caching ones read the keys and values of the last of those.
    "afm7": sized("afm7", hidden_dim=64, num_layers=2, num_kv_reuse_layers=1, num_heads=2, num_kv_heads=2),
    "afmoe": sized("afmoe", _MIXED, EXPERTS, num_shared_experts=1, num_dense_layers=1, route_scale=1.0),
    "cohere2": sized("cohere2", num_hidden_layers=3, sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=1.0),
    "exaone4": sized(
        "exaone4",
        num_hidden_layers=4,
        rope_scaling=None,
        sliding_window=WINDOW,
        sliding_window_pattern="LLLG",
    ),
    "exaone_moe": sized(
        "exaone_moe", _MIXED, EXPERTS, num_shared_experts=1, is_moe_layer=[False, True, True], routed_scaling_factor=1.0
    ),
    "gemma3": {"model_type": "gemma3", "vocab_size": 256, "text_config": sized("gemma3_text", _GEMMA3)},
    "gemma3_text": sized("gemma3_text", _GEMMA3),
    "gemma3n": {"model_type": "gemma3n", "text_config": sized("gemma3n", _GEMMA3N)},
    "gemma4": {"model_type": "gemma4", "vocab_size": 256, "text_config": sized("gemma4_text", _GEMMA4)},
    "gemma4_text": sized("gemma4_text", _GEMMA4),
    "gpt_oss": sized("gpt_oss", EXPERTS, _MIXED),
    "iquestloopcoder": sized("iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
    "laguna": sized("laguna", _MIXED, EXPERTS, num_attention_heads_per_layer=[4, 2, 4]),
    "llama": sized("llama", _MIXED, num_attention_heads=4),
    # Three layers of chunked attention to one of full attention.
    "llama4": {
        "model_type": "llama4",
        "text_config": sized(
            "llama4_text",
            EXPERTS,
            num_experts_per_tok=1,
            num_hidden_layers=4,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
            rope_scaling=None,
            use_qk_norm=True,
            floor_scale=16,
        ),
    },
    "llama4_text": sized(
        "llama4_text", num_hidden_layers=2, intermediate_size_mlp=96, no_rope_layers=[1, 0], use_qk_norm=True
    ),
    "mellum": sized("mellum", _MIXED, EXPERTS, rope_parameters=_ROPE_OF_TYPE),
    "mimo_v2_flash": sized(
        "mimo_v2_flash",
        EXPERTS,
        num_hidden_layers=3,
        hybrid_layer_pattern=[1, 0, 1],
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        n_shared_experts=None,
        n_routed_experts=4,
        routed_scaling_factor=1.0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=1,
        topk_group=1,
        layernorm_epsilon=1e-5,
        swa_rope_theta=10000.0,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        v_head_dim=32,
        swa_head_dim=32,
        swa_v_head_dim=32,
        partial_rotary_factor=0.5,
    ),
    "muse_glimmer": sized("muse_glimmer", _MUSE, output_multiplier=1.0),
    "muse_spark": Unavailable("its fused kernels (norms, routing, gates) exist only for Metal"),
    "olmo3": sized("olmo3", _MIXED),
    "plamo3": sized("plamo3", num_hidden_layers=3, window_size=WINDOW, sliding_window_pattern=2),
    "spark2_5": sized("spark2_5", _MIXED, rope_parameters=_ROPE_OF_TYPE),
    "step3p5": sized(
        "step3p5",
        _MIXED,
        num_attention_groups=2,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=48,
        share_expert_dim=48,
        moe_router_scaling_factor=1.0,
    ),
}
