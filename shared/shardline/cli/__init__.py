"""The command line `shardline`.

Owns how jobs and keys are asked for and shown in a terminal; knows no SQL and no order of tokens:
the client does.
"""

from importlib.util import find_spec

if not (find_spec("typer") and find_spec("rich")):
    raise SystemExit("The shardline command needs the extra cli: pip install 'shardline[cli]'")

from shardline.cli.commands import main

__all__ = ["main"]
