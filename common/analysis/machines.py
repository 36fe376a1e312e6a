"""Tell machines apart: by the processor, its vectors and caches, else by the rates that the limits
pass measured.

Clouds give one name to several processors. Older records know a machine by its name alone; two such
machines count as one only where their rates agree."""

from __future__ import annotations

from rnnt_bench.analysis.row import Row
from rnnt_bench.core import text
from rnnt_bench.records.schema import Machine

#: Two measurements of a rate on one machine differ by less than this share.
MARGIN = 0.15
#: Flags of /proc/cpuinfo, the widest vectors first, and their usual names.
VECTORS = {
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse4_2": "SSE4.2",
    "sve2": "SVE2",
    "sve": "SVE",
    "asimd": "NEON",
    "neon": "NEON",
}
GIGA = 1e9


def processor(machine: Machine) -> str:
    """Return "(family 26, model 2, AVX-512)"; "" if the records have only a name."""
    numbers = {"family": machine.family, "model": machine.model}
    parts = [f"{key} {number}" for key, number in numbers.items() if number is not None]
    vectors = [name for flag, name in VECTORS.items() if flag in machine.vectors]
    parts += vectors[:1]  # the widest
    return f"({', '.join(parts)})" if parts else ""


def described(machine: Machine) -> str:
    """Return "AMD EPYC (family 26, model 2, AVX-512), 2 cores"; "" where nothing is known."""
    model = " ".join(filter(None, [machine.cpu, processor(machine)]))
    cores = text.count(machine.cores, "core") if machine.cores else ""
    return ", ".join(filter(None, [model, cores]))


def machine_of(row: Row) -> str:
    """Return the machine of a row: "AMD EPYC (family 26, model 2, AVX-512), 2 cores".

    Where the records have only the processor's name, the rates that the run measured follow:
    "AMD EPYC, 2 cores (memory 38 GB/s, products 207 GFLOP/s)"."""
    machine = row.header.machine
    measured = rates(row)
    if measured and not is_known(machine):
        return f"{described(machine)} ({measured})"
    return described(machine)


def rates(row: Row) -> str:
    """Return "memory 38 GB/s, products 207 GFLOP/s"; "" where the run did not measure them."""
    parts = []
    if row.rates.memory:
        parts.append(f"memory {row.rates.memory / GIGA:.0f} GB/s")
    if row.rates.torch:
        parts.append(f"products {row.rates.torch / GIGA:.0f} GFLOP/s")
    return ", ".join(parts)


#: Fields of a machine that agree between the records of one processor.
FIELDS = ("family", "model", "stepping", "vectors", "caches")


def is_known(machine: Machine) -> bool:
    """Tell whether records know more of the processor than its name."""
    return any(getattr(machine, key) not in (None, [], {}) for key in FIELDS)


# One machine, or two.


def apart(row: Row, other: Row) -> list[str]:
    """Return why two rows cannot be taken as of one machine; [] where they can.

    Stricter than `differences`: if the records of a row know the name of its processor alone, the
    rows are also apart where one of them has no rates to compare."""
    different = differences(row, other)
    # Rows of one run, and rows without the name of a CPU, have no difference: this returns [].
    if different or not _can_compare(row, other):
        return different
    if is_known(row.header.machine) and is_known(other.header.machine):
        return []
    unmeasured = [side for side in (row, other) if not (side.rates.memory and side.rates.torch)]
    if not unmeasured:
        return []
    where = " and in ".join(str(side.folder) for side in unmeasured)
    name = row.header.machine.cpu
    return [f"machine {name} known by its name alone, without rates in {where}"]


def differences(row: Row, other: Row) -> list[str]:
    """Return what shows that two rows ran on two machines, as "machine A, 2 cores / B, 2 cores"; []
    where nothing does.

    Another CPU or number of cores is another machine.  Otherwise the FIELDS of the processor are
    compared, or the measured rates if a record has only the processor's name.

    Two rows of one run, or rows without the name of a CPU, show nothing; neither does a number of
    cores or a rate that one side lacks."""
    if not _can_compare(row, other):
        return []
    mine, theirs = row.header.machine, other.header.machine
    cores_differ = mine.cores and theirs.cores and mine.cores != theirs.cores
    if mine.cpu != theirs.cpu or cores_differ:
        return [f"machine {described(mine)} / {described(theirs)}"]
    if is_known(mine) and is_known(theirs):
        return _other_processor(row, other)
    memory = _other_rate("memory", row.rates.memory, other.rates.memory, "GB/s")
    return memory + _other_rate("products", row.rates.torch, other.rates.torch, "GFLOP/s")


def _can_compare(row: Row, other: Row) -> bool:
    """Tell whether the rows are of two runs whose records both name a CPU."""
    first, second = row.header, other.header
    return first.run_id != second.run_id and None not in (first.machine.cpu, second.machine.cpu)


def _other_processor(row: Row, other: Row) -> list[str]:
    """Return in words the FIELDS that differ between two machines. Where all agree, return the
    rates of the suite's own products if they differ, else [].

    The other two rates decide nothing here: that of memory differs by a fifth between days of one
    host, and that of torch's products between versions of torch."""
    mine, theirs = row.header.machine, other.header.machine
    keys = [key for key in FIELDS if getattr(mine, key) != getattr(theirs, key)]
    if keys:
        return [f"processor's {key} {_field(mine, key)} / {_field(theirs, key)}" for key in keys]
    return _other_rate("the suite's own products", row.rates.loop, other.rates.loop, "GFLOP/s")


def _field(machine: Machine, key: str) -> str:
    """Return a field for a message, as "26", "avx avx2", "L1 32 KiB, L2 1024 KiB" or "none"."""
    value = getattr(machine, key)
    if isinstance(value, dict):
        return ", ".join(f"{name} {size // 1024} KiB" for name, size in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(value) or "none"
    return str(value)


def _other_rate(name: str, rate: float | None, other: float | None, unit: str) -> list[str]:
    """Return ["rate of memory 38 / 52 GB/s"] where two rates per second differ by more than MARGIN;
    [] where they do not, or one is not known."""
    if rate is None or other is None or max(rate, other) <= (1 + MARGIN) * min(rate, other):
        return []
    return [f"rate of {name} {rate / GIGA:.0f} / {other / GIGA:.0f} {unit}"]
