"""Some of the malformed inputs of ``make fuzz``, and the program that runs them."""

import ctypes
import time
from unittest import mock

import fuzz


def reads(folder, rng):
    return fuzz.Case(["configs"])


def refuses(folder, rng):
    return fuzz.Case(["embed", "--init", folder, folder, "--out", folder], [folder / "out"])


def leaves(folder, rng):
    (folder / "out").touch()
    return refuses(folder, rng)


def raises(folder, rng):
    broken = mock.patch("idmm.cli._run", side_effect=KeyError())
    return fuzz.Case(["configs"], inside=lambda: broken)


def crashes(folder, rng):
    ctypes.string_at(0)


def hangs(folder, rng):
    time.sleep(100)


EXPECTED = {
    reads: "right",
    crashes: "the process died with -11: Fatal Python error: Segmentation fault",
    refuses: "right",
    leaves: "left out behind",
    hangs: "stuck for 3 s",
    raises: "neither exit code 0 nor 2",
}


def test_faults_of_any_kind_are_seen():
    """And the cases after one that ended its process are run."""
    jobs = [(fuzz.Family(make.__name__, make, 1), 0) for make in EXPECTED]
    outcomes = list(fuzz.run(jobs, patience=3.0))
    assert [outcome.family for outcome in outcomes] == [make.__name__ for make in EXPECTED]
    for outcome, fault in zip(outcomes, EXPECTED.values(), strict=True):
        first, *_ = [*outcome.faults, "right"]
        assert first.startswith(fault), outcome


def test_a_hundred_malformed_inputs():
    """The first ones of each family, of which `make fuzz` makes ten thousand."""
    fuzz.load_families()
    count = -(-100 // len(fuzz.FAMILIES))
    jobs = [(family, number) for family in fuzz.FAMILIES.values() for number in range(count)]
    outcomes = list(fuzz.run(jobs))
    assert not [outcome for outcome in outcomes if outcome.faults]
    for name in fuzz.FAMILIES:
        assert (
            sum(outcome.code == 2 for outcome in outcomes if outcome.family == name) > count / 4
        ), name
