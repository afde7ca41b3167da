"""Forty mutants of operands, comparisons and constants of the twins, drawn at random: each is caught.

Rests on changes of the real sources: the static check sees a mutant, or a row of the operation's lockstep differs. The
mutants are those of ``tools/mutants.py`` (kinds operand, bound and constant; the functions of the twins and the helpers
that are compared; no lines that count traffic), shuffled with seed 14, the first five or six of each operation.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from pairs import lockstep_rows

import kvlab.attention
from kvlab.mirror import MirrorError, check, lockstep
from tools import mutants as m

ATTENTION = Path(kvlab.attention.__file__).parent
CHECK, LOCKSTEP = "check", "lockstep"
MUTANTS = [
    ('merge_states/emulator.py', 0, 'row -> batch', LOCKSTEP,
     'store(o_array, (*row, d), o, mask=d < D)'),
    ('merge_states/kernel.py', 0, 'd[None, :] < D -> ((d[None, :]) <= (D))', CHECK,
     'has = (w > 0)[:, None] & (d[None, :] < D)'),
    ('merge_states/emulator.py', 0, 'head -> batch', CHECK,
     'store(lse_array, (batch, token, head), lse, mask=piece == 0)'),
    ('merge_states/emulator.py', 0, 'total == 0 -> ((total) != (0))', CHECK,
     'lse = np.where(total == 0, np.float32(-np.inf), top + log(total))'),
    ('merge_states/kernel.py', 0, '0 -> 1', CHECK,
     'd = piece * BD + tl.arange(0, BD)'),
    ('kv_store/emulator.py', 0, 'k_exists -> v_exists', CHECK,
     'k_cache, k_to[..., None] + k_element, k, mask=k_live[..., None] & k_exists, vec=K.vec_out,'),
    ('kv_store/emulator.py', 0, 'v_inside -> k_inside', CHECK,
     'v_array, v_from[..., None] + v_col, mask=v_new[..., None] & v_inside, vec=V.vec_in, count=count("v")'),
    ('kv_store/kernel.py', 0, 'sin_ptr -> cos_ptr', CHECK,
     'k, k_ptr, k_from, k_dim, k_inside, k_position, k_new, cos_ptr, sin_ptr, problem.angles,'),
    ('kv_store/emulator.py', 0, 'k_slot -> v_slot', CHECK,
     'k_to = target(k_cache, k_page, k_slot, k_head_idx, k_first, K.vec_out)'),
    ('kv_store/emulator.py', 0, 'token -> page', CHECK,
     'new = (token % problem.seq_tokens).astype(np.int64)'),
    ('mha_decode/kernel.py', 0, 'BN -> BM', LOCKSTEP,
     'seq_lens_ptr, features, numbers, batch, token, split, problem, BN, C.BOUNDED'),
    ('mha_decode/kernel.py', 0, 'slot -> token', LOCKSTEP,
     'v_ptr + kv_head * v_strides.head * C.UNIT, row_at(page, slot, v_strides, C.EACH, C.PTX) * C.UNIT'),
    ('mha_decode/kernel.py', 0, 'split -> head', CHECK,
     'o_ptr, (split * o_strides.split + batch * o_strides.batch + token.to(tl.int64) * o_strides.token'),
    ('mha_decode/emulator.py', 0, 'token -> slot', CHECK,
     'store(lse_array, (split[:, None], batch[:, None], token, head), lse, mask=is_row)'),
    ('mha_decode/kernel.py', 0, 'split -> head', CHECK,
     'lse_at = split * lse_strides.split + batch * lse_strides.batch + token * lse_strides.token  #- address'),
    ('mha_decode/emulator.py', 0, 'l -> m', CHECK,
     'l = np.where(sees, divide(factor, l), np.float32(0))  # what the sums of a row are multiplied by'),
    ('mha_decode_streaming/kernel.py', 0, 'v -> k', CHECK,
     'o = accumulate(p, v, o, dtype)'),
    ('mha_decode_streaming/emulator.py', 0, 'l -> m', CHECK,
     'p, alpha, m, l = weigh(cta, s, m, l)'),
    ('mha_decode_streaming/kernel.py', 0, '2 -> 3', LOCKSTEP,
     'batch, program, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)'),
    ('mha_decode_streaming/emulator.py', 0, 'hi -> lo', CHECK,
     'for start in ragged_range(lo, hi, BN):'),
    ('mha_decode_streaming/emulator.py', 0, 'token -> head', LOCKSTEP,
     'at = row_offsets(queries, (batch[:, None], token, head), is_row)  #- address'),
    ('mha_decode_streaming/kernel.py', 0, 'o_ptr -> k_ptr', CHECK,
     'o_ptr, (split * o_strides.split + batch * o_strides.batch + token.to(tl.int64) * o_strides.token'),
    ('mha_prefill/emulator.py', 0, 'batch -> head', CHECK,
     'k_first, num_keys = row_count(cu_k_array, batch, max_k)'),
    ('mha_prefill/emulator.py', 0, '1 -> 2', CHECK,
     'exists = key < bounds[MASKED + 1][:, None]'),
    ('mha_prefill/emulator.py', 0, 'token -> slot', CHECK,
     'position = token + num_keys[:, None] - num_q[:, None]'),
    ('mha_prefill/kernel.py', 0, 'o -> v', CHECK,
     'o = normalise(o, factor, sees)'),
    ('mha_prefill/kernel.py', 1, 'lo -> hi', CHECK,
     'hi = tl.where(bottom < top, lo, tl.maximum(hi, lo))'),
    ('mha_prefill/kernel.py', 0, 'token -> head', CHECK,
     'position = token + num_keys - num_q'),
    ('mla_decode/emulator.py', 0, 'key -> split', CHECK,
     'exists = key < hi[:, None]'),
    ('mla_decode/kernel.py', 0, 'hi -> lo', CHECK,
     'for start in range(lo, hi, BN):'),
    ('mla_decode/kernel.py', 0, 'slot -> page', LOCKSTEP,
     'return page, slot, key, exists'),
    ('mla_decode/kernel.py', 0, 'batch -> split', CHECK,
     'seq_lens_ptr, features, numbers, batch, token, split, problem, BN, C.BOUNDED'),
    ('mla_decode/kernel.py', 0, '0 -> 1', LOCKSTEP,
     'k = load_columns(kv_ptr, kv_at, exists, 0, DV, BV, DV == BV).to(dtype)'),
    ('mla_decode/kernel.py', 0, 'hi -> lo', CHECK,
     'exists = key < hi'),
    ('mla_prefill/kernel.py', 0, 'position -> key', CHECK,
     'first, limit = key_range(position, end, numbers.left, numbers.right, numbers.chunk)  # [BM], keys'
     ' that a row sees'),
    ('mla_prefill/emulator.py', 0, 'token -> slot', CHECK,
     'position = token + total[:, None] - num_q[:, None]'),
    ('mla_prefill/emulator.py', 1, 'lo -> full', CHECK,
     'hi = np.where(bottom < top, lo, np.maximum(bottom_limit - base, lo))'),
    ('mla_prefill/kernel.py', 1, 'q -> k', LOCKSTEP,
     's = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")'),
    ('mla_prefill/emulator.py', 0, 'total -> num_keys', CHECK,
     "top = tile * BM + total - num_q  # positions of the tile's rows"),
    ('mla_prefill/emulator.py', 0, 'hi -> lo', CHECK,
     'bounds = lo, full, hi'),
]
"""File, which of the mutants of this line and change, the change, what catches it, the line. An entry whose line has
changed is drawn anew."""


def package(mutant: tuple[str, int, str, str, str], folder: Path, name: str) -> None:
    """A copy of an operation as package ``name`` in ``folder``, with this mutant."""
    file, number, change, _, line = mutant
    operation = ATTENTION / file.split("/")[0]
    text = (ATTENTION / file).read_text()
    fitting = [x for x in m.mutants_of(file, text) if (x.line, x.change) == (line, change)]
    assert len(fitting) > number, f"{file} has no mutant {change!r} of {line!r}"
    (folder / name).mkdir()
    for path in operation.glob("*.py"):
        copied = path.read_text().replace(f"kvlab.attention.{operation.name}.", f"{name}.")
        (folder / name / path.name).write_text(copied)
    (folder / name / "__init__.py").write_text("")
    (folder / name / file.split("/")[1]).write_text(fitting[number].source(text))


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda n: f"{n}-{MUTANTS[n][0]}")
def test_a_mutant_is_caught(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, _, by, _ = MUTANTS[number]
    name = f"mutant_of_twins_{number}"
    package(MUTANTS[number], tmp_path, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    if by == CHECK:
        with pytest.raises(MirrorError):
            check(name)
        return
    assert check(name).ok, "the check sees it: say so"
    assert any(differs(name, case, more) for _, case, more in lockstep_rows.cases(file.split("/")[0]))


def differs(name: str, case: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether a step differs, or the changed side raises an error in its own lines."""
    try:
        return not lockstep(name, case, emulator=more).ok
    except Exception as error:
        return f"{name}/" in "".join(traceback.format_exception(error))


def test_there_are_forty() -> None:
    assert len(set(MUTANTS)) == 40
