"""Configurations of public models, written down as numbers: what their ``config.json`` says of layers and heads."""

from __future__ import annotations

from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """Public model: the numbers of its configuration that a cache depends on, and whose they are.

    parameters    of the decoder, as its makers state them; rounded

    >>> from kvlab.formats import MODELS
    >>> MODELS["mistral-7b"].source, MODELS["mistral-7b"].config["sliding_window"]
    ('mistralai/Mistral-7B-v0.1: config.json', 4096)
    """

    name: str
    source: str
    parameters: float
    config: dict[str, Any]


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": words, "dtype": "bfloat16", **more,
    }


MODELS: dict[str, PublicModel] = {
    "llama-3.1-8b": PublicModel(
        "Llama-3.1-8B", "meta-llama/Llama-3.1-8B: config.json", 8.03e9, _llama(32, 4096, 32, 8, 14336, 128256)
    ),
    "mistral-7b": PublicModel(
        "Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1: config.json", 7.24e9,
        _llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096),
    ),
    "qwen3-8b": PublicModel(
        "Qwen3-8B", "Qwen/Qwen3-8B: config.json", 8.19e9,
        _llama(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128, sliding_window=None,
               use_sliding_window=False, max_window_layers=36),
    ),
    "smollm2-135m": PublicModel(
        "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M: config.json", 134.5e6,
        _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    ),
    "gemma-2-9b": PublicModel(
        "Gemma-2-9B", "google/gemma-2-9b: config.json", 9.24e9,
        _llama(42, 3584, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256, sliding_window=4096),
    ),
    "gemma-3-4b": PublicModel(
        "Gemma-3-4B", "google/gemma-3-4b-it: config.json, whose text_config leaves heads to their defaults", 3.88e9,
        {"model_type": "gemma3", "dtype": "bfloat16", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
            "sliding_window": 1024}},
    ),
    "gemma-3n-e4b": PublicModel(
        "Gemma-3n-E4B", "google/gemma-3n-E4B: config.json", 6.87e9,
        {"model_type": "gemma3n", "dtype": "bfloat16", "text_config": {
            "model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_size": 2048, "intermediate_size": 16384,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
            "num_kv_shared_layers": 15, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "vocab_size": 262400, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256}},
    ),
    "gpt-oss-20b": PublicModel(
        "gpt-oss-20b", "openai/gpt-oss-20b: config.json", 20.9e9,
        _llama(24, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, sliding_window=128,
               layer_types=["sliding_attention", "full_attention"] * 12, num_local_experts=32,
               quantization_config={"quant_method": "mxfp4"}),
    ),
    "deepseek-v3": PublicModel(
        "DeepSeek-V3", "deepseek-ai/DeepSeek-V3: config.json", 671e9,
        _llama(61, 7168, 128, 128, 18432, 129280, model_type="deepseek_v3", q_lora_rank=1536, kv_lora_rank=512,
               qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=1,
               n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
               quantization_config={"quant_method": "fp8"}),
    ),
    "qwen3-next-80b": PublicModel(
        "Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct: config.json", 80e9,
        _llama(48, 2048, 16, 2, 5120, 151936, model_type="qwen3_next", head_dim=256, full_attention_interval=4,
               linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
               linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512, moe_intermediate_size=512,
               shared_expert_intermediate_size=512),
    ),
    "jamba-v0.1": PublicModel(
        "Jamba-v0.1", "ai21labs/Jamba-v0.1: config.json", 51.6e9,
        _llama(32, 4096, 32, 8, 14336, 65536, model_type="jamba", attn_layer_period=8, attn_layer_offset=4,
               expert_layer_period=2, expert_layer_offset=1, num_experts=16, mamba_d_state=16, mamba_d_conv=4,
               mamba_expand=2),
    ),
    "nemotron-h-8b": PublicModel(
        "Nemotron-H-8B", "nvidia/Nemotron-H-8B-Base-8K: config.json", 8.1e9,
        _llama(52, 4096, 32, 8, 21504, 131072, model_type="nemotron_h", attention_head_dim=128, mamba_num_heads=128,
               mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
               hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"),
    ),
}
"""Public models by a short name, which :func:`kvlab.formats.kv_budget` takes for a configuration."""
