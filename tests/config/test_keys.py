from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig, OmegaConf

from poimen_exp.__main__ import main
from poimen_exp.config.compose import compose_config
from poimen_exp.config.keys import check_keys, is_known, suggestion
from poimen_exp.errors import Refused

ConfBeside = Callable[[str, str], str]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs the command line, which must refuse without a traceback; returns its message."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("alhpa=1", "alpha"),
        ("+alhpa=1", "alpha"),
        ("++alhpa=1", "alpha"),
        ("+gates.memory_token=4", "gates.memory_tokens"),
        ("gates.memory_token=4", "gates.memory_tokens"),
        ("+trainer.tset_freq=4", "trainer.test_freq"),
        ("+lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("+actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("+patience=3", "stop.patience"),
        ("hydra.sweeper.parms=1", "hydra.sweeper.params"),
        ("hydra.rnu.dir=x", "hydra.run"),
        ("hydra.run.dri=x", "hydra.run.dir"),
    ],
)
def test_a_misspelt_key_on_the_command_line_is_refused_with_the_key_that_was_meant(
    capsys: pytest.CaptureFixture[str], argument: str, meant: str
) -> None:
    assert f"did you mean {meant}?" in refused(capsys, argument, "--cfg", "job")


def test_a_misspelt_key_in_an_experiment_is_refused(
    capsys: pytest.CaptureFixture[str], conf_beside: ConfBeside
) -> None:
    text = "# @package _global_\ntrainer:\n  tset_freq: 5\nactor_rollout_ref:\n  actor:\n    optim:\n      lrr: 1\n"
    message = refused(capsys, conf_beside("experiment/mine.yaml", text), "+experiment=mine", "--cfg", "job")
    assert "trainer.tset_freq: no such key; did you mean trainer.test_freq?" in message
    assert "actor_rollout_ref.actor.optim.lrr: no such key; did you mean actor_rollout_ref.actor.optim.lr?" in message


def test_a_misspelt_key_in_an_alpha_sweep_is_refused(
    capsys: pytest.CaptureFixture[str], conf_beside: ConfBeside
) -> None:
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      alhpa: 0.9,1.0\n"
    message = refused(capsys, conf_beside("alpha_sweep/mine.yaml", text), "+alpha_sweep=mine")
    assert "alhpa: no such key (hydra.sweeper.params); did you mean alpha?" in message


def test_a_misspelt_key_of_the_sweeper_in_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], conf_beside: ConfBeside
) -> None:
    text = "# @package _global_\nhydra:\n  sweeper:\n    n_trails: 3\n"
    message = refused(capsys, conf_beside("alpha_sweep/mine.yaml", text), "+alpha_sweep=mine", "--cfg", "job")
    assert "hydra.sweeper.n_trails: no such key; did you mean hydra.sweeper.n_trials?" in message


def test_a_deleted_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trainer.device: was deleted" in refused(capsys, "~trainer.device", "--cfg", "job")


def test_a_mapping_in_the_place_of_a_number_is_refused(paper: DictConfig) -> None:
    cfg = paper.copy()
    OmegaConf.set_struct(cfg, False)
    cfg.trainer.save_freq = {"every": 3}
    with pytest.raises(Refused, match=r"trainer\.save_freq\.every: no such key"):
        check_keys(cfg)


def test_what_verl_leaves_open_stays_open() -> None:
    compose_config(
        [
            "+actor_rollout_ref.model.override_config.rope_theta=5",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=3",
            "+ray_kwargs.ray_init.num_gpus=1",
            "+trainer.v1.sampler.sampler_kwargs.x=1",
            "+actor_rollout_ref.actor.optim.override_optimizer_config={foreach: false}",
            "+reward.reward_model.rollout.engine_kwargs.sglang.x=1",
            "+actor_rollout_ref.rollout.enable_sleep_mode=false",  # in verl's dataclass, not in its YAML
        ]
    )


def test_another_engine_family_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model_engine: got megatron, expected dp" in refused(capsys, "model_engine=megatron", "--cfg", "job")


def test_a_key_far_from_all_others_has_no_suggestion() -> None:
    assert not is_known("zzzzqqq")
    assert suggestion("zzzzqqq") == ""


def test_every_unknown_key_is_named_in_one_message() -> None:
    with pytest.raises(Refused) as refusal:
        compose_config(["+foo.bar=1", "+foo.baz=2", "+trainer.x=1"])
    assert sorted(line.split(":")[0] for line in str(refusal.value).splitlines()) == ["foo", "trainer.x"]
