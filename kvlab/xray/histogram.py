"""Instructions that matter, counted by kind and by line of the source, from the PTX or the AMD assembly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from kvlab.triton_support.compile import Compiled
from kvlab.xray.ttgir import in_library

#: kind -> what its instructions are called: PTX, AMD assembly
KINDS: Mapping[str, tuple[str, str]] = {
    "tensor core": (r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|mma\.m\d+", r"v_(?:mfma|smfmac|wmma)\w*"),
    "TMA": (r"cp\.async\.bulk|cp\.reduce\.async\.bulk", r"tensor_load\w*"),
    "copy to shared": (r"cp\.async\.c[ag]", r"(?:buffer|global)_load\w*_lds\w*|buffer_load\w*(?=.*\blds\b)"),
    "ldmatrix": (r"ldmatrix", r"ds_read\w*_tr_\w*"),
    "stmatrix": (r"stmatrix", r"(?!)"),
    "shared load": (r"ld\.shared", r"ds_(?:read|load|bpermute)\w*"),
    "shared store": (r"st\.shared", r"ds_(?:write|store|permute)\w*"),
    "global load": (r"ld\.(?:volatile\.)?global", r"(?:global|buffer|flat)_load\w*"),
    "global store": (r"st\.(?:volatile\.)?global", r"(?:global|buffer|flat)_store\w*"),
    "local memory": (r"(?:ld|st)\.local", r"scratch_(?:load|store)\w*"),
    "atomic": (r"atom\.|red\.(?:global|shared|async|relaxed)", r"(?:global|buffer|flat|ds)_(?:atomic|add|max)\w*"),
    "barrier": (r"bar\.|barrier\.", r"s_barrier"),
    "mbarrier": (r"mbarrier\.", r"(?!)"),
    "shuffle": (r"shfl\.", r"\w+(?=.*(?:dpp|row_|quad_perm))|v_permlane\w*|v_readlane\w*"),
    "special function": (r"ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh", r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_\w+"),
    "division": (r"div\.|rem\.", r"v_div_\w+"),
    "conversion": (r"cvt\.(?!u|s)", r"v_cvt_\w+"),
    "permute": (r"prmt\.", r"v_perm\w*"),
    "float64": (r"\w+\.(?:\w+\.)*f64", r"v_\w+_f64\w*"),
}
_OPCODE = {"ptx": re.compile(r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)\s"),
           "amdgcn": re.compile(r"^\s+((?:v|s|ds|buffer|global|flat|scratch|tensor)_\w+)(.*)")}
_LINE = re.compile(r"^\s*\.loc\s+\d+ (\d+) \d+(.*)$")
_FILE = re.compile(r'^\s*\.file\s+\d+ (?:"([^"]*)" )?"([^"]*)"', re.M)


def histogram(made: Compiled) -> dict[str, dict[str, Counter[int]]]:
    """Kind -> instruction -> count at each line of the kernel's source; line 0 for no line."""
    language = "ptx" if "ptx" in made.asm else "amdgcn"
    patterns = [(kind, re.compile(pair[language != "ptx"])) for kind, pair in KINDS.items()]
    found: dict[str, dict[str, Counter[int]]] = {}
    kinds: dict[str, str | None] = {}
    library = {name.split("/")[-1] for folder, name in _FILE.findall(made.asm[language])
               if in_library(f"{folder}/{name}")}
    line = 0
    for text in made.asm[language].splitlines():
        if where := _LINE.match(text):
            frames = re.findall(r"([\w.-]+):(\d+):\d+", where[2]) or [("", where[1])]
            line = int(next((number for name, number in frames if name not in library), frames[-1][1]))
            continue
        opcode = _OPCODE[language].match(text)
        if opcode is None or opcode[1].startswith("."):
            continue
        name = opcode[1]
        whole = name if language == "ptx" else name + " " + opcode[2]
        key = whole if language == "amdgcn" and "lds" in whole else name
        if key not in kinds:
            kinds[key] = next((kind for kind, pattern in patterns if pattern.match(whole)), None)
        kind = kinds[key]
        if kind is not None:
            found.setdefault(kind, {}).setdefault(name, Counter())[line] += 1
    return found
