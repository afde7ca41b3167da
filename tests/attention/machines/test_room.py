"""Every configuration has room: its shared memory is at most what a CTA may have, for all sizes that are accepted.

Rests on the law of ``tile_memory.tile_bytes``, which the compile tests of each operation hold against the compiler's
own figure, and on the vendors' tables: 227 KB a CTA on sm_90 and sm_100, 163 on sm_80, 99 on sm_86, sm_89 and sm_120,
64 on gfx942, 160 on gfx950.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvlab.attention.machines.gpu import family, shared_limit
from kvlab.attention.mha_decode import config as decode
from kvlab.attention.mha_decode_streaming import config as streaming
from kvlab.attention.mha_decode_streaming.call import DEPTHS
from kvlab.attention.mha_prefill import config as prefill
from kvlab.attention.mla_decode import config as latent_decode
from kvlab.attention.mla_prefill import config as latent_prefill
from kvlab.attention.tiles.pieces import pieces

GPUS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx950")
FLAGS = (False, True)


def depths(unit: int) -> list[int]:
    """One of all head dimensions that are cut into the same pieces, whatever their least width, padded or not."""
    kinds: dict[Any, int] = {}
    for n in range(16, 577, unit):
        cut = tuple(pieces(n, least) for least in (16, 32, 64)) + (pieces(max(n // 2, 1)),)
        kinds.setdefault((cut, *(sum(p) == n for p in cut)), n)
    return list(kinds.values())


def mha_prefills() -> Iterator[prefill.PrefillProblem]:
    kinds = ((2, 2, False), (4, 4, False), (2, 1, False), (1, 1, False), (1, 1, True))
    for D, DV, (item, kv, p_fp8) in itertools.product(depths(16), depths(16), kinds):
        for heavy, biased, most in ((False, False, 300), (False, False, 30), (True, False, 300), (True, True, 300)):
            yield prefill.PrefillProblem(2, most, 4, 2, D, DV, item, kv, heavy, biased, most == 300, p_fp8)


def decodes() -> Iterator[tuple[decode.DecodeProblem, bool, bool]]:
    for D, DV, item, (S, heads) in itertools.product(depths(16), depths(16), (1, 2, 4), ((1, 4), (4, 32))):
        for heavy, biased in ((False, False), (True, False), (True, True)):
            yield decode.DecodeProblem(2, S, heads, 2, D, DV, item, 16, 4096), heavy, biased


def latent_prefills() -> Iterator[latent_prefill.MLAPrefillProblem]:
    columns = itertools.product((16, 64, 128, 256), (16, 64, 128), (16, 64, 128, 256))
    for (D, R, V), (item, fp8), paged in itertools.product(columns, ((2, False), (4, False), (2, True)), FLAGS):
        for heavy, biased in ((False, False), (True, False), (True, True)):
            yield latent_prefill.MLAPrefillProblem(2, 300, 4, D, R, V, item, heavy, fp8, biased, paged)


@pytest.mark.parametrize("gpu", GPUS)
def test_mha_prefill(gpu: str) -> None:
    arch, limit = family(gpu), shared_limit(gpu)
    for problem in mha_prefills():
        config = prefill.choose_config(problem, arch=arch, shared=limit)
        assert prefill.shared_bytes(config, problem, arch) <= limit, (problem, config)


@pytest.mark.parametrize("gpu", GPUS)
def test_mha_decode(gpu: str) -> None:
    """Where all keys have room with any memory, they do not change."""
    arch, limit = family(gpu), shared_limit(gpu)
    for problem, heavy, biased in decodes():
        options: dict[str, Any] = {"arch": arch, "heavy": heavy, "biased": biased, "num_splits": 1}
        config = decode.choose_config(problem, shared=limit, **options)
        assert decode.shared_bytes(config, problem, arch, biased=biased) <= limit, (problem, config)
        free = decode.choose_config(problem, shared=1 << 30, **options)
        assert config == free or decode.shared_bytes(free, problem, arch, biased=biased) > limit, (problem, config)


@pytest.mark.parametrize("gpu", GPUS)
def test_streaming(gpu: str) -> None:
    arch = family(gpu)
    for D, item in itertools.product(DEPTHS, (1, 2, 4)):
        problem = decode.DecodeProblem(2, 4, 32, 2, D, D, item, 16, 4096)
        config = streaming.choose_config(problem, arch=arch, num_splits=1)
        assert streaming.shared_bytes(config, problem, arch) <= shared_limit(gpu), (problem, config)


@pytest.mark.parametrize("gpu", GPUS)
def test_mla_prefill(gpu: str) -> None:
    """A call without a bias, and one whose tiles have room, takes the same tiles with any memory."""
    arch, limit = family(gpu), shared_limit(gpu)
    tightened = []
    for problem in latent_prefills():
        config = latent_prefill.choose_config(problem, arch=arch, shared=limit)
        assert latent_prefill.shared_bytes(config, problem, arch) <= limit, (problem, config)
        free = latent_prefill.choose_config(problem, arch=arch, shared=1 << 30)
        assert free == latent_prefill.choose_config(replace(problem, biased=False), arch=arch, shared=1 << 30)
        assert config == free or latent_prefill.shared_bytes(free, problem, arch) > limit, (problem, config)
        if config != free:
            tightened.append(problem)
    assert all(problem.biased for problem in tightened)
    assert bool(tightened) == (gpu in ("sm_86", "sm_90", "sm_100"))


@pytest.mark.parametrize("gpu", GPUS)
def test_mla_decode(gpu: str) -> None:
    arch, limit = family(gpu), shared_limit(gpu)
    columns, kinds = itertools.product((32, 64, 128, 256, 512), (16, 32, 64, 128)), ((2, False), (4, False), (2, True))
    for (latent, rope), (item, fp8), heads in itertools.product(columns, kinds, (16, 128)):
        for page, heavy, biased, wgmma in itertools.product((16, 64), FLAGS, FLAGS, FLAGS):
            problem = latent_decode.MLADecodeProblem(2, 1, heads, latent, rope, item, page, 4096, fp8)
            config = latent_decode.choose_config(
                problem, arch=arch, num_splits=1, heavy=heavy or fp8 or biased, wgmma=wgmma
            )
            assert latent_decode.shared_bytes(config, problem, arch, biased=biased) <= limit, (problem, config)


def test_what_had_room_keeps_its_tiles() -> None:
    """The tiles of ordinary calls on sm_90, by which the records were measured."""
    problem = latent_prefill.MLAPrefillProblem(2, 1000, 128, 128, 64, 128, 2)
    for paged in FLAGS:
        config = latent_prefill.choose_config(replace(problem, paged=paged))
        assert (config.BM, config.BN, config.num_stages) == (128, 64, 3)
    latents = latent_decode.MLADecodeProblem(8, 1, 128, 512, 64, 2, 64, 4096)
    for wgmma, BM in ((False, 32), (True, 64)):
        tile = latent_decode.choose_config(latents, num_splits=1, wgmma=wgmma)
        assert (tile.BM, tile.BN, tile.num_stages, tile.one_page) == (BM, 64, 2, True)
    for D, tiles in ((64, (16, 64, 3)), (128, (16, 64, 3)), (256, (16, 64, 2)), (576, (16, 64, 1))):
        of_d = decode.choose_config(decode.DecodeProblem(8, 1, 32, 8, D, D, 2, 16, 4096), num_splits=1)
        assert (of_d.BM, of_d.BN, of_d.num_stages) == tiles
