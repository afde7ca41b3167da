"""Emulators with ``arithmetic="chip"``. Rests on bits recorded on an H200 (benchmarks/chip_bits.py), and on the rule of
14 digits, itself recorded on an H100 (tests/hardware/test_chip.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import chip_bits
from kvlab.attention import (
    explain,
    merge_states,
    mha_decode_paged,
    mha_decode_streaming_paged,
    mha_prefill,
    mha_prefill_paged,
    mla_decode_paged,
    mla_prefill_paged,
    mla_prefill_ragged,
)
from kvlab.hardware import current_arithmetic
from kvlab.hardware.chip import div_full, ex2_approx, expf, log2f, logf
from kvlab.memory import bfloat16, float8_e4m3fn

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "tests" / "data" / "hardware"
SINCE = {"ROWS": "16", "DEPTH": "128", "PACK": "1", "TOGETHER": "0", "OVERHEAD": "0", "WORDS": "8",
         "NR": "2", "LISTED": "128", "PRODUCTS": "1", "HEADS": "1"}
"""Numbers that were no field of a configuration when the record was made: those that all kernels then had."""
NO_OTHER_COLUMNS = {"decode": "0", "prefill": "128"}
"""The same of COLUMNS: decode's are those of a row where there is no number, prefill's the head's."""
RENAMED = {"TRANSPOSER": "CHANGER"}
"""Fields that had another name then. STORED is what ITEM is: K and V had q's dtype."""


@pytest.fixture(scope="module")
def recorded() -> Any:
    with np.load(RECORDS / "chip_bits.npz") as file:
        yield file


def numbers_of(config: str) -> dict[str, str]:
    """The numbers of a configuration's repr by name, whatever its classes are called."""
    found = re.findall(r"(\w+)=(\([^()]*\)|[^(),]+)(?=[,)])", config)
    return {RENAMED.get(name, name): number for name, number in found}


@pytest.mark.parametrize("call", chip_bits.CALLS, ids=str)
def test_every_bit_of_out_and_lse_is_the_chips(call: Any, recorded: Any) -> None:
    """The compiled kernel's, of decode and prefill, bfloat16 and e4m3, portable and Hopper's."""
    about = json.loads(str(recorded["about"]))
    assert about["inputs"][str(call)] == call.digest()
    was, now = (numbers_of(one) for one in (about["configs"][str(call)], repr(call.launched()[2]["config"])))
    since = SINCE | {"COLUMNS": NO_OTHER_COLUMNS[str(call).partition("-")[0]], "STORED": now.get("ITEM")}
    features = was.keys() ^ now.keys()
    assert all((was | now)[name] == since.get(name, "False") for name in features), "of features, which none has"
    differ = {name for name in was.keys() & now.keys() if was[name] != now[name]}
    assert differ <= {"NB"}, "stages in flight, in which no sum takes part"
    assert "BN" in now
    found = chip_bits.differences(call, recorded[f"{call} out"], recorded[f"{call} lse"])
    assert found.replace(" of ", " ").split()[1::3] == ["0", "0"], found


@pytest.mark.parametrize("call", [c for c in chip_bits.CALLS if c.wide], ids=str)
def test_float32_has_others(call: Any, recorded: Any) -> None:
    """The test above can fail: NumPy's arithmetic misses bits of the same record, in lse and in out."""
    found = chip_bits.differences(call, recorded[f"{call} out"], recorded[f"{call} lse"], "float32")
    assert "lse: 0 " not in found
    assert "out: 0 " not in found


@pytest.mark.parametrize("name, function", [
    ("log2", lambda x, y, small: log2f(x)), ("log", lambda x, y, small: logf(x)),
    ("divide", lambda x, y, small: div_full(x, y)), ("inverse", lambda x, y, small: div_full(np.float32(1), y)),
    ("exp2", lambda x, y, small: ex2_approx(small)), ("exp", lambda x, y, small: expf(small)),
])
def test_functions_as_triton_compiles_them(name: str, function: Any) -> None:
    """All exponents, neighbours of 1, sums of a softmax, both ends; every 16th of those that were recorded."""
    given = {key: x[::16] for key, x in chip_bits.numbers().items()}
    with np.load(RECORDS / "chip_functions.npz") as file, np.errstate(all="ignore"):
        theirs, ours = file[name].view(np.float32), function(**given)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_lse_of_e4m3_has_14_digits() -> None:
    """A row that sees one key: its lse is the score. It is cut to 14 digits where float32 has 24."""
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((1, 64, 1, 128)).astype(np.float32).astype(float8_e4m3fn) for _ in range(2))
    exact = np.einsum("bshd,bshd->bsh", q.astype(np.float64), k.astype(np.float64))
    arguments = {"window": 1, "scale": 1.0, "return_lse": True}
    _, usual = mha_prefill(q, k, k, **arguments)
    _, chip = mha_prefill(q, k, k, **arguments, arithmetic="chip")
    size = 2.0 ** np.floor(np.log2(np.abs(exact)))
    assert (np.abs(usual - exact) <= 2.0**-21 * size).all()
    lost = np.abs(exact) - np.abs(chip)  # truncated at every step of 32: towards 0 as a rule, by many units at most
    assert (np.abs(lost) > 2.0**-16 * size).mean() > 0.7
    digits = np.abs(chip) / size * 2.0**13
    assert (np.abs(digits - np.round(digits)) < 0.02).all()  # to the rounding of log2(e) and ln(2)


ONE = np.array([[1, 0]], np.int32), np.array([20], np.int32)


def _calls(dtype: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """A small call of every operation that the emulator has for sm_90."""
    rng = np.random.default_rng(1)

    def some(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    starts, starts_k = np.array([0, 3], np.int32), np.array([0, 20], np.int32)
    kv = some(2, 16, 2, 64), some(2, 16, 2, 64)
    mla = some(3, 2, 96), some(20, 2, 64), some(20, 2, 64)
    return {
        "decode": (mha_decode_paged, {"args": (some(1, 4, 64), *kv, *ONE)}),
        "prefill": (mha_prefill, {"args": (some(1, 3, 4, 64), some(1, 20, 2, 64), some(1, 20, 2, 64))}),
        "paged prefill": (mha_prefill_paged, {"args": (some(3, 4, 64), *kv, *ONE, starts)}),
        "MLA decode": (
            mla_decode_paged, {"args": (some(1, 4, 160), some(2, 16, 160), *ONE), "v_dim": 128, "scale": 0.1}
        ),
        "MLA prefill": (mla_prefill_ragged, {"args": (*mla, some(20, 32), starts, starts_k)}),
        "paged MLA prefill": (
            mla_prefill_paged, {"args": (*mla, some(2, 16, 160), *ONE, starts, starts_k), "latent_dim": 128}
        ),
        "merge": (
            merge_states, {"args": (some(3, 5, 2, 64), rng.standard_normal((3, 5, 2)).astype(np.float32))}
        ),
    }


NAMES = sorted(_calls(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_takes_it(name: str, dtype: Any) -> None:
    """Near float64, other bits than float32 (of lse), and the context ends with the call."""
    function, named = _calls(dtype)[name]
    args = named.pop("args")
    (out, lse), (usual_out, usual), (exact, exact_lse) = (
        function(*args, **named, return_lse=True, **how)
        for how in ({"arithmetic": "chip"}, {"arithmetic": "float32"}, {"backend": "reference"})
    )
    assert not current_arithmetic().exact
    bound = 1e-5 if dtype == np.float32 else 2.0**-7
    assert np.abs(out.astype(np.float32) - exact.astype(np.float32)).max() <= bound * max(1, np.abs(exact).max())
    assert np.abs(lse - exact_lse).max() <= 1e-5
    assert (lse != usual).any() or (out != usual_out).any() or dtype == bfloat16
    default = function(*args, **named, return_lse=True)[1]
    assert (default.view(np.uint32) == usual.view(np.uint32)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", ["exact", "CHIP", "", None, 1, ["chip"]], ids=repr)
def test_other_names_are_refused_before_anything_is_written(name: str, bad: Any) -> None:
    function, named = _calls(np.float32)[name]
    args = named.pop("args")
    out = np.full_like(function(*args, **named, return_lse=True)[0], 7)
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match=r"arithmetic .*: must be one of float32, chip"):
            function(*args, **named, out=out, arithmetic=bad, backend=backend)
    with pytest.raises(ValueError, match="arithmetic"):
        explain(function, *args, **named, arithmetic=bad)
    assert (out == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_emulator_has_it(name: str) -> None:
    function, named = _calls(np.float32)[name]
    args = named.pop("args")
    words = "arithmetic is 'chip' with backend 'reference': must be 'float32'; the emulator alone"
    with pytest.raises(ValueError, match=words):
        function(*args, **named, arithmetic="chip", backend="reference")
    with pytest.raises(ValueError, match=words):
        explain(function, *args, **named, arithmetic="chip", backend="reference")


def test_amds_is_not_known() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(shape).astype(bfloat16) for shape in ((1, 4, 64), (2, 16, 2, 64), (2, 16, 2, 64)))
    words = "arithmetic 'chip' on gfx950: must be 'float32'"
    for function in (mha_decode_paged, mha_decode_streaming_paged):
        with pytest.raises(ValueError, match=words):
            function(q, k, v, *ONE, arch="gfx950", arithmetic="chip")
        with pytest.raises(ValueError, match=words):
            explain(function, q, k, v, *ONE, arch="gfx950", arithmetic="chip")
    with pytest.raises(ValueError, match=words):
        mha_prefill(q[None], k[:1], v[:1], arch="gfx950", arithmetic="chip")


FEATURES: list[dict[str, Any]] = [
    {"softcap": 5.0}, {"sinks": np.float32([0.5, 1, -1, 2])}, {"alibi_slopes": np.float32([0.5, 0.25, 0.1, 0.01])},
    {"window": 7}, {"arch": "sm_80"}, {"base2": True},
]


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_features_stay_near_float64(name: str, options: dict[str, Any]) -> None:
    function, named = _calls(bfloat16)[name]
    args = named.pop("args")
    out, lse = function(*args, **options, return_lse=True, arithmetic="chip")
    exact, exact_lse = function(*args, **options, return_lse=True, backend="reference")
    assert np.abs(out.astype(np.float32) - exact.astype(np.float32)).max() <= 2.0**-7 * np.abs(exact).max()
    assert np.abs(lse - exact_lse).max() <= 1e-5
