"""transformers' models with kvlab's attention on a CUDA device. Rests on transformers' own SDPA attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from smollm2_weights import PROMPTS, smollm2

from kvlab.integrations.transformers import CACHE_ARGUMENT, KVLabCache, register

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smollm2_writes_the_tokens_of_sdpa(dtype: torch.dtype, batched: bool) -> None:
    """64 greedy tokens of 8 prompts, one by one and as a batch with padding. In bfloat16 they may part where SDPA's two
    best logits are closer than two steps of bfloat16."""
    model, tokenizer = smollm2(dtype)
    model.cuda()
    register()
    for prompts in [PROMPTS] if batched else [[prompt] for prompt in PROMPTS]:
        inputs, written = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda"), []
        for name in ("sdpa", "kvlab"):
            model.set_attn_implementation(name)
            cache = KVLabCache(model.config, num_pages=128) if name == "kvlab" else None
            options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            written.append(model.generate(**inputs, max_new_tokens=64, **{CACHE_ARGUMENT: cache}, **options))
        assert parting(*written, step=0.0 if dtype == torch.float32 else 2.0**-7) == []


def parting(exact: Any, ours: Any, *, step: float) -> list[tuple[int, int]]:
    """(row, token) where rows part from the exact ones although its two best logits are two steps apart."""
    logits, found = torch.stack(exact.logits, 1).float(), []
    for row, (a, b) in enumerate(zip(exact.sequences.tolist(), ours.sequences.tolist(), strict=True)):
        begin = len(a) - logits.shape[1]
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            best, next_best = logits[row, at - begin].topk(2).values.tolist()
            if best - next_best > 2 * step * abs(best):
                found.append((row, at))
    return found


@torch.inference_mode()
def test_a_captured_step_is_replayed_over_growing_sequences() -> None:
    """Rests on SDPA over whole sequences: one captured forward, replayed while lengths and pages change."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation="kvlab")
    torch.manual_seed(0)
    register()
    model = LlamaForCausalLM(config).cuda().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    tokens = torch.randint(64, (2, 24), device="cuda")
    whole, lengths = KVLabCache(config, num_pages=16, page_size=4, max_length=32), (6, 3)
    held = [whole.pages.pool.allocate(0)[0] for _ in lengths]
    for row, n in enumerate(lengths):
        model(tokens[row : row + 1, :n], **{CACHE_ARGUMENT: whole.of([held[row]])})
    cache, at = whole.of([held[0], None, held[1]]), torch.tensor([[6], [0], [3]], device="cuda")
    ids, graph = torch.zeros_like(at), torch.cuda.CUDAGraph()

    def fill() -> None:
        ids[0], ids[2] = tokens[0, at[0, 0]], tokens[1, at[2, 0]]
        cache.begin(1)

    fill()
    model(ids, position_ids=at, **{CACHE_ARGUMENT: cache})  # compiles
    for step in range(8):
        at[0] += 1
        at[2] += 1
        fill()
        if step == 0:
            with torch.cuda.graph(graph):
                logits = model(ids, position_ids=at, **{CACHE_ARGUMENT: cache}).logits
        graph.replay()
    model.set_attn_implementation("sdpa")
    for row, slot, n in ((0, 0, 6), (1, 2, 3)):
        exact = model(tokens[row : row + 1, : n + 9], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[slot, 0], exact, atol=1e-3, rtol=1e-3)
