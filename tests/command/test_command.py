"""The command ``kvlab``. Rests on the functions behind it, on the exit codes that docs/command.md states, on files."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

from kvlab.attention import explain, mha_decode_paged
from kvlab.command import calls, checkout, machine, main
from kvlab.formats import MODELS, kv_budget
from kvlab.hardware import best_padding, best_swizzle
from kvlab.layout import ComposedLayout, Layout, Swizzle
from kvlab.layout.encodings import BlockedLayout, SwizzledSharedLayout
from kvlab.replay import recording

ROOT = Path(__file__).resolve().parents[2]
NEEDS_A_KERNEL = ("lockstep", "xray", "diff")


@pytest.fixture
def kvlab(capfd):
    """(exit code, standard output, standard error) of one command line."""

    def call(*argv: str):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return call


def lines_of_the_page():
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    for line in re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines():
        command, _, said = line.partition("#")
        code = re.match(r" ([12]):", said)
        if not command.split()[1].startswith(NEEDS_A_KERNEL):
            yield shlex.split(command)[1:], int(code[1]) if code else 0


def test_commands_of_the_page_end_as_it_says(kvlab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [(argv, code, kvlab(*argv)) for argv, code in lines_of_the_page()]
    assert len(found) > 8
    for argv, code, (ended, out, err) in found:
        assert (ended, bool(out), bool(err)) == (code, code < 2, code == 2), argv
    assert (tmp_path / "x.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "The operand of a wgmma at byte 16384" in found[2][2][1]
    assert "448 conflicts" in found[4][2][1]


def test_conflicts_as_json_are_those_of_the_library(kvlab):
    argv = ("--dtype", "bf16", "--access", "ldmatrix.x4", "--proof", "--json")
    code, out, _ = kvlab("conflicts", "Sw<2,3,3> o (32,64):(64,1)", *argv)
    tile = ComposedLayout(Layout.row_major(32, 64), Swizzle(2, 3, 3, "bf16"))
    swizzle = best_swizzle(tile, "bf16", "ldmatrix.x4")
    told = json.loads(out)
    assert (code, told["wavefronts"], told["ideal"]) == (1, swizzle.given, swizzle.ideal)
    assert [one["kind"] for one in told["cures"]] == ["swizzle"]  # a padding is no cure of a swizzled tile
    assert told["cures"][0]["candidates"] == [[str(one.change), one.wavefronts] for one in swizzle.candidates]
    code, out, _ = kvlab("conflicts", "32x64", *argv)
    padding = best_padding((32, 64), "bf16", "ldmatrix.x4")
    assert json.loads(out)["cures"][1]["extra_bytes"] == padding.extra_bytes


def test_a_budget_as_json_is_that_of_the_library(kvlab, tmp_path):
    """Of a file whose model has windows and K and V of others; the chart; a card that is small; an unknown kind."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma-3n-e4b"].config))
    argv = ("--tokens", "4000", "--kv-dtype", "fp8", "--page-size", "32", "-t", "2", "--memory", "24GB", "--json")
    code, out, _ = kvlab("budget", str(tmp_path), *argv, "-o", str(tmp_path / "b.svg"))
    told, ours = json.loads(out), kv_budget("gemma-3n-e4b", kv_dtype="fp8", page_size=32, degree=2)
    assert (code, told["bytes_per_token"], told["model"]) == (0, ours.bytes_per_token, tmp_path.name)
    assert told["request"] == {**ours.request(4000)._asdict(), "bytes": ours.request(4000).nbytes}
    assert told["fit"] == ours.fit("24GB", 4000)._asdict()
    assert [layer["shared"] for layer in told["layers"]] == [layer.shared for layer in ours.per_layer]
    assert f"holds {ours.request(4000).nbytes:,} bytes" in (tmp_path / "b.svg").read_text(encoding="utf-8")
    code, out, _ = kvlab("budget", str(tmp_path), "--memory", "1GB")
    assert (code, "0 requests of 8192 tokens" in out) == (1, True)
    code, out, _ = kvlab("budget", str(tmp_path), "align=65536", "uniform_pages=True", "--json")
    assert json.loads(out)["request"]["padding"] == kv_budget("gemma-3n-e4b", align=65536).request(8192).padding > 0
    assert "option is 'aline': must be one of align, mtp" in kvlab("budget", str(tmp_path), "aline=4")[2]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1, "layer_types": ["retention"]}')
    code, out, err = kvlab("budget", str(tmp_path / "config.json"))
    assert (code, out, err.startswith("kvlab: layer_types[0] is 'retention': must be one of")) == (2, "", True)


def test_a_report_is_read_from_the_standard_input(kvlab, monkeypatch, tmp_path):
    """A module of TTGIR as Triton printed it (tests/data/rosetta.json): the sentence, the picture, the file."""
    report = json.loads((ROOT / "tests" / "data" / "rosetta.json").read_text())["modules"]["sm_90"]
    monkeypatch.setattr("sys.stdin", io.StringIO(report))
    code, out, _ = kvlab("draw", "-", "-o", str(tmp_path / "r.html"), "--json")
    told = json.loads(out)
    assert (code, told["notation"], told["title"]) == (0, "TTGIR", told["sentence"])
    assert "on 64 x 64 bfloat16" in told["sentence"]
    assert told["sentence"] in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_swizzle_that_may_count_bytes_is_doubted(kvlab):
    argv = ("--dtype", "f16", "--access", "ldmatrix.x4")
    tile = "Sw<3,4,3> o (8,64):(64,1)"
    for command in ("conflicts", "draw"):
        assert "Counted in bytes (--swizzle-unit byte) the swizzle gives 8 wavefronts" in kvlab(command, tile, *argv)[1]
    code, out, _ = kvlab("conflicts", tile, *argv, "--swizzle-unit", "byte")
    assert (code, "no conflicts" in out) == (0, True)


def test_encodings_are_tiles_and_accesses(kvlab):
    shared = "#ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [1, 0]}>"
    blocked = (
        "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], warpsPerCTA = [1, 1], order = [0, 1]}>"
    )
    code, out, _ = kvlab(
        "conflicts", shared, "--shape", "32x32", "--dtype", "f32", "--access", f"st:{blocked}", "--json"
    )
    found = best_swizzle(
        SwizzledSharedLayout(1, 1, 1, (1, 0)), "f32", ("st", BlockedLayout([1, 1], [32, 1], [1, 1], [0, 1])),
        shape=(32, 32),
    )
    assert (code, json.loads(out)["cures"][0]["change"]) == (1, str(found.swizzle))


def test_explain_tells_the_plan_of_the_call(kvlab):
    _, out, _ = kvlab("explain", "mha_decode_paged", "--json")
    kv, table = np.zeros((6, 16, 2, 64), "f2"), np.arange(6).reshape(2, 3)
    plan = explain(mha_decode_paged, np.zeros((2, 8, 64), "f2"), kv, kv, table, np.array([40, 40]))
    told = json.loads(out)
    assert told["grid"] == list(plan.grid)
    assert {name: told["config"][name] for name in ("BM", "BN")} == {"BM": plan.config.BM, "BN": plan.config.BN}
    assert "arch=gfx950" not in out
    assert json.loads(kvlab("explain", "mha_decode_paged", *calls.EXAMPLES["mha_decode_paged"].split(), "arch=gfx950",
                            "--json")[1])["arch"] == "gfx950"


@pytest.mark.parametrize("name", calls.EXAMPLES)
def test_every_example_is_a_call(name):
    assert calls.explained(name, ()).data["operation"]


@pytest.mark.parametrize(
    "argv, says",
    [
        (("draw", "(8,64):(64"), "'(8,64):(64' is no CuTe text"),
        (("draw", "8x64", "--access", "ldmatrix.x4"), "dtype is None: must be given with an access"),
        (("draw", "8x64", "-o", "x.gif"), "must end in .svg, .html or .png"),
        (("conflicts", "8x64", "-d", "f16", "-a", "ldmatrix.x4", "--shape", "8"), "shape is '8': must be"),
        (("conflicts", "8x64", "-d", "f16", "-a", "wgmma", "--shape", "8x8"), "shape is '8x8': must be left out"),
        (("conflicts", "0x10400", "-d", "f16", "-a", "wgmma"), "tile is SmemDescriptor"),
        (("conflicts", "8x64", "-d", "f17", "-a", "ldmatrix.x4"), "f17"),
        (("explain", "mha_encode"), "operation is 'mha_encode': must be one of attend_paged"),
        (("explain", "mha_decode"), "takes q, cache: must be given"),
        (("explain", "mha_decode_paged", "q:3"), "argument is 'q:3': must be NAME=VALUE"),
        (("explain", "mha_decode_paged", "q=3:i32=1,2"), "q is '3:i32=1,2': must be filled with 3 numbers"),
        (("explain", "mha_decode_paged", "q=3:i32=a"), "must be filled with a number"),
        (("explain", "mha_decode_paged", "q=3:i32=nan"), "must be filled with integers from -2147483648 to 2147483647"),
        (("explain", "mha_decode_paged", f"q={10**17}x8:bf16=range"), "must be of fewer than 2**48 elements"),
        (("xray", ":scale"), "':scale' names no function: must be FILE.py:name or module:name"),
        (("xray", "kvlab:scale", "-o", "x.svg"), "output is 'x.svg': must be one that ends in .html"),
        (("lockstep", "merge_states", "-o", "nowhere/x.html"), "must be in a folder that there is"),
        (("lockstep", "kernels.py:scale"), "'kernels.py:scale' is a kernel: must be followed by its twin"),
        (("lockstep", "kernels.py:scale", "twins.py:scale"), "there is no file kernels.py"),
        (("bench", "speed"), "benchmark is 'speed': must be one of attention"),
        (("budget", "qwen3-8b", "mtp=True", "mtp=False"), "argument is 'mtp=False' after mtp=True: must be given once"),
        (("explain", "mha_decode_paged", "q=2:i32", "q=3:i32"), "argument is 'q=3:i32' after q=2:i32: must be given"),
        (("budget", "qwen3-8b", "mtp"), "argument is 'mtp': must be NAME=VALUE, 'mtp=True' or 'align=4096' say"),
        (("budget", "qwen3-8b", "--weights", "9GB"), "weights is '9GB': must be left out but beside --memory"),
        (("budget", "qwen3-8b", "--utilisation", "1"), "utilisation is 1.0: must be left out but beside --memory"),
        (("budget", "qwen3-8b", "-o", "nowhere/x.svg"), "must be in a folder that there is"),
    ],
)
def test_bad_input_is_told_in_one_line(kvlab, argv, says):
    code, out, err = kvlab(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", "SyntaxError: invalid syntax"), ("nothing", "NameError: name 'nothing' is not"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"), ("raise SystemExit(5)", "SystemExit: 5"),
    ],
)
def test_what_a_file_raises_is_told_in_one_line(kvlab, tmp_path, source, says):
    file = tmp_path / f"raises_{len(source)}.py"
    file.write_text(source)
    code, out, err = kvlab("xray", f"{file}:scale")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"cannot be imported: {says}" in err


def test_numbers_of_an_array_are_exact():
    """Of 64 bits, where a float has 53."""
    assert calls.arguments(["at=2:i64=9007199254740993,-1"], "random")["at"].tolist() == [9007199254740993, -1]


def test_a_difference_that_is_no_number_is_json(kvlab, tmp_path):
    """Rests on JSON's grammar (RFC 8259): it has no Infinity and no NaN, which a recorded result may be."""
    kv, table = np.ones((2, 4, 1, 16), "f2"), np.array([[1]])
    with recording(tmp_path):
        mha_decode_paged(np.ones((1, 1, 16), "f2"), kv, kv, table, np.array([3]))
    (file,) = tmp_path.iterdir()
    with zipfile.ZipFile(file) as recorded:
        parts = {name: recorded.read(name) for name in recorded.namelist()}
    told, bad = json.loads(parts["results.json"]), np.full((1, 1, 16), np.inf, "f2")
    told["arrays"]["out"]["sha256"] = hashlib.sha256(bad.tobytes()).hexdigest()
    text = io.BytesIO()
    np.save(text, bad)
    parts |= {"results.json": json.dumps(told).encode(), "results/out.npy": text.getvalue()}
    with zipfile.ZipFile(file, "w") as changed:
        for name, part in parts.items():
            changed.writestr(name, part)
    code, text, _ = kvlab("replay", str(file), "--quick", "--json")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (code, found["comparisons"][0]["error"]) == (1, "inf")


def test_a_closed_standard_input_is_told(kvlab, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "the standard input, which is closed" in kvlab("draw", "-")[2]


def test_doctor_tells_what_is_missing(kvlab, monkeypatch):
    code, out, _ = kvlab("doctor", "--quick", "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    monkeypatch.setattr(machine.versions, "installed", lambda: None)
    code, out, _ = kvlab("doctor", "--quick")
    assert code == 0
    assert re.search(r"no +Triton +is not installed: kernels run in the emulator alone", out)
    monkeypatch.setattr(machine, "_emulate", lambda: 1 // 0)
    code, out, _ = kvlab("doctor", "--quick")
    assert code == 1
    assert re.search(r"fails +emulator +ZeroDivisionError", out)


def test_what_lies_beside_the_package_is_run_with_its_arguments(kvlab, monkeypatch, tmp_path):
    ran = []
    done = subprocess.CompletedProcess((), 3)
    monkeypatch.setattr(subprocess, "run", lambda command, **how: ran.append(command) or done)
    assert kvlab("bench", "report", "--all", "x")[0] == 3
    assert kvlab("lab", "--no-browser")[0] == 3
    assert [command[1:] for command in ran] == [
        [str(ROOT / "benchmarks" / "report.py"), "--all", "x"],
        ["-m", "jupyterlab", str(ROOT / "notebooks"), "--no-browser"],
    ]
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert "notebooks are not part of the installed package" in kvlab("lab")[2]


def test_the_demo_is_that_of_its_module(kvlab, monkeypatch):
    seen = []
    monkeypatch.setattr("kvlab.demo.__main__.main", lambda argv: seen.append(argv) or 1)
    assert kvlab("demo", "--page-size", "4", "--input", "mine.npz")[0] == 1
    assert seen == [["--input", "mine.npz", "--output", "demo", "--page-size", "4"]]
    assert kvlab("demo", "--page-size", "0")[0] == 2


def test_the_shell_completes():
    """What a shell asks of the process: the subcommands that begin so."""
    asked = {"_KVLAB_COMPLETE": "complete_bash", "COMP_WORDS": "kvlab con", "COMP_CWORD": "1"}
    how = {"cwd": ROOT, "env": os.environ | asked, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", "kvlab"], **how)
    assert done.stdout.split() == ["conflicts"]


TRANSPOSE = """
import triton, triton.language as tl

@triton.jit
def transpose(x, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + column * N + row, tl.load(x + row * N + column))

@triton.jit
def copy(x, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + row * N + column, tl.load(x + row * N + column))
"""


@pytest.mark.compile
def test_xray_and_diff_of_kernels_in_a_file(kvlab, tmp_path):
    """Rests on kvlab.xray of the same kernels: a finding, and what a copy has not, in words, JSON and exit codes."""
    (tmp_path / "turning_kernels.py").write_text(TRANSPOSE)
    place = f"{tmp_path}/turning_kernels.py"
    types = ("x=*fp32", "out=*fp32", "N=64")
    code, out, _ = kvlab("xray", f"{place}:transpose", *types, "--json", "-o", str(tmp_path / "page.html"))
    from kvlab.xray import xray

    ours = xray(importlib.import_module("turning_kernels").transpose, {"x": "*fp32", "out": "*fp32", "N": 64})
    told = json.loads(out)
    assert (code, told["kernel"], len(told["findings"])) == (int(bool(ours.findings)), "transpose", len(ours.findings))
    assert "transpose" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert kvlab("diff", f"{place}:copy", f"{place}:copy", *types)[0] == 0
    code, out, _ = kvlab("diff", f"{place}:copy", f"{place}:transpose", *types, "--json")
    assert (code, json.loads(out)["b"]) == (1, "transpose")
    other = ("--b", "N=32", "--target-b", "sm_80")
    code, out, _ = kvlab("diff", f"{place}:copy", f"{place}:copy", *types, *other, "--json")
    assert (code, json.loads(out)["targets"]) == (1, ["sm_90", "sm_80"])
    warps = ("num_warps=2", "--b", "num_warps=8")
    code, out, _ = kvlab("diff", f"{place}:copy", f"{place}:copy", *types, *warps, "--json")
    assert (code, [row[1:] for row in json.loads(out)["rows"] if row[0] == "warps"]) == (1, [[2, 8]])
    code, out, _ = kvlab("xray", f"{place}:transpose", *types, "num_warps=1", "maxnreg=24", "--json")
    assert json.loads(out)["resources"]["registers"] <= 24
    for argv, says in (
        ((f"{place}:copies", *types), "there is no copies in turning_kernels"),
        ((f"{place}:copy", "x=*fp32", "out=*fp32"), "missing: ['N']"),
        ((f"{place}:copy", *types[:2], "N=65"), "does not compile for sm_90: CompilationError"),
        ((f"{place}:copy", *types, "-t", "sm_75"), "target is 'sm_75': must be one of"),
        ((f"{place}:copy", *types, "num_wraps=8"), "num_wraps is 8: sm_90 has no such option, must be one of ['num_w"),
    ):
        code, out, err = kvlab("xray", *argv)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert says in err


KERNEL = '''
import torch, triton, triton.language as tl

@triton.jit
def scale(x_ptr, out_ptr, factor, N: tl.constexpr):
    #: load -> x
    column = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + column)
    #: multiply -> y
    y = x * factor
    tl.store(out_ptr + tl.program_id(0) * N + column, y)

def launch(*, x, factor):
    out = torch.empty_like(x)
    scale[(x.shape[0],)](x, out, factor, x.shape[1])
    return out
'''
TWIN = '''
import numpy as np

def scale(x_of, factor):
    #: load -> x
    x = x_of
    #: multiply -> y
    y = x * np.float32({factor})
    return y

def launch(*, x, factor):
    return scale(x, factor)
'''


@pytest.mark.interpreter
def test_lockstep_of_an_operation_and_of_a_pair_in_files(kvlab, tmp_path):
    """Rests on the kernels, interpreted: the twin that adds a hundredth differs in its second step."""
    code, out, _ = kvlab("lockstep", "merge_states", "--json", "-o", str(tmp_path / "page.html"))
    assert (code, json.loads(out)["ok"]) == (0, True)
    assert "merge" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "scale_kernels.py").write_text(KERNEL)
    (tmp_path / "scale_twins.py").write_text(TWIN.format(factor="factor"))
    (tmp_path / "wrong_twins.py").write_text(TWIN.format(factor="factor + 0.01"))
    pair = (f"{tmp_path}/scale_kernels.py:scale", "x=4x64:f32", "factor=2.0")
    assert kvlab("lockstep", pair[0], f"{tmp_path}/scale_twins.py:scale", *pair[1:])[0] == 0
    code, out, _ = kvlab("lockstep", pair[0], f"{tmp_path}/wrong_twins.py:scale", *pair[1:], "--json")
    assert (code, json.loads(out)["first_difference"][:20]) == (1, "scale.multiply, prog"), out


PLAIN_KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offsets, mask=offsets < n) * factor
    tl.store(out_ptr + offsets, y, mask=offsets < n)
"""
PLAIN_TWIN = """
import numpy as np

def scale(x_ptr, out_ptr, factor, n, BLOCK, pid):
    offsets = pid * BLOCK + np.arange(BLOCK)
    y = np.float32(np.where(offsets < n, x_ptr[offsets % len(x_ptr)] * {factor}, 0))
    out_ptr[offsets[offsets < n]] = y[offsets < n]
"""


@pytest.mark.interpreter
def test_lockstep_of_a_kernel_without_markers(kvlab, tmp_path):
    """Rests on the kernel, interpreted: the twin that forgets its factor. The line of the kernel is said first."""
    (tmp_path / "plain_kernels.py").write_text(PLAIN_KERNEL)
    (tmp_path / "plain_twins.py").write_text(PLAIN_TWIN.format(factor="factor"))
    (tmp_path / "plain_wrong.py").write_text(PLAIN_TWIN.format(factor="1"))
    kernel, values = f"{tmp_path}/plain_kernels.py:scale", ("x_ptr=40:f32", "out_ptr=40:f32=0", "factor=2.0", "n=40",
                                                            "BLOCK=16")
    assert kvlab("lockstep", kernel, f"{tmp_path}/plain_twins.py:scale", *values, "--grid", "3")[0] == 0
    code, out, _ = kvlab("lockstep", kernel, f"{tmp_path}/plain_wrong.py:scale", *values, "--grid", "3", "--json")
    assert code == 1
    assert "line 8: `y = tl.load(" in json.loads(out)["finding"]
    assert "scale missing: the first is 2 times the second" in json.loads(out)["finding"]
    code, _, error = kvlab("lockstep", kernel, f"{tmp_path}/plain_twins.py:scale", *values)
    assert (code, "grid is None: must be given" in error) == (2, True), error
    (tmp_path / "plain_raises.py").write_text(PLAIN_TWIN.format(factor="nothing"))
    code, _, error = kvlab("lockstep", kernel, f"{tmp_path}/plain_raises.py:scale", *values, "--grid", "3")
    assert (code, error.count("\n")) == (2, 1)
    assert "or its twin cannot be run: NameError: name 'nothing' is not defined" in error
    code, _, error = kvlab("lockstep", "merge_states", "--grid", "3")
    assert (code, "grid is '3': must be left out" in error) == (2, True), error


def test_files_of_a_user_hide_no_module(tmp_path):
    """``python -m kvlab`` in a folder with files called like modules of the standard library and of packages."""
    for name in ("json", "numpy", "queue", "random", "select", "string", "typing"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('hidden')")
    command = [sys.executable, "-m", "kvlab", "budget", "smollm2-135m", "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["bytes_per_token"] == kv_budget("smollm2-135m").bytes_per_token
