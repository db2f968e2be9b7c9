"""Dropout's masks are a function of (seed, name, step, sample)."""

from __future__ import annotations

import pytest
import torch

from rayzero3.models.dropout import DropoutKeys, keep_mask

SHAPE = torch.Size((9, 40))


def mask(seed=1, name="a", step=3, samples=(5, 6, 7), probability=0.3):
    return keep_mask(seed, name, step, torch.tensor(samples), SHAPE, probability)


def test_a_samples_mask_does_not_depend_on_what_is_beside_it():
    whole = mask()
    assert torch.equal(mask(samples=(7,)), whole[2:])
    assert torch.equal(mask(samples=(7, 5)), whole[[2, 0]])


@pytest.mark.parametrize("change", [{"seed": 2}, {"name": "b"}, {"step": 4}, {"samples": (8, 9, 10)}])
def test_each_part_of_the_key_counts(change):
    assert 0.4 < (mask() == mask(**change)).float().mean() < 0.75  # independent masks agree in 0.58 of their places


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_the_part_that_is_dropped_is_the_probability(probability):
    kept = keep_mask(7, "layer", 1, torch.arange(64), torch.Size((5000,)), probability)
    assert abs(kept.double().mean() - (1 - probability)) < 4 * (probability * (1 - probability) / kept.numel()) ** 0.5
    neighbours = (kept[:, 1:] == kept[:, :-1]).double().mean()
    assert abs(neighbours - (probability**2 + (1 - probability) ** 2)) < 0.01


def test_known_bits():
    """So that a resumed run meets the masks that it left, whatever the version of anything."""
    assert mask()[0, 0, :20].int().tolist() == [0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_the_rest_is_scaled_and_evaluation_drops_nothing():
    keys, x = DropoutKeys(1), torch.ones(3, 9, 40)
    assert keys.drop(x, 0.3, "a") is x
    keys.step, keys.samples = 3, torch.tensor([5, 6, 7])
    dropped = keys.drop(x, 0.3, "a")
    assert torch.equal(dropped != 0, mask()) and torch.allclose(dropped[dropped != 0], torch.tensor(1 / 0.7))
    assert keys.drop(x, 0.0, "a") is x
