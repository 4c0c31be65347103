"""What pip builds and installs, offline: from a copy of the sources, from the sdist, with and without a compiler."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "demo", "*.egg-info", "__pycache__", "*.py[cod]", "*.so")
PIP = ("-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-index", "--no-deps")
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


def python(
    *arguments: str | Path, cwd: Path, executable: str | Path = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python as a user would, with none of our variables but those given."""
    ours = ("PYTHON", "PIP_", "FASTMLM_", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [str(executable), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=900)


def succeeds(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a clean clone has them, so that nothing built earlier can help."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "fastmlm", ignore=NOT_SOURCES))


@pytest.fixture(scope="module")
def sources(tree: Path) -> set[str]:
    """Before anything was built there."""
    return files_of(tree)


@pytest.fixture(scope="module")
def sdist(tree: Path, sources: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    succeeds(python("-c", code, folder, cwd=tree))
    return only(folder, "fastmlm-*.tar.gz")


@pytest.fixture(scope="module")
def wheel(tree: Path, sources: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a release builds it: a compiler that fails is an error."""
    folder = tmp_path_factory.mktemp("wheel")
    arguments = (*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, ".")
    succeeds(python(*arguments, cwd=tree, FASTMLM_REQUIRE_NATIVE="1"))
    return only(folder, "fastmlm-*.whl")


@pytest.fixture(scope="module")
def without_native(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it installs where there is no compiler."""
    folder = tmp_path_factory.mktemp("without_native")
    arguments = (*PIP, "install", *OFFLINE, "--no-build-isolation", "--target", folder, sdist)
    succeeds(python(*arguments, cwd=folder, **NO_COMPILER))
    return folder


def unpacked_wheel(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def setuptools_as_a_wheel(folder: Path) -> Path:
    """Zip up the installed setuptools, so that pip can put it, and nothing else, into an isolated environment."""
    dist = importlib.metadata.distribution("setuptools")
    with zipfile.ZipFile(folder / f"setuptools-{dist.version}-py3-none-any.whl", "w") as archive:
        for file in dist.files or ():
            if ".." not in file.parts and file.suffix != ".pyc" and file.locate().is_file():
                archive.write(file.locate(), file.as_posix())
    return folder


def check_wheel(names: Sequence[str], sources: set[str], native: bool) -> None:
    """The package, the kernels inside it, one native module; no tests, benchmarks or sources of C++."""
    wanted = {name.removeprefix("src/") for name in sources if name.startswith("src/")}
    kernels = {name for name in sources if name.startswith("kernels/") and name.endswith((".py", ".pyi"))}
    wanted |= {f"fastmlm/{name}" for name in kernels}
    built = [name for name in names if name.endswith((".so", ".pyd"))]
    assert len(built) == native
    assert all(name.startswith("fastmlm/kernels/cpu/_native.") for name in built)
    package = {name for name in names if ".dist-info/" not in name} - set(built)
    assert package == wanted
    assert {"fastmlm/py.typed", "fastmlm/cli/__main__.py", "fastmlm/kernels/gpu/masking.py"} <= package
    assert "fastmlm/kernels/cpu/_native.pyi" in package
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastmlm"}


def test_wheel(wheel: Path, sources: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        check_wheel(archive.namelist(), sources, native=True)
        metadata = {
            name.split("/", 1)[1]: archive.read(name).decode() for name in archive.namelist() if "dist-info" in name
        }
    assert "Requires-Dist: torch" in metadata["METADATA"]
    assert "fastmlm = fastmlm.cli:main" in metadata["entry_points.txt"]
    assert metadata["licenses/LICENSE"] == (ROOT / "LICENSE").read_text("utf-8")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in wheel.name  # built for one release of Python, whose ints it reads directly


def test_sdist_holds_all_sources(sdist: Path, sources: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        names = {
            name.split("/", 1)[1] for name in archive.getnames() if "/" in name and not archive.getmember(name).isdir()
        }
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert names - made == sources


def test_sdist_builds_in_a_clean_environment(sdist: Path, sources: set[str], tmp_path: Path) -> None:
    """pip's own way, in an environment without torch and numpy; the module that comes out needs neither."""
    venv.create(tmp_path / "clean", with_pip=True)
    clean = tmp_path / "clean" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    for package in ("torch", "numpy"):
        assert "ModuleNotFoundError" in python("-c", f"import {package}", cwd=tmp_path, executable=clean).stderr
    find = ("--find-links", setuptools_as_a_wheel(tmp_path))
    arguments = (*PIP, "wheel", *OFFLINE, *find, "-w", tmp_path / "out", sdist)
    succeeds(python(*arguments, cwd=tmp_path, executable=clean, FASTMLM_REQUIRE_NATIVE="1"))
    built = only(tmp_path / "out", "fastmlm-*.whl")
    with zipfile.ZipFile(built) as archive:
        check_wheel(archive.namelist(), sources, native=True)
    kernels = unpacked_wheel(built, tmp_path / "unpacked") / "fastmlm" / "kernels" / "cpu"
    code = (
        "import _native, sys; print(_native.isas()[-1], 'torch' in sys.modules, _native.pack_rows([], 0, [], 0, 0, 0))"
    )
    out = succeeds(python("-c", code, cwd=tmp_path, executable=clean, PYTHONPATH=str(kernels)))
    assert out.split() == ["plain", "False", "None"]


def test_a_release_fails_without_a_compiler(tree: Path, sources: set[str], tmp_path: Path) -> None:
    arguments = (*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", tmp_path, ".")
    copy = shutil.copytree(tree, tmp_path / "tree", ignore=NOT_SOURCES)  # nothing compiled before is there
    run = python(*arguments, cwd=Path(copy), FASTMLM_REQUIRE_NATIVE="1", **NO_COMPILER)
    assert run.returncode != 0
    assert "/nonexistent/c" in run.stdout + run.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_it_installs_without_a_compiler(without_native: Path, sources: set[str]) -> None:
    names = [
        name for name in files_of(without_native) if not name.startswith("bin/") and not name.endswith((".pyc", ".pyo"))
    ]
    check_wheel(names, sources, native=False)


MASKS = """
import json, sys, warnings
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
import fastmlm

def results(**chosen):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [fastmlm.mask_tokens(ids, spec, seed=seed, **chosen).input_ids.tolist() for seed in range(3)]
        for whole in (False, True):
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
            collator = fastmlm.DataCollatorForMaskedLM(tokenizer, whole_word_mask=whole, seed=7, **chosen)
            collator.set_epoch(1)
            got.append({name: value.tolist() for name, value in collator(rows).items()})
    return got, sum("masking and the loss run in PyTorch" in str(w.message) for w in caught)

spec = fastmlm.MaskingSpec(4, 1000, (0, 1, 2), mlm_probability=0.3)
ids = torch.arange(640).reshape(5, 128) % 1000
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{'##' if i % 3 else ''}w{i}" for i in range(95))]
core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
rows = [{"input_ids": [2, *range(5, 5 + n), 3]} for n in (7, 90, 1, 33)]

named, warned_named = results(impl="reference")
default, warned = results()
try:
    error = fastmlm.mask_tokens(ids, spec, seed=0, impl="cpp") and None
except RuntimeError as e:
    error = str(e)
impls = fastmlm.available_impls()
print(json.dumps(dict(named=named, default=default, warned=[warned_named, warned], error=error, impls=impls)))
"""


def test_it_masks_without_the_native_module(without_native: Path, wheel: Path, tmp_path: Path) -> None:
    """The same bits, one warning where the choice was ours, and who names the missing kernel is told."""
    said = {}
    for name, folder in (("with", unpacked_wheel(wheel, tmp_path / "wheel")), ("without", without_native)):
        # Without site (-S), whose hook for our editable install would find the native module all the same.
        path = os.pathsep.join([str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        run = python("-S", "-c", MASKS, cwd=tmp_path, PYTHONPATH=path, HF_HUB_OFFLINE="1")
        said[name] = json.loads(succeeds(run).strip().split("\n")[-1])
    assert said["without"]["named"] == said["without"]["default"] == said["with"]["named"] == said["with"]["default"]
    assert "cpp" in said["with"]["impls"]
    assert "cpp" not in said["without"]["impls"]
    assert (said["with"]["warned"], said["without"]["warned"]) == ([0, 0], [0, 1])
    assert said["with"]["error"] is None
    assert "impl: 'cpp' cannot run here: the native module was not built" in said["without"]["error"]
