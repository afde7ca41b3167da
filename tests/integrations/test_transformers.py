"""Models of transformers with kvlab's attention and cache, tiny ones with random weights, in the emulator.

Rests on transformers' own eager attention, in float32, but where a test says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from smollm2_weights import PROMPTS, smollm2
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from kvlab.attention.call.latent_rows import latent_windows, row_scales
from kvlab.cache import OutOfPages
from kvlab.integrations.transformers import CACHE_ARGUMENT, KVLabCache, attention, mask_of, register
from kvlab.integrations.transformers_states import GrowingColumns

BASE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {
    "head_dim": None, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 40, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOss", {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek": ("DeepseekV3", LATENT),
}
IDS = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :4], MASK[1, :1] = 0, 0
POSITIONS = (MASK.cumsum(1) - 1).clamp(0)


def made(name: str, **more: Any) -> Any:
    family, own = MODELS[name]
    config = getattr(hf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    shape = {key: value for key, value in {**BASE, **own, **more}.items() if key != "head_dim" or value is not None}
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(config(**shape, attn_implementation="eager")).eval().float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("llama")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    register(backend="emulator")
    with torch.no_grad():
        yield


def given(cache: Any) -> dict[str, Any]:
    return {CACHE_ARGUMENT: cache}


def paged(model: Any, **options: Any) -> KVLabCache:
    model.set_attn_implementation("kvlab")
    return KVLabCache(model.config, **{"num_pages": 24, "page_size": 4, **options})


def generated(model: Any, cache: KVLabCache | None = None, rows: slice = slice(None), **options: Any) -> torch.Tensor:
    """Tokens of 5 greedy steps; eager and a cache of transformers' own without a cache of ours."""
    model.set_attn_implementation("eager" if cache is None else "kvlab")
    return model.generate(
        IDS[rows], attention_mask=MASK[rows], max_new_tokens=5, do_sample=False, **given(cache), **options
    )


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_steps_agree_with_eager(name: str) -> None:
    """A chunk without and one with a past, steps of three tokens and of one, and rows that begin with padding."""
    model = made(name)
    exact = model(IDS, attention_mask=MASK, position_ids=POSITIONS).logits
    cache, logits = paged(model), []
    for first, end in ((0, 3), (3, 5), (5, 8), (8, 9)):
        part = {"attention_mask": MASK[:, :end], "position_ids": POSITIONS[:, first:end], CACHE_ARGUMENT: cache}
        logits.append(model(IDS[:, first:end], **part).logits)
    assert torch.allclose(torch.cat(logits, 1)[MASK.bool()], exact[MASK.bool()], atol=2e-5)
    assert [cache.pages.pool.length(s) for s in cache.sequences] == [5, 8, 9]  # padding is not stored


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_caches_of_transformers_and_none_agree_with_eager(name: str) -> None:
    """Sliding layers of its cache give the last keys alone."""
    model = made(name)
    exact = model(IDS, attention_mask=MASK, position_ids=POSITIONS).logits[MASK.bool()]
    model.set_attn_implementation("kvlab")
    whole = model(IDS, attention_mask=MASK, position_ids=POSITIONS, use_cache=False).logits
    assert torch.allclose(whole[MASK.bool()], exact, atol=2e-5)
    cache, logits = hf.DynamicCache(config=model.config), []
    for first, end in ((0, 8), (8, 9)):
        part = {"attention_mask": MASK[:, :end], "position_ids": POSITIONS[:, first:end], CACHE_ARGUMENT: cache}
        logits.append(model(IDS[:, first:end], **part).logits)
    assert torch.allclose(torch.cat(logits, 1)[MASK.bool()], exact, atol=2e-5)


def test_a_model_that_sees_both_sides_agrees_with_eager() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = hf.BertModel(hf.BertConfig(**shape, num_attention_heads=2, attn_implementation="eager")).eval()
    exact = model(IDS, attention_mask=MASK)[0]
    model.set_attn_implementation("kvlab")
    assert torch.allclose(model(IDS, attention_mask=MASK)[0][MASK.bool()], exact[MASK.bool()], atol=2e-5)


def test_generate_with_beams_chunks_and_guesses(llama: Any) -> None:
    """Beams are reordered, guessed tokens cropped; what ends gives its pages back."""
    cache = paged(llama)
    assert torch.equal(generated(llama, cache, prefill_chunk_size=4), generated(llama, prefill_chunk_size=4))
    assert torch.equal(generated(llama, paged(llama, num_pages=60), num_beams=3), generated(llama, num_beams=3))
    one, guesses = slice(1, 2), {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generated(llama, paged(llama), one, **guesses), generated(llama, None, one))
    cache.reset()
    assert (cache.pages.pool.num_free, cache.get_seq_length()) == (24, 0)


def test_smollm2_writes_the_tokens_of_sdpa() -> None:
    """Rests on transformers' SDPA attention: 8 prompts as a batch with padding, in float32."""
    model, tokenizer = smollm2(torch.float32)
    inputs, written = tokenizer(list(PROMPTS), return_tensors="pt", padding=True), []
    for name in ("sdpa", "kvlab"):
        model.set_attn_implementation(name)
        cache = KVLabCache(model.config, num_pages=32) if name == "kvlab" else None
        written.append(model.generate(**inputs, max_new_tokens=8, do_sample=False, **given(cache)))
    assert torch.equal(*written)


def test_copies_share_the_pages_of_a_prefix(llama: Any) -> None:
    """A law: a prefix has its pages once, whoever reads it, until somebody writes; they are free when all ended."""
    exact, cache = generated(llama), paged(llama, num_pages=30)
    llama(IDS[:, :6], attention_mask=MASK[:, :6], position_ids=POSITIONS[:, :6], **given(cache))
    pool, free = cache.pages.pool, cache.pages.pool.num_free
    branch = copy.deepcopy(cache)
    assert pool.num_free == free
    for _ in range(2):  # the second must not see what the first wrote behind the prefix
        assert torch.equal(generated(llama, copy.deepcopy(cache)), exact)
    short = branch.fork([1, 1], tokens=3)
    assert [pool.length(s) for s in short.sequences] == [2, 2]
    ends = torch.cat([MASK[:2, :1] * 0, MASK[1:2, 1:9].expand(2, -1)], 1)
    part = {"attention_mask": ends, "position_ids": POSITIONS[1:2, 3:], CACHE_ARGUMENT: short}
    again = llama(IDS[1:2, 3:].expand(2, -1), **part).logits
    llama.set_attn_implementation("eager")
    whole = llama(IDS[1:2], attention_mask=MASK[1:2], position_ids=POSITIONS[1:2]).logits[:, 3:]
    assert torch.allclose(again, whole.expand_as(again), atol=2e-5)
    del branch, short, part
    assert pool.num_free == free


def test_fp8_pages_have_a_scale_for_each_token_and_head(llama: Any) -> None:
    """Rests on e4m3's step, 2^-3 of a power of two: pages hold the states to half of it, and attention reads those."""
    model = copy.deepcopy(llama).bfloat16()
    first, seen = model.model.layers[0].self_attn, []
    first.v_proj.weight *= 16  # scales of K and V differ
    first.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    caches = [paged(model, dtype=dtype) for dtype in (None, torch.float8_e4m3fn)]
    for part in (IDS[1:2, 1:], IDS[1:2, :1]):  # prefill, then decode
        exact, got = (seen.pop(0) for cache in caches if model(part, **given(cache)))
        assert 0 < (got - exact).abs().max() < 0.05 * exact.abs().max()
    for view in ("get_key_cache", "get_value_cache"):
        wide, narrow = (getattr(cache.collection(0), view)(0).numpy() for cache in caches)
        k, stored, scale = (a.astype(float)[:2].reshape(8, 2, -1) for a in (wide.blocks, narrow.blocks, narrow.scales))
        assert (abs(stored * scale - k) <= abs(k) / 16 + scale * 2.0**-10).all()


def test_fp8_latents_have_a_scale_for_128_of_them() -> None:
    """Rests on e4m3's step, as above; the rope part is as it came. Prefill, with a past and without, then decode."""
    model = made("deepseek", kv_lora_rank=512).bfloat16()
    first, seen = model.model.layers[0].self_attn, []
    if not hasattr(first, "expand_kv"):
        pytest.skip(f"transformers {hf.__version__} caches K and V of each head")
    first.q_proj.weight *= 0.25  # weights of keys are far from 0 and 1
    first.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    caches = [paged(model, dtype=dtype, page_size=32) for dtype in (None, torch.float8_e4m3fn)]
    ids = IDS.repeat(1, 4)
    for part in (ids[1:2, :18], ids[1:2, 18:], IDS[1:2, :2]):
        exact, got = (seen.pop(0) for cache in caches if model(part, **given(cache)))
        assert 0 < (got - exact).abs().max() < 0.05 * exact.abs().max()
    wide, narrow = (cache.pages.layers[0].blocks[:2, 0, 0, :, 0] for cache in caches)
    assert narrow.shape == (2, 32, 512 + 16 + 32)
    latents, rope = latent_windows(narrow, 512, 16)
    stored = latents.double().view(64, 4, 128) * row_scales(narrow, 512, 16).double().view(64, 4, 1)
    k, there = wide[..., :512].double().view(64, 4, 128), wide[..., 0].isfinite().flatten()
    most = k.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert ((stored - k).abs() <= k.abs() / 16 + most)[there].all()
    assert torch.equal(rope.view(torch.int16)[there.view(2, 32)], wide[..., 512:].view(torch.int16)[there.view(2, 32)])
    model = made("deepseek").bfloat16()
    cache = paged(model, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"dtype is torch.float8_e4m3fn for 32 latent columns: must be None, or for a"):
        model(IDS, **given(cache))


@pytest.mark.parametrize("widths", [(32, 16), (16, 48)])
def test_keys_and_values_differ_in_width(llama: Any, widths: tuple[int, int]) -> None:
    """Rests on softmax in torch: prefill, then a step."""
    draw, cache = torch.Generator().manual_seed(4), paged(llama)
    q, k = torch.randn(2, 1, 4, 7, widths[0], generator=draw)
    k, v = k[:, :2], torch.randn(1, 2, 7, widths[1], generator=draw)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.2
    exact = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    for first, end in ((0, 6), (6, 7)):
        states = cache.update(k[:, :, first:end].clone(), v[:, :, first:end].clone(), 0)
        out, _ = attention(torch.nn.Module(), q[:, :, first:end], *states, None, scaling=0.2, backend="emulator")
        assert torch.allclose(out, exact[:, :, first:end].transpose(1, 2), atol=1e-5)
    with pytest.raises(ValueError, match=f"has states of 2 heads x 8 and 8 on cpu: must be 2 x {widths[0]} and"):
        cache.update(k[..., :8], v[..., :8], 0)


def test_rows_of_any_lengths_step_by_hand(llama: Any) -> None:
    """Rests on one sequence at a time: rows that differ in length, one without a sequence, in arrays that stay where
    they are, as the replay of a captured graph needs."""
    whole, lengths = paged(llama, max_length=12), (6, 3)
    pool = whole.pages.pool
    held = [pool.allocate(0)[0] for _ in lengths]
    for sequence, n in zip(held, lengths, strict=True):
        llama(IDS[1:2, :n], **given(whole.of([sequence])))
    cache, ids, addresses = whole.of([held[0], None, held[1]]), torch.zeros(3, 1, dtype=torch.long), set()
    for step in range(2):
        arrays = cache.begin(1)
        addresses.add((arrays.slots.data_ptr(), arrays.table.data_ptr(), arrays.lengths.data_ptr()))
        at = torch.tensor([[6 + step], [0], [3 + step]])
        ids[0], ids[2] = IDS[1, 6 + step], IDS[1, 3 + step]
        logits = llama(ids, position_ids=at, **given(cache)).logits
    exact = [llama(IDS[1:2, : n + 2], use_cache=False).logits[0, -1] for n in lengths]
    assert torch.allclose(logits[[0, 2], 0], torch.stack(exact), atol=2e-5)
    assert len(addresses) == 1
    with pytest.raises(ValueError, match="begin\\(\\) is not called before this forward: must be called before each"):
        llama(ids, position_ids=at + 1, **given(cache))
    with pytest.raises(ValueError, match="gets 13 tokens: must be at most 12, max_length"):
        cache.begin(5)
    assert [pool.length(s) for s in held] == [8, 5]


def test_what_does_not_fit_changes_nothing(llama: Any) -> None:
    cache = paged(llama, num_pages=7)
    llama(IDS[:, :6], **given(cache))
    with pytest.raises(OutOfPages, match="sequence 1 of 6 tokens: 3 more need 1 pages, 0 of 7 are free"):
        llama(IDS[:, 6:], **given(cache))
    assert ([cache.pages.pool.length(s) for s in cache.sequences], cache.get_seq_length()) == ([6, 6, 6], 6)
    cache.crop(-3)
    assert (cache.pages.pool.num_free, cache.get_seq_length()) == (4, 3)


def test_rows_with_padding_are_cropped_and_chosen(llama: Any) -> None:
    """Columns of padding among those that go take no token with them; a chosen row keeps its own."""
    exact = llama_logits(llama, IDS, MASK)
    cache = paged(llama)
    llama(IDS, attention_mask=MASK, position_ids=POSITIONS, **given(cache))
    cache.crop(-6)  # row 0 has padding to column 3
    assert [cache.pages.pool.length(s) for s in cache.sequences] == [0, 2, 3]
    cache.batch_select_indices(torch.tensor([2, 0, 2]))
    order = [2, 0, 2]
    part = {"attention_mask": MASK[order], "position_ids": POSITIONS[order, 3:], CACHE_ARGUMENT: cache}
    logits, seen = llama(IDS[order, 3:], **part).logits, MASK[order, 3:].bool()
    assert torch.allclose(logits[seen], exact[order, 3:][seen], atol=2e-5)


def test_masks_of_a_cache_in_pages_are_made_without_looking_at_positions() -> None:
    """Positions on a GPU, as older releases give them, would be waited for, and could not be captured."""
    assert mask_of(1, kv_length=GrowingColumns(9), cache_position=torch.empty(2, device="meta")) is None
    assert mask_of(1, kv_length=9, cache_position=torch.arange(7, 9)) is None
    with pytest.raises(NotImplementedError, match="the cache gives 12 keys of 9 tokens: must be a KVLabCache"):
        mask_of(1, kv_length=12, cache_position=torch.arange(7, 9))


def llama_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits


def test_the_window_of_a_mask_holds_where_the_layer_names_none() -> None:
    """Rests on softmax in torch. A gap among the tokens is refused: a window counts tokens there and columns here."""
    q, k, v = torch.randn(3, 1, 2, 6, 16, generator=torch.Generator().manual_seed(3))
    window = {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3}
    seen = mask_of(1, 6, 6, **window)
    got, _ = attention(torch.nn.Module(), q, k, v, seen, scaling=0.5, backend="emulator")
    scores = (0.5 * q @ k.transpose(2, 3)).masked_fill(~torch.ones(6, 6).tril().triu(-2).bool(), -torch.inf)
    assert torch.allclose(got, (scores.softmax(-1) @ v).transpose(1, 2), atol=1e-5)
    with pytest.raises(ValueError, match="sliding_window is 4: must be 3, as the mask has it"):
        attention(torch.nn.Module(), q, k, v, seen, sliding_window=4)
    with pytest.raises(ValueError, match="attention_mask of a layer with a window has a gap: must be one run"):
        mask_of(1, 6, 6, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]), **window)
    with pytest.raises(NotImplementedError, match="the mask of attn_implementation='kvlab': must be causal, with"):
        mask_of(1, 6, 6, mask_function=chunked_causal_mask_function(3, torch.zeros(1)), local_size=3)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weights": (
        lambda m: m(IDS, output_attentions=True), "output_attentions is True: must be None or False; attn_",
    ),
    "mask": (
        lambda m: m(IDS, attention_mask=torch.ones(3, 1, 9, 9)),
        "attention_mask has shape .3, 1, 9, 9.: must be .B, keys.",
    ),
    "head mask": (lambda m: m(IDS, head_mask=torch.ones(2, 4)), "head_mask is "),
    "packed": (
        lambda m: m(IDS, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 3), use_cache=False),
        "the mask of attn_implementation='kvlab': must be causal",
    ),
    "static": (
        lambda m: m(IDS, **given(hf.StaticCache(config=m.config, max_cache_len=12))),
        "the cache gives 12 keys of 9 tokens: must be a KVLab",
    ),
    "dropout": (lambda m: m.train()(IDS), "dropout is 0.25: must be 0.0"),
    "grad": (lambda m: torch.enable_grad()(m)(IDS), "query requires grad: must be detached, or the call under"),
    "eager": (lambda m: _eager(m), "attn_implementation is 'eager' with a KVLabCache: must be 'kvlab'"),
    "rows": (lambda m: _twice(m, {}, IDS[:2]), "the states of layer 0 have 2 rows: must be 3"),
    "past": (lambda m: _twice(m, {"attention_mask": MASK}, IDS), "attention_mask is None: must be given"),
    "fp8": (lambda m: m(IDS, **given(paged(m, dtype=torch.float8_e4m3fn))), "float8_e4m3fn for states of torch.fl"),
    "dtype": (lambda m: paged(m, dtype=torch.int8), "dtype is torch.int8: must be None or one of torch.bfloat16"),
    "crop": (lambda m: paged(m).crop(-2), "tokens_to_remove is -2: must be from 0 to 0"),
    "name": (  # what a model does with a keyword that it does not know
        lambda m: attention(m, *torch.ones(3, 1, 4, 3, 16), None, cache=paged(m)),
        f"cache is a KVLabCache that the model passes over: must be {CACHE_ARGUMENT}=, as transformers",
    ),
}


def _eager(model: Any) -> Any:
    cache = paged(model)
    model.set_attn_implementation("eager")
    return model(IDS, **given(cache))


def _twice(model: Any, first: dict[str, Any], ids: torch.Tensor) -> Any:
    cache = paged(model)
    model(IDS, **given(cache), **first)
    return model(ids, **given(cache))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_asked_and_not_done_is_refused(case: str, llama: Any) -> None:
    call, message = REFUSED[case]
    model = llama
    if case == "dropout":
        model = made("llama", attention_dropout=0.25)
    model.set_attn_implementation("kvlab")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(model)


def test_states_in_pages_are_not_multiplied_by_others(llama: Any) -> None:
    """Another attention function, to which the config does not point, would see the new keys alone."""
    keys, _ = paged(llama).update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="matmul of keys in the pages of a KVLabCache: must be read by"):
        torch.matmul(torch.ones(1, 2, 3, 16), keys.transpose(2, 3))


@pytest.mark.parametrize("change", [lambda k: 2 * k, lambda k: torch.cat([k, k], 1), lambda k: k[:, :, :2]])
def test_states_that_a_layer_changes_behind_the_cache_are_refused(llama: Any, change: Callable[..., Any]) -> None:
    """Attention reads the pages, which hold the states as they came."""
    keys, values = paged(llama).update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    with pytest.raises(NotImplementedError, match="layer 0, Linear, changes keys or values behind the cache: must"):
        attention(torch.nn.Linear(1, 1), torch.ones(1, 4, 3, 16), change(keys), values, None)


def test_layers_with_states_of_their_own_kind_are_refused() -> None:
    config = hf.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="config has layers of linear_attention: must be one of full_attention"):
        KVLabCache(config, num_pages=4)
