"""Losses: cross-entropy and divergences of logits and of linear layers, and divergences of distributions.

The timed call is a training step: the loss and its gradients. Of linear layers products of matrices take most of the time.
"""

import functools

from cases import AS_FASTEST, EAGER, QUACK, ROOFLINE, Op, Target


def _layer(case, random):
    """Hidden states and weight of logits of a few units."""
    case.expect("[tokens, hidden_size, vocabulary]", len(case.shape) == 3)
    tokens, hidden_size, vocabulary = case.shape
    return random.normal((tokens, hidden_size)), random.normal((vocabulary, hidden_size)) / hidden_size**0.5


def _labelled_layer(case, op, random):
    """Hidden states, weight and the targets; the loss is fp32."""
    states, weight = (each.requires_grad_() for each in _layer(case, random))
    return (states, weight, random.below(case.shape[2], case.shape[:1])), weight.new_ones(()).float()


def _two_layers(case, op, random):
    """Hidden states and weights of a student and of a teacher, who gets no gradient."""
    student, teacher = (_layer(case, random) for _ in range(2))
    return (*(each.requires_grad_() for each in student), *teacher), student[0].new_ones(())


def _labelled_logits(case, op, random):
    """Logits [tokens, vocabulary] and the targets; the loss is fp32."""
    tokens, vocabulary = case.shape
    logits = random.normal(case.shape).requires_grad_()
    return (logits, random.below(vocabulary, (tokens,))), logits.new_ones(()).float()


def _two_logits(case, op, random):
    """Logits of a student and of a teacher, who gets no gradient, [tokens, vocabulary]."""
    student, teacher = random.normal(case.shape).requires_grad_(), random.normal(case.shape)
    return (student, teacher), student.new_ones(())


def _distributions(case, op, random):
    """Log-probabilities for `kl_div`, else probabilities, and probabilities without a gradient, [tokens, vocabulary]."""
    first = random.normal(case.shape).log_softmax(-1)
    first = first if case.op == "kl_div" else first.exp()
    return (first.requires_grad_(), random.normal(case.shape).softmax(-1)), first.new_ones(())


def _times(count):
    """The bytes of hidden states and weight, so many times."""
    return lambda shape, item_size: count * item_size * shape[1] * (shape[0] + shape[2])


_Step = functools.partial(Op, backward=True, step=True)
_LOGITS = {
    (4096, 128256): (Target(1.15, ROOFLINE), Target(1.0, QUACK, recorded_ms=0.863)),
    **dict.fromkeys(((8192, 32000), (16384, 151936)), AS_FASTEST),
}
_TWO_LOGITS = {(4096, 128256): (Target(0.2, EAGER),)}
_DISTRIBUTIONS = {(4096, 32000): AS_FASTEST}
_LAYERS = {(4096, 2048, 128256): (Target(1.0, EAGER),)}

OPS = {
    # Reads both in each pass and writes the student's gradient.
    "jsd": _Step(
        "Generalized Jensen-Shannon divergence forward and backward", _TWO_LOGITS, tensors=5, draw=_two_logits
    ),
    # Both models' hidden states and weights are read, the student's gradients written.
    "linear_jsd": _Step(
        "Two linear layers and their divergence forward and backward", _LAYERS, moved=_times(3), draw=_two_layers
    ),
    # Reads the logits once forward and once backward, writes their gradient. Targets and statistics are O(tokens).
    "cross_entropy": _Step("Cross-entropy forward and backward", _LOGITS, tensors=3, draw=_labelled_logits),
    # Read both forward, and the target backward; the gradient of the log-probabilities is written.
    "kl_div": _Step("KL divergence (batchmean) forward and backward", _DISTRIBUTIONS, tensors=4, draw=_distributions),
    # Reads both in each pass and writes one gradient.
    "tvd": _Step(
        "Total variation distance (batchmean) forward and backward", _DISTRIBUTIONS, tensors=5, draw=_distributions
    ),
    # Hidden states and weight are read, their gradients written.
    "linear_cross_entropy": _Step(
        "Linear layer and cross-entropy forward and backward", _LAYERS, moved=_times(2), draw=_labelled_layer
    ),
}


def eager():
    import torch
    from torch.nn import functional

    def jsd(student, teacher):
        """TRL's, for beta 0.5 and the temperature 1."""
        s, t = (functional.log_softmax(logits / 1.0, dim=-1) for logits in (student, teacher))
        beta = torch.tensor(0.5, dtype=s.dtype, device=s.device)
        mixture = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
        of_teacher, of_student = (
            functional.kl_div(mixture, each, reduction="none", log_target=True) for each in (t, s)
        )
        terms = beta * of_teacher + (1 - beta) * of_student
        return terms.sum() / terms.size(0)

    def linear_jsd(student, student_weight, teacher, teacher_weight):
        return jsd(functional.linear(student, student_weight), functional.linear(teacher, teacher_weight))

    def cross_entropy(logits, target):
        return functional.cross_entropy(logits.float(), target)

    return {
        "jsd": jsd,
        "linear_jsd": linear_jsd,
        "cross_entropy": cross_entropy,
        "kl_div": lambda input, target: functional.kl_div(input, target, reduction="batchmean"),
        "tvd": lambda p, q: ((p - q).abs() / 2.0).sum() / p.shape[0],
        "linear_cross_entropy": lambda states, weight, target: cross_entropy(functional.linear(states, weight), target),
    }


def ours(kernel):
    return {
        "jsd": kernel.generalized_jsd_loss,
        "linear_jsd": kernel.linear_jsd_loss,
        "cross_entropy": kernel.cross_entropy,
        "kl_div": functools.partial(kernel.kl_div, reduction="batchmean"),
        "tvd": kernel.tvd,
        "linear_cross_entropy": kernel.linear_cross_entropy,
    }


def liger():
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as CrossEntropy
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as LinearCrossEntropy
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as LinearJSD
    from liger_kernel.ops.jsd import LigerJSDFunction as JSD
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction as KLDiv
    from liger_kernel.ops.tvd import LigerTVDLossFunction as TVD

    def cross_entropy(logits, target):
        return CrossEntropy.apply(logits, target, None)[0]

    # The forward pass overwrites the logits with their gradient.
    cross_entropy.in_place = True
    return {
        "jsd": lambda student, teacher: JSD.apply(student.log_softmax(-1), teacher.log_softmax(-1)),
        "linear_jsd": LinearJSD.apply,
        "cross_entropy": cross_entropy,
        "kl_div": lambda input, target: KLDiv.apply(input, target, "batchmean"),
        "tvd": lambda p, q: TVD.apply(p, q, None, "batchmean"),
        "linear_cross_entropy": lambda states, weight, target: LinearCrossEntropy.apply(states, weight, target)[0],
    }


def quack():
    from quack.cross_entropy import cross_entropy

    return {"cross_entropy": lambda logits, target: cross_entropy(logits, target, reduction="mean")}


def cut():
    from cut_cross_entropy import linear_cross_entropy

    return {"linear_cross_entropy": linear_cross_entropy}
