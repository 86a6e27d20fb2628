"""Has grammars judged before a job is accepted, by a child process that a hostile one may kill.

Knows no tokenizer: a grammar that passes is compiled again by the stage that draws its tokens.
"""

from __future__ import annotations

import hashlib
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from threading import Lock

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.structured_output import FIELD
from shardline_server.tokenize.grammars.grammar_judge import MAX_CPU_S, Question, Verdict, main

MAX_VERDICTS = 4096
"""Kept, by digests of their grammars: jobs of one kind bring the same one."""

MAX_REQUEST_CPU_S = 4.0
"""For all grammars of a request, up to 128 of tools: other requests wait for this time."""

MAX_WAIT_S = 60.0
"""For a second of CPU, on a machine that is overloaded."""

MAX_TRIES = 2
"""A child may also be ended by others."""

COSTLY = {
    -signal.SIGVTALRM: f"it takes more than {MAX_CPU_S:.0f} s to compile",
    -signal.SIGSEGV: "it is nested too deeply",
    -signal.SIGABRT: "it takes too much memory to compile",
}


class GrammarBudget:
    """What the grammars of one request may take together, judged now or before."""

    def __init__(self, left_s: float = MAX_REQUEST_CPU_S) -> None:
        self._left_s = left_s

    def spend(self, cpu_s: float, field: str) -> None:
        """Raises Invalid once nothing is left."""
        self._left_s -= cpu_s
        if self._left_s < 0:
            problem = f"all grammars together take more than {MAX_REQUEST_CPU_S:.0f} s to compile"
            raise Invalid(field, problem, "Send fewer or simpler ones")


class GrammarTrial:
    """One child of this process, started when it is needed first. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        """Of the child."""
        self._child: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def check(self, question: Question, budget: GrammarBudget | None = None) -> None:
        """Raises Invalid for what no completion can be held to, or what is over the budget."""
        kind = question.output.kind
        line = msgspec.json.encode(question)
        digest = hashlib.sha256(line).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = self._ask(line, kind)
            with self._lock:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict.problem:
            raise Invalid(verdict.field, verdict.problem, verdict.remedy)
        if budget is not None:
            budget.spend(verdict.cpu_s, f"{FIELD}.{kind}")

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
