"""Who may import whom (DESIGN, section 1), and what ``import fastmlm`` does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, KERNELS = ROOT / "src" / "fastmlm", ROOT / "kernels"

# Rank of each module; a module may import those of a lower rank, and nothing else. Left to right in DESIGN's line.
RANK = {
    "cli": 7, "trainer": 7, "testing": 7,
    "": 6,  # fastmlm itself re-exports
    "electra": 6,
    "collator": 5, "head": 5, "feeding": 5,
    "permutation": 5, "reuse": 4,
    "padding": 4, "packing": 4, "seeding": 4, "epochs": 4, "hf_random": 4, "collator_check": 4, "planning": 4,  # of the
    "on_device": 4, "head_check": 4, "head_call": 4, "masked_lm_head": 4,  # collator and the head
    "masking": 3, "loss": 3, "metrics": 3, "strategies": 3, "unmasking": 3, "sampling": 3,
    "dispatch": 2, "_ops": 2, "reference": 2,
    "selection_spec": 1, "rows": 1, "attention": 1, "units": 1,  # what the reference shares with what runs before it
    "spec": 0, "philox": 0, "chunked": 0, "selection": 0, "schedules": 1,
    "kernels": 2,
}  # fmt: skip
# Within a rank: the op finds its kernel through dispatch, and metrics are counted by the loss.
ALSO = {
    ("_ops", "dispatch"),
    ("metrics", "loss"),
    ("sampling", "masking"),
    ("on_device", "packing"),
    ("epochs", "packing"),
    ("on_device", "planning"),
    ("planning", "seeding"),
    ("units", "rows"),
    ("units", "selection_spec"),
}
# Beside the standard library. Names under ``if TYPE_CHECKING`` cost nothing and are free.
HEAVY = {"transformers", "accelerate", "datasets", "tokenizers", "matplotlib", "rich", "tqdm", "numpy", "safetensors"}
MAY_LOAD = {
    **dict.fromkeys(["cli", "trainer", "testing", "collator", "epochs", "hf_random"], {"torch"} | HEAVY),
    **dict.fromkeys(["permutation", "electra"], {"torch"} | HEAVY),
    **{name: {"torch", "numpy"} for name in ("padding", "packing", "reuse")}, "kernels": {"torch", "triton"},
    "feeding": {"torch", "numpy", "pyarrow", "datasets"},
}  # fmt: skip


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])


def module_of(path: Path) -> str:
    """The part of the package a file belongs to: its name below fastmlm, up to the first dot."""
    if KERNELS in path.parents:
        return "kernels"
    return path.relative_to(PACKAGE).with_suffix("").parts[0].replace("__init__", "")


def imports_of(path: Path) -> set[str]:
    """Dotted names imported anywhere in a file, those inside functions too, those for type checkers not."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_import_rule(path: Path) -> None:
    importer = module_of(path)
    assert importer in RANK, f"give {importer} a rank here and in DESIGN.md"
    for name in sorted(imports_of(path)):
        top, *rest = name.split(".")
        if top == "fastmlm":
            imported = rest[0] if rest and rest[0] in RANK else ""
            # Kernels are found by name, at their first use; a static import of one would load Triton with it.
            below = RANK[imported] < RANK[importer] and imported != "kernels"
            allowed = imported == importer or below
            assert allowed or (importer, imported) in ALSO, f"{importer} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in MAY_LOAD.get(importer, {"torch"}), f"{importer} must not import {name}"


def test_a_backend_imports_no_other() -> None:
    for path in KERNELS.rglob("*.py"):
        backend = path.relative_to(KERNELS).parts[0]
        for name in imports_of(path):
            if name.startswith("fastmlm.kernels."):
                assert name.split(".")[2] == backend, f"{path.name} imports {name}"


def test_no_package_shadows_another() -> None:
    """``kernels/__init__.py`` would hide the PyPI package ``kernels`` from transformers, when run from the root."""
    assert not (KERNELS / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert (PACKAGE / "kernels" / "__init__.py").exists()


def fresh(code: str) -> list[str]:
    """Lines that code prints in a new process, in which no test has imported anything."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split("\n")


PUBLIC = [
    "DataCollatorForMaskedLM",
    "DataCollatorForPermutationLM",
    "MaskOnDevice",
    "MaskedAccuracy",
    "MaskedLMHead",
    "MaskedTokens",
    "MaskingSpec",
    "Overflow",
    "ReplacedTokenDetection",
    "ReplacedTokens",
    "SelectedRows",
    "Selection",
    "advance_seed",
    "attention_masks",
    "available_impls",
    "densify",
    "linear_cross_entropy",
    "mask_batches",
    "mask_tokens",
    "masked_accuracy",
    "replace_tokens",
    "row_capacity",
    "sample_tokens",
    "select_rows",
    "sparsify",
    "unmask",
]


def test_import_loads_torch_alone() -> None:
    lines = fresh(
        "import sys, fastmlm\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'triton', 'transformers', 'datasets', 'scipy'}))\n"
        "print(*sorted(m for m in sys.modules if m.startswith('fastmlm.')))\n"
        "import torch\n"
        "ids = torch.arange(10)\n"
        "fastmlm.mask_tokens(ids, fastmlm.MaskingSpec(1, 10), seed=0)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'triton', 'transformers'}))\n"
        "print(*dir(fastmlm))\n"
    )
    assert lines[0] == ""
    loaded = lines[1].split()
    lazy = ("collator", "permutation", "electra", "epochs", "on_device", "padding", "packing", "hf_random", "cli")
    lazy = (*lazy, "trainer")
    assert not [m for m in loaded if m.split(".")[1] in lazy], loaded
    assert not [m for m in loaded if m.startswith("fastmlm.kernels.")], loaded
    assert lines[2] == "", "masking CPU tensors needs torch alone"
    assert set(PUBLIC) <= set(lines[3].split())


def test_lazy_names() -> None:
    """Loaded when first asked for; a name that is not there is an AttributeError, not an ImportError."""
    lines = fresh(
        "import sys, fastmlm\n"
        f"print(all(getattr(fastmlm, name) is not None for name in {PUBLIC}))\n"
        "print('fastmlm.collator' in sys.modules, 'triton' in sys.modules)\n"
        "from fastmlm import DataCollatorForMaskedLM\n"
        "print(DataCollatorForMaskedLM.__module__, DataCollatorForMaskedLM is fastmlm.DataCollatorForMaskedLM)\n"
        "try: fastmlm.DataCollator\n"
        "except AttributeError as error: print(error)\n"
    )
    assert lines[0] == "True"
    assert lines[1].startswith("True")
    assert lines[2] == "fastmlm.collator True"
    assert lines[3] == "module 'fastmlm' has no attribute 'DataCollator'"
