"""The process in which kernels are interpreted: an interpreted and a compiled Triton cannot live in one.

:func:`run` calls a function, named by where it is imported from, in a child process that has ``TRITON_INTERPRET=1`` and
the corrected interpreter. The child starts with the first call and stays; it ends when this process ends, however
that happens. Arrays pass through shared memory; what the function writes into them is in the caller's arrays
afterwards.

>>> import numpy as np
>>> out = np.zeros(3)
>>> run("numpy:multiply", np.arange(3.0), 2.0, out) is out
True
>>> out
array([0., 2., 4.])
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing import connection, reduction
from typing import Any

from kvlab.triton_support.interpreter import install, is_interpreted
from kvlab.triton_support.packet import Packet, pack, unpack


class ChildDied(RuntimeError):
    """The interpreter's process ended in the middle of a call (an access outside memory, no memory left, a kill)."""


class ChildTraceback(Exception):
    """The cause of an exception that came from the child: the traceback there."""

    def __str__(self) -> str:
        return f"in the interpreter's process:\n\n{self.args[0]}"


def run(path: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function ``"package.module:name"`` with interpreted kernels and return what it returns.

    Arguments and results are whatever pickle takes. NumPy arrays (ml-dtypes included) and torch CPU tensors, anywhere
    in them, keep dtype, strides and overlaps. What the function writes into argument arrays is in the caller's arrays
    when it returns (not when it raises). An argument array that comes back as a result is the caller's object. The
    function is imported with this process's ``sys.path`` (see :func:`search_path`); a module once imported in the child
    stays as it is until :func:`close`.

    An exception has its type and message, with the child's traceback as its cause. A call that kills the child raises
    :class:`ChildDied`; the next one starts another child. Where Triton is interpreted in this process already, the
    function is called here. Calls from several threads take turns.
    """
    if is_interpreted():
        install()
        return _resolve(path)(*args, **kwargs)
    return _CHILD.call(path, args, kwargs)


def close() -> None:
    """End the child, if there is one; the next :func:`run` starts another, with modules as they are on disk then."""
    with _CHILD.lock:
        _CHILD.stop()


def search_path() -> list[str]:
    """``sys.path`` with absolute entries, the standard library's first: no file of a user hides a module of it."""
    library = os.path.dirname(os.__file__)
    first = library, os.path.join(library, "lib-dynload")
    return sorted(map(os.path.abspath, sys.path), key=lambda entry: entry not in first)


def _resolve(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} does not name a function: write 'package.module:function'")
    if module not in sys.modules:
        importlib.invalidate_caches()
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


class _Pipe:
    """Messages over one end of a socket pair: a kind, a picklable body and, perhaps, an open file."""

    def __init__(self, descriptor: int) -> None:
        self.connection = connection.Connection(descriptor)
        self.lock = threading.Lock()

    def send(self, kind: str, body: Any, file: int | None = None, peer: int = 0) -> None:
        with self.lock:
            self.connection.send((kind, body, file is not None))
            if file is not None:
                reduction.send_handle(self.connection, file, peer)

    def receive(self) -> tuple[str, Any, int | None]:
        kind, body, has_file = self.connection.recv()
        return kind, body, reduction.recv_handle(self.connection) if has_file else None

    def close(self) -> None:
        self.connection.close()


class _Child:
    """Side of this process: the child, the pipe to it, and whose turn it is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: _Pipe | None = None

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = pack((args, kwargs))
        file = None
        try:
            with self.lock:
                kind, body, file = self.exchange(path, packet)
            if kind == "error":
                pickled, text = body
                raise pickle.loads(pickled) from ChildTraceback(text)
            packet.copy_back()
            return unpack(body, file, packet.arrays.__getitem__)[0]
        finally:
            packet.close()
            if file is not None:
                os.close(file)

    def exchange(self, path: str, packet: Packet) -> tuple[str, Any, int | None]:
        process, pipe = self.ready()
        try:
            pipe.send("call", (path, search_path(), packet.header()), packet.file, process.pid)
            while True:
                kind, body, file = pipe.receive()
                if kind in ("result", "error"):
                    return kind, body, file
                getattr(sys, kind).write(body)  # stdout, stderr
        except (EOFError, ConnectionError):
            self.stop()
            raise ChildDied(f"{path!r} ended the interpreter's process, status {process.returncode}") from None
        except BaseException:  # an answer may still be under way
            process.kill()
            self.stop()
            raise

    def ready(self) -> tuple[subprocess.Popen[bytes], _Pipe]:
        """The running child; a new one if there is none."""
        if self.process is not None and self.pipe is not None and self.process.poll() is None:
            return self.process, self.pipe
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            boot = (
                f"import sys; sys.path[:] = {search_path()!r}; "
                f"from kvlab.triton_support.child import serve; serve({theirs.fileno()})"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot], env={**os.environ, "TRITON_INTERPRET": "1"}, stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pipe = _Pipe(ours.detach())
        return self.process, self.pipe

    def stop(self) -> None:
        if self.pipe is not None:
            self.pipe.close()  # the child sees it and leaves
        if self.process is not None:
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = self.pipe = None

    def forget(self) -> None:
        """In a forked copy of this process, to which the child does not belong."""
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            self.process.returncode = 0  # nothing to wait for
        self.lock = threading.RLock()
        self.process = self.pipe = None


_CHILD = _Child()
atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CHILD.forget)


class _Stream(io.TextIOBase):
    """Prints the child's output where the parent prints."""

    def __init__(self, pipe: _Pipe, kind: str) -> None:
        self.pipe, self.kind = pipe, kind

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.pipe.send(self.kind, text)
        return len(text)


def serve(descriptor: int) -> None:
    """The child's side: answer the calls that come through the socket ``descriptor`` until its other end is gone."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_leave_with_parent, args=(descriptor,), daemon=True).start()
    pipe = _Pipe(descriptor)
    sys.stdout, sys.stderr = _Stream(pipe, "stdout"), _Stream(pipe, "stderr")
    while True:
        try:
            _, (path, search, header), file = pipe.receive()
        except (EOFError, ConnectionError):
            os._exit(0)
        sys.path[:] = search
        _answer(pipe, path, header, file)


def _answer(pipe: _Pipe, path: str, header: Any, file: int | None) -> None:
    """Make one call and send its result or its exception."""
    packet = None
    try:
        install()
        (args, kwargs), arrays = unpack(header, file)
        names = {id(array): name for name, array in enumerate(arrays)}
        result = _resolve(path)(*args, **kwargs)
        packet = pack(result, lambda part: names.get(id(part)))
        pipe.send("result", packet.header(), packet.file, os.getppid())
    except BaseException as error:
        pipe.send("error", (pickled(error), traceback.format_exc()))
    finally:
        if packet is not None:
            packet.close()
        if file is not None:
            os.close(file)


def pickled(error: BaseException) -> bytes:
    """The exception, or a RuntimeError in its words when pickle cannot carry it."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))


def _leave_with_parent(descriptor: int) -> None:
    """End this process, whatever it does, when the socket's other end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always told
    poll.poll()
    os._exit(0)
