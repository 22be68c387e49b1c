"""Each kernel that a call launches is one that its proof has launched, on an H200 that is not here: `proved.py` records both."""

import json

import pytest
from drawn_calls import CALLS
from op_families import FAMILIES


@pytest.fixture
def unproved(run_python, build, seed):
    """`proved.unproved` of each case `(families, calls, error)`, in one fresh Python."""

    def found(*cases):
        arguments = map(json.dumps, (cases, seed))
        done = run_python("from proved import main; main()", arguments=arguments, LOSSLESS_PROOF="on")
        return json.loads(done.stdout)

    return found


def test_proofs_have_every_kernel_of_their_calls(unproved):
    ((found, _),) = unproved(([*CALLS], 8, None))
    assert not found, "\n".join(found)


@pytest.mark.long
def test_proofs_have_every_kernel_of_many_calls(unproved):
    ((found, never_launched),) = unproved(([*CALLS], 150, None))
    assert not found, "\n".join(found)
    # Of long rows, and of as many as fill an H200.
    assert never_launched == ["rms_norm_backward_streamed"]


def test_what_is_planted_is_found(unproved):
    planted = {
        "outputs that begin anywhere": "cohere_layer_norm",
        "few rows for many": "layer_norm",
        "no shapes": "group_norm",
    }
    found = unproved(*(([family], 12, error) for error, family in planted.items()))
    assert all(of_error for of_error, _ in found), found


def test_every_family_has_calls():
    assert {*CALLS} == {family.sources[0] for family in FAMILIES}
