"""Weights of whole terms of Eq. 8: of the objectives, w, and of the entropies, lambda.

Needs only torch. w is fixed, or one of the paper's baselines GradNorm and RLW: a step calls
`forward`, losses [K] -> weights [K], for each of its micro-batches. All that learn from a step
do so in `update`, once at its end.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FixedWeights(nn.Module):
    """Weights [K] that stay: 1 for the token loss, w_cls, w_pixel (Eq. 8)."""

    def __init__(self, weights: Tensor):
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, step: int, losses: Tensor) -> Tensor:
        return self.weights

    def update(self):
        pass


class RandomLossWeighting(FixedWeights):
    """RLW: weights [K], the softmax of normals drawn by (seed, step), in any process."""

    def __init__(self, weights: Tensor, seed: int):
        super().__init__(weights)
        self.seed = seed

    def forward(self, step: int, losses: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self.weights.copy_(torch.randn(len(losses), generator=generator).softmax(0),
                                  non_blocking=True)


class GradNorm(FixedWeights):
    """GradNorm: weights [K], learned so that all objectives train at like rates.

    G_k is the norm of objective k's weighted gradient at the `shared` layer, r_k its loss
    relative to its first, divided by the mean of that over objectives. Each weight descends on
    |G_k - mean(G) r_k ** alpha|, the target held fixed; then weights are scaled to sum to K.
    """

    def __init__(self, weights: Tensor, shared: nn.Module, alpha: float, lr: float,
                 scaler: torch.amp.GradScaler):
        super().__init__(torch.ones_like(weights))
        self.register_buffer("first", torch.zeros_like(weights))      # 0: not known yet
        self.shared = list(shared.parameters())
        self.alpha, self.lr, self.scaler = alpha, lr, scaler
        self.collected = []      # of each micro-batch: loss and gradient of each objective

    def forward(self, step: int, losses: Tensor) -> Tensor:
        scale = self.scaler.scale(torch.ones_like(losses[0]))      # FP16 loses small gradients
        rows = []
        for loss in scale * losses:
            gradients = torch.autograd.grad(loss, self.shared, retain_graph=True)
            rows.append(torch.cat([loss.detach()[None], *(g.flatten() for g in gradients)]))
        self.collected.append(torch.stack(rows) / scale)
        return self.weights

    def update(self):
        means = batch_mean(self.collected)
        losses, norms = means[:, 0], means[:, 1:].norm(dim=1)
        unknown = (self.first == 0) & losses.isfinite()
        self.first.copy_(torch.where(unknown, losses, self.first))
        rate = losses / self.first
        weighted = self.weights * norms
        target = weighted.mean() * (rate / rate.mean()) ** self.alpha
        step = self.lr * torch.sign(weighted - target) * norms
        stepped = (self.weights - step).clamp_min(1e-3)
        stepped = stepped * len(stepped) / stepped.sum()
        self.weights.copy_(torch.where(stepped.isfinite().all(), stepped, self.weights))


class EntropyWeights(nn.Module):
    """lambda [E] of Eq. 7: fixed or, beyond the paper, aimed at a `variation` of weights.

    A router settles where `losses.router_balance` is lambda. The balance falls as the weights
    of expert 0 vary more, their product stays: so lambda is measured variation times balance
    over the wanted variation, for all experts. Both are means of about ten steps.

    The last of `weights` counts for the remaining experts.
    """

    def __init__(self, weights: list[float], experts: int, variation: float | None = None):
        super().__init__()
        weights = weights + weights[-1:] * (experts - len(weights))
        self.register_buffer("weights", torch.tensor(weights))      # [E]
        self.register_buffer("means", torch.zeros(2))      # of variation and balance
        self.register_buffer("steps", torch.zeros(()))
        self.variation = variation
        self.collected = []      # of each micro-batch: variation, balance

    def collect(self, metrics: dict[str, Tensor]):
        if self.variation:
            pair = metrics["dispatch_cv"][0], metrics["balance"]
            self.collected.append(torch.stack(pair))

    def update(self):
        if self.variation:
            new = batch_mean(self.collected)
            finite = new.isfinite().all()
            self.steps += finite
            means = self.means.lerp(new, (1 / self.steps).clamp_min(0.1))
            self.means.copy_(torch.where(finite, means, self.means))
            weight = self.means.prod() / self.variation
            weight = weight.clamp_min(1e-4)      # a balance may start below 0
            self.weights.copy_(torch.where(finite, weight, self.weights))


def batch_mean(collected: list[Tensor]) -> Tensor:
    """Over micro-batches, which it forgets, and processes."""
    mean = torch.stack(collected).mean(0)
    collected.clear()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
