"""Weights of a model, estimated from its configuration: its matrices, without biases and the towers of other senses."""

from __future__ import annotations

from typing import NamedTuple

from kvlab.common.checks import count, require, shown

from .config import ModelConfig
from .layers import Layer, State, heads_of


class Weights(NamedTuple):
    """Parameters of a decoder: ``embedding`` of the vocabulary, ``experts``, and all ``others``.

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("llama-3.1-8b").weights.parameters
    8030261248
    """

    embedding: int
    experts: int
    others: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(self)


def _attention(config: ModelConfig) -> int:
    hidden, queries = config.number("hidden_size"), config.number("num_attention_heads")
    if config.get("kv_lora_rank") is None:
        heads, k_dim, v_dim = heads_of(config)
        gate = 2 if config.model_type == "qwen3_next" else 1
        return hidden * (queries * (gate * k_dim + v_dim) + heads * (k_dim + v_dim))
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, v_dim = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    rank = config.number("q_lora_rank", 0, least=0)
    wide = queries * (nope + rope)
    query = rank * (hidden + wide) if rank else hidden * wide
    return query + hidden * (latent + rope) + queries * (latent * (nope + v_dim) + v_dim * hidden)


def _recurrent(config: ModelConfig, state: State) -> int:
    hidden = config.number("hidden_size")
    kernel = (state.columns + 1) * (state.channels + 2 * state.groups * state.group)
    if state.kind == "gated delta":
        values = state.heads * config.number("linear_value_head_dim")
        return hidden * (state.channels + values + 2 * state.heads) + kernel + values * hidden
    if state.kind == "conv":
        return 4 * hidden * hidden + kernel
    if state.kind == "mamba":
        rank = -(-hidden // 16)
        return state.channels * (3 * hidden + 2 * rank + 3 * state.head) + kernel
    if state.kind == "lightning":
        return 5 * hidden * hidden
    return hidden * (3 * state.channels + 2 * state.groups * state.group + state.heads) + kernel


def _mlp(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Parameters of the experts of a layer, and of the rest of its MLP."""
    hidden, inner = config.number("hidden_size"), config.get("intermediate_size")
    listed = isinstance(inner, list) and layer < len(inner)
    inner = count(f"intermediate_size[{layer}]", inner[layer], 1, 32) if listed else config.number("intermediate_size")
    experts = config.number("num_experts", 0, least=0)
    dense = layer < config.number("first_k_dense_replace", 0, least=0) or layer in config.listed("mlp_only_layers")
    period = config.number("expert_layer_period", config.number("decoder_sparse_step", 1))
    offset = config.number("expert_layer_offset", period - 1, least=0)
    if experts < 2 or dense or layer % period != offset:
        return 0, 3 * hidden * inner
    wide = config.number("moe_intermediate_size", inner)
    shared = config.number("shared_expert_intermediate_size", config.number("n_shared_experts", 0, least=0) * wide, 0)
    return experts * 3 * hidden * wide, hidden * (experts + 3 * shared)


def weights_of(config: ModelConfig, layers: tuple[Layer, ...]) -> Weights:
    """An estimate of a model's parameters; ValueError that names a field which it needs and that is missing."""
    hidden, words = config.number("hidden_size"), config.number("vocab_size")
    experts, others = 0, hidden
    for layer in layers:
        others += 2 * hidden
        attends = layer.rows or layer.shared is not None
        others += _attention(config) if attends else 0
        others += _recurrent(config, layer.state) if layer.state is not None else 0
        if config.model_type == "nemotron_h":
            others += 2 * hidden * config.number("intermediate_size") if layer.kind == "none" else 0
        elif config.model_type not in ("mamba", "mamba2", "falcon_mamba"):
            routed, rest = _mlp(config, layer.number)
            experts, others = experts + routed, others + rest
    beside = config.number("hidden_size_per_layer_input", 0, least=0) * len(layers)
    others += beside * (config.number("vocab_size_per_layer_input", words) + 3 * hidden)
    return Weights(words * hidden * (1 if config.get("tie_word_embeddings") else 2), experts, others)


def weight_bytes(config: ModelConfig, weights: Weights) -> int:
    """Bytes of the weights in the model's type, or as ``quantization_config`` says: fp8, or mxfp4 of the experts.

    ValueError for another quantisation, whose bytes must be given.
    """
    number = {"bf16": 2, "fp16": 2, "fp32": 4}[config.dtype]
    quantised = config.get("quantization_config") or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if not quantised:
        return number * weights.parameters
    must = "given where quantization_config has another quant_method than fp8 or mxfp4"
    require(method in ("fp8", "mxfp4"), f"weights is None and quant_method is {shown(method)}", must)
    if method == "fp8":
        return number * weights.embedding + weights.experts + weights.others
    return number * (weights.embedding + weights.others) + weights.experts * 17 // 32
