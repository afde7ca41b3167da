"""FlashInfer's dumps and workloads. Rests on the formats that its documentation states (folders, names, safetensors),
and on the same call by kvlab's own arguments."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from kvlab.attention import mha_decode_paged, mha_prefill_paged
from kvlab.memory import bfloat16
from kvlab.replay import load_flashinfer, replay

WRAPPER = "Batch{}WithPagedKVCacheWrapper"
NAMES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}
INDPTR, INDICES, LAST = (np.array(x, np.int32) for x in ([0, 2, 3], [4, 1, 2, 7], [5, 16]))
TABLE, LENS = np.array([[4, 1], [2, -1]]), np.array([21, 16])


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape, np.float32).astype(dtype)


def safetensors(path, **arrays):
    """A file as the format is documented: the header's size, JSON, bytes."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values()))


def dump(root, name, number, arrays, meta, outputs=None, **more):
    """A folder as level 10 writes it."""
    folder = root / f"20260101_00000{number}_000_pid7_{name}_call0001"
    folder.mkdir(parents=True)
    told = {"function_name": name, "module": "flashinfer", "self_id": 77, "timestamp": f"20260101_00000{number}_000",
            "input_metadata": {"arg_0": {"type": "Wrapper", "repr": "<>"}, **meta}, **more}
    if arrays:
        safetensors(folder / "inputs.safetensors", **arrays)
    if outputs:
        safetensors(folder / "outputs.safetensors", **outputs)
    lines = [{**told, "execution_status": "inputs_saved"}, {**told, "execution_status": "completed"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def decode_dump(root, layout="NHD"):
    """A planned decode with its outputs, made by the reference."""
    name, q = WRAPPER.format("Decode"), normal(2, 4, 64, dtype=bfloat16)
    cache = normal(8, 2, 16, 2, 64, dtype=bfloat16)
    options = {"kv_layout": layout, "return_lse": True, "base2": True, "softcap": 30.0, "scale": 0.2, "window": (11, 0)}
    if layout == "HND":
        cache = cache.reshape(8, 2, 2, 16, 64)
    out, lse = mha_decode_paged(q, cache[:, 0], cache[:, 1], TABLE, LENS, backend="reference", **options)
    dump(root, f"{name}.__init__", 1, {}, {"arg_2": layout})
    dump(root, f"{name}.plan", 2, {"arg_1": INDPTR, "arg_2": INDICES, "arg_3": LAST}, {
        "arg_4": 4, "arg_5": 2, "arg_6": 64, "arg_7": 16, "kwarg_window_left": 11, "kwarg_logits_soft_cap": 30.0,
        "kwarg_sm_scale": 0.2, "kwarg_pos_encoding_mode": "NONE",
        "kwarg_q_data_type": {"type": "torch.dtype", "value": "torch.bfloat16"}})
    return dump(root, f"{name}.run", 3, {"arg_1": q, "arg_2": cache}, {"kwarg_return_lse": True},
                {"result_0": out, "result_1": lse})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_dumped_decode_is_the_call_that_it_was(layout, tmp_path):
    recorded = load_flashinfer(decode_dump(tmp_path, layout))
    found = recorded.arguments()
    assert found["block_table"].tolist() == TABLE.tolist()
    assert found["seq_lens"].tolist() == LENS.tolist()
    seen = replay(recorded, quick=True)
    assert seen.ok, str(seen)
    assert seen.repeated == ("reference",)


def test_a_dumped_prefill_with_two_caches(tmp_path):
    name, starts = WRAPPER.format("Prefill"), np.array([0, 6, 9], np.int32)
    q, k, v = normal(9, 4, 64), normal(8, 16, 2, 64), normal(8, 16, 2, 32)
    dump(tmp_path, f"{name}.plan", 2, {"arg_1": starts, "arg_2": INDPTR, "kwarg_paged_kv_indices": INDICES,
                                       "kwarg_paged_kv_last_page_len": LAST}, {"kwarg_causal": True, "arg_8": 16})
    out = mha_prefill_paged(q, k, v, TABLE, LENS, starts, causal=True, backend="reference")
    two = {"type": "tuple", "truncated": False, "length": 2, "items": [
        {"type": "torch.Tensor", "tensor_key": f"kwarg_paged_kv_cache__{i}"} for i in (0, 1)]}
    tensors = {"arg_1": q, "kwarg_paged_kv_cache__0": k, "kwarg_paged_kv_cache__1": v}
    run = dump(tmp_path, f"{name}.run", 3, tensors, {"kwarg_paged_kv_cache": two}, {"result": out})
    recorded = load_flashinfer(run)
    assert recorded.call == "PagedPrefill"
    again = recorded.made(backend="reference").planned()
    assert np.array_equal(again.results(*again.launch()), out)
    assert [one.ok for one in replay(recorded, quick=True).comparisons] == [True, True]


def test_bad_dumps_name_the_field(tmp_path):
    run = decode_dump(tmp_path / "a")
    with pytest.raises(ValueError, match=r"^function_name is 'Batch.*plan': must be Batch"):
        load_flashinfer(next((tmp_path / "a").glob("*plan*")))
    plan = next((tmp_path / "a").glob("*plan*")) / "metadata.jsonl"
    for old, new, words in (
        ('"NONE"', '"ROPE_LLAMA"', "pos_encoding_mode is 'ROPE_LLAMA': must be NONE"),
        ('"arg_7": 16', '"arg_7": 32', "page_size is 32: must be that of paged_kv_cache, 16"),
        ('"kwarg_sm_scale": 0.2', '"kwarg_k_scale": 0.5', "k_scale is 0.5 with a cache of bfloat16: must be 1"),
        ('"kwarg_sm_scale": 0.2', '"kwarg_sm_scale": "0.2"', "sm_scale is '0.2': must be a number, or null"),
        ('"kwarg_window_left": 11', '"kwarg_window_left": []', "window_left is []: must be a number, or null"),
        ('"kwarg_logits_soft_cap": 30.0', '"kwarg_logits_soft_cap": ""', "logits_soft_cap is '': must be a number"),
        ('"kwarg_sm_scale": 0.2', '"kwarg_custom_mask": 1', "custom_mask is given: must be left out"),
        ("{", "[", "line 1 of metadata.jsonl is no JSON"),
    ):
        text = plan.read_text()
        plan.write_text(text.replace(old, new))
        with pytest.raises(ValueError) as refused:
            load_flashinfer(run)
        assert str(refused.value).startswith(words)
        plan.write_text(text)
    plan.unlink()
    with pytest.raises(ValueError, match=r"self_id 77 of .* has no dump of .*plan beside it"):
        load_flashinfer(run)
    file = run / "inputs.safetensors"
    data = bytearray(file.read_bytes())
    file.write_bytes(data.replace(b'"dtype": "BF16"', b'"dtype": ["BF"]', 1))
    with pytest.raises(ValueError, match=r"^arg_1.dtype is \['BF'\]: must be one of BF16"):
        load_flashinfer(run)
    data[:8] = struct.pack("<Q", 1 << 40)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"inputs.safetensors has a header of 1099511627776 bytes: must be within"):
        load_flashinfer(run)


def test_a_workload_of_a_definition(tmp_path):
    axes = {"batch_size": "var", "num_pages": "var", "len_indptr": "var", "num_kv_indices": "var", "heads": 4, "kv": 2,
            "dim": 64, "page_size": 16}
    lists = {"kv_indptr": (["len_indptr"], "int32"), "kv_indices": (["num_kv_indices"], "int32")}
    cache = (["num_pages", "page_size", "kv", "dim"], "bfloat16")
    inputs = {"q": (["batch_size", "heads", "dim"], "bfloat16"), "k_cache": cache, "v_cache": cache, **lists}
    definition = {
        "name": "gqa", "op_type": "gqa_paged",
        "axes": {n: {"type": "var"} if x == "var" else {"type": "const", "value": x} for n, x in axes.items()},
        "inputs": {n: {"shape": s, "dtype": d} for n, (s, d) in inputs.items()} | {"sm_scale": {"shape": None}},
    }
    safetensors(tmp_path / "lists.safetensors", p=INDPTR, i=INDICES)
    given = {n: {"type": "random"} for n in ("q", "k_cache", "v_cache")}
    given |= {"sm_scale": {"type": "scalar", "value": 0.1}}
    given |= {n: {"type": "safetensors", "path": "lists.safetensors", "tensor_key": key}
              for n, key in (("kv_indptr", "p"), ("kv_indices", "i"))}
    bound = {"batch_size": 2, "num_pages": 8, "len_indptr": 3, "num_kv_indices": 4}
    work = {"definition": "gqa", "workload": {"uuid": "u", "axes": bound, "inputs": given}}
    file = tmp_path / "work.jsonl"
    file.write_text(json.dumps(work))
    found = load_flashinfer(file, definition)
    assert found.arguments()["seq_lens"].tolist() == [32, 16]
    assert replay(found, quick=True).ok
    for name, entry in (("q", "shape"), ("q", "dtype")):
        odd = {**definition, "inputs": {**definition["inputs"], name: {**definition["inputs"][name], entry: [[1]]}}}
        with pytest.raises(ValueError, match=rf"^inputs.{name}.{entry} is \[\[1\]\]: must be"):
            load_flashinfer(file, odd)
    for text, words in (("[1]", r"definition is \[1\]: must be an object"), ("[1", "definition is .*: must be JSON")):
        (tmp_path / "definition.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_flashinfer(file, tmp_path / "definition.json")
    with pytest.raises(ValueError, match=r"definition is '.*none.json': must be a JSON file"):
        load_flashinfer(file, tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"line is '0': must be an integer"):
        load_flashinfer(file, definition, line="0")
    bound["num_pages"] = 10**9
    file.write_text(json.dumps(work))
    with pytest.raises(ValueError, match=r"^inputs.k_cache.shape is .*: must be of at most 4294967296 random elements"):
        load_flashinfer(file, definition)
    bound["num_pages"] = 8
    given["kv_indices"] = {"type": "random"}
    file.write_text(json.dumps(work))
    with pytest.raises(ValueError, match=r"^inputs.kv_indices.type is 'random' for int32: must be safetensors"):
        load_flashinfer(file, definition)
    bound.pop("num_pages")
    file.write_text(json.dumps(work))
    with pytest.raises(ValueError, match=r"^axes.num_pages is None: must be a number"):
        load_flashinfer(file, definition)
