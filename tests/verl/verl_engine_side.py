"""Run in a process of its own: verl's FSDP2 engine on a CPU over the rows in ``IN``, what it computed into ``OUT``.

With more than one rank, each gets its contiguous share of the rows, as verl's dispatch gives it, and a shard of the
weights; gloo between them.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from poimen_exp.config.compose import compose_config
from poimen_exp.verl_backend.launch import prepare_environment


def main(source: str, target: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = torch.load(source, weights_only=False)["ranks"]
    prepare_environment("cpu")
    importlib.import_module("verl.workers.engine_workers")  # here, and not again in every rank
    torch.multiprocessing.start_processes(one_rank, (ranks, port, source, target), nprocs=ranks, start_method="fork")


def one_rank(rank: int, ranks: int, port: int, source: str, target: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    given = torch.load(source, weights_only=False)
    share = len(given["rows"]) // ranks
    for name in ("rows", "advantages"):
        given[name] = given[name][rank * share : (rank + 1) * share]
    out = run(given, Path(target).with_suffix(".checkpoint"))
    if rank == 0:
        torch.save(out, target)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(given: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Old and reference log-probs, then one pass of updates at learning rate 0; gradients of every optimizer step.

    Args:
        checkpoint: folder for what verl saves at the end.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    from poimen_exp.verl_backend.log_probs import use_log_probs_in_one_pass
    from poimen_exp.verl_backend.overlay import verl_config

    use_log_probs_in_one_pass()  # as the run's own worker does

    cfg = verl_config(compose_config(given["overrides"]), Path(), {"train": 1, "val": 1}, None)
    model = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    actor.model_config = model
    engine_config = actor.engine
    engine_config.use_dynamic_bsz = True
    engine_config.max_token_len_per_gpu = engine_config.infer_max_token_len_per_gpu = 100_000
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine_config,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    _load(worker.engine.module, given["lora"])
    gradients = _capture(worker.engine)
    batch = _batch(given["rows"])
    old = _log_probs(worker, batch, adapter=True)
    ref = _log_probs(worker, batch, adapter=False)
    batch["old_log_probs"], batch["ref_log_prob"] = old, ref
    lengths = [len(row["responses"]) for row in given["rows"]]
    spread = [torch.full((length,), value) for value, length in zip(given["advantages"], lengths, strict=True)]
    batch["advantages"] = torch.nested.as_nested_tensor(spread, layout=torch.jagged)
    output = _update(worker, batch, given["rows_per_mini_batch"])
    worker.save_checkpoint(str(checkpoint))
    return {
        "gradients": gradients,
        "metrics": reduce_metrics(rename_dict(output, "actor/")),
    }


def _load(module: torch.nn.Module, lora: dict[str, torch.Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    mine = {name: value for name, value in module.named_parameters() if value.requires_grad}
    assert mine.keys() == lora.keys()
    with torch.no_grad():
        for name, value in lora.items():
            parameter = mine[name]
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


def _capture(engine: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients before clipping, one entry an optimizer step."""
    taken: list[dict[str, torch.Tensor]] = []
    step = engine.optimizer_step

    def keep() -> float:
        named = engine.module.named_parameters()
        taken.append({name: value.grad.full_tensor().clone() for name, value in named if value.grad is not None})
        return float(step())

    engine.optimizer_step = keep
    return taken


def _batch(rows: list[dict[str, torch.Tensor]]) -> Any:
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    return list_of_dict_to_tensordict([{**row, "multi_modal_inputs": {}} for row in rows])


def _log_probs(worker: Any, batch: Any, *, adapter: bool) -> Any:
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    part = batch.select("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask")
    tu.assign_non_tensor(part, calculate_entropy=False, compute_loss=False, temperature=1.0)
    if not adapter:
        tu.assign_non_tensor(part, no_lora_adapter=True)
    output = worker.infer_batch(part)
    return response_from_nested(output["log_probs"], batch["response_mask"])


def _update(worker: Any, batch: Any, mini_batch_rows: int) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(
        batch,
        calculate_entropy=True,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=mini_batch_rows,
        mini_batch_size=mini_batch_rows,
        epochs=1,
        seed=1,
        temperature=1.0,
    )
    metrics: dict[str, Any] = tu.get(worker.train_mini_batch(batch), "metrics")
    return metrics


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
