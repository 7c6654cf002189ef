"""verl's replay buffer, with a record of what came back and an eye on who should be working."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from poimen_exp.errors import RunFailed
from poimen_exp.verl_backend.records import FIELD, Batch, assemble, last_keys
from poimen_exp.verl_backend.watch import Liveness

_POLL_S = 0.2
"""verl looks every 2 s whether the rollouts are back: of a small model's step that was a half."""


class GateReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """Hands on verl's batch; ``batches`` holds the trajectories of those taken since it was last emptied."""

    def __init__(self, **verls: Any) -> None:
        super().__init__(**{"poll_interval": _POLL_S, **verls})
        self.batches: list[Batch] = []
        self.liveness = Liveness()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's; validation reads and clears its rows right after, so their records are fetched here."""
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        except RuntimeError as error:  # verl's word for a step without one finished rollout
            raise RunFailed(
                f"step {global_steps}: every rollout failed; the agent-loop workers' log has the first error (Error in "
                "_run_prompt)"
            ) from error
        self.batches.append(fetch(batch))
        return batch, metrics

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """verl polls for ever where an agent loop's worker died; here that ends the run."""
        self.liveness.check()
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))


def fetch(batch: Any) -> Batch:
    """Trajectories of a batch, read from the last row of each session."""
    keys = last_keys(batch.keys)
    if not keys:
        return assemble({})
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    extras = [getattr(extra, "data", extra) for extra in data["extra_fields"]]
    return assemble({key: extra[FIELD] for key, extra in zip(keys, extras, strict=True)})
