-- The audit log: administrative acts, in the transactions that do them. See docs/security.md.

-- Who acts: what a door says for its transaction, else the role that connected.
CREATE OR REPLACE FUNCTION shardline_actor() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce(left(nullif(current_setting('shardline.actor', true), ''), 256),
        'role ' || session_user)
$$;

-- Names and values of some columns of a row. The others are not even read: no secret comes near,
-- and a request that JSONB refuses hurts nobody.
CREATE OR REPLACE FUNCTION shardline_audited(changed anyelement, kept text[]) RETURNS json
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found json;
BEGIN
    EXECUTE 'SELECT row_to_json(one) FROM (SELECT '
        || (SELECT string_agg(format('($1).%I', name), ', ') FROM unnest(kept) AS name)
        || ') AS one'
    INTO found USING changed;
    RETURN found;
END
$$;

-- Arguments: what it is called, the columns of its id, of its tenant, those that are shown, and
-- those of which it is only said that they changed; each a list with commas.
CREATE OR REPLACE FUNCTION shardline_audit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    kind text := TG_ARGV[0];
    kept text[] := string_to_array(TG_ARGV[3], ',');
    hidden text[] := string_to_array(TG_ARGV[4], ',');
    places text[] := array_remove(
        string_to_array(TG_ARGV[1] || ',' || TG_ARGV[2], ','), '');
    place json;
    old_values json;
    new_values json;
    change json;
    did text := CASE TG_OP
        WHEN 'INSERT' THEN 'create' WHEN 'DELETE' THEN 'delete' ELSE 'change' END;
    is_other boolean;
    hidden_names text[] := '{}';
    name text;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        FOREACH name IN ARRAY hidden LOOP
            EXECUTE format('SELECT ($1).%1$I::text IS DISTINCT FROM ($2).%1$I::text', name)
            INTO is_other USING OLD, NEW;
            IF is_other THEN
                hidden_names := hidden_names || name;
            END IF;
        END LOOP;
        old_values := shardline_audited(OLD, kept);
        new_values := shardline_audited(NEW, kept);
        SELECT json_object_agg(key, says) INTO change FROM (
            SELECT key, json_build_object('from', was.value, 'to', is_now.value) AS says
            FROM json_each(old_values) AS was JOIN json_each(new_values) AS is_now USING (key)
            WHERE was.value::text IS DISTINCT FROM is_now.value::text
            UNION ALL
            SELECT one, '"changed"'::json FROM unnest(hidden_names) AS one
        ) AS changes;
        IF change IS NULL THEN
            RETURN NULL;
        END IF;
        did := CASE
            WHEN change -> 'revoked_at' IS NOT NULL THEN 'revoke'
            WHEN change -> 'replaced_at' IS NOT NULL OR change -> 'secret' IS NOT NULL THEN 'rotate'
            WHEN change #>> '{paused,to}' = 'true' THEN 'pause'
            WHEN change #>> '{paused,to}' = 'false' THEN 'resume'
            ELSE did END;
    ELSIF TG_OP = 'INSERT' THEN
        change := shardline_audited(NEW, kept);
    ELSE
        change := shardline_audited(OLD, kept);
    END IF;
    IF kind = 'pause' AND TG_OP <> 'UPDATE' THEN
        did := CASE TG_OP WHEN 'INSERT' THEN 'pause' ELSE 'resume' END;
    ELSIF kind = 'role' THEN
        did := CASE TG_OP WHEN 'DELETE' THEN 'revoke' ELSE 'grant' END;
    END IF;
    IF TG_OP = 'DELETE' THEN
        place := shardline_audited(OLD, places);
    ELSE
        place := shardline_audited(NEW, places);
    END IF;
    INSERT INTO audit (actor, role_name, tenant_id, act, object_kind, object_id, change)
    SELECT shardline_actor(), session_user, place ->> TG_ARGV[2], did, kind,
        string_agg(nullif(place ->> part, ''), ' ' ORDER BY number), change
    FROM unnest(string_to_array(TG_ARGV[1], ',')) WITH ORDINALITY AS parts (part, number);
    RETURN NULL;
END
$$;

-- An act on many jobs: one row, whose count grows from page to page. Returns its id.
CREATE OR REPLACE FUNCTION shardline_audit_jobs(
    known bigint, did text, tenant text, asked json, num_changed bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    says json := json_build_object('jobs', num_changed, 'asked', asked);
    found bigint;
BEGIN
    IF did NOT IN ('cancel', 'retry', 'prioritize') THEN
        RAISE EXCEPTION 'act: % is none on many jobs', did;
    END IF;
    UPDATE audit SET change = says
    WHERE id = known AND object_kind = 'jobs' AND role_name = session_user RETURNING id INTO found;
    IF found IS NULL THEN
        INSERT INTO audit (actor, role_name, tenant_id, act, object_kind, object_id, change)
        VALUES (shardline_actor(), session_user,
            coalesce(shardline_my_tenant(session_user), tenant), did, 'jobs', '', says)
        RETURNING id INTO found;
    END IF;
    RETURN found;
END
$$;
