"""What torch checks of an operation's operators."""

from __future__ import annotations

from typing import Any

import torch

from kvlab.attention.call import torch_ops


def assert_opcheck(operation: str, arguments: dict[str, Any]) -> None:
    """``torch.library.opcheck`` of the operator with a result, and of the one that writes ``out`` if there is one."""
    operator, out = torch_ops.OPERATORS[operation], arguments.pop("out", None)
    values = operator.carried((), arguments)
    assert values is not None
    torch.library.opcheck(operator.functional, tuple(operator.in_order("", values)))
    if operator.writing is not None:
        torch.library.opcheck(operator.writing, (), values | {"out": out})
