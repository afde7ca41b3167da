"""SmolLM2-135M with its weights, where they are: ``KVLAB_SMOLLM2`` names a folder or a file .gguf, as
``examples/capture_smollm2.py`` takes it from a package; else Hugging Face's cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M")
PROMPTS = (
    "What is a page table? One short sentence.", "Name three rivers of Europe.", "Write a line of a poem about snow.",
    "What is 12 times 7?", "Why is the sky blue?", "List the days of the week.", "Translate 'good morning' to French.",
    "A librarian keeps a small desk beside the door. What lies on it?",
)


def smollm2(dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer), the latter padding on the left; the test is left out where there are no weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = os.environ.get("KVLAB_SMOLLM2")
    for name in (named,) if named else NAMES:
        file = Path(name)
        more = {"gguf_file": file.name} if file.suffix == ".gguf" else {}
        place = str(file.parent) if more else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **more)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, local_files_only=True, **more)
        except OSError:
            if named:
                raise
            continue
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
        return model.eval(), tokenizer
    pytest.skip(f"none of {', '.join(NAMES)} is in the Hugging Face cache, and KVLAB_SMOLLM2 names none")
