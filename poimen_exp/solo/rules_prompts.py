"""The plan's rules for what only prompts have: estimators, data and rewards. Read and extend here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from poimen_exp.errors import Refused
from poimen_exp.solo import rules as r
from poimen_exp.solo.rules import Leaves, Rule, conformant, exact, lowered
from poimen_exp.solo.settings import Estimator
from poimen_exp.wording import counted

_CUSTOM, _REWARD_MODEL = "reward.custom_reward_function", "reward.reward_model"
_GROUPED = ("poimen_gates", "grpo", "rloo")

_VERLS_EPOCHS, _NO_LIMIT = 30, 1_000_000
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def gates(leaves: Leaves) -> bool:
    """Whether the gates are trained."""
    return bool(leaves["algorithm.adv_estimator"] == "poimen_gates")


def prompts(leaves: Leaves) -> bool:
    """Whether single-turn prompts are trained on."""
    return not gates(leaves)


def critic(leaves: Leaves) -> bool:
    """Whether a value model is trained."""
    return bool(leaves["algorithm.adv_estimator"] == "gae")


def discounted(leaves: Leaves) -> bool:
    """Whether the estimator gives later rewards less weight."""
    return leaves["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus")


def normalised(leaves: Leaves) -> bool:
    """Whether the estimator may divide by a standard deviation."""
    return bool(leaves["algorithm.adv_estimator"] == "grpo")


def kl_in_reward(leaves: Leaves) -> bool:
    """Whether rewards are scores less KL."""
    return prompts(leaves) and leaves["algorithm.use_kl_in_reward"] is True


def custom_reward(leaves: Leaves) -> bool:
    """Whether the user's function scores."""
    return prompts(leaves) and leaves[f"{_CUSTOM}.path"] is not None


def reward_model(leaves: Leaves) -> bool:
    """Whether a classifier scores."""
    return prompts(leaves) and leaves[f"{_REWARD_MODEL}.enable"] is True


def only(when: Callable[[Leaves], bool], idle: str, *rules: Rule) -> tuple[Rule, ...]:
    """Rules that hold where ``when`` does; elsewhere their leaves are inactive for the reason ``idle``."""
    return tuple(replace(rule, when=when, idle=idle) for rule in rules)


def estimator(value: Any, _: Leaves) -> str:
    """One of the estimators that solo has."""
    if value not in get_args(Estimator):
        raise Refused(f"expected {' or '.join(get_args(Estimator))}")
    return str(value)


def group_size(value: Any, leaves: Leaves) -> int:
    """Rollouts a prompt: two or more where they are compared with each other."""
    if leaves["algorithm.adv_estimator"] in _GROUPED:
        return r.group_size(value, leaves)
    return int(r.whole(1)(value, leaves))


def train_top_p(value: Any, leaves: Leaves) -> float:
    """Of the rollouts that are trained on; free for prompts, as in verl."""
    return r.train_top_p(value, leaves) if gates(leaves) else float(r.number(above=0, most=1)(value, leaves))


def train_top_k(value: Any, leaves: Leaves) -> int:
    """Of the rollouts that are trained on; free for prompts, as in verl."""
    return r.train_top_k(value, leaves) if gates(leaves) else r.top_k(value, leaves)


def loss_scale_factor(leaf: str) -> r.Convert:
    """A positive whole number, and needed, where the aggregation of ``leaf`` divides by it."""

    def convert(value: Any, leaves: Leaves) -> int | None:
        if leaves[leaf] == "seq-mean-token-sum-norm" and value is None:
            raise Refused(
                "expected a whole number with seq-mean-token-sum-norm: verl would divide by the longest response of "
                "its micro-batch, which no setting fixes; data.max_response_length is the usual one"
            )
        return r.optional_count(value, leaves)

    return convert


def files(value: Any, _: Leaves) -> tuple[Path, ...]:
    """Parquet files that exist."""
    listed = value if isinstance(value, list) else [value]
    found = tuple(Path(str(item)).expanduser() for item in listed)
    for path in found:
        if path.suffix != ".parquet":
            raise Refused(f"expected Parquet files: {path.name} is none (poimen data sample makes one to try)")
        if not path.is_file():
            raise Refused(f"expected Parquet files that exist: {path} does not (poimen data sample makes one to try)")
    if not found:
        raise Refused("expected one Parquet file or more")
    return found


def sample_count(value: Any, _: Leaves) -> int:
    """Rows to take; -1 for all."""
    if type(value) is not int or value == 0 or value < -1:
        raise Refused("expected a whole number of rows, or -1 for all")
    return value


def custom_file(value: Any, _: Leaves) -> Path | None:
    """The user's Python file, or None."""
    if value is None:
        return None
    path = Path(str(value)).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise Refused("expected a Python file that exists")
    return path


def warmup_steps(optim: str) -> r.Convert:
    """verl: the count if it is above 0, else the ratio of all steps.

    Args:
        optim: dotted path of the optimizer whose ratio counts.
    """

    def convert(value: Any, leaves: Leaves) -> int:
        if type(value) is not int:
            raise Refused("expected a whole number of steps")
        if value > 0:
            return value
        ratio = leaves[f"{optim}.lr_warmup_steps_ratio"]
        return int(ratio * total_steps(leaves["trainer.total_training_steps"], leaves)) if ratio else 0

    return convert


def total_steps(value: Any, leaves: Leaves) -> int:
    """Steps of the run; prompts may count epochs instead, as verl does."""
    if value is None and prompts(leaves):
        return int(r.whole(1)(leaves["trainer.total_epochs"], leaves)) * steps_per_epoch(leaves)
    return r.total_steps(value, leaves)


def total_epochs(value: Any, leaves: Leaves) -> int:
    """Passes over the prompts; a run ends with them, as in verl, and so they must last for all its steps."""
    epochs, steps = int(r.whole(1)(value, leaves)), leaves["trainer.total_training_steps"]
    if gates(leaves):
        if epochs not in (_VERLS_EPOCHS, _NO_LIMIT):
            raise Refused(f"expected {_NO_LIMIT}: trainer.total_training_steps ends a run of the gates: set that")
        return epochs
    if type(steps) is int and epochs < _NO_LIMIT:
        per_epoch = steps_per_epoch(leaves)
        if 0 < epochs * per_epoch < steps:  # an epoch without a full batch: refused under data.train_batch_size
            raise Refused(
                f"expected enough epochs for trainer.total_training_steps={steps}: an epoch has "
                f"{counted(per_epoch, 'step')}; raise it, or set trainer.total_training_steps=null"
            )
    return epochs


def steps_per_epoch(leaves: Leaves) -> int:
    """Full batches in the training files, by the row counts in their footers."""
    if leaves["data.filter_overlong_prompts"]:
        raise Refused(
            "expected trainer.total_training_steps as a number: with data.filter_overlong_prompts the rows of an epoch "
            "are known only once all are encoded"
        )
    try:
        rows = train_rows(leaves)
    except Refused as error:
        raise Refused(
            "expected Parquet files that can be read as data.train_files: their rows and trainer.total_epochs give the "
            f"steps; set the files, or trainer.total_training_steps to a number ({error})"
        ) from None
    return rows // int(r.whole(1)(leaves["data.train_batch_size"], leaves))


def train_rows(leaves: Leaves) -> int:
    """Rows of the training files that are taken, by their footers; too long ones are not known yet."""
    from poimen_exp.solo.parquet import row_count

    rows = sum(row_count(path) for path in files(leaves["data.train_files"], leaves))
    most = sample_count(leaves["data.train_max_samples"], leaves)
    return min(rows, most) if most > 0 else rows


def train_batch_size(value: Any, leaves: Leaves) -> int:
    """Prompts a step; no more than the training files have rows (a corpus is counted when it is read)."""
    batch = int(r.whole(1)(value, leaves))
    if prompts(leaves):
        try:
            rows = train_rows(leaves)
        except Refused:  # under the keys of the files
            return batch
        if rows < batch:
            raise Refused(
                f"expected at most {rows}: data.train_files has {counted(rows, 'row')} (data.train_max_samples="
                f"{leaves['data.train_max_samples']}), and a step takes a full batch"
            )
    return batch


def kl_flag(value: Any, leaves: Leaves) -> bool:
    """Whether rewards are scores less KL."""
    if r.flag(value, leaves) and gates(leaves):
        raise Refused("expected false for the gates: their KL is in the loss (actor.use_kl_loss)")
    return bool(value)


def reward_switch(value: Any, leaves: Leaves) -> bool:
    """Whether a classifier scores; the gates score themselves."""
    if r.flag(value, leaves) and gates(leaves):
        raise Refused("expected false for the gates: they score themselves (gates.*)")
    return bool(value)


def resume_mode(value: Any, _: Leaves) -> str:
    """verl's three words."""
    if value not in ("auto", "disable", "resume_path"):
        raise Refused("expected auto, disable or resume_path")
    return str(value)


def resume_from(value: Any, leaves: Leaves) -> Path | None:
    """A checkpoint folder, read only under ``resume_mode=resume_path``."""
    if leaves["trainer.resume_mode"] != "resume_path":
        if value is not None:
            raise Refused("expected null, or trainer.resume_mode=resume_path")
        return None
    path = Path(str(value)).expanduser()
    if not path.name.startswith("global_step_") or not (path / "manifest.json").is_file():
        raise Refused(
            "expected RUN/checkpoints/global_step_N with trainer.resume_mode=resume_path: no checkpoint there"
        )
    return path


def any_text(value: Any, leaves: Leaves) -> str:
    """A text that names something solo does otherwise."""
    return r.text(value, leaves)


def any_size(value: Any, leaves: Leaves) -> int | None:
    """A size or a switch that changes how something is computed and not what."""
    return value if isinstance(value, bool) else r.optional_count(value, leaves)


def offloaded(what: str) -> str:
    """The lowering of a switch that offloads."""
    return f"true: {what} in main memory outside of their phases; false: where the GPU has no room for all roles"


ALGORITHM: tuple[Rule, ...] = (
    *only(
        discounted,
        "read by gae and reinforce_plus_plus",
        exact("algorithm.gamma", "algorithm.gamma", r.number(0, 1)),
    ),
    *only(critic, "read by gae", exact("algorithm.lam", "algorithm.lam", r.number(0, 1))),
    *only(
        normalised,
        "read by grpo",
        exact("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", r.flag, "false: Dr. GRPO"),
    ),
    exact("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", kl_flag),
    *only(
        kl_in_reward,
        "active with algorithm.use_kl_in_reward",
        exact("algorithm.kl_penalty", "algorithm.kl_penalty", r.one_of(*KL_PENALTIES)),
        exact("algorithm.kl_ctrl.type", "", r.one_of("fixed"), "a fixed coefficient"),
        exact("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", r.number(0)),
    ),
    exact("trainer.total_epochs", "", total_epochs, "read where trainer.total_training_steps is null"),
    exact("trainer.resume_mode", "", resume_mode, "auto: a new run folder has nothing to resume; poimen resume RUN"),
    exact("trainer.resume_from_path", "trainer.resume_from", resume_from, "a checkpoint of another run to begin with"),
)

DATA: tuple[Rule, ...] = only(
    prompts,
    "tasks come from corpus.path",
    exact("data.train_files", "prompts.train_files", files),
    exact("data.val_files", "prompts.val_files", files),
    exact("data.prompt_key", "prompts.prompt_key", r.text),
    exact("data.train_max_samples", "prompts.train_max_samples", sample_count),
    exact("data.val_max_samples", "prompts.val_max_samples", sample_count),
    exact("data.filter_overlong_prompts", "prompts.filter_overlong_prompts", r.flag),
    lowered("data.filter_overlong_prompts_workers", "prompts are encoded in this process", "", any_size),
)

REWARD: tuple[Rule, ...] = (
    conformant(f"{_REWARD_MODEL}.enable", "true: the classifier scores", "", reward_switch),
    *only(
        prompts,
        "the gates score themselves: gates.*",
        exact(f"{_CUSTOM}.path", "reward.custom_path", custom_file, "a function of the user's, with verl's signature"),
    ),
    *only(custom_reward, "active with its path", exact(f"{_CUSTOM}.name", "reward.custom_name", r.text)),
    *only(
        reward_model,
        "active with reward.reward_model.enable",
        exact(f"{_REWARD_MODEL}.model_path", "reward.model_path", r.model_folder, "a sequence classifier"),
        exact(f"{_REWARD_MODEL}.rollout.dtype", "reward.model_dtype", r.dtype),
        lowered(
            f"{_REWARD_MODEL}.rollout.max_num_batched_tokens",
            "tokens of a scoring forward",
            "reward.model_batch_tokens",
            r.whole(1),
        ),
        lowered(f"{_REWARD_MODEL}.rollout.name", "scored by transformers in this process", "", any_text),
    ),
)
