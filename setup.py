"""Builds the package rnnt_bench (``pip install .``); pyproject.toml has the rest.

The suite travels in rnnt_bench/_suite, laid out as this folder is: the scripts, common/, losses/ and what they read,
so that nothing is installed under the name `common`.  fused_transducer is a package of its own, in its folder: a
second wheel that held it would take it away when it is uninstalled.
"""

import atexit
import shutil
import tempfile

from setuptools import find_namespace_packages, setup

PACKAGES = ["common", "losses"]
#: What the commands read, beside Python; relative to this folder.
FILES = [
    "*.pt",
    "*.json",
    "data/*",
    "examples/**/*.yaml",
    "examples/**/*.py",
    "common/setup/requirements/*.txt",
    "common/setup/requirements/*.in",
    "docs/corners.json",
    "results/*.json",
]
FILES += [f"common/**/{name}" for name in ("*.jinja", "*.css", "*.js", "*.json", "*.hxx", "*.c", "*.npz", "LICENSE")]

scratch = tempfile.mkdtemp(prefix="rnnt-bench-")  # so that a checkout stays as it is
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
inside = find_namespace_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)])
setup(
    packages=["rnnt_bench", "rnnt_bench._suite", *(f"rnnt_bench._suite.{name}" for name in inside)],
    package_dir={"rnnt_bench": "rnnt_bench", "rnnt_bench._suite": "."},
    package_data={"rnnt_bench._suite": FILES},
    include_package_data=False,
    options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
)
