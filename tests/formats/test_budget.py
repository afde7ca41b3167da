"""Budgets of caches. Rests on products written by hand from public configurations, on the bytes of the catalogue of
formats, on a request walked token by token, and on numbers that vLLM's users have recorded."""

from __future__ import annotations

import json
import re
from math import prod

import numpy as np
import pytest

from kvlab.formats import MODELS, KVGroup, known_format, kv_budget

TOKENS = 10_001  # 626 pages of 16
FULL = 626 * 16
# (layers, bytes of a token in one, tokens held, slots of its pages) of each group of rows; then bytes of a state.
BY_HAND = {
    "llama-3.1-8b": ([(32, 2 * 8 * 128 * 2, TOKENS, FULL)], 0),
    "mistral-7b": ([(32, 2 * 8 * 128 * 2, 4096, 257 * 16)], 0),
    "qwen3-8b": ([(36, 2 * 8 * 128 * 2, TOKENS, FULL)], 0),
    "smollm2-135m": ([(30, 2 * 3 * 64 * 2, TOKENS, FULL)], 0),
    "gemma-2-9b": ([(21, 2 * 8 * 256 * 2, 4096, 257 * 16), (21, 2 * 8 * 256 * 2, TOKENS, FULL)], 0),
    "gemma-3-4b": ([(29, 2 * 4 * 256 * 2, 1024, 65 * 16), (5, 2 * 4 * 256 * 2, TOKENS, FULL)], 0),
    "gemma-3n-e4b": ([(16, 2 * 2 * 256 * 2, 512, 33 * 16), (4, 2 * 2 * 256 * 2, TOKENS, FULL)], 0),
    "gpt-oss-20b": ([(12, 2 * 8 * 64 * 2, 128, 9 * 16), (12, 2 * 8 * 64 * 2, TOKENS, FULL)], 0),
    "deepseek-v3": ([(61, (512 + 64) * 2, TOKENS, FULL)], 0),
    "qwen3-next-80b": (
        [(12, 2 * 2 * 256 * 2, TOKENS, FULL)], 36 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3) * 2
    ),
    "jamba-v0.1": ([(4, 2 * 8 * 128 * 2, TOKENS, FULL)], 28 * (8192 * 16 + 8192 * 3) * 2),
    "nemotron-h-8b": (
        [(4, 2 * 8 * 128 * 2, TOKENS, FULL)], 24 * (128 * 64 * 128 + (128 * 64 + 2 * 8 * 128) * 3) * 2
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_public_models_take_what_the_hand_says(name: str) -> None:
    rows, state = BY_HAND[name]
    budget = kv_budget(name)
    request = budget.request(TOKENS)
    assert budget.bytes_per_token == sum(layers * token for layers, token, _, _ in rows)
    assert budget.growing_bytes_per_token == sum(layers * token for layers, token, held, _ in rows if held == TOKENS)
    assert budget.state_bytes == state
    assert request.data == state + sum(prod(row[:3]) for row in rows)
    assert request.nbytes == state + sum(layers * token * slots for layers, token, _, slots in rows)
    assert request.padding == 0
    assert budget.weights.parameters == pytest.approx(MODELS[name].parameters, rel=0.01)
    assert len(budget.per_layer) == MODELS[name].config.get("text_config", MODELS[name].config)["num_hidden_layers"] + (
        name == "deepseek-v3"  # its layer that predicts a further token is listed and not counted
    )


def test_weights_of_llama_are_exact() -> None:
    """8030261248 elements lie in the file of its weights, the norms among them."""
    assert kv_budget("llama-3.1-8b").weights.parameters == 8_030_261_248


def test_a_page_of_one_size_is_the_one_that_vllm_has_set() -> None:
    """vLLM, issue 24280: 672 tokens for Nemotron-Nano-9B-v2, whose Mamba2 state decides it. vllm-ascend, issue 7393:
    Qwen3.5-35B on 8 ranks keeps 262144 bytes of recurrent state and 512 of a token's K."""
    nano = {
        "num_hidden_layers": 2, "hybrid_override_pattern": "M*", "hidden_size": 4480, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4,
    }
    state, rows = kv_budget(nano, uniform_pages=True).groups
    assert (rows.page_tokens, rows.page_bytes, rows.page_data) == (672, 672 * 4096, 672 * 4096)
    assert (state.page_bytes, state.page_data) == (672 * 4096, (128 * 80 * 128 + (10240 + 2048) * 3) * 2)
    assert rows.format is not None
    assert rows.format.nbytes == rows.page_bytes
    qwen = {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
    state, rows = kv_budget(qwen, degree=8).groups
    assert (state.page_data, rows.token_bytes, rows.replicas) == (262144 + 8192 // 8 * 3 * 2, 2 * 512, 4)


@pytest.mark.parametrize(
    "dtype, known",
    [("bf16", "flash_attention.paged"), ("fp16", "llama_cpp.cells"), ("nvfp4", "flashinfer.nvfp4"),
     ("int8_per_token_head", "vllm.int8_per_token_head"), ("fp8_per_token_head", "aiter.shuffle_fp8"),
     ("int4", "lmdeploy.int4")],
)
def test_a_page_has_the_bytes_of_the_catalogue(dtype: str, known: str) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 192}
    theirs = known_format(known, pages=1, page_size=32, heads=6, dim=192)
    (group,) = kv_budget(config, kv_dtype=dtype, page_size=32).groups
    assert (group.page_bytes, group.token_bytes) == (theirs.nbytes, theirs.bytes_per_token)


def test_rows_of_mla_and_of_its_indexer() -> None:
    for dtype, row in {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656, "nvfp4": 352}.items():
        assert kv_budget("deepseek-v3", kv_dtype=dtype, page_size=64, degree=8).bytes_per_token == 61 * row
    sparse = {**MODELS["deepseek-v3"].config, "index_head_dim": 128}
    assert [g.token_bytes for g in kv_budget(sparse, kv_dtype="fp8_ds_mla", mtp=True).groups] == [656, 132] * 2
    assert [len(g.layers) for g in kv_budget(sparse, mtp=True).groups] == [61, 61, 1, 1]


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("keeps", [1, 5, 8, 12])
def test_pages_are_the_most_that_a_request_ever_holds(size: int, keeps: int) -> None:
    """A request grows token by token; what lies before its window, or before its chunk, is freed by whole pages."""
    last = np.arange(60)
    kinds = {
        "sliding": np.maximum(last - keeps + 1, 0), "chunked": last // keeps * keeps, "full": np.zeros(60, np.int64)
    }
    for kind, first in kinds.items():
        span = None if kind == "full" else keeps
        group = KVGroup(kind, (0, 1), size, 10 * size, 10 * size, span, keeps if kind == "chunked" else 0)
        most = np.maximum.accumulate(last // size - first // size + 1)
        assert [group.pages(tokens) for tokens in range(61)] == [0, *most.tolist()], kind
        data = np.maximum.accumulate(last - first + 1) * 20
        assert [group.data(tokens) for tokens in range(61)] == [0, *data.tolist()], kind


def test_waste_is_told_apart_and_adds_up() -> None:
    budget = kv_budget("gemma-3n-e4b", page_size=48, align=100_000, step_tokens=64)
    request, parts = budget.request(1000), [budget.request(1000, group) for group in budget.groups]
    assert [sum(column) for column in zip(*(part[1:] for part in parts), strict=True)] == list(request[1:])
    slid, full = budget.groups
    assert (slid.span, slid.pages(1000), full.pages(1000)) == (511 + 64, 13, 21)
    assert request.padding == (16 * 13 + 4 * 21) * (100_000 - 48 * 2048)
    assert request.unfilled == (16 * (13 * 48 - 575) + 4 * (21 * 48 - 1000)) * 2048
    assert sum(layer.page for layer in budget.per_layer) == 20 * 100_000
    assert {layer.shared for layer in budget.per_layer[20:]} == {18, 19}


def test_ranks_share_heads_or_hold_the_same() -> None:
    llama = {degree: kv_budget("llama-3.1-8b", degree=degree) for degree in (1, 4, 8, 16)}
    assert [one.bytes_per_token for one in llama.values()] == [131072, 32768, 16384, 16384]
    assert [one.groups[0].replicas for one in llama.values()] == [1, 1, 1, 2]
    assert "2 of 16 ranks hold the same" in llama[16].report()
    state = kv_budget("nemotron-h-8b", degree=16).groups[0]  # its 8 groups are on two ranks each
    assert state.page_data == (128 // 16 * 64 * 128 + (8192 + 2 * 16 * 128) // 16 * 3) * 2
    assert kv_budget("nemotron-h-8b", state_dtype="fp32").groups[0].page_data == 128 * 64 * 128 * 4 + 10240 * 3 * 2


def test_the_longest_request_is_the_last_that_fits() -> None:
    budget = kv_budget("gpt-oss-20b")
    fit = budget.fit("24GB", 5000)
    assert fit.room == int(24e9 * 0.9) - fit.weights
    assert fit.requests == fit.room // budget.request(5000).nbytes
    assert fit.longest is not None
    assert budget.request(fit.longest).nbytes <= fit.room < budget.request(fit.longest + 1).nbytes
    assert kv_budget("mistral-7b").fit("80GiB", 9).longest is None
    assert kv_budget("llama-3.1-8b", degree=2).fit(10**10, 9).weights == 2 * 8_030_261_248 // 2
    none = kv_budget("llama-3.1-8b").fit("1GiB", 9, weights="2GiB", utilisation=0.5)
    assert (none.room, none.requests, none.longest) == (-3 * 2**29, 0, 0)


PLAIN = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WINDOW = {"sliding_window": 32}


@pytest.mark.parametrize(
    "more, kinds",
    [
        ({}, "full " * 8),
        (WINDOW, "sliding " * 8),
        ({**WINDOW, "use_sliding_window": False}, "full " * 8),
        ({**WINDOW, "use_sliding_window": True, "max_window_layers": 6}, "full " * 6 + "sliding " * 2),
        ({**WINDOW, "sliding_window_pattern": 4}, ("sliding " * 3 + "full ") * 2),
        ({**WINDOW, "sliding_window_pattern": "LLG"}, "sliding sliding full " * 2 + "sliding sliding"),
        ({"model_type": "gpt_oss"}, "sliding full " * 4),
        ({"attention_chunk_size": 8, "no_rope_layer_interval": 4}, ("chunked " * 3 + "full ") * 2),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0] * 4}, "chunked full " * 4),
        ({"model_type": "lfm2", "hidden_size": 96, "full_attn_idxs": [1, 6]},
         "conv full conv conv conv conv full conv"),
        ({"model_type": "falcon_h1", "mamba_n_heads": 16}, "full+mamba2 " * 8),
        ({"model_type": "minimax", "attn_type_list": [0, 0, 0, 1] * 2}, ("lightning " * 3 + "full ") * 2),
        ({"model_type": "minimax", "linear_attn_alpha_factor": 1}, "full lightning " * 4),
        ({"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
         ("gated+ " * 3 + "full ") * 2),
        ({"model_type": "mamba", "hidden_size": 96}, "mamba " * 8),
        ({"layers_block_type": ["attention", "moe"] * 4}, "full none " * 4),
    ],
)
def test_kinds_of_layers(more: dict, kinds: str) -> None:
    """Rests on the configuration classes of transformers, which make ``layer_types`` of these fields."""
    found = [layer.kind for layer in kv_budget({**PLAIN, **more}).per_layer]
    assert [kind.replace("gated delta", "gated+") for kind in found] == kinds.split()


@pytest.mark.parametrize(
    "more, words",
    [
        ({"layer_types": ["attention"] * 7 + ["retention"]}, r"layer_types\[7\] is 'retention': must be one of full"),
        ({"layers_block_type": [["mamba"]] * 8}, r"layers_block_type\[0\] is \['mamba'\]: must be"),
        ({"hybrid_override_pattern": "MX"}, r"hybrid_override_pattern\[1\] is 'X': must be one of M"),
        ({"block_types": ["recurrent"]}, r"block_types\[0\] is 'recurrent'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers: must be 8"),
        ({"layer_types": 3}, "layer_types is 3: must be a list"),
        ({"layer_types": ["mamba"] * 8}, "layer 0 is recurrent and linear_num_value_heads and mamba_d_state are"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True: must be False: cross attention"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config is .*: must be absent"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing: must be given"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5: must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be at most 4096"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: must be a divisor of 4"),
        ({"head_dim": 0}, "head_dim is 0: must be at least 1"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers is 8: must be below"),
        ({**WINDOW, "sliding_window_pattern": 8, "num_kv_shared_layers": 1}, "layer 7 is a full one: must be after"),
        ({"sliding_window": 4, "sliding_window_pattern": "LX"}, r"sliding_window_pattern\[1\] is 'X'"),
        ({"dtype": "int3"}, "dtype is 'int3': must be one of"),
        ({**WINDOW, "model_type": "cwm"}, "layer_types is missing and sliding_window is 32: must be given for cwm"),
        ({"model_type": "zamba2", "mamba_d_state": 64}, "layer_types is missing and mamba_d_state is given: must be"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads is 2: must be absent"),
        ({"model_type": "longcat_flash"}, "model_type is 'longcat_flash': must be another"),
        ({"full_attn_idxs": 5}, "full_attn_idxs is 5: must be a list"),
    ],
)
def test_bad_configurations_name_the_field(more: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kv_budget({**PLAIN, **more})


@pytest.mark.parametrize(
    "how, words",
    [
        ({"kv_dtype": "fp3"}, "kv_dtype is 'fp3': must be auto or one of"),
        ({"kv_dtype": "fp8_ds_mla"}, "kv_dtype is 'fp8_ds_mla': must be one of .* without MLA"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'"),
        ({"degree": 3}, "degree is 3: must be a divisor or a multiple of 2 KV heads"),
        ({"page_size": 0}, "page_size is 0"),
        ({"align": True}, "align is True"),
        ({"uniform_pages": 1}, "uniform_pages is 1: must be True or False"),
        ({"mtp": None}, "mtp is None"),
    ],
)
def test_bad_arguments_are_named(how: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kv_budget(PLAIN, **how)


def test_what_is_asked_of_a_budget_is_checked(tmp_path) -> None:
    budget = kv_budget({**PLAIN, "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
                        "quantization_config": {"quant_method": "awq"}})
    for call, words in (
        (lambda: budget.request(-1), "tokens is -1"),
        (lambda: budget.fit("80 parsecs", 1, weights=0), "memory is '80 parsecs': must be a number of bytes"),
        (lambda: budget.fit("80GB", 1), "weights is None and quant_method is 'awq': must be given"),
        (lambda: budget.fit("80GB", 1, weights=0, utilisation=1.5), "utilisation is 1.5"),
        (lambda: kv_budget(PLAIN).fit("80GB", 1), "hidden_size is missing"),
        (lambda: kv_budget("no-such-model"), "config is 'no-such-model': must be a configuration, its file, or one of"),
        (lambda: kv_budget("jamba-v0.1", degree=3), "degree is 3: must be a divisor of 8192 heads of mamba layers"),
        (lambda: kv_budget({**PLAIN, "head_dim": 72}, kv_dtype="nvfp4"), "head_dim of k is 72: must be a mul"),
        (lambda: kv_budget({**PLAIN, "kv_lora_rank": 9, "qk_rope_head_dim": 8}, kv_dtype="nvfp4"), "9, 8: must be 512"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    file = tmp_path / "config.json"
    file.write_text("[1")
    with pytest.raises(ValueError, match=re.escape(f"{str(file)!r}: must be JSON")):
        kv_budget(file)
    file.write_text(json.dumps(MODELS["gemma-3-4b"].config))
    assert kv_budget(tmp_path).bytes_per_token == kv_budget("gemma-3-4b").bytes_per_token
