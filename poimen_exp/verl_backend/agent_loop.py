"""verl's agent loop around the core's reading loop: one output a turn, scored where it was played.

Each turn becomes a row ``{uid}_{session}_{turn}``. An error here (the server died, a turn took too long, no tokens came
back) fails this rollout only: verl logs it and the others of its group go on; the trainer counts who is missing.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from poimen_exp.gates.reading import read
from poimen_exp.gates.scoring import ScoredTrajectory, score
from poimen_exp.verl_backend.reader import open_reader
from poimen_exp.verl_backend.records import FIELD, pack
from poimen_exp.verl_backend.server import ServerGenerate
from poimen_exp.verl_backend.settings import reader_settings, sampling

NAME = "poimen_gates"


class GateAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Reads one task once. verl makes one a rollout and calls ``run``."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Rows of one rollout, answer row last.

        Args:
            sampling_params: verl's, those of ``val_kwargs`` in a validation.
            row: fields of the dataset row, ``uid`` and ``session_id``.
        """
        settings = reader_settings(self.config)
        reader = open_reader(settings)
        session = int(row["session_id"])
        own_ids = f"{row['uid']}-{session}" if self.rollout_config.full_determinism else None
        stop_ids = reader.protocol.codec.stop_ids
        generate = ServerGenerate(self.server_manager, str(row["uid"]), stop_ids, settings.turn_timeout_s, own_ids)
        drawn = sampling(sampling_params, self.rollout_config.response_length)
        trajectory = await read(reader.task(row["split"], int(row["index"])), reader.protocol, generate, drawn)
        result = score(trajectory, settings.gates.matcher, settings.gates.on_unparsed)
        return outputs(ScoredTrajectory(trajectory, result, group=0, sample=session), generate.fields)


def outputs(scored: ScoredTrajectory, fields: list[dict[str, Any]]) -> list[AgentLoopOutput]:
    """One output a turn. The last one carries the record for the trainer, and the score that verl copies to all rows.

    Args:
        fields: what the server said of each turn; verl's metrics read the weight versions in it.
    """
    rows = []
    turns = scored.trajectory.turns
    for turn, said in zip(turns, fields, strict=True):
        last = turn is turns[-1]
        extra: dict[str, Any] = {**said, "reward_extra_info": {}, "turn_scores": [], "tool_rewards": []}
        if last:
            extra[FIELD] = pack(scored)
        rows.append(
            AgentLoopOutput(
                prompt_ids=list(turn.prompt.ids),
                response_ids=list(turn.generation.ids),
                response_mask=[1] * len(turn.generation.ids),
                response_logprobs=list(turn.generation.log_probs),
                reward_score=scored.score.total if last else None,
                num_turns=len(turns),
                metrics=AgentLoopMetrics(),
                extra_fields=extra,
            )
        )
    return rows
