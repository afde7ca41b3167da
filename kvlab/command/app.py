"""The subcommands of ``kvlab``: their arguments and help. What they do lies in the other files of the room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab import __version__
from kvlab.command.answers import console

app = typer.Typer(
    name="kvlab", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Follow a KV cache byte by byte, from DRAM through shared memory into tensor-core registers.\n\n"
    "Exit codes: [bold]0[/bold] yes, [bold]1[/bold] no (conflicts, a difference, something that fails), "
    "[bold]2[/bold] bad input or a missing package. Every answer is JSON with --json.",
)
PASSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["-h", "--help"]}

Json = Annotated[bool, typer.Option("--json", help="One line of JSON instead of words.")]
Text = Annotated[str, typer.Argument(help="CuTe, TTGIR, Gluon, hex, ..., 64x128; -: the standard input.")]
Dtype = Annotated[str | None, typer.Option("--dtype", "-d", help="Of an element: bf16, f16, f32, fp8e4m3, int8, ...")]
Access = Annotated[str | None, typer.Option("--access", "-a", help="ldmatrix.x4, stmatrix.x2.trans, wgmma, ...")]
Arch = Annotated[str, typer.Option("--arch", help="Whose banks: sm_80 to sm_120, gfx942, gfx950, ...")]
Shape = Annotated[str | None, typer.Option("--shape", help="Of the tile, where an encoding is given: 64x64.")]
Unit = Annotated[
    str | None, typer.Option("--swizzle-unit", help="What a swizzle counts: byte or element (by default element).")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvlab {__version__}")
        raise typer.Exit


@app.callback()
def _kvlab(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def draw(
    text: Text, dtype: Dtype = None, access: Access = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file: .svg, .html or .png.")] = None,
    shape: Shape = None, arch: Arch = "sm_90", swizzle_unit: Unit = None, json: Json = False,
) -> None:
    """Say and draw what a pasted text describes: a layout, an encoding, a descriptor, ...; with an access, its passes.

    kvlab draw "Sw<3,3,3> o (8,64):(64,1)" --dtype f16 --access ldmatrix.x4 -o x.svg
    """
    from kvlab.command.tiles import drawn

    drawn(text, dtype, access, output, shape, arch, swizzle_unit).give(json)


@app.command()
def conflicts(
    text: Text, dtype: Annotated[str, typer.Option("--dtype", "-d", help="Of an element: bf16, f16, fp8e4m3, ...")],
    access: Annotated[str, typer.Option("--access", "-a", help="ldmatrix.x4, stmatrix.x2.trans, wgmma, ...")],
    shape: Shape = None, arch: Arch = "sm_90", swizzle_unit: Unit = None,
    proof: Annotated[bool, typer.Option("--proof", help="List every candidate that was counted.")] = False,
    json: Json = False,
) -> None:
    """Count the wavefronts of an access to a tile, say why, and name the smallest cure. Conflicts end it with 1.

    kvlab conflicts 64x64 --dtype bf16 --access ldmatrix.x4
    """
    from kvlab.command.tiles import conflicts as counted

    counted(text, dtype, access, shape, arch, swizzle_unit, proof).give(json)


Values = Annotated[
    list[str] | None,
    typer.Argument(help="NAME=VALUE: arrays as SHAPE:DTYPE[=FILL] (q=2x8x64:bf16, seq_lens=2:i32=40), or literals."),
]


@app.command()
def explain(
    operation: Annotated[str, typer.Argument(help="A function of kvlab.attention: mha_decode_paged, ...")],
    values: Values = None, json: Json = False,
) -> None:
    """Show the plan of a call: backend, reason, tiles, grid. Nothing is run; without values a small example is planned.

    kvlab explain mha_decode_paged q=8x32x128:bf16 k_cache=512x16x8x128:bf16 v_cache=512x16x8x128:bf16
    block_table=8x64:i32 seq_lens=8:i32=1000 arch=gfx950
    """
    from kvlab.command.calls import explained

    explained(operation, values or ()).give(json)


@app.command()
def lockstep(
    operation: Annotated[str, typer.Argument(help="A function of kvlab.attention, or a kernel: kernels.py:scale.")],
    values: Annotated[
        list[str] | None, typer.Argument(help="The kernel's twin (twins.py:scale) first; then NAME=VALUE.")
    ] = None,
    twin: Annotated[str | None, typer.Option("--twin", help="One twin of an operation alone.")] = None,
    grid: Annotated[str | None, typer.Option("--grid", "-g", help="Of a kernel without markers: 4x2, say.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="With --grid: say which threads of sm_90, say, differ.")
    ] = None,
    unwritten: Annotated[
        list[str] | None, typer.Option("--unwritten", help="With --grid: an array that nobody has written yet.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A page with both sources, .html.")] = None,
    json: Json = False,
) -> None:
    """Run a kernel and its NumPy twin and compare every output of every step. Ends with 1 where one differs.

    kvlab lockstep mha_decode_paged, or of your own, as it is: kvlab lockstep kernels.py:scale twins.py:scale
    x=4x64:f32 factor=2.0 --grid 4. Without --grid each file has a function launch that takes these arguments.
    """
    from kvlab.command.calls import in_lockstep

    with _working("both sides run"):
        answer = in_lockstep(operation, values or (), twin, output, grid, target, unwritten or ())
    answer.give(json)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A recorded call, or a folder of a dump of FlashInfer.")],
    quick: Annotated[bool, typer.Option("--quick", help="Neither the kernel nor the lockstep.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="Where the kernel runs, cuda say.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A page, .html, or a picture, .svg.")] = None,
    definition: Annotated[
        Path | None, typer.Option("--definition", help="FILE is a workload of FlashInfer-Bench, of this definition.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a recorded call in every sibling and name the first difference. A difference ends it with 1.

    KVLAB_RECORD=calls python serve.py, then kvlab replay calls/mha_decode-4711-000000.npz -o bug.html
    """
    from kvlab.command.calls import replayed

    with _working("every sibling runs"):
        answer = replayed(file, quick, device, output, definition)
    answer.give(json)


Kernel = Annotated[str, typer.Argument(help="FILE.py:kernel, or module:kernel: @triton.jit or @gluon.jit.")]
Types = Annotated[
    list[str] | None,
    typer.Argument(help="NAME=TYPE of each parameter: x=*bf16, n=i32 (i32:16: a multiple of 16), BM=64; and options of "
                        "the compiler: num_warps=8, num_stages=3, maxnreg=64, ..."),
]
Target = Annotated[str, typer.Option("--target", "-t", help="sm_80, sm_90, sm_100, sm_120, gfx942, gfx950, ...")]


@app.command()
def xray(
    kernel: Kernel, types: Types = None, target: Target = "sm_90",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A page, .html.")] = None,
    json: Json = False,
) -> None:
    """Compile a kernel without a GPU and say what is slow in it and what helps. Findings end it with 1.

    kvlab xray kernels.py:transpose x=*fp32 out=*fp32 N=64
    """
    from kvlab.command.kernels import x_rayed

    with _working("compiling"):
        answer = x_rayed(kernel, types or (), target, output)
    answer.give(json)


@app.command()
def diff(
    a: Kernel, b: Annotated[str, typer.Argument(help="The other kernel, or the same one.")], types: Types = None,
    target: Target = "sm_90",
    target_b: Annotated[str | None, typer.Option("--target-b", help="Of the second, if it is another.")] = None,
    changed: Annotated[list[str] | None, typer.Option("--b", help="NAME=TYPE of the second alone.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A page, .html.")] = None,
    json: Json = False,
) -> None:
    """Compare the X-rays of two kernels, or of one with other values or on another target. A difference ends it with 1.

    kvlab diff kernels.py:transpose kernels.py:transpose x=*fp32 out=*fp32 N=64 --b N=128 --target-b sm_80
    """
    from kvlab.command.kernels import differing

    with _working("compiling both"):
        targets = (target, target_b or target)
        answer = differing((a, b), types or (), changed or (), targets, output)
    answer.give(json)


@app.command()
def budget(
    config: Annotated[str, typer.Argument(help="config.json of a model, its folder, or a name: llama-3.1-8b, ...")],
    values: Annotated[
        list[str] | None,
        typer.Argument(help="NAME=VALUE: mtp=True, align=4096, uniform_pages=True, step_tokens=512, state_dtype=fp32."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Of a request.")] = 8192,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="auto, bf16, fp8, nvfp4, fp8_ds_mla, int4, ...")] = "auto",
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a page.")] = 16,
    degree: Annotated[int, typer.Option("--tensor-parallel", "-t", help="Ranks; bytes are those of one.")] = 1,
    memory: Annotated[str | None, typer.Option("--memory", "-m", help="Of a card, 80GB say: what fits.")] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="Bytes on one rank; by default estimated.")] = None,
    utilisation: Annotated[
        float | None, typer.Option("--utilisation", help="Share of the memory that is used, by default 0.9.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A chart: .svg, .html or .png.")] = None,
    json: Json = False,
) -> None:
    """Count the bytes of a model's cache: layer, page, request, what is waste, and what fits a card.

    kvlab budget deepseek-v3 --kv-dtype fp8_ds_mla --page-size 64 --tensor-parallel 8 --memory 141GB. A card on which
    no request fits ends it with 1.
    """
    from kvlab.command.budgets import budgeted

    how = {"kv_dtype": kv_dtype, "page_size": page_size, "degree": degree}
    for option, value in (("weights", weights), ("utilisation", utilisation)):
        if memory is None and value is not None:
            raise ValueError(f"{option} is {value!r}: must be left out but beside --memory")
    used = 0.9 if utilisation is None else utilisation
    card = None if memory is None else {"memory": memory, "weights": weights, "utilisation": used}
    budgeted(config, values or (), how, tokens, card, output).give(json)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Neither interpret nor compile a kernel.")] = False,
    json: Json = False,
) -> None:
    """Say in plain words what works on this machine. Ends with 1 where something that must work does not."""
    from kvlab.command.machine import examined

    with _working("trying what is here"):
        answer = examined(not quick)
    answer.give(json)


@app.command()
def demo(
    source: Annotated[Path | None, typer.Option("--input", metavar="FILE.npz", help="Your own q, k, v.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="For index.html.")] = Path("demo"),
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")] = 16,
) -> None:
    """Decode 8 steps of a real language model with every sibling and write a page. Siblings apart end it with 1."""
    from kvlab.demo.__main__ import main

    given = [] if source is None else ["--input", str(source)]
    raise typer.Exit(main([*given, "--output", str(output), "--page-size", str(page_size)]))


@app.command(context_settings=PASSED)
def lab(context: typer.Context) -> None:
    """Open the notebooks in JupyterLab; further arguments are its own. Needs a clone of the repository."""
    from kvlab.command.checkout import lab as opened

    raise typer.Exit(opened(context.args))


@app.command(context_settings=PASSED)
def bench(
    context: typer.Context, name: Annotated[str | None, typer.Argument(help="Without one, all are listed.")] = None,
    json: Json = False,
) -> None:
    """Run a benchmark of the repository, with its own arguments; most need a GPU. Needs a clone of the repository."""
    from kvlab.command import checkout

    if name is None:
        checkout.listed().give(json)
    raise typer.Exit(checkout.bench(str(name), context.args))


def _working(words: str) -> Any:
    """A sign of life on the terminal while something takes seconds; none where nobody looks."""
    return console(stderr=True).status(words)
