"""What is known of a kind of calls changes nothing but the time that a call takes on the host.

Rests on two laws. A call has the outcome, its plan or the words of its error, that it has where nothing is known,
whatever good call came before. And a kernel that is launched again gets the arguments that a first launch gives it.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvlab import attention  # noqa: E402
from kvlab.attention import masks  # noqa: E402
from kvlab.attention.call import backends, checks, kinds, layers, planned, ragged  # noqa: E402
from kvlab.attention.hopper import choice as hopper_choice  # noqa: E402
from kvlab.attention.kv_store import call as store_call  # noqa: E402
from kvlab.attention.machines import gpu  # noqa: E402
from kvlab.cache import PagedKVCacheCollection  # noqa: E402
from kvlab.memory import bfloat16  # noqa: E402

Arguments = dict[str, Any]
B, S, PAGE, PAGES = 2, 3, 16, 6


def zeros(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(shape, dtype=dtype)


def whole(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def decode() -> Arguments:
    kv = {"k_cache": zeros(PAGES, PAGE, 2, 64), "v_cache": zeros(PAGES, PAGE, 2, 64)}
    return {"q": zeros(B, 4, 64), **kv, "block_table": whole([3, 1], [0, 2]), "seq_lens": whole(20, 17)}


def mla() -> Arguments:
    rows = zeros(PAGES, PAGE, 576)
    return {"q": zeros(B, 4, 576), "kv_cache": rows, "block_table": whole([3, 1], [0, 2]), "seq_lens": whole(20, 17)}


def paged_prefill() -> Arguments:
    more = {"q": zeros(B * S, 4, 64), "cu_seqlens_q": whole(0, S, 2 * S), "max_seqlen_q": S}
    return decode() | more


def ragged_prefill() -> Arguments:
    starts = {"cu_seqlens_q": whole(0, S, 2 * S), "cu_seqlens_k": whole(0, 9, 20), "max_seqlen_q": S}
    return {"q": zeros(B * S, 4, 64), "k": zeros(20, 2, 64), "v": zeros(20, 2, 64), **starts}


def mla_ragged() -> Arguments:
    starts = {"cu_seqlens_q": whole(0, S, 2 * S), "cu_seqlens_k": whole(0, 9, 20), "max_seqlen_q": S}
    kv = {"k": zeros(20, 4, 128), "v": zeros(20, 4, 128), "k_rope": zeros(20, 64)}
    return {"q": zeros(B * S, 4, 192), **kv, **starts}


def mla_paged() -> Arguments:
    tables = {"kv_cache": zeros(PAGES, PAGE, 576), "block_table": whole([3, 1], [0, 2]), "seq_lens": whole(9, 11)}
    call = mla_ragged() | tables
    del call["k_rope"]
    return call


def store() -> Arguments:
    caches = {"k_cache": zeros(PAGES, PAGE, 2, 64), "v_cache": zeros(PAGES, PAGE, 2, 64)}
    return {"k": zeros(3, 2, 64), "v": zeros(3, 2, 64), **caches, "slot_mapping": whole(5, -1, 0)}


def mla_store() -> Arguments:
    parts = {"latent": zeros(3, 512), "k_rope": zeros(3, 64)}
    return {**parts, "cache": zeros(PAGES, PAGE, 576), "slot_mapping": whole(5, -1, 0)}


def merge() -> Arguments:
    return {"outs": zeros(3, 5, 2, 64), "lses": zeros(3, 5, 2, dtype=torch.float32)}


CALLS: dict[str, tuple[Any, Callable[[], Arguments]]] = {
    "mha_decode": (attention.mha_decode_paged, decode),
    "mha_decode_streaming": (attention.mha_decode_streaming_paged, decode),
    "mla_decode": (attention.mla_decode_paged, mla),
    "mha_prefill": (attention.mha_prefill, lambda: {n: zeros(B, S, h, 64) for n, h in (("q", 4), ("k", 2), ("v", 2))}),
    "mha_prefill_ragged": (attention.mha_prefill, ragged_prefill),
    "mha_prefill_paged": (attention.mha_prefill_paged, paged_prefill),
    "mla_prefill_ragged": (attention.mla_prefill_ragged, mla_ragged),
    "mla_prefill_paged": (attention.mla_prefill_paged, mla_paged),
    "kv_store": (attention.kv_store_paged, store),
    "mla_store": (attention.mla_store_paged, mla_store),
    "merge_states": (attention.merge_states, merge),
}

CHANGES: dict[str, Callable[[Any], Any]] = {
    "of float64": lambda x: x.double(), "of float32": lambda x: x.float(),
    "of e4m3": lambda x: x.to(torch.float8_e4m3fn),
    "of int16": lambda x: x.to(torch.int16), "of int64": lambda x: x.long(), "one fewer": lambda x: x[:-1],
    "one fewer in a row": lambda x: x[..., :-1], "eight fewer in a row": lambda x: x[..., :-8],
    "another axis": lambda x: x[None], "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "an element further": lambda x: x.new_zeros(x.numel() + 1)[1:].view(x.shape), "empty": lambda x: x[:0],
    "rows in one place": lambda x: x[:1].expand(x.shape), "NumPy's": lambda x: np.zeros(x.shape, bfloat16),
    "on meta": lambda x: x.to("meta"), "sparse": lambda x: x.to_sparse(), "negated": lambda x: torch._neg_view(x),
    "with a gradient": lambda x: x.clone().requires_grad_(), "None": lambda x: None, "a list": lambda x: x.tolist(),
    "large": lambda x: x + 99, "negative": lambda x: x - 99,
}

OPTIONS: dict[str, list[Any]] = {
    "scale": [True, 1, 1.0, -1.0, float("nan"), 1e39, "1", np.float64(1), torch.tensor(0.5)],
    "num_splits": [1, True, 1.0, 0, 65, np.int64(1)], "window": [1, True, 0, (1, 1), (1, 1.0), [1, 1], (1, None)],
    "softcap": [1, 1.0, True, -1.0, float("inf"), "a"], "mask_value": [0.0, -0.0, float("nan"), float("-inf")],
    "kv_layout": ["NHD", "HND", "XYZ"], "backend": ["triton", "hopper", "none", "reference", "emulator"],
    "arch": ["sm_90", "gfx950", "sm_70"], "batch_invariant": [True, 1], "causal": [True, False, 1], "check": [False, 1],
    "mask": [masks.NullMask(), masks.CausalMask(), masks.ChunkedMask(4), masks.ChunkedMask(8), "causal"],
    "k_scale": [1, True, 1.0, 0.0, -1.0, zeros(2, dtype=torch.float32), zeros(3, dtype=torch.float32)],
    "max_seqlen_q": [S, S - 1, True, 1.0], "v_dim": [512, 512.0, 496], "latent_dim": [512, 500],
    "traffic": [None, "bytes"], "out": [],
}
"""Values that are equal, or nearly, but not for the checks."""


def outcome(function: Any, call: Arguments) -> str:
    try:
        return str(attention.explain(function, **call))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def others(function: Any, call: Arguments) -> Iterator[tuple[str, Arguments]]:
    """The call with one argument changed, every way."""
    for name, value in call.items():
        for how, change in CHANGES.items():
            if not isinstance(value, torch.Tensor):
                continue
            try:
                changed = change(value)
            except (RuntimeError, TypeError, IndexError):  # torch has no such tensor
                continue
            yield f"{name} {how}", call | {name: changed}
    for name in parameters(function) & set(OPTIONS):
        for value in OPTIONS[name]:
            yield f"{name}={value!r} {type(value).__name__}", call | {name: value}


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(kinds, "_kinds", {})


HOPPER = "mha_decode", "mla_decode", "mha_prefill"
BACKENDS = [(name, "auto") for name in CALLS] + [(name, "hopper") for name in HOPPER]
"""Hopper's kernels ask for addresses that are multiples of 16, too."""


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_known_kind_lets_nothing_else_pass(name: str, backend: str, nothing_known: Callable[[], None]) -> None:
    function, build = CALLS[name]
    good = build() | {"backend": backend}
    nothing_known()
    plan = outcome(function, good)
    assert plan.startswith(("m", "kv"))
    assert kinds._kinds, "the good call is of a kind"
    found = {what: outcome(function, call) for what, call in others(function, good)}
    after = {what: outcome(function, call) for what, call in others(function, good)}
    assert outcome(function, good) == plan
    alone = {}
    for what, call in others(function, good):
        nothing_known()
        alone[what] = outcome(function, call)
    assert found == after == alone
    refused = [what for what, text in found.items() if "Error" in text]
    assert len(refused) > len(found) // 3, "most of the changes are bad ones"


@pytest.mark.parametrize("name", CALLS)
def test_values_and_memory_are_looked_at_each_time(name: str) -> None:
    """Arrays of the same dtype, shape and strides: bad values, or an out that lies over an argument."""
    function, build = CALLS[name]
    good = build()
    assert "Error" not in outcome(function, good)
    integers = [n for n, x in good.items() if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
    for argument in integers:
        bad = good | {argument: good[argument] + 999}
        assert "Error" in outcome(function, bad), argument
    where = {"merge_states": "outs", "mla_decode": "kv_cache"}.get(name, "q" if "prefill" in name else "v_cache")
    if "store" in name:
        return
    rows = good["outs"][0] if name == "merge_states" else good["q"]
    columns = {"mla_decode": 512, "mla_prefill_ragged": 128, "mla_prefill_paged": 128}.get(name, 64)
    apart = rows.new_zeros((*rows.shape[:-1], columns))
    assert "Error" not in outcome(function, good | {"out": apart})
    within = good[where].reshape(-1)[: apart.numel()].view(apart.shape)
    assert within.stride() == apart.stride()
    assert f"out shares memory with {where}" in outcome(function, good | {"out": within})


def pool(**changed: Any) -> PagedKVCacheCollection:
    """A collection whose attributes were changed after it was made and checked."""
    made = PagedKVCacheCollection(zeros(PAGES, 2, 3, PAGE, 2, 64), whole(19, 16), whole([3, 1], [0, 2]), 1, 20)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_a_layer_is_checked_once_a_kind(monkeypatch: pytest.MonkeyPatch, nothing_known: Callable[[], None]) -> None:
    nothing_known()
    monkeypatch.setattr(layers, "on_gpu", lambda array: True)
    good = pool()
    for layer in range(3):
        keys, values, *_ = layers.layer_arrays(good, layer)
        assert keys.data_ptr() == good.get_key_cache(layer).blocks.data_ptr()
        assert values.data_ptr() == good.get_value_cache(layer).blocks.data_ptr()
    known = len(kinds._kinds)
    layers.layer_arrays(pool(cache_lengths=whole(3, 4)), 2)
    assert len(kinds._kinds) == known == 3
    bad = {"cache_lengths": [torch.ones(2), whole(1, 2, 3)], "lookup_table": [whole([1, 2]), whole(1, 2)],
           "total_num_pages": [PAGES + 1], "blocks": [zeros(PAGES, 2, 3, PAGE, 2, 32)]}
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name.split("_")[-1]):
                layers.layer_arrays(pool(**{name: value}), 2)
    with pytest.raises(IndexError, match="layer is 3: must be in"):
        layers.layer_arrays(good, 3)


def test_no_call_prints_the_values_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one on a GPU that would wait for it."""

    def printed(tensor: Any) -> str:
        raise AssertionError("a tensor was printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", printed)
    for function, build in CALLS.values():
        attention.explain(function, **build())
    cache, q, starts = pool(), zeros(B * S, 4, 64), whole(0, S, 2 * S)
    attention.explain(attention.mha_decode, q[:B], cache, 1)
    attention.explain(attention.mha_prefill_cache, q, pool(cache_lengths=whole(9, 8)), 1, cu_seqlens_q=starts)
    attention.explain(attention.kv_store, q[:B, :2], q[:B, :2], cache, 1)
    rows = PagedKVCacheCollection(zeros(PAGES, 1, 3, PAGE, 1, 576), whole(6, 8), whole([3, 1], [0, 2]), S, 11)
    call = mla_ragged()
    parts, starts = (call["q"], call["k"], call["v"]), {n: call[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
    attention.explain(attention.mla_prefill, *parts, rows, 1, **starts)
    attention.explain(attention.mla_decode, zeros(B, 4, 576), rows, 1)


class Compiled:
    """In place of a compiled kernel: notes what it is launched with."""

    packed_metadata = ()

    def __init__(self, noted: list[Any], name: str) -> None:
        self.noted, self.name = noted, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.noted.append((self.name, grid, args))


class Stub:
    """In place of a kernel: its first launch."""

    def __init__(self, fn: Any, noted: list[Any]) -> None:
        self.fn, self.arg_names, self.noted = fn.fn, fn.arg_names, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **named: Any) -> Compiled:
            compiled, rest = Compiled(self.noted, self.fn.__qualname__), self.arg_names[len(args) :]
            compiled[(*grid, 1, 1)[:3]](*args, *(named[name] for name in rest))
            return compiled

        return run


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, nothing_known: Callable[[], None]) -> list[Any]:
    """The launches of calls as on a GPU."""
    from kvlab.attention.kv_store import kernel as kv_store
    from kvlab.attention.merge_states import kernel as merge_states
    from kvlab.attention.mha_decode import hopper as decode_hopper
    from kvlab.attention.mha_decode import kernel as mha_decode
    from kvlab.attention.mha_decode_streaming import kernel as streaming
    from kvlab.attention.mha_prefill import hopper as prefill_hopper
    from kvlab.attention.mha_prefill import kernel as mha_prefill
    from kvlab.attention.mla_decode import hopper as mla_hopper
    from kvlab.attention.mla_decode import kernel as mla_decode
    from kvlab.attention.mla_prefill import kernel as mla_prefill

    launches: list[Any] = []
    kernels = mha_decode, streaming, mla_decode, mha_prefill, mla_prefill, decode_hopper, mla_hopper, prefill_hopper
    for module in kernels:
        monkeypatch.setattr(module, "attend", Stub(module.attend, launches))
    monkeypatch.setattr(kv_store, "append", Stub(kv_store.append, launches))
    monkeypatch.setattr(merge_states, "merge", Stub(merge_states.merge, launches))
    for user in (backends, gpu, checks, hopper_choice, ragged, store_call):
        monkeypatch.setattr(user, "on_gpu", lambda array: True)
    for user in (gpu, hopper_choice, store_call, prefill_hopper):
        monkeypatch.setattr(user, "machine", lambda device: ("sm_90", 132))
    monkeypatch.setattr("kvlab.triton_support.versions.installed", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(decode_hopper, "arrivals", lambda count, device: torch.zeros(count, dtype=torch.int32))
    nothing_known()
    return launches


def shown(value: Any) -> Any:
    """What a launch takes of an argument, but for its address: of tensors nothing more than what they point to."""
    if hasattr(value, "block_shape"):
        return {**vars(value), "base": shown(value.base)}
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value


def memory(value: Any, given: set[int]) -> Any:
    """Where an argument of a launch points to, if to an array of the call."""
    if isinstance(value, tuple):
        return [memory(one, given) for one in value]
    value = getattr(value, "base", value) if hasattr(value, "block_shape") else value
    return value.data_ptr() if isinstance(value, torch.Tensor) and value.data_ptr() in given else None


VARIANTS: dict[str, Arguments] = {
    "plain": {}, "split": {"num_splits": 3}, "portable": {"backend": "triton"}, "sinks": {"sinks": zeros(4)},
    "e4m3": {"k_scale": None, "v_scale": 0.5},
    "heads": {"softcap": 30.0, "window": 5, "alibi_slopes": zeros(4, dtype=torch.float32),
              "temperature": zeros(4, dtype=torch.float32)},
    "int4": {f"{x}_{what}": zeros(PAGES, PAGE, 2, dtype=torch.float32) for x in "kv" for what in ("scale", "min")},
    "e2m1": {f"{x}_block_scale": zeros(PAGES, PAGE, 2, 4, dtype=torch.float8_e4m3fn) for x in "kv"},
}


def mixed() -> Arguments:
    """A chunk and a decode over a table with room for more keys than a single walk would take."""
    table = torch.zeros(B, 200, dtype=torch.int32)
    starts = {"cu_seqlens_q": whole(0, 400, 401), "max_seqlen_q": 400}
    return decode() | {"q": zeros(401, 4, 64), "block_table": table, "seq_lens": whole(400, 17)} | starts


@pytest.fixture
def listed(noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of calls over a schedule, too."""
    from kvlab.attention.attend_paged import hopper, kernel, step
    from kvlab.attention.attend_paged.wide import hopper as wide
    from kvlab.attention.schedule import kernel as schedule

    names = [(kernel, "walk"), (kernel, "join"), (hopper, "walk"), (wide, "walk"), (schedule, "work_list")]
    for module, name in names:
        monkeypatch.setattr(module, name, Stub(getattr(module, name), noted))
    for user in (step, planned):
        monkeypatch.setattr(user, "on_gpu", lambda array: True)
    return noted


@pytest.mark.parametrize("given", [False, True])
def test_walks_launched_again_get_what_first_launches_give(given: bool, listed: list[Any]) -> None:
    """And with a plan, whose lists two walks at a time share the processors by, the plan of the call is looked up."""
    calls = [mixed() for _ in range(2)]
    if given:
        for call in calls:
            lengths, new = (call["seq_lens"], 200 * PAGE), (call["cu_seqlens_q"], 401, 400)
            call["plan"] = attention.plan(lengths, new, q_heads=4, kv_heads=2, head_dim=64)
        assert all(one.config.sharing is not None for one in calls[0]["plan"].walks[::2])
    rounds = []
    for call in calls:
        listed.clear()
        attention.attend_paged(**call)
        rounds.append(listed[:])
    kernels = [name for name, _, _ in rounds[0]]
    assert (kernels.count("work_list"), kernels.count("join"), len(kernels)) == ((0, 3, 6) if given else (3, 3, 9))
    for (kernel, grid, args), (_, _, before) in zip(*rounds[::-1], strict=True):
        assert [*map(shown, args)] == [*map(shown, before)], (kernel, grid)
    own = {x.data_ptr() for x in calls[1].values() if isinstance(x, torch.Tensor)}
    places = [{at for one in memory(args, own) if isinstance(at := one, int)} for _, _, args in rounds[1]]
    assert set().union(*places) == own
    assert len(kinds._kinds) == 1


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


HAVE = [
    (name, variant) for name in CALLS for variant, more in VARIANTS.items() if {*more} <= parameters(CALLS[name][0])
    and (name, variant) not in (("mha_prefill_paged", "int4"), ("mha_prefill_paged", "e2m1"))  # over a schedule
]


@pytest.mark.parametrize(("name", "variant"), HAVE)
def test_a_kernel_launched_again_gets_what_a_first_launch_gives(
    name: str, variant: str, noted: list[Any], nothing_known: Callable[[], None]
) -> None:
    function, build = CALLS[name]

    def made() -> Arguments:
        more = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in VARIANTS[variant].items()}
        call = build() | more
        if variant == "e4m3":
            caches = ("k_cache", "v_cache") if "k_cache" in call else ("k", "v")
            call |= {cache: call[cache].to(torch.float8_e4m3fn) for cache in caches}
            call["k_scale"] = torch.ones(call[caches[0]].shape[-2])
        if variant in ("int4", "e2m1"):
            call |= {cache: zeros(PAGES, PAGE, 2, 32, dtype=torch.uint8) for cache in ("k_cache", "v_cache")}
        return call

    one, other = made(), made()
    function(**one)
    first = noted[:]
    noted.clear()
    function(**other)
    again = noted[:]
    nothing_known()
    noted.clear()
    function(**other)
    fresh = noted[:]
    given = {x.data_ptr() for x in other.values() if isinstance(x, torch.Tensor)}
    assert first
    for (kernel, grid, args), (_, _, before), (same, places, expected) in zip(again, first, fresh, strict=True):
        assert (kernel, grid, [*map(shown, args)]) == (same, places, [*map(shown, expected)])
        assert [*map(shown, args)] == [*map(shown, before)]
        assert memory(args, given) == memory(expected, given)
    kept = [weakref.ref(x) for x in (*one.values(), *other.values()) if isinstance(x, torch.Tensor)]
    noted.clear()
    del one, other, args, before, expected, first, again, fresh
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["q", "k_cache", "seq_lens", "sinks", "out"])
def test_a_nested_tensor_has_no_shape_and_is_named(name: str, layout: torch.layout) -> None:
    """Rests on torch, whose nested tensors raise RuntimeError where their shape is asked, or, jagged, are a class with
    a dispatch of its own, which knows no operator of kvlab.
    """
    cache, table = torch.zeros(4, 16, 2, 64), torch.arange(4).reshape(2, 2)
    given: dict[str, Any] = {"q": torch.zeros(2, 8, 64), "k_cache": cache, "v_cache": cache, "block_table": table,
                             "seq_lens": torch.tensor([20, 3])}  # fmt: skip
    given[name] = torch.nested.nested_tensor([torch.ones(2, 4)], layout=layout)
    with pytest.raises(ValueError, match=f"{name} is a nested tensor: must be a dense one"):
        attention.mha_decode_paged(**given, backend="emulator")
