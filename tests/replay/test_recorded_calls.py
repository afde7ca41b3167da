"""Calls recorded and run again. Rests on laws: a file gives back bits, strides and sharing of arguments; a replay of
what was recorded is what was recorded; a planted fault is the first difference. The format: docs/command.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from kvlab import attention
from kvlab.attention import Rope, masks
from kvlab.attention.call import call as calls
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.arrays import address_of
from kvlab.replay import load, recording, replay
from kvlab.replay.array_values import values_of
from kvlab.replay.recorder import record_process
from kvlab.replay.values import CLASSES

bf16, e4m3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
LENS, TABLE = np.array([20, 7, 0], np.int32), np.array([[3, 1, 99], [2, -5, 7], [-1, -1, -1]])


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(dtype)


def paged(dtype=np.float32, pages=8, heads=2):
    """K and V as the halves of one buffer."""
    both = normal(pages, 2, 16, heads, 64, dtype=dtype)
    return {"k_cache": both[:, 0], "v_cache": both[:, 1], "block_table": TABLE, "seq_lens": LENS}


def collection():
    params = KVCacheStaticParams(2, 64)
    pool = PagedKVCacheCollection.allocate(
        params, num_pages=5, page_size=16, num_layers=2, batch_size=2, max_length=32, dtype="fp32"
    )
    pool.blocks[...] = normal(*pool.blocks.shape)
    pool.lookup_table[:, :2] = [[4, 0], [1, 2]]
    return pool.with_lengths(np.array([18, 3]), 1)


def torch_decode():
    torch = pytest.importorskip("torch")
    both = torch.from_numpy(normal(8, 2, 16, 2, 64)).to(torch.bfloat16)
    q, lens = torch.from_numpy(normal(3, 4, 64)).to(torch.bfloat16), torch.from_numpy(LENS)
    kv = {"k_cache": both[:, 0].to(torch.float8_e4m3fn), "v_cache": both[:, 1].to(torch.float8_e4m3fn)}
    return {"q": q, **kv, "block_table": torch.from_numpy(TABLE), "seq_lens": lens, "k_scale": 0.5, "check": False}


def aliased():
    q = normal(3, 4, 64, seed=1)
    return {"q": q, **paged(), "out": q, "return_lse": True, "scale": np.float32(0.3), "window": (9, None),
            "sinks": normal(4), "alibi_slopes": -np.abs(normal(4))}


def prefill(**more):
    return {"q": normal(9, 4, 64), **paged(), "seq_lens": np.array([20, 7, 0]),
            "cu_seqlens_q": np.array([0, 5, 9, 9]), **more}


def mla_rows():
    return {"q": normal(9, 4, 80), "k": normal(30, 4, 64), "v": normal(30, 4, 64),
            "cu_seqlens_q": np.array([0, 4, 9]), "cu_seqlens_k": np.array([0, 20, 30])}


def masked():
    both = masks.AndMask(masks.CausalMask(), masks.MaterializedMask(normal(2, 4, 6, 6)))
    return {"q": normal(2, 6, 4, 64), "k": normal(2, 6, 2, 64), "v": normal(2, 6, 2, 64)[:, :, :, ::1], "mask": both}


STORE = {"k": normal(4, 2, 64), "v": normal(4, 2, 64, seed=1), "slot_mapping": np.array([17, -1, 90, 3])}
CASES = {
    "decode of a window, out is q": ("mha_decode_paged", aliased),
    "decode of torch fp8": ("mha_decode_paged", torch_decode),
    "decode of bf16": ("mha_decode_paged", lambda: {"q": normal(3, 2, 4, 64, dtype=bf16), **paged(bf16)}),
    "decode of a collection": ("mha_decode", lambda: {"q": normal(2, 4, 64), "cache": collection(), "layer": 1}),
    "streaming": ("mha_decode_streaming_paged", lambda: {"q": normal(3, 4, 64), **paged()}),
    "prefill of two masks": ("mha_prefill", masked),
    "prefill of pages": ("mha_prefill_paged", lambda: prefill(mask=masks.BandMask(None, 3), softcap=20.0)),
    "attend by a plan": ("attend_paged", lambda: prefill(plan=attention.plan(
        np.array([20, 7, 0]), (np.array([0, 5, 9, 9]), 9), q_heads=4, kv_heads=2, head_dim=64, programs=6))),
    "mla decode": ("mla_decode_paged", lambda: {
        "q": normal(3, 4, 80, dtype=bf16), "kv_cache": normal(8, 16, 80, dtype=bf16), "block_table": TABLE,
        "seq_lens": LENS, "v_dim": 64, "scale": 0.1}),
    "mla decode of slots": ("mla_decode_paged", lambda: {
        "q": normal(3, 4, 80), "kv_cache": normal(8, 16, 80), "v_dim": 64, "scale": 0.1,
        "indices": np.array([[3, 40, -1], [90, 5, 6], [-1, -1, -1]])}),
    "mla prefill": ("mla_prefill_ragged", lambda: {**mla_rows(), "k_rope": normal(30, 16)}),
    "mla prefill of pages": ("mla_prefill_paged", lambda: {
        **mla_rows(), "kv_cache": normal(8, 16, 80), "latent_dim": 64, "block_table": TABLE[:2],
        "seq_lens": np.array([20, 10])}),
    "merge": ("merge_states", lambda: {"outs": normal(2, 3, 4, 64), "lses": normal(2, 3, 4)}),
    "store with rope": ("kv_store_paged", lambda: {
        **STORE, "k_cache": np.zeros((8, 16, 2, 64), bf16), "v_cache": np.zeros((8, 16, 2, 64), e4m3),
        "v_scale": 0.5, "rope": Rope.of_base(40, 32, first=0), "positions": np.array([3, 9, 1, 30])}),
    "store of a collection": ("kv_store", lambda: {
        "k": normal(2, 2, 64), "v": normal(2, 2, 64), "cache": collection()}),
    "store of rows": ("mla_store_paged", lambda: {
        "latent": normal(2, 512), "k_rope": normal(2, 64), "cache": np.zeros((3, 4, 640), e4m3),
        "slot_mapping": np.array([9, 2])}),
}


def same(given, found, pages=None):
    """Whether two arguments are one, arrays to the bit where the call looks."""
    if hasattr(given, "dtype") and hasattr(given, "ndim") and given.ndim:
        assert type(found) is type(given)
        assert found.dtype == given.dtype
        assert tuple(found.shape) == tuple(given.shape)
        steps = [a.stride() if hasattr(a, "stride") else a.strides for a in (given, found)]
        assert steps[0] == steps[1]
        a, b = values_of(given, pages), values_of(found, pages)
        assert a.tobytes() == b.tobytes()
    elif isinstance(given, tuple | list):
        assert type(found) is type(given)
        assert len(found) == len(given)
        for one, other in zip(given, found, strict=True):
            same(one, other)
    elif type(given).__name__ in CLASSES and not isinstance(given, tuple):
        assert type(found) is type(given)
        for name in CLASSES[type(given).__name__][1]:
            same(getattr(given, name), getattr(found, name))
    else:
        assert type(found) is type(given)
        assert (found == given)


@pytest.mark.parametrize("case", CASES)
def test_arguments_come_back_to_the_bit_and_a_replay_finds_no_difference(case, tmp_path):
    name, make = CASES[case]
    operation, given, same_again = getattr(attention, name), *({**make(), "backend": "reference"} for _ in range(2))
    before = operation.made(**same_again).arguments
    with recording(tmp_path) as recorder:
        operation(**given)
    recorded = load(recorder.files[0])
    found = recorded.arguments()
    assert found.keys() == before.keys()
    assert not recorded.missing
    for argument, value in before.items():
        rows = recorded.held.values.get(f"{argument}.pages")
        same(value, found[argument], rows)
        if rows is not None:  # what the call does not name is poisoned
            others = np.setdiff1d(np.arange(len(value)), rows)
            assert (values_of(found[argument], others).view(np.uint8) == 0xFF).all()
            assert len(others)
    for argument in given.keys() & found.keys():
        if getattr(given[argument], "ndim", 0) > 1:
            assert address_of(found[argument]) % 256 == address_of(given[argument]) % 256
    if case.endswith("out is q"):
        assert found["out"].ctypes.data == found["q"].ctypes.data
        assert found["v_cache"].ctypes.data - found["k_cache"].ctypes.data == 16 * 2 * 64 * 4
    exact = replay(recorded, quick=True)
    assert exact.ok, str(exact)
    assert "reference" in exact.repeated, str(exact)
    assert {one.side for one in exact.comparisons} >= {"recorded"}


def decode(folder, **more):
    with recording(folder, **more) as recorder:
        attention.mha_decode_paged(normal(3, 4, 64), **paged(), return_lse=True)
    return recorder.files[0]


def test_a_wrong_result_is_named_and_a_right_one_repeated(tmp_path, monkeypatch):
    assert replay(decode(tmp_path), quick=True).repeated == ("emulator",)
    rights = calls.Call.results

    def wrong(self, out, lse):
        out = out.copy()
        out[1, :, 2] *= 0.5
        return rights(self, out, lse)

    with monkeypatch.context() as patched:
        patched.setattr(calls.Call, "results", wrong)
        file = decode(tmp_path)
    found = replay(file, quick=True)
    assert not found.ok
    assert not found.repeated
    assert found.finding.startswith("first difference: out of the recorded side against the reference: first at [1, 2,")
    assert "64 of 768 elements are off, in 1 rows, 6 to 6; there, scale missing: the first is 0.5" in found.finding
    assert [one.side for one in found.comparisons if not one.ok] == ["recorded"]
    picture = found.draw()
    assert "first difference" in picture.title
    assert "row 6, column 63: " in picture.svg
    assert picture.svg.count("times what is allowed") == 64
    assert "first difference" in found.to_html(full=True)


def test_a_file_keeps_its_bound_and_says_what_it_lacks(tmp_path):
    for limit in (0, 4096, 60_000):
        file = decode(tmp_path, limit=limit)
        recorded = load(file)
        assert file.stat().st_size < limit + 12_000
        kept = sum(values.nbytes for part in (recorded.held, recorded.results) for values in part.values.values())
        assert kept <= limit
        assert ("k_cache" in recorded.held.values) == (limit == 60_000)
    lacking = load(decode(tmp_path, limit=4096))
    assert lacking.results.entries["out"]["sha256"] == recorded.results.entries["out"]["sha256"]
    with pytest.raises(ValueError, match=r"lacks k_cache: float32 \[8, 16, 2, 64\], SHA-256 .*: must be recorded with"):
        replay(lacking)
    with recording(tmp_path, calls=1) as recorder:
        for _ in range(3):
            attention.merge_states(normal(2, 3, 4, 8), normal(2, 3, 4))
    assert len(recorder.files) == 1


@pytest.mark.parametrize("case", ["decode of bf16", "mla decode of slots", "store with rope", "store of a collection"])
def test_a_large_pool_is_made_small(case, tmp_path, monkeypatch):
    name, make = CASES[case]
    with recording(tmp_path) as recorder:
        getattr(attention, name)(**make(), backend="reference")
    monkeypatch.setattr("kvlab.replay.recorded.MOST_BYTES", 0)
    recorded = load(recorder.files[0])
    cache = next(one for one in recorded.held.entries if one.endswith("_cache"))
    kept = recorded.held.values.get(f"{cache}.pages")
    assert len(recorded.arguments()[cache]) == (5 if kept is None else len(kept)) < 8
    found = replay(recorded, quick=True)
    assert found.ok, str(found)
    assert "reference" in found.repeated


def test_arrays_go_to_the_device_of_the_kernel(tmp_path):
    torch = pytest.importorskip("torch")
    recorded = load(decode(tmp_path))
    found, here = recorded.arguments(device="cpu"), recorded.arguments()
    for name in ("q", "k_cache", "block_table"):
        assert isinstance(found[name], torch.Tensor)
        assert np.array_equal(found[name].numpy(), here[name], equal_nan=name == "k_cache")
        assert found[name].data_ptr() % 256 == address_of(here[name]) % 256
    assert found["v_cache"].data_ptr() - found["k_cache"].data_ptr() == 16 * 2 * 64 * 4


def test_calls_that_raise_or_crash_are_kept_and_what_cannot_be_is_a_warning(tmp_path, monkeypatch):
    long = {**paged(), "seq_lens": np.array([20, 49, 0])}
    with recording(tmp_path) as recorder, pytest.raises(ValueError, match=r"seq_lens\[1\] is 49"):
        attention.mha_decode_paged(normal(3, 4, 64), **long)
    found = replay(recorder.files[0], quick=True)
    assert found.ok
    assert "every side raised ValueError: seq_lens[1] is 49" in found.finding
    narrow = {"q": normal(3, 4, 32), **{n: x[..., :32] if n.endswith("cache") else x for n, x in paged().items()}}
    with recording(tmp_path) as recorder:
        attention.mha_decode_paged(**narrow, arch="gfx950", backend="reference")
    refused = replay(recorder.files[0], quick=True)
    assert refused.ok
    assert refused.sides["emulator"].words.startswith("did not run: ValueError: ")
    monkeypatch.setattr("kvlab.replay.recorder.write", lambda *told: 1 / 0)
    words = r"a call of mha_decode is not recorded in .*: ZeroDivisionError"
    with recording(tmp_path) as recorder, pytest.warns(RuntimeWarning, match=words):
        attention.mha_decode_paged(normal(3, 4, 64), **paged())
    assert not recorder.files
    monkeypatch.undo()
    monkeypatch.setattr("kvlab.replay.recorder.Recorder._ended", lambda *told: None)
    crashed = replay(decode(tmp_path), quick=True)
    assert crashed.ok
    assert "the call did not end" in str(crashed)


def test_no_recorder_is_one_look_a_call(monkeypatch):
    looks = []

    class Looked(list):
        def __len__(self):
            looks.append(1)
            return 0

    monkeypatch.setattr(calls, "RECORDERS", Looked())
    attention.merge_states(normal(2, 3, 4, 8), normal(2, 3, 4))
    assert looks == [1]


def test_the_environment_records_a_process_and_without_it_nothing_is_imported(tmp_path, monkeypatch):
    code = (
        "import sys, numpy as np; from kvlab.attention import merge_states\n"
        "merge_states(np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32))\n"
        "print('kvlab.replay' in sys.modules, 'torch' in sys.modules)"
    )
    found = []
    for more in ({}, {"KVLAB_RECORD": str(tmp_path / "calls")}):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True)
        found.append(done.stdout.split())
    assert found == [["False", "False"], ["True", "False"]]
    (file,) = (tmp_path / "calls").iterdir()
    assert "emulator" in replay(file, quick=True).repeated
    monkeypatch.setenv("KVLAB_RECORD", str(file))
    with pytest.raises(ValueError, match=r"^KVLAB_RECORD: folder is .*: must be a folder"):
        record_process()
    monkeypatch.setenv("KVLAB_RECORD_LIMIT", "-1")
    with pytest.raises(ValueError, match=r"^KVLAB_RECORD_LIMIT is '-1': must be a number$"):
        record_process()


def rewritten(file, target, change, member="call.json"):
    """A file whose JSON is changed."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == member:
                told = json.loads(data)
                change(told)
                data = json.dumps(told).encode()
            new.writestr(name, data)
    return target


def set_(*path, to):
    def change(told):
        for key in path[:-1]:
            told = told[key]
        told[path[-1]] = to
    return change


BAD = {
    "format is 'zip'": set_("format", to="zip"),
    "version is 2": set_("version", to=2),
    "call is 'Popen'": set_("call", to="Popen"),
    "arguments is None": set_("arguments", to=None),
    "arguments.q is {'exec': 'x'}": set_("arguments", "q", to={"exec": "x"}),
    "arguments.q.class is 'Popen'": set_("arguments", "q", to={"class": "Popen", "fields": {}}),
    "arguments.q.array is 'z'": set_("arguments", "q", to={"array": "z"}),
    "arrays.q.dtype is 'object'": set_("arrays", "q", "dtype", to="object"),
    "arrays.q.shape is [3, -4]": set_("arrays", "q", "shape", to=[3, -4]),
    "arrays.q.strides is [1]": set_("arrays", "q", "strides", to=[1]),
    "arrays.q.offset is 4096": set_("arrays", "q", "offset", to=4096),
    "arrays.q.storage is 9": set_("arrays", "q", "storage", to=9),
    "arrays.q.kept is 'pickle'": set_("arrays", "q", "kept", to="pickle"),
    "arrays.q.sha256 is 0000": set_("arrays", "q", "sha256", to="0" * 64),
    "arrays.k_cache.pages is 99": set_("arrays", "k_cache", "pages", to=99),
    "storages[0].address is 256": set_("storages", 0, "address", to=256),
}


def test_bad_files_name_the_field(tmp_path):
    file = decode(tmp_path)
    for number, (words, change) in enumerate(BAD.items()):
        with pytest.raises(ValueError) as refused:
            load(rewritten(file, tmp_path / f"{number}.npz", change))
        assert str(refused.value).startswith(words)
        assert ": must be " in str(refused.value)
    with pytest.raises(ValueError, match=r"results.raised is 3: must be text"):
        load(rewritten(file, tmp_path / "r.npz", set_("raised", to=3), "results.json"))
    (tmp_path / "half.npz").write_bytes(file.read_bytes()[:3000])
    for bad in ("half.npz", "none.npz"):
        with pytest.raises(ValueError, match="must be a"):
            load(tmp_path / bad)
    for odd in (None, 3, b"x", "a\0b", tmp_path):
        with pytest.raises(ValueError, match=r"^path is .*: must be a (path, text or os.PathLike|file)$"):
            load(odd)
    with pytest.raises(ValueError, match="folder is None: must be a path"), recording(None):
        pass


def test_the_command_ends_as_it_says(tmp_path, capfd):
    pytest.importorskip("typer")
    from kvlab.command import main

    file = decode(tmp_path)
    bad = rewritten(file, tmp_path / "bad.npz", set_("raised", to="RuntimeError: out of shared memory"), "results.json")
    page, picture = tmp_path / "x.html", tmp_path / "x.svg"
    for argv, code in (
        ((file, "-o", page), 0), ((file, "-o", picture), 0), ((bad, "--json"), 1), ((tmp_path / "no.npz",), 2),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["replay", *map(str, argv), "--quick"])
        assert ended.value.code == code
        said = capfd.readouterr()
        assert bool(said.out) == (code < 2)
        if code == 1:
            told = json.loads(said.out)
            assert told["first_difference"].startswith("recorded: raised RuntimeError: out of shared memory; reference")
    assert "no difference" in page.read_text()
    assert picture.read_text().startswith("<svg")


@pytest.mark.interpreter
def test_kernel_and_lockstep_run_what_a_torch_call_had(tmp_path):
    torch = pytest.importorskip("torch")
    given = {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in paged().items()}
    given |= {"block_table": torch.tensor([[3, 1]]), "seq_lens": torch.tensor([20])}
    with recording(tmp_path) as recorder:
        attention.mha_decode_paged(torch.from_numpy(normal(1, 4, 64)), **given, backend="emulator")
    found = replay(recorder.files[0])
    assert found.ok, str(found)
    assert found.lockstep.ok
    assert "emulator" in found.repeated
    assert [one.side for one in found.comparisons] == ["recorded", "emulator", "kernel"]
    assert "emulator" in found.to_html()
    assert found.draw().svg.startswith("<svg")
