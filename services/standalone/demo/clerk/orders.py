"""Owns the order lines: free wording in, one JSON object out. Knows no other task."""

import json
from random import Random
from typing import Final

from services.standalone.demo.clerk.numerals import spell, words

_CUSTOMERS: Final = words(
    "Ada Ahmed Aisha Akira Alba Amara Anton Aylin Bela Boris Carla Carlos Chen Chloe Daniel Dina "
    "Elena Emil Esther Farid Fatima Felix Freya Gita Hana Hugo Ines Ingrid Ivan Jonas Julia Kofi "
    "Lars Leila Lena Lucas Maria Mateo Maya Mina Nadia Nils Nora Olga Omar Oscar Paula Pedro Priya "
    "Rafael Rosa Samir Sara Sofia Stefan Tariq Tess Tomas Uma Vera Viktor Wei Yara Yusuf Zoe"
)
_ITEMS: Final = words(
    "badges batteries binders blankets bolts bottles brushes buckets cables candles cards chairs "
    "cups envelopes filters folders forks gloves hammers helmets hooks jackets keys labels ladders "
    "lamps magnets mats mirrors nails notebooks pens pencils plates pots ribbons rulers scissors "
    "screws shelves spoons stamps tables tapes tiles towels valves vests wires"
)
_KINDS: Final = words(
    "black blue brown cheap green heavy large light long orange plain red short small white yellow"
)
_UNITS: Final = {
    "box": "boxes",
    "pack": "packs",
    "crate": "crates",
    "bag": "bags",
    "pallet": "pallets",
    "roll": "rolls",
}
_DAYS: Final = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_WORDINGS: Final = (
    "{goods} for {customer}{due}",
    "please send {customer} {goods}{due}",
    "{customer} needs {goods}{due}",
    "{customer} orders {goods}{due}",
    "ship {goods} to {customer}{due}",
)


def write_order(rng: Random) -> tuple[str, str]:
    """One order line and the JSON text it means."""
    quantity, wording = _quantity(rng)
    unit = rng.choice(["piece", *_UNITS])
    item = f"{rng.choice(_KINDS)} {rng.choice(_ITEMS)}"
    day = rng.choice([None, *_DAYS])
    customer = rng.choice(_CUSTOMERS)
    packed = "" if unit == "piece" else f"{unit if quantity == 1 else _UNITS[unit]} of "
    line = rng.choice(_WORDINGS).format(
        goods=f"{wording} {packed}{item}", customer=customer, due=f" by {day}" if day else ""
    )
    meaning = {"customer": customer, "quantity": quantity, "unit": unit, "item": item, "due": day}
    return line, json.dumps(meaning)


def _quantity(rng: Random) -> tuple[int, str]:
    """Returns a number and how the line writes it: in digits, in a word, or as a dozen."""
    style = rng.randrange(8)
    if style == 0:
        return 12, "a dozen"
    if style <= 2:
        quantity = rng.randint(2, 12)
        return quantity, spell(quantity)
    quantity = rng.randint(1, 10 ** rng.randint(1, 3) - 1)
    return quantity, str(quantity)
