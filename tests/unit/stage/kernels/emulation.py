"""The variant for AMX on processors without: its sources, with tiles in plain C++."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from services.stage.kernels.build import HERE, KernelSettings, build
from services.stage.kernels.kernel import Kernel, supported_isas

EMULATED = Path(__file__).with_name("emulated_amx.h")


def emulated_amx() -> Kernel:
    """That variant, built for the vectors that this processor has."""
    isa = next(isa for isa in supported_isas() if isa in {"avx512", "avx2"})
    with tempfile.TemporaryDirectory() as folder:
        for file in (*HERE.glob("*.cpp"), *HERE.glob("*.h")):
            shutil.copy(file, folder)
        shutil.copy(EMULATED, Path(folder, "amx.h"))
        return Kernel(
            build(
                isa, KernelSettings().kernel_dir, Path(folder), ("-D__AMX_TILE__", "-D__AMX_BF16__")
            ),
            "amx",
        )
