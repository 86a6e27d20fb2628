"""Given clerk's tasks, when examples are drawn, then they are repeatable, right, and never in both
splits."""

import json
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.standalone.demo.clerk.numerals import LIMIT, ordinal, spell, words
from services.standalone.demo.clerk.tasks import TASKS, UNSEEN_SHARE, Example, examples, is_unseen

_BELOW_20 = words(
    "zero one two three four five six seven eight nine "
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = dict(zip((*_BELOW_20, *_TENS), (*range(20), *range(20, 100, 10)), strict=True))


def _read(text: str) -> int:
    """The other way round from spell(), and by another road."""
    total = group = 0
    for word in text.replace("-", " ").replace(" and ", " ").split():
        if word == "hundred":
            group *= 100
        elif word == "thousand":
            total = group * 1000
            group = 0
        else:
            group += _VALUES[word]
    return total + group


def _of(task: str, num: int = 200) -> list[Example]:
    return [example for example in examples(3, num * len(TASKS)) if example.task == task]


def _question(example: Example) -> str:
    return example.prompt.removeprefix(f"{example.task}: ").removesuffix(" =")


@given(st.integers(0, LIMIT - 1))
def test_a_spelled_number_reads_back_as_itself(number: int) -> None:
    assert _read(spell(number)) == number


@pytest.mark.parametrize("number", [-1, LIMIT])
def test_a_number_out_of_range_is_refused_with_the_range(number: int) -> None:
    with pytest.raises(ValueError, match="takes 0 to 999999"):
        spell(number)


@pytest.mark.parametrize(
    ("number", "said"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (13, "13th"), (22, "22nd"), (30, "30th")],
)
def test_ordinals_follow_english(number: int, said: str) -> None:
    assert ordinal(number) == said


def test_the_same_seed_gives_the_same_examples_in_every_version() -> None:
    assert examples(7, 300, "unseen") == examples(7, 300, "unseen")
    assert [(e.prompt, e.answer) for e in examples(0, len(TASKS))] == [
        ("date: Mar 14th, 1911 =", "1911-03-14"),
        ("words: 72624 =", "seventy-two thousand six hundred and twenty-four"),
        ("number: nine hundred and sixty =", "960"),
        (
            "order: ship five pallets of long cups to Farid by Friday =",
            '{"customer": "Farid", "quantity": 5, "unit": "pallet", "item": "long cups",'
            ' "due": "Friday"}',
        ),
        ("sort: 92, 62, 75 =", "62, 75, 92"),
        ("sum: 323 + 158 =", "3+8+0=11, 2+5+1=8, 3+1+0=4: 481"),
    ]


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert examples(1, 50)[:20] == examples(1, 20)


def test_a_negative_number_of_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="num is -1"):
        examples(0, -1)


def test_a_task_named_twice_comes_twice_as_often() -> None:
    drawn = [example.task for example in examples(0, 6, turns=("sum", "date", "sum"))]
    assert drawn == ["sum", "date", "sum", "sum", "date", "sum"]


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"turns names \['poem'\]; clerk's tasks are \['date'"):
        examples(0, 6, turns=("poem",))


def test_no_prompt_is_in_both_splits() -> None:
    trained = {example.prompt for example in examples(0, 6000)}
    unseen = {example.prompt for example in examples(0, 6000, "unseen")}
    assert not trained & unseen
    assert all(map(is_unseen, unseen))
    assert not any(map(is_unseen, trained))


def test_about_one_prompt_in_sixteen_is_unseen() -> None:
    num_unseen = sum(is_unseen(f"sum: {number}") for number in range(16_000))
    assert 0.9 < num_unseen * UNSEEN_SHARE / 16_000 < 1.1


def test_dates_mean_the_day_they_name() -> None:
    for example in _of("date"):
        day = date.fromisoformat(example.answer)
        question = _question(example)
        assert str(day.year) in question
        if question[-5] == ".":
            assert question == f"{day.day}.{day.month}.{day.year}"
        else:
            assert f"{day:%b}" in question
            assert str(day.day) in question


def test_words_and_numbers_mean_each_other() -> None:
    assert all(_read(example.answer) == int(_question(example)) for example in _of("words"))
    assert all(_read(_question(example)) == int(example.answer) for example in _of("number"))


def test_an_order_says_what_its_json_holds() -> None:
    for example in _of("order"):
        line = _question(example)
        order = json.loads(example.answer)
        assert list(order) == ["customer", "quantity", "unit", "item", "due"]
        assert order["customer"] in line
        assert order["item"] in line
        assert order["due"] is None or f" by {order['due']}" in line
        assert order["unit"] == "piece" or order["unit"] in line
        assert any(
            said in line for said in (str(order["quantity"]), spell(order["quantity"]), "a dozen")
        )


def test_a_sorted_list_holds_the_same_numbers_in_order() -> None:
    for example in _of("sort"):
        assert sorted(map(int, _question(example).split(","))) == list(
            map(int, example.answer.split(","))
        )


def test_a_sum_ends_with_the_total_and_shows_right_columns() -> None:
    for example in _of("sum"):
        left, right = map(int, _question(example).split(" + "))
        work, total = example.answer.split(": ")
        assert int(total) == left + right
        for column in work.split(", "):
            addends, column_total = column.split("=")
            assert sum(map(int, addends.split("+"))) == int(column_total)
