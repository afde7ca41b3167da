"""Uniform registers that nothing has written. Rests on what SASS instructions read and write, and where they may go on.

That compiled kernels have none, and what a faulty assembler leaves out, the compile tests of the operations show.
"""

from __future__ import annotations

import pytest

from kvlab.triton_support.sass import jump_tables, unwritten

WRITE, READ = "UMOV UR4, 0x400", "UIADD3 UR6, UR4, 0x1, URZ"
PAIR = "ULDC.64 UR4, c[0x0][0x208]"


def listing(*instructions: str) -> str:
    """As cuobjdump prints them: 16 bytes each, from 0 on."""
    return "".join(f"        /*{16 * i:04x}*/{' ' * 19}{text} ;\n" for i, text in enumerate(instructions))


def product(a: str) -> str:
    """wgmma with B's descriptor in UR6 and UR7; that of A, in shared memory, in UR4 and UR5."""
    return f"HGMMA.64x64x16.F32.BF16 R24, {a}gdesc[UR4], R24"


SOUND = {
    "straight": (WRITE, READ),
    "written on both ways": ("@P0 BRA 0x30", WRITE, "BRA 0x40", WRITE, READ),
    "in a loop": (WRITE, READ, "@P0 BRA 0x10", "EXIT"),
    "from a thread's register": ("R2UR UR4, R2", READ),
    "from a special register": ("S2UR UR4, SR_CTAID.X", READ),
    "with a predicate": ("UISETP.NE.AND UP0, UPT, URZ, 0x1, UPT", "UIADD3 UR4, UP0, URZ, 0x1, URZ", READ),
    "two at once": (PAIR, "UIADD3 UR6, UR4, UR5, URZ"),
    "a wide product": ("UIMAD.WIDE.U32 UR4, URZ, 0x2, URZ", "UIADD3 UR6, UR4, UR5, URZ"),
    "four at once": ("LDCU.128 UR4, c[0x0][0x380]", "UIADD3 UR8, UR6, UR7, URZ"),
    "under a uniform predicate": ("@UP0 UMOV UR4, URZ", READ),
    "behind the end": ("EXIT", READ),
    "behind a return": ("RET.REL.NODEC R2 0x0", READ),
    "behind a way that returns": (WRITE, "BRA 0x30", READ.replace("UR4", "UR9"), READ),
    "a call comes back": (WRITE, "CALL.REL.NOINC 0x40", READ, "EXIT", "RET.REL.NODEC R2 0x0"),
    "both descriptors": ("ULDC.64 UR4, c[0x0][0x208]", "ULDC.64 UR6, c[0x0][0x210]", product("")),
    "B's descriptor": ("ULDC.64 UR6, c[0x0][0x210]", product("R8, ")),
}
FAULTS = {
    "never": (READ,),
    "behind": (READ, WRITE),
    "on one of two ways": ("@P0 BRA 0x20", WRITE, READ),
    "on the other": ("@P0 BRA 0x30", WRITE, "BRA 0x30", READ),
    "on the way that is shorter": ("@P0 BRA 0x30", WRITE, "BRA 0x40", "NOP", READ),
    "behind an end of some threads": ("@P0 EXIT", READ),
    "behind a branch of some threads": ("BRA P1, 0x20", READ, "EXIT"),
    "behind a call": ("CALL.REL.NOINC 0x30", READ, "EXIT", "RET.REL.NODEC R2 0x0"),
    "only where the loop comes back": (READ, WRITE, "@P0 BRA 0x0", "EXIT"),
    "where a call goes": ("CALL.REL.NOINC 0x30", WRITE, "EXIT", READ, "RET.REL.NODEC R2 0x0"),
    "one of two": (WRITE, "LDG.E R0, desc[UR4][R2.64]"),
    "one of 64 bits": (WRITE, "UIADD3.64 UR6, UR4, 0x2, URZ"),
    "by a store": ("STS [UR4+0x100], R7",),
    "written where it is read": ("UIADD3 UR4, UR4, 0x1, URZ",),
    "A's descriptor": ("ULDC.64 UR6, c[0x0][0x210]", product("")),
    "B's descriptor": (PAIR, product("")),
    "half of B's": (PAIR, "UMOV UR6, 0x0", product("")),
    "B's descriptor, A in registers": (PAIR, product("R8, ")),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_code(case: str) -> None:
    assert unwritten(listing(*SOUND[case])) == []


@pytest.mark.parametrize("case", FAULTS)
def test_the_reading_instruction_is_named(case: str) -> None:
    (found,) = unwritten(listing(*FAULTS[case]))
    assert found in FAULTS[case]
    assert found.startswith(("UIADD3", "LDG", "STS", "HGMMA"))


JUMP = ("LDC R2, c[0x2][R0]", "BRX R2 -0x20", WRITE, READ, "EXIT", "NOP", READ)


@pytest.mark.parametrize("targets, faults", [((0x20, 0x30), 1), ((0x20,), 0), ((0x20, 0x50), 1), ((0x60,), 1)])
def test_a_branch_goes_where_its_table_says(targets: tuple[int, ...], faults: int) -> None:
    """And nowhere else: what stands behind it is reached by its table alone."""
    assert len(unwritten(listing(*JUMP), {0x10: targets})) == faults


def test_a_branch_of_some_threads_through_a_table_goes_on_as_well() -> None:
    code = ("LDC R2, c[0x2][R0]", "@P0 BRX R2 -0x20", READ, "EXIT", WRITE, READ)
    assert unwritten(listing(*code), {0x10: (0x40,)}) == [READ]


def test_a_branch_without_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'BRX R2 -0x20' at 0x10: must be among the branches of tables, \[64\]"):
        unwritten(listing(*JUMP), {0x40: [0x20]})


def test_a_table_that_is_cut_off_is_refused() -> None:
    text = "Offset of Indirect Branch: 0x180\t Number of targets: 3\n\t\tTargets: 0x190 0x4e90 \n"
    with pytest.raises(ValueError, match=r"must have \[3\] targets"):
        jump_tables(text)
