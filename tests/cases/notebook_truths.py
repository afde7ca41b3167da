"""What the notebooks' own objects say to their questions, in the place of the question."""

from __future__ import annotations

import copy
import re
from typing import Any

from kvlab.exercises import solution
from kvlab.exercises.course import QUESTIONS

EXTRAS = ["torch", "triton", "transformers", "accelerate", "gguf", "matplotlib", "anywidget", "rich", "typer"]

TRUTHS = {
    "00_start_here": {
        "00.key_bytes": """
truth = capture.k[LAYER, TOKEN, HEAD].nbytes
""",
        "00.group": """
truth = capture.group
""",
        "00.page": """
truth = TOKEN // pool.page_size
""",
    },
    "01_follow_one_token": {
        "01.mended": "",
        "01.slot": """
truth = 9
""",
        "01.address": """
truth = place.address(row, 0)
""",
        "01.lanes": """
truth = np.unique(np.argwhere(fragments.row == row)[:, 0] % 32)
""",
    },
    "02_layouts": {
        "02.mended": "",
        "02.transposed": "",
        "02.offset": """
truth = Layout.row_major(64, 128)(3, 5)
""",
        "02.numbers": """
truth = Layout('(32,33):(40,1)').cosize
""",
        "02.columns": """
other = tensor.vectorize(1, 4).distribute(Layout.row_major(8, 2), 3)
truth = other.load()[0, :, 0] % 16
""",
        "02.start": """
truth = blocked_product(Layout.row_major(2, 4), Layout.row_major(2, 3))(2, 8)
""",
    },
    "03_swizzles_and_banks": {
        "03.mended": "",
        "03.place": "",
        "03.passes": """
truth = wavefronts('ld.shared.b32', lane * 8).wavefronts
""",
        "03.sent_to": """
truth = swizzle(400)
""",
        "03.middle": """
truth = Swizzle(2, 4, 3, 'byte').to('bf16').base
""",
    },
    "04_fragments": {
        "04.mended": "",
        "04.holder": """
lanes_of_c, registers_of_c = np.indices((32, mma.regs_c))
rows, columns = mma.c(lanes_of_c, registers_of_c)
truth = np.argwhere((rows == 10) & (columns == 5))[0, 0]
""",
        "04.addresses": """
truth = lane[:16] * 16
""",
        "04.element": """
truth = accumulators(register=2, lane=6, warp=1)
""",
        "04.base_offset": """
truth = 8832 // 128 % 8
""",
        "04.amd_holder": """
lanes_of_c, registers_of_c = np.indices((64, mfma.regs_c))
rows, columns = mfma.c(lanes_of_c, registers_of_c)
truth = np.argwhere((rows == 5) & (columns == 3))[0, 0]
""",
    },
    "05_tma": {
        "05.mended": "",
        "05.longest": """
truth = descriptor.swizzle.of('64B').granularity('float32')
""",
        "05.zero_rows": """
smem = Memory(descriptor.image_bytes)
tma.load(descriptor, (-4, 0), smem, 0)
loaded = smem.load(descriptor.image(0), np.float16, 1)[..., 0]
truth = np.count_nonzero((loaded == 0).all(axis=1))
""",
        "05.byte": """
truth = kv.descriptor.image(2 * int(kv.offsets[1]))[1, 0, 8]
""",
        "05.expected": """
sixteen = create_tma_tile_gather4(tensor, 64, "128B", tile_height=16)
truth = sixteen.transaction_bytes
""",
    },
    "06_kv_caches": {
        "06.mended": "",
        "06.page_and_slot": """
truth = (int(pool.lookup_table[2, 40 // PAGE]), 40 % PAGE)
""",
        "06.distance": """
first, second = (int(keys.block_paged_ptr(2, t, 0).byte_address) for t in (15, 16))
truth = second - first
""",
        "06.nbytes": """
truth = 2 * (D8 * fp8.itemsize + quantised.head_dim_granularity * quantised.scale_dtype.itemsize)
""",
        "06.row": """
truth = cache.get_tma_row(37)
""",
    },
    "07_kv_buffer": {
        "07.byte": """
image = keys.smem_image().slots
truth = 16 * int(np.flatnonzero((image[:1024] == (20, 5)).all(axis=1))[0])
""",
        "07.columns": """
row_70 = part.smem_image().stage(1).slots
vectors = row_70[row_70[:, 0] == 70 - 64, 1]
truth = (8 * vectors.min(), 8 * vectors.max() + 7)
""",
        "07.works": """
unswizzled_groups = replace(two_groups, swizzle=None)
right = DecodeStreamingKVBuffer(unswizzled_groups, pool128.get_key_cache(0), 0, 0, num_keys=LENGTH)
truth = 'None' if right.matrix_order else ''
""",
        "07.wait": """
truth = next(n for n in (3, 2, 1, 0) if pipeline(stages=3, ahead=2, wait=n).run().fault is None)
""",
    },
    "08_kv_mma_op": {
        "08.mended": "",
        "08.key_and_depth": """
held = keys.fragment_map()
truth = (held.row[50, 1, 0], held.col[50, 1, 0])
""",
        "08.mmas": """
truth = instructions
""",
        "08.v_keys": """
truth = values.fragment_map().row[5, 0]
""",
        "08.warp_keys": """
rows = latent.fragment_map().row[2 * 64 : 3 * 64]
truth = (rows.min(), rows.max())
""",
    },
    "09_mha_decode": {
        "09.mended": "",
        "09.rows": """
truth = capture.group
""",
        "09.nbytes": """
truth = 2 * (TOKEN + 1) * capture.kv_heads * capture.head_dim * 2
""",
        "09.working": """
size = ceildiv(ceildiv(300, 4), config.BN) * config.BN
truth = ceildiv(300, size)
""",
        "09.sharing": """
truth = len(schedule.order_of(0))
""",
    },
    "10_mha_prefill": {
        "10.mended": "",
        "10.loaded": """
truth = int((tiles != 3).sum())
""",
        "10.k_rows": """
truth = sum((min(last + 1, N) for last in (127, 255, 298)))
""",
        "10.empty": """
_, lse = mha_prefill(q[:, :5], k[:, :2], v[:, :2], return_lse=True)
truth = int(np.isneginf(lse[0, :, 0]).sum())
""",
    },
    "11_mla": {
        "11.factor": """
truth = round(128 * (192 + 128) / (512 + 64))
""",
        "11.nbytes": """
read = int(N * (LATENT + ROPE) * 2)
truth = read
""",
        "11.scale": """
truth = 128 + 64
""",
        "11.more": """
truth = 512 + 64 - (128 + 64)
""",
    },
    "12_fp8_kv": {
        "12.mended": "",
        "12.stored": """
truth = float(np.float32(18.9).astype(fp8))
""",
        "12.nbytes": """
truth = 2 * (D + 4)
""",
        "12.x": """
truth = -10 - 8
""",
    },
    "13_on_the_chip": {
        "13.byte": """
truth = 2 * int(np.flatnonzero(dump == (8 + 5) * 128 + 16)[0])
""",
        "13.mode": """
truth = other["swizzle"]
""",
        "13.place": """
tile = atom.tile_c(chip)
rows, columns = atom.c(np.arange(32)[:, None], np.arange(4))
assert tile[rows[9, 2], columns[9, 2]] == chip[9, 2]
truth = (rows[9, 2], columns[9, 2])
""",
        "13.passes": """
truth = wavefronts('atom.shared.cas.b32', 0 * lane, mask=255).wavefronts
""",
        "13.nbytes": """
truth = k.nbytes + v.nbytes
""",
    },
    "14_debug_your_kernel": {
        "14.behind": """
truth = int((np.arange(args["BLOCK"]) >= args["columns"]).sum())
""",
        "14.factor": """
truth = (28 + (64 - 50) * np.exp(0.0)) / 28
""",
        "14.neutral": """
sums = {value: np.pad(x, ((0, 0), (0, 14)), constant_values=value).sum(1) for value in (0.0, 1.0, -np.inf)}
(truth,) = [value for value, found in sums.items() if np.allclose(found, x.sum(1))]
""",
        "14.place": "",
    },
    "15_xray": {
        "15.phases": """
truth = plain.findings[0].cures[0].layout.per_phase, plain.findings[0].cures[0].layout.max_phase
""",
        "15.moved": """
truth = 32 * load.sectors
""",
        "15.passes": """
read = next(edge for edge in plain.edges if "ldmatrix" in str(edge))
truth = read.wavefronts // read.ideal
""",
        "15.saved": """
truth = sum(edge.wavefronts or 0 for edge in plain.edges) - sum(edge.wavefronts or 0 for edge in cured.edges)
""",
        "15.key": """
truth = layout.offset_bases[9][0]
""",
    },
    "16_in_your_stack": {
        "16.mended": "",
        "16.slot": """
truth = int(slots[20])
""",
        "16.together": """
truth = pool.num_pages - pool.num_free
""",
        "16.nbytes": """
small = KVLabCache(model.config, num_pages=16, page_size=4, dtype=torch.float8_e4m3fn)
with torch.no_grad():
    copy.deepcopy(model).bfloat16()(ids[1:], **{CACHE_ARGUMENT: small})
stored = small.pages.layers[0]
truth = (stored.blocks.nbytes + stored.scales.nbytes) // (16 * 4)
""",
    },
    "17_kv_formats": {
        "17.rows": "",
        "17.place": """
truth = formats["vllm.blocks_first"].where("v", slot=3, head=1, dim=5)
""",
        "17.per_token": """
truth = known_format("flashinfer.nvfp4", pages=1, page_size=16, heads=8, dim=128).bytes_per_token
""",
        "17.whose": """
held, where = writer.field("v_scale").find(8 * reader.where("v_scale", slot=0, head=0, dim=16))
assert held and where["dim"] == 0
truth = int(where["slot"])
""",
    },
    "18_linear_layouts": {
        "18.element": """
truth = blocked(register=3, lane=13, warp=1)
""",
        "18.bases": """
truth = [[bit % 16, bit // 16 * 8] for bit in (1, 2, 4, 8, 16)]
""",
        "18.alone": """
truth = 2 ** len(along["register"])
""",
        "18.copies": """
truth = 2 ** len(wide.to_linear_layout((8, 16)).kernel())
""",
        "18.path": """
two = NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])
truth = way(two.to_linear_layout((64, 64)), DotOperandLayout(0, two, 2).to_linear_layout((64, 64)))
""",
    },
}


def answered(notebook: Any) -> Any:
    """The notebook with a cell more behind each cell that asks: the right answer, held against what the notebook's
    objects say, the question asked again, and the answer taken back. The new cells have the tag "answered"."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        asked = re.search(r'\bask\("(\d\d)\.(\w+)"', cell.source) if cell.cell_type == "code" else None
        if not asked:
            continue
        name = f"{asked[1]}.{asked[2]}"
        lines = [solution(name), cell.source]
        if not callable(QUESTIONS[name].answer):
            lines.append("import numpy, kvlab.exercises.course")
            lines.append(next(truths[name] for truths in TRUTHS.values() if name in truths))
            right = f"kvlab.exercises.course.QUESTIONS['{name}'].answer"
            lines.append(f"assert numpy.array_equal(truth, {right}), truth")
        lines.append(f"{asked[2]} = None")
        again = copy.deepcopy(cell)
        again.id, again.source, again.metadata["tags"] = f"answered-{asked[2]}", "\n".join(lines), ["answered"]
        cells.append(again)
    notebook.cells = cells
    return notebook


def without_extras(notebook: Any) -> Any:
    """The notebook, run where nothing of an extra can be imported, up to the cell that brings what asks Triton."""
    cells = notebook.cells
    gone, back = (copy.deepcopy(next(cell for cell in cells if cell.cell_type == "code")) for _ in range(2))
    gone.update(id="gone", source=f"import sys; gone = dict.fromkeys({EXTRAS}); sys.modules.update(gone)")
    back.update(id="back", source="[sys.modules.pop(name) for name in gone]")
    for cell in (gone, back):
        cell.metadata["tags"] = ["answered"]
    asks = next((n for n, cell in enumerate(cells) if "import compiler_staging" in cell.source), len(cells))
    notebook.cells = [gone, *cells[:asks], back, *cells[asks:]]
    return notebook
