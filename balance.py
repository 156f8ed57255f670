"""Global weights of the objectives: fixed ones, and the paper's baselines GradNorm and RLW.

Needs only torch. A step calls `forward`, losses [K] -> weights [K], for each of its
micro-batches, and `update` once at its end.
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
        means = torch.stack(self.collected).mean(0)                # over the whole batch
        self.collected = []
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
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
