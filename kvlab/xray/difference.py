"""XRayDiff of two X-rays: versions of a kernel, or one kernel on two targets."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.common.drawn import Shown
from kvlab.xray.result import XRay


@dataclass(frozen=True, eq=False, repr=False)
class XRayDiff(Shown):
    """Result of :func:`diff`: numbers of both, and the findings that only one of them has.

    rows      (name, of a, of b) of every number that differs
    gone      findings of ``a`` that ``b`` does not have;  ``new`` those that only ``b`` has
    """

    a: XRay
    b: XRay

    @property
    def rows(self) -> list[tuple[str, object, object]]:
        """(name, of a, of b) of the numbers that differ."""
        numbers = [_numbers(one) for one in (self.a, self.b)]
        names = [*numbers[0], *(name for name in numbers[1] if name not in numbers[0])]
        both = [(name, numbers[0].get(name, 0), numbers[1].get(name, 0)) for name in names]
        return [row for row in both if row[1] != row[2]]

    @property
    def gone(self) -> list[str]:
        """Findings of a that b does not have, by kind and words without lines."""
        return [str(one) for one in self.a.findings if _key(one) not in {_key(x) for x in self.b.findings}]

    @property
    def new(self) -> list[str]:
        """Findings that only b has."""
        return [str(one) for one in self.b.findings if _key(one) not in {_key(x) for x in self.a.findings}]

    @property
    def same(self) -> bool:
        """True where nothing differs."""
        return not self.rows and not self.gone and not self.new

    def __str__(self) -> str:
        names = [f"{one.name} on {one.target}" for one in (self.a, self.b)]
        lines = [f"a: {names[0]}", f"b: {names[1]}"]
        lines += [f"  {name}: {a} -> {b}" for name, a, b in self.rows] or ["  all numbers are equal"]
        lines += [f"  gone: {words}" for words in self.gone] + [f"  new: {words}" for words in self.new]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"XRayDiff({len(self.rows)} numbers, {len(self.gone)} findings gone, {len(self.new)} new)"

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {"a": self.a.name, "b": self.b.name, "targets": [self.a.target, self.b.target],
                "rows": [list(row) for row in self.rows], "gone": self.gone, "new": self.new}

    def _repr_html_(self) -> str:
        from kvlab.xray.report import difference_html

        return difference_html(self)


def diff(a: XRay, b: XRay) -> XRayDiff:
    """Difference of two X-rays.

    a, b   results of :func:`kvlab.xray.xray`; ValueError for anything else

    >>> diff(None, None)
    Traceback (most recent call last):
        ...
    ValueError: a is None: must be an XRay, what kvlab.xray.xray returns
    """
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, XRay):
            raise ValueError(f"{name} is {value!r}: must be an XRay, what kvlab.xray.xray returns")
    return XRayDiff(a, b)


def _key(finding: object) -> tuple[object, ...]:
    import re

    words = re.sub(r"\d+", "#", getattr(finding, "words", ""))
    return getattr(finding, "kind", ""), words


def _numbers(one: XRay) -> dict[str, object]:
    resources = one.resources
    found: dict[str, object] = {
        "registers": resources.registers, "spills": resources.spills, "stack": resources.stack,
        "shared memory": resources.shared, "warps": resources.warps, "CTAs an SM": resources.ctas,
        "limited by": resources.limiter, "occupancy": round(resources.occupancy, 3),
    }
    for name, pair in (("wavefronts", ("wavefronts", "ideal")), ("sectors", ("sectors", "ideal_sectors"))):
        totals = [sum(getattr(edge, field) for edge in one.edges) for field in pair]
        found[name], found[f"{name}, ideal"] = totals
    for kind, names in one.histogram.items():
        found[f"{kind} instructions"] = sum(lines.total() for lines in names.values())
    return found
