"""The code a GPU would run, without one: compile any Triton kernel ahead of time, and count what came out.

The interpreter must be off: without ``TRITON_INTERPRET``, before anything imports triton.
"""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_for(
    target: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Collection[str],
    warps: int = 4,
    **options: object,
) -> Any:
    """A kernel for one of `TARGETS`, as Triton compiles it where it runs.

    ``signature`` types the arguments by name ("*i64", "i32", "fp32"), ``constants`` gives the value of every other one,
    None for a pointer that is left out. ``aligned`` names the pointers and integers that are multiples of 16, which
    Triton finds out by itself at a call. ``options`` are the compiler's (``num_stages=2``).
    """
    places = {name: i for i, name in enumerate(kernel.arg_names)}
    if unseen := [name for name in aligned if kernel.params[places[name]].do_not_specialize]:
        raise ValueError(f"at a call, Triton does not look at what is not to be specialized: {unseen}")
    if missing := set(places) ^ {*signature, *constants}:
        raise ValueError(f"neither typed nor constant, or unknown: {sorted(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in places}
    values = {(places[name],): value for name, value in constants.items()}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, types, values, attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps, **options})


def counts(target: str, compiled: Any) -> dict[str, Any]:
    """What one thread of a program runs, loops counted once: instructions, wide multiplies, registers, spills.

    ``wide_loads`` and ``wide_stores`` are those of 128 bits. Spills show on NVIDIA in ``stack`` and in ``local``, their
    loads and stores, on AMD in ``spills`` and ``scratch``. AMD's instructions are those of vectors and memory, without
    the scalar ones, which a wave runs once.
    """
    return _on_amd(compiled) if target.startswith("gfx") else _on_nvidia(compiled)


def sass(compiled: Any) -> str:
    """The machine code for NVIDIA, as cuobjdump prints it."""
    return _cuobjdump(compiled, "-sass")


def _cuobjdump(compiled: Any, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _on_nvidia(compiled: Any) -> dict[str, Any]:
    usage = _cuobjdump(compiled, "-res-usage")
    # "/*00a0*/  @!P0 LDG.E.128 R4, ... ;", up to the branch to itself that pads the end
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass(compiled))
    while names and names[-1] in ("NOP", "BRA"):
        names.pop()
    return {
        "stack": sum(map(int, re.findall(r"STACK:(\d+)", usage))),
        "local": sum(name.startswith(("LDL", "STL")) for name in names),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "instructions": len(names),
        "multiplies": sum(name.startswith(("IMAD.WIDE.U32", "IMAD.HI.U32")) for name in names),
        "wide_loads": sum(name.startswith("LDG.E.128") for name in names),
        "wide_stores": sum(name.startswith("STG.E.128") for name in names),
    }


def _on_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]
    names = re.findall(r"^\s+((?:v|global|buffer|flat|ds)_\w+)", text, flags=re.M)
    return {
        "spills": sum(map(int, re.findall(r"gpr_spill_count: *(\d+)", text))),
        "scratch": sum(map(int, re.findall(r"\.private_segment_fixed_size: *(\d+)", text))),
        "registers": int(re.findall(r"\.vgpr_count: *(\d+)", text)[0]),
        "instructions": len(names),
        "multiplies": sum(name.startswith(("v_mul_hi_u32", "v_mad_u64_u32")) for name in names),
        "wide_loads": sum(bool(re.fullmatch(r"(global|buffer)_load_\w*x4", name)) for name in names),
        "wide_stores": sum(bool(re.fullmatch(r"(global|buffer)_store_\w*x4", name)) for name in names),
    }
