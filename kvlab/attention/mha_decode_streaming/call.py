"""A streaming decode: a paged decode whose rows the strips divide, on the one machine that streams."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.backends import choose_backend
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.options import Arch
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.mha_decode.call import PagedDecode
from kvlab.attention.mha_decode.config import problem_of
from kvlab.common.checks import require

from .config import choose_config

DEPTHS = (64, 128, 256, 512)


class StreamingDecode(PagedDecode):
    """Of ``mha_decode_streaming_paged``."""

    operation = "mha_decode_streaming"
    arch: Arch = "gfx950"

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        q, k_cache, v_cache, *_ = self.arrays
        depths = int(q.shape[-1]), int(v_cache.shape[-1])
        fits = depths[0] == depths[1] and depths[0] in DEPTHS
        require(fits, f"head dimensions {depths[0]} and {depths[1]}", "both 64, 128, 256 or 512")
        chosen, reason = choose_backend(q, self.backend)
        emulated, problem = self.arch if chosen == "emulator" else None, problem_of(*self.arrays[:4])
        if emulated:
            check_emulated(self.operation, emulated, q, {"k_cache": k_cache, "v_cache": v_cache})
        if problem.pairs:
            check_fp8_gpu(q)
        target = target_of(q, emulated)
        config = choose_config(
            problem, processors=target.processors, num_splits=self.num_splits, arch=target.arch,
            batch_invariant=self.batch_invariant,
        )
        plan = Explanation(self.operation, chosen, reason, config, config.grid(problem), emulated)
        return plan, problem, chosen
