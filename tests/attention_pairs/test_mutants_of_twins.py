"""Forty mutants of operands, comparisons and constants of the twins, drawn at random: each is caught.

Rests on changes of the real sources: the static check sees a mutant, or a row of the operation's lockstep differs. The
mutants are those of ``tools/mutants.py`` (kinds operand, bound and constant; the functions of the twins and the helpers
that are compared; no lines that count traffic), shuffled with seed 14, the first five or six of each operation.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import lockstep_rows
import pytest

import kvlab.attention
from kvlab.mirror import MirrorError, check, lockstep

ATTENTION = Path(kvlab.attention.__file__).parent
CHECK, LOCKSTEP = "check", "lockstep"
MUTANTS = [
    ('merge_states/emulator.py', 'store(o_array, (*row, d), o, mask=d < D)', 'row -> batch', LOCKSTEP),
    ('merge_states/kernel.py', 'has = (w > 0)[:, None] & (d[None, :] < D)', 'd[None, :] < D -> ((d[None, :]) <= (D))', CHECK),
    ('merge_states/emulator.py', 'store(lse_array, (batch, token, head), lse, mask=piece == 0)', 'head -> batch', CHECK),
    ('merge_states/emulator.py', 'lse = np.where(total == 0, np.float32(-np.inf), top + log(total))', 'total == 0 -> ((total) != (0))', CHECK),
    ('merge_states/kernel.py', 'd = piece * BD + tl.arange(0, BD)', '0 -> 1', CHECK),
    ('kv_store/emulator.py', 'k_cache, k_to[..., None] + k_col, k, mask=k_live[..., None] & k_inside, vec=K.vec_out, count=count("k_cache")', 'k_inside -> v_inside', CHECK),
    ('kv_store/emulator.py', 'v_array, v_from[..., None] + v_col, mask=v_new[..., None] & v_inside, vec=V.vec_in, count=count("v")', 'v_inside -> k_inside', CHECK),
    ('kv_store/kernel.py', 'k_scale = given(k_scale_ptr, ks_head, k_head_idx, K_QUANT, KBR)  # [KBR]', 'k_scale_ptr -> v_scale_ptr', CHECK),
    ('kv_store/emulator.py', 'k_to = target(k_cache, k_page, k_slot, k_head_idx, k_dim, K.vec_out)', 'k_slot -> v_slot', CHECK),
    ('kv_store/emulator.py', 'new = (token % seq_tokens).astype(np.int64)', 'token -> page', CHECK),
    ('mha_decode/kernel.py', 'l = tl.where(split == 0, one, l)', '0 -> 1', CHECK),
    ('mha_decode/emulator.py', 'is_row = row < group * tokens', 'row -> key', CHECK),
    ('mha_decode/kernel.py', 'return lo, hi, tl.maximum(first, lo), tl.minimum(limit, hi)', 'lo -> hi', CHECK),
    ('mha_decode/emulator.py', 'store(lse_array, (split[:, None], batch[:, None], token, head), lse, mask=is_row)', 'token -> slot', CHECK),
    ('mha_decode/kernel.py', 'q_ptr, (batch * q_batch + token.to(tl.int64) * q_token + head * q_head) * UNIT, is_row, D, W0, W1, PAIRS', 'q_token -> v_token', LOCKSTEP),
    ('mha_decode/kernel.py', 'position, num_keys, tokens, end, split, num_splits, left, right, chunk, BN, BOUNDED, CHUNKED', 'left -> right', LOCKSTEP),
    ('mha_decode_streaming/kernel.py', 'o = accumulate(p, v, o, dtype)', 'v -> k', CHECK),
    ('mha_decode_streaming/kernel.py', 'v_ptr + kv_head * v_head * UNIT, (page * v_page + slot * v_token) * UNIT, exists, 0, D, BD, False', 'v_ptr -> o_ptr', CHECK),
    ('mha_decode_streaming/kernel.py', 'batch, program, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)', '2 -> 3', LOCKSTEP),
    ('mha_decode_streaming/emulator.py', 'for start in ragged_range(lo, hi, BN):', 'hi -> lo', CHECK),
    ('mha_decode_streaming/kernel.py', 'v_scale_ptr, page * v_scale_page + slot * v_scale_token + kv_head * v_scale_head, exists', 'page -> token', CHECK),
    ('mha_decode_streaming/emulator.py', 'factor = factor * head_scale(scales.k.heads, kv_head)', 'scales.k.heads -> scales.k.tokens', LOCKSTEP),
    ('mha_prefill/kernel.py', 'k_scales = k_scale_ptr + kv_head * k_scale_head, k_scale_page, k_scale_token', 'k_scale_ptr -> v_scale_ptr', CHECK),
    ('mha_prefill/kernel.py', 'q = load_q(q_ptr + (batch * q_batch + q_row * q_token + head * q_head) * UNIT, is_row, D, D0, D1)', 'batch -> head', CHECK),
    ('mha_prefill/emulator.py', 'visible = (by_column(s, key) >= s.by_row(first)) & (by_column(s, key) < s.by_row(limit))', 'by_column(s, key) < s.by_row(limit) -> ((by_column(s, key)) <= (s.by_row(limit)))', CHECK),
    ('mha_prefill/kernel.py', 's = s * key_scales(k_scales, k_at, key, hi, PAGE, True)[None, :]', 'hi -> lo', CHECK),
    ('mha_prefill/emulator.py', 'for start in ragged_range(full, hi, BN):', 'hi -> full', CHECK),
    ('mha_prefill/kernel.py', 'page, slot = row_of(pages, batch, first, key, key < end, PAGE, MASKED)', 'key -> batch', CHECK),
    ('mla_decode/kernel.py', 'sink, one = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)', 'head -> token', CHECK),
    ('mla_decode/kernel.py', 'for start in range(lo, hi, BN):', 'hi -> lo', CHECK),
    ('mla_decode/kernel.py', 'o = o / l[:, None]', 'o -> k', CHECK),
    ('mla_decode/kernel.py', 'num_keys = key_count(tl.load(seq_lens_ptr + batch * lens_batch), max_keys)', 'batch -> head', CHECK),
    ('mla_decode/emulator.py', 'm = np.where((split == 0)[:, None], sink, m)', 'split == 0 -> ((split) != (0))', CHECK),
    ('mla_decode/kernel.py', 'limit = tl.minimum(limit, hi)  # [BM], first key after first that a row does not see', 'hi -> lo', CHECK),
    ('mla_prefill/emulator.py', 'full = np.where((mask.left < UNLIMITED) | (base < 0), lo, full)  # K may hold more keys than the sequence has', 'lo -> full', CHECK),
    ('mla_prefill/kernel.py', 'o = o * alpha[:, None]', 'o -> v', CHECK),
    ('mla_prefill/kernel.py', 'by_key = k_scale * key_scales(k_scales, key, hi)[None, :]', 'k_scale -> v_scale', CHECK),
    ('mla_prefill/emulator.py', 'visible = (by_column(s, key) >= s.by_row(first)) & (by_column(s, key) < s.by_row(limit))', 'by_column(s, key) >= s.by_row(first) -> ((by_column(s, key)) > (s.by_row(first)))', CHECK),
    ('mla_prefill/kernel.py', 'o = o / l[:, None]', 'o -> k', CHECK),
    ('mla_prefill/kernel.py', 'page, slot = place(table_ptr + batch * table_batch, base + key, key < full, PAGE, False)', 'batch -> token', CHECK),
]  # fmt: skip
"""File, line, change, and what catches it. An entry whose line has changed is drawn anew."""


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_of_twins", ATTENTION.parents[1] / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


m = _tool()


def package(file: str, line: str, change: str, folder: Path, name: str) -> None:
    """A copy of an operation as package ``name`` in ``folder``, with the first mutant that fits."""
    operation = ATTENTION / file.split("/")[0]
    text = (ATTENTION / file).read_text()
    mutant = next((x for x in m.mutants_of(file, text) if (x.line, x.change) == (line, change)), None)
    assert mutant is not None, f"{file} has no mutant {change!r} of {line!r}"
    (folder / name).mkdir()
    for path in operation.glob("*.py"):
        (folder / name / path.name).write_text(path.read_text())
    (folder / name / "__init__.py").write_text("")
    (folder / name / file.split("/")[1]).write_text(mutant.source(text))


@pytest.mark.interpreter
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda n: f"{n}-{MUTANTS[n][0]}")
def test_a_mutant_is_caught(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, line, change, by = MUTANTS[number]
    name = f"mutant_of_twins_{number}"
    package(file, line, change, tmp_path, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    if by == CHECK:
        with pytest.raises(MirrorError):
            check(name)
        return
    assert check(name).ok, "the check sees it: say so"
    assert any(differs(name, case, more) for _, case, more in lockstep_rows.cases(file.split("/")[0]))


def differs(name: str, case: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether a step differs, or a side that is changed fails."""
    try:
        return not lockstep(name, case, emulator=more).ok
    except (IndexError, ValueError, TypeError) as error:
        assert "mutant_of_twins" in "".join(traceback.format_exception(error))
        return True


def test_there_are_forty() -> None:
    assert len({mutant[:3] for mutant in MUTANTS}) == 40
