"""What vendors publish of accelerators: memory, its bandwidth, and the peak of dense products.
Knows no model.

Figures with sparsity are halved. Peaks are of tensor or matrix cores, with float32 sums where the
vendor tells them apart.
"""

from __future__ import annotations

from typing import NamedTuple


class Datasheet(NamedTuple):
    """One accelerator."""

    name: str
    memory_gb: float
    gb_per_s: float
    """Of its memory."""
    tflops: float
    """Dense products of `dtype`."""
    document: str
    """The vendor's."""
    dtype: str = "bfloat16"
    """As SHARDLINE_DTYPE names it."""


H100 = "NVIDIA H100 Tensor Core GPU datasheet"
DATASHEETS = {
    each.name: each
    for each in (
        Datasheet(
            "b200",
            180,
            7_700,
            2_250,
            "NVIDIA Blackwell (HGX B200) datasheet, an eighth of the board",
        ),
        Datasheet("h200-sxm", 141, 4_800, 989.5, "NVIDIA H200 Tensor Core GPU datasheet"),
        Datasheet("h100-sxm", 80, 3_350, 989.5, H100),
        Datasheet("h100-pcie", 80, 2_000, 756.5, H100),
        Datasheet("a100-80gb-sxm", 80, 2_039, 312, "NVIDIA A100 Tensor Core GPU datasheet"),
        Datasheet("a100-40gb-sxm", 40, 1_555, 312, "NVIDIA A100 Tensor Core GPU datasheet (40GB)"),
        Datasheet("l40s", 48, 864, 362.05, "NVIDIA L40S datasheet"),
        Datasheet("l4", 24, 300, 121, "NVIDIA L4 Tensor Core GPU datasheet"),
        Datasheet("a10", 24, 600, 125, "NVIDIA A10 Tensor Core GPU datasheet"),
        Datasheet("t4", 16, 320, 65, "NVIDIA T4 Tensor Core GPU datasheet", "float16"),
        Datasheet(
            "rtx-4090", 24, 1_008, 165.2, "NVIDIA Ada GPU Architecture whitepaper, appendix A"
        ),
        Datasheet(
            "rtx-3090", 24, 936, 71, "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
        ),
        Datasheet("mi300x", 192, 5_300, 1_307.4, "AMD Instinct MI300X Accelerator data sheet"),
        Datasheet("mi210", 64, 1_600, 181, "AMD Instinct MI210 Accelerator data sheet"),
    )
}
