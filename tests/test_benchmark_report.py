"""The table of goals, and the command line of records. Rests on the committed records and on one made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_record
from benchmarks.report import GOALS, RECORDS, RESULTS, Goal, rows, table

MORE = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("attention_more_?_h200.json"))]
COMMITTED = [json.loads((RESULTS / name).read_text()) for name in RECORDS]


def made_up(vs_best: float | None, fraction: float) -> dict[str, Any]:
    ours = {"ms": 1.0, "vs_best": vs_best, "fraction": fraction}
    return {"tasks": {"t": {"best_peer": "fa3", "implementations": {"kvlab": ours}}}}


def test_every_recorded_task_has_a_goal() -> None:
    tasks = {name: task for record in COMMITTED for name, task in record["tasks"].items()}
    recorded = {name for name, task in tasks.items() if task["implementations"]["kvlab"]}  # {}: was not run
    named = [goal.task for goal in GOALS]
    assert set(tasks) <= set(named)
    assert len(named) == len(set(named))
    text = table(COMMITTED)
    assert all(record["command"] in text and record["card"] in text for record in COMMITTED)
    met = sum(row[3] == "yes" for row in rows(COMMITTED))
    assert f"{met} of {len(recorded)} recorded goals met" in text


def test_tasks_that_no_goal_names_have_that_of_the_fastest_peer() -> None:
    found = rows(MORE)
    names = dict.fromkeys(name for record in MORE for name in record["tasks"])
    assert [row[:2] for row in found] == [(name, "1.00") for name in names]
    assert len(rows([*COMMITTED, *MORE])) == len(GOALS) + len(found)
    assert f"{len(found)} goals." in table(MORE)
    last = MORE[-1]["tasks"]["more decode d112 equal"]["implementations"]["kvlab"]["vs_best"]
    assert [row[2].split(",")[0] for row in found if row[0] == "more decode d112 equal"] == [f"{last:.3f}"]


@pytest.mark.parametrize(("vs_best", "fraction", "met"), [(1.06, 0.95, "yes"), (1.05, 0.94, "no"), (1.04, 0.99, "no")])
def test_both_parts_of_a_goal_must_be_met(vs_best: float, fraction: float, met: str) -> None:
    found = rows([made_up(vs_best, fraction)], [Goal("a task", "t", 1.05, 0.95)])
    assert [(row[0], row[3], row[4]) for row in found] == [("a task", met, "fa3")]


def test_a_call_over_a_list_is_held_against_the_one_that_has_it_from_before() -> None:
    record = made_up(1.02, 0.85) | {"card": "a", "driver": "b", "date": "c", "command": "d"}
    goal = [one for one in GOALS if one.task == "traffic_chunk128_p16"]
    record["tasks"][goal[0].task] = record["tasks"].pop("t")
    both = record["tasks"][goal[0].task]["implementations"]
    both["kvlab_plan"] = {"ms": 0.9, "vs_best": 1.06, "fraction": 0.9}
    ((_, _, reached, met, _),) = rows([record], goal)
    assert (reached, met) == ("1.060, 0.900 of the ceiling; 1.020 with the list", "yes")
    words = "with the list from before, as FA3"
    assert words in table([record])
    both["kvlab_plan"] = {"error": "illegal instruction"}
    assert rows([record], goal)[0][2:4] == ("1.020, 0.850 of the ceiling", "no")
    assert words not in table([record])


def test_what_has_no_record_is_said_and_later_records_win() -> None:
    assert rows([], [Goal("a", "t", 1.0)]) == [("a", "1.00", "no record", "-", "-")]
    assert rows([made_up(None, 0.5)], [Goal("a", "t", 1.0)])[0][3] == "-"  # alone, without a peer
    failed = {"tasks": {"t": {"best_peer": "fa3", "implementations": {"kvlab": {"error": "illegal instruction"}}}}}
    assert rows([made_up(2.0, 0.5), failed], [Goal("a", "t", 1.0)])[0][2] == "illegal instruction"
    assert rows([failed, made_up(2.0, 0.5)], [Goal("a", "t", 1.0)])[0][3] == "yes"


@pytest.mark.parametrize("asked", ["", " --backend triton", " --sweep", " --sweep --backend triton"])
def test_a_record_has_the_command_that_made_it(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also the backend, of which ``measure`` is told: figures of one kernel are not another's."""
    monkeypatch.setattr("sys.argv", ["x.py", *asked.split(), "--output", str(tmp_path / "made" / "x.json")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_record, "facts", lambda: {"card": "none"})
    gpu_record.run("x.py", "words", lambda **given: {"given": given}, ("auto", "triton"))
    given = {"sweep": "sweep" in asked, "backend": "triton" if "triton" in asked else "auto"}
    expected = {"command": f"python x.py{asked}", "card": "none", "given": given}
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "made" / "x.json").read_text()) == expected


def test_a_backend_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--backend", "cuda"])
    for backends, words in ((("auto", "triton"), "invalid choice: 'cuda'"), ((), "unrecognized arguments")):
        with pytest.raises(SystemExit):
            gpu_record.run("x.py", "words", lambda **given: given, backends)
        assert words in capsys.readouterr().err
