"""Meeting points of warps and partitions: waits, arrivals and fences, read from the text of either twin.

=======================================  =====================================  ======================
Gluon                                    emulator                               as it is compared
=======================================  =====================================  ======================
``mbarrier.wait(full.index(b), phase)``  ``yield cta.full[b], phase``           ``wait full[b], phase``
``mbarrier.arrive(free.index(b), ...)``  ``cta.arrive(me, cta.free[b])``,       ``arrive free[b]``
                                         ``cta.free[b].arrive(warps)``
``async_copy.mbarrier_arrive(full...)``  ``cta.full[b].arrive_copied(warps)``   ``arrive copied full[b]``
``mbarrier.expect(full.index(b), n)``    ``cta.full[b].expect_bytes(n, warp)``  ``expect full[b], n``
``named_barrier("sync", DONE, ...)``     ``yield cta.sync(cta.done, phase)``    ``wait done``
``named_barrier("arrive", DONE, ...)``   ``cta.done.arrive(warps)``             ``arrive done``
``hopper.warpgroup_mma_wait(n, ...)``    ``cta.wait_mma(me, n)``                ``wait for wgmma, n``
``tma.store_wait(n)``                    ``cta.wait_store(me)``                 ``wait for stores``
``fence_async_shared()``                 ``hazards.fence_async(me)``            ``fence``
``meet()``                               ``cta.meet(me)``                       ``meet``
=======================================  =====================================  ======================

What a step's own branches and loops enclose is compared with their headers. ``C.NB`` and a local ``NB`` are the same.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

ALONE = {
    "store_wait": "wait for stores", "wait_store": "wait for stores", "fence_async_shared": "fence",
    "fence_async": "fence", "meet": "meet",
}


@dataclass(frozen=True)
class Meeting:
    """A wait, an arrival or a fence; ``text`` is its comparable form."""

    text: str
    line: int


def meetings_of(statement: ast.stmt) -> list[Meeting]:
    """Meetings of a statement, in the order of the text.

    >>> kernel = "if C.HOLD == 1:\\n    mbarrier.wait(full.index(b), (it // NB) & 1)"
    >>> emulator = "if C.HOLD == 1:\\n    yield cta.full[b], (it // C.NB) & 1"
    >>> for text in (kernel, emulator):
    ...     print([meeting.text for meeting in meetings_of(ast.parse(text).body[0])])
    ['if HOLD == 1: wait full[b], it // NB & 1']
    ['if HOLD == 1: wait full[b], it // NB & 1']
    """
    return list(_walk(statement, ""))


def _walk(node: ast.stmt, inside: str) -> Iterator[Meeting]:
    if isinstance(node, ast.If):
        branches = [(f"if {_text(node.test)}: ", node.body), ("else: ", node.orelse)]
    elif isinstance(node, ast.For | ast.While):
        head = f"while {_text(node.test)}" if isinstance(node, ast.While) else f"for {_text(node.target)}"
        over = f" in {_text(node.iter)}" if isinstance(node, ast.For) else ""
        branches = [(f"{head}{over}: ", node.body), ("else: ", node.orelse)]
    else:
        found = sorted(
            (part.lineno, part.col_offset, text)
            for part in ast.walk(node)
            if isinstance(part, ast.Call | ast.Yield) and (text := meeting_of(part))
        )
        yield from (Meeting(inside + text, line) for line, _, text in found)
        return
    for header, body in branches:
        for statement in body:
            yield from _walk(statement, inside + header)


def meeting_of(node: ast.Call | ast.Yield) -> str | None:
    """The comparable form of what is in the table, None for anything else."""
    if isinstance(node, ast.Yield):
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".sync"):
            return _words("wait", node.value.args[0])
        pair = node.value.elts if isinstance(node.value, ast.Tuple) else []
        return _words("wait", *pair) if len(pair) == 2 else None
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    verb = ast.unparse(node.func).rpartition(".")[2]
    if owner is not None and ast.unparse(owner).rpartition(".")[2] == "mbarrier":
        return _words(verb, *node.args)
    if verb == "mbarrier_arrive":
        return _words("arrive copied", node.args[0])
    if verb == "named_barrier":
        text = _words("arrive" if ast.unparse(node.args[0]) == "'arrive'" else "wait", node.args[1])
        return re.sub(r"[A-Z][A-Z_]+", lambda name: name[0].lower(), text, count=1)  # the barrier's name
    if verb in ("warpgroup_mma_wait", "wait_mma"):
        return _words("wait for wgmma", node.args[-1])
    if verb in ALONE:
        return ALONE[verb]
    if verb == "arrive" and owner is not None:
        return _words("arrive", node.args[-1] if isinstance(owner, ast.Name) else owner)
    if verb == "arrive_copied" and owner is not None:
        return _words("arrive copied", owner)
    if verb == "expect_bytes" and owner is not None:
        return _words("expect", owner, node.args[0])
    return None


def _words(verb: str, *arguments: ast.expr) -> str:
    return f"{verb} {', '.join(map(_text, arguments))}"


def _text(node: ast.expr) -> str:
    """An expression without what differs by the side alone."""
    return ast.unparse(_Plain().visit(copy.deepcopy(node)))


class _Plain(ast.NodeTransformer):
    """``C.NB`` -> ``NB``, ``cta.full`` -> ``full``, ``full.index(b)`` -> ``full[b]``, ``static_range`` -> ``range``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in ("C", "cta", "self"):
            return ast.Name(node.attr)
        return ast.Attribute(self.visit(node.value), node.attr)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "index" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
            return ast.Subscript(self.visit(node.func.value), self.visit(node.args[0]))
        func = ast.Name("range") if name == "static_range" else self.visit(node.func)
        return ast.Call(func, [self.visit(argument) for argument in node.args], node.keywords)
