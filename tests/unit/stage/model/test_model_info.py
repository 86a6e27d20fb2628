"""Models of the hub: which commit is read, said and kept. The hub's own library reads its cache,
without a network."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from structlog.testing import capture_logs

from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid, Unavailable
from tests.models import edit_config, save_model
from tests.unit.tokenize.small_tokenizers import byte_level

OLD = "0" * 39 + "1"
NEW = "0" * 39 + "2"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of one model in the hub's cache, `main` at the newer one; the hub itself is
    away."""
    model = tmp_path / "models--owner--name"
    for commit in (OLD, NEW):
        save_model(model / "snapshots").rename(model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(NEW)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return model


def test_a_pinned_commit_is_read_and_named_in_the_row(hub: Path) -> None:
    with capture_logs() as logs:
        info = ModelInfo.read("owner/name", OLD)

    assert (info.path, info.revision) == (hub / "snapshots" / OLD, OLD)
    assert info.row(name="m", fingerprint="f")["revision"] == OLD
    assert logs == []


@pytest.mark.parametrize("revision", [None, "main"])
def test_the_commit_of_a_moving_revision_is_kept_and_warned_of(
    hub: Path, revision: str | None
) -> None:
    with capture_logs() as logs:
        info = ModelInfo.read("owner/name", revision)

    assert info.revision == NEW
    (warning,) = logs
    assert (warning["log_level"], warning["model"], warning["commit"]) == (
        "warning",
        "owner/name",
        NEW,
    )
    assert "SHARDLINE_MODEL_REVISION" in warning["event"]


def test_an_unknown_commit_is_not_replaced_by_another(hub: Path) -> None:
    with pytest.raises(Unavailable, match="cannot fetch 'owner/name'"):
        ModelInfo.read("owner/name", "f" * 40)


@pytest.mark.parametrize("file", ["vocab.json", "tekken.json"])
def test_a_tokenizer_that_is_no_tokenizer_json_is_warned_of_with_the_remedy(
    file: str, tmp_path: Path
) -> None:
    info = ModelInfo.read(save_model(tmp_path))
    (info.path / file).write_text("{}")
    with capture_logs() as logs:
        info.row(name="m", fingerprint="f")
        byte_level().save(str(info.path / "tokenizer.json"))
        info.row(name="m", fingerprint="f")

    (warning,) = logs
    assert (warning["log_level"], warning["files"]) == ("warning", [file])
    assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in warning["event"]


def test_a_class_is_known_in_another_spelling_and_others_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    for known in ("LLaMAForCausalLM", "LlamaForCausalLM"):
        edit_config(folder, architectures=[known])
        assert ModelInfo.read(folder).num_layers == 4

    for other, remedy in (
        ("AlpacaForCausalLM", "If the weights are this model's, write LlamaForCausalLM into arch"),
        ("LlamaForQuestionAnswering", "Give a checkpoint with a language-model head"),
    ):
        edit_config(folder, architectures=[other])
        with pytest.raises(Invalid, match=f"saved as {other}, not as LlamaForCausalLM.*{remedy}"):
            ModelInfo.read(folder)


def test_a_folder_has_no_revision_and_refuses_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path)

    assert ModelInfo.read(folder).revision is None
    with pytest.raises(
        Invalid, match=r"is a folder, which has no revision 'v1'.*Unset SHARDLINE_MODEL_REVISION"
    ):
        ModelInfo.read(folder, "v1")
