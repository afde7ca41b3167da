"""Audits of caches on a GPU. Rests on the audit of the same bytes in CPU memory, and on what is planted."""

from __future__ import annotations

import pytest
import torch

from kvlab.formats import AuditFailure, Watch, audit, known_format

pytestmark = pytest.mark.gpu

TABLE, LENGTHS = [[4, 1, -1], [2, 0, 5], [-1, -1, -1]], [20, 37, 0]


def on_gpu(numbers: list[object]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_what_is_planted_is_found_as_in_cpu_memory(dtype: torch.dtype) -> None:
    cache = torch.ones(6, 2, 16, 2, 64, device="cuda").to(dtype)
    table, lengths = on_gpu(TABLE), on_gpu(LENGTHS)
    assert audit(cache, table, lengths)
    bits = cache.view(torch.uint8)
    bits[1, 0, 3, 1] = 0xFF
    bits[5, 1, 4] = 0xFF
    cache[2, 1, 7, 0, 9] = torch.nan
    found = audit(cache, table, lengths)
    assert found.report() == audit(cache.cpu(), table.cpu(), lengths.cpu()).report()
    assert sum(found.counts.values()) == 3
    assert {flaw.index["page"] for flaw in found.flaws} == {1, 2, 5}


def test_a_format_given_and_read() -> None:
    made = known_format("mla.656", pages=6)
    stored = made.encode(*(torch.ones(part.shape) for part in made.parts))
    held = torch.from_numpy(stored).cuda()
    assert audit(held, on_gpu(TABLE), on_gpu(LENGTHS), format=made)
    assert all((a == b).all() for a, b in zip(made.decode(held), made.decode(stored), strict=True))


def test_a_watch_poisons_on_the_gpu_and_names_a_stray() -> None:
    cache = torch.zeros(4, 2, 16, 1, 8, dtype=torch.bfloat16, device="cuda")
    watch = Watch(cache, on_gpu([[1, -1]]), on_gpu([5]))
    assert cache[1, :, 5:].isnan().all()
    assert cache[0].isnan().all()
    assert (cache[1, :, :5] == 0).all()
    cache[1, :, 5] = 1.0
    assert watch.step(on_gpu([[1, -1]]), on_gpu([6]))
    cache[3, 1, 2, 0, :] = 5.0
    with pytest.raises(AuditFailure, match=r"stray: v of page 3, slot 2 was written, and holds no token"):
        watch.step(on_gpu([[1, -1]]), on_gpu([6]))
