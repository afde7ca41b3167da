"""A simulator of schedules: what uneven batches take, predicted from units and what a unit took in recorded runs.

    python benchmarks/schedule.py                 # recorded and predicted times of all traffic tasks
    python benchmarks/schedule.py --units         # what sizes of units and numbers of programs would give
    python benchmarks/schedule.py --gpus 8 64     # how GPUs with context parallelism would share one batch

A program takes its units one after the other. A unit takes ``item`` us before its first keys are there, then goes
through its key blocks at the rate that is left: ``1 / block`` blocks a us at most, and all programs together read
``bandwidth`` bytes a us. Q and O of a tile pass at a program's share of that, before its first keys. A call takes
``fixed`` us beside that: the launch, the first work, merging. What a kernel leaves open of these four is fitted to the
logarithms of recorded times. A task's prediction rests on the other records of its kernel (each is left out in turn);
where a kernel has too few for that, the task is marked as fitted.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.attention import Schedule, plan
from kvlab.attention.attend_paged.config import AttendProblem, choose_walks, schedule_problem
from kvlab.attention.attend_paged.hopper_config import on_hopper
from kvlab.attention.attend_paged.step import schedule_of
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.mha_decode.config import DecodeProblem
from kvlab.attention.mha_decode.hopper_config import choose_hopper

Array = np.ndarray[Any, Any]
RESULTS = Path(__file__).parent / "results"
TRAFFIC, PEERS = "traffic_h100.json", "attention_peers_h200.json"
PROCESSORS = 132
KEYS = 16
"""Keys of a key block."""
ALONE = 0.3
"""us of a key block of 8 KB of two programs on an SM when few others read: 53 GB/s and SM, as NOTES.md has it."""


@dataclass(frozen=True)
class Task:
    """One attention call: lengths with the new tokens, new tokens of each, sizes."""

    name: str
    lens: tuple[int, ...]
    new: tuple[int, ...]
    q_heads: int = 32
    kv_heads: int = 8
    key_bytes: int = 512
    """Of K and V, one KV head."""
    head_dim: int = 128
    causal: bool = True

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return sum(self.lens) * self.kv_heads * self.key_bytes


def traffic_tasks() -> dict[str, Task]:
    """The uneven tasks of the side-by-side benchmark, with its lengths."""
    rnd = random.Random(2026)
    logn = [max(1, int(rnd.lognormvariate(6.2, 1.2))) for _ in range(128)]
    ones = [100_000] + [rnd.randint(100, 1000) for _ in range(63)]
    twos = [30_000] * 2 + [rnd.randint(300, 700) for _ in range(30)]
    found = [
        decode("decode_b128_lognormal_p16", logn), decode("decode_b64_onelong_p16", ones),
        decode("decode_b32_twolong_p64", twos), decode("decode_fp8_b128_lognormal_p16", logn, key_bytes=256),
        decode("decode_b16_1k_p16", [1024] * 16), decode("decode_b4_200k_p64", [200_000] * 4),
    ]

    def paged(name: str, new: list[int], cached: list[int]) -> None:
        found.append(Task(f"traffic_{name}", tuple(n + m for n, m in zip(new, cached, strict=True)), tuple(new)))

    paged("mixed_p16", [512] * 4 + [1] * 60, [rnd.randint(0, 8192) for _ in range(64)])
    paged("chunk128_p16", [128] * 16, [rnd.randint(2000, 30_000) for _ in range(16)])
    paged("draft4_p16", [4] * 64, [rnd.randint(300, 9000) for _ in range(64)])
    paged("draft8_p64", [8] * 32, [rnd.randint(300, 9000) for _ in range(32)])
    paged("short_p16", [rnd.randint(10, 300) for _ in range(128)], [0] * 128)
    paged("prefix_p64", [64] * 64, [4096] * 64)
    rnd = random.Random(31)
    mla = [max(1, int(rnd.lognormvariate(7.2, 1.1))) for _ in range(128)]
    found.append(Task("traffic_mla_b128_h16_lognormal_p64", tuple(mla), (1,) * 128, 16, 1, 1152, 576))
    return {task.name: task for task in found}


def decode(name: str, lens: Sequence[int], *, traffic: str = "traffic_", **sizes: int) -> Task:
    """A task of one new token for each sequence."""
    return Task(traffic + name, tuple(lens), (1,) * len(lens), **sizes)


def equal_tasks() -> dict[str, Task]:
    """The tasks whose times are recorded, too: of equal lengths, decode of 256 and prefill of 16 ragged sequences."""
    rnd = random.Random(99)
    ragged = [rnd.randint(1, 2047) for _ in range(256)]
    lens = {f"decode_b64_ctx{n}k_p{page}": [1024 * n] * 64 for n in (4, 16) for page in (16, 64)}
    lens |= {f"decode_b1_ctx128k_p{page}": [131_072] for page in (16, 64)} | {"decode_b256_ragged1k_p16": ragged}
    found = [decode(name, those, traffic="") for name, those in lens.items()]
    for n in (4, 16):
        found.append(decode(f"decode_fp8_b64_ctx{n}k_p64", [1024 * n] * 64, traffic="", key_bytes=256))
    found.append(Task("mla_b128_h16_ctx4k_p64", (4096,) * 128, (1,) * 128, 16, 1, 1152, 576))
    rnd = random.Random(1234)
    new = tuple(rnd.randint(512, 4096) for _ in range(16))
    cached = [rnd.randint(0, 8192) for _ in range(16)]
    lengths = tuple(n + m for n, m in zip(new, cached, strict=True))
    found += [Task(f"varlen_paged_prefill_p{page}", lengths, new) for page in (16, 64)]
    for name, batch, q_heads, kv_heads, n, D, causal in PREFILLS:
        found.append(Task(name, (n,) * batch, (n,) * batch, q_heads, kv_heads, 4 * D, D, causal))
    return {task.name: task for task in found}


PREFILLS = (
    ("prefill_d128_s4k_full", 4, 16, 16, 4096, 128, False), ("prefill_d128_s4k_causal", 4, 16, 16, 4096, 128, True),
    ("prefill_d128_s16k_full", 1, 16, 16, 16_384, 128, False),
    ("prefill_d128_s16k_causal", 1, 16, 16, 16_384, 128, True),
    ("prefill_gqa32_8_s4k_causal", 4, 32, 8, 4096, 128, True), ("prefill_d64_s4k_causal", 4, 32, 32, 4096, 64, True),
    ("prefill_d256_s4k_causal", 4, 8, 8, 4096, 256, True),
    ("traffic_prefill_d96_s4k_causal", 2, 32, 32, 4096, 96, True),
    ("traffic_prefill_d80_s2k_full", 8, 16, 16, 2048, 80, False),
    ("traffic_prefill_d64_gqa8_s16k_causal", 1, 32, 4, 16_384, 64, True),
    ("traffic_prefill_d256_gqa2_s4k_causal", 2, 16, 8, 4096, 256, True),
    ("traffic_prefill_d128_s512_b64_causal", 64, 16, 16, 512, 128, True),
    ("traffic_prefill_d128_s1000_b8_full", 8, 32, 8, 1000, 128, False),
)
"""Name, batch, heads, tokens, head dimension, causal."""


@dataclass(frozen=True)
class Costs:
    """What a kernel takes: us before a call, us before a unit's first keys, us of a key block at best, bytes a us."""

    fixed: float = 6.0
    item: float = 1.5
    block: float = 0.23
    bandwidth: float = 3.0e6

    def numbers(self) -> Array:
        return np.log([self.fixed, self.item, self.block, self.bandwidth])

    @staticmethod
    def of(numbers: Array) -> Costs:
        return Costs(*np.exp(numbers).tolist())


@dataclass(frozen=True)
class Work:
    """What programs do. Programs whose work is the same (those of a team) are one entry.

    units : for each entry the key blocks of its units. places : entries that run at once; the others follow as these
    end. block_bytes : that an entry reads from DRAM for a key block.
    """

    units: list[list[int]]
    places: int
    block_bytes: float
    merges: int = 0
    """Parts of the tile that was cut most."""
    heads: float = 1.0
    """KV heads of a program, which has so many times the bytes in a key block."""
    unit_bytes: float = 0.0
    """Of Q and O, which pass before and behind the products of a unit, at a place's share of the bandwidth."""


def of_schedule(made: Schedule, key_bytes: int) -> Work:
    """The work of a schedule: a team is an entry."""
    team, _, first, last, slot = made.pieces
    units: list[list[int]] = [[] for _ in range(made.teams)]
    for one, blocks in zip(team.tolist(), (last - first).tolist(), strict=True):
        units[one].append(blocks)
    most = int(np.bincount(made.pieces[1][slot >= 0]).max(initial=0)) if (slot >= 0).any() else 0
    heads = made.problem.kv_heads // made.config.heads
    return Work(units, made.teams, made.config.block * key_bytes * heads, most)


def of_splits(task: Task, groups: int, splits: int, places: int, *, longest_first: bool) -> Work:
    """The work of a program for each (sequence, group of KV heads, split), as many at once as have places."""
    lens = sorted(task.lens, reverse=True) if longest_first else task.lens
    units = []
    for n in lens:
        size = -(-n // splits)
        parts = [max(0, min(size, n - s * size)) for s in range(splits)]
        units += [[-(-keys // KEYS)] for keys in parts if keys for _ in range(groups)]
    heads = task.kv_heads / groups
    return Work(units, places, KEYS * task.key_bytes * heads, splits if splits > 1 else 0, heads)


def of_tiles(task: Task, rows: int = 128, block: int = 128) -> Work:
    """The work of whole tiles of ``rows`` rows against blocks of ``block`` keys, the longest first, one program on an
    SM. Causal ones begin at multiples of ``rows`` positions of a sequence; heads that read the same keys find them in
    L2.
    """
    found, read = [], 0.0
    for n, new in zip(task.lens, task.new, strict=True):
        before = (n - new) % rows if task.causal else 0
        last = np.minimum(np.arange(rows, before + new + rows, rows), before + new) - 1 - before
        keys = n - new + last + 1 if task.causal else np.full(len(last), n)
        found += np.repeat(-(-keys // block), task.q_heads).tolist()
        read += int(keys.max(initial=0)) * task.kv_heads * task.key_bytes
    units = [[blocks] for blocks in sorted(found, reverse=True)]
    return Work(units, PROCESSORS, read / sum(found), unit_bytes=4.0 * rows * task.head_dim)


def simulate(work: Work, costs: Costs) -> float:
    """us that the programs take, the first unit to the last."""
    now = done = 0.0
    passing = work.unit_bytes * work.places / costs.bandwidth
    waiting = list(range(len(work.units)))[::-1]
    timed: list[tuple[float, int, int]] = []
    reading: list[tuple[float, int, int]] = []

    def begin(entry: int, unit: int) -> None:
        nonlocal free
        if unit == len(work.units[entry]):
            free += 1
        else:
            heapq.heappush(timed, (now + costs.item + passing, entry, unit))

    free = work.places
    while waiting or timed or reading:
        while free and waiting:
            free -= 1
            begin(waiting.pop(), 0)
        if not (timed or reading):
            continue
        shared = costs.bandwidth / work.block_bytes / max(len(reading), 1)
        rate = min(1 / (costs.block * work.heads), shared)
        read = now + (reading[0][0] - done) / rate if reading else np.inf
        ready = timed[0][0] if timed else np.inf
        then = min(read, ready)
        done += rate * (then - now)
        now = then
        if read <= ready:
            done, entry, unit = heapq.heappop(reading)
            begin(entry, unit + 1)
        else:
            _, entry, unit = heapq.heappop(timed)
            heapq.heappush(reading, (done + work.units[entry][unit], entry, unit))
    return now


MERGE = 0.05
"""us for each part that the last merge puts together."""


def predict(work: Work, costs: Costs) -> float:
    """us of a call."""
    return costs.fixed + simulate(work, costs) + MERGE * work.merges


def fit(works: Sequence[Work], recorded: Sequence[float], start: Costs, free: Sequence[int] = (0, 1, 2, 3)) -> Costs:
    """The costs whose predictions are nearest to recorded us, by logarithms (Gauss-Newton, held near ``start``)."""
    at, home = start.numbers(), start.numbers()
    wanted = np.log(np.asarray(recorded))
    held = 0.02
    for _ in range(6):
        here = np.log([predict(work, Costs.of(at)) for work in works])
        slopes = []
        for i in free:
            moved = at.copy()
            moved[i] += 0.02
            slopes.append((np.log([predict(work, Costs.of(moved)) for work in works]) - here) / 0.02)
        left = np.vstack([np.stack(slopes, 1), held * np.eye(len(free))])
        right = np.concatenate([wanted - here, held * (home - at)[list(free)]])
        step = np.linalg.lstsq(left, right, rcond=None)[0]
        at[list(free)] += np.clip(step, -0.4, 0.4)
    return Costs.of(at)


@functools.cache
def work_of(work: Callable[[Task], Work], task: Task) -> Work:
    """The work of a task, made once."""
    return work(task)


@dataclass
class Kernel:
    """A kernel of which times are recorded: how it works on a task, and those times in us."""

    name: str
    work: Callable[[Task], Work]
    recorded: dict[str, float]
    start: Costs = field(default_factory=Costs)
    free: tuple[int, ...] = (0, 1, 2, 3)

    def costs(self, tasks: dict[str, Task], without: str | None = None) -> Costs:
        """Fitted to all records but that of one task."""
        names = [name for name in self.recorded if name != without and name in tasks]
        works = [work_of(self.work, tasks[n]) for n in names]
        return fit(works, [self.recorded[n] for n in names], self.start, self.free)

    def predictions(self, tasks: dict[str, Task]) -> dict[str, tuple[float, bool]]:
        """Task -> (us, whether its own record was needed)."""
        few = len(self.recorded) <= len(self.free) + 1
        every = self.costs(tasks)
        return {
            name: (predict(work_of(self.work, tasks[name]), every if few else self.costs(tasks, name)), few)
            for name in self.recorded if name in tasks
        }


def kernels(traffic: dict[str, dict[str, float]], peers: dict[str, Any]) -> list[Kernel]:
    """The kernels of which times are recorded: the prototype of the walk on an H100, the others on an H200."""
    ours = {name: 1e3 * task["implementations"]["kvlab"]["ms"] for name, task in peers.items()
            if task["implementations"].get("kvlab", {}).get("ms")}

    def of(*names: str, but: tuple[str, ...] = ()) -> dict[str, float]:
        return {n: us for n, us in ours.items() if n.startswith(names) and not any(word in n for word in but)}

    uneven = *(f"traffic_decode_{name}" for name in ("b128", "b64", "b32")), "traffic_draft4", "traffic_mixed"
    equal = "decode_b", "traffic_decode_b16", "traffic_decode_b4"
    lists = "traffic_chunk", "traffic_short", "traffic_prefix"
    dense = "prefill_d128", "prefill_gqa", "traffic_prefill_d128"
    tiles, H200 = Costs(6.0, 0.5, 1.6, 4.5e6), 4.5e6
    found = [
        Kernel("balanced walk, prototype", walk, traffic["prototype"]),
        Kernel("decode, ring over a list", ring_over_list, of(*uneven), Costs(13.0, 1.5, ALONE, H200), (0,)),
        Kernel("the same, fp8", ring_over_list, of("traffic_decode_fp8"), Costs(13.0, 1.5, 0.2, H200), (2,)),
        Kernel("the same, tiles of 32 rows", ring_over_list, of("traffic_draft8"), Costs(13.0, 1.5, 0.2, H200), (2,)),
        Kernel("decode, ring", ring, of(*equal, but=("p128",)), Costs(6.0, 1.5, 0.12, H200), (3,)),
        Kernel("decode, ring, fp8", ring, of("decode_fp8"), Costs(6.0, 1.5, 0.12, H200), (2,)),
        Kernel("MLA decode, ring over a list", latents, of("traffic_mla"), Costs(13.0, 1.5, 0.3, H200), (2,)),
        Kernel("prefill D 128, tiles over a list", tiles_over_list, of(*lists), replace(tiles, fixed=13.0), (2,)),
        Kernel("prefill D 128, paged", of_tiles, of("varlen"), tiles, (2,)),
        Kernel("prefill D 128", of_tiles, of(*dense), tiles, (1, 2)),
    ]
    for words, names in (("D 64", ("d64",)), ("D 256", ("d256",)), ("D 80 and 96", ("d80", "d96"))):
        records = of(*(f"{kind}_{name}" for kind in ("prefill", "traffic_prefill") for name in names))
        found.append(Kernel(f"prefill {words}", by_depth, records, tiles, (2,)))
    return found


def walk(task: Task) -> Work:
    """The balanced walk: three programs on an SM."""
    made = plan(task.lens, max(task.new), q_heads=task.q_heads, kv_heads=task.kv_heads, programs=3 * PROCESSORS)
    return of_schedule(made, task.key_bytes)


def listed(task: Task) -> Schedule:
    """The lists of a call on Hopper, as a plan on a GPU has them."""
    new = np.array(task.new)
    most, page = int(new.max()), 16 if task.name.endswith("p16") else 64
    ragged = most > 4 or len(set(task.new)) > 1
    problem = AttendProblem(
        len(new), int(new.sum()) if ragged else most, task.q_heads, task.kv_heads, task.head_dim, task.head_dim,
        itemsize=task.key_bytes // (2 * task.head_dim), page_size=page, max_keys=-(-max(task.lens) // page) * page,
        ragged=ragged,
    )
    walks = on_hopper(choose_walks(problem, most, tiles=True, beside=True), problem, most, PROCESSORS, tiles=True)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32) if ragged else None
    sizes = schedule_problem(problem, UNLIMITED, 0)
    return schedule_of([one.schedule for one in walks.walks], sizes, np.array(task.lens, np.int32), starts)


def ring_over_list(task: Task) -> Work:
    """The first list of a call; tiles of a mixed batch, which run beside it on other processors, end before."""
    return of_schedule(listed(task), task.key_bytes)


def tiles_over_list(task: Task) -> Work:
    """The last list of a call."""
    made = listed(task)
    while made.rest is not None:
        made = made.rest
    lanes = made.config.lanes(task.kv_heads)
    return replace(of_schedule(made, task.key_bytes), unit_bytes=4.0 * made.config.BM * task.head_dim * lanes)


def latents(task: Task) -> Work:
    """MLA decode over a list: a program an SM."""
    made = plan(task.lens, q_heads=task.q_heads, kv_heads=1, head_dim=task.head_dim, programs=PROCESSORS)
    return of_schedule(made, task.key_bytes)


def ring(task: Task) -> Work:
    """Hopper's decode kernel without a schedule: splits from the table's columns."""
    size, page = task.key_bytes // 256, 16 if task.name.endswith("p16") else 64
    columns = -(-max(task.lens) // page) * page
    problem = DecodeProblem(len(task.lens), 1, task.q_heads, task.kv_heads, 128, 128, size, page, columns)
    config = choose_hopper(problem)
    groups = task.kv_heads // config.constants.HEADS
    places = PROCESSORS if len(task.lens) == 1 else 2 * PROCESSORS
    return of_splits(task, groups, config.num_splits, places, longest_first=config.constants.LONGEST_FIRST > 0)


def by_depth(task: Task) -> Work:
    """Tiles whose key blocks count by their columns."""
    return replace(of_tiles(task), heads=task.head_dim / 128)


def planned(task: Task, **changed: Any) -> Schedule:
    """The schedule of a task."""
    new = list(task.new) if len(set(task.new)) > 1 else task.new[0]
    heads = {"q_heads": task.q_heads, "kv_heads": task.kv_heads}
    made = plan(task.lens, new, **heads, head_dim=task.key_bytes // 4)
    return plan(task.lens, new, **heads, config=replace(made.config, **changed)) if changed else made


def load() -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """The recorded times: us of the prototype, and the side-by-side record."""
    traffic, peers = (json.loads((RESULTS / name).read_text()) for name in (TRAFFIC, PEERS))
    return traffic, peers


def report() -> str:
    """Recorded and predicted times of every kernel."""
    traffic, peers = load()
    tasks = traffic_tasks() | equal_tasks()
    lines = []
    for kernel in kernels(traffic, peers["tasks"]):
        found = kernel.costs(tasks)
        lines += ["", f"{kernel.name}: {found.fixed:.1f} us a call, {found.item:.2f} a unit, {found.block:.3f} a key "
                  f"block, {found.bandwidth / 1e6:.2f} TB/s",
                  f"{'task':44}{'recorded':>9}{'predicted':>11}{'error':>8}"]
        for name, (us, fitted) in kernel.predictions(tasks).items():
            recorded = kernel.recorded[name]
            mark = " fitted" if fitted else ""
            lines.append(f"{name:44}{recorded:9.1f}{us:11.1f}{us / recorded - 1:8.1%}{mark}")
    return "\n".join(lines[1:])


def sizes() -> str:
    """What grains, overheads and numbers of programs would give, us."""
    traffic, peers = load()
    tasks = traffic_tasks() | equal_tasks()
    unit = kernels(traffic, peers["tasks"])[0].costs(tasks)
    names = [n for n in traffic["prototype"] if n in tasks]
    changes: list[dict[str, Any]] = [
        {}, {"overhead": 0}, {"overhead": 2}, {"overhead": 8}, {"block": 64, "overhead": 1, "least": 3},
        {"block": 64, "overhead": 0, "least": 2}, {"block": 128, "overhead": 0, "least": 1}, {"programs": 264},
        {"least": 20}, {"least": 36}, {"unit": 64}, {"unit": 128},
    ]
    short = [name.removeprefix("traffic_").removeprefix("decode_")[:14] for name in names]
    lines = [f"{'change':36}" + "".join(f"{name:>16}" for name in short)]
    for change in changes:
        row = []
        for name in names:
            task = tasks[name]
            made = planned(task, **change)
            work = of_schedule(made, task.key_bytes)
            row.append(predict(replace(work, heads=made.config.block / KEYS), unit))
        words = " ".join(f"{name} {value}" for name, value in change.items()) or "as chosen"
        lines.append(f"{words:36}" + "".join(f"{us:16.1f}" for us in row))
    return "\n".join(lines)


NVLINK, NETWORK, HOP = 0.4e6, 0.045e6, 8.0
"""Bytes a us that a GPU sends within a node of 8 and beyond, and us before the first arrive."""


def gpus(counts: Sequence[int]) -> str:
    """How GPUs would share uneven batches on paper: the slowest GPU's attention, and the exchange of what is cut."""
    traffic, peers = load()
    tasks = traffic_tasks()
    unit = kernels(traffic, peers["tasks"])[0].costs(tasks | equal_tasks())
    ways = {"whole sequences": whole_sequences, "every sequence in equal parts": equal_parts,
            "equal shares, cut": equal_shares}
    lines = [f"{'task':40}{'GPUs':>5}  " + "".join(f"{name:>32}" for name in ways)]
    for name, task in tasks.items():
        if max(task.new) > 1 or task.key_bytes != 512:
            continue
        for count in counts:
            cells = []
            for share in ways.values():
                parts, cut = share(task.lens, count)
                slowest = max((attention(task, lens, unit) for lens in parts if lens), default=0.0)
                sent = cut * task.q_heads * (task.head_dim + 1) * 4 * (count - 1) / count
                exchange = HOP + sent / (NVLINK if count <= 8 else NETWORK) if cut else 0.0
                cells.append(f"{slowest + exchange:9.1f} us, {exchange:6.1f} exchange")
            lines.append(f"{name:40}{count:5}  " + "".join(f"{cell:>32}" for cell in cells))
    return "\n".join(lines)


def attention(task: Task, lens: Sequence[int], unit: Costs) -> float:
    """us on one GPU that has so many keys of each sequence."""
    made = plan(lens, q_heads=task.q_heads, kv_heads=task.kv_heads, programs=3 * PROCESSORS)
    return predict(of_schedule(made, task.key_bytes), unit)


def whole_sequences(lens: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """(lengths on each GPU, rows that a GPU sends): the longest first, each where the fewest keys are; none is cut."""
    parts: list[list[int]] = [[] for _ in range(count)]
    for n in sorted(lens, reverse=True):
        min(parts, key=sum).append(n)
    return parts, 0


def equal_parts(lens: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """Context parallelism as it is: each GPU has its part of every sequence, and sends partial results for all."""
    return [[n for n in (-(-(length - gpu) // count) for length in lens) if n > 0] for gpu in range(count)], len(lens)


def equal_shares(lens: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """As programs share them: all sequences end to end, cut in equal shares; each sends up to two partial results."""
    ends = np.cumsum(lens)
    share = -(-int(ends[-1]) // count)
    parts = []
    for gpu in range(count):
        low = np.maximum(ends - lens, gpu * share)
        high = np.minimum(ends, (gpu + 1) * share)
        parts.append([int(n) for n in (high - low) if n > 0])
    return parts, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", action="store_true", help="sizes of units and numbers of programs")
    parser.add_argument("--gpus", nargs="+", type=int, metavar="N", help="numbers of GPUs")
    asked = parser.parse_args()
    print(gpus(asked.gpus) if asked.gpus else sizes() if asked.units else report())


if __name__ == "__main__":
    main()
