-- Quotas: what jobs reserve when they are accepted, and settle as they end. See docs/tenants.md.

-- The most that a request may take. A row that is not tokenized yet has no more tokens than bytes,
-- and no job has more than its model's context.
CREATE OR REPLACE FUNCTION shardline_reserved_tokens(
    wanted_model text, prompt text, messages jsonb, prompt_ids int[], params jsonb, max_tokens int)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN max_tokens IS NOT NULL THEN cardinality(prompt_ids) + max_tokens::bigint
    ELSE (
        SELECT least(context, told.length + CASE
            WHEN num_nonnulls(prompt, messages) = 0 THEN cardinality(prompt_ids)
            ELSE 256 + octet_length(concat(prompt, messages, params)) END)::bigint
        FROM (SELECT coalesce((
            SELECT context_length FROM models
            WHERE name = wanted_model OR starts_with(wanted_model, name || ':')
            ORDER BY length(name) DESC LIMIT 1
        ), 0) AS context) AS model
        CROSS JOIN LATERAL (SELECT CASE WHEN jsonb_typeof(params -> 'max_tokens') = 'number'
            THEN least(greatest((params -> 'max_tokens')::numeric, 0), context)
            ELSE context END AS length) AS told
    ) END
$$;

-- Locks what is used of a quota, and returns it as of now: without the seconds and the period that
-- are over, with what has moved on since. The caller writes it back.
CREATE OR REPLACE FUNCTION shardline_fold_quota(wanted bigint) RETURNS quota_use
LANGUAGE plpgsql AS $$
DECLARE
    used quota_use;
    change quota_changes;
    began timestamptz;
    now_s bigint;
BEGIN
    SELECT * INTO used FROM quota_use WHERE quota_id = wanted FOR UPDATE;
    IF NOT FOUND THEN
        RETURN used;
    END IF;
    now_s := greatest(floor(extract(epoch FROM clock_timestamp()))::bigint, used.last_second);
    FOR passed IN greatest(used.last_second + 1, now_s - 61 + 1) .. now_s LOOP
        used.requests[passed % 61 + 1] := 0;
        used.tokens[passed % 61 + 1] := 0;
    END LOOP;
    used.last_second := now_s;
    SELECT CASE WHEN budget_period = 'ever' THEN used.period_began_at
        ELSE date_trunc(budget_period, clock_timestamp(), 'UTC') END
    INTO began FROM quotas WHERE id = wanted;
    IF began > used.period_began_at THEN
        used.spent_tokens := 0;
        used.spent_money := 0;
        used.period_began_at := began;
    END IF;
    FOR change IN DELETE FROM quota_changes WHERE quota_id = wanted RETURNING * LOOP
        used.queued := used.queued + change.queued;
        used.bytes := used.bytes + change.bytes;
        used.open_tokens := used.open_tokens + change.open_tokens;
        used.open_money := used.open_money + change.open_money;
        IF change.made_at >= used.period_began_at THEN
            used.spent_tokens := used.spent_tokens + change.spent_tokens;
            used.spent_money := used.spent_money + change.spent_money;
        END IF;
        IF change.at_second > now_s - 61 THEN
            used.tokens[change.at_second % 61 + 1] :=
                used.tokens[change.at_second % 61 + 1] + change.tokens;
        END IF;
    END LOOP;
    RETURN used;
END
$$;

CREATE OR REPLACE FUNCTION shardline_write_quota(used quota_use) RETURNS void LANGUAGE sql AS $$
    UPDATE quota_use SET queued = used.queued, bytes = used.bytes,
        open_tokens = used.open_tokens, open_money = used.open_money,
        spent_tokens = used.spent_tokens, spent_money = used.spent_money,
        period_began_at = used.period_began_at, last_second = used.last_second,
        requests = used.requests, tokens = used.tokens
    WHERE quota_id = used.quota_id
$$;

-- Which limit some requests together are over, and when there may be room; null: none. A limit that
-- they are over by themselves comes first: no waiting helps.
CREATE OR REPLACE FUNCTION shardline_quota_excess(
    used quota_use, num_requests bigint, num_jobs bigint, num_tokens bigint, num_bytes bigint,
    cost numeric)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    quota quotas;
    excess record;
    slots bigint[];
    num_over numeric;
    retry_s float8;
BEGIN
    SELECT * INTO quota FROM quotas WHERE id = used.quota_id;
    SELECT * INTO excess FROM (VALUES
        ('requests_per_min', quota.requests_per_min::numeric, num_requests::numeric,
            (SELECT sum(one) FROM unnest(used.requests) AS one)),
        ('tokens_per_min', quota.tokens_per_min, num_tokens,
            (SELECT sum(one) FROM unnest(used.tokens) AS one)),
        ('max_queued', quota.max_queued, num_jobs, used.queued),
        ('max_bytes', quota.max_bytes, num_bytes, used.bytes + CASE
            WHEN quota.max_bytes IS NULL OR quota.key_name <> '' THEN 0
            ELSE (SELECT coalesce(sum(files.bytes), 0) FROM files
                WHERE files.tenant_id = quota.tenant_id AND files.batch_id IS NULL) END),
        ('budget_tokens', quota.budget_tokens, num_tokens, used.open_tokens + used.spent_tokens),
        ('budget_money', quota.budget_money, cost, used.open_money + used.spent_money)
    ) AS limits (name, most, asked, taken)
    WHERE most IS NOT NULL AND asked > 0 AND taken + asked > most
    ORDER BY asked > most DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF excess.asked > excess.most THEN
        retry_s := NULL;
    ELSIF excess.name IN ('requests_per_min', 'tokens_per_min') THEN
        slots := CASE excess.name WHEN 'tokens_per_min' THEN used.tokens ELSE used.requests END;
        num_over := excess.taken + excess.asked - excess.most;
        FOR second IN used.last_second - 61 + 1 .. used.last_second LOOP
            num_over := num_over - slots[second % 61 + 1];
            retry_s := second + 61 - extract(epoch FROM clock_timestamp());
            EXIT WHEN num_over <= 0;
        END LOOP;
    ELSIF starts_with(excess.name, 'budget_') AND excess.asked + (CASE excess.name
        WHEN 'budget_tokens' THEN used.spent_tokens ELSE used.spent_money END) > excess.most
    THEN
        retry_s := extract(epoch FROM CASE quota.budget_period
            WHEN 'day' THEN used.period_began_at + interval '1 day'
            WHEN 'month' THEN (used.period_began_at AT TIME ZONE 'UTC' + interval '1 month')
                AT TIME ZONE 'UTC' END - clock_timestamp());
    ELSE
        -- Jobs that have not ended hold it.
        retry_s := 1;
    END IF;
    RETURN jsonb_build_object(
        'tenant', quota.tenant_id, 'key_name', quota.key_name, 'name', excess.name,
        'most', excess.most, 'taken', excess.taken, 'asked', excess.asked,
        'retry_after_s', CASE WHEN retry_s IS NOT NULL THEN greatest(retry_s, 0.001) END,
        'requests', quota.requests_per_min,
        'requests_left', greatest(quota.requests_per_min
            - (SELECT sum(one) FROM unnest(used.requests) AS one), 0),
        'tokens', quota.tokens_per_min,
        'tokens_left', greatest(quota.tokens_per_min
            - (SELECT sum(one) FROM unnest(used.tokens) AS one), 0));
END
$$;

-- Takes from all of these quotas (ascending ids), or from none. Returns the excess of one, or null.
CREATE OR REPLACE FUNCTION shardline_reserve(
    wanted bigint[], num_requests bigint, num_jobs bigint, num_tokens bigint, num_bytes bigint,
    cost numeric)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    used quota_use;
    each quota_use[] := ARRAY[]::quota_use[];
    quota bigint;
    excess jsonb;
    place int;
BEGIN
    FOREACH quota IN ARRAY wanted LOOP
        used := shardline_fold_quota(quota);
        CONTINUE WHEN used.quota_id IS NULL;
        each := each || used;
        excess := coalesce(excess, shardline_quota_excess(
            used, num_requests, num_jobs, num_tokens, num_bytes, cost));
    END LOOP;
    FOREACH used IN ARRAY each LOOP
        IF excess IS NULL THEN
            place := used.last_second % 61 + 1;
            used.requests[place] := used.requests[place] + num_requests;
            used.tokens[place] := used.tokens[place] + num_tokens;
            used.queued := used.queued + num_jobs;
            used.bytes := used.bytes + num_bytes;
            used.open_tokens := used.open_tokens + num_tokens;
            used.open_money := used.open_money + cost;
        END IF;
        PERFORM shardline_write_quota(used);
    END LOOP;
    RETURN excess;
END
$$;

-- What the jobs of some rows may take, for those whose tenant or key has quotas. The rows are new
-- ones of `jobs`, or on their way there.
CREATE OR REPLACE FUNCTION shardline_measure(
    job_id uuid, tenant text, key_name text, model text, prompt text, messages jsonb,
    prompt_ids int[], params jsonb, max_tokens int, choice_of uuid)
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
    CROSS JOIN LATERAL (SELECT shardline_reserved_tokens(
        model, prompt, messages, prompt_ids, params, max_tokens) AS tokens) AS size
    LEFT JOIN LATERAL (
        SELECT * FROM prices
        WHERE prices.model = $4 OR starts_with($4, prices.model || ':')
        ORDER BY length(prices.model) DESC LIMIT 1
    ) AS price ON true
    WHERE held.quotas IS NOT NULL
$$;

CREATE OR REPLACE FUNCTION shardline_hold(rows jsonb) RETURNS void LANGUAGE sql AS $$
    INSERT INTO reservations
    SELECT job_id, quotas, floor(extract(epoch FROM clock_timestamp())), tokens, bytes, money,
        input_price, output_price
    FROM jsonb_populate_recordset(NULL::reservations, rows)
$$;

-- For doors that ask before they insert: of each row (of `shardline_measure`, with its number) what
-- it is over, or null where its job is reserved. A repeat is not among them: it takes nothing.
CREATE OR REPLACE FUNCTION shardline_reserve_each(rows jsonb)
RETURNS TABLE (number int, excess jsonb) LANGUAGE plpgsql AS $$
DECLARE
    party record;
    one jsonb;
BEGIN
    FOR party IN
        SELECT item -> 'quotas' AS quotas,
            (SELECT array_agg(id::bigint) FROM jsonb_array_elements_text(item -> 'quotas') AS id)
                AS ids,
            array_agg(item ORDER BY (item ->> 'number')::int) AS members
        FROM jsonb_array_elements(rows) AS item GROUP BY 1, 2 ORDER BY 2
    LOOP
        -- Whoever repeats a request of these tenants waits here for the first one's COMMIT.
        PERFORM FROM quota_use WHERE quota_id = ANY(party.ids) ORDER BY quota_id FOR UPDATE;
        party.members := ARRAY(
            SELECT item FROM (
                SELECT DISTINCT ON (item ->> 'job_id') item FROM unnest(party.members) AS item
                WHERE NOT EXISTS (
                    SELECT FROM jobs WHERE id = (item ->> 'job_id')::uuid
                    UNION ALL
                    SELECT FROM reservations WHERE job_id = (item ->> 'job_id')::uuid
                    UNION ALL
                    SELECT FROM jobs WHERE tenant_id = item ->> 'tenant_id'
                        AND idempotency_key = item ->> 'idempotency_key')
            ) AS new ORDER BY (item ->> 'number')::int);
        CONTINUE WHEN party.members = '{}';
        IF shardline_reserve(party.ids, sum((item ->> 'requests')::bigint)::bigint, count(*),
            sum((item ->> 'tokens')::bigint)::bigint, sum((item ->> 'bytes')::bigint)::bigint,
            sum((item ->> 'money')::numeric)) IS NULL FROM unnest(party.members) AS item
        THEN
            PERFORM shardline_hold(to_jsonb(party.members));
            RETURN QUERY SELECT (item ->> 'number')::int, NULL::jsonb
                FROM unnest(party.members) AS item;
        ELSE
            FOREACH one IN ARRAY party.members LOOP
                number := one ->> 'number';
                excess := shardline_reserve(party.ids, (one ->> 'requests')::bigint, 1,
                    (one ->> 'tokens')::bigint, (one ->> 'bytes')::bigint,
                    (one ->> 'money')::numeric);
                IF excess IS NULL THEN
                    PERFORM shardline_hold(jsonb_build_array(one));
                END IF;
                RETURN NEXT;
            END LOOP;
        END IF;
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION shardline_release(ids uuid[]) RETURNS void LANGUAGE sql AS $$
    -- Reserved, and not inserted after all.
    WITH gone AS (
        DELETE FROM reservations WHERE job_id = ANY(ids)
            AND NOT EXISTS (SELECT FROM jobs WHERE jobs.id = job_id) RETURNING *
    )
    INSERT INTO quota_changes (
        quota_id, queued, bytes, open_tokens, open_money, at_second, tokens)
    SELECT quota, -1, -gone.bytes, -gone.tokens, -gone.money, at_second, -gone.tokens
    FROM gone CROSS JOIN unnest(gone.quotas) AS quota
    WHERE EXISTS (SELECT FROM quotas WHERE id = quota)
$$;

-- What a tenant may still store, under the lock of its quota; null: no limit.
CREATE OR REPLACE FUNCTION shardline_bytes_left(tenant text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    quota quotas;
    used quota_use;
BEGIN
    SELECT * INTO quota FROM quotas
    WHERE tenant_id = tenant AND key_name = '' AND max_bytes IS NOT NULL;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    used := shardline_fold_quota(quota.id);
    PERFORM shardline_write_quota(used);
    RETURN greatest(quota.max_bytes - used.bytes - (
        SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant_id = tenant AND batch_id IS NULL), 0);
END
$$;

-- Every new row passes here, whatever wrote it. Those of doors that asked before are reserved.
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
                params, max_tokens, choice_of) AS one
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

-- A job was prepared, claimed or given back, has ended or is deleted.
CREATE OR REPLACE FUNCTION shardline_move_job() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    held reservations;
    num_in bigint := 0;
    num_out bigint := 0;
    is_over boolean := TG_OP = 'DELETE' OR NEW.finished_at IS NOT NULL;
    is_shared boolean := is_over AND EXISTS (
        SELECT FROM tenant_shares WHERE model = OLD.model AND tenant_id = OLD.tenant_id);
    num_less bigint;
BEGIN
    SELECT * INTO held FROM reservations WHERE job_id = OLD.id;
    IF held.job_id IS NULL AND NOT is_shared THEN
        RETURN NULL;
    END IF;
    IF is_over THEN
        SELECT prompt_tokens, completion_tokens INTO num_in, num_out
        FROM results WHERE job_id = OLD.id;
        num_in := coalesce(num_in, 0);
        num_out := coalesce(num_out, 0);
        IF is_shared AND num_in + num_out > 0 THEN
            INSERT INTO share_changes (model, tenant_id, tokens, most)
            VALUES (OLD.model, OLD.tenant_id, num_in + num_out,
                cardinality(OLD.prompt_ids) + OLD.max_tokens);
        END IF;
        INSERT INTO quota_changes (quota_id, queued, bytes, open_tokens, open_money,
            spent_tokens, spent_money, at_second, tokens)
        SELECT id, CASE OLD.state WHEN 'queued' THEN -1 ELSE 0 END, -held.bytes, -held.tokens,
            -held.money, num_in + num_out,
            (num_in * held.input_price + num_out * held.output_price) / 1000000,
            held.at_second, num_in + num_out - held.tokens
        FROM quotas WHERE id = ANY(held.quotas);
        DELETE FROM reservations WHERE job_id = OLD.id;
    ELSIF OLD.state <> NEW.state THEN
        INSERT INTO quota_changes (quota_id, queued)
        SELECT id, CASE NEW.state WHEN 'queued' THEN 1 ELSE -1 END
        FROM quotas WHERE id = ANY(held.quotas);
    ELSE
        num_less := held.tokens - cardinality(NEW.prompt_ids) - NEW.max_tokens;
        UPDATE reservations SET tokens = held.tokens - num_less,
            money = (cardinality(NEW.prompt_ids) * held.input_price
                + NEW.max_tokens * held.output_price) / 1000000
        WHERE job_id = NEW.id RETURNING held.money - money INTO held.money;
        INSERT INTO quota_changes (quota_id, open_tokens, open_money, at_second, tokens)
        SELECT id, -num_less, -held.money, held.at_second, -num_less
        FROM quotas WHERE id = ANY(held.quotas);
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION shardline_begin_quota() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quota_use (quota_id, period_began_at) VALUES (NEW.id, CASE NEW.budget_period
        WHEN 'ever' THEN now() ELSE date_trunc(NEW.budget_period, now(), 'UTC') END);
    RETURN NULL;
END
$$;
