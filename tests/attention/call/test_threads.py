"""Two threads, one of which imports torch or makes the first Triton call: the other's NumPy calls are as ever.

Rests on Python's own mark of a module that is being imported, and on what the calls give without company. Each case
runs in a process of its own, where torch has not been imported yet.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
import hashlib, sys, threading
sys.path.insert(0, {folder!r})
import numpy as np
from operation_calls import OPERATIONS, call_of
from kvlab import attention

def digest(operation):
    a = call_of(operation)
    result = getattr(attention, operation)(**a)
    parts = result if isinstance(result, tuple) else (result,) if result is not None else ()
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()

assert "torch" not in sys.modules
expected = {{operation: digest(operation) for operation in OPERATIONS}}
"""
SLOW_IMPORT = """
import importlib.abc, importlib.machinery, types
reached, go = threading.Event(), threading.Event()

class Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # torch as it is in the middle of its import: no attribute but those that the import system sets
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        def touched(name):
            raise RuntimeError("touched " + name)
        module.__getattr__ = touched
        reached.set()
        assert go.wait(60)

sys.meta_path.insert(0, Torch())
thread = threading.Thread(target=__import__, args=("torch",))
thread.start()
assert reached.wait(60)
try:
    for operation in OPERATIONS:
        assert digest(operation) == expected[operation], operation
finally:
    go.set()
    thread.join()
print("fine")
"""
TWO_CALLS = """
wrong, stop = [], threading.Event()

def beside():
    while not stop.is_set():
        for operation in OPERATIONS[:6]:
            try:
                if digest(operation) != expected[operation]:
                    wrong.append(operation)
            except BaseException as error:
                wrong.append(repr(error))

thread = threading.Thread(target=beside)
thread.start()
try:
    a = call_of("merge_states")
    a.pop("out")
    first, _ = attention.merge_states(**a, backend="triton")
    assert np.allclose(first, attention.merge_states(**a)[0], atol=1e-6)
finally:
    stop.set()
    thread.join()
assert not wrong, wrong[:3]
assert "torch" in sys.modules
print("fine")
"""


def run(code: str) -> None:
    whole = CALLS.format(folder=str(Path(__file__).parents[2] / "cases")) + code
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_no_attribute_of_a_half_imported_torch_is_touched() -> None:
    run(SLOW_IMPORT)


@pytest.mark.interpreter
def test_first_call_of_the_kernel_beside_emulators() -> None:
    """The first call imports torch and starts the interpreter's process while another thread calls emulators."""
    run(TWO_CALLS)
