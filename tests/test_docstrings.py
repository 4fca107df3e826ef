"""What ``help`` says in Python is so: the keys of configs and the names of the interface."""

import functools
import re

import pytest

import idmm
from idmm.config.schema import keys_of
from idmm.stages import STAGES


def documented(stage):
    """The keys before the colons of the list in a stage's docstring."""
    lines = re.findall(r"^ {8}((?:[a-z_.]+, )*[a-z_.]+): ", getattr(idmm, stage).__doc__.split("::\n")[1], re.M)
    return [key for line in lines for key in line.split(", ")]


@pytest.mark.parametrize("stage", list(STAGES))
def test_keys_in_docstrings_exist_and_suffice(stage):
    given, known = documented(stage), keys_of(STAGES[stage].config)
    assert [key for key in given if key not in known] == [] and len(given) == len(set(given)) > 12
    needed = {"out", "init", "seed", "data.root", "data.name", "data.subset", "model.name"}
    trained = {"train.epochs", "train.batch_size", "train.lr", "train.device"} if stage != "probe" else {"size"}
    assert needed | trained <= set(given)
    sections = [{re.split(r"\.|\[", key)[0] for key in keys} for keys in (known, given)]
    assert sections[0] == sections[1], "every section is named"
    assert f"idmm {stage} --help" in getattr(idmm, stage).__doc__


def test_help_shows_the_interface():
    for name in idmm.__all__:
        assert f"idmm.{name}" in idmm.__doc__
    for name in re.findall(r"``idmm\.([a-zA-Z_.]+)``", idmm.__doc__):
        functools.reduce(getattr, name.split("."), idmm)
