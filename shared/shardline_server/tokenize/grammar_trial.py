"""Has grammars judged before a job is accepted, by a child process that a hostile one may kill.

Knows no tokenizer: a grammar that passes is compiled again by the stage that draws its tokens.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from functools import lru_cache
from threading import Lock

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.structured_output import FIELD
from shardline_server.tokenize.grammar_judge import MAX_CPU_S, Question, Verdict, main

MAX_VERDICTS = 128
"""Kept, with their grammars of up to 64 KiB: jobs of one kind bring the same one."""

MAX_WAIT_S = 60.0
"""For a second of CPU, on a machine that is overloaded."""

MAX_TRIES = 2
"""A child may also be ended by others."""

COSTLY = {
    -signal.SIGVTALRM: f"it takes more than {MAX_CPU_S:.0f} s to compile",
    -signal.SIGSEGV: "it is nested too deeply",
    -signal.SIGABRT: "it takes too much memory to compile",
}


class GrammarTrial:
    """One child of this process, started when it is needed first. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._verdict = lru_cache(maxsize=MAX_VERDICTS)(self._ask)

    def check(self, question: Question) -> None:
        """Raises Invalid for what no completion can be held to."""
        verdict = self._verdict(msgspec.json.encode(question), question.output.kind)
        if verdict.problem:
            raise Invalid(verdict.field, verdict.problem, verdict.remedy)

    def _ask(self, line: bytes, kind: str) -> Verdict:
        with self._lock:
            for _ in range(MAX_TRIES):
                child = self._child or self._start()
                answer = _answer(child, line)
                if answer.endswith(b"\n"):
                    return msgspec.json.decode(answer, type=Verdict)
                self._child = None
                problem = COSTLY.get(_end(child))
                if problem is not None:
                    return Verdict(
                        field=f"{FIELD}.{kind}", problem=problem, remedy="Send a simpler one"
                    )
        # Not kept: another time it may be judged.
        raise Invalid(f"{FIELD}.{kind}", "it could not be compiled here", "Send it again")

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"from {main.__module__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._child


def _answer(child: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Returns the child's line, or less if it ends."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    answers = select.poll()
    answers.register(child.stdout, select.POLLIN)
    return child.stdout.readline() if answers.poll(MAX_WAIT_S * 1000) else b""


def _end(child: subprocess.Popen[bytes]) -> int:
    """Ends a child that gave no answer; returns the status that it had ended with, if it had."""
    try:
        child.communicate(timeout=1.0)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        child.kill()
        child.wait()
    return child.returncode


TRIAL = GrammarTrial()
"""Of this process."""
