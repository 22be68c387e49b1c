"""Which kernels a call launches, and which of them its proofs have launched."""


def record_kernels(module, monkeypatch) -> tuple[set, set]:
    """The kernels that calls bind from now on, and those that proofs bind: names, constants, warps, registers and dtypes.

    Each proof runs to its end and passes. Clear the calls that a family has resolved before a call that is looked at.
    """
    launch, proof = module("core.launch"), module("core.proof")
    bound, proved, launcher = set(), set(), launch._launcher

    def recorded(kernel, constants, *fixed):
        bound.add((kernel.fn.__name__, constants, *fixed))
        return launcher(kernel, constants, *fixed)

    def kernel_is_proved(key, subject, comparisons):
        before = {*bound}
        bound.clear()
        list(comparisons())
        proved.update(bound)
        bound.clear()
        bound.update(before)
        return True

    monkeypatch.setattr(launch, "_launcher", recorded)
    monkeypatch.setattr(proof, "kernel_is_proved", kernel_is_proved)
    return bound, proved
