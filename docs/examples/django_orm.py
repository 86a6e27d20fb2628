"""Django's ORM: a ticket and its job in one transaction, and completions by a relation.

Shardline's tables are models that Django does not manage; columns without a field have defaults.
"""

import os
import uuid

import django
from django.conf import settings
from django.db import connection, models, transaction
from psycopg import conninfo

address = conninfo.conninfo_to_dict(os.environ["SHARDLINE_DATABASE_URL"])
names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
database = {key: address.get(name, "") for key, name in names.items()}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}})
django.setup()


class Job(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    model = models.TextField()
    prompt = models.TextField()
    params = models.JSONField(default=dict)

    class Meta:
        app_label = "shardline"
        db_table = "jobs"
        managed = False


class Result(models.Model):
    job = models.OneToOneField(Job, models.DO_NOTHING, primary_key=True)
    text = models.TextField()

    class Meta:
        app_label = "shardline"
        db_table = "results"
        managed = False


class Ticket(models.Model):
    job = models.ForeignKey(Job, models.DO_NOTHING, db_constraint=False)

    class Meta:
        app_label = "shop"
        db_table = "example_tickets"


if Ticket._meta.db_table not in connection.introspection.table_names():
    with connection.schema_editor() as editor:
        editor.create_model(Ticket)

with transaction.atomic():
    job = Job.objects.create(
        model="clerk", prompt="date: 3 March 2021 =", params={"temperature": 0}
    )
    Ticket.objects.create(job=job)
print(job.id)
# From the COMMIT on the job runs. Later, perhaps elsewhere:
for result in Result.objects.filter(job__in=Ticket.objects.values("job")):
    print(result.job_id, result.text)
