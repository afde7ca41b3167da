"""Prefill tiles over a schedule on Hopper in NumPy: the twins of MHA prefill's kernel, whose programs walk a list."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.attend_paged.config import AttendProblem, Walk
from kvlab.attention.attend_paged.emulator import WalkLists, WalkResults
from kvlab.attention.attend_paged.hopper_config import prefill_problem
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.softcap import cap_terms
from kvlab.attention.mha_prefill.hopper_config import HopperPrefillConfig
from kvlab.attention.mha_prefill.hopper_emulator import HopperPrefillLaunch, boxes_of, run_programs
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.staging import Traffic

Array = np.ndarray[Any, Any]


def walk(
    q_array: Array, k_cache: Array, v_cache: Array, table: Array, lists: WalkLists, results: WalkResults,
    scale_log2: float, features: Features, problem: AttendProblem, config: Walk, traffic: Traffic,
) -> None:
    """The query rows of item after item, the heads of a KV head together, against the keys of a team's units."""
    C, (lens, starts, work) = config.wide, lists
    rows, box = (C.BM // C.PACK, C.PACK), (C.BOX, 1)
    of = {"q": (q_array[:1], rows), "k": (k_cache, box), "v": (v_cache, box), "o": (results.out[:1], rows)}
    boxes = boxes_of(of, C)
    inner, outer = cap_terms(scale_log2 / LOG2E, features.softcap)
    sizes = prefill_problem(problem, q_array.itemsize)
    numbers = np.float32(inner), np.float32(outer), np.float32(1 / LOG2E), np.float32(features.scales.v.number)
    x = HopperPrefillLaunch(
        sizes, HopperPrefillConfig(C, 0, 0, 0), features, config.grid(problem)[0], results.out, results.lse, *numbers,
        problem.max_keys, starts, None, table, lens, work=(work, results.part, results.part_lse),
        room=config.items(problem), q_array=q_array,
    )
    run_programs(x, q_array.dtype, boxes, traffic)
