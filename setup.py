"""Where the packages live; everything else stands in pyproject.toml.

The kernels sit beside ``src`` (one folder a device) and install as ``fastmlm.kernels.gpu`` and ``fastmlm.kernels.cpu``.
``kernels/`` itself must never become a package: a top-level package of that name shadows the one transformers imports.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "fastmlm.kernels.gpu"],
    package_dir={"": "src", "fastmlm.kernels.gpu": "kernels/gpu"},
    package_data={"fastmlm": ["py.typed"]},
)
