"""Public operations: a function that makes a call, which the operation runs or explains.

Flags and names are looked at first, torch.compile sees an operator, help and completion show the keywords of
``**options`` by name, and the modules of the operation's folder are reached through it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from kvlab.attention.call.call import Call
from kvlab.attention.call.explain import Explanation
from kvlab.attention.features.options import DEFAULTS, DOCUMENTATION
from kvlab.common.checks import require, shown
from kvlab.common.dlpack import as_known, is_foreign, like_caller
from kvlab.common.torch_here import is_traced

P = ParamSpec("P")
R = TypeVar("R")

FLAGS = {"return_lse": False, "base2": False, "batch_invariant": False, "balanced": True, "causal": True,
         "check": True}
"""The keywords that are True or False, and whether they may be None."""
NAMES = ("backend", "arch", "kv_layout")
"""The keywords that are names."""
KINDS: dict[str, type] = {**dict.fromkeys(FLAGS, bool), **dict.fromkeys(NAMES, str)}
PUBLIC: dict[str, PublicOperation[..., Any]] = {}
"""The operations by name, in the order in which they are made."""
MOST_BITS = 4096
"""Of an integer: longer ones Python does not write into messages."""


class PublicOperation(Generic[P, R]):
    """A public operation. ``function`` makes a :class:`~kvlab.attention.call.call.Call` of its arguments; the operation
    runs it, or explains it, when flags and names are right. A call that torch traces goes through the operation's
    operator, ``torch.ops.kvlab`` (see ``call/torch_ops.py``).

    An operation that has the name of its folder hides the folder. Modules of the folder that are imported are its
    attributes, so ``import kvlab.attention.mha_decode.kernel`` means what it says.

    >>> import kvlab.attention.mha_decode.config
    >>> kvlab.attention.mha_decode
    <operation kvlab.attention.mha_decode>
    >>> kvlab.attention.mha_decode.config.__name__
    'kvlab.attention.mha_decode.config'
    """

    __name__: str
    __wrapped__: Callable[P, Call[R]]
    __signature__: inspect.Signature

    def __init__(self, function: Callable[P, Call[R]]) -> None:
        self.call_type = call_type_of(function)
        function.__signature__ = signature = shown_signature(function, self.call_type)  # type: ignore[attr-defined]
        function.__doc__ = with_features(function.__doc__ or "", list(signature.parameters))
        functools.update_wrapper(self, function)
        self.keywords = frozenset(self.__signature__.parameters)
        if self.__module__.startswith(f"{__package__.partition('.')[0]}."):
            PUBLIC[self.__name__] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        if is_traced(first):
            from kvlab.attention.call.torch_ops import through

            return through(self, args, kwargs)
        if is_foreign(first):
            return self.given_back(first, self.made(*args, **kwargs).run(), kwargs.get("out"))
        return self.made(*args, **kwargs).run()

    def planned(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call, checked and with its plan: nothing has run. Raises what the call would raise."""
        return self.made(*args, **kwargs).planned()

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Plan of the call, which :func:`kvlab.attention.explain` shows."""
        return self.planned(*args, **kwargs).explained()

    def made(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call of these arguments, unchecked but for flags and names. Where the first is an array of another
        library, all such are taken by DLPack.
        """
        if not self.keywords.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in self.keywords)
            raise TypeError(f"{self.__name__}() got an unexpected keyword argument {unknown!r}")
        if is_foreign(args[0] if args else next(iter(kwargs.values()), None)):
            known = as_known(dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs)
            return self.__wrapped__(**checked_keywords(known))  # type: ignore[call-arg]
        return self.__wrapped__(*args, **checked_keywords(kwargs))

    def given_back(self, first: Any, result: Any, out: Any) -> Any:
        """Results in the library of the foreign array ``first``; ``out`` itself where it is given."""
        if out is None:
            return like_caller(result, first)
        return (out, like_caller(result[1], first)) if isinstance(result, tuple) else out

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # binds as a function does
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> ModuleType:
        module = sys.modules.get(f"{self.__module__}.{name}")
        if module is None:
            raise AttributeError(f"{self!r} has no attribute {name!r}, and {self.__module__}.{name} is not imported")
        return module

    def __reduce__(self) -> str:  # pickled by name, as a function
        return self.__name__

    def __repr__(self) -> str:
        return f"<operation kvlab.attention.{self.__name__}>"


def call_type_of(function: Callable[..., Any]) -> type[Call[Any]]:
    """The class of the calls that a function makes."""
    home: Any = function
    found: type[Call[Any]] = eval(home.__annotations__["return"], home.__globals__)
    return found


def shown_signature(function: Callable[..., Any], call: type[Call[Any]]) -> inspect.Signature:
    """The signature of a function that makes a call: the keywords of ``**options`` by name, with the call's defaults,
    and what the call gives back.
    """
    home: Any = function
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if "options" in home.__annotations__:
        (options,) = typing.get_args(eval(home.__annotations__["options"], home.__globals__))
        for name, hint in options.__annotations__.items():
            if name not in signature.parameters:
                default = getattr(call, name, DEFAULTS.get(name))
                words = getattr(hint, "__forward_arg__", hint)
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=words)
                )
    return signature.replace(parameters=parameters, return_annotation=call.returns)


def with_features(text: str, keywords: list[str]) -> str:
    """A docstring whose line ``{features}`` is replaced by the features among the keywords, as their files tell them;
    what the text tells itself is left out. ``{features:13}``: column of the words.

    >>> with_features("    {features:9}", ["q", "softcap"])
    '    softcap  0, or c of ``c tanh(scores / c)``'
    """

    def lines(found: re.Match[str]) -> str:
        indent, width = found[1], int(found[2])
        told = [
            textwrap.fill(words, 120, initial_indent=f"{indent}{names + '  ':<{width}}",
                          subsequent_indent=indent + " " * width, break_long_words=False, break_on_hyphens=False)
            for names, words in DOCUMENTATION.items()
            if names.split(", ")[0] in keywords and not re.search(rf"(?m)^ *{names.split(', ')[0]}\b", text)
        ]
        return "\n".join(told)

    return re.sub(r"(?m)^( *)\{features:(\d+)\}$", lines, text)


def checked_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords, flags as bool. ValueError for a flag that is not one, and for a name that is no text.

    >>> checked_keywords({"causal": np.True_, "check": None, "scale": 2})
    {'causal': True, 'check': None, 'scale': 2}
    >>> checked_keywords({"return_lse": "no"})
    Traceback (most recent call last):
        ...
    ValueError: return_lse is 'no': must be True or False
    """
    for name, value in kwargs.items():
        expected, given = KINDS.get(name), type(value)
        if given is expected:
            continue
        if expected is bool and not (value is None and FLAGS[name]):
            accepted = "True, False or None" if FLAGS[name] else "True or False"
            require(isinstance(value, np.bool_), f"{name} is {shown(value)}", accepted)
            kwargs[name] = bool(value)
        elif expected is str:
            require(isinstance(value, str), f"{name} is {shown(value)}", "text, one of the names it knows")
        elif given is int:
            require(value.bit_length() <= MOST_BITS, f"{name} is {shown(value)}", f"of at most {MOST_BITS} bits")
    return kwargs
