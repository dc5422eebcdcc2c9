"""Finds the packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

ours = find_packages(include=["seqzoo", "seqzoo.*", "seqzoo_kernels", "seqzoo_kernels.*"])
plugins = find_packages(include=["plugins", "plugins.*"])

setup(
    packages=ours + [name.replace("plugins", "seqzoo_plugins", 1) for name in plugins],
    package_dir={"seqzoo_plugins": "plugins"},
)
