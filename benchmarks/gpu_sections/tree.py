"""The package from the checkout itself, without an install or a compiler, and the peers, where they were unpacked.

``setup.py`` maps ``kernels/gpu`` to ``fastmlm.kernels.gpu`` when it installs; here the folder becomes a part of
``fastmlm.kernels``. What is measured is this tree, also where another fastmlm is installed.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build/peers"
PACKAGES = ("torch", "triton", "transformers", "numpy", "liger-kernel", "cut-cross-entropy")


def use_tree(peers: Path = PEERS) -> list[str]:
    """Make fastmlm and the peers importable; what is missing, in words."""
    sys.path.insert(0, str(ROOT / "src"))
    if peers.is_dir():
        sys.path.append(str(peers))  # last: what is installed comes first
    import fastmlm.kernels

    folder = str(ROOT / "kernels")
    if folder not in fastmlm.kernels.__path__:
        fastmlm.kernels.__path__.append(folder)
    assert Path(fastmlm.__file__).is_relative_to(ROOT), f"fastmlm comes from {fastmlm.__file__}, not from this tree"
    notes = []
    if find_spec("fastmlm.kernels.cpu._native") is None:
        notes.append("The native CPU module is not built here; nothing on a GPU needs it.")
    for module in ("liger_kernel", "cut_cross_entropy"):
        if find_spec(module) is None:
            notes.append(f"{module} is neither installed nor in {peers}, so it is not measured.")
    return notes


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of this tree, "unknown" where git or its folder is not there."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head[:12] + ("+changes" if changes.strip() else "")
