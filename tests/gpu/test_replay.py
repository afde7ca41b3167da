"""Calls over tensors of a GPU, recorded, and run again there. Rests on laws: arguments come back to the bit, a replay
of what was recorded is what was recorded, and a planted fault is the first difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab import attention
from kvlab.attention.call.backends import function_at
from kvlab.attention.merge_states import kernel as merge_kernel
from kvlab.replay import load, recording, replay

pytestmark = pytest.mark.gpu


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def paged(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """K and V as the halves of one buffer, of which pages 3, 1 and 2 are named."""
    both = normal(8, 2, 16, 2, 64).to(dtype)
    table = torch.tensor([[3, 1], [2, 2]], dtype=torch.int32, device="cuda")
    return {"k_cache": both[:, 0], "v_cache": both[:, 1], "block_table": table,
            "seq_lens": torch.tensor([20, 7], dtype=torch.int32, device="cuda")}


def decode() -> dict[str, Any]:
    return {"q": normal(2, 4, 64), **paged()}


CASES = {
    "decode": ("mha_decode_paged", decode),
    "decode of fp8": ("mha_decode_paged", lambda: {
        "q": normal(2, 4, 64), **paged(torch.float8_e4m3fn), "k_scale": 0.5}),
    "prefill of pages": ("mha_prefill_paged", lambda: {
        "q": normal(9, 4, 64), **paged(), "cu_seqlens_q": torch.tensor([0, 5, 9], dtype=torch.int32, device="cuda")}),
    "store": ("kv_store_paged", lambda: {
        "k": normal(3, 2, 64), "v": normal(3, 2, 64, seed=1), "k_cache": torch.zeros_like(normal(8, 16, 2, 64)),
        "v_cache": torch.zeros_like(normal(8, 16, 2, 64)),
        "slot_mapping": torch.tensor([17, -1, 90], device="cuda")}),
    "merge": ("merge_states", lambda: {
        "outs": normal(2, 3, 4, 64), "lses": normal(2, 3, 4, dtype=torch.float32)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_comes_back_to_the_bit_and_its_replay_on_the_gpu_has_the_bits_that_were_recorded(
    case: str, tmp_path: Path
) -> None:
    name, make = CASES[case]
    given = make()
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    with recording(tmp_path) as recorder:
        getattr(attention, name)(**given)
    (file,) = recorder.files
    recorded = load(file)
    assert torch.cuda.get_device_name() in str(recorded)
    again = recorded.arguments("cuda")
    for key, value in before.items():
        if key not in again:  # the slots of a store have another name in it
            continue
        assert again[key].device.type == "cuda"
        assert again[key].stride() == given[key].stride()
        rows = [3, 1, 2] if key in ("k_cache", "v_cache") and name != "kv_store_paged" else slice(None)
        if name != "kv_store_paged" or "cache" not in key:
            assert torch.equal(again[key][rows].view(torch.uint8), value[rows].view(torch.uint8))
    found = replay(recorded, device="cuda")
    assert found.ok, found
    assert found.sides["kernel"].results is not None
    assert "compiled for the GPU" in found.sides["kernel"].words or "hopper" in found.sides["kernel"].words
    assert "kernel" in found.repeated


def test_a_planted_fault_of_the_kernel_is_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(tmp_path) as recorder:
        attention.merge_states(**CASES["merge"][1]())

    def wrong(*args: Any, **more: Any) -> Any:
        out, lse = launch(*args, **more)
        out[1, 0, 3, 40:] = 7.0  # [3, 1, 4, 64]
        return out, lse

    launch = merge_kernel.launch
    monkeypatch.setattr(merge_kernel, "launch", wrong)
    function_at.cache_clear()
    found = replay(recorder.files[0], device="cuda")
    function_at.cache_clear()
    assert found.first_difference is not None
    assert found.first_difference.startswith("out of the kernel side against the reference: first at [1, 3, 40]: 7, ")
    assert not [one for one in found.comparisons if not one.ok and one.side != "kernel"]


def test_what_a_graph_captures_is_not_kept_and_its_replays_are_right(tmp_path: Path) -> None:
    given = decode()
    plain = attention.mha_decode_paged(**given)
    with recording(tmp_path) as recorder:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention.mha_decode_paged(**given)
        graph.replay()
    assert recorder.files == []
    assert torch.equal(out, plain)


def test_a_process_records_and_the_command_runs_its_file(tmp_path: Path) -> None:
    program = (
        "import torch\nfrom kvlab.attention import merge_states\n"
        "merge_states(torch.ones(2, 3, 4, 64, device='cuda'), torch.zeros(2, 3, 4, device='cuda'))"
    )
    env = {**os.environ, "KVLAB_RECORD": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    (file,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "kvlab", "replay", str(file), "--device", "cuda", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["ok"]
    assert "compiled for the GPU" in told["sides"]["kernel"]["words"]
