"""The form of API keys: what is made can be read, what is cut, changed or guessed cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardline.base.errors import Invalid
from shardline.contract.api_key import Scope, new_key, parse_key, parse_scopes
from tests.repository import REPOSITORY

SECRETS = REPOSITORY / "docker" / "secrets.sh"


def test_keys_differ_in_id_and_secret_and_are_read_back() -> None:
    keys = [new_key() for _ in range(100)]
    presented = [parse_key(key) for key in keys]
    assert (
        len({each.key_id for each in presented}) == len({each.digest for each in presented}) == 100
    )
    assert all(
        parse_key(key).matches(each.digest) for key, each in zip(keys, presented, strict=True)
    )
    assert not presented[0].matches(presented[1].digest)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "sk-shardline-",
        "sk-openai-0123456789abcdef-" + "a" * 43,
        "sk-shardline-0123456789ABCDEF-" + "a" * 43,
        "sk-shardline-0123456789abcdef-" + "a" * 42,
        "sk-shardline-0123456789abcdef-" + "a" * 44,
        "sk-shardline-0123456789abcdef-" + "a" * 43 + "\n",
        "sk-shardline-0123456789abcdef-" + "ä" * 43,
    ],
)
def test_a_text_that_is_no_key_is_refused_and_not_repeated(broken: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_key(broken)
    assert "aaaa" not in str(refused.value)


def test_the_script_of_secrets_makes_a_valid_key_once(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run([SECRETS, folder], check=True, capture_output=True)
        key = (folder / "api_key").read_text()
        assert parse_key(key).key_id == key.split("-")[2]
    other = tmp_path / "other"
    subprocess.run([SECRETS, other], check=True, capture_output=True)
    assert (other / "api_key").read_text() != key


def test_an_unknown_scope_is_named() -> None:
    assert parse_scopes("read, submit,read") == (Scope.SUBMIT, Scope.READ)
    with pytest.raises(Invalid, match="'write' is none"):
        parse_scopes("read,write")
