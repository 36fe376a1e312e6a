"""Builds the package rnnt_bench (``pip install .``); pyproject.toml has its name, requirements and command.

The suite travels in it as rnnt_bench/_suite, laid out as this folder is: the scripts, common/, fused_transducer/ and
the files that they read.  So nothing is installed under the name `common`.
"""

import atexit
import shutil
import tempfile

from setuptools import find_namespace_packages, setup

PACKAGES = ["common", "fused_transducer", "losses"]
#: What the commands read, beside Python; relative to this folder.
FILES = [
    "*.pt",
    "*.json",
    "data/*",
    "examples/**/*.yaml",
    "examples/**/*.py",
    "requirements/*.txt",
    "requirements/*.in",
    "docs/corners.json",
    "results/*.json",
]
FILES += [f"common/**/{name}" for name in ("*.jinja", "*.css", "*.js", "*.json", "*.hxx", "*.npz", "LICENSE")]
FILES += ["fused_transducer/csrc/*", "fused_transducer/py.typed"]

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
