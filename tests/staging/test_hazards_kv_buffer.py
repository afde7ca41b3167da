"""The machines that stage whole tiles: gfx950 through KVBuffer (prefill, decode, MLA), sm_90 prefill by wgmma.

They report nothing; with a statement taken out or moved they report what is wrong. Rests on the definition of the
hardware's instructions and on the order of MAX's loops and of the compiled PTX: each mutant lacks a statement, or
issues it at another place, so that some access is not ordered any more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cta_tiles import drive
from hazard_mutations import END, ORDER, READ, SOME, STUCK, WAR, WAW, Mutation, Patch, attribute, caught_as, drop

from kvlab.attention.machines.mla_decode import LatentCaches, mla_cta
from kvlab.cache import PagedKVCache
from kvlab.layout import Layout, Swizzle
from kvlab.memory import AddressSpace, Memory, as_dtype
from kvlab.staging import DecodeKVBuffer, DecodeKVBufferParams, Hazards, TiledTensorCore, Timeline, Traffic
from kvlab.staging.gfx950.kv_buffer_cta import KVBufferCTA, KVBufferShape
from kvlab.staging.gfx950.kv_buffer_decode_cta import KVBufferDecodeCTA, KVBufferDecodeShape
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape
from kvlab.staging.nvidia.wgmma_cta import WgmmaCTA
from kvlab.staging.nvidia.wgmma_plan import WgmmaShape
from kvlab.staging.tile.launched_cta import LaunchedCTA
from kvlab.staging.tile.tile_pipeline import TilePipeline
from kvlab.staging.tile.tile_walk import TileWalk

BF16 = as_dtype("bf16")


def prefill(traffic: Any = None) -> None:
    shape = KVBufferShape(128, 64, 128, BF16)
    drive(lambda *where: KVBufferCTA(shape, *where), "bf16", 128, 64, 128, loops=2, traffic=traffic)


def decode(traffic: Any = None, D: int = 128) -> None:
    shape = KVBufferDecodeShape(D, BF16, BF16)
    drive(lambda *where: KVBufferDecodeCTA(shape, *where), "bf16", 16, 128, D, traffic=traffic)


def shared(traffic: Any = None) -> None:
    """V takes K's memory."""
    decode(traffic, 512)


def mla(traffic: Any = None) -> None:
    rng, end = np.random.default_rng(0), np.array([320, 130])
    rows = (rng.standard_normal((6, 64, 1, 192)) / 8).astype(BF16)
    table = rng.permutation(6)[[[0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]]
    windows = [PagedKVCache(x, [0, 0], table, 1, 320) for x in (rows[..., :128], rows[..., 128:])]
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        cta = mla_cta("gfx950", 16, 128, (128, 64), LatentCaches(*windows), np.arange(2), end, traffic)
        decode_latents(cta, 16, 128, 192, end, rng)


def decode_latents(cta: Any, BM: int, BN: int, columns: int, end: Any, rng: Any) -> None:
    """The loop of MLA decode for two programs: ``BM`` rows of ``columns``, tiles of ``BN`` keys up to ``end``."""
    at = np.broadcast_to(columns * np.arange(BM), (2, BM))
    q = cta.load_q(Memory.over(rng.standard_normal(BM * columns).astype(BF16)), at, np.ones((2, BM), np.bool_))
    o = cta.zeros()
    for start in range(0, end.max(), BN):
        active = start < end
        s = cta.scores(q, cta.load_k(np.array([start, start]), active), active)
        cta.row_max(s)
        cta.row_sum(s)
        o = cta.accumulate(s, cta.load_v(active), o, active)


def wgmma(traffic: Any = None) -> None:
    shape = WgmmaShape(64, 64, 64, 64, BF16, 4)
    drive(lambda k, v, batch, head, traffic: WgmmaCTA(shape, 2, traffic), "bf16", 64, 64, 64, loops=2, traffic=traffic)


def converted(traffic: Any = None) -> None:
    """K and V of e4m3, converted beside a Q of 16 bits."""
    shape = WgmmaShape(64, 64, 64, 64, BF16, 4, stored=as_dtype("fp8"))
    make = lambda k, v, batch, head, traffic: WgmmaCTA(shape, 2, traffic)  # noqa: E731
    drive(make, "fp8", 64, 64, 64, loops=2, traffic=traffic, q="bf16")


def turned(traffic: Any = None) -> None:
    """e4m3 throughout: V comes through registers, its keys along the rows."""
    shape = WgmmaShape(64, 64, 64, 64, as_dtype("fp8"), 4)
    drive(lambda k, v, batch, head, traffic: WgmmaCTA(shape, 2, traffic), "fp8", 64, 64, 64, loops=2, traffic=traffic)


def far_ahead(traffic: Any = None) -> None:
    """Two tiles in flight."""
    shape = WgmmaShape(64, 32, 64, 64, BF16, 8, ahead=2)
    drive(lambda k, v, batch, head, traffic: WgmmaCTA(shape, 2, traffic), "bf16", 64, 32, 64, loops=2, traffic=traffic)


def latents(traffic: Any = None) -> None:
    """MLA decode by mma.sync, two tiles ahead."""
    rng, end = np.random.default_rng(0), np.array([320, 130])
    rows = (rng.standard_normal((5, 64, 1, 192)) / 8).astype(BF16)
    windows = [PagedKVCache(x, [0, 0], [[0, 1, 2, 3, 4], [4, 0, 1, 2, 3]], 1, 320) for x in (rows[..., :128],
                                                                                          rows[..., 128:])]
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        caches = LatentCaches(*windows)
        cta = mla_cta("sm_90", 16, 64, (128, 64), caches, np.arange(2), end, traffic, num_warps=8, num_stages=5)
        decode_latents(cta, 16, 64, 192, end, rng)


def mma_rows(traffic: Any = None) -> None:
    """Prefill on sm_80, its warps along the rows."""
    shape = MmaSyncShape(128, 32, 32, 32, BF16, "sm_80", warps=8, along_rows=True)
    drive(lambda k, v, batch, head, traffic: MmaSyncCTA(shape, 2, traffic), "bf16", 128, 32, 32, 2, traffic)


def mla64(traffic: Any = None) -> None:
    """MLA decode of 64 rows by wgmma: V is read from K's stage."""
    rng, end = np.random.default_rng(0), np.array([160, 70])
    rows = (rng.standard_normal((10, 32, 1, 160)) / 8).astype(BF16)
    table = rng.permutation(10).reshape(2, 5)
    windows = [PagedKVCache(x, [0, 0], table, 1, 160) for x in (rows[..., :128], rows[..., 128:])]
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        caches = LatentCaches(*windows)
        cta = mla_cta("sm_90", 64, 32, (128, 32), caches, np.arange(2), end, traffic, num_warps=8, num_stages=3)
        decode_latents(cta, 64, 32, 160, end, rng)


def staged(traffic: Any = None) -> None:
    """DecodeKVBuffer: a strip of K through registers, then the next one into the same place."""
    core, layout = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True), Layout.row_major(128, 64)
    p = DecodeKVBufferParams("bf16", layout, core, Swizzle(2, 0, 3, "vector"), BN=128, WN=32, BK=32, depth=64,
                             num_threads=256, num_stages=2)
    cache = PagedKVCache(np.ones((1, 128, 1, 64), BF16), [0], [[0]], 1, 128)
    line = None if traffic is None else traffic.timeline
    smem = Memory(8192, space=AddressSpace.SHARED, programs=1, name="LDS")
    hazards = Hazards(smem, 4, arch="gfx950", timeline=line)
    k = DecodeKVBuffer(p, cache, 0, 0, smem, 128, hazards=hazards)
    k.load_from_dram()
    k.load_from_dram()
    for stage in (0, 1):
        hazards.barrier()
        k.copy_to_shared(stage)
        hazards.barrier()
        k.load_from_shared(0)


MACHINES: dict[str, Any] = {
    "prefill": prefill, "decode": decode, "shared": shared, "mla": mla, "wgmma": wgmma, "mla64": mla64,
    "rows": mma_rows, "staged": staged, "converted": converted, "turned": turned, "far_ahead": far_ahead,
    "latents": latents,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_reported(machine: str) -> None:
    traffic = Traffic(timeline=Timeline())
    MACHINES[machine](traffic)
    kinds = {event.kind for event in traffic.timeline or ()}
    assert {"barrier"} < kinds
    assert ("copy" in kinds and "landed" in kinds) or machine == "staged"
    by_wgmma = machine in ("wgmma", "mla64", "turned", "far_ahead")
    assert "read in flight" in kinds if by_wgmma else "read" in kinds


def words_of(machine: str) -> list[str]:
    traffic = Traffic(timeline=Timeline())
    MACHINES[machine](traffic)
    return [event.what for event in traffic.trace() if event.kind != "landed"]


def test_the_order_of_prefill_is_that_of_max() -> None:
    """Rests on MAX's prefill: K and V of the next tile in flight while S and P V are computed; the last never fetches.
    K waits for all but V's 4 instructions, V for all but the 8 of the next tile."""
    words = words_of("prefill")
    k, v = (["s_waitcnt vmcnt({})", "barrier 0", f"{role} read"] for role in "kv")
    tile = [word.format(4) for word in k] + ["k copy", "v copy"] + [word.format(8) for word in v]
    assert words == ["k copy", "v copy", *4 * tile, *(word.format(0) for word in k + v)]


def fetch_before_the_scores(patch: Patch) -> None:
    """The next K is copied before this one is read, into the same stage."""
    load = KVBufferCTA._load

    def early(cta: KVBufferCTA, buffer: Any, *more: Any, **named: Any) -> Any:
        if buffer is cta.k:
            cta._copied["k"] = cta._read["k"]
            cta._copy(cta.k, cta._flying["k"][0])
        return load(cta, buffer, *more, **named)

    patch.setattr(KVBufferCTA, "_load", early)


def reads_the_other_stage(patch: Patch) -> None:
    load = KVBufferCTA.load_v

    def flipped(cta: KVBufferCTA, *args: Any) -> Any:
        cta._read["v"] += 1
        return load(cta, *args)

    patch.setattr(KVBufferCTA, "load_v", flipped)


def v_waits_for_too_few(patch: Patch) -> None:
    load = KVBufferCTA._load

    def short(cta: KVBufferCTA, buffer: Any, tile: Any, active: Any, newer: int, axis: int) -> Any:
        return load(cta, buffer, tile, active, newer + (buffer is cta.v), axis)

    patch.setattr(KVBufferCTA, "_load", short)


def fetched_before_p(patch: Patch) -> None:
    """The next tiles are copied as soon as the scores are known."""
    scores = KVBufferDecodeCTA.scores
    patch.setattr(KVBufferDecodeCTA, "scores", lambda cta, *args: (scores(cta, *args), cta._fetch())[0])


def fetched_before_v(patch: Patch) -> None:
    """The next K is copied over the latent columns that V is to be read from, when all warps have read K."""
    scores = KVBufferDecodeCTA.scores

    def early(cta: KVBufferDecodeCTA, q: Any, k: Any, active: Any, s: Any = None) -> Any:
        found = scores(cta, q, k, active, s)
        if s is not None:  # of the rope columns, the last
            cta.hazards.barrier()
            cta._fetch()
        return found

    patch.setattr(KVBufferDecodeCTA, "scores", early)


def a_tile_more(cta: Any) -> None:
    """A tile is copied ahead that no loop takes."""
    cta.hazards.barrier()
    cta.k._accesses.copy(0)


def loops_are_not_drained(patch: Patch) -> None:
    """The first copies of the second loop are issued without a wait or barrier, into stage 0."""
    begin = TilePipeline._next_loop

    def undrained(pipeline: TilePipeline) -> None:
        with patch.context() as local:
            local.setattr(type(pipeline), "drain", lambda pipeline: None)
            begin(pipeline)

    patch.setattr(TilePipeline, "_next_loop", undrained)


VMCNT = "missing: s_waitcnt vmcnt in warp"
MUTANTS: dict[str, tuple[str, Mutation, Any, str]] = {
    "no-vmcnt": ("prefill decode shared mla", drop("wait_group"), READ, VMCNT),
    "vmcnt-leaves-one-more": (
        "prefill decode shared mla", drop("wait_group", instead=lambda h, wait: wait(h, 9)), READ,
        "s_waitcnt vmcnt in warp 0 leaves 9 in flight, <= ",
    ),
    "wave-2-does-not-wait": (
        "prefill decode shared mla", drop("wait_group", instead=lambda h, wait: wait(h, 0, SOME)), READ,
        "s_waitcnt vmcnt in warp 2",
    ),
    "v-waits-for-too-few": ("prefill", v_waits_for_too_few, READ, "v read by warp"),
    "no-barrier-after-the-wait": ("prefill", drop("barrier", "wait"), READ, "a barrier after s_waitcnt vmcnt"),
    "no-barrier-after-the-wait-for-v": ("decode shared mla", drop("barrier", "wait"), READ, "|a barrier after"),
    "wave-2-skips-every-barrier": (
        "prefill decode shared mla staged", drop("barrier", instead=lambda h, meet: meet(h, SOME)), STUCK,
        "warps [2] do not arrive",
    ),
    "one-stage-instead-of-two": (
        "prefill", attribute(KVBufferCTA, "_stage", lambda cta, tiles: 0), WAR, "k copy by warp",
    ),
    "k-fetched-before-it-is-read": ("prefill", fetch_before_the_scores, WAW, "k copy by warp"),
    "the-other-stage": ("prefill", reads_the_other_stage, READ, "v read by warp 0, stage 1"),
    "next-tile-fetched-with-the-scores": ("decode", fetched_before_p, WAR, "k copy by warp"),
    "next-tile-fetched-before-v-is-read": ("mla", fetched_before_v, READ, "v read by warp"),
    "no-barrier-before-v-takes-the-place-of-k": (
        "shared", drop("barrier", "k read"), WAR, "v copy by warp",
    ),
    "no-barrier-between-p-and-its-reads": ("decode shared mla", drop("barrier", "p write"), ORDER, "p read by warp"),
    "no-barrier-after-the-writes": ("staged", drop("barrier", "k write"), ORDER, "k read by warp"),
    "no-barrier-before-the-writes": ("staged", drop("barrier", "k read"), WAR, "k write by warp"),
    "no-wait-for-cp-async": ("wgmma mla64", drop("wait_group"), READ, "missing: cp.async.wait_group in warp"),
    "cp-async-waits-for-all-but-two": (
        "wgmma mla64", drop("wait_group", instead=lambda h, wait: wait(h, 2)), READ, "k wgmma by warp",
    ),
    "no-commit": ("wgmma mla64", drop("commit_group"), READ, "cp.async.commit_group, then cp.async.wait_group"),
    "warp-2-does-not-wait": (
        "wgmma mla64", drop("wait_group", instead=lambda h, wait: wait(h, 0, SOME)), READ,
        "cp.async.wait_group in warp 2",
    ),
    "no-barrier-after-cp-async": ("wgmma mla64", drop("barrier", "wait"), ORDER, "q wgmma by warp"),
    "no-fence-for-wgmma": ("wgmma mla64", drop("fence_async"), ORDER, "fence.proxy.async in warp"),
    "no-wait-for-wgmma": ("wgmma mla64", drop("wait_mma"), WAR, "wgmma.wait_group in warp 0"),
    "no-barrier-before-the-refill": ("wgmma", drop("barrier", "v wgmma"), WAR, "a barrier after wgmma.wait_group"),
    "no-barrier-before-the-refill-of-k": (
        "mla64", drop("barrier", "k wgmma of P V"), WAR, "a barrier after wgmma.wait_group",
    ),
    "warp-2-skips-the-barrier-before-the-refill": (
        "wgmma", drop("barrier", "v wgmma", lambda h, meet: meet(h, SOME)), STUCK, "warps [0, 1, 3] wait at barrier 0",
    ),
    "cp-async-without-a-wait": ("rows", drop("wait_group"), READ, "missing: cp.async.wait_group in warp"),
    "cp-async-without-a-barrier": ("rows", drop("barrier", "wait"), READ, "k read by warp"),
    "k-refilled-while-it-is-read": ("rows", drop("barrier", "v read"), WAR, "k copy by warp"),
    "next-loop-without-a-drain": ("rows", loops_are_not_drained, WAW, "cp.async.wait_group in warp"),
    "one-stage-of-mla64": ("mla64", attribute(WgmmaShape, "stages", lambda shape, role: 1), WAR, "k copy by warp"),
    "one-stage-of-wgmma": (
        "wgmma", attribute(WgmmaShape, "stages", lambda shape, role: 1), WAR, "v copy by warp",
    ),
    "not-drained": (
        "wgmma", attribute(WgmmaCTA, "end", lambda cta: cta.hazards.finish()), END,
        "is in flight at the end of the CTA; missing: cp.async.wait_group in warp 0",
    ),
    "product-in-flight-at-the-end": (
        "wgmma", attribute(WgmmaCTA, "end", lambda cta: (cta.hazards.wait_group(0), cta.hazards.finish())), END,
        "v wgmma by warp 0, stage 0, is in flight at the end of the CTA; missing: wgmma.wait_group in warp 0",
    ),
    "a-tile-more": (
        "prefill decode mla", attribute(LaunchedCTA, "drain", a_tile_more), END,
        "k copy by warp 0, stage 0, is in flight at the end of the CTA; missing: s_waitcnt vmcnt in warp 0",
    ),
    "e4m3-without-a-wait": ("converted turned", drop("wait_group"), READ, "missing: cp.async.wait_group in warp"),
    "panels-without-a-fence": (
        "converted turned", drop("fence_async", "write"), ORDER, "fence.proxy.async in warp",
    ),
    "panels-without-a-barrier": ("converted turned", drop("barrier", "fence"), ORDER, "a barrier between warp"),
    "plain-rows-without-a-barrier": ("converted", drop("barrier", "wait"), READ, "k convert by warp"),
    "panels-while-they-are-multiplied": (
        "converted turned", drop("wait_mma"), WAR, "wgmma.wait_group in warp",
    ),
    "far-ahead-leaves-one-tile-more": (
        "far_ahead", drop("wait_group", instead=lambda h, wait: wait(h, 4)), READ, "k wgmma by warp",
    ),
    "latents-leave-one-tile-more": (
        "latents", drop("wait_group", instead=lambda h, wait: wait(h, 2)), READ, "k read by warp",
    ),
    "latents-refilled-while-v-is-read": ("latents", drop("barrier", "v read"), WAR, "k copy by warp"),
    "loops-not-drained": ("wgmma", loops_are_not_drained, WAW, "cp.async.wait_group in warp"),
}
CASES = [(name, machine) for name, (machines, *_) in MUTANTS.items() for machine in machines.split()]


@pytest.mark.parametrize("name, machine", CASES, ids=lambda v: v)
def test_mutants_are_caught(name: str, machine: str, monkeypatch: Patch) -> None:
    _, mutate, kind, words = MUTANTS[name]
    mutate(monkeypatch)
    caught_as(kind, words, MACHINES[machine])


def test_the_walk_of_a_machine_is_the_callers() -> None:
    with pytest.raises(ValueError, match="1 iterators: must be one of K and one of V for each loop"):
        TileWalk(*[None])  # type: ignore[list-item]
