"""Dense peak rates by exact device name, in TFLOP/s, each with its source. A device that is not here has no peak: no MFU.

Rates "with sparsity" on a datasheet are halved. A reduced-precision rate is the tensor cores' with float32 accumulation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense TFLOP/s of the devices whose whole name matches `name`, by format; None: the device has no such unit."""

    name: str
    half: float  # float16; bfloat16 as well where `bfloat16`
    tf32: float | None
    float32: float | None  # not on tensor cores
    float8: float | None
    source: str
    bfloat16: bool = True

    def of(self, dtype: torch.dtype, *, tf32: bool) -> float | None:
        """FLOP/s for matrix products of `dtype`; None where unknown. `tf32`: float32 products may use TF32."""
        if dtype == torch.float16 or (dtype == torch.bfloat16 and self.bfloat16):
            rate: float | None = self.half
        elif dtype == torch.float32:
            rate = self.tf32 if tf32 and self.tf32 else self.float32
        elif dtype.itemsize == 1 and dtype.is_floating_point:
            rate = self.float8
        else:
            rate = None
        return rate * TERA if rate else None


_HOPPER = "NVIDIA H100 datasheet (2430615)"
_AMPERE = "NVIDIA A100 datasheet (1758950)"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief, table of systems, per GPU"

PEAKS: tuple[Peak, ...] = (
    Peak(r"NVIDIA H100 80GB HBM3", 989.5, 494.75, 67.0, 1979.0, f"{_HOPPER}, SXM column, halved"),
    Peak(r"NVIDIA H100 PCIe", 756.0, 378.0, 51.0, 1513.0, f"{_HOPPER}, PCIe column, halved"),
    Peak(r"NVIDIA H100 NVL", 835.0, 417.5, 60.0, 1670.5, f"{_HOPPER}, NVL column, halved"),
    Peak(r"NVIDIA H800", 989.5, 494.75, 67.0, 1979.0, "NVIDIA H800 datasheet, SXM column, halved"),
    Peak(r"NVIDIA H200", 989.5, 494.75, 67.0, 1979.0, "NVIDIA H200 datasheet (3002446), SXM column, halved"),
    Peak(r"NVIDIA H200 NVL", 835.5, 417.5, 60.0, 1670.5, "NVIDIA H200 datasheet (3002446), NVL column, halved"),
    Peak(r"NVIDIA GH200 (480GB|120GB)", 989.5, 494.75, 67.0, 1979.0, "NVIDIA GH200 datasheet, halved"),
    Peak(r"NVIDIA B200", 2250.0, 1100.0, None, 4500.0, f"{_BLACKWELL}, HGX B200, halved"),
    Peak(r"NVIDIA GB200", 2500.0, 1250.0, 80.0, 5000.0, f"{_BLACKWELL}, GB200 NVL72, halved"),
    Peak(r"NVIDIA B300 SXM6 AC", 2250.0, 1100.0, None, 4500.0, "NVIDIA HGX platform page, HGX B300, halved, of eight"),
    Peak(r"NVIDIA GB300", 2500.0, 1250.0, 80.0, 5000.0, "NVIDIA GB300 NVL72 page, halved, of 72"),
    Peak(r"NVIDIA A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe", 312.0, 156.0, 19.5, None, _AMPERE),
    Peak(r"NVIDIA A800-SXM4-80GB|NVIDIA A800 80GB PCIe", 312.0, 156.0, 19.5, None, "NVIDIA A800 datasheet"),
    Peak(r"NVIDIA A30", 165.0, 82.0, 10.3, None, "NVIDIA A30 datasheet"),
    Peak(r"NVIDIA A40", 149.7, 74.8, 37.4, None, "NVIDIA A40 datasheet"),
    Peak(r"NVIDIA A10", 125.0, 62.5, 31.2, None, "NVIDIA A10 datasheet"),
    Peak(r"NVIDIA RTX A6000", 154.8, 77.4, 38.7, None, "NVIDIA RTX A6000 datasheet, halved"),
    Peak(r"NVIDIA L4", 121.0, 60.0, 30.3, 242.5, "NVIDIA L4 datasheet, halved"),
    Peak(r"NVIDIA L40", 181.05, 90.5, 90.5, 362.0, "NVIDIA L40 datasheet, halved"),
    Peak(r"NVIDIA L40S", 362.05, 183.0, 91.6, 733.0, "NVIDIA L40S datasheet, halved"),
    Peak(r"NVIDIA GeForce RTX 3090", 71.0, 35.6, 35.6, None, "NVIDIA GA102 whitepaper, appendix A, float32 accumulation"),
    Peak(r"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6, 330.3, "NVIDIA Ada whitepaper, appendix A, float32 accumulation"),
    Peak(r"Tesla V100-SXM2-(16|32)GB", 125.0, None, 15.7, None, "NVIDIA V100 datasheet", bfloat16=False),
    Peak(r"Tesla V100-PCIE-(16|32)GB", 112.0, None, 14.0, None, "NVIDIA V100 datasheet", bfloat16=False),
    Peak(r"Tesla T4", 65.0, None, 8.1, None, "NVIDIA T4 datasheet", bfloat16=False),
    Peak(r"AMD Instinct MI300X", 1307.4, 653.7, 163.4, 2614.9, "AMD Instinct MI300X data sheet"),
    Peak(r"AMD Instinct MI325X", 1307.4, 653.7, 163.4, 2614.9, "AMD Instinct MI325X data sheet"),
)


def peak_of(name: str) -> Peak | None:
    """The peak rates of the device whose name is `name`, as `torch.cuda.get_device_name` gives it. None if unknown."""
    return next((peak for peak in PEAKS if re.fullmatch(peak.name, name.strip())), None)
