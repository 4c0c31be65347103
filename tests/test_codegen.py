"""codegen: the code a GPU runs, compiled ahead of time where there is none."""

import json

from test_dispatch import without_interpreter

CODEGEN = """
import json, pathlib, re, subprocess, sys, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastmlm.kernels.gpu.masking import _mask_rows

TOOL = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUMBERS64 = {"seed", "threshold", "mask_threshold", "random_threshold", "multiplier", "multiplier_in_table"}
CONSTANTS = {"TILES", "BLOCKS", "PER_TOKEN", "EXCLUDE"}
BASE = ["input_ids", "output_ids", "labels", "row_keys", "flags"]
ALL = [*BASE, "attention_mask", "starts", "units", "special_tokens_mask", "thresholds", "random_ids", "device_seed"]

def build(target, present, ids, warps, **constants):
    pointers = dict.fromkeys(["device_seed", "row_keys", "starts", "thresholds", "random_ids"], "*i64")
    pointers |= dict.fromkeys(["input_ids", "output_ids", "labels"], "*" + ids)
    pointers |= {"attention_mask": "*i64", "special_tokens_mask": "*i8", "flags": "*u8"}
    pointers |= {"cu_seqlens": "*i32", "units": "*i64"}
    signature, constexprs = {}, {}
    for i, name in enumerate(_mask_rows.arg_names):
        if name in CONSTANTS or name in pointers and name not in present:
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
        else:
            signature[name] = pointers.get(name, "i64" if name in NUMBERS64 else "i32")
    divisible = [i for i, n in enumerate(_mask_rows.arg_names) if n in present or n == "length"]
    source = ASTSource(_mask_rows, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in divisible})
    return triton.compile(source, target=target, options={"num_warps": warps})

def on_nvidia(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"]); file.flush()
        dump = lambda flag: subprocess.run([TOOL, flag, file.name], capture_output=True, text=True, check=True).stdout
        usage, sass = dump("-res-usage"), dump("-sass")
    return {"stack": re.findall(r"STACK:(\\d+)", usage), "local": len(re.findall(r"\\b(LDL|STL)\\b", sass)),
            "wide_loads": sass.count("LDG.E.128"), "wide_stores": sass.count("STG.E.128")}

def on_amd(kernel):
    return {"spills": re.findall(r"gpr_spill_count: *(\\d+)", kernel.asm["amdgcn"])}

plain = dict(TILES=1, BLOCKS=16, PER_TOKEN=False, EXCLUDE=False)
cases = {
    "plain": (BASE, "i64", 4, plain),
    "int32": (BASE, "i32", 4, plain),
    "short": (BASE, "i64", 1, plain | dict(BLOCKS=1)),
    "all": (ALL, "i64", 4, dict(TILES=3, BLOCKS=16, PER_TOKEN=True, EXCLUDE=True)),
    "packed": ([*BASE, "cu_seqlens"], "i64", 4, plain),
    "packed, all": ([*ALL, "cu_seqlens"], "i64", 4, dict(TILES=3, BLOCKS=16, PER_TOKEN=True, EXCLUDE=True)),
}
for name, (present, ids, warps, constants) in cases.items():
    result = {"sm_90": on_nvidia(build(GPUTarget("cuda", 90, 32), present, ids, warps, **constants))}
    result["gfx942"] = on_amd(build(GPUTarget("hip", "gfx942", 64), present, ids, warps, **constants))
    print(json.dumps([name, result]))
"""


def test_codegen_for_sm_90_and_gfx942() -> None:
    """The kernel compiles for both makers' GPUs, keeps everything in registers, and reads ids 16 bytes at a time."""
    results = dict(json.loads(line) for line in without_interpreter(CODEGEN).splitlines())
    assert list(results) == ["plain", "int32", "short", "all", "packed", "packed, all"]
    for name, result in results.items():
        assert set(result["sm_90"]["stack"]) == {"0"}, name
        assert result["sm_90"]["local"] == 0, name
        assert set(result["gfx942"]["spills"]) == {"0"}, name  # scalar and vector registers
    assert results["plain"]["sm_90"]["wide_loads"] > 0
    assert results["plain"]["sm_90"]["wide_stores"] > 0
