"""What stages make of every family of causal LMs that transformers has: the table of
docs/models.md.

python -m tests.conformance.families   # tries all of them and writes the table, in two minutes
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import transformers as tf
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.stage.device.device import Device
from services.stage.engine.rank_trial import check_ranks
from services.stage.engine.split_trial import check_split
from services.stage.kernels import kernel
from services.stage.model.miniature import build_miniature, miniature_config
from services.stage.model.model_info import ModelInfo, check_can_be_sharded
from services.stage.model.shard import quiet_transformers
from services.stage.model.text_part import text_config
from shardline.base.errors import Invalid
from tests.chain import load_chain
from tests.models import CONFIGS
from tests.multimodal_models import CONTAINERS
from tests.pinned import first_core
from tests.repository import REPOSITORY

PAGE = REPOSITORY / "docs/models.md"
BEGIN = "<!-- families: begin -->"
END = "<!-- families: end -->"
HEADER = "| what was found | families |\n|---|---|"
TESTED = {make().model_type: make for make in (*CONFIGS.values(), *CONTAINERS.values())}
FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
NUM_RANKS = 2
AS_RELEASED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "ministral": {"head_dim": 128},
}
"""What a family's models have and its default config leaves out, so that it makes no model or
another one."""


def outcome_of(family: str, folder: Path, device: Device) -> str:
    """Tries the miniature of a family's default config in two stages, from its folder to its
    logits."""
    try:
        config = (
            TESTED[family]()
            if family in TESTED
            else tf.CONFIG_MAPPING[family](**AS_RELEASED.get(family, {}))
        )
        check_can_be_sharded(config)
        check_split(config, folder)
        path = folder / family
        with quiet_transformers():
            build_miniature(miniature_config(config)).save_pretrained(path)
        num_stages = 2 if ModelInfo.read(path).joined is None else 1
        stages = load_chain(path, num_stages, device, folder)
    except Invalid as error:
        name = f"'{family}' "
        # In the table names between backticks are families.
        return f"refused: {error.problem.removeprefix(name)}".replace("`", "'")
    except StrictDataclassError:
        return "not tried: its config has no defaults"
    found = ["tested" if family in TESTED else "tried"]
    if num_stages == 1:
        found += ["in one stage"]
    else:
        by_plan = text_config(config).base_model_pp_plan
        found += ["cut by plan" if by_plan else "cut by order of calls"]
    found += ["exact"] if all(stage.exact for stage in stages) else []
    found += ["ranks"] if computes_in_ranks(config, folder) else []
    return ", ".join(found)


def computes_in_ranks(config: Any, folder: Path) -> bool:
    """Whether ranks compute what the whole model does."""
    native = kernel.load()
    assert native is not None, "the table says what the CPU kernels give"
    try:
        check_ranks(config, folder, native, NUM_RANKS)
    except Invalid:
        return False
    return True


def outcomes() -> dict[str, str]:
    """What the page's table says, by family."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if "`" in line]
    return {
        family: found
        for found, families in lines
        for family in families.replace("`", "").split(", ")
    }


def main() -> None:
    """Writes the page's table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    by_outcome: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, first_core(Path(folder)) as device:
        for family in FAMILIES:
            by_outcome.setdefault(outcome_of(family, Path(folder), device), []).append(
                f"`{family}`"
            )
    lines = [
        f"| {found} | {', '.join(by_outcome[found])} |"
        for found in sorted(by_outcome, reverse=True)
    ]
    PAGE.write_text(
        "\n".join([f"{before}{BEGIN}\n", HEADER, *lines, f"\n{END}{after}"]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
