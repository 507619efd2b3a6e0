"""Case rows E1 and E2 of the public reports: one table of dense rates, matched by the device's exact name."""

from __future__ import annotations

import pytest
import torch

from trackbridge.flops import peak_of
from trackbridge.flops.peaks import PEAKS

TERA = 1e12


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
    ],
)
def test_e1_dense_rates(name: str, rate: float) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.of(torch.bfloat16, tf32=True) == rate * TERA
    assert peak.of(torch.float16, tf32=True) == rate * TERA


@pytest.mark.parametrize(
    "name", ["NVIDIA Foo", "NVIDIA H100", "NVIDIA H200 NVL2", "GB300", "Tesla", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_e2_an_unknown_device_has_no_rate(name: str) -> None:
    assert peak_of(name) is None


def test_e1_tf32_is_half_of_bfloat16() -> None:
    for peak in PEAKS:
        if peak.tf32 is not None and peak.bfloat16:
            assert 0.48 <= peak.tf32 / peak.half <= 0.52, peak.name
        assert peak.source, peak.name


def test_formats() -> None:
    h100, v100 = peak_of("NVIDIA H100 80GB HBM3"), peak_of("Tesla V100-SXM2-16GB")
    assert h100 is not None and v100 is not None
    assert h100.of(torch.float32, tf32=True) == 494.75 * TERA
    assert h100.of(torch.float32, tf32=False) == 67 * TERA
    assert h100.of(torch.float8_e4m3fn, tf32=True) == 1979 * TERA
    assert h100.of(torch.float64, tf32=True) is None
    assert v100.of(torch.bfloat16, tf32=True) is None  # emulated: no rate is published
    assert v100.of(torch.float16, tf32=True) == 125 * TERA
    assert v100.of(torch.float32, tf32=True) == 15.7 * TERA
