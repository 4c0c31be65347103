"""What a GPU would be bound by: the masking kernel compiled ahead of time, its instructions and bytes counted.

No GPU is needed. Writes ``results/roofline.json`` and ``results/roofline.md``, which the README quotes;
``tests/test_codegen.py`` holds the counts to their limits. The interpreter must be off.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from report import RESULTS, quote
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastmlm.kernels.gpu.masking import _mask_rows

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

NUMBERS64 = {"seed", "threshold", "mask_threshold", "random_threshold", "multiplier", "multiplier_in_table"}
CONSTANTS = {"TILES", "BLOCKS", "PER_TOKEN", "EXCLUDE"}
BASE = ["input_ids", "output_ids", "labels", "row_keys", "flags"]
ALL = [*BASE, "attention_mask", "starts", "units", "special_tokens_mask", "thresholds", "random_ids", "device_seed"]


@dataclass(frozen=True)
class Case:
    """A way of calling the kernel: which pointers are given, the type of ids, the shape of a program."""

    present: list[str]
    ids: str = "i64"
    warps: int = 4
    blocks: int = 16
    rest: bool = False  # rates of tokens, and never the original


CASES = {
    "plain": Case(BASE),
    "int32": Case(BASE, ids="i32"),
    "short": Case(BASE, warps=1, blocks=1),
    "all": Case(ALL, rest=True),
    "packed": Case([*BASE, "cu_seqlens"]),
    "packed, all": Case([*ALL, "cu_seqlens"], rest=True),
}


@dataclass(frozen=True)
class Device:
    """Lane instructions a second at the boost clock, and bytes a second of its memory, by the maker's data sheets."""

    target: str
    instructions: float
    bytes: float


DEVICES = {
    "A100 80 GB": Device("sm_80", 108 * 4 * 32 * 1.41e9, 2.04e12),
    "H100 SXM": Device("sm_90", 132 * 4 * 32 * 1.98e9, 3.35e12),
    "H200": Device("sm_90", 132 * 4 * 32 * 1.98e9, 4.8e12),
    "MI300X": Device("gfx942", 304 * 4 * 16 * 2.1e9, 5.3e12),
}
REACHED = 0.9  # of a memory's rate, which copies reach


def build(target: GPUTarget, case: Case) -> Any:
    constants = {"TILES": 3 if case.rest else 1, "BLOCKS": case.blocks, "PER_TOKEN": case.rest, "EXCLUDE": case.rest}
    pointers = dict.fromkeys(["device_seed", "row_keys", "starts", "thresholds", "random_ids", "units"], "*i64")
    pointers |= dict.fromkeys(["input_ids", "output_ids", "labels"], "*" + case.ids)
    pointers |= {"attention_mask": "*i64", "special_tokens_mask": "*i8", "flags": "*u8", "cu_seqlens": "*i32"}
    names = _mask_rows.arg_names
    signature, constexprs = {}, {}
    for i, name in enumerate(names):
        if name in CONSTANTS or (name in pointers and name not in case.present):
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
        else:
            signature[name] = pointers.get(name, "i64" if name in NUMBERS64 else "i32")
    aligned = [i for i, name in enumerate(names) if name in case.present or name == "length"]
    source = ASTSource(_mask_rows, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=target, options={"num_warps": case.warps})


def on_nvidia(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOL, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    # "/*00a0*/  @!P0 LDG.E.128 R4, ... ;", up to the branch to itself that pads the end
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    while lines and lines[-1] in ("NOP", "BRA"):
        lines.pop()
    return {
        "stack": sum(map(int, re.findall(r"STACK:(\d+)", usage))),
        "local": sum(name.startswith(("LDL", "STL")) for name in lines),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "instructions": len(lines),
        "multiplies": sum(name.startswith(("IMAD.WIDE.U32", "IMAD.HI.U32")) for name in lines),
        "wide_loads": sum(name.startswith("LDG.E.128") for name in lines),
        "wide_stores": sum(name.startswith("STG.E.128") for name in lines),
    }


def on_amd(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]
    body = text[: text.index("s_endpgm")]
    names = re.findall(r"^\s+((?:v|s|global|buffer|flat|ds)_\w+)", body, flags=re.M)
    return {
        "spills": sum(map(int, re.findall(r"gpr_spill_count: *(\d+)", text))),
        "scratch": sum(map(int, re.findall(r"\.private_segment_fixed_size: *(\d+)", text))),
        "registers": int(re.findall(r"\.vgpr_count: *(\d+)", text)[0]),
        "instructions": sum(name.startswith(("v_", "global_", "buffer_", "flat_")) for name in names),
        "multiplies": sum(name.startswith(("v_mul_hi_u32", "v_mad_u64_u32")) for name in names),
    }


def count(target: str, case: Case) -> dict[str, Any]:
    """What a thread of a program runs, in all and for each of its tokens, loops counted once."""
    kernel = build(TARGETS[target], case)
    counts = on_amd(kernel) if target.startswith("gfx") else on_nvidia(kernel)
    tokens = case.blocks * 64 / (case.warps * TARGETS[target].warp_size)
    return counts | {"tokens": tokens, "instructions_per_token": counts["instructions"] / tokens}


def bytes_per_token(case: Case) -> int:
    """An id is read, an id and a label are written; what all options add is read beside them."""
    width = 8 if case.ids == "i64" else 4
    return 3 * width + (8 + 1 + 8 + 8 if case.rest else 0)


def table(counts: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| GPU | case | registers | instructions a token | bytes a token | memory allows, G tokens/s "
        "| instructions allow | memory is the limit by |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, device in DEVICES.items():
        for case in ("plain", "int32", "packed", "all"):
            found = counts[case][device.target]
            by_memory = REACHED * device.bytes / bytes_per_token(CASES[case]) / 1e9
            by_instructions = device.instructions / found["instructions_per_token"] / 1e9
            lines.append(
                f"| {name} | {case} | {found['registers']} | {found['instructions_per_token']:.0f} "
                f"| {bytes_per_token(CASES[case])} | {by_memory:.0f} | {by_instructions:.0f} "
                f"| {by_instructions / by_memory:.1f}× |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    counts = {name: {target: count(target, case) for target in TARGETS} for name, case in CASES.items()}
    if "--json" in sys.argv:
        print(json.dumps(counts))
        return
    (RESULTS / "roofline.json").write_text(json.dumps(counts, indent=1) + "\n")
    quote("roofline", table(counts))


if __name__ == "__main__":
    main()
