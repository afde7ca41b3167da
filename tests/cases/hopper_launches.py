"""The arguments of the launch functions of Hopper's kernels and of their emulators, for a case of each operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import mla_cases
import prefill_cases
from decode_cases import Case
from feature_cases import FeatureCase, FeatureInputs

from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode import hopper_config as decode_config
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.mha_prefill import hopper_config as prefill_config
from kvlab.attention.mla_decode import hopper_config as mla_config
from kvlab.attention.mla_decode.config import MLADecodeProblem
from kvlab.common.arrays import to_numpy


def decode_arguments(case: Case | FeatureCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build()
    features = x.resolved.features if isinstance(x, FeatureInputs) else Features()
    config = decode_config.choose_hopper(problem_of(*x.arrays[:4]), features, num_splits=case.splits)
    return x.arrays, {"scale": x.scale, "features": features, "config": config}


def mla_arguments(case: mla_cases.Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build()
    problem = MLADecodeProblem.of(x.q, *x.windows, x.table)
    config = mla_config.choose_hopper(problem, num_splits=case.splits)
    named = {"scale": x.scale, "features": x.features, "config": config}
    return (x.q, *x.windows, x.table, x.lens), named


def prefill_arguments(case: prefill_cases.Case | prefill_cases.Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the operation in the name."""
    x = case.build() if isinstance(case, prefill_cases.Case) else case
    found = x.plan(backend="triton", device="cpu")
    arrays = tuple(a if a is None else to_numpy(a) for a in found.arrays)
    plan, features = found.plan, found.features
    config = prefill_config.choose_hopper(plan.problem, found.inputs)
    if features.sinks is not None:
        features = dataclasses.replace(features, sinks=to_numpy(features.sinks))
    return arrays, {"scale": plan.scale, "problem": plan.problem, "config": config, "features": features}
