"""Orders of additions such as a kernel might have by mistake."""

import functools

import aten_model
import torch


def with_vectors(vector):
    def order(terms):
        return aten_model._full_sum_of_part(terms.reshape(-1), vector, 0, aten_model.H200)

    return order


def one_block(terms):
    return (
        aten_model.full_sum(terms, aten_model.Device(0, 2048))
        if terms.numel() < 131072
        else aten_model.full_sum(terms, aten_model.Device(1, 512))
    )


def neighbours_first(terms):
    return aten_model.full_sum(terms, aten_model.Device(132, 2048, rocm=True))


def last_elements_first(terms):
    flat = terms.reshape(-1)
    rest = len(flat) % (16 // terms.element_size())
    return aten_model.full_sum(torch.cat([flat[len(flat) - rest :], flat[: len(flat) - rest]]))


def plain(terms):
    return terms.reshape(-1).float().cumsum(0)[-1]


FULL_SUMS = {
    "one element at a time": with_vectors(1),
    "vectors of 32 bytes": lambda terms: with_vectors(32 // terms.element_size())(terms),
    "vectors of 8 bytes": lambda terms: with_vectors(8 // terms.element_size())(terms),
    "fewer blocks": one_block,
    "neighbouring lanes first": neighbours_first,
    "the last elements first": last_elements_first,
    "one after the other": plain,
}


def in_sequence(values):
    """The sum of each row."""
    total = torch.zeros(len(values))
    for column in values.unbind(1):
        total = total + column
    return total


COLUMN_SUMS = {
    "in sequence": lambda values: in_sequence(values.t()),
    "in one block": functools.partial(aten_model.column_sum, device=aten_model.Device(0, 2048)),
    "a CPU's": lambda values: values.sum(0, dtype=torch.float32),
}
