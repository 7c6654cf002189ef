"""The plan's rules, one row a verl leaf or a family of leaves; the first match counts. Read and extend here."""

from __future__ import annotations

from poimen_exp.solo import rules as r
from poimen_exp.solo import rules_prompts as p
from poimen_exp.solo.rules import Rule, conformant, exact, inactive, lowered, missing, placement
from poimen_exp.solo.rules_critic import CRITIC

_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))

_ONE_DEVICE = "one process on one device: nothing is sharded, sent or scheduled"
_NO_CRITIC = "poimen_gates has baselines and no critic"
_NO_REWARD_MODEL = "the gates score themselves: gates.*"
_SEED = "every random stream of a run is drawn from the root key seed"

HONOURED: tuple[Rule, ...] = (
    # what is optimized
    exact(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        p.estimator,
        "poimen_gates: two baselines, mixed by alpha; the others by verl's own functions",
    ),
    exact(f"{_ACTOR}.clip_ratio", "loss.clip_ratio", r.number(0)),
    exact(f"{_ACTOR}.clip_ratio_low", "loss.clip_ratio_low", r.number(0)),
    exact(f"{_ACTOR}.clip_ratio_high", "loss.clip_ratio_high", r.number(0)),
    exact(f"{_ACTOR}.clip_ratio_c", "loss.clip_ratio_c", r.number(above=1)),
    exact(f"{_ACTOR}.loss_agg_mode", "loss.loss_agg_mode", r.one_of(*p.AGG_MODES)),
    exact(f"{_ACTOR}.loss_scale_factor", "loss.loss_scale_factor", p.loss_scale_factor(f"{_ACTOR}.loss_agg_mode")),
    exact(f"{_ACTOR}.entropy_coeff", "loss.entropy_coeff", r.number()),
    exact(f"{_ACTOR}.use_kl_loss", "loss.use_kl_loss", r.flag),
    exact(f"{_ACTOR}.kl_loss_coef", "loss.kl_loss_coef", r.number(0)),
    exact(f"{_ACTOR}.kl_loss_type", "loss.kl_loss_type", r.one_of(*p.KL_PENALTIES)),
    exact(f"{_ACTOR}.policy_loss.loss_mode", "", r.one_of("vanilla"), "verl's dual-clip loss"),
    # optimizer
    exact(f"{_ACTOR}.optim.lr", "optim.lr", r.number(0)),
    exact(f"{_ACTOR}.optim.weight_decay", "optim.weight_decay", r.number(0)),
    exact(f"{_ACTOR}.optim.betas", "optim.betas", r.betas),
    exact(f"{_ACTOR}.optim.clip_grad", "optim.grad_clip", r.number(above=0), "the key that verl 0.9.1's engines read"),
    exact(f"{_ACTOR}.optim.lr_warmup_steps", "optim.lr_warmup_steps", p.warmup_steps(f"{_ACTOR}.optim")),
    conformant(
        f"{_ACTOR}.optim.lr_warmup_steps_ratio",
        "of all steps, where lr_warmup_steps is not above 0; read with it",
        "",
        r.number(0, 1),
    ),
    exact(f"{_ACTOR}.optim.lr_scheduler_type", "optim.lr_scheduler_type", r.one_of("constant", "cosine")),
    exact(f"{_ACTOR}.optim.min_lr_ratio", "optim.min_lr_ratio", r.number(0, 1)),
    Rule(
        f"{_ACTOR}.grad_clip",
        "semantically_conformant",
        "verl 0.9.1 reads actor.optim.clip_grad: set that",
        same_as=f"{_ACTOR}.optim.clip_grad",
    ),
    conformant(f"{_ACTOR}.optim.total_training_steps", "-1: taken from trainer.total_training_steps, as verl does"),
    # batches
    exact("data.train_batch_size", "step.train_batch_size", p.train_batch_size),
    exact(f"{_ACTOR}.ppo_mini_batch_size", "step.ppo_mini_batch_size", r.whole(1)),
    exact(f"{_ACTOR}.ppo_epochs", "step.ppo_epochs", r.whole(1)),
    exact("data.shuffle", "step.shuffle", r.flag),
    exact(f"{_ACTOR}.ppo_max_token_len_per_gpu", "step.micro_batch_tokens", r.whole(1), "tokens of a micro-batch"),
    lowered(
        f"{_ACTOR}.use_dynamic_bsz",
        "micro-batches are always cut by tokens; they do not change the gradient",
        "",
        r.flag,
    ),
    # rollouts
    exact(f"{_ROLLOUT}.n", "rollout.group_size", p.group_size),
    exact(f"{_ROLLOUT}.temperature", "rollout.train.temperature", r.train_temperature),
    exact(f"{_ROLLOUT}.top_p", "rollout.train.top_p", p.train_top_p),
    exact(f"{_ROLLOUT}.top_k", "rollout.train.top_k", p.train_top_k),
    exact(f"{_ROLLOUT}.val_kwargs.temperature", "rollout.val.temperature", r.val_temperature),
    exact(f"{_ROLLOUT}.val_kwargs.top_p", "rollout.val.top_p", r.number(above=0, most=1)),
    exact(f"{_ROLLOUT}.val_kwargs.top_k", "rollout.val.top_k", r.top_k),
    exact(f"{_ROLLOUT}.val_kwargs.n", "rollout.val_group_size", r.whole(1)),
    conformant(f"{_ROLLOUT}.val_kwargs.do_sample", "false is temperature 0; read with it", "", r.flag),
    conformant(f"{_ROLLOUT}.do_sample", "training rollouts are always sampled"),
    exact("data.max_prompt_length", "rollout.max_prompt_length", r.whole(1)),
    exact("data.max_response_length", "rollout.train.max_tokens,rollout.val.max_tokens", r.whole(1)),
    conformant(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length is read", "", r.equal_to("data.max_prompt_length")),
    conformant(
        f"{_ROLLOUT}.response_length", "data.max_response_length is read", "", r.equal_to("data.max_response_length")
    ),
    exact(f"{_ROLLOUT}.max_num_seqs", "rollout.max_rows", r.whole(1), "rows generated at once"),
    conformant(f"{_ROLLOUT}.calculate_log_probs", "log-probs of sampled tokens are always recorded"),
    conformant("data.truncation", "error: a prompt that does not fit is refused when the corpus loads, never cut"),
    # model
    exact(f"{_MODEL}.path", "model.path", r.model_folder),
    exact(f"{_MODEL}.lora_rank", "model.lora_rank", r.lora_rank),
    exact(f"{_MODEL}.lora_alpha", "model.lora_alpha", r.whole(1)),
    exact(f"{_MODEL}.target_modules", "model.target_modules", r.modules),
    exact(f"{_MODEL}.lora_adapter_path", "model.adapter", r.adapter_folder),
    exact(
        f"{_MODEL}.override_config",
        "model.attn_implementation",
        r.attention,
        "sdpa where verl would take flash_attention_2",
    ),
    exact(
        f"{_ACTOR}.fsdp_config.dtype", "model.dtype", r.dtype, "of base weights and forwards; LoRA weights are float32"
    ),
    conformant(f"{_ACTOR}.fsdp_config.model_dtype", "fp32: trained weights and optimizer state are float32"),
    conformant(
        f"{_REF}.fsdp_config.dtype", "the reference is the actor's base", "", r.equal_to(f"{_ACTOR}.fsdp_config.dtype")
    ),
    conformant(f"{_REF}.fsdp_config.model_dtype", "the reference is the actor's base"),
    lowered(
        f"{_ROLLOUT}.dtype",
        "rollouts are sampled from the actor's own weights",
        "",
        r.equal_to(f"{_ACTOR}.fsdp_config.dtype"),
    ),
    # run
    exact("trainer.total_training_steps", "trainer.total_training_steps,optim.total_training_steps", p.total_steps),
    exact("trainer.test_freq", "trainer.test_freq", r.frequency),
    exact("trainer.save_freq", "trainer.save_freq", r.frequency),
    exact("trainer.val_before_train", "trainer.val_before_train", r.flag),
    exact("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", r.optional_count),
    conformant("model_engine", "dp: the keys of verl's FSDP engines"),
)

SEEDS: tuple[Rule, ...] = tuple(
    Rule(pattern, "semantically_conformant", _SEED, same_as="seed")
    for pattern in (
        "data.seed",
        f"{_ROLLOUT}.seed",
        f"{_ACTOR}.data_loader_seed",
        f"{_ACTOR}.fsdp_config.seed",
        f"{_REF}.fsdp_config.seed",
    )
)

LOWERED: tuple[Rule, ...] = (
    lowered(
        f"{_ROLLOUT}.name",
        "vllm: in this process, on a GPU where it is installed; else and otherwise the transformers engine",
        "rollout.engine",
        r.one_of("vllm", "sglang", "hf"),
    ),
    lowered(
        f"{_ROLLOUT}.gpu_memory_utilization",
        "of the one device; the transformers engine takes half of what is free",
        "rollout.memory_share",
        r.number(above=0, most=1),
    ),
    lowered(
        f"{_ROLLOUT}.enforce_eager", "read by vLLM; the transformers engine records", "rollout.enforce_eager", r.flag
    ),
    lowered(f"{_ROLLOUT}.mode", "rollouts and updates take turns"),
    lowered(f"{_ROLLOUT}.load_format", "the engine shares the actor's weights", accepts=("safetensors", "auto")),
    lowered(
        f"{_ROLLOUT}.*log_prob_*",
        "log-probs are computed under the update's token budget (ppo_max_token_len_per_gpu)",
        "",
        p.any_size,
    ),
    lowered(
        f"{_REF}.log_prob_*",
        "reference log-probs are computed under the update's token budget (ppo_max_token_len_per_gpu)",
        "",
        p.any_size,
    ),
    lowered(
        f"{_ACTOR}.ppo_micro_batch_size*", "micro-batches are cut by tokens: ppo_max_token_len_per_gpu", "", p.any_size
    ),
    lowered(f"{_MODEL}.use_remove_padding", "padding is masked; it is in no loss", "", r.flag),
    lowered(f"{_ACTOR}.use_remove_padding", "padding is masked; it is in no loss", "", r.flag),
    lowered(f"{_MODEL}.enable_gradient_checkpointing", "recomputation saves memory and changes no value", "", r.flag),
    lowered(f"{_ACTOR}.use_torch_compile", "compilation changes no meaning", "", r.flag),
    lowered(f"{_REF}.use_torch_compile", "compilation changes no meaning", "", r.flag),
    lowered(f"{_ACTOR}.shuffle", "mini-batches are whole groups in the order of the batch"),
    lowered(
        f"{_ACTOR}.fsdp_config.param_offload", p.offloaded("trained and sampling weights"), "offload.actor", r.flag
    ),
    lowered(
        f"{_ACTOR}.fsdp_config.optimizer_offload", p.offloaded("optimizer state"), "offload.actor_optimizer", r.flag
    ),
    lowered(
        f"{_REF}.fsdp_config.param_offload",
        p.offloaded("the reference's adapter weights (its base is the actor's)"),
        "offload.reference",
        r.flag,
    ),
    lowered("trainer.device", "the root key device chooses: set that"),
    lowered("trainer.default_local_dir", "checkpoints lie in the run folder"),
    lowered("trainer.logger", "metrics.jsonl is always written; W&B is tracking.wandb", accepts=(["console"],)),
    lowered("trainer.project_name", "W&B's project is tracking.project", accepts=("poimen_exp",)),
    exact("trainer.experiment_name", "", r.text, "names the run's folder multirun/NAME/"),
)

INACTIVE: tuple[Rule, ...] = (
    inactive("critic.*", _NO_CRITIC),
    inactive("algorithm.kl_ctrl.*", "active with algorithm.use_kl_in_reward"),
    inactive("algorithm.pf_ppo.*", "active with algorithm.use_pf_ppo"),
    inactive("algorithm.filter_groups.*", "active with algorithm.filter_groups.enable"),
    inactive("reward_model.*", _NO_REWARD_MODEL),
    inactive("reward.*", _NO_REWARD_MODEL),
    inactive("sandbox_fusion.*", _NO_REWARD_MODEL),
    inactive("distillation.*", "there is no teacher"),
    inactive(f"{_REF}.fsdp_config.optimizer_offload", "the reference has no optimizer"),
    inactive(f"{_ACTOR}.policy_loss.*", "a parameter of other losses than vanilla"),
    inactive(f"{_ACTOR}.tau_*", "a parameter of other losses than vanilla"),
    inactive(f"{_MODEL}.mtp.*", "active with mtp.enable"),
    inactive(f"{_MODEL}.lora.*", "of verl's Megatron engine; solo reads lora_rank, lora_alpha, target_modules"),
    inactive("skip.*", "verl's own rollout cache"),
    inactive("trainer.v1.colocate_async.*", "of verl's asynchronous trainers"),
    inactive("trainer.v1.separate_async.*", "of verl's asynchronous trainers"),
    inactive("trainer.v1.sync", "empty"),
    *(
        inactive(f"data.{name}", "of verl's dataset of prompts; the corpus has its own keys (corpus.*)")
        for name in (
            "reward_fn_key",
            "image_*",
            "video_key",
            "audio_key",
            "return_*",
        )
    ),
)

PLACEMENT: tuple[Rule, ...] = (
    placement("ray_kwargs.*", _ONE_DEVICE),
    placement("transfer_queue.*", _ONE_DEVICE),
    placement("trainer.nnodes", _ONE_DEVICE),
    placement("trainer.n_gpus_per_node", _ONE_DEVICE, accepts=(1,)),
    placement("trainer.balance_batch", _ONE_DEVICE),
    placement("trainer.ray_wait_register_center_timeout", _ONE_DEVICE),
    placement("trainer.use_v1", "chooses verl's trainer"),
    placement("trainer.v1.*", "of verl's V1 trainer"),
    placement("trainer.esi_redundant_time", "of elastic servers"),
    placement("data.dataloader_num_workers", "tasks are read by offset in this process", accepts=(0,)),
    placement("data.use_shm", _ONE_DEVICE),
    placement(f"{_MODEL}.use_shm", _ONE_DEVICE),
    placement("actor_rollout_ref.nccl_timeout", _ONE_DEVICE),
    placement("actor_rollout_ref.hybrid_engine", _ONE_DEVICE),
    placement(f"{_ACTOR}.strategy", _ONE_DEVICE, accepts=("fsdp2",)),
    placement(f"{_REF}.strategy", _ONE_DEVICE, accepts=("fsdp2",)),
    placement(f"{_ACTOR}.fsdp_config.*", _ONE_DEVICE),
    placement(f"{_REF}.fsdp_config.*", _ONE_DEVICE),
    placement(f"{_ACTOR}.ulysses_sequence_parallel_size", _ONE_DEVICE),
    placement(f"{_REF}.ulysses_sequence_parallel_size", _ONE_DEVICE),
    placement("*.rollout_n", "verl's copy of rollout.n for its workers"),
    *(
        placement(f"{_ROLLOUT}.{name}", "of verl's rollout servers")
        for name in (
            "nnodes",
            "n_gpus_per_node",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "cudagraph_capture_sizes",
            "free_cache_engine",
            "max_num_batched_tokens",
            "max_model_len",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "scheduling_policy",
            "layered_summon",
            "disable_log_stats",
            "multi_stage_wake_up",
            "skip_tokenizer_init",
            "engine_kwargs*",
            "router_config_path",
            "agent.*",
            "checkpoint_engine.*",
            "trace.*",
            "prometheus.*",
            "disaggregation.*",
            "over_sample_rate",
            "moe_load_balance_metrics_interval",
            "logprobs_mode",
        )
    ),
    placement(f"{_ROLLOUT}.tensor_model_parallel_size", "of verl's rollout servers", accepts=(1,)),
)

REFUSED_WHEN_CHANGED: tuple[Rule, ...] = (
    missing("algorithm.filter_groups.enable", "every group of a batch is trained on"),
    missing("distillation.enabled", "there is no teacher"),
    missing("*reward_model.enable", _NO_REWARD_MODEL),
    missing("*custom_reward_function.*", _NO_REWARD_MODEL),
    missing("*.mtp.enable*", "multi-token prediction"),
    missing("skip.*.enable", "verl's own rollout cache"),
    missing("trainer.v1.trainer_mode", "rollouts and updates take turns"),
    missing("*.qat.*", "quantization-aware training"),
    missing("*.fsdp_config.full_determinism", "CPU runs repeat bit for bit; a GPU's kernels are not forced to"),
    missing("algorithm.use_pf_ppo", "preference feedback"),
    missing("algorithm.rollout_correction.*", "rollouts are sampled from the policy that is updated"),
    missing(f"{_ACTOR}.calculate_*", "a metric that solo does not compute"),
    missing(f"{_ACTOR}.freeze_vision_tower", "text models only"),
    missing(f"{_ACTOR}.use_prefix_grouper", "of verl's engines"),
    missing(f"{_ACTOR}.use_fused_kernels", "of verl's engines"),
    missing(f"{_ACTOR}.entropy_*", "of verl's engines"),
    missing(f"{_REF}.entropy_*", "of verl's engines"),
    missing(f"{_ACTOR}.pad_to_length", "of verl's engines"),
    missing(f"{_REF}.pad_to_length", "of verl's engines"),
    missing(f"{_ACTOR}.checkpoint.*", "a checkpoint always holds adapter, optimizer and all random states"),
    missing(f"{_ACTOR}.optim.*", "AdamW of torch with verl's schedules"),
    missing("*.profiler.*", "verl's profilers"),
    missing("global_profiler.*", "verl's profilers"),
    missing(f"{_ROLLOUT}.multi_turn.*", "tools and multi-turn dialogues; the gates' turns are built in"),
    missing(f"{_ROLLOUT}.full_determinism", "CPU runs repeat bit for bit; a GPU's kernels are not forced to"),
    missing(f"{_ROLLOUT}.ignore_eos", "a response ends at its end token"),
    missing(f"{_ROLLOUT}.enable_rollout_routing_replay", "of mixture-of-experts models"),
    missing(f"{_ROLLOUT}.quantization*", "the actor's own weights are sampled from"),
    missing(f"{_ROLLOUT}.mtp", "multi-token prediction"),
    missing(f"{_ROLLOUT}.qat", "quantization-aware training"),
    *(
        missing(f"{_MODEL}.{name}", "the model folder is used as it is")
        for name in (
            "hf_config_path",
            "tokenizer_path",
            "trust_remote_code",
            "custom_chat_template",
            "external_lib",
            "exclude_modules",
            "enable_activation_offload",
            "use_liger",
            "use_fused_kernels",
            "fused_kernel_options.*",
            "tiled_mlp.*",
        )
    ),
    *(
        missing(f"data.{name}", "of verl's dataset of prompts; the corpus has its own keys (corpus.*)")
        for name in (
            "tokenizer",
            "gen_batch_size",
            "val_batch_size",
            "tool_config_path",
            "function_tool_path",
            "validation_shuffle",
            "trust_remote_code",
            "custom_cls.*",
            "apply_chat_template_kwargs",
            "mm_processor_kwargs",
        )
    ),
    *(
        missing(f"trainer.{name}", reason)
        for name, reason in (
            ("log_val_generations", "rollouts are written to trajectories/ (tracking.trajectory_freq)"),
            ("rollout_data_dir", "rollouts are written to trajectories/ (tracking.trajectory_freq)"),
            ("validation_data_dir", "rollouts are written to trajectories/ (tracking.trajectory_freq)"),
            ("checkpoint_callback_class", "callbacks"),
            ("val_only", "poimen eval RUN"),
            ("default_hdfs_dir", "checkpoints lie in the run folder"),
            ("del_local_ckpt_after_load", "checkpoints lie in the run folder"),
        )
    ),
)

TYPES: tuple[Rule, ...] = (inactive("*._target_", "names verl's dataclass"),)

RULES: tuple[Rule, ...] = (
    TYPES
    + HONOURED
    + p.ALGORITHM
    + p.DATA
    + p.REWARD
    + CRITIC
    + SEEDS
    + LOWERED
    + REFUSED_WHEN_CHANGED
    + INACTIVE
    + PLACEMENT
)

OWN: dict[str, str] = {
    "alpha": "alpha",
    "seed": "seed",
    "device": "device",
    **{
        f"corpus.{name}": f"corpus.{name}"
        for name in ("path", "chunk_tokens", "max_chunks", "min_kappa", "allow_unmeasured", "on_too_long")
    },
    **{f"corpus.{name}": f"corpus.{name}" for name in ("split_seed", "val_fraction", "test_fraction", "max_val_tasks")},
    **{f"gates.{name}": f"gates.{name}" for name in ("layout", "wording", "memory_tokens", "on_unparsed", "matcher")},
    **{f"gates.warm_start.{name}": f"gates.warm_start_{name}" for name in ("steps", "lr", "batch")},
    "advantage.turn_baseline": "gates.turn_baseline",
    "rollout.max_failed": "rollout.max_failed",
    "stop.patience": "trainer.patience",
    "stop.min_delta": "trainer.min_delta",
    "stop.on_collapse": "trainer.on_collapse",
    "adapter.weights": "trainer.adapter_weights",
    "rewards.provider": "reward.provider",
    "reference.adapter": "reference",
}
"""Our keys -> fields of ``SoloSettings``."""
