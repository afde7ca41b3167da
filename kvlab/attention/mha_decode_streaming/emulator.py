"""Streaming MHA decode as gfx950 does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once.

MAX's streaming decode: K strip by strip and V strip by strip through one buffer each, P through LDS.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvlab.attention.features.intervals import split_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, key_scales, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines import choose
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.emulator import run
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import in_pages
from kvlab.attention.tiles.rows import packed_rows
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory, bfloat16
from kvlab.staging import KVCacheIterator, Traffic, program_ids, ragged_range, row_offsets
from kvlab.staging.tile.tile_spec import KVRows, TileSpec

from .config import StreamingConfig

Array = np.ndarray[Any, Any]


def attend(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, features: Features, problem: DecodeProblem, config: StreamingConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence, for each program."""
    #: setup -> lo, hi, first, limit    this program's rows, the keys they see, its split of them
    mask, scales = features.mask, features.scales  #- launch
    D, BN, BK = problem.head_dim, config.BN, config.BK  #- launch
    batch, program, split = program_ids(config.grid(problem))  # [P]
    _, kv_head, token, head, is_row = packed_rows(program, problem, config.BM)
    position, lo, hi, first, limit, pad = split_keys(seq_lens, features, batch, token, split, problem, config)
    rows = batch, head, token, is_row, first, limit
    queries = q_array.astype(q_array.dtype if q_array.dtype.itemsize > 1 else bfloat16, copy=False)  #- launch
    sizes = TileSpec(  #- programs
        arch=arch, BM=config.BM, BN=BN, k=(D, D), v=(D, D), dtype=queries.dtype, stored=k_cache.dtype,
        weights=queries.dtype,
    )
    model: Any = choose(arch, k_cache.dtype, "mha_decode_streaming").cta  #- programs
    cta = model.of(sizes, KVRows(k_cache, v_cache, batch, kv_head), traffic)  #- programs
    at = row_offsets(queries, (batch[:, None], token, head), is_row)  #- address
    tile = cta.load_q(Memory.over(queries, name="q"), at, is_row)  #- programs
    factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
    k_tiles, v_tiles = (  #- programs
        KVCacheIterator(cache, BN, batch, kv_head, hi + pad) for cache in (k_cache, v_cache)
    )
    k_tiles.tile_start_row = v_tiles.tile_start_row = lo + pad  #- programs
    m, l = start_rows(features.sinks, head, split == 0)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: tile -> s    the pages of these keys; no score yet
        active = start < hi  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        exists = key < hi[:, None]
        page, slot = in_pages(k_cache, batch[:, None], key + pad[:, None], exists)
        k_tile, v_tile = k_tiles.next_tile(), v_tiles.next_tile()  #- programs
        s = cta.zero_scores()
        for strip in range(0, D, BK):
            #: load_k -> k    BK columns of the keys, DRAM -> the one buffer of K
            k = cta.load_k_strip(k_tile, strip, active)
            #: scores -> s    S += Q K^T over these columns, float32
            q = cta.load_q_strip(tile, strip)
            s = cta.add_scores(q, k, s)
        #: scale -> s    in units of log2; the features of scores
        scale = key_scales(features, page, slot, kv_head, exists)
        s = adjust(s, factor, slope, scale, features, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, mask.windowed)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(cta, s, m, l)
        o = o.times(alpha)
        #: load_v -> v    the V tile of the same pages; the machine brings BK keys at a time
        v = cta.load_v(v_tile, active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        p = scale_weights(p, features, page, slot, kv_head, exists)
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    factor = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
    lse = log_sum(m, l, sees)
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        o = o.with_values(np.where(o.by_row(sees), o.values * o.by_row(factor / l), np.float32(0)))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    store(o_array, (split[:, None], batch[:, None], token, head), o.tile(), mask=writes_o)
    store(lse_array, (split[:, None], batch[:, None], token, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(writes_o.sum()) * o_array[0, 0, 0, 0].nbytes + int(is_row.sum()) * lse.itemsize)


def launch(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *, config: StreamingConfig,
    arch: str = "gfx950", **named: Any,
) -> tuple[Array, Array]:
    """Run the twins: out of q's shape and dtype (bfloat16 for e4m3) and lse ``[B, S, Hq]`` float32. The arguments are
    valid; ``arch`` is gfx950, ``named``: those of MHA decode's ``run``.
    """
    return run(functools.partial(attend, arch=arch), q, k_cache, v_cache, block_table, seq_lens, config=config, **named)
