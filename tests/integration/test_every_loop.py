"""The loops of the product, found in its code: a new one fails here until it has its poison, or a
reason why it needs none."""

from __future__ import annotations

import pytest

from tests.loops import loops
from tests.repository import REPOSITORY

LOOPS = "tests/integration/test_loops.py"
RELAY = "tests/integration/relay"

POISONS = {
    "services.gateway.batches.batch_keeper.BatchKeeper._run": (
        "tests/integration/gateway/test_batches.py"
        "::test_a_file_that_is_no_batch_fails_and_runs_nothing"
    ),
    "services.gateway.insert_batcher.InsertBatcher._run": (
        f"{LOOPS}::test_a_request_that_conflicts_fails_its_caller_alone"
    ),
    "services.gateway.keyring.Keyring._ask": (
        f"{LOOPS}::test_a_refused_statement_ends_no_task_of_the_keyring"
    ),
    "services.gateway.keyring.Keyring._note_uses": (
        f"{LOOPS}::test_a_refused_statement_ends_no_task_of_the_keyring"
    ),
    "services.relay.canceller.Canceller": f"{LOOPS}::test_a_cancel_without_a_row_holds_up_no_other",
    "services.relay.statistics.job_counts.JobCounts": (
        f"{LOOPS}::test_a_workers_odd_row_does_not_end_the_census"
    ),
    "services.relay.coordinator.Coordinator": (
        f"{RELAY}/test_coordinator.py"
        "::test_a_worker_that_no_plan_can_count_is_told_of_and_the_others_are_planned"
    ),
    "services.relay.statistics.energy_rates.EnergyRates": (
        f"{RELAY}/test_energy_rates.py"
        "::test_whatever_a_source_answers_the_other_one_is_read_and_no_address_is_logged"
    ),
    "services.relay.intake.Intake": (
        f"{RELAY}/test_doors.py::test_each_intake_entry_ends_as_a_row_or_a_dead_letter"
    ),
    "services.relay.notices.webhook_sender.WebhookSender": (
        f"{RELAY}/test_webhooks.py"
        "::test_endpoints_that_fail_hang_or_move_harm_nobody_else_and_replays_arrive"
    ),
    "services.relay.outbox.Outbox": f"{LOOPS}::test_a_job_that_cannot_be_sent_holds_up_no_other",
    "services.relay.preparation.preparer.Preparer": (
        f"{RELAY}/test_doors.py"
        "::test_invalid_rows_inserted_by_hand_fail_with_a_reason_and_block_nothing"
    ),
    "services.relay.schedule_keeper.ScheduleKeeper": (
        "tests/integration/store/test_schedules.py"
        "::test_a_row_that_is_wrong_is_paused_with_its_reason_and_blocks_no_other"
    ),
    "services.stage.fleet.peer_server.PeerServer": (
        f"{LOOPS}::test_no_question_of_a_peer_ends_its_server"
    ),
    "services.relay.celery.celery_results.CeleryResults": (
        f"{LOOPS}::test_an_end_that_a_result_backend_refuses_costs_no_other_its_own"
    ),
    "services.relay.celery.task_finisher.TaskFinisher": (
        f"{RELAY}/test_canvas.py"
        "::test_a_callback_that_can_never_be_sent_holds_up_no_result_and_no_other_task"
    ),
    "services.relay.celery.task_finisher.TaskResults": (
        f"{RELAY}/test_celery_results.py::test_an_entry_that_cannot_be_read_stops_no_later_result"
    ),
    "services.stage.jobs.result_publisher.ResultPublisher": (
        "tests/unit/stage/jobs/test_result_publisher.py"
        "::test_a_result_that_cannot_be_stored_is_dropped_alone"
    ),
    "services.stage.adapters.adapter_watch.AdapterWatch": (
        f"{LOOPS}::test_a_broken_adapter_hides_no_other"
    ),
    "services.stage.pipeline.energy_writer.EnergyWriter": (
        "tests/integration/stage/pipeline/test_energy_writer.py"
        "::test_what_postgres_refuses_is_told_once_and_written_later"
    ),
    "services.stage.pipeline.pipeline.Pipeline._run": (
        f"{LOOPS}::test_a_card_that_is_none_hides_no_other"
    ),
    "services.stage.pipeline.control_server.ControlServer._run": (
        "tests/unit/stage/pipeline/test_binding.py"
        "::test_a_next_stage_that_cannot_be_reached_is_a_refusal"
    ),
    "services.stage.engine.engine.Engine": (
        "tests/unit/stage/engine/test_sampler.py"
        "::test_a_row_that_is_no_distribution_is_bad_and_the_others_go_on"
    ),
    "services.stage.jobs.lease_manager.LeaseManager": (
        "tests/integration/stage/celery/test_pool.py"
        "::test_no_message_in_a_heads_queue_ends_it_or_keeps_a_seat"
    ),
    "shardline.client.query_batcher.QueryBatcher._run": (
        f"{LOOPS}::test_a_question_that_fails_fails_its_caller_alone"
    ),
    "shardline.streams.reader.DeltaReader._run": (
        f"{LOOPS}::test_a_key_that_is_no_stream_costs_no_other_its_deltas"
    ),
}
"""By loop: the test that poisons it."""

NO_ITEMS = {
    "services.gateway.http.connections.ConnectionRegister._sweep": "times of its own connections",
    "services.gateway.groups.job_group._until_ended": "one request's",
    "services.gateway.groups.job_group.disconnected": "one request's",
    "services.gateway.groups.job_group.gateway.stopping.wait": "one request's",
    "services.gateway.openai.choice_answers._hear": "one request's; passes on whatever it meets",
    "services.gateway.openai.completion_response.disconnected": "one request's",
    "services.gateway.openai.completion_response.gateway.client.until_ended": "one request's",
    "services.gateway.openai.completion_response.gateway.stopping.wait": "one request's",
    "services.gateway.http.sse.EventStream._send_all": "one request's",
    "services.gateway.http.sse.disconnected": "one request's",
    "services.relay.statistics.growth.Growth": "sizes of tables",
    "services.relay.notices.ended_stream.EndedStream": "ids alone, written as they come",
    "services.relay.notices.webhook_sender.WebhookSender._send": "one webhook's; fails alone",
    "services.relay.notices.webhook_keeper.WebhookKeeper": "moves rows by times and states",
    "services.relay.notify_listener.NotifyListener": "a word that it does not know wakes no loop",
    "services.relay.retention.Retention": (
        "deletes rows by their age alone, and reads nothing else of them"
    ),
    "services.relay.sweeper.Sweeper": (
        "moves rows by times and states; of a partial text it takes none that fails"
    ),
    "services.stage.engine.launched_steps.LaunchedSteps": "the engine's own steps",
    "services.stage.jobs.delta_publisher.DeltaPublisher": (
        "its own deltas; a key of another type fails alone"
    ),
    "services.stage.fleet.membership.Membership": (
        "its own row: without it the stage starts again, and joins anew"
    ),
    "services.stage.pipeline.registry.Announcer._run": "its own card",
    "services.stage.ranks.processes.OtherRanks._watch": "waits for one process",
    "services.standalone.measuring.Measuring._talk": "ends with the measuring",
    "services.standalone.readiness.ReadinessWatcher._watch": "ends when the stack is ready",
    "shardline.client.ends.Ends._listen": "nobody reads what a NOTIFY says",
    "shardline.client.ends.Ends._look": "ids alone",
    "shardline_server.tokenize.grammars.grammar_load.GrammarLoad._read": (
        "the model's own tokenizer, once"
    ),
    "shardline_server.tracing.Tracer._processor.shutdown": "ends at a stop",
}
"""By loop: why nothing bad can reach it from outside."""


def test_every_loop_of_the_product_has_its_poison_or_a_reason() -> None:
    assert loops() == POISONS.keys() | NO_ITEMS.keys()
    assert not POISONS.keys() & NO_ITEMS.keys()


@pytest.mark.parametrize("test", sorted(set(POISONS.values())))
def test_each_poison_is_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (REPOSITORY / file).read_text(encoding="utf-8")
