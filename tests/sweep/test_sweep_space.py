"""Overrides to axes, and the fingerprint of what is not swept."""

from __future__ import annotations

import logging

import pytest
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from poimen_exp.errors import Refused
from poimen_exp.sweep.identity import identify, identity_differences
from poimen_exp.sweep.settings import read_settings
from poimen_exp.sweep.space import Interval, Space, overrides_of, parse_space
from poimen_exp.sweep.study import slots_of


def _texts(space: Space) -> list[list[str]]:
    return [overrides_of(point) for point in space.grid()]


def test_values_are_written_as_hydra_reads_them() -> None:
    space = parse_space({}, ["a=0.9,1.0,1e-6", "b=true,null", "c='x,y',z", "d=range(1,3)", "e=[1,2],[3]"])
    assert [[value.text for value in axis.values] for axis in space.choices] == [
        ["0.9", "1.0", "1e-06"],
        ["True", "null"],
        ["'x,y'", "z"],
        ["1", "2"],
        ["[1,2]", "[3]"],
    ]
    numbers = [[value.number for value in axis.values] for axis in space.choices]
    assert numbers == [[0.9, 1.0, 1e-6], [None, None], [None, None], [1.0, 2.0], [None, None]]


def test_equal_numbers_are_one_point_and_a_repeated_one_is_run_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        space = parse_space({}, ["alpha=1.0,1,0.9,0.90"])
    assert _texts(space) == [["alpha=1.0"], ["alpha=0.9"]]
    assert "1 is given twice and run once" in caplog.text
    one, other = (slots_of(parse_space({}, [text]), 0)[0].key for text in ("alpha=1,2", "alpha=1.0,2.0"))
    assert one == other


def test_integers_beyond_the_reach_of_floats_stay_apart() -> None:
    space = parse_space({}, ["seed=9007199254740992,9007199254740993"])
    assert len(space.choices[0].values) == 2


def test_the_command_line_wins_over_the_sweep_group() -> None:
    group = {"alpha": "0.9,1.0", "seed": "1,2", "steps": 5}
    assert _texts(parse_space(group, ["alpha=0.5,0.6"])) == [
        ["alpha=0.5", "seed=1"], ["alpha=0.5", "seed=2"], ["alpha=0.6", "seed=1"], ["alpha=0.6", "seed=2"],
    ]  # fmt: skip
    space = parse_space(group, ["alpha=0.5", "+x=1", "sweep.resume=here"])
    assert space.keys == ("seed",)
    assert space.fixed == ("steps=5", "alpha=0.5", "+x=1")
    assert parse_space(group, ["steps=1,2"]).fixed == ()
    # The last word on the command line wins too.
    assert parse_space({}, ["alpha=1,2", "alpha=3"]).fixed == ("alpha=3",)
    assert parse_space({}, ["alpha=3", "alpha=1,2"]).fixed == ()


def test_a_shuffled_sweep_keeps_text_and_number_together() -> None:
    [axis] = parse_space({}, ["alpha=shuffle(range(0,50))"]).choices
    assert sorted(value.number for value in axis.values if value.number is not None) == list(range(50))
    assert all(float(value.text) == value.number for value in axis.values)


def test_intervals_carry_scale_and_type() -> None:
    space = parse_space({}, ["a=interval(0.5,1)", "b=tag(log,interval(1e-6,1e-3))", "c=int(interval(1,5))"])
    assert space.intervals == (
        Interval("a", 0.5, 1.0, is_int=False, log=False),
        Interval("b", 1e-6, 1e-3, is_int=False, log=True),
        Interval("c", 1.0, 5.0, is_int=True, log=False),
    )
    with pytest.raises(Refused, match=r"got the bounds 1 and 0.5, expected low < high"):
        parse_space({}, ["a=interval(1,0.5)"])
    with pytest.raises(Refused, match="low > 0 on a log scale"):
        parse_space({}, ["a=tag(log,interval(0,1))"])


def test_a_search_has_a_slot_for_each_sample_and_listed_value() -> None:
    space = parse_space({}, ["alpha=interval(0.5,1.0)", "seed=1,2"])
    assert [slot.key for slot in slots_of(space, 2)] == ["seed=1.0,#0", "seed=2.0,#0", "seed=1.0,#1", "seed=2.0,#1"]


def _config(**changes: object) -> object:
    base = {
        "alpha": 0.9, "seed": 1, "corpus": "???", "name": "${corpus}-run", "lr": {"value": 1e-6},
        "time": "${now:%f}", "folder": "${hydra:runtime.output_dir}", "sweep": {"resume": None},
    }  # fmt: skip
    return OmegaConf.create(base | changes)


def test_the_fingerprint_ignores_clock_folder_and_swept_values_and_nothing_else() -> None:
    setup_globals()
    space = parse_space({}, ["alpha=0.9,1.0", "corpus=a,b"])
    one = identify(_config(), space)
    assert one.base == {
        "seed": 1, "name": "<missing>-run", "lr.value": 1e-6,
        "time": "<now:%f>", "folder": "<hydra:runtime.output_dir>",
    }  # fmt: skip
    assert identify(_config(alpha=0.1, sweep={"resume": "x"}), space).fingerprint == one.fingerprint
    grown = parse_space({}, ["corpus=c,a,b", "alpha=0.5,0.9,1.0"])
    assert identify(_config(), grown).fingerprint == one.fingerprint
    changed = identify(_config(seed=2), space)
    assert changed.fingerprint != one.fingerprint
    assert identity_differences(one, changed) == ["seed: 1 there, 2 in this command"]
    # Hydra's own resolver is back.
    assert OmegaConf.create({"year": "${now:%Y}"}).year.isdecimal()


def test_other_bounds_or_other_swept_keys_are_another_sweep() -> None:
    narrow, wide = (identify(_config(), parse_space({}, [f"alpha=interval({low},1)"])) for low in (0.5, 0.1))
    assert identity_differences(narrow, wide) == [
        'bounds of alpha: "0.5..1.0" there, "0.1..1.0" in this command',
    ]
    both = identify(_config(), parse_space({}, ["alpha=interval(0.5,1)", "seed=1,2"]))
    assert identity_differences(narrow, both)[0] == "swept keys: alpha there, alpha, seed in this command"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("direction", "up", "hydra.sweeper.direction: got 'up', expected maximize or minimize"),
        ("n_trials", 0, "hydra.sweeper.n_trials: got 0, expected 1 or more"),
        ("n_jobs", -1, "hydra.sweeper.n_jobs: got -1, expected 1 or more"),
    ],
)
def test_wrong_sweeper_keys_are_refused(key: str, value: object, message: str) -> None:
    keys = {"direction": "maximize", "params": None, "n_trials": 20, "n_jobs": None, "seed": 0} | {key: value}
    with pytest.raises(Refused, match=message):
        read_settings(keys, OmegaConf.create({"sweep": {"resume": None, "storage": None}}))
