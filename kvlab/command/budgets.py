"""``kvlab budget``: bytes of a model's cache, and how many tokens fit a card."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from rich.markup import escape

from kvlab.command.answers import Answer, check_output
from kvlab.command.calls import literals
from kvlab.common.checks import require, shown
from kvlab.formats import CardFit, KVBudget, KVRequest, kv_budget


def told(budget: KVBudget, request: KVRequest, fit: CardFit | None) -> dict[str, Any]:
    """The facts of a budget for ``--json``.

    >>> budget = kv_budget("smollm2-135m")
    >>> told(budget, budget.request(16), None)["request"]
    {'tokens': 16, 'data': 368640, 'unfilled': 0, 'padding': 0, 'bytes': 368640}
    """
    def of(one: KVRequest) -> dict[str, int]:
        return {**one._asdict(), "bytes": one.nbytes}

    groups = [
        {
            "kind": group.kind, "layers": list(group.layers), "token_bytes": group.token_bytes,
            "page_tokens": group.page_tokens, "page_bytes": group.page_bytes,
            "page_padding": group.page_bytes - group.page_data, "span": group.span, "replicas": group.replicas,
            "format": None if group.format is None else group.format.print(), "pages": group.pages(request.tokens),
            "request": of(budget.request(request.tokens, group)),
        }
        for group in budget.groups
    ]
    return {
        "model": budget.name, "kv_dtype": budget.kv_dtype, "degree": budget.degree,
        "bytes_per_token": budget.bytes_per_token, "growing_bytes_per_token": budget.growing_bytes_per_token,
        "state_bytes": budget.state_bytes, "request": of(request), "groups": groups,
        "layers": [layer._asdict() for layer in budget.per_layer], "notes": list(budget.notes),
        "fit": None if fit is None else fit._asdict(),
    }


def budgeted(
    config: str, given: Sequence[str], how: dict[str, Any], tokens: int, card: dict[str, Any] | None,
    output: Path | None,
) -> Answer:
    """``kvlab budget``: the table, and no where not even one request fits the card.

    given    NAME=VALUE of further options of ``kv_budget``
    how      its options that have a name of their own in the command
    card     arguments of ``KVBudget.fit``, or None
    """
    check_output(output, ".svg", ".html", ".png")
    more = literals(given, "'mtp=True' or 'align=4096'")
    known = set(signature(kv_budget).parameters) - {"config", *how}
    for name in more:
        require(name in known, f"option is {shown(name)}", f"one of {', '.join(sorted(known))}")
    budget = kv_budget(config, **how, **more)
    request = budget.request(tokens)
    fit = None if card is None else budget.fit(tokens=tokens, **card)
    words, data = budget.report(tokens), told(budget, request, fit)
    if fit is not None and card is not None:
        longest = "any length" if fit.longest is None else f"{fit.longest} tokens"
        words += (
            f"\n{card['memory']} * {card['utilisation']:g}: weights {fit.weights}"
            f"{' (estimated)' * (card['weights'] is None)}, room {fit.room} bytes: {fit.requests} requests of {tokens} "
            f"tokens ({fit.requests * tokens} in all), or one of {longest}"
        )
    if output is not None:
        from kvlab.viz import save

        data["file"] = save(budget, output, tokens=tokens)
        words += f"\n{output} written"
    return Answer(escape(words), data, yes=fit is None or fit.requests > 0)
