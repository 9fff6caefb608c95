"""Outputs of requests on their way to the api: tokens, ends, errors."""

from __future__ import annotations

import time
from collections import deque

from ...request_messages import RequestOutput, TokenLogprob
from ..blocks.sequence import Sequence

RECENT = 32  # values behind a recent median


class Replies:
    """Outputs since the last `take`, and the prompt logprobs that go with a request's first token."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self.prompt_logprobs: dict[Sequence, list[TokenLogprob | None]] = {}
        self.num_generated_tokens = 0
        self.first_token_s: deque[float] = deque(maxlen=RECENT)

    def take(self) -> list[RequestOutput]:
        """Outputs since the last call; the caller sends them."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def add(self, output: RequestOutput) -> None:
        """Send this output, too."""
        self._outputs.append(output)

    def note_prompt(self, sequence: Sequence, logprobs: list[TokenLogprob]) -> None:
        """Log probabilities of the next part of the prompt; its first token has none."""
        self.prompt_logprobs.setdefault(sequence, [None]).extend(logprobs)

    def forget(self, sequence: Sequence) -> None:
        """The prompt is computed anew, or no more."""
        self.prompt_logprobs.pop(sequence, None)

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> bool:
        """A new token of a sequence; True when it is the last one."""
        request = sequence.request
        sequence.tokens.append(token)
        self.num_generated_tokens += 1
        reason, stop_reason = _end_of(sequence, token)
        first = not sequence.usage_sent
        sequence.usage_sent = True
        if first:
            self.first_token_s.append(time.monotonic() - sequence.arrived_at)
        self._outputs.append(
            RequestOutput(
                request.request_id,
                [token],
                logprobs=None if logprob is None else [logprob],
                prompt_logprobs=self.prompt_logprobs.pop(sequence, None),
                usage=sequence.usage if first else None,
                finish_reason=reason,
                stop_reason=stop_reason,
            )
        )
        return reason is not None

    def end(self, sequence: Sequence, reason: str, error: str | None, status: int) -> None:
        """The request ends without a last token."""
        request_id, usage = sequence.request.request_id, sequence.usage
        self._outputs.append(
            RequestOutput(request_id, [], usage=usage, finish_reason=reason, error=error, error_status=status)
        )

    def refuse(self, request_id: str, message: str, status: int) -> None:
        """Answer a request with an error, whether or not it was admitted."""
        self._outputs.append(RequestOutput(request_id, [], finish_reason="error", error=message, error_status=status))


def _end_of(sequence: Sequence, token: int) -> tuple[str | None, int | None]:
    """(finish_reason, stop_reason) of a sequence whose newest token is `token`; None while it goes on."""
    request = sequence.request
    if sequence.num_generated >= request.min_tokens:
        if token in request.stop_token_ids:
            return "stop", token
        if token in request.eos_token_ids and not request.ignore_eos:
            return "stop", None
    return ("length" if sequence.num_generated >= request.max_tokens else None), None
