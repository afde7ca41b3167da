"""Every emulator ends every CTA that it makes: what is in flight behind its loops cannot go unreported.

Rests on the count: each record of hazards that a launch makes is finished in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab import attention
from kvlab.memory import as_dtype
from kvlab.staging import Hazards, Traffic
from kvlab.staging.tile.launched_cta import LaunchedCTA

Array = np.ndarray[Any, Any]


def rows(*shape: int, dtype: str = "bf16") -> Array:
    return (np.random.default_rng(0).standard_normal(shape) / 8).astype(as_dtype(dtype))


TABLE, LENS = np.arange(14, dtype=np.int32)[::-1].reshape(2, 7).copy(), np.array([100, 37], np.int32)


def decode(arch: str, dtype: str, **more: Any) -> None:
    kv = rows(20, 16, 2, 64, dtype="fp8" if dtype == "fp8" else dtype)
    q = rows(2, 4, 64, dtype="bf16" if dtype == "fp8" else dtype)
    attention.mha_decode_paged(q, kv, kv, TABLE, LENS, arch=arch, backend="emulator", **more)


def streaming(arch: str, dtype: str) -> None:
    kv = rows(20, 16, 2, 64, dtype=dtype)
    attention.mha_decode_streaming_paged(rows(2, 4, 64, dtype=dtype), kv, kv, TABLE, LENS, arch=arch)


def prefill(arch: str, dtype: str, **more: Any) -> None:
    q, kv = rows(1, 100, 2, 64, dtype=dtype), rows(1, 150, 1, 64, dtype=dtype)
    attention.mha_prefill(q, kv, kv, arch=arch, **more)


def mla_decode(arch: str, dtype: str, latent: int = 128, heads: int = 16, **more: Any) -> None:
    q, kv = rows(2, heads, latent + 64, dtype=dtype), rows(20, 16, latent + 64, dtype=dtype)
    attention.mla_decode_paged(q, kv, TABLE, LENS, v_dim=latent, scale=0.1, arch=arch, **more)


def mla_prefill(arch: str, dtype: str) -> None:
    k, keys = rows(137, 2, 128, dtype=dtype), np.array([0, 100, 137], np.int32)
    q, cache, new = rows(17, 2, 192, dtype=dtype), rows(20, 16, 576, dtype=dtype), np.array([0, 9, 17], np.int32)
    attention.mla_prefill_paged(q, k, k, cache, TABLE, LENS, new, keys, arch=arch)


CALLS: dict[str, Callable[[], None]] = {
    **{f"decode-{arch}-{dtype}": lambda arch=arch, dtype=dtype: decode(arch, dtype, num_splits=2)  # type: ignore[misc]
       for arch in ("sm_80", "sm_90", "gfx950") for dtype in ("bf16", "fp32")},
    "decode-sm_90-fp8": lambda: decode("sm_90", "fp8"),
    "streaming-gfx950-bf16": lambda: streaming("gfx950", "bf16"),
    **{f"prefill-{arch}-{dtype}": lambda arch=arch, dtype=dtype: prefill(arch, dtype)  # type: ignore[misc]
       for arch in ("sm_80", "sm_90", "gfx950") for dtype in ("bf16", "fp32")},
    "prefill-hopper-bf16": lambda: prefill("sm_90", "bf16", backend="hopper"),
    **{f"mla-decode-{arch}-bf16": lambda arch=arch: mla_decode(arch, "bf16")  # type: ignore[misc]
       for arch in ("sm_80", "sm_90", "gfx950")},
    "mla-decode-sm_90-64-rows": lambda: mla_decode("sm_90", "bf16", heads=64),
    "mla-decode-hopper-bf16": lambda: mla_decode("sm_90", "bf16", latent=512, backend="hopper"),
    **{f"mla-prefill-{arch}-bf16": lambda arch=arch: mla_prefill(arch, "bf16")  # type: ignore[misc]
       for arch in ("sm_80", "sm_90", "gfx950")},
}


@pytest.mark.parametrize("call", CALLS)
def test_every_cta_ends(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Hazards] = []
    ended: list[Hazards] = []
    make, finish = LaunchedCTA.__init__, Hazards.finish

    def init(cta: LaunchedCTA, *args: Any, **more: Any) -> None:
        make(cta, *args, **more)
        made.append(cta.hazards)

    def end(hazards: Hazards) -> None:
        ended.append(hazards)
        finish(hazards)

    monkeypatch.setattr(LaunchedCTA, "__init__", init)
    monkeypatch.setattr(Hazards, "finish", end)
    CALLS[call]()
    assert made
    assert ended == made


class Ends:
    """What a launch ends."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def end(self) -> None:
        self.said.append(self.name)


def test_a_launch_ends_its_own_ctas_once() -> None:
    traffic, said = Traffic(), []  # type: ignore[var-annotated]
    traffic.begin(Ends("outside", said))
    with traffic.launch():
        traffic.begin(Ends("outer", said))
        with traffic.launch():
            traffic.begin(Ends("inner", said))
        assert said == ["inner"]
    with traffic.launch():
        pass
    assert said == ["inner", "outer"]


def test_a_launch_that_failed_ends_nothing() -> None:
    traffic, said = Traffic(), []  # type: ignore[var-annotated]

    def fails() -> None:
        with traffic.launch():
            traffic.begin(Ends("cta", said))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    with traffic.launch():
        pass
    assert said == []
