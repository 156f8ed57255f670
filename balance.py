"""The weights w of the objectives (Eq. 8): fixed, or by one of the paper's baselines, GradNorm and
Random Loss Weighting (RLW).

Needs nothing but torch. All have three methods: `forward` gives the weights of a step, `observe`
sees the losses of each micro-batch of the step, and `update` ends the step: GradNorm learns there.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ObjectiveWeights(nn.Module):
    """w [K] of Eq. 8: the weights of the K objectives. They are fixed here, and subclasses change
    them.
    """

    def __init__(self, weights: Tensor):
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, step: int) -> Tensor:
        return self.weights

    def observe(self, losses: Tensor):
        """losses [K] of a micro-batch, before its backward pass."""

    def update(self):
        """Ends a step."""


class RandomLossWeighting(ObjectiveWeights):
    """RLW: the softmax of random normals.

    They are a function of (seed, step), so all processes draw the same, and a resumed run goes on
    with them. The argument `weights` says how many there are, and on which device.
    """

    def __init__(self, weights: Tensor, seed: int):
        super().__init__(weights)
        self.seed = seed

    def forward(self, step: int) -> Tensor:
        # runs of two seeds share no generator in their first million steps
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        weights = torch.randn(len(self.weights), generator=generator).softmax(0)
        return weights.to(self.weights.device, non_blocking=True)


class GradNorm(ObjectiveWeights):
    """GradNorm: weights that start at 1 and are learned, so that objectives train at like rates.

    G_k is the norm of objective k's weighted gradient at the layer `shared`. r_k is the loss
    divided by its first value, and by the mean of this quotient over objectives. Each weight
    takes a gradient step of size `lr` on |G_k - mean(G) r_k ** alpha| with a constant target;
    then the weights are scaled to sum to K. The argument `weights` says how many there are, and on
    which device.
    """

    def __init__(self, weights: Tensor, shared: nn.Module, alpha: float, lr: float,
                 scaler: torch.amp.GradScaler):
        super().__init__(torch.ones_like(weights))
        self.register_buffer("first", torch.zeros_like(weights))      # 0 until it is known
        self.shared = list(shared.parameters())
        self.alpha, self.lr, self.scaler = alpha, lr, scaler
        # for each micro-batch, [K, 1 + M]: each loss, and its gradient at `shared`, M numbers
        self.observed = []

    def observe(self, losses: Tensor):
        # Without the scale, small gradients would be zero in FP16. get_scale() would make the host
        # wait for the GPU; scaling a one gives the same number without that.
        scale = self.scaler.scale(torch.ones_like(losses[0]))
        rows = []
        for loss in scale * losses:
            gradients = torch.autograd.grad(loss, self.shared, retain_graph=True)
            rows.append(torch.cat([loss.detach()[None], *(g.flatten() for g in gradients)]))
        self.observed.append(torch.stack(rows) / scale)

    def update(self):
        means = torch.stack(self.observed).mean(0)      # over micro-batches, and over processes
        self.observed = []
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        losses, norms = means[:, 0], means[:, 1:].norm(dim=1)
        unknown = (self.first == 0) & losses.isfinite()
        self.first.copy_(torch.where(unknown, losses, self.first))
        rate = losses / self.first
        weighted = self.weights * norms
        target = weighted.mean() * (rate / rate.mean()) ** self.alpha
        change = self.lr * torch.sign(weighted - target) * norms
        changed = (self.weights - change).clamp_min(1e-3)      # ours: no weight becomes negative
        changed = changed * len(changed) / changed.sum()
        self.weights = torch.where(changed.isfinite().all(), changed, self.weights)
