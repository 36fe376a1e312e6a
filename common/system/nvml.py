"""Ask NVIDIA's driver (NVML) about a GPU: driver, clocks, power, what holds the clocks back, ECC.  No torch.

Needs the package nvidia-ml-py.  Without it, or without a driver, nothing is known.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, List, Optional, Tuple

from common.system.processes import output

#: Bits of the throttle reasons (NVML's nvmlClocksThrottleReason...), in its words.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU at this moment, as records have it; None where the driver does not tell."""

    uuid: Optional[str] = None
    driver: Optional[str] = None  # version
    sm_mhz: Optional[int] = None  # clock now
    sm_most_mhz: Optional[int] = None  # highest clock
    memory_mhz: Optional[int] = None  # clock now
    power_cap_watts: Optional[float] = None
    celsius: Optional[int] = None
    throttled_by: Optional[List[str]] = None  # what holds the clocks back, in words of REASONS
    ecc: Optional[bool] = None  # whether its memory is corrected


def describe(uuid: Optional[str]) -> Optional[Gpu]:
    """Return a GPU, or None without the package, the driver or the device.

    uuid: of the device, as torch has it; None is enough for a machine with one GPU.
    """
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return _described(pynvml, uuid)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return None


def _described(nvml: ModuleType, uuid: Optional[str]) -> Optional[Gpu]:
    if uuid is not None:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    elif nvml.nvmlDeviceGetCount() == 1:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    else:
        return None

    def answered(ask: Callable[[], Any]) -> Any:
        """Return the answer, None if this driver, device or version of the package has none."""
        try:
            return ask()
        except (nvml.NVMLError, AttributeError):
            return None

    power = answered(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    reasons = answered(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    ecc = answered(lambda: nvml.nvmlDeviceGetEccMode(handle)[0])
    return Gpu(
        uuid=answered(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        driver=answered(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        sm_mhz=answered(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        sm_most_mhz=answered(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_mhz=answered(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        power_cap_watts=None if power is None else power / 1000,
        celsius=answered(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        throttled_by=None if reasons is None else [word for bit, word in REASONS.items() if reasons & bit],
        ecc=None if ecc is None else bool(ecc),
    )


def from_smi() -> Optional[Tuple[str, Gpu]]:
    """Return (name, GPU) of the first GPU that this process may use, with its driver and clocks.

    They are from nvidia-smi, which comes with every driver.  None if it does not tell.
    """
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    keys = ("name", "uuid", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
    ask = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    words = [word.strip() for word in output(ask, timeout=30).strip().split(",")]
    if len(words) != len(keys):
        return None
    clocks = [int(word) if word.isdigit() else None for word in words[3:]]
    (name, uuid, driver), (sm, most, memory) = words[:3], clocks
    return name, Gpu(uuid=uuid, driver=driver, sm_mhz=sm, sm_most_mhz=most, memory_mhz=memory)


#: Fields of a GPU that nvidia-smi tells.
TOLD_BY_SMI = ("uuid", "driver", "sm_mhz", "sm_most_mhz", "memory_mhz")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
