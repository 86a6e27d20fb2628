"""services/README.md, the path of a prompt: what it names exists, is counted, and is all that a
prompt passes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repository import REPOSITORY
from tests.sources import own_packages

DOCUMENT = REPOSITORY / "services/README.md"
INTRODUCTION, _, REST = DOCUMENT.read_text(encoding="utf-8").partition("\n## ")
PATH, _, BESIDE = REST.partition("\n## Beside the path")
ROOTS = (REPOSITORY / "services", REPOSITORY / "shared")
ITEM = re.compile(r"^(\d+)\. (?:[⇒⇢] )?`([\w/]+\.py):([\w.]+)`(.*(?:\n    .*)*)", re.MULTILINE)
SOURCE = re.compile(r"`([\w/]+\.(?:py|cpp))`")
MAX_MODULES = 50
MAX_HAND_OFFS = 10
MAX_BYTES = 6_300

OFF_THE_PATH = {
    "errors, settings, metrics, clocks, connections: of any module": """
        shardline/__init__ shardline/base/aio shardline/base/clock shardline/base/config
        shardline/base/errors shardline_server/failpoints shardline/contract/ids
        shardline/contract/keys shardline/base/log shardline_server/metrics
        shardline/base/redis shardline/base/rounding shardline/base/type_info
        shardline/contract/tables shardline/store/connection/database shardline/client/base_client
        shardline/client/database gateway/errors stage/metrics stage/job_telemetry
        stage/engine/step_clock shardline_scheduler/step_times stage/jobs/outage
    """,
    "types alone": """
        gateway/bodies gateway/openai/bodies gateway/schemas shardline/client/fields
        shardline/contract/chat shardline/contract/job stage/hop/__init__
        stage/jobs/job_engine stage/jobs/lease_host stage/pipeline/hosts
        stage/pipeline/status
    """,
    "at start": """
        gateway/context gateway/settings stage/backends stage/runtime
        stage/device/device stage/engine/memory shardline_scheduler/scheduler_config
        stage/engine/exactness stage/engine/accelerator_options
        stage/engine/step_graphs stage/model/cpu_parts stage/engine/loading
        stage/engine/split_trial stage/products/experts stage/model/model_info
        stage/model/pieces stage/products/packing stage/model/refusal
        stage/model/text_part stage/model/weights stage/attention/by_position
        stage/products/selected_experts
    """,
    "for a model with recurrent layers": """
        stage/recurrent/mixers stage/recurrent/slots stage/recurrent/states
    """,
    "where ranks divide a stage": """
        stage/engine/ranked_runner stage/ranks/group stage/ranks/messages
    """,
    "for a tenant with quotas, or with rivals": """
        shardline/store/tenants/limits
        shardline_server/store/fair_shares shardline_server/store/running_limits
    """,
    "for encoders": """
        gateway/routes/encoders shardline/client/vectors shardline_server/tokenize/folder
        shardline/contract/encoders/encoder shardline_server/tokenize/encoders/encoder_texts
        shardline_server/tokenize/prepared_prompt stage/engine/pooling
        stage/model/encoders/encoder_class stage/model/encoders/distance_bias
    """,
    "for a job that is traced": """
        shardline_server/genai stage/stage_spans stage/jobs/attempt_spans
    """,
    "on an accelerator": """
        stage/device/staging stage/sampling/batched_draws stage/sampling/triton_draws
    """,
    "for a job that was preempted, or is alone on several stages": """
        shardline_scheduler/offload shardline_scheduler/step_cost
    """,
    "for a pipeline, not for a prompt": """
        stage/celery/subscription stage/pipeline/assembly stage/pipeline/epochs
        stage/pipeline/pipeline stage/pipeline/energy_writer shardline/store/models
        shardline/store/pipelines
    """,
    "for a request of several choices, or with another name of its priority": """
        gateway/openai/choice_answers gateway/openai/service_tier
        shardline/store/choices
    """,
    "for a job with log-probabilities of its prompt": """
        gateway/openai/prompt_logprobs stage/sampling/prompt_scores
    """,
    "for stored completions, which are read later": """
        gateway/routes/stored_completions shardline/store/stored_completions
    """,
    "for files and batches, whose lines are jobs of their own": """
        gateway/batches/batch_keeper gateway/routes/batches gateway/routes/files
    """,
    "for webhooks, which tell of ends": """gateway/routes/webhooks""",
    "for what is paused, and for schedules": """
        gateway/routes/pauses gateway/routes/schedules shardline/store/schedules/pauses
        shardline_server/store/paused_jobs shardline_server/store/windows
        shardline_server/store/turns
    """,
    "for a thread that must leave the interpreter to others": """
        shardline_server/host/duty_cycle
    """,
    "for a job with structured output": """
        shardline/contract/structured_output gateway/grammar_turns
        shardline_server/tokenize/grammars/argument_schema
        shardline_server/tokenize/grammars/grammar
        shardline_server/tokenize/grammars/grammar_judge
        shardline_server/tokenize/grammars/grammar_load
        shardline_server/tokenize/grammars/grammar_trial
    """,
    "for a long answer": """gateway/http/event_loop""",
    "for a request that is refused": """gateway/field_names""",
    "for a chat, not for a prompt": """
        shardline_server/tokenize/chat_format stage/jobs/chat_replies
    """,
    "for a job that limits its tokens, or continues a message": """
        shardline_server/tokenize/bad_words shardline_server/tokenize/continuation
    """,
    "for a job with a retry policy": """shardline/contract/retry_policy""",
    "for a job with a question": """
        gateway/routes/decisions shardline/client/decisions shardline/contract/decision
        shardline_server/tokenize/questions
    """,
    "for a job with an adapter": """
        stage/engine/adapter_pool stage/adapters/peft
    """,
    "small forms of what a request holds": """
        shardline/contract/plain_json shardline/base/trace_context
    """,
    "for other requests": """
        gateway/http/answers gateway/routes/costs gateway/routes/health
        gateway/routes/jobs gateway/routes/responses gateway/anthropic/error_form
        gateway/routes/messages gateway/routes/tokens shardline/client/partial_inserts
        shardline/client/questions
        shardline/client/requests gateway/turns shardline/store/statistics/costs
        shardline/store/dead_letters shardline/store/listing shardline/store/idempotency
        gateway/routes/audit gateway/routes/bulk_acts shardline/store/audit
        shardline/store/bulk_acts shardline/contract/job_filter
        shardline/store/responses shardline/store/statistics/reports
        shardline_server/tokenize/token_texts stage/attention/sdpa
        stage/attention/triton_backend
    """,
    "for a task of the Celery door, and for Celery's result backend": """
        shardline_server/celery_results shardline_server/store/celery_tasks
        stage/jobs/result_publisher
    """,
}
"""What modules of the path import and this prompt does not pass, by reason."""

OWN = own_packages()
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Item(NamedTuple):
    """A numbered module of the path, with those in its brackets."""

    number: int
    module: Path
    function: str
    parts: list[Path]


def find(name: str, folder: Path | None = None) -> Path:
    """A file by its name in the document: beside the numbered module, or below a root."""
    folders = ROOTS if "/" in name else (folder,)
    (found,) = [each / name for each in folders if each and (each / name).is_file()] or [Path(name)]
    return found


def items() -> Iterator[Item]:
    for number, name, function, rest in ITEM.findall(PATH):
        module = find(name)
        yield Item(
            int(number),
            module,
            function,
            [find(part, module.parent) for part in SOURCE.findall(rest)],
        )


ITEMS = list(items())
UNNUMBERED = [
    find(name)
    for line in PATH.splitlines()
    if line.startswith("- ")
    for name in SOURCE.findall(line)
]
PARTS = [*chain.from_iterable(item.parts for item in ITEMS), *UNNUMBERED]


def defined(node: ast.AST, prefix: str = "") -> set[str]:
    """Dotted names of the classes and functions defined directly in a module or class, and in those
    classes."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            found.add(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                found |= defined(child, f"{prefix}{child.name}.")
    return found


def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


def imports(module: Path) -> Iterator[tuple[Path, str]]:
    """Our own modules that a module imports, each with the imported name."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OWN:
            base = REPOSITORY.joinpath(
                "shared" if node.module.startswith("shardline") else "", *node.module.split(".")
            )
            for alias in node.names:
                candidates = (
                    base / f"{alias.name}.py",
                    base.with_suffix(".py"),
                    base / "__init__.py",
                )
                yield next(path for path in candidates if path.is_file()), alias.name


def imported(module: Path) -> set[Path]:
    """The modules whose names a module uses: behind a package, those that the package takes the
    names from."""
    found = set()
    for path, name in imports(module):
        behind = (
            [real for real, given in imports(path) if given == name]
            if path.name == "__init__.py"
            else []
        )
        found.add(behind[0] if behind else path)
    return found


def short(module: Path) -> str:
    root = next(root for root in ROOTS if module.is_relative_to(root))
    return str(module.relative_to(root).with_suffix(""))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.number} {item.function}")
def test_every_function_of_the_path_exists(item: Item) -> None:
    assert item.function in defined(tree(item.module))


def test_every_module_is_named_once_and_exists() -> None:
    named = [*(item.module for item in ITEMS), *PARTS, *map(find, SOURCE.findall(BESIDE))]

    assert [item.number for item in ITEMS] == list(range(1, len(ITEMS) + 1))
    assert [str(path) for path in named if not path.is_file()] == []
    assert sorted(named) == sorted(set(named))


def test_the_document_states_its_counts_and_they_are_within_their_limits() -> None:
    num_hand_offs = PATH.count("⇒")
    num_legs = PATH.count("⇢")

    said = (
        f"**{len(ITEMS)} modules ({len(PARTS)} more in brackets),"
        f" {num_hand_offs} hand-offs, {num_legs} network legs**"
    )
    assert said in INTRODUCTION
    assert len(ITEMS) <= MAX_MODULES
    assert num_hand_offs <= MAX_HAND_OFFS
    assert DOCUMENT.stat().st_size <= MAX_BYTES


def test_no_module_that_the_prompt_passes_is_left_out() -> None:
    """What the modules of the path import is in the document, or in the list above for a reason."""
    named = {short(path) for path in (*(item.module for item in ITEMS), *PARTS)}
    reached = {short(path) for item in ITEMS for path in imported(item.module)}
    off = {name for names in OFF_THE_PATH.values() for name in names.split()}

    assert reached - named - off == set(), (
        "name it in services/README.md, or say above why no prompt passes it"
    )
    assert off - reached == set(), "nothing on the path imports it any more"
    assert off & named == set()


def test_the_path_leads_through_gateway_relay_and_stage_to_the_gateway() -> None:
    services = [short(item.module).partition("/")[0] for item in ITEMS]
    passed = [name for name in services if not name.startswith("shardline")]

    assert [
        name for name, before in zip(passed, ["", *passed], strict=False) if name != before
    ] == [
        "gateway",
        "relay",
        "stage",
        "gateway",
    ]
