"""Functions of a namespace: one name in the job, two at the door, there and back; and hosted
tools, of which a job has none."""

from __future__ import annotations

from typing import Any, get_args
from uuid import uuid4

import msgspec
import pytest

from services.gateway.responses.conversation import listed, messages_of
from services.gateway.responses.hosted_calls import AnyHostedCall
from services.gateway.responses.hosted_tools import TYPES
from services.gateway.responses.output_items import CallItem
from services.gateway.responses.requests import kept_items_of, response_request
from services.gateway.responses.tools import flat_tools
from shardline.base.errors import Invalid

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
LOOK = {"type": "function", "name": "look"}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ADD, LOOK]}
CALL = {
    "type": "function_call",
    "call_id": "c-1",
    "namespace": "crm",
    "name": "add",
    "arguments": "{}",
}
OUTPUT = {"type": "function_call_output", "call_id": "c-1", "output": "done"}
SEARCH = {"type": "web_search", "external_web_access": False}
ASKED: dict[str, Any] = {"model": "clerk", "input": "a", "tools": [LOOK, SPACE]}


def test_functions_of_a_namespace_are_shown_as_they_came() -> None:
    request = response_request(ASKED)
    assert [tool.function.name for tool in request.tools] == ["look", "crm__add", "crm__look"]
    kept = request.asked.options()
    assert kept.namespaces == {"crm__add": "crm", "crm__look": "crm"}
    shown = msgspec.to_builtins(flat_tools(request.tools, kept.namespaces, kept.descriptions, {}))
    assert [(tool["type"], tool["name"]) for tool in shown] == [
        ("function", "look"),
        ("namespace", "crm"),
    ]
    assert [tool["name"] for tool in shown[1]["tools"]] == ["add", "look"]
    assert shown[1]["description"] == "Customers."


def test_a_namespace_without_a_description_is_shown_with_an_empty_one() -> None:
    space = {name: value for name, value in SPACE.items() if name != "description"}
    request = response_request({**ASKED, "tools": [space]})
    kept = request.asked.options()
    (shown,) = flat_tools(request.tools, kept.namespaces, kept.descriptions, {})
    assert shown.description == ""


def test_a_call_that_comes_back_has_the_name_that_the_model_knows() -> None:
    request = response_request({**ASKED, "input": [{"role": "user", "content": "a"}, CALL, OUTPUT]})
    assert request.messages is not None
    (call,) = request.messages[1].tool_calls or ()
    assert call.function.name == "crm__add"
    item = listed(uuid4(), kept_items_of(request.asked))[1]
    assert isinstance(item, CallItem)
    assert (item.namespace, item.name) == ("crm", "add")
    assert messages_of([item])[0].tool_calls == (call,)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{**SPACE, "name": "n" * 124}], "tools[0].tools[0].name"),
        ([LOOK, {**SPACE, "tools": [ADD, ADD]}], "tools[1].tools[1].name"),
        ([{**LOOK, "name": "crm__look"}, SPACE], "tools[1].tools[1].name"),
        ([SEARCH, LOOK, {**SPACE, "tools": [ADD, ADD]}], "tools[2].tools[1].name"),
        ([SEARCH, {**LOOK, "name": "a b"}], "tools[1].name"),
        ([SEARCH, {"type": "unheard", "name": "a"}], "tools[1].type"),
        ([{**SPACE, "tools": []}], "tools[0].tools"),
        ([{**SPACE, "tools": [SPACE]}], "tools[0].tools[0].type"),
        ([{**SPACE, "name": f"n{place}", "tools": [LOOK] * 1} for place in range(129)], "tools"),
        (
            [
                {**SPACE, "tools": [{**LOOK, "name": f"f{place}"} for place in range(100)]},
                {**SPACE, "name": "b", "tools": [{**LOOK, "name": f"f{n}"} for n in range(29)]},
            ],
            "tools",
        ),
    ],
)
def test_a_wrong_function_of_a_namespace_is_named_where_it_stands(
    tools: list[dict[str, Any]], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        response_request({**ASKED, "tools": tools})
    assert caught.value.field == field


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_a_hosted_tool_is_left_out_and_cannot_be_chosen(kind: str) -> None:
    tools = [{"type": kind}, LOOK]
    for choice in ("auto", "none", "required", {"type": "function", "name": "look"}):
        request = response_request({**ASKED, "tools": tools, "tool_choice": choice})
        assert [tool.function.name for tool in request.tools] == ["look"]
    allowed = [{"type": "function", "name": "look"}, {"type": kind}]
    for chosen, field in (
        ({"type": kind}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "auto", "tools": allowed}, "tool_choice.tools[1].type"),
    ):
        with pytest.raises(Invalid, match="left out") as caught:
            response_request({**ASKED, "tools": tools, "tool_choice": chosen})
        assert caught.value.field == field
    with pytest.raises(Invalid) as caught:
        response_request({**ASKED, "tools": [{"type": kind}], "tool_choice": "required"})
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("kind", [item.__struct_config__.tag for item in get_args(AnyHostedCall)])
def test_what_a_hosted_tool_did_is_left_out_of_a_conversation(kind: str) -> None:
    call = {"type": kind, "id": "ws_1", "status": "completed", "action": {"query": "Rome"}}
    said = {"role": "assistant", "content": "It rains."}
    asked = {**ASKED, "input": [{"role": "user", "content": "Rome?"}, call, said]}
    request = response_request(asked)
    assert [(one.role, one.content) for one in request.messages or ()] == [
        ("user", "Rome?"),
        ("assistant", "It rains."),
    ]
    assert len(kept_items_of(request.asked)) == 2
    assert response_request({**asked, "context_management": []}).messages == request.messages
    with pytest.raises(Invalid, match="Send messages too") as caught:
        response_request({**ASKED, "input": [call]})
    assert caught.value.field == "input"
