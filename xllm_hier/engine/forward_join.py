"""The ranks' answers to one forward, joined to one."""

from __future__ import annotations

from ..errors import EngineDeadError
from ..plans import ForwardOutput


def join_forward(outputs: dict[int, ForwardOutput], step_id: int) -> ForwardOutput:
    """One answer of all ranks: rank 0's tokens, every rank's failed loads and pushes, and the error of a forward that
    failed on all of them alike.

    Raises:
        EngineDeadError: a rank answered another step, or computed from something else than the others.
    """
    if any(output.step_id != step_id for output in outputs.values()):
        raise EngineDeadError(f"a worker answered another step than {step_id}")
    views = {rank: outputs[rank].view for rank in sorted(outputs)}
    if len(set(views.values())) > 1:
        seen = "; ".join(
            f"worker {rank} saw {view}" + (f" and failed: {outputs[rank].error}" if outputs[rank].error else "")
            for rank, view in views.items()
        )
        raise EngineDeadError(f"the ranks' caches have gone apart: {seen}")
    failed_batches = sorted({batch for output in outputs.values() for batch in output.failed_batches})
    outputs[0].failed_batches[:] = failed_batches
    answer = next((output for output in outputs.values() if output.error is not None), outputs[0])
    answer.failed_pushes[:] = [failure for output in outputs.values() for failure in output.failed_pushes]
    return answer
