"""The questions of the notebooks, by notebook and the variable that takes the answer.

Each answer is held against what the notebook's own objects say when the notebooks are run as tests.
"""

from __future__ import annotations

from .judges import ElementPlaces, Formula, merged, narrow_swizzle, rows_of_split_keys, scaled_values, swizzle_of_floats
from .question import Question

ELEMENTS = "so many elements; bytes are asked, two for each"
WAS = "that is how it was"
BYTES = "so many bytes; elements are asked"

QUESTIONS = {
    # 0. Start here
    "00.key_bytes": Question(128, ["How many bytes has a number of bfloat16?", "64 numbers of two bytes."],
                             [(64, ELEMENTS), (384, "these are all three heads")]),
    "00.group": Question(3, ["Nine share three."], [(9, "these are all query heads")]),
    "00.page": Question(8, ["Page 0 has tokens 0 to 15, page 1 the tokens 16 to 31."],
                        [(9, "pages are counted from 0"), (16, "that is a page's size")]),
    # 1. Follow one token
    "01.slot": Question(
        9, ["A page holds 16 tokens: 0 to 15 are in the first.", "137 = 8 * 16 + ..."],
        [(8, "that is the page, counted from 0"), (10, "slots are counted from 0")],
    ),
    "01.address": Question(
        1168,
        ["Which row of its tile is the token, and with which place does vector 0 of it change?",
         "Row 9 starts at byte 9 * 128; vector 0 lies at place 0 ^ (9 % 8) of it."],
        [(1152, "there it would start without the swizzle"), (584, ELEMENTS)],
    ),
    "01.lanes": Question(
        [4, 5, 6, 7],
        ["In operand B a key is a column.", "Follow its eight boxes in the picture, then think of the other k steps."],
        [([36, 37, 38, 39], "these are threads; a lane is a thread's number within its warp")],
    ),
    "01.mended": Question(
        Formula("2 * (page * 18432 + slot * 192 + head * 64 + number)",
                [("page * 18432 + slot * 192 + head * 64 + number", "these are numbers, bytes are asked")],
                page=(0, 1, 22), slot=range(16), head=range(3), number=(0, 1, 63)),
        ["In which slots is it wrong, and in which not?", "What lies between two tokens of a page? All heads."],
    ),
    # 2. Layouts
    "02.offset": Question(
        389, ["A step down costs a whole row."],
        [(323, "so it is counted down the columns"),
         (778, "these are bytes of 2 a number; an offset counts numbers")],
    ),
    "02.numbers": Question(
        1273, ["Where does the last entry lie?", "The last row needs no padding behind it."],
        [(1280, "the last row has no need of its padding"), (1056, "so many entries there are, without padding"),
         (1272, "that is the offset of the last entry; count it, too")],
    ),
    "02.mended": Question(
        ElementPlaces("(32,33):(33,1)", "32 rows come first, then 33 columns", ("row", "column")),
        ["Which entry lies where entry (1, 0) does?", "How many numbers has a row?"],
    ),
    "02.columns": Question(
        [4, 12], ["Where among the threads does thread 3 stand?",
                  "Thread 3 stands in row 1, column 1 of the threads; the dealing goes on to the right."],
        [([1, 3], "these are vectors; a vector has four columns")],
    ),
    "02.start": Question(40, ["How many blocks come before it?", "It is the last of 6 blocks of 8 numbers."],
                         [(47, "that is where the block ends")]),
    "02.transposed": Question(
        ElementPlaces("(32,8):(1,40)", "32 columns come first, then 8 rows", ("column", "row")),
        ["Which comes first, and which of the two has the step of 1?",
         "The shape is (32,8); a row further is 40 numbers further."],
    ),
    # 3. Swizzles and banks
    "03.passes": Question(2, ["Which banks do lanes 0 and 16 use?"],
                          [(1, "so it would be if the floats were 4 bytes apart"), (16, "so many lanes share a pass")]),
    "03.sent_to": Question(
        416, ["Which row of 128 bytes, and which 16-byte vector of it, is byte 400?",
              "400 = 3 * 128 + 1 * 16: row 3, vector 1."],
        [(400, "the row is not 0, so the byte moves"), (448, "3 is not added to the vector: it is XORed")],
    ),
    "03.middle": Question(3, ["What becomes of an address bit when an element has two bytes?",
                              "An element of 2 bytes is one address bit fewer."],
                          [(4, "that is the number in bytes"), (2, "one bit fewer, not two")]),
    "03.mended": Question(
        swizzle_of_floats,
        ["Bits of what does the kernel count? A vector has four of them, a row 64.",
         "Bits 0 and 1 say which float of a vector, the next three which vector; the row begins at bit 6.",
         "Three bits from bit 2 on, with those that stand from bit 6 on."],
        solution='mended = Swizzle(3, 2, 4, "fp32")',
    ),
    "03.place": Question(
        narrow_swizzle, ["How many rows of 64 bytes make one row of the 32 banks?",
                         "Two rows share a row of the banks, so neighbours may keep the same order.",
                         "XOR the vector with the pair of rows it is in, modulo 4."],
        solution="def place(row, vector):\n    return vector ^ row // 2 % 4",
    ),
    # 4. Fragments
    "04.holder": Question(10, ["Row 10 belongs to the same lanes as row 2.",
                                "A row has four lanes of two columns each."]),
    "04.addresses": Question([16 * row for row in range(16)],
                             ["How long is a row of B, in bytes?", "Rows are 16 bytes long, one after the other."],
                             [([8 * row for row in range(16)], "these are elements; addresses count bytes")]),
    "04.mended": Question(
        Formula("(lane // 4 + register // 2 * 8) * 8 + lane % 4 * 2 + register % 2",
                [("lane // 4 * 8 + lane % 4 * 2 + register", WAS)], lane=range(32), register=range(4)),
        ["Look at the picture: in which rows are the four numbers of lane 5?",
         "Registers 2 and 3 are 8 rows below registers 0 and 1."],
    ),
    "04.element": Question((9, 12), ["Lane 6 is lane 2 and lane 4.",
                                        "Add up their vectors, those of register 2 and warp 1."],
                           [((1, 12), "the warp is missing")]),
    "04.base_offset": Question(5, ["Count in rows of 128 bytes.", "Count from the last multiple of 1024."],
                               [(69, "that is counted from 0; the pattern repeats each 8 rows")]),
    "04.amd_holder": Question(19, ["First the column, then the group of four rows.",
                                   "Columns are lanes 0 to 15; rows 4 to 7 are the next 16 lanes."]),
    # 5. TMA
    "05.longest": Question(16, ["The span of the swizzle is 64 bytes."], [(64, BYTES), (32, "a float32 has 4 bytes")]),
    "05.zero_rows": Question(4, ["Rows -4, -3, ... do not exist."], [(12, "these are the rows that exist")]),
    "05.mended": Question(
        Formula("row * 128 + (vector ^ row % 8) * 16",
                [("row * 32 + vector * 16", WAS), ("row * 128 + vector * 16", "the swizzle is missing"),
                 ("row * 32 + (vector ^ row % 8) * 16", "how far is it from row to row?")],
                row=range(8), vector=range(2)),
        ["The picture has the bytes at the left.", "Rows are 128 bytes apart; vector v of row r is at v ^ (r % 8)."],
    ),
    "05.byte": Question(
        1152, ["How many columns does a box have?",
               "Vector 9 is vector 1 of the second box, which starts at byte 1024.",
               "The row is 1 of its box: place 1 XOR 1, one row of 128 bytes down."],
        [(1168, "so it would be without the swizzle"), (576, ELEMENTS)],
    ),
    "05.expected": Question(2048, ["A row that is taken twice is copied twice.", "Rows of 64 numbers of float16."],
                            [(1024, ELEMENTS)]),
    # 6. KV caches
    "06.page_and_slot": Question(
        (7, 8), ["It is in slot 40 % 16 of logical page 40 // 16.", "Or ask: draw_page_table(..., token=(2, 40))."],
        [((2, 8), "that is the sequence's own third page; which page of the pool is it?")],
    ),
    "06.distance": Question(
        -20224, ["How many pages, and how many slots, lie between them?",
                 "2 bytes * (pages apart * page stride + slots apart * token stride); slot 15 to slot 0."],
        [(-10112, ELEMENTS), (20224, "token 16 lies before token 15")],
    ),
    "06.nbytes": Question(272, ["What has a head: numbers of which size, and how many scales?",
                                "For each head: 128 numbers of 1 byte and 128 / 64 scales of 4 bytes."],
                          [(136, "that is one head"), (256, "the scales are missing"), (544, "K alone is asked")]),
    "06.row": Question(
        101, ["From a page to the next there are 16 rows of each of the 3 layers.",
              "In the picture index 2 is row 2, and index 17, the second token of page 1, is row 49."],
        [(37, "that is the index among the layer's own rows"),
         (117, "that is counted from the first row of layer 0; index 0 of our layer is row 0")],
    ),
    "06.mended": Question(
        Formula("index // 16 * 48 + 16 + index % 16",
                [("index * 3 + 1", WAS), ("index // 16 * 48 + index % 16", "that is the row of layer 0")],
                index=range(96)),
        ["Pages follow one another, each with its three layers.", "A page has 48 rows; those of layer 1 begin at 16."],
    ),
    # 7. KV buffers
    "07.byte": Question(
        5440, ["In which block is column 40, and which vector of it is row 20's?",
               "Column 40 is in block 1, from byte 64 * 64 on; vector 20 * 4 + 1 is at place swizzle(81)."],
        [(5392, "so it would be without the swizzle"), (2720, ELEMENTS)],
    ),
    "07.wait": Question(1, ["Which copies are in flight when tile n shall be read?",
                            "Tiles n and n + 1; n must have landed."],
                        [(2, WAS + ": tile n itself may be on its way"),
                         (0, "no byte would be wrong, but none would be on its way while a tile is read"),
                         (3, "that waits for nothing")]),
    "07.columns": Question((0, 31), ["A load takes the next keys, not the next columns."],
                           [((32, 63), "these would be the columns of the second block of each key")]),
    "07.works": Question("None", ["What does the warning say?"]),
    # 8. Fragments of a KV buffer
    "08.key_and_depth": Question(
        (50, 8), ["What distinguishes lanes 0 to 31 from lanes 32 to 63?",
                  "Lanes 0 to 31 hold the 32 keys of a fragment, depth 0 to 7; the others the same, 8 to 15."],
        [((18, 8), "that is its first fragment"), ((50, 0), "lanes from 32 on hold the other depth")],
    ),
    "08.mmas": Question(16, ["An instruction has 32 keys and 16 columns.", "Strips x k groups x fragments of keys."]),
    "08.v_keys": Question(
        [0, 1, 2, 3, 8, 9, 10, 11],
        ["Which scores does a lane hold?", "A lane below 32 has those of keys 0 to 3, 8 to 11, 16 to 19, ..."],
        [([0, 1, 2, 3, 4, 5, 6, 7], "so it would be in plain order: whose scores are they?")],
    ),
    "08.mended": Question(
        Formula("lane // 32 * 4 + e % 4 + e // 4 * 8",
                [("lane // 32 * 8 + e", WAS + ": in plain order")], lane=range(64), e=range(8)),
        ["Which keys' scores does lane 37 hold?", "Four in a row, then four 8 keys further; upper lanes begin at 4."],
    ),
    "08.warp_keys": Question((64, 95), ["Warp w owns keys w * WN to (w + 1) * WN - 1."],
                             [((64, 96), "the last key is meant, not the one after")]),
    # 9. Decode
    "09.rows": Question(3, ["How many query heads share a KV head?"],
                        [(9, "these are all query heads"), (16, "that is the tile")]),
    "09.nbytes": Question(230_400, ["K and V have as many.", "2 * keys * heads * 64 * 2 bytes"],
                          [(115_200, "so many bytes, or so many numbers: K and V, two bytes each")]),
    "09.working": Question(3, ["How many keys has a split?", "A split has 128 keys."],
                           [(4, "the last one begins behind the end")]),
    "09.mended": Question(
        merged,
        ["What is the weight of a split? Its part of the sum of all exponentials.",
         "exp(lse) is a split's sum; take the largest lse away before, so that nothing overflows.",
         "w = exp(lses - lses.max()), then w @ outs / w.sum()"],
        solution="def mended(outs, lses):\n    w = np.exp(lses - lses.max())\n    return w @ outs / w.sum()",
    ),
    "09.sharing": Question(36, ["A share is the sum of the blocks over the teams, rounded up.",
                                "How many shares do the long sequence's blocks fill?"]),
    # 10. Prefill
    "10.loaded": Question(11, ["All but those that are masked in full."],
                          [(15, "those that are masked in full are among them")]),
    "10.k_rows": Question(683, ["Row r sees the keys 0 to r.", "128 + 256 + ..."],
                          [(768, "the last program does not read past the end"), (680, "row r sees r + 1 keys")]),
    "10.empty": Question(3, ["Query i sees the keys up to i + 2 - 5."], [(2, "so many rows see a key")]),
    "10.mended": Question(
        Formula("j <= i + n - S", [("j < i + n - S", "a query sees its own key"), ("j <= i", WAS),
                                   ("j <= i + n", "how many queries are there?")],
                i=range(4), j=range(9), S=(4,), n=(4, 7, 9)),
        ["Which key is the last query's own? The last one.", "Query i has the token n - S + i."],
    ),
    # 11. MLA
    "11.factor": Question(71, ["128 * (192 + 128) numbers a token, against 512 + 64."],
                          [(80, "the numbers for the position belong to the row"), (43, "that is keys alone")]),
    "11.nbytes": Question(267_904, ["rows * columns * 2, once"], [(535_808, "V is K's memory"), (133_952, ELEMENTS)]),
    "11.scale": Question(192, ["How many numbers had a head's key before it was absorbed?", "128 and 64."],
                         [(576, "that is the query after absorbing"), (512, "that is the latent row"),
                          (128, "the part of the position belongs to the key")]),
    "11.more": Question(384, ["One multiplication a column."], [(576, "that is all of the absorbed ones")]),
    # 12. fp8
    "12.stored": Question(18, ["The nearest multiple of 2."], [(20, "18 is nearer"), (19, "it has no such number")]),
    "12.nbytes": Question(136, ["64 numbers of one byte and one scale of four, twice."],
                          [(68, "that is K alone"), (128, "the scales are missing")]),
    "12.mended": Question(
        scaled_values,
        ["To what does a scale belong: a key, or a column of V?", "The column of P that meets the key takes it."],
        solution="def mended(p, v, s):\n    return p * s @ v",
    ),
    "12.x": Question(-18, ["Half of 2^-9 is 2^-10.", "Then the factor 2^8."], [(-17, "half of it, besides")]),
    # 13. On the chip
    "13.byte": Question(752, ["Column 16 is vector 2 of its row.", "In row 5 it goes to vector 2 XOR 5."],
                        [(672, "so it would be without the swizzle")]),
    "13.mode": Question("64B", ["In which rows does vector 0 lie at another place?",
                                "The place changes once in two rows, and takes four values."],
                        [("128B", "its rows would be 128 bytes apart"), ("32B", "a row has 64 bytes")]),
    "13.place": Question((10, 2), ["Lane // 4 is the row, 2 * (lane % 4) the column.",
                                   "Registers 2 and 3 are 8 rows below."], [((2, 2), "that is register 0")]),
    "13.passes": Question(16, ["Eight lanes want one bank and none shares.", "Each pass is taken twice."],
                          [(8, "each pass is taken twice")]),
    "13.nbytes": Question(8_388_608, ["2 sequences x 2048 keys x 4 heads x 128 numbers of 2 bytes, twice."],
                          [(4_194_304, "that is K alone, or numbers for bytes")]),
    # 14. Debug your kernel
    "14.behind": Question(14, ["The row has 50 columns, the block 64."], [(50, "these are the row's own")]),
    "14.factor": Question(1.5, ["What is exp(0 - 0), and how often is it added?", "28 + 14 in place of 28."],
                          [(14, "so much is added"), (42, "that is the sum")]),
    "14.neutral": Question(0, ["Which number changes no sum?"], [(float("-inf"), "the sum would be lost")]),
    "14.place": Question(
        Formula("row * ((columns + 15) // 16) + column // 16",
                [("row * (columns // 16) + column // 16", WAS), ("row * 4 + column // 16", "rows may have 3 groups"),
                 ("row * (columns // 16 + 1) + column // 16", "48 columns are three groups, not four")],
                row=range(4), column=range(48), columns=(48, 50, 64)),
        ["How many scales has a row of 50 columns, and how many does the kernel step over?",
         "The last group of a row may be short; round up."],
    ),
    # 15. X-ray
    "15.moved": Question(32768, ["A sector has 32 bytes.", "The load moves 1024 of them."],
                         [(4096, "so many bytes are wanted"), (1024, "these are sectors"),
                          (16384, "so long is what the floats lie in; each sector of it moves for two instructions")]),
    "15.passes": Question(8, ["In which bank does each row of a matrix begin?"], [(1, "so it would be with the cure")]),
    "15.phases": Question((1, 8), ["Eight rows shall have eight different numbers r // per_phase % max_phase."],
                          [((2, 4), "rows 0 and 1 have the same place"), ((1, 4), "rows 0 and 4 have the same place"),
                           ((8, 1), "that is no swizzle")]),
    "15.saved": Question(448, ["The table has wavefronts before and after."], [(128, "so many are left")]),
    "15.key": Question(17, ["A key has 4 vectors.", "Vector 64 of the block is vector swizzle(64) of the tile."],
                       [(16, "so it would be without the swizzle")]),
    # 16. In your stack
    "16.slot": Question(84, ["Its page is table[0, 20 // 16], its place there 20 % 16."],
                        [(20, "that is the token's own number; where does its page begin?")]),
    "16.mended": Question(
        Formula("(length - 1) % page + 1", [("length % page", WAS)], length=range(1, 70), page=(1, 16, 64)),
        ["Which lengths does it get wrong?", "A page that is full holds page tokens, not 0."],
    ),
    "16.together": Question(5, ["All share the first page.", "Each branch wrote into the second."],
                            [(8, "the first page is one for all of them")]),
    "16.nbytes": Question(80, ["K and V, 2 heads each.", "16 bytes of e4m3 and 4 of the scale."],
                          [(64, "the scales are missing"), (40, "that is K alone")]),
    # 17. KV formats
    "17.place": Question(
        7434,
        ["How many bytes of K come first?", "6144 of K; a slot has 3 heads of 128 bytes, dim 5 is 10 bytes further."],
        [(3717, ELEMENTS), (1290, "that is where K's lies"), (8586, "so it would be in HND, heads before slots")],
    ),
    "17.per_token": Question(
        1152, ["Two e2m1 to a byte, and a scale of one byte for 16 dims.", "8 heads of 64 + 8 bytes, for K and for V."],
        [(1024, "the scales are missing"), (576, "that is K alone"), (144, "that is one head"),
         (216, "that is a token of this model")],
    ),
    "17.whose": Question(
        1, ["Slot 0, dim 16 is the second entry to the reader. What has the writer as its second?",
            "To the writer the scales of dim 0 of four slots are side by side."],
        [(0, "that is whose it takes it for"), (4, "the next four slots come after all dims of the first four")],
    ),
    "17.rows": Question(
        rows_of_split_keys,
        ["The numbers have two bytes: raw.view(np.uint16).",
         "As an array the split keys are [3, 8, 16, 8]: head, dim // 8, slot, dim % 8.",
         "The rows are [slot, head, dim // 8, dim % 8]: which transpose is that?"],
        solution="def rows(raw):\n    split = raw.view(np.uint16).reshape(3, 8, 16, 8)\n"
                 "    return split.transpose(2, 0, 1, 3).reshape(-1).view(np.uint8)",
    ),
    # 18. Linear layouts
    "18.element": Question((11, 7), ["Register 3 is registers 1 and 2; lane 13 is lanes 1, 4 and 8.",
                                     "Rows: 1 of lane 4, 2 of lane 8, 8 of the warp."],
                           [((7, 11), "rows come first"), ((3, 7), "the warp is missing")]),
    "18.bases": Question([[1, 0], [2, 0], [4, 0], [8, 0], [0, 8]],
                         ["Which bit of the lane chooses the half?", "The lower four bits are the row's."],
                         [([[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], "rows come first"),
                          ([[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]], "so lanes 16 to 31 would begin at column 1")]),
    "18.alone": Question(16, ["How many bits of the register step along the columns?", "Four of its five bits."],
                         [(32, "so many it holds, of two rows"), (4, "so many bits they are"),
                          (64, "that is the whole row")]),
    "18.copies": Question(4, ["How many columns of the matrix are zero there?", "Both bits of the warp."],
                          [(2, "so it is for 16 x 16"), (1, "then nothing would be counted twice")]),
    "18.path": Question("shared memory", ["Who holds column 8 of the scores, and who needs it?"],
                        [("registers", "so it is where a warp has whole rows"),
                         ("shuffles", "a shuffle reaches the lanes of one warp")]),
}
