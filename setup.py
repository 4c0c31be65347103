"""Where the packages live and how the native kernels are built; everything else stands in pyproject.toml.

The kernels sit beside ``src`` (one folder a device) and install as ``fastmlm.kernels.gpu`` and ``fastmlm.kernels.cpu``.
``kernels/`` itself must never become a package: a top-level package of that name shadows the one transformers imports.

Without a C++ compiler the package installs all the same and masks in PyTorch. A release must not come out that way:
with FASTMLM_REQUIRE_NATIVE=1 in the environment of the build, a failing compiler fails the build.
"""

import os
from glob import glob

from setuptools import Extension, find_packages, setup

native = Extension(
    "fastmlm.kernels.cpu._native",
    sources=sorted(glob("kernels/cpu/*.cpp")),
    depends=sorted(glob("kernels/cpu/*.h") + glob("kernels/cpu/*.inc")),
    language="c++",
    # Old GCCs take the undefined halves inside their own intrinsics for uninitialised variables.
    extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"],
    optional=os.environ.get("FASTMLM_REQUIRE_NATIVE") != "1",
)

setup(
    packages=[*find_packages("src"), "fastmlm.kernels.gpu", "fastmlm.kernels.cpu"],
    package_dir={"": "src", "fastmlm.kernels.gpu": "kernels/gpu", "fastmlm.kernels.cpu": "kernels/cpu"},
    package_data={"fastmlm": ["py.typed"], "fastmlm.kernels.cpu": ["*.pyi"]},
    include_package_data=False,  # or the C++ sources, which the sdist must have, would be installed too
    ext_modules=[native],
)
