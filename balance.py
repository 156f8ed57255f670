"""The objective weights w of Eq. 8: fixed, or set by one of the paper's baselines, GradNorm and
Random Loss Weighting (RLW).

This file needs nothing but torch. Each class has three methods: `forward` returns the weights of a
step, `observe` receives the losses of each micro-batch in the step, and `update` ends the step.
GradNorm learns in `update`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ObjectiveWeights(nn.Module):
    """Fixed weights [K] of the K objectives, w in Eq. 8. Subclasses change the weights."""

    def __init__(self, weights: Tensor):
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, step: int) -> Tensor:
        return self.weights

    def observe(self, losses: Tensor):
        """Receives the losses [K] of a micro-batch, before its backward pass."""

    def update(self):
        """Ends a step."""


class RandomLossWeighting(ObjectiveWeights):
    """Random Loss Weighting (RLW): the weights are the softmax of random normals, new in each step.

    `generator(step)` returns NumPy's random generator of a step, the same one in all processes and
    in a resumed run. The argument `weights` only sets the number and device of the weights.
    """

    def __init__(self, weights: Tensor, generator):
        super().__init__(weights)
        self.generator = generator

    def forward(self, step: int) -> Tensor:
        normals = torch.from_numpy(self.generator(step).standard_normal(len(self.weights)))
        return normals.float().softmax(0).to(self.weights.device, non_blocking=True)


class GradNorm(ObjectiveWeights):
    """GradNorm: weights that start at 1 and learn to make all objectives train at similar rates.

    G_k is the norm of objective k's weighted gradient at the layer `shared`. r_k = q_k /
    mean(q) is the relative training rate, where q_k is loss k divided by its first value. Each
    weight takes a gradient step of size `lr` on |G_k - target_k|, where target_k = mean(G) * r_k **
    alpha is held constant; then the weights are scaled to sum to K. The argument `weights` only
    sets their number and device.
    """

    def __init__(self, weights: Tensor, shared: nn.Module, alpha: float, lr: float,
                 scaler: torch.amp.GradScaler):
        super().__init__(torch.ones_like(weights))
        # each objective's first loss; 0 until it is known
        self.register_buffer("initial", torch.zeros_like(weights))
        self.shared = list(shared.parameters())
        self.alpha, self.lr, self.scaler = alpha, lr, scaler
        # for each micro-batch, the losses [K] and the M numbers of their gradients [K, M]
        self.losses, self.gradients = [], []

    def observe(self, losses: Tensor):
        # Without the loss scale, small gradients would underflow in FP16. Scaling a one returns the
        # scale; get_scale() would make the host wait for the GPU.
        scale = self.scaler.scale(torch.ones_like(losses[0]))
        gradients = [torch.autograd.grad(scale * loss, self.shared, retain_graph=True)
                     for loss in losses]
        self.losses.append(losses.detach())
        self.gradients.append(
            torch.stack([torch.cat([g.flatten() for g in each]) for each in gradients]) / scale)

    def update(self):
        losses, gradients = mean(self.losses), mean(self.gradients)
        self.losses, self.gradients = [], []
        norms = gradients.norm(dim=1)
        unknown = (self.initial == 0) & losses.isfinite()
        self.initial.copy_(torch.where(unknown, losses, self.initial))
        rate = losses / self.initial
        weighted = self.weights * norms
        target = weighted.mean() * (rate / rate.mean()) ** self.alpha
        change = self.lr * torch.sign(weighted - target) * norms
        changed = (self.weights - change).clamp_min(1e-3)      # our addition: weights stay positive
        changed = changed * len(changed) / changed.sum()
        finite = torch.cat([losses, gradients.flatten(), changed]).isfinite().all()
        self.weights = torch.where(finite, changed, self.weights)


def mean(values: list[Tensor]) -> Tensor:
    """The mean over micro-batches and processes"""
    total = torch.stack(values).mean(0)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total
