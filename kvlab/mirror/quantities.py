"""The quantities of an expression, freed of what differs between Triton and NumPy: what twins' statements must share.

Plumbing has no part in them: casts, shapes (``[:, None]``, ``broadcast_to``, ``by_row``, ``with_values``), the names of
modules and of the objects that a twin's arguments live in (``tl.``, ``np.``, ``config.``), what lies outside a mask.
A load is the array and what it is indexed by: the strides and the pointer of an array are that array, and sums and
products with them are addresses, which have no operators but a minus. What is left is a list of facts:

==================  ===========================================================================================
``("name", x)``     ``x`` is used
``(op, a, b ..)``   an operator and the names in each of its operands; chains of + and -, of * and / and of & are one,
                    ``a > b`` is ``b < a``, and the operands of what may be exchanged are in alphabetical order
``("f", a ..)``     a mathematical function and the names in each argument
``("minus", a)``    ``a`` is subtracted within an address
``("f()", a ..)``   a helper is called, with these names
==================  ==========================================================================================="""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SHARED = {
    "features.softcap > 0": "CAPPED",
    "numbers.softcap is not None": "CAPPED",
    "chunk > 0": "CHUNKED",
    "chunk is not None": "CHUNKED",
    "mask.bounded": "BOUNDED",
    "mask.windowed": "BOUNDED",
    **{f"features.{name} is not None": f"{x.upper()}_SCALE == 'token'"
       for x in "kv" for name in (f"{x}_tokens", f"scales.{x}.tokens")},
    **{f"features.{name} is {no}None": f"{'' if no else 'not '}{x.upper()}_OVER_MINIMA"
       for x in "kv" for name in (f"{x}_minima", f"scales.{x}.minima") for no in ("", "not ")},
    **{f"numbers.{part} is not None": f"{part.upper()}_SCALED" for part in ("nope", "rope")},
    **{f"numbers.{part}": f"scales.{part}.number" for part in ("nope", "rope")},
    **{f"scales.{part}.scaled": f"{part.upper()}_SCALED" for part in ("nope", "rope")},
    "-float('inf')": "INFINITY_BELOW",
    "float('-inf')": "INFINITY_BELOW",
    "-np.inf": "INFINITY_BELOW",
    "np.inf": "INFINITY",
    "float('inf')": "INFINITY",
}
"""How both sides spell one thing, in every operation; a twin's own ``synonyms`` come before these."""

_HOLDERS = {
    "tl",
    "np",
    "math",
    "problem",
    "config",
    "mask",
    "features",
    "cta",
    "self",
    "C",
    "hopper",
    "gl",
    "numbers",
    "libdevice",
}
_AS_IS = {"values", "T", "rows", "offset"}
_CASTS = {
    "to", "astype", "float32", "float16", "int32", "int64", "uint32", "float", "int", "bool", "asarray", "reshape",
    "broadcast_to", "ascontiguousarray", "trans", "view", "copy", "by_row", "swapaxes", "expand_dims", "item", "tile",
    "rows", "cast", "permute", "ravel", "squeeze", "convert_layout", "max_contiguous", "multiple_of", "atleast_1d",
}
_INNER = {"with_values", "by_column"}
"""Whose last argument is what they are about."""
_FUNCTIONS = {
    "exp2", "exp", "log2", "log", "abs", "where", "maximum", "minimum", "max", "min", "sum", "sqrt", "rsqrt", "tanh",
    "dot", "arange", "cdiv", "cumsum", "histogram", "floor", "clip", "isneginf", "isnan", "split", "join", "interleave",
    "nonzero", "argsort", "program_id",
}
_REDUCTIONS = {"max", "min", "sum", "cumsum", "abs"}
EXCHANGEABLE = {"+", "*", "&", "|", "==", "!=", "maximum", "minimum", "^"}
_SPELLINGS = {
    "row_max": "max", "row_sum": "sum", "ceildiv": "cdiv", "absolute": "abs", "fabs": "abs", "static_range": "range",
    "ragged_range": "range",
}
_BINARY: dict[type, str] = {
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitXor: "^",
    ast.MatMult: "@",
}
_COMPARED: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "==",
    ast.IsNot: "!=", ast.In: "in", ast.NotIn: "not in",
}


Fact = tuple[str, tuple[frozenset[str], ...]]
"""An operator, function or helper, and the names in each of its operands."""


@dataclass(frozen=True)
class Form:
    """An expression in its plain form: an operator, function or helper with its operands, or a leaf.

    ``op`` "leaf": a name or a constant, ``text``. "address": an array's element, or an offset; its operands' names.
    "call": a helper, ``text``, whose arguments are operands."""

    op: str
    parts: tuple[Form, ...] = ()
    text: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Names and constants of a value; of a helper's result, the helper alone."""
        if self.op == "leaf":
            return frozenset([self.text])
        if self.op == "call":
            return frozenset([f"{self.text}()"])
        sign = {"minus": "-", "inverse": "/"}.get(self.op, "")
        return frozenset(sign + name for part in self.parts if part.op != "other" for name in part.names)

    @property
    def all_names(self) -> frozenset[str]:
        """Names as of ``names``, with the arguments of helpers."""
        if self.op == "leaf":
            return frozenset([self.text])
        own = [f"{self.text}()"] if self.op == "call" else []
        return frozenset(own).union(*(part.all_names for part in self.parts))


@dataclass
class Reading:
    """Reading of one side: synonyms of expressions, its pointers, which pointer a stride belongs to.

    >>> reading = Reading({"features.softcap": "softcap"}, {"k_ptr"}, {"k_page": "k_ptr"})
    >>> for text in ("tl.load(k_ptr + page * k_page)", "s.with_values(s.values - s.by_row(m))", "x is None"):
    ...     print(sorted(reading.form(ast.parse(text, mode="eval").body).names))
    ['k_ptr', 'page']
    ['-m', 's']
    ['None', 'x']

    ``flags``: names of constexprs, which helpers are given in Triton alone. ``aliases``: names that one side gives to a
    thing that has one."""

    synonyms: Mapping[str, str]
    pointers: set[str] = field(default_factory=set)
    strides: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    aliases: dict[str, Form] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = {**SHARED, **self.synonyms}
        self._table = {_read(key)[0]: _read(value)[1] for key, value in table.items()}
        self._kinds = {_kind(_read(key)[1]) for key in table}
        self.pointers = {self.name(pointer) for pointer in self.pointers}

    def name(self, name: str) -> str:
        """A name as both sides call it."""
        found = self._table.get(name)
        if isinstance(found, ast.Name):
            return found.id
        name = self.strides.get(name, name)
        return f"{name.removesuffix('_array')}_ptr" if name.endswith("_array") else name

    def condition(self, test: ast.expr) -> str:
        """A test of an ``if`` in its comparable form."""
        return _show(self.form(test))

    def form(self, node: ast.expr) -> Form:
        """The plain form of an expression."""
        found = self._table.get(ast.unparse(node)) if _kind(node) in self._kinds else None
        if found is not None:
            return _leaf(found.id) if isinstance(found, ast.Name) else self._form(found)
        return self._form(node)

    def _all(self, nodes: Iterable[ast.expr]) -> tuple[Form, ...]:
        return tuple(self.form(node) for node in nodes)

    def _form(self, node: ast.expr) -> Form:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id) or _leaf(self.name(node.id))
        if isinstance(node, ast.Constant):
            return _leaf(_constant(node.value))
        if isinstance(node, ast.Starred):
            return self.form(node.value)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            kept = [one for one in index if not isinstance(one, ast.Slice) and not _is_none(one)]
            base = self.form(node.value)
            return Form("address", (base, *self._all(kept))) if kept else base
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BoolOp):
            return _chain("&" if isinstance(node.op, ast.And) else "|", self._all(node.values))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            return Form("where", self._all([node.test, node.body, node.orelse]))
        if isinstance(node, ast.Tuple | ast.List):
            return Form("tuple", self._all(node.elts))
        children = [
            child for child in ast.walk(node) if isinstance(child, ast.Name | ast.Attribute) and child is not node
        ]
        return Form("address", self._all(children))

    def _attribute(self, node: ast.Attribute) -> Form:
        if node.attr in _AS_IS:
            return self.form(node.value)
        root = node.value
        if isinstance(root, ast.Name) and root.id.endswith("_strides"):
            return _leaf(self.name(f"{root.id.removesuffix('_strides')}_ptr"))
        if isinstance(root, ast.Attribute) and isinstance(root.value, ast.Name) and root.value.id in _HOLDERS:
            root = ast.Name(root.attr) if root.attr in _HOLDERS else root
        if isinstance(root, ast.Name) and root.id in _HOLDERS:
            return _leaf(self.name(node.attr))
        return _leaf(ast.unparse(node))

    def _unary(self, node: ast.UnaryOp) -> Form:
        inner = self.form(node.operand)
        if isinstance(node.op, ast.Not | ast.Invert):
            return inner.parts[0] if inner.op == "not" else Form("not", (inner,))
        if isinstance(node.op, ast.UAdd):
            return inner
        if inner.op == "leaf" and _is_number(inner.text):
            return _leaf(_constant(-float(inner.text)))
        return Form("+", (Form("minus", (inner,)),))

    def _binary(self, node: ast.BinOp) -> Form:
        left, right, op = self.form(node.left), self.form(node.right), node.op
        if isinstance(op, ast.Add | ast.Sub):
            second = _negated(right) if isinstance(op, ast.Sub) else _terms(right, "+")
            terms = (*_terms(left, "+"), *second)
            if any(self._is_address(term) for term in terms):
                return _address(terms)
            return Form("+", terms)
        if isinstance(op, ast.Mult | ast.Div):
            second = tuple(_inverse(f) for f in _terms(right, "*")) if isinstance(op, ast.Div) else _terms(right, "*")
            factors = (*_terms(left, "*"), *second)
            if any(self._is_address(factor) for factor in factors):
                return _address(factors)
            return Form("*", factors)
        if isinstance(op, ast.BitAnd | ast.BitOr):
            return _chain("&" if isinstance(op, ast.BitAnd) else "|", (left, right))
        return Form(_BINARY[type(op)], (left, right))

    def _is_address(self, form: Form) -> bool:
        """A pointer, a stride, or an offset made of them (an element of an array is a value)."""
        inner = form.parts[0] if form.op in ("minus", "inverse") else form
        return inner.text == "offset" if inner.op == "address" else inner.op == "leaf" and inner.text in self.pointers

    def _compare(self, node: ast.Compare) -> Form:
        if isinstance(node.ops[0], ast.Is) and _is_none(node.comparators[0]):
            return self._form(ast.UnaryOp(ast.Not(), ast.Compare(node.left, [ast.IsNot()], node.comparators)))
        sides = self._all([node.left, *node.comparators])
        pairs = [_comparison(_COMPARED[type(op)], a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False)]
        return pairs[0] if len(pairs) == 1 else _chain("&", tuple(pairs))

    def _call(self, node: ast.Call) -> Form:
        function = ast.unparse(node.func).rpartition(".")[2].lstrip("_").removesuffix("_kernel")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, ast.Name | ast.Attribute) and ast.unparse(owner).partition(".")[0] in _HOLDERS:
            bare = ast.unparse(owner) in _HOLDERS or ast.unparse(owner).startswith(("tl.", "np.", "gl."))
            owner = None if bare else owner
        function = _SPELLINGS.get(function, function)
        spelled = None if function in _FUNCTIONS else self._table.get(function)
        if isinstance(spelled, ast.Name):
            function = spelled.id
        arguments = list(node.args)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if function in _INNER and arguments:
            return self.form(arguments[-1])
        if function in _CASTS and (owner is not None or arguments):
            return self.form(owner if owner is not None and function != "by_row" else arguments[0])
        if function == "load" and owner is None:
            return self._load(arguments, given)
        if function == "store" and owner is None and len(arguments) > 1:
            mask = [Form("mask", (self.form(given["mask"]),))] if "mask" in given else []
            where = self._load(arguments[:-1], {})
            return Form("store", (where, self.form(arguments[-1]), *mask))
        if function in ("zeros", "zeros_like"):
            return _leaf("0.0")
        if function in ("ones", "ones_like"):
            return _leaf("1.0")
        if function in ("full", "full_like") and len(arguments) > 1:
            return self.form(arguments[1])
        if function in ("divide", "div_rn", "fdiv") and len(arguments) == 2:
            return self._form(ast.BinOp(arguments[0], ast.Div(), arguments[1]))
        if function in ("multiply_add", "fma") and len(arguments) == 3:
            return self._form(ast.BinOp(ast.BinOp(arguments[0], ast.Mult(), arguments[1]), ast.Add(), arguments[2]))
        if function in ("sum_products", "add_products") and len(arguments) > 1:
            return Form("sum", (self._form(ast.BinOp(arguments[0], ast.Mult(), arguments[1])),))
        if function == "times" and owner is not None:
            return self._form(ast.BinOp(owner, ast.Mult(), arguments[0]))
        if function in ("min", "max") and len(arguments) > 1 and owner is None and isinstance(node.func, ast.Name):
            function = {"min": "minimum", "max": "maximum"}[function]
        if function == "clip" and len(arguments) == 3:
            inner = ast.Call(ast.Name("maximum"), arguments[:2], [])
            return self._form(ast.Call(ast.Name("minimum"), [inner, arguments[2]], []))
        if function == "isneginf":
            return Form("==", (self.form(arguments[0]), _leaf("INFINITY_BELOW")))
        if function in _REDUCTIONS:
            return Form(function, self._all([*([owner] if owner is not None else []), *arguments][:1]))
        if function == "arange":
            ends = arguments[1:] if len(arguments) > 1 and ast.unparse(arguments[0]) == "0" else arguments
            return Form(function, self._all(ends))
        if function == "where" and len(arguments) == 3:
            test, chosen, other = self._all(arguments)
            if chosen.op == "address" and chosen.text != "offset" and other.op == "leaf":
                return Form("address", (*chosen.parts, Form("mask", (test,))))
            return Form(function, (test, chosen, other))
        if owner is not None and not (isinstance(owner, ast.Name) and owner.id in ("hopper", "mbarrier", "tma")):
            arguments = [owner, *arguments]
        parts = self._all([*arguments, *given.values()])
        return Form(function, parts) if function in _FUNCTIONS else Form("call", parts, function)

    def _load(self, arguments: list[ast.expr], given: dict[str | None, ast.expr]) -> Form:
        """An element: of what a pointer with its offset says, or of an array with its index."""
        parts = [part for form in self._all(arguments) for part in (form.parts if form.op == "address" else (form,))]
        parts += [Form(word, (self.form(given[word]),)) for word in ("mask", "other") if word in given]
        return Form("address", tuple(parts))

    def facts(self, form: Form) -> list[Fact]:
        """Facts about operators, functions and helpers of a form, one fact for each, in the order of the text.

        >>> reading = Reading({})
        >>> for op, operands in reading.facts(reading.form(ast.parse("exp2(s - m[:, None])", mode="eval").body)):
        ...     print(op, *map(sorted, operands))
        exp2 ['-m', 's']
        + ['s'] ['-m']
        """
        found: list[Fact] = [("is", (form.names,))] if form.op == "leaf" and not form.text.isidentifier() else []
        self._collect(form, found, False)
        return found

    def _collect(self, form: Form, found: list[Fact], inside: bool) -> None:
        if form.op == "leaf":
            return
        if form.op == "call":
            found.append((f"{form.text}()", tuple(part.names for part in form.parts)))
        elif form.op not in ("address", "mask", "tuple", "inverse", "store") and not (
            form.op in ("+", "*", "&", "arange") if inside else form.op == "minus"
        ):
            found.append((form.op, tuple(part.names for part in form.parts)))
        inside = form.op in ("address", "mask") or (inside and form.op != "call")
        for part in form.parts:
            if not (form.op == "call" and self._is_flag(part)):
                self._collect(part, found, inside)

    def _is_flag(self, form: Form) -> bool:
        """Tells whether an argument is made of constexprs alone."""
        return all(name in self.flags for name in form.all_names if name.isidentifier())


def _leaf(text: str) -> Form:
    return Form("leaf", (), text)


def _constant(value: object) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)
    return repr(float(value)) if isinstance(value, int | float) else repr(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, Ellipsis)


def _terms(form: Form, op: str) -> tuple[Form, ...]:
    return form.parts if form.op == op else (form,)


def _negated(form: Form) -> tuple[Form, ...]:
    return tuple(term.parts[0] if term.op == "minus" else Form("minus", (term,)) for term in _terms(form, "+"))


def _inverse(form: Form) -> Form:
    return form.parts[0] if form.op == "inverse" else Form("inverse", (form,))


def _address(parts: Iterable[Form]) -> Form:
    flat: list[Form] = []
    for part in parts:
        part = part.parts[0] if part.op == "inverse" else part
        flat += part.parts if part.op in ("address", "+", "*") else [part]
    return Form("address", tuple(flat), "offset")


def _chain(op: str, parts: tuple[Form, ...]) -> Form:
    return Form(op, tuple(term for part in parts for term in _terms(part, op)))


def _comparison(op: str, a: Form, b: Form) -> Form:
    if op in (">", ">="):
        return Form({">": "<", ">=": "<="}[op], (b, a))
    return Form(op, (a, b))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> tuple[str, ast.expr]:
    """An expression as ``ast`` writes it, and itself."""
    node = ast.parse(text, mode="eval").body
    return ast.unparse(node), node


def _kind(node: ast.expr) -> tuple[type[ast.expr], str]:
    """What a node has in common with all that read like it, told without its text: its class, and its own name."""
    return type(node), node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _show(form: Form) -> str:
    """A form as text, the same for what is the same."""
    if form.op == "leaf":
        return form.text
    parts = [_show(part) for part in form.parts]
    if form.op in EXCHANGEABLE:
        parts.sort()
    if form.op in ("minus", "inverse", "not"):
        return f"{form.op} {parts[0]}"
    if form.op in ("<", "<=", "==", "!=", "+", "*", "&", "|", "//", "%"):
        return f"{' ' + form.op + ' '}".join(parts)
    return f"{form.text or form.op}({', '.join(parts)})"
