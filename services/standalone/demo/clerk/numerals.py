"""Owns English number words, ordinals and the spelling of whole numbers below one million. Knows no
task."""

from typing import Final


def words(text: str) -> tuple[str, ...]:
    """A word list that reads as text where it is written down."""
    return tuple(text.split())


LIMIT: Final = 1_000_000
_SMALL: Final = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS: Final = ("", "", *words("twenty thirty forty fifty sixty seventy eighty ninety"))


def spell(number: int) -> str:
    """British style: 4021 is "four thousand and twenty-one"."""
    if not 0 <= number < LIMIT:
        raise ValueError(f"number is {number}; spell() takes 0 to {LIMIT - 1}")
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _spell_below_1000(rest)
    head = f"{_spell_below_1000(thousands)} thousand"
    if not rest:
        return head
    return f"{head} {'and ' if rest < 100 else ''}{_spell_below_1000(rest)}"


def ordinal(number: int) -> str:
    """21 is "21st", 12 is "12th"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _spell_below_1000(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _spell_below_100(rest)
    head = f"{_SMALL[hundreds]} hundred"
    return f"{head} and {_spell_below_100(rest)}" if rest else head


def _spell_below_100(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens]}-{_SMALL[ones]}" if ones else _TENS[tens]
