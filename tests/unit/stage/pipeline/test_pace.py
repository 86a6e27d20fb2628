"""A stage's pace: averages over steps, and the fastest of some pings."""

from __future__ import annotations

from services.stage.pipeline.pace import NUM_PINGS, NUM_STEPS, Pace


def test_a_step_takes_what_the_last_steps_took() -> None:
    pace = Pace()
    pace.note_steps(NUM_STEPS - 1, 9.0)
    assert pace.step_s == 0.0, "too few to tell"
    pace.note_steps(NUM_STEPS, 2.0 * NUM_STEPS)
    assert pace.step_s == 2.0
    pace.note_steps(2 * NUM_STEPS - 1, 99.0)
    assert pace.step_s == 2.0
    pace.note_steps(3 * NUM_STEPS, 2.0 * NUM_STEPS + 1.0 * NUM_STEPS)
    assert pace.step_s == 0.5


def test_the_fastest_of_the_last_pings_counts() -> None:
    pace = Pace()
    assert pace.round_trip_s == 0.0
    for microseconds in [300, *[5000] * (NUM_PINGS - 1)]:
        pace.note_ping(microseconds)
    assert pace.round_trip_s == 0.0003
    pace.note_ping(5000)
    assert pace.round_trip_s == 0.005
