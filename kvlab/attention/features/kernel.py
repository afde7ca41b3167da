"""Features of attention calls in Triton: the kernel twins of their modules, compiled."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.attention.tiles.online_softmax import log_sum_kernel as log_sum
from kvlab.attention.tiles.online_softmax import weigh_kernel as weigh
from kvlab.attention.tiles.pages import in_pages_kernel as in_pages
from kvlab.attention.tiles.pages import in_slots_kernel as in_slots
from kvlab.attention.tiles.pages import row_count_kernel as row_count
from kvlab.attention.tiles.pages import row_of_kernel as row_of
from kvlab.attention.tiles.rows import packed_rows_kernel as packed_rows
from kvlab.triton_support.twins import compiled

from .intervals import given_positions_kernel as given_positions
from .intervals import key_count_kernel as key_count
from .intervals import key_range_kernel as key_range
from .intervals import padding_kernel as padding
from .intervals import split_keys_kernel as split_keys
from .intervals import visible_end_kernel as visible_end
from .qv import add_values_scores_kernel as add_values_scores
from .rope import rotate_kernel as rotate
from .scales import head_scale_kernel as head_scale
from .scales import key_scales_kernel as key_scales
from .scales import nope_scales_kernel as nope_scales
from .scales import over_minima_kernel as over_minima
from .scales import rope_scales_kernel as rope_scales
from .scales import scale_weights_kernel as scale_weights
from .scales import value_scales_kernel as value_scales
from .scales import weighted_minima_kernel as weighted_minima
from .scores import adjust_kernel as adjust
from .scores import hide_kernel as hide
from .scores import row_terms_kernel as row_terms
from .sinks import start_rows_kernel as start_rows

globals().update(compiled(
    triton.jit, tl, add_values_scores, adjust, given_positions, head_scale, hide, in_pages, in_slots, key_count,
    key_range, key_scales, log_sum, nope_scales, over_minima, packed_rows, padding, rope_scales, rotate, row_count,
    row_of, row_terms, scale_weights, split_keys, start_rows, value_scales, visible_end, weigh, weighted_minima,
))
