"""Solo and verl compute the same: one batch of readings, verl's own FSDP2 engine against solo's update."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from verl_runs import environment
from verl_samples import scored
from warm import Warm

from poimen_exp.gates.metrics import Means
from poimen_exp.gates.scoring import ScoredTrajectory, advantages_of
from poimen_exp.gates.types import Generation, Prompt
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.ragged import spread
from poimen_exp.solo.rows import Row
from poimen_exp.solo.settings import LossSettings, ModelSettings, OptimSettings, StepSettings
from poimen_exp.solo.task import RolloutBatch
from poimen_exp.solo.update import Updater
from poimen_exp.verl_backend.export import lora_tensors
from poimen_exp.verl_backend.layout import lay_out
from poimen_exp.verl_backend.records import assemble, pack

ALPHA = 0.9
OVERRIDES = (
    "actor_rollout_ref.actor.optim.lr=0",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.05",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
)
"""At learning rate 0 both optimizer steps of the batch see the same weights, so each gradient can be compared."""


@dataclass(frozen=True)
class Side:
    """What one backend computed."""

    advantages: dict[str, float]
    gradients: list[dict[str, torch.Tensor]]
    metrics: dict[str, float]


def readings() -> list[ScoredTrajectory]:
    """Two prompts, three rollouts each, of unequal lengths, with a malformed turn; ids drawn from the vocabulary."""
    gates: list[tuple[bool | None, ...]] = [
        (True,),
        (False, True),
        (True, None, False),
        (False,),
        (True, False),
        (True,),
    ]
    generator = torch.Generator().manual_seed(5)
    out = []
    for place, updates in enumerate(gates):
        item = scored(updates, "yes" if place % 2 else "no", sample=place % 3)
        turns = []
        for turn in item.trajectory.turns:
            prompt = torch.randint(10, 200, (12 + place,), generator=generator).tolist()
            ids = torch.randint(10, 200, (3 + place,), generator=generator).tolist()
            log_probs = (-torch.rand(len(ids), generator=generator) - 3).tolist()
            made = Generation(tuple(ids), tuple(log_probs), clipped=False)
            turns.append(replace(turn, prompt=Prompt(tuple(prompt), 4), generation=made))
        out.append(replace(item, group=place // 3, trajectory=replace(item.trajectory, turns=tuple(turns))))
    return out


def named_rows(items: list[ScoredTrajectory]) -> dict[str, tuple[Prompt, Generation]]:
    """Rows under the keys that verl would give them."""
    return {
        f"uid{item.group}_{item.sample}_{place}": (turn.prompt, turn.generation)
        for item in items
        for place, turn in enumerate(item.trajectory.turns)
    }


def policy_of(cfg: DictConfig) -> Policy:
    model = cfg.actor_rollout_ref.model
    settings = ModelSettings(
        Path(model.path), model.lora_rank, model.lora_alpha, model.target_modules, "float32", "eager", None
    )
    torch.manual_seed(1)
    policy = Policy(settings, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in policy.trainable().items():
            if ".lora_B." in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.05)
    return policy


def solo_side(cfg: DictConfig, policy: Policy, items: list[ScoredTrajectory]) -> Side:
    rows, advantages = advantages_of(items, ALPHA, "group_step")
    keys = list(named_rows(items))
    actor, optim = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.actor.optim
    base = {name: torch.zeros_like(value) if ".lora_B." in name else value for name, value in policy.state().items()}
    loss = LossSettings(
        actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c, actor.loss_agg_mode,
        actor.entropy_coeff, actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type,
    )  # fmt: skip
    updater = Updater(
        policy, base, 0, 1.0, loss,
        OptimSettings(optim.lr, 0.0, (0.9, 0.999), 0, "constant", 0.0, 1.0, 3),
        StepSettings(2, 1, 1, 100_000, False),
    )  # fmt: skip
    taken: list[dict[str, torch.Tensor]] = []
    clip = updater._clip

    def keep() -> float:
        taken.append({name: value.grad.clone() for name, value in policy.trainable().items() if value.grad is not None})
        return clip()

    updater._clip = keep  # type: ignore[method-assign]
    flat = [turn for item in items for turn in item.trajectory.turns]
    turns = tuple(Row(turn.prompt, turn.generation.ids, turn.generation.log_probs) for turn in flat)
    batch = RolloutBatch(
        rows=turns,
        names=tuple(keys),
        advantages=spread(advantages.mixed, turns),
        group=rows.group,
        metrics=Means(),
        watch=Means(),
        attempted=6,
        failed=0,
        records=(),
    )
    report = updater.update(batch)
    return Side(dict(zip(keys, advantages.mixed.tolist(), strict=True)), taken, dict(report.metrics))


def verl_side(python: Path, policy: Policy, items: list[ScoredTrajectory], folder: Path, ranks: int) -> Side:
    """As the trainer does it: records through TransferQueue's form, rows in the order of the layout."""
    named = named_rows(items)
    last = {f"uid{item.group}_{item.sample}_{len(item.trajectory.turns) - 1}": pack(item) for item in items}
    batch = assemble(last)
    mixed = advantages_of(batch.scored, ALPHA, "group_step")[1].mixed.tolist()
    by_key = {key: mixed[row] for key, row in batch.row_of.items()}
    keys = list(named)
    lengths = [len(prompt.ids) + len(made.ids) for prompt, made in named.values()]
    layout = lay_out([key.split("_")[0] for key in keys], lengths, count=2, ranks=ranks)
    ordered: list[dict[str, torch.Tensor]] = []
    values: list[float] = []
    for place in layout.order:
        real = place < len(keys)
        prompt, made = named[keys[place]] if real else (Prompt((1,) * 8, 0), Generation((2,), (0.0,), clipped=False))
        ordered.append(tensors(prompt, made, real=real))
        values.append(by_key[keys[place]] if real else 0.0)
    assert layout.pads > 0  # which are to change nothing
    source, target = folder / "in.pt", folder / "out.pt"
    given = {
        "ranks": ranks,
        "overrides": ["+experiment=verl_smoke", *OVERRIDES],
        "lora": policy.state(),
        "rows": ordered,
        "advantages": values,
        "rows_per_mini_batch": layout.rows_per_mini_batch,
    }
    torch.save(given, source)
    script = Path(__file__).with_name("verl_engine_side.py")
    command = [str(python), str(script), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    out = torch.load(target, weights_only=False)
    return Side(by_key, out["gradients"], out["metrics"])


def tensors(prompt: Prompt, made: Generation, *, real: bool) -> dict[str, torch.Tensor]:
    ids = torch.tensor([*prompt.ids, *made.ids])
    mask = torch.full((len(made.ids),), int(real))
    return {
        "prompts": ids[: len(prompt.ids)],
        "responses": ids[len(prompt.ids) :],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
    }


@pytest.mark.verl
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_solo_and_verl_agree_on_advantages_losses_and_gradients(
    smoke: Callable[..., DictConfig], warm_python: Warm, tmp_path: Path, ranks: int
) -> None:
    # 9 and 7 rows in two mini-batches: 9 a mini-batch and 2 padding rows on one rank, 10 (5 a rank) and 4 on two.
    cfg = smoke(*OVERRIDES)
    items = readings()
    policy = policy_of(cfg)
    solo = solo_side(cfg, policy, items)
    verl = verl_side(warm_python.python, policy, items, tmp_path, ranks)

    assert verl.advantages == solo.advantages  # exactly
    assert len({value for value in solo.advantages.values() if value != 0.0}) > 3

    assert len(verl.gradients) == len(solo.gradients) == 2
    for mine, theirs in zip(solo.gradients, verl.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)

    ours = {name for name in solo.metrics if name.startswith("actor/")}
    ours.remove("actor/entropy")  # verl's trainer takes it from the old log-probs, not from the update
    assert ours <= verl.metrics.keys()
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/loss", "actor/grad_norm"):
        assert verl.metrics[name] == pytest.approx(solo.metrics[name], rel=1e-4, abs=1e-6), name

    saved = lora_tensors(tmp_path / "out.checkpoint")  # one shard a rank; at rate 0 the weights are as they were
    assert saved.keys() == policy.state().keys()
    for name, value in policy.state().items():
        assert torch.equal(saved[name], value), name
