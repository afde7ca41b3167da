"""CUDA C++ of the probes, written from the tables of instructions: one kernel an instruction, named after it.

Every kernel takes one buffer of 32-bit words and fills another; `launch` picks it by number. Fragment kernels get the
registers of all lanes as words ``[lane][register]`` and give the registers back likewise. Access kernels run one shared
memory instruction of one warp many times with other addresses, or one wgmma, and touch shared memory nowhere else.
"""

from __future__ import annotations

from kvlab.hardware import ATOMS, MmaAtom

__all__ = ["ACCESSES", "MATRICES", "SLOTS", "SLOT_WORDS", "WGMMA_ACCESSES", "ZEROS", "mma_atoms", "source",
           "wgmma_atoms", "wgmma_forms"]

MATRICES = [f"{verb}.x{n}{trans}" for verb in ("ldmatrix", "stmatrix") for n in (1, 2, 4) for trans in ("", ".trans")]
WGMMA_WIDTHS = (8, 24, 64, 128, 256)

SLOTS = 104  # accesses of one access kernel
SLOT_WORDS = 65


def _atomic(form: str, operands: str) -> str:
    """PTX of an atomic whose old value goes to global memory."""
    bits = form[-2:]
    values = ".reg .u32 v; mov.u32 v, %laneid; .reg .u64 w; cvt.u64.u32 w, v;"
    return f"{{.reg .u{bits} r; {values} atom.shared.{form} r, [%0], {operands}; st.global.u{bits} [%1], r;}}"


#: instruction -> PTX of one lane: %0 the address in shared memory, %1 one in global memory
ACCESSES = {
    "ld.shared.b8": "{.reg .u32 r; ld.volatile.shared.u8 r, [%0];}",
    "ld.shared.b16": "{.reg .u16 h; ld.volatile.shared.u16 h, [%0];}",
    "ld.shared.b32": "{.reg .u32 r; ld.volatile.shared.u32 r, [%0];}",
    "st.shared.b8": "{.reg .u32 r; mov.u32 r, %laneid; st.volatile.shared.u8 [%0], r;}",
    "st.shared.b16": "{.reg .u16 h; mov.u16 h, 7; st.volatile.shared.u16 [%0], h;}",
    "st.shared.b32": "{.reg .u32 r; mov.u32 r, %laneid; st.volatile.shared.u32 [%0], r;}",
    "atom.shared.add.u32": _atomic("add.u32", "v"),
    "atom.shared.exch.b32": _atomic("exch.b32", "v"),
    "atom.shared.max.u32": _atomic("max.u32", "v"),
    "atom.shared.cas.b32": _atomic("cas.b32", "0, v"),
    "atom.shared.cas.b64": _atomic("cas.b64", "w, 5"),
    "atom.shared.exch.b64": _atomic("exch.b64", "w"),
    "red.shared.add.u32": "red.shared.add.u32 [%0], 3;",
    "cp.async.ca.4": "cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;",
    "cp.async.ca.8": "cp.async.ca.shared.global [%0], [%1], 8; cp.async.wait_all;",
    "cp.async.ca.16": "cp.async.ca.shared.global [%0], [%1], 16; cp.async.wait_all;",
    "cp.async.cg.16": "cp.async.cg.shared.global [%0], [%1], 16; cp.async.wait_all;",
}

#: copies of zeros: the source size is 0
ZEROS = {
    "cp.async.zeros.ca.4": "cp.async.ca.shared.global [%0], [%1], 4, 0; cp.async.wait_all;",
    "cp.async.zeros.cg.16": "cp.async.cg.shared.global [%0], [%1], 16, 0; cp.async.wait_all;",
}

#: wgmma with nothing written before: (atom, A in registers, transposed A, transposed B)
WGMMA_ACCESSES = [
    ("wgmma.m64n8k16.bf16", False, 0, 0), ("wgmma.m64n64k16.bf16", False, 0, 0), ("wgmma.m64n128k16.bf16", False, 0, 0),
    ("wgmma.m64n256k16.bf16", False, 0, 0), ("wgmma.m64n64k16.bf16", True, 0, 0), ("wgmma.m64n128k16.bf16", True, 0, 0),
    ("wgmma.m64n64k16.bf16", False, 0, 1), ("wgmma.m64n128k16.bf16", False, 0, 1),
    ("wgmma.m64n64k16.bf16", False, 1, 0), ("wgmma.m64n64k16.bf16", False, 1, 1),
    ("wgmma.m64n64k32.e4m3", False, 0, 0), ("wgmma.m64n128k32.e4m3", False, 0, 0), ("wgmma.m64n64k8.tf32", False, 0, 0),
    ("wgmma.m64n64k32.s8", False, 0, 0),
]

_PROLOGUE = r"""
#include <cstdint>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>

typedef void (*Kernel)(const uint32_t*, uint32_t*);
extern __shared__ __align__(1024) unsigned char smem[];
__device__ __forceinline__ uint32_t base() { return (uint32_t)__cvta_generic_to_shared(smem); }

// in: bytes of shared memory / 4, the words, per lane the address and 4 registers; out: registers, then the memory
#define MATRIX_IN \
    int lane = threadIdx.x; uint32_t n = in[0]; uint32_t* s = (uint32_t*)smem; \
    for (int i = lane; i < n; i += 32) s[i] = in[1 + i]; \
    __syncwarp(); const uint32_t* mine = in + 1 + n + lane * 5; uint32_t a = base() + mine[0]; \
    uint32_t r0 = mine[1], r1 = mine[2], r2 = mine[3], r3 = mine[4];
#define MATRIX_OUT \
    __syncwarp(); uint32_t* to = out + lane * 4; to[0] = r0; to[1] = r1; to[2] = r2; to[3] = r3; \
    for (int i = lane; i < n; i += 32) out[128 + i] = s[i];
"""

_EPILOGUE = r"""
#define BOX_ARGUMENTS const __grid_constant__ CUtensorMap map, uint32_t at, uint32_t bytes
extern "C" __global__ void tma_load(BOX_ARGUMENTS) {
    uint32_t bar = base() + 65536;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {0, 0}], [%2];" :: "r"(base() + at), "l"(&map), "r"(bar) : "memory");
        asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again;}" :: "r"(bar)
                     : "memory");
    }
}
extern "C" __global__ void tma_store(BOX_ARGUMENTS) {
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {0, 0}], [%1]; "
                     "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                     :: "l"(&map), "r"(base() + at) : "memory");
}
extern "C" __global__ void tma_nothing(BOX_ARGUMENTS) {
    uint32_t bar = base() + 65536;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory");
        asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again;}" :: "r"(bar)
                     : "memory");
    }
}

// One CTA of kernel `which`: 0, or CUDA's error.
extern "C" int launch(int which, int threads, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
    static unsigned char *source = nullptr, *target = nullptr;
    if (!source) { cudaMalloc(&source, 1 << 20); cudaMalloc(&target, 1 << 20); }
    if (in_bytes > (1 << 20) || out_bytes > (1 << 20)) return -1;
    cudaFuncSetAttribute((const void*)kernels[which], cudaFuncAttributeMaxDynamicSharedMemorySize, 131072);
    cudaMemcpy(source, in, in_bytes, cudaMemcpyHostToDevice);
    kernels[which]<<<1, threads, 131072>>>((const uint32_t*)source, (uint32_t*)target);
    cudaMemcpy(out, target, out_bytes, cudaMemcpyDeviceToHost);
    cudaError_t error = cudaDeviceSynchronize();
    return error ? error : cudaGetLastError();
}

// One TMA copy (0 load, 1 store, 2 the barrier alone) of a box of [rows, width] bytes of a [256, 1024] byte tensor.
extern "C" int launch_tma(int what, int itemsize, int rows, int width, int swizzle, uint32_t at) {
    static unsigned char* tensor = nullptr;
    static cuuint64_t no_stride = 1024;
    if (!tensor) cudaMalloc(&tensor, 256 * 1024);
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
    CUtensorMap map;
    cuuint64_t shape[2] = {(cuuint64_t)(1024 / itemsize), 256};
    cuuint32_t box[2] = {(cuuint32_t)(width / itemsize), (cuuint32_t)rows}, steps[2] = {1, 1};
    CUtensorMapDataType type = itemsize == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
        : itemsize == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
    int failed = ((decltype(&cuTensorMapEncodeTiled))encode)(&map, type, 2, tensor, shape, &no_stride, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (failed) return 1000 + failed;
    auto kernel = what == 0 ? tma_load : what == 1 ? tma_store : tma_nothing;
    cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 131072);
    kernel<<<1, 32, 131072>>>(map, at, (uint32_t)(rows * width));
    cudaError_t error = cudaDeviceSynchronize();
    return error ? error : cudaGetLastError();
}
"""


def mma_atoms() -> list[str]:
    """Every ``mma.sync`` atom that a Hopper chip has."""
    return [name for name, atom in ATOMS.items() if name.startswith("mma.sync") and "sm_90" in atom.archs]


def wgmma_atoms() -> list[str]:
    """wgmma atoms of five widths; where the types of A and B differ, of one."""
    wide = [(name, atom) for name, atom in ATOMS.items() if name.startswith("wgmma")]
    return [name for name, atom in wide if atom.shape[1] in (WGMMA_WIDTHS if atom.dtype_b is None else (64,))]


def wgmma_forms(atom: str) -> list[tuple[bool, int, int]]:
    """(A in registers, A MN-major, B MN-major) that there are: operands of 16 bits may be MN-major in shared memory."""
    majors = (0, 1) if ATOMS[atom].dtype.itemsize == 2 else (0,)
    return [(held, a, b) for held in (False, True) for a in majors for b in majors if not (held and a)]


def kernels() -> dict[str, str]:
    """Name of each kernel -> its definition; the position is its number."""
    out = {name: _matrix_kernel(name) for name in MATRICES}
    out |= {name: _mma_kernel(ATOMS[name]) for name in mma_atoms()}
    for name in wgmma_atoms():
        for form in wgmma_forms(name):
            out[wgmma_name(name, *form)] = _wgmma_kernel(ATOMS[name], *form, writes=True)
    out |= {f"access {name}": _access_kernel(name, ptx) for name, ptx in (ACCESSES | ZEROS).items()}
    for case in WGMMA_ACCESSES:
        atom, in_registers, a, b = case
        out[f"access {wgmma_name(*case)}"] = _wgmma_kernel(ATOMS[atom], in_registers, a, b, writes=False)
    return out


def wgmma_name(atom: str, in_registers: bool, a: int, b: int) -> str:
    """``wgmma.m64n64k16.bf16 A registers B MN``: where A is, and operands that are not K-major."""
    where = " A registers" if in_registers else " A MN" if a else ""
    return atom + where + (" B MN" if b else "")


def source() -> str:
    """The whole file."""
    bodies = kernels()
    names = [f"k{number}" for number in range(len(bodies))]
    text = [_PROLOGUE]
    for symbol, (name, body) in zip(names, bodies.items(), strict=True):
        text.append(f'// {name}\nextern "C" __global__ void {symbol}(const uint32_t* in, uint32_t* out) {{\n{body}}}\n')
    return "".join([*text, f"static Kernel kernels[] = {{{', '.join(names)}}};\n", _EPILOGUE])


def _matrix_kernel(name: str) -> str:
    verb, form, *trans = name.split(".")
    count = int(form[1:])
    registers = ", ".join(f"%{i}" for i in range(count))
    suffix = ".trans" if trans else ""
    listed = ", ".join(f'"{{}}"(r{i})' for i in range(count))
    if verb == "ldmatrix":
        asm = f'asm volatile("ldmatrix.sync.aligned.m8n8.{form}{suffix}.shared.b16 {{{registers}}}, [%{count}];" : '
        asm += listed.replace("{}", "=r") + ' : "r"(a) : "memory");'
    else:
        asm = f'asm volatile("stmatrix.sync.aligned.m8n8.{form}{suffix}.shared.b16 [%{count}], {{{registers}}};" :: '
        asm += listed.replace("{}", "r") + ', "r"(a) : "memory");'
    return f"    MATRIX_IN\n    {asm}\n    MATRIX_OUT\n"


def _words(atom: MmaAtom, operand: str) -> int:
    """32-bit registers of an operand in a lane."""
    count: int = {"a": atom.regs_a, "b": atom.regs_b, "c": atom.regs_c}[operand]
    return count * atom.dtype_of(operand).itemsize // 4


def _kinds(atom: MmaAtom) -> tuple[str, str, str, str]:
    """PTX types of A, B, C, and whether C's registers are "r", "f" or "d"."""
    a, _, b = atom.name.split(".", 2)[2].partition(".") if atom.name.startswith("wgmma") else (
        atom.name.split(".", 3)[3].partition("."))
    c = {"i": "s32", "f": "f64" if a == "f64" else "f32"}[atom.dtype_c.kind]
    return a, b or a, c, {"s32": "r", "f32": "f", "f64": "d"}[c]


def _mma_kernel(atom: MmaAtom) -> str:
    a, b, c, kind = _kinds(atom)
    double = kind == "d"
    counts = [_words(atom, operand) // (1 + double) for operand in "abc"]
    offsets = [0, 32 * counts[0], 32 * (counts[0] + counts[1])]
    word = "double" if double else "uint32_t"
    lines = [f"    int lane = threadIdx.x; const {word}* w = (const {word}*)in;"]
    for operand, count, offset in zip("ab", counts, offsets, strict=False):
        lines += [f"    {word} {operand}{i} = w[{offset} + lane * {count} + {i}];" for i in range(count)]
    type_c = {"r": "int32_t", "f": "float", "d": "double"}[kind]
    lines.append(f"    {type_c} c[{counts[2]}];")
    lines.append(f"    memcpy(c, w + {offsets[2]} + lane * {counts[2]}, sizeof c);")
    at = iter(range(99))
    lists = {operand: ", ".join(f"%{next(at)}" for _ in range(count)) for operand, count in zip("cab", [
        counts[2], counts[0], counts[1]], strict=True)}
    m, n, k = atom.shape
    shape = f"m{m}n{n}k{k}"
    asm = f"mma.sync.aligned.{shape}.row.col.{c}.{a}.{b}.{c} {{{lists['c']}}}, {{{lists['a']}}}, {{{lists['b']}}}, "
    asm += f"{{{lists['c']}}};"
    outs = ", ".join(f'"+{kind}"(c[{i}])' for i in range(counts[2]))
    unit = "d" if double else "r"
    names = [f"{operand}{i}" for operand, count in zip("ab", counts, strict=False) for i in range(count)]
    ins = ", ".join(f'"{unit}"({name})' for name in names)
    lines.append(f'    asm volatile("{asm}" : {outs} : {ins});')
    lines.append(f"    memcpy(({word}*)out + lane * {counts[2]}, c, sizeof c);")
    return "\n".join(lines) + "\n"


def _wgmma_kernel(atom: MmaAtom, in_registers: bool, a_major: int, b_major: int, writes: bool) -> str:
    """in: words of shared memory, descriptors of A and B (two words each, relative), A's registers, the image."""
    a, b, c, kind = _kinds(atom)
    count_a, count_c = _words(atom, "a"), _words(atom, "c")
    _, n, k = atom.shape
    lines = ["    int t = threadIdx.x; uint32_t n = in[0];"]
    if writes:
        lines += [
            f"    const uint32_t* image = in + 5 + 128 * {count_a}; uint32_t* s = (uint32_t*)smem;",
            "    for (int i = t; i < n; i += 128) s[i] = image[i];",
            '    __syncthreads(); asm volatile("fence.proxy.async;" ::: "memory");',
        ]
    lines += [
        "    uint64_t here = base() >> 4;",
        "    uint64_t da = (in[1] | (uint64_t)in[2] << 32) + here, db = (in[3] | (uint64_t)in[4] << 32) + here;",
        f"    uint32_t a[{count_a}]; for (int i = 0; i < {count_a}; i++) a[i] = in[5 + t * {count_a} + i];",
        f"    {'int32_t' if kind == 'r' else 'float'} c[{count_c}];",
        f"    for (int i = 0; i < {count_c}; i++) c[i] = i;",
    ]
    first = ", ".join(f"%{i}" for i in range(count_c))
    operands = [f"{{{', '.join(f'%{count_c + i}' for i in range(count_a))}}}" if in_registers else f"%{count_c}"]
    after = count_c + (count_a if in_registers else 1)
    operands.append(f"%{after}")
    operands.append("p")
    if kind == "f":
        operands += ["1", "1"]
    if atom.dtype.itemsize == 2:
        operands += ([] if in_registers else [str(a_major)]) + [str(b_major)]
    outs = ", ".join(f'"+{kind}"(c[{i}])' for i in range(count_c))
    ins = ", ".join(f'"r"(a[{i}])' for i in range(count_a)) if in_registers else '"l"(da)'
    asm = f"{{.reg .pred p; setp.eq.u32 p, 1, 1; wgmma.mma_async.sync.aligned.m64n{n}k{k}.{c}.{a}.{b} "
    asm += f"{{{first}}}, {', '.join(operands)};}}"
    lines += [
        '    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
        f'    asm volatile("{asm}" : {outs} : {ins}, "l"(db));',
        '    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");',
        f'    for (int i = 0; i < {count_c}; i++) asm volatile("" : "+{kind}"(c[i]) :: "memory");',
        f"    memcpy(out + t * {count_c}, c, sizeof c);",
    ]
    return "\n".join(lines) + "\n"


def _access_kernel(name: str, ptx: str) -> str:
    """in: for each of :data:`SLOTS` accesses the mask, 32 addresses, 32 offsets in global memory; then the memory that
    cp.async reads. Atomics put what they return into ``out``. One instruction for each access, in their order.
    """
    target = "out" if name.startswith("atom") else f"in + {SLOT_WORDS * SLOTS}"
    lines = [f"    int lane = threadIdx.x; uint64_t g = (uint64_t)__cvta_generic_to_global({target});"]
    for slot in range(SLOTS):
        at = SLOT_WORDS * slot
        lines += [
            f"    {{ uint32_t a = base() + in[{at + 1} + lane]; uint64_t from = g + in[{at + 33} + lane];",
            f'      if (in[{at}] >> lane & 1) asm volatile("{ptx}" :: "r"(a), "l"(from) : "memory"); __syncwarp(); }}',
        ]
    return "\n".join(lines) + "\n"
