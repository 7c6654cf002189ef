"""The plan's rules for the critic of gae. Read and extend here."""

from __future__ import annotations

from typing import Any

from poimen_exp.errors import Refused
from poimen_exp.solo import rules as r
from poimen_exp.solo.rules import Leaves, Rule, conformant, exact, lowered, missing, placement
from poimen_exp.solo.rules_prompts import (
    AGG_MODES,
    any_size,
    critic,
    loss_scale_factor,
    offloaded,
    only,
    total_steps,
    warmup_steps,
)

_CRITIC, _CRITIC_MODEL, _CRITIC_OPTIM = "critic", "critic.model", "critic.optim"
_NO_CRITIC = "only gae has a critic"
_ONE_DEVICE = "one process on one device: nothing is sharded, sent or scheduled"


def critic_lora(leaves: Leaves) -> bool:
    """Whether the value model is trained through an adapter."""
    return critic(leaves) and bool(leaves["critic.model.lora_rank"])


def critic_switch(value: Any, leaves: Leaves) -> bool:
    """null and what the estimator needs are taken; a critic that no estimator reads is not."""
    wanted = critic(leaves)
    if value not in (None, wanted) or (isinstance(value, int) and not isinstance(value, bool)):
        why = "gae has a critic" if wanted else "no critic but for gae: nothing would read its values"
        raise Refused(f"expected {str(wanted).lower()} or null: {why}")
    return wanted


def critic_rank(value: Any, leaves: Leaves) -> int:
    """Of the critic's adapter; 0 trains every weight."""
    return int(r.whole(0)(value, leaves))


def schedule_steps(value: Any, leaves: Leaves) -> int:
    """-1, and with it all steps of the run, as verl fills it in."""
    if value != -1:
        raise Refused("expected -1")
    return total_steps(leaves["trainer.total_training_steps"], leaves)


CRITIC: tuple[Rule, ...] = (
    conformant("critic.enable", "gae has a critic, the others have none", "", critic_switch),
    *only(
        critic,
        _NO_CRITIC,
        exact("trainer.critic_warmup", "trainer.critic_warmup", r.whole(0), "the actor waits for that step"),
        conformant(
            "trainer.max_critic_ckpt_to_keep",
            "one checkpoint holds actor and critic",
            "",
            r.equal_to("trainer.max_actor_ckpt_to_keep"),
        ),
        exact(f"{_CRITIC_MODEL}.path", "critic.path", r.model_folder),
        exact(f"{_CRITIC_MODEL}.lora_rank", "critic.lora_rank", critic_rank, "0 trains every weight, in float32"),
        exact(f"{_CRITIC_MODEL}.override_config", "critic.attn_implementation", r.attention),
        exact(f"{_CRITIC}.fsdp.dtype", "critic.dtype", r.dtype, "of the forward passes; trained weights are float32"),
        conformant(f"{_CRITIC}.fsdp.model_dtype", "fp32: trained weights and optimizer state are float32"),
        exact(f"{_CRITIC_OPTIM}.lr", "critic.optim.lr", r.number(0)),
        exact(f"{_CRITIC_OPTIM}.weight_decay", "critic.optim.weight_decay", r.number(0)),
        exact(f"{_CRITIC_OPTIM}.betas", "critic.optim.betas", r.betas),
        exact(f"{_CRITIC_OPTIM}.clip_grad", "critic.optim.grad_clip", r.number(above=0)),
        exact(f"{_CRITIC_OPTIM}.lr_warmup_steps", "critic.optim.lr_warmup_steps", warmup_steps(_CRITIC_OPTIM)),
        conformant(
            f"{_CRITIC_OPTIM}.lr_warmup_steps_ratio",
            "of all steps, where lr_warmup_steps is not above 0; read with it",
            "",
            r.number(0, 1),
        ),
        exact(f"{_CRITIC_OPTIM}.lr_scheduler_type", "critic.optim.lr_scheduler_type", r.one_of("constant", "cosine")),
        exact(f"{_CRITIC_OPTIM}.min_lr_ratio", "critic.optim.min_lr_ratio", r.number(0, 1)),
        conformant(
            f"{_CRITIC_OPTIM}.total_training_steps",
            "-1: taken from trainer.total_training_steps, as verl does",
            "critic.optim.total_training_steps",
            schedule_steps,
        ),
        Rule(
            f"{_CRITIC}.grad_clip",
            "semantically_conformant",
            "verl 0.9.1 reads critic.optim.clip_grad: set that",
            same_as=f"{_CRITIC_OPTIM}.clip_grad",
        ),
        exact(f"{_CRITIC}.ppo_mini_batch_size", "critic.ppo_mini_batch_size", r.whole(1)),
        exact(f"{_CRITIC}.ppo_epochs", "critic.ppo_epochs", r.whole(1)),
        exact(f"{_CRITIC}.ppo_max_token_len_per_gpu", "critic.micro_batch_tokens", r.whole(1)),
        exact(f"{_CRITIC}.cliprange_value", "critic.cliprange_value", r.number(0)),
        exact(f"{_CRITIC}.loss_agg_mode", "critic.loss_agg_mode", r.one_of(*AGG_MODES)),
        exact(
            f"{_CRITIC}.loss_scale_factor", "critic.loss_scale_factor", loss_scale_factor(f"{_CRITIC}.loss_agg_mode")
        ),
        lowered(f"{_CRITIC}.forward_max_token_len_per_gpu", "values are computed under the update's token budget"),
        lowered(f"{_CRITIC}.*micro_batch_size*", "micro-batches are cut by tokens", "", any_size),
        lowered(f"{_CRITIC}.use_dynamic_bsz", "micro-batches are always cut by tokens", "", r.flag),
        lowered(f"{_CRITIC}.shuffle", "mini-batches are whole groups in the order of the batch"),
        lowered(f"{_CRITIC}.data_loader_seed", "nothing is shuffled: mini-batches keep the order of the batch"),
        lowered(f"{_CRITIC}.fsdp.param_offload", offloaded("weights"), "offload.critic", r.flag),
        lowered(f"{_CRITIC}.fsdp.optimizer_offload", offloaded("optimizer state"), "offload.critic_optimizer", r.flag),
        lowered(f"{_CRITIC_MODEL}.use_remove_padding", "padding is masked; it is in no loss", "", r.flag),
        lowered(f"{_CRITIC_MODEL}.enable_gradient_checkpointing", "recomputation changes no value", "", r.flag),
        missing(f"{_CRITIC}.checkpoint.*", "a checkpoint always holds weights, optimizer and all random states"),
        placement(f"{_CRITIC}.strategy", _ONE_DEVICE, accepts=("fsdp2",)),
        placement(f"{_CRITIC}.fsdp.*", _ONE_DEVICE),
        placement(f"{_CRITIC}.ulysses_sequence_parallel_size", _ONE_DEVICE),
        missing(f"{_CRITIC_OPTIM}.*", "AdamW of torch with verl's schedules"),
    ),
    *only(
        critic_lora,
        "active with critic.model.lora_rank",
        exact(f"{_CRITIC_MODEL}.lora_alpha", "critic.lora_alpha", r.whole(1)),
        exact(f"{_CRITIC_MODEL}.target_modules", "critic.target_modules", r.modules),
    ),
    *only(
        critic,
        _NO_CRITIC,
        Rule(
            f"{_CRITIC_MODEL}.lora.*",
            "informational_only",
            "of verl's Megatron engine; solo reads lora_rank, lora_alpha, target_modules",
        ),
        missing(f"{_CRITIC_MODEL}.*", "the model folder is used as it is"),
    ),
)
