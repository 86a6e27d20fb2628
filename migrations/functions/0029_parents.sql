-- Jobs that wait for others: see shared/shardline_server/store/parents.py.

-- Of each new row with `depends_on`. Raises for a parent that its tenant does not have, and for one
-- of the same statement that waits and comes behind it: so there is no circle.
CREATE OR REPLACE FUNCTION shardline_join_parents() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    wrong text;
    problem text;
BEGIN
    SELECT one ->> 'job', CASE
        WHEN parents.id IS NULL OR parents.id = NEW.id THEN 'tenant %s has no job %s'
        ELSE 'of tenant %s job %s waits too, and comes behind it in the same statement' END
    INTO wrong, problem
    FROM jsonb_array_elements(NEW.depends_on) AS one
    LEFT JOIN jobs AS parents
        ON parents.id = (one ->> 'job')::uuid AND parents.tenant_id = NEW.tenant_id
    WHERE parents.id IS NULL OR parents.id = NEW.id OR (
        parents.depends_on IS NOT NULL AND parents.state = 'queued'
        AND NOT EXISTS (SELECT FROM parents_of_jobs WHERE job_id = parents.id))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'foreign_key_violation',
            CONSTRAINT = 'jobs_depends_on', TABLE = 'jobs',
            MESSAGE = format(problem, NEW.tenant_id, coalesce(wrong, 'without an id'));
    END IF;
    INSERT INTO parents_of_jobs (job_id, parent_id)
    SELECT DISTINCT NEW.id, (one ->> 'job')::uuid
    FROM jsonb_array_elements(NEW.depends_on) AS one;
    RETURN NULL;
END
$$;

-- A job has ended, or was deleted before it did: a relay looks at those that wait for it. One that
-- is about to begin to wait is looked at in any case.
CREATE OR REPLACE FUNCTION shardline_call_children() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE parents_of_jobs SET state = 'due' WHERE parent_id = OLD.id AND state = 'open';
    IF FOUND THEN
        PERFORM pg_notify('shardline_jobs', '');
    END IF;
    RETURN NULL;
END
$$;

-- As in revision 0026. What a job takes with its parents' texts is not known yet: all that fits.
CREATE OR REPLACE FUNCTION shardline_measure(
    job_id uuid, tenant text, key_name text, model text, prompt text, messages jsonb,
    prompt_ids int[], params jsonb, max_tokens int, choice_of uuid, depends_on jsonb DEFAULT NULL)
RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'job_id', job_id, 'quotas', held.quotas, 'tokens', size.tokens,
        'requests', CASE WHEN choice_of IS NULL OR choice_of = job_id THEN 1 ELSE 0 END,
        'bytes', coalesce(octet_length(prompt), 0) + coalesce(octet_length(messages::text), 0)
            + 4 * coalesce(cardinality(prompt_ids), 0),
        'input_price', coalesce(price.input_price, 0),
        'output_price', coalesce(price.output_price, 0),
        'money', coalesce(CASE WHEN max_tokens IS NULL
            THEN size.tokens * greatest(price.input_price, price.output_price)
            ELSE cardinality(prompt_ids) * price.input_price + max_tokens * price.output_price
            END / 1000000, 0))
    FROM (
        SELECT array_agg(id ORDER BY id) AS quotas FROM quotas
        WHERE quotas.tenant_id = tenant
            AND quotas.key_name IN ('', coalesce($3, ''))
    ) AS held
    CROSS JOIN LATERAL (SELECT CASE WHEN depends_on IS NULL
        THEN shardline_reserved_tokens(model, prompt, messages, prompt_ids, params, max_tokens)
        ELSE shardline_reserved_tokens(model, NULL, NULL, NULL, '{}', NULL) END AS tokens) AS size
    LEFT JOIN LATERAL (
        SELECT * FROM prices
        WHERE prices.model = $4 OR starts_with($4, prices.model || ':')
        ORDER BY length(prices.model) DESC LIMIT 1
    ) AS price ON true
    WHERE held.quotas IS NOT NULL
$$;

-- As in revision 0026, with `depends_on`.
CREATE OR REPLACE FUNCTION shardline_accept_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    party record;
    excess jsonb;
BEGIN
    IF NOT EXISTS (SELECT FROM quotas) THEN
        RETURN NULL;
    END IF;
    FOR party IN
        SELECT ARRAY(SELECT jsonb_array_elements_text(one -> 'quotas')::bigint) AS ids,
            jsonb_agg(one) AS members, sum((one ->> 'requests')::bigint)::bigint AS requests,
            count(*) AS jobs, sum((one ->> 'tokens')::bigint)::bigint AS tokens,
            sum((one ->> 'bytes')::bigint)::bigint AS bytes,
            sum((one ->> 'money')::numeric) AS money
        FROM (
            SELECT shardline_measure(id, tenant_id, key_name, model, prompt, messages, prompt_ids,
                params, max_tokens, choice_of, depends_on) AS one
            FROM fresh WHERE state = 'queued'
                AND NOT EXISTS (SELECT FROM reservations WHERE job_id = fresh.id)
        ) AS measured
        WHERE one IS NOT NULL GROUP BY 1 ORDER BY 1
    LOOP
        excess := shardline_reserve(
            party.ids, party.requests, party.jobs, party.tokens, party.bytes, party.money);
        IF excess IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'configuration_limit_exceeded',
                MESSAGE = format('tenant %s has %s of %s, and %s more are asked for: see quotas.%s',
                    excess ->> 'tenant', excess ->> 'taken', excess ->> 'most', excess ->> 'asked',
                    excess ->> 'name'),
                DETAIL = excess::text;
        END IF;
        PERFORM shardline_hold(party.members);
    END LOOP;
    RETURN NULL;
END
$$;
