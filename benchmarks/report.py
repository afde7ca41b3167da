"""Goal and reached, task by task, from the records of side-by-side runs.

    python benchmarks/report.py [RECORD.json ...]        # without one: the committed records

A goal is how many times as fast as the fastest peer of the same run a task shall be; decode of 64 sequences shall also
read the cache at 0.95 of what a plain reading kernel reaches. For tasks of :mod:`more_tasks` it is 1. A task of a later
record replaces that of an earlier one.
Where a call goes over a work list, ``kvlab`` makes it in the time that is taken, ``kvlab_plan`` has it from before, as
FA3 has its metadata: the goal is held against the latter, like for like, and the former is shown beside it.
Ratios hold inside a run: which peers took part, and what the card's ceilings were, is in the record.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GOALS", "Goal", "rows", "table"]

RESULTS = Path(__file__).parent / "results"
RECORDS = ("attention_peers_h100.json",)


@dataclass(frozen=True)
class Goal:
    """words of a task, its name in the records, the times as fast as the fastest peer, the share of the ceiling."""

    words: str
    task: str
    times: float
    share: float = 0.0


def _decode(context: str, share: float = 0.0) -> list[Goal]:
    return [
        Goal(f"decode, 64 sequences of {context}, page {page}", f"decode_b64_ctx{context}_p{page}", 1.0, share)
        for page in (16, 64, 128)
    ]


GOALS = [
    Goal("prefill D 128, 4k, full", "prefill_d128_s4k_full", 1.05),
    Goal("prefill D 128, 4k, causal", "prefill_d128_s4k_causal", 1.10),
    Goal("prefill D 128, 16k, full", "prefill_d128_s16k_full", 1.02),
    Goal("prefill D 128, 16k, causal", "prefill_d128_s16k_causal", 1.04),
    Goal("prefill D 64, 4k, causal", "prefill_d64_s4k_causal", 1.05),
    Goal("prefill D 256, 4k, causal", "prefill_d256_s4k_causal", 1.0),
    Goal("prefill 32 heads on 8, 4k, causal", "prefill_gqa32_8_s4k_causal", 1.05),
    Goal("prefill D 192 / 128, 128 heads, 4k, causal", "prefill_d192_128_h128_s4k_causal", 1.0),
    Goal("prefill fp8 D 128, 4k, full", "prefill_fp8_d128_s4k_full", 1.25),
    Goal("prefill fp8 D 128, 4k, causal", "prefill_fp8_d128_s4k_causal", 1.25),
    Goal("prefill ragged, page 16", "varlen_paged_prefill_p16", 1.05),
    Goal("prefill ragged, page 64", "varlen_paged_prefill_p64", 1.05),
    *_decode("4k", 0.95),
    *_decode("16k"),
    Goal("decode, 1 sequence of 128k, page 16", "decode_b1_ctx128k_p16", 1.05),
    Goal("decode, 1 sequence of 128k, page 64", "decode_b1_ctx128k_p64", 1.05),
    Goal("decode, 256 sequences around 1k, page 16", "decode_b256_ragged1k_p16", 1.03),
    Goal("decode fp8, 64 sequences of 4k, page 64", "decode_fp8_b64_ctx4k_p64", 1.1),
    Goal("decode fp8, 64 sequences of 16k, page 64", "decode_fp8_b64_ctx16k_p64", 1.1),
    Goal("MLA decode, 128 sequences of 4k, 128 heads", "mla_b128_h128_ctx4k_p64", 1.0),
    Goal("MLA decode, 128 sequences of 4k, 16 heads", "mla_b128_h16_ctx4k_p64", 1.03),
    Goal("MLA decode, 1 sequence of 64k, 128 heads", "mla_b1_h128_ctx64k_p64", 1.3),
    Goal("append 4096 tokens", "kv_append_t4096", 1.1),
    Goal("append 4096 tokens to fp8", "kv_append_t4096_fp8", 1.3),
    Goal("append 64 tokens", "kv_append_t64", 1.0),
    Goal("decode uneven: 128, lognormal, page 16", "traffic_decode_b128_lognormal_p16", 1.15),
    Goal("decode uneven: 64, one of 100k, page 16", "traffic_decode_b64_onelong_p16", 1.04, 0.9),
    Goal("decode uneven: 32, two of 30k, page 64", "traffic_decode_b32_twolong_p64", 1.04),
    Goal("decode fp8 uneven: 128, lognormal", "traffic_decode_fp8_b128_lognormal_p16", 1.2),
    Goal("decode, 16 sequences of 1k, page 16", "traffic_decode_b16_1k_p16", 1.0),
    Goal("decode, 4 sequences of 200k, page 64", "traffic_decode_b4_200k_p64", 1.0),
    Goal("MLA decode uneven: 128, 16 heads", "traffic_mla_b128_h16_lognormal_p64", 1.1),
    Goal("sparse MLA, 2048 of 8192 keys, 16 heads", "sparse_mla_b128_h16_topk2048", 0.8, 0.75),
    Goal("sparse MLA, 2048 of 8192 keys, 64 heads", "sparse_mla_b128_h64_topk2048", 0.8, 0.75),
    Goal("sparse MLA, 2048 of 8192 keys, 128 heads", "sparse_mla_b128_h128_topk2048", 0.8),
    Goal("sparse MLA of fp8 rows, 16 heads", "sparse_mla_fp8_b128_h16_topk2048", 0.8),
    Goal("sparse MLA of fp8 rows, 128 heads", "sparse_mla_fp8_b128_h128_topk2048", 0.8),
    Goal("mixed: 4 chunks of 512, 60 decodes", "traffic_mixed_p16", 1.05),
    Goal("16 chunks of 128", "traffic_chunk128_p16", 1.05),
    Goal("drafts: 64 of 4 tokens", "traffic_draft4_p16", 1.05),
    Goal("drafts: 32 of 8 tokens", "traffic_draft8_p64", 1.05),
    Goal("128 short prompts", "traffic_short_p16", 1.05),
    Goal("64 new tokens on a prefix of 4096", "traffic_prefix_p64", 1.05),
    Goal("prefill D 96, 4k, causal", "traffic_prefill_d96_s4k_causal", 1.05),
    Goal("prefill D 80, 2k, full", "traffic_prefill_d80_s2k_full", 1.05),
    Goal("prefill D 64, 32 heads on 4, 16k, causal", "traffic_prefill_d64_gqa8_s16k_causal", 1.02),
    Goal("prefill D 256, 16 heads on 8, 4k, causal", "traffic_prefill_d256_gqa2_s4k_causal", 1.0),
    Goal("prefill 64 x 512, causal", "traffic_prefill_d128_s512_b64_causal", 1.02),
    Goal("prefill 8 x 1000, full", "traffic_prefill_d128_s1000_b8_full", 1.0),
]


def goals_of(records: list[dict[str, Any]]) -> list[Goal]:
    """``GOALS``, where a record has one of them, and for every other task to be as fast as the fastest peer."""
    names = dict.fromkeys(name for record in records for name in record["tasks"])
    named = {goal.task for goal in GOALS}
    others = [Goal(name, name, 1.0) for name in names if name not in named]
    return (GOALS if named & set(names) else []) + others


def rows(
    records: list[dict[str, Any]], goals: list[Goal] | None = None
) -> list[tuple[str, str, str, str, str]]:
    """(task, goal, reached, whether it is met, fastest peer) of every goal, left out: :func:`goals_of`; "no record"
    where there is none.
    """
    tasks = {name: task for record in records for name, task in record["tasks"].items()}
    out = []
    for goal in goals_of(records) if goals is None else goals:
        wanted = f"{goal.times:.2f}" + (f", {goal.share:.2f} of the ceiling" if goal.share else "")
        task = tasks.get(goal.task, {})
        measured = task.get("implementations", {})
        made, ours = (measured.get(name, {}) for name in ("kvlab", "kvlab_plan"))
        listed = ours.get("vs_best") is not None
        ours = ours if listed else made
        if "ms" not in ours or ours.get("vs_best") is None:
            out.append((goal.words, wanted, ours.get("error", "no record"), "-", "-"))
            continue
        met = ours["vs_best"] >= goal.times and ours["fraction"] >= goal.share
        reached = f"{ours['vs_best']:.3f}, {ours['fraction']:.3f} of the ceiling"
        if listed and made.get("vs_best") is not None:
            reached += f"; {made['vs_best']:.3f} with the list"
        out.append((goal.words, wanted, reached, "yes" if met else "no", task["best_peer"]))
    return out


def table(records: list[dict[str, Any]]) -> str:
    """:func:`rows` as Markdown, under the cards and dates of the records."""
    head = [f"{r['card']}, driver {r['driver']}, {r['date']}: {r['command']}" for r in records]
    lines = [("task", "goal", "reached", "met", "fastest peer"), *rows(records)]
    wide = [max(len(line[i]) for line in lines) for i in range(5)]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in wide) + "|")
    found = [row for row in lines[1:] if row[3] != "-"]
    met = sum(row[3] == "yes" for row in found)
    if any("with the list" in row[2] for row in found):
        head.append(
            "Over a work list: with the list from before, as FA3 has its metadata; then, with it made in the call."
        )
    return "\n".join([*head, "", *text, "", f"{met} of {len(found)} recorded goals met; {len(lines) - 1} goals."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path, default=[RESULTS / name for name in RECORDS])
    print(table([json.loads(path.read_text()) for path in parser.parse_args().records]))


if __name__ == "__main__":
    main()
