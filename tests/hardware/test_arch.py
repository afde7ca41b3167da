"""Architectures as data. Rests on the vendors' manuals, quoted here a second time."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from kvlab.hardware import ARCHS, INSTRUCTIONS, get_arch, get_instruction


@pytest.mark.parametrize(
    ("name", "warp_size", "banks", "shared_kib"),
    [
        ("sm_80", 32, 32, 163), ("sm_86", 32, 32, 99), ("sm_89", 32, 32, 99), ("sm_90", 32, 32, 227),
        ("sm_100", 32, 32, 227), ("sm_120", 32, 32, 99),
        ("gfx90a", 64, 32, 64), ("gfx942", 64, 32, 64), ("gfx950", 64, 64, 160),
        ("gfx1100", 32, 32, 64), ("gfx1201", 32, 32, 64),
    ],
)
def test_numbers(name: str, warp_size: int, banks: int, shared_kib: int) -> None:
    arch = get_arch(name)
    assert (arch.warp_size, arch.banks, arch.bank_bytes) == (warp_size, banks, 4)
    assert arch.shared_bytes == shared_kib * 1024
    assert get_arch(arch) is arch
    reserved = 1024 if arch.vendor == "nvidia" else 0
    assert arch.shared_bytes_sm >= arch.shared_bytes + reserved
    assert arch.registers_sm % (arch.warp_size * 256) == 0


@pytest.mark.parametrize("name", ARCHS)
def test_every_number_has_a_source(name: str) -> None:
    arch = ARCHS[name]
    facts = {f.name for f in dataclasses.fields(arch)} - {"name", "vendor", "sources", "provisional"}
    assert facts == set(arch.sources)
    with pytest.raises(dataclasses.FrozenInstanceError):
        arch.banks = 16  # type: ignore[misc]
    assert hash(arch) == hash(get_arch(name))


def test_only_the_measured_chip_is_not_provisional() -> None:
    assert [name for name, arch in ARCHS.items() if "wavefronts" not in arch.provisional] == ["sm_90"]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=re.escape(f"arch is 'hopper': must be one of {', '.join(ARCHS)}")):
        get_arch("hopper")
    with pytest.raises(ValueError, match="arch is None: must be one of"):
        get_arch(None)


def test_which_machine_has_which_instruction() -> None:
    def names(arch: str) -> set[str]:
        found = set()
        for name in INSTRUCTIONS:
            try:
                found.add(get_instruction(name, get_arch(arch)).name)
            except ValueError:
                continue
        assert found == set(get_arch(arch).instructions)
        return found

    assert names("sm_90") - names("sm_80") == {n for n in INSTRUCTIONS if n.startswith("stmatrix")}
    assert names("gfx950") - names("gfx942") == {"ds_read_tr16_b64", "ds_read_tr8_b64"}
    assert names("sm_80") == names("sm_86") == names("sm_89")
    assert names("sm_90") == names("sm_100") == names("sm_120")
    assert names("gfx90a") == names("gfx942") == names("gfx1100") == names("gfx1201")
    assert not names("sm_90") & names("gfx950")
    assert names("sm_90") | names("gfx950") == set(INSTRUCTIONS)


def test_which_machine_has_which_copy() -> None:
    assert get_arch("sm_89").copies == ("cp.async",)
    assert get_arch("sm_90").copies == ("cp.async", "tma")
    assert get_arch("sm_100").copies == ("cp.async", "tma", "tma.gather4")
    assert get_arch("gfx942").copies == ("buffer_load_lds",)
    assert get_arch("gfx950").copies == ("buffer_load_lds", "buffer_load_lds_b128")
    assert get_arch("gfx1201").copies == ()


def test_the_room_needs_numpy_only() -> None:
    """torch and triton stay out of the process."""
    code = "import sys, kvlab.hardware; print([m for m in ('torch', 'triton', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
