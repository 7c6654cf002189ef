"""verl's synchronous V1 trainer with the gates' advantages, mini-batches of whole groups, and the run's own record.

Everything else is verl's: placement, FSDP2, vLLM, log-probs, loss, optimizer, checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from poimen_exp.gates.scoring import ScoredTrajectory, advantages_of
from poimen_exp.solo.checkpoint import prune_checkpoints
from poimen_exp.tracking.tracker import Tracker
from poimen_exp.verl_backend.checkpoint import complete
from poimen_exp.verl_backend.layout import lay_out
from poimen_exp.verl_backend.monitor import Monitor
from poimen_exp.verl_backend.records import RowKey
from poimen_exp.verl_backend.rollouts import write_rollouts, write_validation
from poimen_exp.verl_backend.settings import VerlSettings
from poimen_exp.verl_backend.sync_check import require_synced
from poimen_exp.verl_backend.sync_probe import SyncProbe
from poimen_exp.verl_backend.watch import Liveness, PhaseClock
from poimen_exp.verl_backend.worker import GateWorker

ESTIMATOR = "poimen_gates"


@dataclass(frozen=True)
class RunParts:
    """What the trainer needs of its run."""

    settings: VerlSettings
    monitor: Monitor
    tracker: Tracker
    clock: PhaseClock
    liveness: Liveness
    identity: Mapping[str, str]
    save_freq: int
    keep: int | None
    say: Callable[[str], None]


class _Log:
    """Stands where verl's ``Tracking`` would: ``fit`` makes one and logs each step to it."""

    def __init__(self, write: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._write = write

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._write(step, data)


class GateTrainer(PPOTrainerSync):  # type: ignore[misc]
    """Lives in the driver process; ``init`` and ``fit`` are verl's."""

    total_training_steps: int

    def __init__(self, config: Any, parts: RunParts) -> None:
        self._parts = parts
        self._row_advantages: list[float] = []
        self._rows_per_mini_batch = 0
        super().__init__(config)
        self.replay_buffer.liveness = parts.liveness
        core_algos.ADV_ESTIMATOR_REGISTRY[ESTIMATOR] = self._estimate

    @property
    def logger(self) -> _Log:
        """Where ``fit`` logs; verl's own tracker, which ``fit`` assigns here, has no backends and is dropped."""
        return _Log(self._record)

    @logger.setter
    def logger(self, tracking: Any) -> None: ...

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(GateWorker)

    def _setup(self) -> None:
        super()._setup()
        workers = {f"actor worker {rank}": actor for rank, actor in enumerate(self.actor_rollout_wg.workers)}
        servers = {f"server {place}": actor for place, actor in enumerate(self.llm_server_manager.server_handles)}
        self._parts.liveness.watch({**workers, **servers})

    def _load_checkpoint(self) -> None:
        self._parts.clock.enter("load the checkpoint")
        super()._load_checkpoint()

    def on_init_end(self) -> None:
        """Proves that an adapter reaches the sampler, then sends the run's own."""
        self._parts.clock.enter("first weight sync")
        if self._parts.settings.lora_rank > 0:
            report = self._sync_probe().known_adapter(self.config.seed, self.global_steps)
            require_synced(report)
            self._parts.say(
                f"LoRA sync check: the sampler has {report.share:.2f} of a known adapter (expected 1); sampler and "
                f"trainer differ by {report.sampler_trainer:.2g} nats a token, trainer and base by "
                f"{report.trainer_base:.2g}"
            )
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop; agent-loop workers are watched too."""
        loops = {f"agent loop {place}": it for place, it in enumerate(agent_loop_manager.agent_loop_workers)}
        self._parts.liveness.watch(loops)
        super().fit(agent_loop_manager)

    def on_validate_begin(self) -> None:
        self._parts.clock.enter("validation")

    def on_sample_begin(self) -> None:
        self._parts.clock.enter("rollout")

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._parts.clock.enter("update")

    def on_step_end(self) -> None:
        self._parts.clock.enter("weight sync")
        super().on_step_end()

    # Advantages

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's, with the estimator of the gates: every row of the trajectories that came back, padding at 0."""
        settings, rolled = self._parts.settings, self.replay_buffer.batches.pop()
        rows, advantages = advantages_of(rolled.scored, settings.alpha, settings.turn_baseline)
        attempted = settings.train_batch_size * settings.group_size
        self._parts.monitor.rolled_out(rolled.scored, rows, advantages, attempted)
        mixed = advantages.mixed.tolist()
        self._row_advantages = [
            0.0 if tag.get("is_padding", False) else mixed[rolled.row_of[key]]
            for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
        write_rollouts(self._parts.tracker, self.global_steps, rolled.scored, advantages)
        correction = self.config.algorithm.rollout_correction
        if settings.lora_rank > 0 and not (correction and correction.bypass_mode):  # there they are the sampler's own
            self._report_sync(batch)
        return super()._compute_advantage(batch, metrics)

    def _estimate(self, response_mask: torch.Tensor, **verls: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """[R, T] advantages and returns: one number a row on its response tokens, 0 on padding rows."""
        spread = torch.tensor(self._row_advantages)[:, None] * response_mask
        return spread, spread

    # Mini-batches

    def _balance_batch(
        self,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        **verls: Any,  # noqa: ARG002
    ) -> Any:
        """Orders rows by ``layout``; padding rows are verl's (mask 0, ``is_padding``)."""
        settings, worker_group = self._parts.settings, self.actor_rollout_wg
        ranks = self._ranks(worker_group)
        actor = self.config.actor_rollout_ref.actor
        tokens = [tag["seq_len"] for tag in batch.tags]
        layout = lay_out(
            [RowKey.parse(key).uid for key in batch.keys],
            tokens,
            count=settings.mini_batches,
            ranks=ranks,
            rows_multiple=settings.rows_multiple,
            shuffle_seed=actor.data_loader_seed + self.global_steps if actor.shuffle else None,
        )
        if layout.pads:
            batch = upsample_batch_to_divisible_size(batch, len(batch) + layout.pads, self.tokenizer.eos_token_id)
        batch.reorder(list(layout.order))
        self._rows_per_mini_batch = layout.rows_per_mini_batch
        share = len(layout.order) // ranks
        lengths = [tag["seq_len"] for tag in batch.tags]
        parts = [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=parts, prefix=logging_prefix))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's update with our mini-batch size: its own counts ``ppo_mini_batch_size * n`` rows."""
        actor = self.config.actor_rollout_ref.actor
        batch.extra_info.update(
            {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                "global_batch_size": self._rows_per_mini_batch,
                "mini_batch_size": self._rows_per_mini_batch,
                "epochs": actor.ppo_epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": False},  # rows stay in their mini-batch; groups were shuffled
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        norms = output.pop("actor/grad_norm")
        self._parts.monitor.updated([float(norm) for norm in norms])
        metrics.update(reduce_metrics(output))
        return batch

    def _ranks(self, worker_group: Any) -> int:
        if "actor" not in worker_group._dispatch_info:
            worker_group._dispatch_info["actor"] = worker_group._query_dispatch_info("actor")
        return int(max(worker_group._dispatch_info["actor"])) + 1

    # Validation, record, checkpoints

    def _validate(self) -> dict[str, Any]:
        """verl's run over the validation split; its own means (last rows only) give way to the gates' metrics."""
        self.replay_buffer.batches.clear()
        begun = time.perf_counter()
        super()._validate()
        self._parts.monitor.report.metrics["timing_s/testing"] = time.perf_counter() - begun
        scored: list[ScoredTrajectory] = []
        for rolled in self.replay_buffer.batches:
            scored.extend(rolled.scored)
        self.replay_buffer.batches.clear()
        attempted = len(self.val_dataset) * self._parts.settings.val_group_size
        self._parts.monitor.validated(scored, attempted)
        write_validation(self._parts.tracker, self.global_steps, scored)
        return dict(self._parts.monitor.report.metrics)

    def _record(self, step: int, verls: Mapping[str, Any]) -> None:
        """Logs a step, applies the rules that end a run, and saves where a checkpoint is due."""
        parts, monitor = self._parts, self._parts.monitor
        parts.clock.enter("record and save")
        report = monitor.close_step(step, verls)
        parts.tracker.log(step, report.metrics, report.counts)
        if step > 0:
            monitor.check()
        last = step >= self.total_training_steps
        if monitor.converged and not last:
            self.total_training_steps = step  # fit looks at it before the next step
            last = True
        due = parts.save_freq > 0 and step % parts.save_freq == 0
        if due or last or monitor.progress.best_step == step:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """verl's checkpoint, then our manifest: only with it is the checkpoint complete."""
        parts, progress = self._parts, self._parts.monitor.progress
        offload = self.config.actor_rollout_ref.actor.fsdp_config.param_offload
        if offload:  # saving brings the weights back to the GPU: the sampler must leave first
            self.checkpoint_manager.sleep_replicas()
        super()._save_checkpoint()
        if offload:
            self.checkpoint_manager.update_weights(self.global_steps)
        folder = parts.tracker.folder
        complete(folder.checkpoint(progress.step), progress, parts.identity, parts.tracker.metrics_bytes)
        prune_checkpoints(folder, parts.keep, progress.best_step)

    def _report_sync(self, batch: Any) -> None:
        """Metrics of this step's rollout: does the sampler have the adapter that the trainer has."""
        real = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        report = self._sync_probe().compare_rollout(batch.partition_id, real, self.use_reference_policy)
        if report is None:
            return
        mine = self._parts.monitor.report
        mine.count("training/sync/sampler_trainer_diff", report.sampler_trainer, report.tokens)
        mine.count("training/sync/trainer_base_diff", report.trainer_base, report.tokens)
        if report.trainer_base > 0.0:  # a fresh adapter has no effect to have a share of
            mine.count("training/sync/adapter_share", report.share, report.tokens)

    def _sync_probe(self) -> SyncProbe:
        rows = self._ranks(self.actor_rollout_wg) * self._parts.settings.rows_multiple
        temperature = self.config.actor_rollout_ref.rollout.temperature
        group, client = self.actor_rollout_wg, self.get_llm_client()
        return SyncProbe(group, self.checkpoint_manager, client, self.tokenizer, rows, temperature)
