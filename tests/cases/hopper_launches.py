"""The arguments of the launch functions of Hopper's kernels and of their emulators, for a case of each operation."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import mla_cases
import numpy as np
import prefill_cases
import pytest
from decode_cases import Case
from feature_cases import FeatureCase, FeatureInputs
from listed_cases import Listed

from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode import hopper_config as decode_config
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.mha_prefill import hopper_config as prefill_config
from kvlab.attention.mla_decode import hopper_config as mla_config
from kvlab.attention.mla_decode.config import MLADecodeProblem
from kvlab.attention.tiles.pages import Sequences
from kvlab.common.arrays import to_numpy
from kvlab.hardware import TmaDescriptor, tma


def decode_arguments(case: Case | FeatureCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build()
    features = x.resolved.features if isinstance(x, FeatureInputs) else Features()
    config = decode_config.choose_hopper(problem_of(*x.arrays[:4]), num_splits=case.splits)
    return x.arrays, {"scale": x.scale, "features": features, "config": config}


def mla_arguments(case: mla_cases.Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build()
    return (x.q, *x.windows, x.table, x.lens), _mla_named(case, x, x.q, x.table, x.lens)


def listed_arguments(case: mla_cases.Case, topk: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of MLA decode over lists of ``topk`` slots."""
    listed = Listed(case, topk)
    x, q = listed.x, listed.q[:, None]
    return (q, *x.windows, listed.indices, None), _mla_named(case, x, q, listed.indices, None)


def _mla_named(case: mla_cases.Case, x: mla_cases.Inputs, q: Any, table: Any, lens: Any) -> dict[str, Any]:
    """What a launch of MLA decode is given by name."""
    problem = MLADecodeProblem.of(q, *x.windows, table, lens, x.row_scales)
    config = mla_config.choose_hopper(problem, num_splits=case.splits)
    return {"scale": x.scale, "features": x.features, "config": config, "row_scales": x.row_scales}


def prefill_arguments(case: prefill_cases.Case | prefill_cases.Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build() if isinstance(case, prefill_cases.Case) else case
    found = x.plan(backend="triton", device="cpu")
    *arrays, sequences = found.arrays
    arrays = *map(to_numpy, arrays), Sequences(*(a if a is None else to_numpy(a) for a in sequences))
    plan = found.plan
    config = prefill_config.choose_hopper(plan.problem, found.inputs)
    features = x.plan().features  # of NumPy arrays
    return arrays, {"scale": plan.scale, "problem": plan.problem, "config": config, "features": features}


TEMPERATURES = {
    "mha_prefill": [
        prefill_cases.Case(((130, 200),) * 2, heads=(4, 2), D=128, strided=True),
        prefill_cases.Case(((70, 300),), heads=(3, 1), causal=False),
        prefill_cases.Case(((70, 200), (0, 5), (65, 130)), heads=(4, 2), D=128, form="paged", softcap=20.0, window=70),
        prefill_cases.Case(((70, 200), (65, 130)), heads=(2, 1), D=256, form="ragged", softcap=15.0, sinks=True),
        prefill_cases.Case(((130, 200),), heads=(4, 2), D=128, dtype="fp8", scales="head"),
    ],
    "mha_decode": [
        Case((200, 0, 65), heads=(32, 8), D=128),
        Case((129, 3, 2, 1, 0), heads=(6, 3), D=64, page=48, S=2, splits=3),
        FeatureCase((150, 0, 17), heads=(6, 3), D=128, kv="fp8", scales="head", splits=2),
    ],
    "mla_decode": [
        mla_cases.Case((200, 0, 65), H=80, columns=(512, 64), page=64, splits=1),
        mla_cases.Case((193, 2, 63), H=5, S=4, columns=(512, 64), page=16, splits=2, dtype="fp16"),
    ],
}
"""Cases of each operation that are run with a temperature of each query head."""


@dataclasses.dataclass
class Heated:
    """A call with temperatures, positive, negative and 0, for ``yardsticks.assert_accurate``. ``x``: the call without;
    ``arrays`` and ``named``: the arguments of the launch functions.
    """

    op: str
    x: Any
    arrays: tuple[Any, ...]
    named: dict[str, Any]

    @classmethod
    def of(cls, op: str, case: Any) -> Heated:
        """The call of a case."""
        x = case.build()
        find = {"mha_decode": decode_arguments, "mla_decode": mla_arguments, "mha_prefill": prefill_arguments}[op]
        head = np.arange(x.q.shape[-2])
        temperature = np.where(head % 5 == 3, 0, 1.5 * np.cos(2.4 * head + 0.3)).astype(np.float32)
        arrays, named = find(case)
        named["features"] = dataclasses.replace(named["features"], temperature=temperature)
        if op == "mha_prefill":  # by which the configuration is chosen
            inputs = x.plan().inputs._replace(features=named["features"])
            named["config"] = prefill_config.choose_hopper(named["problem"], inputs)
        return cls(op, x, arrays, named)

    @property
    def q(self) -> Any:
        return self.x.q

    def run(self, launch: Any, **named: Any) -> tuple[Any, ...]:
        """The results of a launch function, in the shapes of the call's."""
        return tuple(a.reshape(*self.q.shape[:-1], *a.shape[len(self.arrays[0].shape) - 1 :])
                     for a in launch(*self.arrays, **self.named | named))

    def exact(self) -> tuple[Any, ...]:
        """The float64 reference."""
        reference = importlib.import_module(f"kvlab.attention.{self.op}.reference").reference
        names = ("scale", "features")
        return self.run(lambda *arrays, **named: reference(*arrays, **{name: named[name] for name in names}))

    def plain_torch(self) -> Any:
        """The exact result, off by as much as PyTorch's from queries that are multiplied by the temperatures."""
        q = (self.q * self.named["features"].temperature[:, None]).astype(self.q.dtype)
        x = self.x
        hot = x.with_(q=q) if hasattr(x, "with_") else dataclasses.replace(x, arrays=(q, *x.arrays[1:]))
        return self.exact()[0] + hot.plain_torch() - hot.exact()[0]


def stored_by_tma(patch: pytest.MonkeyPatch) -> list[TmaDescriptor]:
    """The descriptors of the stores that the emulators go on to make, in their order."""
    stored: list[TmaDescriptor] = []
    store = tma.store

    def recorded(descriptor: TmaDescriptor, *arguments: Any) -> None:
        stored.append(descriptor)
        return store(descriptor, *arguments)

    patch.setattr(tma, "store", recorded)
    return stored
