"""Two linear layers and the Jensen-Shannon divergence of their outputs, whose gradients take the memory of the logits."""

from typing import Optional, Union

import torch
from torch.nn import functional

from ..core.domain import check_floating
from .linear_cross_entropy import is_visible
from .slices import check_reduction, divergence_loss


def linear_jsd_loss(
    student_hidden_states: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden_states: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    student_bias: Optional[torch.Tensor] = None,
    teacher_bias: Optional[torch.Tensor] = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Optional[Union[int, float, torch.Tensor]] = None,
) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence of two linear layers' outputs: bit for bit what these operations return.

    ```python
    student_logits = F.linear(student_hidden_states, student_weight, student_bias)
    teacher_logits = F.linear(teacher_hidden_states, teacher_weight, teacher_bias)
    GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, labels, beta, temperature, ...)
    ```

    The logits exist once, in the dtype that `F.linear` returns, and are not returned. The backward pass writes their gradients
    over them. A teacher without gradients, under `torch.no_grad()` or detached, has none.

    The products of matrices are eager's own, over all tokens at once: chunks of tokens would change the order of additions
    in the weights' gradients, and cuBLAS may choose another kernel for fewer rows.

    Args:
        student_hidden_states: [..., student's hidden size], any real floating dtype.
        student_weight: [vocabulary, student's hidden size], in the dtype of the hidden states, or any under autocast.
        teacher_hidden_states: [..., teacher's hidden size].
        teacher_weight: [vocabulary, teacher's hidden size].
        labels, beta, temperature, reduction, num_items_in_batch: as in `generalized_jsd_loss`.
        student_bias, teacher_bias: [vocabulary], or None.

    Returns:
        What `generalized_jsd_loss` returns.

    Raises:
        TypeError: hidden states or a weight is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of "batchmean", "sum", "mean" and "none".
        RuntimeError: the shapes do not fit.

    The products are eager's, and what follows runs as in `generalized_jsd_loss`. The gradients take new
    memory in these cases: the backward pass keeps the graph (`retain_graph`), saved tensors go through hooks
    (checkpointing, offloading), or `F.linear` was replaced.
    """
    for name, tensor in (
        ("student_hidden_states", student_hidden_states),
        ("student_weight", student_weight),
        ("teacher_hidden_states", teacher_hidden_states),
        ("teacher_weight", teacher_weight),
    ):
        check_floating(name, tensor)
    check_reduction(reduction)
    student_logits = functional.linear(student_hidden_states, student_weight, student_bias)
    teacher_logits = functional.linear(teacher_hidden_states, teacher_weight, teacher_bias)
    owned = not is_visible(student_logits, teacher_logits)
    return divergence_loss(
        student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch, owned
    )
