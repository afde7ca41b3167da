"""What the tests of the child have it do."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Nested:
    arrays: dict[str, Any]
    words: tuple[Any, ...]


def describe(a):
    """How an array looks from the child."""
    return a.shape, a.strides, a.dtype, a.flags.writeable, a.ctypes.data % 256


def describe_tensor(t):
    return tuple(t.shape), t.stride(), str(t.dtype), t.data_ptr() % 256


def double(a):
    a[...] = a + a


def double_tensor(t):
    t.copy_((t.float() * 2).to(t.dtype))


def nested(case: Nested):
    case.arrays["x"][:] = 7
    return Nested({"y": case.arrays["x"] + 1}, (case.words[0], [case.arrays["x"]]))


def alias(whole, part):
    """Whether a write to one array is seen in the other."""
    part[0] = 99
    return whole.tolist()


def fail(message):
    raise LookupError(message)


class Awkward(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def fail_awkwardly():
    raise Awkward(1, 2)


def pid():
    return os.getpid()


def environment(name):
    return os.environ.get(name)


def speak():
    import sys

    print("to stdout")
    print("to stderr", file=sys.stderr)


def wait(seconds):
    time.sleep(seconds)


def busy(seconds):
    """Python code that never waits."""
    end = time.time() + seconds
    while time.time() < end:
        pass


def read_null():
    import ctypes

    ctypes.string_at(0)


def total(a):
    return threading.current_thread().name, a.sum()


def constant_array():
    return _KEPT


_KEPT = np.arange(4)


def has_torch():
    import sys

    return "torch" in sys.modules
