"""Calls recorded in files, and run again in every sibling: a bug report becomes a picture.

``KVLAB_RECORD=folder`` in the environment, or :func:`recording`, keeps each call of an operation of
:mod:`kvlab.attention` in a file of bounded size: its arguments, plan, versions and results. :func:`load` reads such a
file, :func:`replay` runs it in the reference, the emulator, the kernel and in lockstep, and names the first difference.
Files are zip archives of JSON and NumPy's arrays, without pickle; docs/command.md has their format. Dumps and workloads
of FlashInfer are read by :func:`load_flashinfer`.

>>> import tempfile
>>> import numpy as np
>>> from kvlab.attention import merge_states
>>> from kvlab.replay import recording, replay
>>> outs, lses = np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
>>> with tempfile.TemporaryDirectory() as folder, recording(folder) as recorder:
...     out = merge_states(outs, lses)
...     print(replay(recorder.files[0], quick=True).finding)
no difference: recorded, emulator agree with the reference
"""

from .flashinfer_dumps import load_flashinfer
from .recorded import RecordedCall, load
from .recorder import Recorder, recording
from .replaying import Comparison, Ran, Replay, lockstep_case, replay

__all__ = [
    "Comparison",
    "Ran",
    "RecordedCall",
    "Recorder",
    "Replay",
    "load",
    "load_flashinfer",
    "lockstep_case",
    "recording",
    "replay",
]
