"""Formats of engines and libraries, by name, each with where it is written down."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvlab.common.checks import count, require, shown

from .format import Format

_SIZE = re.compile(r"\{([A-Z])(?:/(\d+))?\}")


class Known(NamedTuple):
    """Format of an engine: its text with sizes left open, what it is, and where that is written down.

    anchor    of its paragraph in ``docs/formats.md``
    text      with ``{L}`` layers, ``{P}`` pages, ``{N}`` slots of a page, ``{H}`` KV heads, ``{D}`` dims, ``{D/8}``

    >>> from kvlab.formats import CATALOGUE
    >>> CATALOGUE["mla.656"].words
    'a row of 512 e4m3 latents, 4 float32 scales of 128 latents each and 64 bfloat16 rope values'
    """

    anchor: str
    text: str
    words: str
    source: str


_VLLM = "vllm-project/vllm: "
_FLASHINFER = "flashinfer-ai/flashinfer: "
_ORDERS = "vllm/v1/kv_cache_layout.py, KVCacheLayout"
_AXES = {"L": "layer:{L}", "B": "page:{P}", "H": "head:{H}", "N": "slot:{N}", "C": "kv:2 dim:{D} kv.bf16"}
_NHD, _HND = "page:{P} slot:{N} head:{H} dim:{D}", "page:{P} head:{H} slot:{N} dim:{D}"
_MLA = "layer:{L} page:{P} "
_TOKENS = "page:{P} slot:{N} head:{H}"


def _order(name: str) -> Known:
    text = " ".join(_AXES[letter] for letter in name)
    return Known(
        f"vllm-{name.lower()}", text, f"the order {', '.join(name)}: C is a head's K, then its V", _VLLM + _ORDERS
    )


CATALOGUE: dict[str, Known] = {
    **{f"vllm.{name}": _order(name) for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "vllm.kv_first": Known(
        "vllm-kv-first", "layer:{L} kv:2 page:{P} slot:{N} head:{H} dim:{D} kv.bf16",
        "a tensor [2, pages, page, heads, D] for each layer", _VLLM + "vllm/v1/attention/backends/flash_attn.py",
    ),
    "vllm.blocks_first": Known(
        "vllm-blocks-first", "layer:{L} page:{P} kv:2 slot:{N} head:{H} dim:{D} kv.bf16",
        "a tensor [pages, 2, page, heads, D] for each layer", _VLLM + "vllm/v1/attention/backends/flashinfer.py",
    ),
    "vllm.hnd": Known(
        "vllm-hnd", "layer:{L} page:{P} kv:2 head:{H} slot:{N} dim:{D} kv.bf16",
        "a tensor [pages, 2, heads, page, D] for each layer", _VLLM + "vllm/v1/attention/backends/flashinfer.py",
    ),
    "vllm.x_split": Known(
        "x-split-keys",
        "layer:{L} (page:{P} head:{H} dim/8:{D/8} slot:{N} dim:8 k.bf16, page:{P} head:{H} dim:{D} slot:{N} v.bf16)",
        "keys [pages, heads, D / x, page, x] with x of 16 bytes, values [pages, heads, D, page]",
        _VLLM + "csrc/cache_kernels.cu, reshape_and_cache",
    ),
    "vllm.nvfp4": Known(
        "vllm-nvfp4-page",
        "layer:{L} page:{P} kv:2 head:{H} slot/4:{N/4} "
        "(slot:4@{R} dim:{D} kv.e2m1 | +{D/2} dim/{Q}:4@{R} dim/16:{D/64} slot:4 scale.e4m3)",
        "rows of D/2 bytes of e2m1 and D/16 scales; those of four slots lie in the 4x4 order, for K and V",
        _VLLM + "csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, swizzle_scale_offset",
    ),
    "vllm.int8_per_token_head": Known(
        "int8-per-token", f"layer:{{L}} ({_NHD.replace('slot', 'kv:2 slot', 1)} kv.s8, "
        "page:{P} kv:2 slot:{N} head:{H} scale.f32)",
        "int8 with a float32 scale of each token and head, the scales after the pages",
        _VLLM + "vllm/v1/kv_cache_interface.py, KVQuantMode",
    ),
    "flashinfer.nhd": Known(
        "flashinfer-nhd", "layer:{L} page:{P} kv:2 slot:{N} head:{H} dim:{D} kv.bf16",
        "paged_kv_cache [pages, 2, page, heads, D]", _FLASHINFER + "docs/tutorials/kv_layout.rst",
    ),
    "flashinfer.hnd": Known(
        "flashinfer-hnd", "layer:{L} page:{P} kv:2 head:{H} slot:{N} dim:{D} kv.bf16",
        "paged_kv_cache [pages, 2, heads, page, D]", _FLASHINFER + "docs/tutorials/kv_layout.rst",
    ),
    "flashinfer.nvfp4": Known(
        "nvfp4-page",
        "layer:{L} (page:{P} kv:2 head:{H} slot:{N} dim:{D} kv.e2m1, page:{P} (head:{H} slot:{N} dim/16:{D/16} "
        "k_scale.e4m3, head:{H} slot/4:{N/4} dim/16:{D/16} slot:4 v_scale.e4m3))",
        "e2m1 with e4m3 scales of 16 dims; K's scales in rows, V's with four tokens side by side (the 4x4 order)",
        _FLASHINFER + "flashinfer/prefill.py, kv_cache_sf",
    ),
    "flash_attention.paged": Known(
        "flash-attention-paged", f"layer:{{L}} ({_NHD} k.bf16, {_NHD} v.bf16)",
        "k_cache and v_cache, each [pages, page, heads, D]",
        "Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py, flash_attn_with_kvcache",
    ),
    "trtllm.pool": Known(
        "tensorrt-llm-pool", "page:{P} layer:{L} kv:2 head:{H} slot:{N} dim:{D} kv.bf16",
        "a pool [blocks, layers, 2, heads * page * D]",
        "NVIDIA/TensorRT-LLM: cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, allocatePools",
    ),
    "sglang.mha": Known(
        "sglang-mha", f"layer:{{L}} ({_NHD} k.bf16, {_NHD} v.bf16)",
        "k_buffer and v_buffer of each layer, [slots, heads, D]; page 0 holds padding",
        "sgl-project/sglang: python/sglang/srt/mem_cache/memory_pool.py, MHATokenToKVPool",
    ),
    "max.paged": Known(
        "max-paged", "page:{P} kv:2 layer:{L} slot:{N} head:{H} dim:{D} kv.bf16",
        "blocks [pages, 2, layers, page, heads, D]",
        "modular/modular: max/kernels/src/kv_cache/types.mojo, PagedKVCacheCollection",
    ),
    "max.continuous": Known(
        "max-continuous", "page:{P} kv:2 layer:{L} slot:{N} head:{H} dim:{D} kv.bf16",
        "blocks [sequences, 2, layers, max_seq_len, heads, D]: a page is a sequence",
        "modular/modular: max/kernels/src/kv_cache/types.mojo, ContinuousBatchingKVCacheCollection",
    ),
    "lmcache.kv_2ltd": Known(
        "lmcache-chunk", "page:{P} kv:2 layer:{L} slot:{N} head:{H} dim:{D} kv.bf16",
        "a chunk [2, layers, tokens, heads * D]: a page is a chunk",
        "LMCache/LMCache: lmcache/v1/memory_management.py, MemoryFormat",
    ),
    "lmcache.kv_t2d": Known(
        "lmcache-layer", "layer:{L} page:{P} slot:{N} kv:2 head:{H} dim:{D} kv.bf16",
        "a chunk of one layer [tokens, 2, heads * D]",
        "LMCache/LMCache: lmcache/v1/memory_management.py, MemoryFormat",
    ),
    "llama_cpp.cells": Known(
        "llama-cpp-cells", f"layer:{{L}} ({_NHD} k.f16, {_NHD} v.f16)",
        "rows of cells of float16, V like K (flash attention): a page is a stream",
        "ggml-org/llama.cpp: src/llama-kv-cache.cpp",
    ),
    "llama_cpp.transposed_v": Known(
        "llama-cpp-transposed-v",
        f"layer:{{L}} ({_NHD} k.f16, page:{{P}} head:{{H}} dim:{{D}} slot:{{N}} v.f16)",
        "rows of cells, V transposed: all cells of a dim side by side", "ggml-org/llama.cpp: src/llama-kv-cache.cpp",
    ),
    "llama_cpp.q8_0": Known(
        "llama-cpp-q8-0",
        "layer:{L} kv:2 page:{P} slot:{N} head:{H} dim/32:{D/32} (scale.f16, dim:32 kv.s8)",
        "blocks of 32 dims: a float16 scale and 32 int8, 34 bytes",
        "ggml-org/llama.cpp: ggml/src/ggml-common.h, block_q8_0",
    ),
    "llama_cpp.q4_0": Known(
        "llama-cpp-q4-0",
        "layer:{L} kv:2 page:{P} slot:{N} head:{H} dim/32:{D/32} (scale.f16, dim:16 dim/16:2 kv.b4)",
        "blocks of 32 dims: a float16 scale and 16 bytes, dims 0 to 15 in the low halves, 16 to 31 in the high ones",
        "ggml-org/llama.cpp: ggml/src/ggml-common.h, block_q4_0",
    ),
    "mla.bf16": Known(
        "mla-576-bf16", _MLA + "slot:{N} (dim:512 latent.bf16, dim:64 rope.bf16)",
        "a row of 512 latents and 64 rope values, bfloat16: 1152 bytes",
        _VLLM + "vllm/v1/kv_cache_interface.py, MLAAttentionSpec",
    ),
    "mla.fp8": Known(
        "mla-576-fp8", _MLA + "slot:{N} (dim:512 latent.e4m3, dim:64 rope.e4m3)",
        "a row of 576 e4m3 with one scale of the tensor, outside the bytes",
        _VLLM + "vllm/v1/kv_cache_interface.py, MLAAttentionSpec",
    ),
    "mla.640": Known(
        "the-640-byte-row", _MLA + "slot:{N} (dim:512 latent.e4m3, dim:64 rope.bf16)",
        "a row of 512 e4m3 latents with one scale of the tensor, outside the bytes, and 64 bfloat16 rope values",
        "kvlab: kvlab/attention/kv_store/__init__.py, mla_store_paged",
    ),
    "mla.656": Known(
        "the-656-byte-row", _MLA + "slot:{N} (dim:512 latent.e4m3, dim/128:4 latent_scale.f32, dim:64 rope.bf16)",
        "a row of 512 e4m3 latents, 4 float32 scales of 128 latents each and 64 bfloat16 rope values",
        _FLASHINFER + "include/flashinfer/attention/sparse_mla_sm120/model/kv_cache_traits.cuh, DSV3_2",
    ),
    "mla.584": Known(
        "the-584-byte-row",
        _MLA + "(slot:{N} (dim:448 latent.e4m3, dim:64 rope.bf16), slot:{N} (dim/64:7 latent_scale.e8m0, pad:1))%576",
        "576 bytes of a token: 448 e4m3 latents, 64 bfloat16 rope values; after those of all slots 8 bytes for each: 7 "
        "powers of two and a padding; pages are rounded up to a multiple of 576 bytes",
        _FLASHINFER + "include/flashinfer/attention/sparse_mla_sm120/model/kv_cache_traits.cuh, DSV4",
    ),
    "mla.352": Known(
        "the-352-byte-row",
        _MLA + "slot:{N} (dim:512 latent.e2m1, dim:64 rope.e4m3, dim/16:4 dim/64:8 latent_scale.e4m3)",
        "512 e2m1 latents, 64 e4m3 rope values, 32 e4m3 scales of 16 latents: scale s at byte "
        "320 + 8 * (s % 4) + s // 4 of the row",
        _VLLM + "vllm/v1/attention/backends/mla/nvfp4_ds_mla_fp8_gather.py",
    ),
    "mla.384": Known(
        "the-384-byte-row",
        _MLA + "(slot:{N} (dim:448 latent.e2m1, dim:64 rope.bf16), slot:{N} (dim/16:28 latent_scale.e4m3, pad:4))",
        "352 bytes of a token: 448 e2m1 latents, 64 bfloat16 rope values; after those of all slots 32 bytes for each: "
        "28 e4m3 scales of 16 latents and 4 of padding",
        _FLASHINFER + "pull request 4955 (NVFP4 sparse MLA), as vLLM's nvfp4_fi_ds_mla describes it",
    ),
    "indexer.132": Known(
        "indexer-132", _MLA + "(slot:{N} dim:128 k.e4m3, slot:{N} k_scale.f32)",
        "keys of the sparse indexer: 128 e4m3 of each slot, then a float32 scale of each slot",
        _VLLM + "csrc/cache_kernels.cu, indexer_k_quant_and_cache",
    ),
    "indexer.68": Known(
        "indexer-68", _MLA + "(slot:{N} dim:128 k.e2m1, slot:{N} dim/32:4 k_scale.e8m0)",
        "keys of the sparse indexer in mxfp4: 128 e2m1 of each slot, then 4 powers of two of each slot",
        _VLLM + "vllm/model_executor/layers/sparse_attn_indexer.py, sizes; values, then scales, as in the 132 bytes",
    ),
    "aiter.shuffle": Known(
        "aiter-shuffle",
        "layer:{L} (page:{P} head:{H} dim/8:{D/8} slot:{N} dim:8 k.bf16, "
        "page:{P} head:{H} slot/8:{N/8} dim:{D} slot:8 v.bf16)",
        "keys [pages, heads, D / x, page, x], values [pages, heads, page / x, D, x], x of 16 bytes",
        "ROCm/aiter: csrc/kernels/cache_kernels.cu, reshape_and_cache with asm_layout",
    ),
    "aiter.shuffle_fp8": Known(
        "aiter-shuffle-fp8",
        "layer:{L} (page:{P} head:{H} dim/16:{D/16} slot:{N} dim:16 k.e4m3, "
        "page:{P} head:{H} slot/16:{N/16} dim:{D} slot:16 v.e4m3, page:{P} head:{H} slot:{N} k_scale.f32, "
        "page:{P} head:{H} slot:{N} v_scale.f32)",
        "the same in e4m3, x is 16; float32 scales of each token and head [pages, heads, page]",
        "ROCm/aiter: csrc/kernels/cache_kernels.cu, reshape_and_cache_with_pertoken_quant",
    ),
    "kivi.int4": Known(
        "int4-kivi",
        f"layer:{{L}} ({_HND} k.u4, {_HND} v.u4, page:{{P}} head:{{H}} dim:{{D}} (k_scale.f16, k_min.f16), "
        "page:{P} head:{H} slot:{N} dim/32:{D/32} (v_scale.f16, v_min.f16))",
        "asymmetric int4: keys with scale and minimum of a channel over a page, values of 32 dims of a token",
        "jy-yuan/KIVI: quant/new_pack.py, the scheme; the order of the bytes is kvlab's",
    ),
    "lmdeploy.int4": Known(
        "int4-per-token",
        "page:{P} layer:{L} (head:{H} kv:2 slot:{N} dim:{D} kv.u4, head:{H} kv:2 slot:{N} (scale.f16, min.f16))",
        "asymmetric int4: a block holds its layers, each the codes of all heads, then scale and minimum of each "
        "token and head",
        "InternLM/lmdeploy: src/turbomind/kernels/attention/block.h, Layout",
    ),
    "kvlab.nvfp4": Known(
        "nvfp4-rows", f"layer:{{L}} ({_NHD} k.e2m1, {_NHD} v.e2m1, page:{{P}} slot:{{N}} head:{{H}} dim/16:{{D/16}} "
        "k_scale.e4m3, page:{P} slot:{N} head:{H} dim/16:{D/16} v_scale.e4m3)",
        "e2m1 with e4m3 scales of 16 dims, all in rows; a number of K and one of V are outside the bytes",
        "kvlab: kvlab/attention/kv_store/__init__.py, kv_store_paged, writes it, mha_decode_paged reads it",
    ),
    "kvlab.int4": Known(
        "int4-rows", f"layer:{{L}} ({_NHD} k.s4, {_NHD} v.s4, page:{{P}} slot:{{N}} head:{{H}} k_scale.f32, "
        "page:{P} slot:{N} head:{H} v_scale.f32)",
        "symmetric int4 with a float32 scale of each token and head",
        "kvlab: kvlab/attention/kv_store/__init__.py, kv_store_paged, writes it, mha_decode_paged reads it",
    ),
    "kvlab.uint4": Known(
        "uint4-rows", f"layer:{{L}} ({_NHD} k.u4, {_NHD} v.u4, {_TOKENS} (k_scale.f32, k_min.f32), "
        f"{_TOKENS} (v_scale.f32, v_min.f32))",
        "asymmetric int4 with a float32 scale and minimum of each token and head, side by side",
        "kvlab: kvlab/attention/kv_store/__init__.py, kv_store_paged, writes it, mha_decode_paged reads it",
    ),
    "int8.per_channel": Known(
        "int8-per-channel", f"layer:{{L}} ({_NHD} k.s8, {_NHD} v.s8, head:{{H}} dim:{{D}} k_scale.f32, "
        "head:{H} dim:{D} v_scale.f32)",
        "int8 with a float32 scale of each head and dim, shared by all tokens",
        "no engine's own: the plain form of scales by channel",
    ),
}
"""The formats that kvlab knows, by name; :func:`known_format` gives one its sizes."""


def check_sizes(**sizes: Any) -> dict[str, int]:
    """The sizes of a cache as integers; ValueError that names the one that is none."""
    return {name: count(name, size, 1) for name, size in sizes.items()}


def known_format(
    name: str, *, layers: int = 1, pages: int = 4, page_size: int = 16, heads: int = 8, dim: int = 128
) -> Format:
    """The format of a name in :data:`CATALOGUE`. ``dim`` and ``heads`` count in formats that have them.

    ValueError for another name, and for sizes that the format's pieces do not divide.

    >>> known_format("mla.656", pages=2, page_size=64).bytes_per_token
    656
    >>> known_format("vllm.x_split", dim=100)
    Traceback (most recent call last):
        ...
    ValueError: dim is 100: must be a multiple of 8 for vllm.x_split
    """
    require(isinstance(name, str) and name in CATALOGUE, f"name is {shown(name)}", f"one of {', '.join(CATALOGUE)}")
    size = check_sizes(layers=layers, pages=pages, page_size=page_size, heads=heads, dim=dim)
    words = {"L": "layers", "P": "pages", "N": "page_size", "H": "heads", "D": "dim"}
    row = size["dim"] // 2 + size["dim"] // 16

    def filled(found: re.Match[str]) -> str:
        letter, by = found[1], int(found[2] or 1)
        if letter not in words:
            return str({"R": row, "Q": size["dim"] // 4}[letter])
        value = size[words[letter]]
        require(value % by == 0, f"{words[letter]} is {value}", f"a multiple of {by} for {name}")
        return str(value // by)

    return Format.parse(_SIZE.sub(filled, CATALOGUE[name].text), name=name)
