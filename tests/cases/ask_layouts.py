"""Run in a process of its own (a bad question ends it): the linear layouts of tensors, from Triton's compiler.

The question, in JSON: ``num_warps`` and ``layouts``, name -> ``{"shape": ..}``, ``"mma": [warps_m, warps_n, m, n]``,
perhaps an ``"operand"`` of it, or ``"blocked": [size, threads, warps, order]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(question: dict[str, Any]) -> dict[str, Any]:
    import triton.experimental.gluon.language as ttgl
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    context = ir.context()
    ir.load_dialects(context)
    backend = make_backend(target)
    backend.load_dialects(context)
    first = ir.builder(context)
    module = first.create_module()
    options = backend.parse_options({"num_warps": question["num_warps"]})
    module.set_attr("ttg.target", first.get_string_attr(backend.get_target_name(options)))
    for name, value in (("num-warps", question["num_warps"]), ("num-ctas", 1), ("threads-per-warp", 32)):
        module.set_attr("ttg." + name, first.get_int32_attr(value))
    builder = gluon_ir.GluonOpBuilder(context)
    function = builder.get_or_insert_function(module, "f", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    builder.set_insertion_point_to_start(function.add_entry_block())

    def layout_of(asked: dict[str, Any]) -> Any:
        if "blocked" in asked:
            return ttgl.BlockedLayout(*asked["blocked"])
        warps_m, warps_n, *instruction = asked["mma"]
        mma = ttgl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps_m, warps_n], instr_shape=instruction)
        if "operand" in asked:
            return ttgl.DotOperandLayout(operand_index=asked["operand"], parent=mma, k_width=2)
        return mma

    answer = {}
    for name, asked in question["layouts"].items():
        linear = builder.to_linear_layout(layout_of(asked)._to_ir(builder), asked["shape"])
        answer[name] = {"reg": linear.reg_bases, "lane": linear.lane_bases, "warp": linear.warp_bases}
    return answer


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
