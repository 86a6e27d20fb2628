"""Steps with an interactive prompt, which have no rows of others."""

from __future__ import annotations

from tests.simulation.pipeline import Pipeline, config, decoding, request, shape


def test_a_step_with_an_interactive_prompt_has_no_rows_of_others() -> None:
    pipeline = Pipeline(config(num_lanes=1, token_budget=100))
    decoding(pipeline, "a", "b")
    pipeline.add(request("bulk", num_prompt=40))
    pipeline.add(request("chat", num_prompt=20, priority=3))

    assert shape(pipeline.schedule()) == [(2, 0, 20)]
    pipeline.deliver()
    assert shape(pipeline.schedule()) == [(0, 5, 1), (1, 5, 1), (2, 20, 1), (3, 0, 40)]


def test_interactive_answers_go_on_beside_an_interactive_prompt() -> None:
    pipeline = Pipeline(config(num_lanes=1, token_budget=100))
    decoding(pipeline, "a")
    decoding(pipeline, "chat", priority=0)
    pipeline.schedule()
    pipeline.deliver()
    pipeline.add(request("another", num_prompt=20, priority=3))

    assert shape(pipeline.schedule()) == [(1, 6, 1), (2, 0, 20)]


def test_others_have_every_second_step() -> None:
    pipeline = Pipeline(config(num_lanes=1, token_budget=100, num_blocks=100))
    decoding(pipeline, "a")
    for number in range(8):
        pipeline.add(request(f"chat {number}", num_prompt=200, priority=0, max_tokens=1))

    has_row = []
    for _ in range(8):
        has_row.append(any(seq == 0 for seq, _, _ in shape(pipeline.schedule())))
        pipeline.deliver()

    assert has_row == [False, True] * 4


def test_a_prompt_that_finds_no_room_makes_no_step_narrow() -> None:
    pipeline = Pipeline(config(num_lanes=1, num_blocks=3))
    decoding(pipeline, "a", "b")
    pipeline.add(request("chat", num_prompt=150, priority=0))

    assert shape(pipeline.schedule()) == [(0, 5, 1), (1, 5, 1)]
