"""The launch files of ``poimen export-verl``: shell scripts that run once the paths at their top are set."""

from __future__ import annotations

import shlex

from omegaconf import DictConfig

from poimen_exp.solo.export_prompts import Side, copies
from poimen_exp.solo.settings import SoloSettings

_HEAD = """#!/usr/bin/env bash
# {what}
# Set the paths and sizes below, or give them in the environment, then: ./launch.sh [KEY=VALUE ...]
# Several nodes: start Ray on each, set RAY_ADDRESS to the head's (docs/scale.md).
set -euo pipefail

{settings}
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
(cd "$HERE" && sha256sum --check --quiet SHA256SUMS)
"""


def gates_launch(config: DictConfig) -> str:
    """Trains the gates on ``backend=verl`` from the exported adapter; the corpus is verified first."""
    settings = _settings(
        MODEL=config.actor_rollout_ref.model.path,
        CORPUS=config.corpus.path,
        RUN=f"multirun/{config.trainer.experiment_name}_verl/0",
        NODES=config.trainer.nnodes,
        GPUS_PER_NODE=config.trainer.n_gpus_per_node,
        POIMEN="poimen",
    )
    return (
        _HEAD.format(what="Goes on with a solo run of the gates on verl, from its adapter.", settings=settings)
        + """(cd "$CORPUS" && sha256sum --check --quiet "$HERE/data/corpus.sha256")

exec "$POIMEN" run "$HERE/config.yaml" --folder "$RUN" \\
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.lora_adapter_path="$HERE/adapter" \\
    corpus.path="$CORPUS" trainer.nnodes="$NODES" trainer.n_gpus_per_node="$GPUS_PER_NODE" "$@"
"""
    )


def prompts_launch(config: DictConfig, run: SoloSettings) -> str:
    """Trains prompts with verl's own program from the exported adapter."""
    settings = _settings(
        MODEL=config.actor_rollout_ref.model.path,
        **({} if run.critic is None else {"CRITIC": config.critic.model.path}),
        **({} if run.reward.model_path is None else {"REWARD_MODEL": config.reward.reward_model.model_path}),
        RUN=config.trainer.default_local_dir,
        NODES=config.trainer.nnodes,
        GPUS_PER_NODE=config.trainer.n_gpus_per_node,
        PYTHON="python",
    )
    lines = [
        'actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.model.lora_adapter_path="$HERE/adapter"',
        f'data.train_files="{_listed(run, "train")}" data.val_files="{_listed(run, "val")}"',
    ]
    if run.critic is not None:
        lines.append('critic.model.path="$CRITIC"')
    if run.reward.model_path is not None:
        lines.append('reward.reward_model.model_path="$REWARD_MODEL"')
    if config.reward.custom_reward_function.path is not None:
        lines.append('reward.custom_reward_function.path="$HERE/reward.py"')
    lines.append('trainer.default_local_dir="$RUN" trainer.nnodes="$NODES" trainer.n_gpus_per_node="$GPUS_PER_NODE"')
    body = " \\\n    ".join(
        ['exec "$PYTHON" -m verl.trainer.main_ppo --config-path "$HERE" --config-name config', *lines]
    )
    head = _HEAD.format(what="Goes on with a solo run of prompts on verl, from its adapter.", settings=settings)
    return f'{head}\n{body} "$@"\n'


def _listed(run: SoloSettings, side: Side) -> str:
    """A list in Hydra's grammar."""
    return "[" + ",".join(f"'$HERE/{name}'" for name in copies(run, side)) + "]"


def _settings(**values: object) -> str:
    return "".join(f"{name}=${{{name}:-{shlex.quote(str(value))}}}\n" for name, value in values.items())
