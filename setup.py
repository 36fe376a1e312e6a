"""Builds the package rnnt_bench (``pip install .``); pyproject.toml has the rest.

The package is the folder common/.  The scripts of the losses and what they read travel in its
folder scripts, laid out as here.  fused_transducer is a package of its own: a second wheel that
held it would take it away when uninstalled.
"""

import atexit
import shutil
import tempfile

from setuptools import find_namespace_packages, setup

#: What the scripts read, beside Python; relative to this folder.
FILES = [
    "*.pt",
    "*.json",
    "data/*",
    "examples/**/*.yaml",
    "examples/**/*.py",
    "docs/corners.json",
    "results/*.json",
]
#: What the package reads; relative to common/.
DATA = [
    f"**/{name}"
    for name in ("*.jinja", "*.css", "*.js", "*.json", "*.hxx", "*.c", "*.npz", "LICENSE")
]
DATA += ["setup/requirements/*.txt", "setup/requirements/*.in"]

scratch = tempfile.mkdtemp(prefix="rnnt-bench-")  # so that a checkout stays as it is
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
inside = [f"rnnt_bench.{name}" for name in find_namespace_packages("common")]
setup(
    packages=["rnnt_bench", *inside, "rnnt_bench.scripts", "rnnt_bench.scripts.losses"],
    package_dir={"rnnt_bench": "common", "rnnt_bench.scripts": "."},
    package_data={"rnnt_bench": DATA, "rnnt_bench.scripts": FILES},
    include_package_data=False,
    options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
)
