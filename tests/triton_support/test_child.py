"""The child process: arrays there and back, exceptions, deaths.

The tests rest on two laws: a call is as if the function had been called here; no process outlives its use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from kvlab.triton_support import child
from kvlab.triton_support.child import ChildDied, ChildTraceback, close, run

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PATIENCE = 300  # seconds: processes start slowly where many share a core


def call(name, *args):
    return run(f"child_functions:{name}", *args)


def script(text: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh Python whose program is ``text``."""
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def assert_ends_with(process: subprocess.Popen[str], pid: int) -> None:
    """Kill ``process``; ``pid`` must end of itself."""
    process.kill()
    process.wait()
    ended = gone(pid)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    assert ended, "the child outlived its parent"


base = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
VIEWS = {
    "whole": base,
    "columns": base[:, 1:7:2],
    "backwards": base[::-2, ::-1],
    "transposed": base.T,
    "scalar": base[2:3, 3].reshape(()),
    "bf16": base.astype(ml_dtypes.bfloat16)[1:, ::3],
    "fp8": base.astype(ml_dtypes.float8_e4m3fn)[:, 2:],
    "complex": base.astype(np.complex128)[::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_keep_their_form_and_take_writes(name):
    storage = VIEWS[name].base if VIEWS[name].base is not None else VIEWS[name]
    original = storage.copy()
    view = VIEWS[name]
    shape, strides, dtype, writeable, address = call("describe", view)
    assert (shape, strides, dtype, writeable) == (view.shape, view.strides, view.dtype, True)
    assert address == view.ctypes.data % 256
    expected = storage.copy()
    try:
        before = view.copy()
        assert call("double", view) is None
        np.testing.assert_array_equal(view, before + before)
        view[...] = before
        np.testing.assert_array_equal(storage, expected)  # nothing beside the view was written
    finally:
        storage[...] = original


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_tensors_keep_strides_and_take_writes(dtype):
    storage = torch.arange(4 * 6 * 8).remainder(13).float().reshape(4, 6, 8).to(dtype)
    before = storage.float()
    view = storage[1:3, ::2, 4:].transpose(0, 1)
    shape, strides, name, address = call("describe_tensor", view)
    assert (shape, strides, name, address) == (tuple(view.shape), view.stride(), str(dtype), view.data_ptr() % 256)
    call("double_tensor", view)
    before[1:3, ::2, 4:] *= 2
    assert torch.equal(storage.float(), before)


def test_arrays_inside_objects():
    from child_functions import Nested

    x = np.zeros(3)
    out = call("nested", Nested({"x": x}, ("word", None)))
    assert x.tolist() == [7, 7, 7]
    assert out.arrays["y"].tolist() == [8, 8, 8]
    assert out.words[0] == "word"
    assert out.words[1][0] is x


def test_overlapping_arrays_overlap_there_too():
    whole = np.arange(8)
    assert call("alias", whole, whole[3:]) == [0, 1, 2, 99, 4, 5, 6, 7]
    assert whole[3] == 99


def test_read_only_arrays_stay_so():
    x = np.arange(4)
    x.flags.writeable = False
    assert call("describe", x)[3] is False
    with pytest.raises(ValueError, match="read-only"):
        call("double", x)


def test_a_mapped_file_takes_writes(tmp_path):
    np.arange(6, dtype=np.int16).tofile(tmp_path / "a")
    mapped = np.memmap(tmp_path / "a", np.int16, "r+")
    call("double", mapped)
    mapped.flush()
    assert np.fromfile(tmp_path / "a", np.int16).tolist() == [0, 2, 4, 6, 8, 10]


def test_an_argument_that_is_returned_is_the_callers():
    x, t = np.arange(4), torch.arange(4)
    assert run("builtins:max", [x, t], key=len) is x
    assert run("operator:iadd", t, 1) is t
    assert t.tolist() == [1, 2, 3, 4]


def test_results_are_copies_of_what_the_child_keeps():
    a = call("constant_array")
    a[:] = 0
    assert call("constant_array").tolist() == [0, 1, 2, 3]


def test_empty_and_object_arrays_are_carried():
    assert run("numpy:concatenate", [np.zeros((0, 3)), np.ones((1, 3))]).shape == (1, 3)
    assert run("builtins:len", np.array([None, "x"], object)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint32], ids=str)
def test_empty_tensors_are_carried(dtype):
    x = torch.empty_strided((2, 0, 3), (9, 7, 1), dtype=dtype)
    there = run("operator:getitem", [x], 0)
    assert (there.shape, there.stride(), there.dtype) == (x.shape, x.stride(), dtype)


def test_tensors_elsewhere_are_refused():
    with pytest.raises(ValueError, match="tensor on meta"):
        call("describe_tensor", torch.empty(3, device="meta"))


def test_exceptions_keep_type_message_and_traceback():
    with pytest.raises(LookupError, match="not here") as caught:
        call("fail", "not here")
    assert type(caught.value) is LookupError
    assert isinstance(caught.value.__cause__, ChildTraceback)
    assert "raise LookupError(message)" in str(caught.value.__cause__)
    assert call("pid") == call("pid")


def test_exceptions_that_pickle_cannot_carry_are_told():
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        call("fail_awkwardly")


@pytest.mark.interpreter
def test_a_kernels_failure_is_an_interpreter_error():
    x = torch.ones(1)
    with pytest.raises(Exception, match="the value is small") as caught:
        run("interpreted_kernels:fail", x)
    assert type(caught.value).__name__ == "InterpreterError"


@pytest.mark.parametrize("path", ["child_functions", "child_functions:", ":f"])
def test_bad_names_are_refused(path):
    with pytest.raises(ValueError, match=r"package\.module:function"):
        run(path)


def test_prints_appear_here(capsys):
    call("speak")
    assert capsys.readouterr() == ("to stdout\n", "to stderr\n")


def test_a_death_is_told_and_the_next_call_works():
    first = call("pid")
    with pytest.raises(ChildDied, match=r"'child_functions:read_null'.*status -11"):
        call("read_null")
    second = call("pid")
    assert second != first
    os.kill(second, signal.SIGKILL)
    child._CHILD.process.wait()
    assert call("pid") not in (first, second)


def test_close_leaves_no_process():
    pid = call("pid")
    close()
    assert not Path(f"/proc/{pid}").exists()
    close()
    assert call("pid") != pid


def test_an_interrupted_call_does_not_answer_the_next():
    def alarm(*_):
        raise KeyboardInterrupt

    def wait():
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        call("wait", PATIENCE)

    call("pid")
    previous = signal.signal(signal.SIGALRM, alarm)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert run("builtins:len", [1, 2]) == 2


def test_threads_take_turns():
    results: dict[int, float] = {}

    def work(n):
        for _ in range(5):
            results[n] = results.get(n, 0) + run("builtins:sum", [n, n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {n: 10 * n for n in range(8)}


def test_this_process_stays_as_it_is():
    before = dict(os.environ)
    assert call("environment", "TRITON_INTERPRET") == "1"
    assert dict(os.environ) == before
    assert not child.is_interpreted()


def test_a_fork_has_a_child_of_its_own():
    program = """
        import os
        from kvlab.triton_support.child import run
        first = run("os:getpid")
        fork = os.fork()
        if not fork:
            os._exit(run("os:getpid") == first or run("os:getppid") != os.getpid())
        status = os.waitpid(fork, 0)[1]
        print(status, run("os:getpid") == first)
    """
    process = script(program)
    assert process.communicate(timeout=PATIENCE)[0].split() == ["0", "True"]


@pytest.mark.parametrize("doing", ['run("os:getpid")', 'run("child_functions:busy", 600)'], ids=["idle", "busy"])
def test_the_child_ends_when_its_parent_is_killed(doing):
    program = f"""
        import time
        from kvlab.triton_support.child import run
        print(run("os:getpid"), flush=True)
        {doing}
        time.sleep(600)
    """
    process = script(program)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    time.sleep(0.2)
    assert_ends_with(process, pid)


def test_a_fork_does_not_keep_the_child_alive():
    program = """
        import os, time
        from kvlab.triton_support.child import run
        print(run("os:getpid"), flush=True)
        fork = os.fork()
        if fork:
            print(fork, flush=True)
        time.sleep(600)
    """
    process = script(program)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    fork = int(process.stdout.readline())
    try:
        assert_ends_with(process, pid)
        assert alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_child_ends_with_its_parent():
    process = script('from kvlab.triton_support.child import run; print(run("os:getpid"))')
    assert gone(int(process.communicate(timeout=PATIENCE)[0]))


def test_a_users_file_hides_no_module_of_python(tmp_path):
    for name in ("json", "enum", "select"):
        (tmp_path / f"{name}.py").write_text("raise OSError(__file__)")
    (tmp_path / "mine.py").write_text("from json import dumps")
    program = f"""
        import sys
        from kvlab.triton_support.child import run
        sys.path.insert(0, {str(tmp_path)!r})
        print(run("mine:dumps", 3))
    """
    assert script(program).communicate(timeout=PATIENCE)[0].split() == ["3"]


def test_an_interpreted_process_needs_no_child():
    program = """
        import os
        from kvlab.triton_support.child import is_interpreted, run
        from kvlab.triton_support.interpreter import NotInterpreted, install
        print(is_interpreted(), run("os:getpid") == os.getpid(), run("interpreted_kernels:version")[1])
    """
    assert script(program, TRITON_INTERPRET="1").communicate(timeout=PATIENCE)[0].split() == ["True", "True", "True"]


def test_corrections_need_an_interpreted_triton():
    program = """
        import os, triton
        os.environ["TRITON_INTERPRET"] = "1"
        from kvlab.triton_support.interpreter import NotInterpreted, install
        try:
            install()
        except NotInterpreted as error:
            print("TRITON_INTERPRET=1 before" in str(error))
    """
    environment = {"TRITON_INTERPRET": "0"}
    assert script(program, **environment).communicate(timeout=PATIENCE)[0].split() == ["True"]


def test_importing_and_starting_need_neither_torch_nor_triton():
    program = """
        import sys, time
        from kvlab.triton_support import child, interpreter, packet, versions
        print(any(name in sys.modules for name in ("torch", "triton")))
        child.run("os:getpid")
        print(any(name in sys.modules for name in ("torch", "triton")), child.run("child_functions:has_torch"))
    """
    assert script(program).communicate(timeout=PATIENCE)[0].split() == ["False", "False", "False"]
