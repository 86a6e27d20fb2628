-- SQL alone, as dbt runs it: a table is classified, and its answers are joined to it.
-- psql "$SHARDLINE_DATABASE_URL" -f docs/examples/classify_table.sql

CREATE TABLE IF NOT EXISTS example_reviews (id bigserial PRIMARY KEY, review text NOT NULL);
INSERT INTO example_reviews (review) VALUES ('It came a week late.'), ('Just what I needed.');

-- One job for each row. The key makes a repeat of this statement ask for new rows alone.
INSERT INTO jobs (model, prompt, params, metadata, idempotency_key)
SELECT 'clerk', review,
    '{"question": {"type": "predicate", "name": "late", "instructions": "It came late."}}',
    jsonb_build_object('review', id), 'example_reviews ' || id
FROM example_reviews
ON CONFLICT DO NOTHING;

-- Complete as soon as the jobs have ended, for joins and dashboards at any time.
CREATE OR REPLACE VIEW example_late_reviews AS
SELECT reviews.id, reviews.review, late.state, late.choice, late.probability
FROM example_reviews AS reviews
LEFT JOIN decisions AS late ON late.name = 'late' AND late.metadata -> 'review' = to_jsonb(reviews.id);
