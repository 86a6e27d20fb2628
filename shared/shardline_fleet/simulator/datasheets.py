"""What vendors publish of accelerators: memory, its bandwidth, and the peak of dense products.
Knows no model.

Figures with sparsity are halved. Peaks are of tensor or matrix cores, with float32 sums where the
vendor tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """One accelerator."""

    name: str
    memory_gb: float
    gb_per_s: float
    """Of its memory."""
    tflops: float
    """Dense products of `dtype`."""
    dtype: str
    """As SHARDLINE_DTYPE names it."""
    document: str
    """The vendor's."""


DATASHEETS = {
    each.name: each
    for each in (
        Datasheet(
            name="b200",
            memory_gb=180,
            gb_per_s=7_700,
            tflops=2_250,
            dtype="bfloat16",
            document="NVIDIA Blackwell (HGX B200) datasheet, an eighth of the board",
        ),
        Datasheet(
            name="h200-sxm",
            memory_gb=141,
            gb_per_s=4_800,
            tflops=989.5,
            dtype="bfloat16",
            document="NVIDIA H200 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="h100-sxm",
            memory_gb=80,
            gb_per_s=3_350,
            tflops=989.5,
            dtype="bfloat16",
            document="NVIDIA H100 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="h100-pcie",
            memory_gb=80,
            gb_per_s=2_000,
            tflops=756.5,
            dtype="bfloat16",
            document="NVIDIA H100 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="a100-80gb-sxm",
            memory_gb=80,
            gb_per_s=2_039,
            tflops=312,
            dtype="bfloat16",
            document="NVIDIA A100 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="a100-40gb-sxm",
            memory_gb=40,
            gb_per_s=1_555,
            tflops=312,
            dtype="bfloat16",
            document="NVIDIA A100 Tensor Core GPU datasheet (40GB)",
        ),
        Datasheet(
            name="l40s",
            memory_gb=48,
            gb_per_s=864,
            tflops=362.05,
            dtype="bfloat16",
            document="NVIDIA L40S datasheet",
        ),
        Datasheet(
            name="l4",
            memory_gb=24,
            gb_per_s=300,
            tflops=121,
            dtype="bfloat16",
            document="NVIDIA L4 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="a10",
            memory_gb=24,
            gb_per_s=600,
            tflops=125,
            dtype="bfloat16",
            document="NVIDIA A10 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="t4",
            memory_gb=16,
            gb_per_s=320,
            tflops=65,
            dtype="float16",
            document="NVIDIA T4 Tensor Core GPU datasheet",
        ),
        Datasheet(
            name="rtx-4090",
            memory_gb=24,
            gb_per_s=1_008,
            tflops=165.2,
            dtype="bfloat16",
            document="NVIDIA Ada GPU Architecture whitepaper, appendix A",
        ),
        Datasheet(
            name="rtx-3090",
            memory_gb=24,
            gb_per_s=936,
            tflops=71,
            dtype="bfloat16",
            document="NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A",
        ),
        Datasheet(
            name="mi300x",
            memory_gb=192,
            gb_per_s=5_300,
            tflops=1_307.4,
            dtype="bfloat16",
            document="AMD Instinct MI300X Accelerator data sheet",
        ),
        Datasheet(
            name="mi210",
            memory_gb=64,
            gb_per_s=1_600,
            tflops=181,
            dtype="bfloat16",
            document="AMD Instinct MI210 Accelerator data sheet",
        ),
    )
}
