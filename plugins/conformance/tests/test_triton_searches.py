"""A search among launches gives the one that is asked for, or the next one that fits, and times none."""

from __future__ import annotations

import pytest

from veomni_conformance.triton_searches import taking_launch

pytest.importorskip("triton")
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.errors import OutOfResources

SIZES = (16, 32, 64, 128)


class Launched:
    """Stands for a compiled function: notes the block sizes that it is launched with, up to ``fits``."""

    arg_names = ("x", "n")

    def __init__(self, fits):
        self.fits, self.sizes, self.fn = fits, [], lambda x, n: None

    def run(self, *args, BLOCK, **meta):
        if self.fits < BLOCK:
            raise OutOfResources(BLOCK, self.fits, "shared memory")
        self.sizes.append(BLOCK)


def searching(fits=128, prune=None):
    function = Launched(fits)
    configs = [Config({"BLOCK": size}, num_warps=4) for size in SIZES]
    return function, Autotuner(function, function.arg_names, configs, ["n"], None, None, prune_configs_by=prune)


@pytest.mark.parametrize("index, taken", [(0, 16), (1, 32), (-1, 128), (-2, 64), (9, 128), (-9, 16)])
def test_it_takes_the_launch_that_is_asked_for_at_every_shape(index, taken):
    function, search = searching()
    with taking_launch(index):
        for n in (1, 2, 1):
            search.run(0, n)
    assert function.sizes == [taken] * 3


def test_what_does_not_fit_is_passed_over_and_where_nothing_fits_it_is_an_error():
    function, search = searching(fits=40)
    with taking_launch(-1):
        search.run(0, 1)
        search.run(0, 2)
        assert function.sizes == [32, 32]
        with pytest.raises(OutOfResources):
            searching(fits=8)[1].run(0, 1)


def test_what_a_function_rules_out_is_not_taken():
    function, search = searching(prune={"early_config_prune": lambda configs, args, **meta: configs[:2]})
    with taking_launch(-1):
        search.run(0, 1)
    assert function.sizes == [32]


def test_afterwards_searches_time_again():
    run, bench = Autotuner.run, Autotuner._bench
    with pytest.raises(ZeroDivisionError), taking_launch(0):
        assert Autotuner.run is not run
        raise ZeroDivisionError
    assert (Autotuner.run, Autotuner._bench) == (run, bench)
