"""A `tiny_models.Driver` whose model runs on several ranks, a process each, with real collectives."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fork_server import fork_server
from tqdm import tqdm

from xllm_hier.figures import ModelDetails
from xllm_hier.models.parallel import TensorParallel
from xllm_hier.plans import SequenceRows
from xllm_hier.worker.compute.model_runner import ModelOutput

LIMIT_S = 60.0


class RankedDriver:
    """As Driver; `blocks` and `restore` know the blocks of all ranks, [ranks * layers, blocks, ...], rank by rank."""

    def __init__(self, folder: Path, tp_size: int, *, block_size: int = 16, **settings: Any) -> None:
        self.block_size, self.tp_size = block_size, tp_size
        self._meeting = TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(tp_size):
            ours, theirs = multiprocessing.Pipe()
            arguments: dict[str, Any] = {
                "rank": rank,
                "size": tp_size,
                "meeting": self._meeting.name,
                "folder": str(folder),
            }
            arguments["settings"] = {"block_size": block_size, **settings}
            arguments["authkey"] = multiprocessing.current_process().authkey.hex()
            process = fork_server().start("ranks:serve_rank", arguments, [theirs.fileno()])
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.details: ModelDetails = self._ask(["details"] * tp_size)[0]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(LIMIT_S)
            process.kill()
        self._meeting.cleanup()

    def _ask(self, questions: Sequence[Any]) -> list[Any]:
        """One question to each rank, all at once, and their answers."""
        for pipe, question in zip(self._pipes, questions, strict=True):
            pipe.send(question)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(LIMIT_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
            assert not isinstance(answers[-1], Exception), answers[-1]
        return answers

    def step(self, prefill: Sequence[SequenceRows] = (), decode: Sequence[SequenceRows] = ()) -> ModelOutput:
        answers = self._ask([("step", list(prefill), list(decode))] * self.tp_size)
        assert all(not output.token_ids for output, _ in answers[1:]), "rank 0 alone returns tokens"
        output, self.logits = answers[0]
        return output

    def poison(self) -> None:
        self._ask(["poison"] * self.tp_size)

    def blocks(self, table: Sequence[int], num_tokens: int) -> torch.Tensor:
        return torch.cat(self._ask([("blocks", list(table), num_tokens)] * self.tp_size))

    def restore(self, table: Sequence[int], blocks: torch.Tensor) -> None:
        self._ask([("restore", list(table), part.clone()) for part in blocks.chunk(self.tp_size)])


def serve_rank(
    rank: int, size: int, meeting: str, folder: str, settings: dict[str, Any], authkey: str, fds: list[int]
) -> None:
    """Body of one rank, a child of the fork server."""
    from tiny_models import Driver

    multiprocessing.current_process().authkey = bytes.fromhex(authkey)  # tensors travel through shared memory
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which the end of this process would leave
    pipe = Connection(fds[0])
    try:
        parallel = TensorParallel.join(rank, size, Path(meeting), "gloo", LIMIT_S, fixed_order=True)
        driver = Driver(Path(folder), parallel=parallel, num_threads=1, **settings)
        actions: dict[str, Callable[..., Any]] = {
            "details": lambda: driver.runner.details,
            "step": lambda prefill, decode: (driver.step(prefill, decode), driver.logits),
            "poison": driver.poison,
            "blocks": driver.blocks,
            "restore": driver.restore,
        }
        while True:
            question = pipe.recv()
            name, *arguments = (question,) if isinstance(question, str) else question
            pipe.send(actions[name](*arguments))
    except EOFError:
        os._exit(0)
    except Exception as error:
        pipe.send(error)
        os._exit(1)
