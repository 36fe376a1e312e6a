"""Compiles csrc/ on the way, where there is a compiler; without one the package is installed all
the same."""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
import compiling  # noqa: E402


class BuildLibrary(build_ext):
    """The extension is a plain shared library: no part of it depends on Python's or torch's
    version."""

    def get_ext_filename(self, fullname):
        return compiling.library_name()

    def build_extension(self, extension):
        try:
            compiling.build(Path(self.get_ext_fullpath(extension.name)))
        except (compiling.BuildError, OSError) as error:
            self.warn(
                f"the C++ code was not compiled, plain PyTorch code will run instead: {error}"
            )

    def get_outputs(self):
        return [path for path in super().get_outputs() if Path(path).exists()]


class PackageOnly(build_py):
    """Leaves this file out of the package, in whose folder it lies."""

    def find_package_modules(self, package, package_dir):
        return [
            module
            for module in super().find_package_modules(package, package_dir)
            if module[1] != "setup"
        ]


class AnyPython(bdist_wheel):
    """A wheel for every Python 3, of the platform for which the library was compiled; of any where
    it was not."""

    def get_tag(self):
        """Return (Python, ABI, platform) of the wheel's file name."""
        _, _, this_platform = super().get_tag()
        # A cross compiler may have compiled the library for another machine.
        of_library = this_platform.replace(platform.machine(), compiling.machine())
        has_library = self.get_finalized_command("build_ext").get_outputs()
        return "py3", "none", of_library if has_library else "any"


setup(
    ext_modules=[Extension("fused_transducer._native", sources=[])],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": BuildLibrary, "build_py": PackageOnly},
)
