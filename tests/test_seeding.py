"""Randomness as a function of (seed, purpose, numbers)."""

import random

import numpy as np
import torch

from idmm.seeding import derive, numpy_rng, permutation, seeded, uniforms


def test_every_argument_counts_and_nothing_else():
    keys = [derive(0, "views"), derive(1, "views"), derive(0, "order"), derive(0, "views", 1), derive(0, "views", 1, 2)]
    keys.append(derive(0, "views", 12))
    assert len(set(keys)) == len(keys)
    random.seed(5)
    assert derive(0, "views", 1) == derive(0, "views", np.int64(1))
    assert all(0 <= key < 2**63 for key in keys)


def test_a_rows_numbers_do_not_depend_on_the_other_rows():
    key = derive(3, "views", 7)
    all_rows = uniforms(key, np.arange(100), 8)
    np.testing.assert_array_equal(uniforms(key, np.array([42, 7]), 8), all_rows[[42, 7]])
    np.testing.assert_array_equal(uniforms(key, np.array([42]), 3), all_rows[[42], :3])


def test_orders_differ_from_epoch_to_epoch():
    orders = [permutation(0, "order", 50, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(permutation(0, "order", 50, 1), orders[1])
    assert numpy_rng(0, "a").random() != numpy_rng(0, "b").random()


def test_seeded_blocks_are_repeatable_and_leave_the_global_state_alone():
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(1))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with seeded(9):
        first = draw()
    assert draw() == wanted
    with seeded(9):
        assert draw() == first != wanted
