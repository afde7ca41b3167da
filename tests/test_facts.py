"""The page of facts says what the package computes, and no address of it goes. Rests on the package itself."""

from __future__ import annotations

import re
from pathlib import Path

from tools import facts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "facts.md"
PERMANENT = """
    wavefronts-of-ldmatrix-x4 wavefronts-of-ldmatrix-x4-on-plain-rows wavefronts-of-ldmatrix-x4-swizzled
    swizzle-of-64-byte-rows swizzle-of-128-byte-rows swizzle-of-256-byte-rows bank-of-an-address
    wavefronts-of-ld-shared-b32-in-a-row wavefronts-of-ld-shared-b32-down-a-column wavefronts-of-a-broadcast
    wavefronts-of-ld-shared-b64 wavefronts-of-ld-shared-b128 shared-memory-of-a-cta-on-sm-80
    shared-memory-of-a-cta-on-sm-90 lds-of-gfx950 registers-of-mma-sync-m16n8k16 lanes-of-a-row-of-c
    bytes-of-a-token-llama-3-1-8b bytes-of-a-token-deepseek-v3 bytes-of-a-token-smollm2 bytes-of-an-fp8-latent-row
    largest-float8-e4m3fn rounding-of-bfloat16 lse-of-no-key
"""
"""Anchors that others may have linked to: one is added here with its fact, none is taken out."""


def test_the_page_is_what_the_package_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == facts.page()


def test_no_address_goes() -> None:
    anchors = [fact.anchor for fact in facts.FACTS]
    assert len(set(anchors)) == len(anchors)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", anchor) for anchor in anchors), "the same on every site"
    assert PERMANENT.split() == anchors
