"""Tiny configurations for every architecture module of mlx-lm.

An entry is what a checkpoint's `config.json` would say, on top of `BASE`. mlx-lm's own argument
classes ignore names that they don't know, so `BASE` can hold the common names for all of them.
Sizes: hidden 64, two query heads and one KV head of 32, windows of 48 tokens, so that a prompt of
a few hundred tokens wraps every window and a forward pass takes milliseconds. Head dimensions are
multiples of 32, which KV quantisation with group size 32 needs.
"""

from __future__ import annotations

from typing import Any

VOCAB = 256
WINDOW = 48
CHUNK = 40

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}

MOE: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}

# Multi-head latent attention: the cache holds a latent of 32 and a rotary part of 32.
MLA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

SCALES: dict[str, Any] = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.8,
}

SLIDE = "sliding_attention"
FULL = "full_attention"

GEMMA4_TEXT: dict[str, Any] = {
    "num_hidden_layers": 6,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "layer_types": [SLIDE, SLIDE, FULL, SLIDE, SLIDE, FULL],
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDE: {"rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}

LFM2_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", FULL, "conv", FULL],
}

QWEN3_MOE: dict[str, Any] = MOE | {"n_shared_experts": 0}

LLAMA4_TEXT: dict[str, Any] = MOE | {
    "num_hidden_layers": 4,
    "attention_chunk_size": CHUNK,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
}

LONGCAT: dict[str, Any] = (
    MOE
    | MLA
    | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    }
)

HUNYUAN_ROPE = {"alpha": 50.0, "factor": 1.0, "type": "dynamic"}

# `text`: the values go under "text_config", as in checkpoints of vision models.
CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": MOE,
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "hidden_dim_scale_factor": 1.5,
    },
    "afmoe": MOE
    | {"num_hidden_layers": 4, "num_dense_layers": 1, "layer_types": [SLIDE, FULL, SLIDE, FULL]},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [1]},
    "bailing_hybrid": MOE
    | MLA
    | {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "use_qk_norm": True,
    },
    "bailing_moe": MOE,
    "bailing_moe_linear": MOE
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_group_size": 2,
        "group_norm_size": 1,
    },
    "bailing_moe_v3": MOE
    | MLA
    | {
        "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 32,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
    },
    "bitnet": {},
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 2,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": MOE | {"num_key_value_heads": 2},
    "deepseek_v2": MOE
    | MLA
    | {
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
    },
    "deepseek_v3": MOE | MLA,
    "deepseek_v32": MOE | MLA | {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 64},
    "deepseek_v41": MOE
    | {
        "num_hidden_layers": 6,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (0, 2, 2, 2, 1, 1),
        "kv_source_layer_ids": (1, 4),
        "index_source_layer_ids": (1, 2, 4, 5),
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 16,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "rms_norm_eps": 1e-6,
    },
    "dots1": MOE,
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": MOE
    | {"use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone": {"num_layers": 3},
    "exaone4": {"num_hidden_layers": 4, "rope_scaling": None, "sliding_window_pattern": "LLGL"},
    "exaone_moe": MOE | {"layer_types": [SLIDE, SLIDE, FULL], "is_moe_layer": [False, True, True]},
    "falcon_h1": MAMBA,
    "gear": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDE, "conv_mixer", FULL, "conv_mixer"],
        "conv_L_cache": 3,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32.0},
    "gemma3": {
        "text": {
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 32.0,
            "sliding_window_pattern": 2,
        }
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 32.0,
        "sliding_window_pattern": 2,
    },
    "gemma3n": {
        "text": {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "rope_local_base_freq": 1000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": [SLIDE, FULL, SLIDE, FULL, SLIDE, FULL],
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text": GEMMA4_TEXT},
    "gemma4_text": GEMMA4_TEXT,
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": MOE | {"rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": MOE | MLA | {"num_nextn_predict_layers": 0},
    "glm_moe_dsa": MOE
    | MLA
    | {
        "index_head_dim": 64,
        "index_n_heads": 2,
        "index_topk": 64,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": {"n_ctx": 1024, "n_embd": 64, "n_head": 2, "n_layer": 3, "n_positions": 1024},
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 3,
        "n_inner": 96,
        "n_head": 2,
        "n_positions": 1024,
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": MOE | {"num_hidden_layers": 4},
    "gptj": {"n_embd": 64, "n_positions": 1024, "n_head": 2, "rotary_dim": 16, "n_layer": 3},
    "granite": SCALES,
    "granitemoe": MOE | SCALES,
    "granitemoehybrid": MOE
    | SCALES
    | MAMBA
    | {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "helium": {},
    "hunyuan": MOE
    | {
        "num_hidden_layers": 4,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": HUNYUAN_ROPE,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": HUNYUAN_ROPE},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"num_hidden_layers": 2, "loop_num": 2, "loop_window_size": WINDOW},
    "jamba": MOE
    | MAMBA
    | {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text": MOE | MLA},
    "kimi_k3": {
        "text": MOE
        | MLA
        | {
            "num_hidden_layers": 4,
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
            "attn_res_block_size": 2,
        }
    },
    "kimi_linear": MOE
    | MLA
    | {
        "num_hidden_layers": 4,
        "model_max_length": 4096,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi_vl": {"text": MOE | MLA},
    "laguna": MOE
    | {
        "num_hidden_layers": 4,
        "layer_types": [FULL, SLIDE, FULL, SLIDE],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads_per_layer": [2, 2, 2, 2],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            SLIDE: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
    "lfm2": LFM2_TEXT,
    "lfm2-vl": {"text": LFM2_TEXT | {"model_type": "lfm2"}},
    "lfm2_moe": MOE | LFM2_TEXT | {"use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {"block_size": 1024, "n_embd": 64, "n_head": 2, "n_kv_heads": 1, "n_layer": 3},
    "llama": {},
    "llama4": {"text": LLAMA4_TEXT},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1], "use_qk_norm": True},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba": {
        "intermediate_size": 64,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 10.0),
        "time_step_rank": 4,
    },
    "mellum": MOE
    | {
        "layer_types": [SLIDE, FULL, SLIDE],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500000.0},
            SLIDE: {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "mimo": {},
    "mimo_v2_flash": MOE
    | {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": MLA
    | {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
        },
    },
    "minimax": MOE | {"rotary_dim": 16},
    "minimax_m3_vl": {
        "text": MOE
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "rotary_dim": 16,
            "moe_layer_freq": [0, 1, 1],
            "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 1,
            "index_head_dim": 32,
            "index_block_size": 16,
            "index_topk_blocks": 6,
        }
    },
    "ministral3": {
        "layer_types": [SLIDE, FULL, SLIDE],
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral3": {"text": {"model_type": "llama"}},
    "mistral4": MOE
    | MLA
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 128,
        },
    },
    "mixtral": MOE,
    "muse_glimmer": {
        "post_norm_eps": 1e-6,
        "layer_types": [SLIDE, SLIDE, FULL],
        "qk_scale_factor": 2.0,
    },
    "muse_spark": {
        "image_token_id": VOCAB - 1,
        "text": MOE
        | {
            "post_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_rope_theta": [10000.0, 10000.0, 0],
            "layer_types": [SLIDE, SLIDE, FULL],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.7,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        },
    },
    "nanbeige": {"num_hidden_layers": 2, "num_loops": 2},
    "nanochat": {"num_key_value_heads": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "hidden_size": 64,
        "block_configs": [
            {
                "attention": {
                    "n_heads_in_group": 2,
                    "no_op": no_attention,
                    "replace_with_linear": False,
                },
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            }
            for no_attention in (False, True, False)
        ],
    },
    "nemotron_h": MOE
    | MAMBA
    | {
        "num_hidden_layers": 5,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 10.0),
        "hybrid_override_pattern": ["M", "*", "-", "M", "*"],
    },
    "olmo": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 2,
        "mlp_hidden_size": 96,
        "embedding_size": VOCAB,
    },
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4},
    "olmo_hybrid": GATED_DELTA
    | {
        "linear_allow_neg_eigval": False,
        "layer_types": ["linear_attention", FULL, "linear_attention", FULL],
    },
    "olmoe": MOE | {"num_key_value_heads": 2},
    "openelm": {
        "model_dim": 64,
        "num_transformer_layers": 3,
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [0.5, 1.0, 1.5],
        "num_query_heads": [2, 2, 4],
        "num_kv_heads": [1, 1, 2],
    },
    "phi": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "num_hidden_layers": 4,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 3,
    },
    "phimoe": MOE
    | {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 4096,
        }
    },
    "phixtral": MOE
    | {"num_vocab": VOCAB, "model_dim": 64, "num_heads": 2, "num_layers": 3, "rotary_dim": 16},
    "pixtral": {"text": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": MAMBA
    | {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 32,
        "mamba_num_heads": 2,
        "mamba_step": 2,
        "attention_window_size": WINDOW,
        "full_attention_idx": [3],
    },
    "plamo3": {"num_hidden_layers": 4, "window_size": WINDOW, "sliding_window_pattern": 2},
    # The packed Hadamard layers need widths of 512.
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "block": block, "embedding": embedding, "dtype": "float16"}
            for path, block, embedding in (
                ("model.embed_tokens", 512, True),
                ("model.layers.0.linear_attn.in_proj_qkv", 512, False),
                ("model.layers.1.mlp.down_proj", 0, False),
            )
        ],
        "text": GATED_DELTA
        | {
            "hidden_size": 512,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "head_dim": 32,
        },
    },
    "qwen": {"kv_channels": 32, "intermediate_size": 192},
    "qwen2": {},
    "qwen2_moe": MOE,
    "qwen2_vl": {"text": {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_5": {"text": GATED_DELTA},
    "qwen3_5_moe": {"text": GATED_DELTA | MOE},
    "qwen3_moe": MOE,
    "qwen3_next": GATED_DELTA | MOE,
    "qwen3_vl": {"text": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text": MOE | {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "intermediate_size": 128,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "solar_open": MOE | {"partial_rotary_factor": 1.0},
    "spark2_5": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDE, SLIDE, SLIDE, FULL],
        "rope_parameters": {
            SLIDE: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.25},
        },
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {},
    "step3p5": {
        "num_hidden_layers": 4,
        "num_attention_groups": 1,
        "rope_theta": [10000.0] * 4,
        "layer_types": [FULL, SLIDE, SLIDE, FULL],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "2,3",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": MLA,
}

# Other layer mixes of the same modules, and the rotating cache of `max_kv_size`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama+sliding": ("llama", {"num_hidden_layers": 4, "layer_types": [SLIDE, FULL, SLIDE, FULL]}),
    "mixtral+max_kv_size": ("mixtral", {}),
    "nemotron_h+moe": (
        "nemotron_h",
        {
            "hybrid_override_pattern": ["M", "E", "*", "M", "-"],
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "minimax_m3_vl+dense": ("minimax_m3_vl", {"text": {"index_block_size": None}}),
}
MAX_KV_SIZE = {"mixtral+max_kv_size": 64}

NOT_MODELS: dict[str, str] = {
    "activations": "activation functions",
    "base": "argument class and attention masks",
    "bitlinear_layers": "ternary linear layer of bitnet",
    "cache": "the cache classes",
    "gated_delta": "gated delta rule kernels",
    "mla": "per-head linear layer of latent attention",
    "pipeline": "pipeline parallel mixin",
    "rope_utils": "rotary embeddings",
    "ssm": "state space kernels",
    "switch_layers": "expert layers",
}
