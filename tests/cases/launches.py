"""What a launch hands to its kernels, caught instead of run, and compiled for GPUs that are not there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from caught import SHARED, Caught, as_launched, as_tensors, has_room, ptx_of
from decode_cases import Case
from feature_cases import FeatureCase

from kvlab.attention import mha_decode_paged
from kvlab.attention.call.explain import explain
from kvlab.attention.machines.gpu import family
from kvlab.attention.merge_states import kernel as merge_kernel
from kvlab.attention.mha_decode import config as decode_config
from kvlab.attention.mha_decode import kernel
from kvlab.attention.mha_decode_streaming import config as streaming_config
from kvlab.attention.mha_decode_streaming import kernel as streaming_kernel
from kvlab.triton_support.compile import Compiled


def launches(case: Case) -> dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]]:
    """Name -> (kernel, grid, arguments) of what a call launches."""
    x = case.build()
    config = explain(mha_decode_paged, *x.torch(), num_splits=case.splits).config
    homes = {"attend": kernel, "merge": merge_kernel}
    caught = {name: Caught(getattr(home, name)) for name, home in homes.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in caught.items():
            patch.setattr(homes[name], name, stub)
        kernel.launch(*x.torch(), scale=x.scale, config=config)
    return {name: (stub.fn, *stub.calls[0]) for name, stub in caught.items() if stub.calls}


@functools.cache
def compiled_features(case: FeatureCase, target: str, streaming: bool = False) -> Compiled:
    """``attend`` of decode, or of streaming decode, as a call with features compiles it on a GPU of ``target``."""
    home, config = (streaming_kernel, streaming_config) if streaming else (kernel, decode_config)
    call = case.build().resolved
    problem = decode_config.problem_of(*call.arrays[:4])
    options: dict[str, Any] = {} if streaming else {
        "heavy": call.features.heavy, "biased": call.features.mask.bias is not None, "shared": SHARED[target]
    }
    chosen = config.choose_config(problem, num_splits=case.splits, arch=family(target), **options)
    caught = Caught(home.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "attend", caught)
        patch.setattr(home, "merge", lambda *args, **named: None)
        home.launch(*map(as_tensors, call.arrays), features=as_tensors(call.features), scale=0.1, config=chosen)
    arguments = caught.arguments
    if not streaming:
        arguments["C"] = arguments["C"]._replace(PTX=ptx_of(target))
    made = as_launched(caught.fn, arguments, target)
    biased = {} if streaming else {"biased": options["biased"]}
    assert has_room(made, config.shared_bytes(chosen, problem, family(target), **biased))
    return made


@functools.cache
def compiled(case: Case, name: str, target: str) -> Compiled:
    """A kernel as a call compiles it: the same types, constants and alignments."""
    fn, _, arguments = launches(case)[name]
    if name == "attend":
        arguments["C"] = arguments["C"]._replace(PTX=ptx_of(target))
    return as_launched(fn, arguments, target)
