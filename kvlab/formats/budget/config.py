"""Fields of a Hugging Face model configuration: read from a dict or a file, under the names that models give them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.common.checks import count, require, shown

from .models import MODELS

NESTED = ("text_config", "llm_config", "language_config")
"""Where models of several modalities keep the configuration of their decoder."""
OUTER = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields of the outer configuration that count for the decoder too."""
SYNONYMS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "block_ff_dim", "n_inner"),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head", "mamba_headdim"),
    "mamba_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "mamba_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "mamba_conv": ("mamba_d_conv", "conv_kernel"),
    "mamba_expand": ("mamba_expand", "expand"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
"""A field and the names that it has."""
_MAMBA2 = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_QWEN = {"use_sliding_window": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
               "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
                    "sliding_window_pattern": 6, "tie_word_embeddings": True, "vocab_size": 262208},
    "gemma3n_text": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
                     "sliding_window_pattern": 5, "num_kv_shared_layers": 15, "tie_word_embeddings": True},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
                    "sliding_window_pattern": 6, "global_head_dim": 512, "tie_word_embeddings": True},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "olmo3": {"sliding_window_pattern": 4}, "vaultgemma": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "qwen2": _QWEN, "qwen2_moe": _QWEN, "qwen3": {**_QWEN, "head_dim": 128}, "qwen3_moe": {**_QWEN, "head_dim": 128},
    "qwen3_5_text": {"full_attention_interval": 4}, "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
                   "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                   "linear_conv_kernel_dim": 4},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
                    "no_rope_layer_interval": 4},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
              "mamba_d_conv": 4, "mamba_expand": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {**_MAMBA2, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
    "granitemoehybrid": _MAMBA2, "bamba": _MAMBA2,
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
                   "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4},
}
"""What files leave out, by ``model_type``: defaults of the configuration classes of huggingface/transformers."""
REFUSED = {
    "use_cla": "absent: layers that share K and V across the model are not counted",
    "attn_config": "absent: heads that lie in a field of their own are not counted",
    "linear_attn_config": "absent: Kimi's delta attention is not counted",
    "block_configs": "absent: blocks of different sizes are not counted",
    "per_layer_config": "absent: layers of different sizes are not counted",
    "hybrid_layer_pattern": "absent: sliding layers with heads of their own are not counted",
    "swa_num_key_value_heads": "absent: sliding layers with heads of their own are not counted",
    "compress_ratios": "absent: compressed caches are not counted",
    "cross_attention_layers": "absent: cross attention keeps keys of the encoder's length",
    "is_encoder_decoder": "False: cross attention keeps keys of the encoder's length",
}
"""Fields that change what a cache holds in a way that is not counted, and what they must be."""
MOST_LAYERS = 1 << 12


class ModelConfig:
    """Fields of the decoder of a configuration. ValueError for one that is no integer, missing, or refused.

    >>> config = ModelConfig({"n_layer": 12, "n_head": 12})
    >>> config.number("num_hidden_layers"), config.get("sliding_window")
    (12, None)
    """

    def __init__(self, fields: Mapping[str, Any], name: str = "") -> None:
        outer = dict(fields)
        inner = next((outer[key] for key in NESTED if isinstance(outer.get(key), Mapping)), None)
        own = outer if inner is None else {key: outer[key] for key in OUTER if key in outer} | dict(inner)
        for field, must in REFUSED.items():
            for held in (outer, own):
                require(not held.get(field), f"{field} is {shown(held.get(field))}", must)
        self.model_type = str(own.get("model_type") or "")
        what = f"model_type is {shown(self.model_type)}"
        require(self.model_type != "longcat_flash", what, "another: layers with two attentions are not counted")
        if self.model_type == "mamba2":
            own = {{"num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim"}.get(k, k): own[k] for k in own}
        self.name = name or str(outer.get("_name_or_path") or self.model_type or "model")
        self._own, self._default = own, DEFAULTS.get(self.model_type, {})

    def named(self, field: str) -> tuple[str, Any]:
        """The name that a field has here, and its value; None where it is missing or null and has no default."""
        names = SYNONYMS.get(field, (field,))
        for held in (self._own, self._default):
            for name in names:
                if held.get(name) is not None:
                    return name, held[name]
        return names[0], None

    def get(self, field: str) -> Any:
        """The value of a field, or None."""
        return self.named(field)[1]

    def recurrent(self) -> str | None:
        """The first field that speaks of recurrent layers, or None."""
        given = {**self._default, **self._own}
        return next((k for k in given if k.startswith(("linear_", "mamba_", "ssm_")) and given[k] is not None), None)

    def number(self, field: str, default: int | None = None, least: int = 1) -> int:
        """A field as an integer; ValueError that names it if it is none, too small or, without a default, missing."""
        name, value = self.named(field)
        if value is None:
            require(default is not None, f"{name} is missing", f"given for {self.name}")
            value = default
        return count(name, value, least, 32)

    def listed(self, field: str) -> set[int]:
        """A field as numbers of layers, none where it is missing; ValueError that names it if it is no list of them."""
        name, value = self.named(field)
        require(value is None or isinstance(value, list | tuple), f"{name} is {shown(value)}", "a list of layers")
        return {count(f"{name}[{at}]", one) for at, one in enumerate(value or ())}

    @property
    def layers(self) -> int:
        """Number of layers, at most 4096."""
        number = self.number("num_hidden_layers")
        require(number <= MOST_LAYERS, f"num_hidden_layers is {number}", f"at most {MOST_LAYERS}")
        return number

    @property
    def dtype(self) -> str:
        """Model's type of numbers: ``"bf16"``, ``"fp16"`` or ``"fp32"``; bfloat16 where the file names none."""
        value = self.get("dtype") or self.get("torch_dtype") or "bfloat16"
        names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        word = str(value).removeprefix("torch.")
        require(word in names, f"dtype is {shown(value)}", f"one of {', '.join(names)}")
        return names[word]


def read_config(config: Any) -> ModelConfig:
    """The fields of ``config``: a dict, an object with ``to_dict``, a file, its folder, or a name of :data:`MODELS`.

    >>> read_config("qwen3-8b").layers
    36
    """
    if isinstance(config, Mapping):
        return ModelConfig(config)
    if hasattr(config, "to_dict"):
        return ModelConfig(config.to_dict(), str(getattr(config, "_name_or_path", "")))
    accepted = f"a configuration, its file, or one of {', '.join(MODELS)}"
    require(isinstance(config, str | Path), f"config is {shown(config)}", accepted)
    if str(config).lower() in MODELS:
        known = MODELS[str(config).lower()]
        return ModelConfig(known.config, known.name)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    require(path.is_file(), f"config is {shown(str(config))}", accepted)
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as reason:
        raise ValueError(f"config is {shown(str(config))}: must be JSON: {reason}") from None
    require(isinstance(fields, dict), f"config is {shown(str(config))}", "a JSON object")
    return ModelConfig(fields, str(fields.get("_name_or_path") or path.parent.resolve().name))
