"""Items as chat messages, and as the lists of a response's input show them: the one place that
knows both. Knows no row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from msgspec import UNSET

from services.gateway.responses.custom_tools import arguments_of
from services.gateway.responses.input_items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputCustomOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    InputReference,
    ReasoningText,
    text_of,
)
from services.gateway.responses.output_items import (
    CallItem,
    CustomCallItem,
    ListedCallOutput,
    ListedCustomOutput,
    ListedItem,
    ListedMessage,
    ListedText,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
)
from services.gateway.responses.tools import joined_name
from shardline.base.errors import Invalid
from shardline.contract.chat import FunctionCall, Message, ToolCall

ASSISTANT = "assistant"
SYSTEM = "system"
TOOL = "tool"
USER = "user"

AnyItem = InputItem | OutputItem


def messages_of(
    items: Iterable[AnyItem], *, instructions: str | None = None
) -> tuple[Message, ...]:
    """Returns the items as a conversation, instructions first. Consecutive reasoning, content and
    calls of the model are one message. A reference is something of the model's until its item is
    read."""
    found = [] if instructions is None else [Message(role=SYSTEM, content=instructions)]
    turn: list[AnyItem] = []
    for item in items:
        if turn and _begins_turn(item, turn[-1]):
            found.append(_turn_message(turn))
            turn = []
        if _is_models(item):
            turn.append(item)
        else:
            found.append(_message(item))
    return (*found, _turn_message(turn)) if turn else tuple(found)


def check_outputs(messages: Sequence[Message]) -> None:
    """Raises Invalid for the output of a call that was not made before it."""
    made: set[str] = set()
    for message in messages:
        made |= {call.id for call in message.tool_calls or ()}
        if message.role == TOOL and message.tool_call_id not in made:
            problem = f"no call before it has the call_id {message.tool_call_id!r}"
            raise Invalid("input", problem, "Send the function_call too, before its output")


def beginnings(messages: Sequence[Message]) -> list[int]:
    """Places where a shorter conversation may begin, the whole one first: behind the instructions,
    and before each later message of the user. So a template finds turns in their order, and each
    output its call."""
    first = _num_instructions(messages)
    later = [place for place in range(first + 1, len(messages)) if messages[place].role == USER]
    return [first, *later]


def from_place(messages: Sequence[Message], place: int) -> tuple[Message, ...]:
    """The instructions, and the conversation from a place on."""
    return (*messages[: _num_instructions(messages)], *messages[place:])


def _num_instructions(messages: Sequence[Message]) -> int:
    return int(bool(messages) and messages[0].role == SYSTEM)


def listed(job_id: UUID, items: Sequence[InputItem]) -> list[ListedItem]:
    """The items of a request, with ids."""
    return [_listed(f"{job_id}_in{place}", item) for place, item in enumerate(items)]


def _is_models(item: AnyItem) -> bool:
    if isinstance(item, InputMessage):
        return item.role == ASSISTANT
    return not isinstance(item, InputCallOutput | InputCustomOutput)


def _begins_turn(item: AnyItem, before: AnyItem) -> bool:
    """Whether it is no part of the message that ends with the item before it: a model thinks, then
    speaks, then calls."""
    if not _is_models(item):
        return True
    if isinstance(item, InputCall | CallItem | InputCustomCall | CustomCallItem):
        return False
    return not isinstance(before, InputReasoning | ReasoningItem)


def _turn_message(turn: Sequence[AnyItem]) -> Message:
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for item in turn:
        if isinstance(item, InputReasoning | ReasoningItem):
            reasoning += [part.text for part in item.content or item.summary]
        elif isinstance(item, InputCall | CallItem):
            name = joined_name(item.namespace or None, item.name)
            function = FunctionCall(name=name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        elif isinstance(item, InputCustomCall | CustomCallItem):
            function = FunctionCall(name=item.name, arguments=arguments_of(item.input))
            calls.append(ToolCall(id=item.call_id, function=function))
        elif isinstance(item, InputMessage):
            texts.append(text_of(item.content))
        elif isinstance(item, MessageItem):
            texts += [part.text for part in item.content]
    return Message(
        role=ASSISTANT,
        content="\n".join(texts),
        reasoning="\n".join(reasoning) or None,
        tool_calls=tuple(calls) or None,
    )


def _message(item: AnyItem) -> Message:
    if isinstance(item, InputCallOutput | InputCustomOutput):
        return Message(role=TOOL, content=text_of(item.output), tool_call_id=item.call_id)
    assert isinstance(item, InputMessage), "all others are the model's"
    return Message(role=item.role, content=text_of(item.content))


def _listed(place: str, item: InputItem) -> ListedItem:
    if isinstance(item, InputMessage):
        kind = OutputText if item.role == ASSISTANT else ListedText
        texts = (
            [item.content]
            if isinstance(item.content, str)
            else [part.text for part in item.content]
        )
        return ListedMessage(
            id=f"msg_{place}",
            status="completed",
            role=item.role,
            content=[kind(text=text) for text in texts],
        )
    if isinstance(item, InputReasoning):
        thought = [ReasoningText(text=part.text) for part in item.content or ()]
        return ReasoningItem(
            id=f"rs_{place}", status="completed", summary=item.summary, content=thought
        )
    if isinstance(item, InputCall):
        return CallItem(
            id=f"fc_{place}",
            status="completed",
            call_id=item.call_id,
            name=item.name,
            namespace=item.namespace or UNSET,
            arguments=item.arguments,
        )
    if isinstance(item, InputCustomCall):
        return CustomCallItem(
            id=f"ctc_{place}",
            status="completed",
            call_id=item.call_id,
            name=item.name,
            input=item.input,
        )
    assert not isinstance(item, InputReference), "a row has the items themselves"
    is_custom = isinstance(item, InputCustomOutput)
    return (ListedCustomOutput if is_custom else ListedCallOutput)(
        id=f"{'ctco' if is_custom else 'fco'}_{place}",
        status="completed",
        call_id=item.call_id,
        output=text_of(item.output),
    )
