"""The weights of whole terms of Eq. 8: w of the objectives, and lambda of the entropies.

Needs nothing but torch. w is fixed, or follows one of the paper's baselines, GradNorm and RLW.
`forward` gives the weights w [K] for the losses [K] of a micro-batch. What learns, does so in
`update`, which is called once at the end of each step and changes `weights` in place.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FixedWeights(nn.Module):
    """Weights [K] that never change: 1 for the token loss, w_cls and w_pixel (Eq. 8)."""

    def __init__(self, weights: Tensor):
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, step: int, losses: Tensor) -> Tensor:
        return self.weights

    def update(self):
        pass


class RandomLossWeighting(FixedWeights):
    """RLW: weights [K] are the softmax of random normals.

    They are a function of (seed, step), so all processes draw the same, and a resumed run goes on
    with them.
    """

    def __init__(self, weights: Tensor, seed: int):
        super().__init__(weights)
        self.seed = seed

    def forward(self, step: int, losses: Tensor) -> Tensor:
        # more than the number of steps, so that no two pairs (seed, step) share a number
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self.weights.copy_(torch.randn(len(losses), generator=generator).softmax(0),
                                  non_blocking=True)


class GradNorm(FixedWeights):
    """GradNorm: weights [K], learned so that all objectives train at like rates.

    G_k is the norm of objective k's weighted gradient at the layer `shared`. r_k is how much of
    its first value the loss still has, divided by the mean of that over objectives. Each weight
    takes a gradient step of size `lr` on |G_k - mean(G) r_k ** alpha| with a constant target;
    then the weights are scaled to sum to K.
    """

    def __init__(self, weights: Tensor, shared: nn.Module, alpha: float, lr: float,
                 scaler: torch.amp.GradScaler):
        super().__init__(torch.ones_like(weights))
        self.register_buffer("first", torch.zeros_like(weights))      # 0 until it is known
        self.shared = list(shared.parameters())
        self.alpha, self.lr, self.scaler = alpha, lr, scaler
        self.collected = []      # of each micro-batch, [K, 1 + P]: losses, gradients at `shared`

    def forward(self, step: int, losses: Tensor) -> Tensor:
        # Without the scale, small gradients would be zero in FP16. The tensor stays on the GPU.
        scale = self.scaler.scale(torch.ones_like(losses[0]))
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
        change = self.lr * torch.sign(weighted - target) * norms
        changed = (self.weights - change).clamp_min(1e-3)      # ours: no weight becomes negative
        changed = changed * len(changed) / changed.sum()
        self.weights.copy_(torch.where(changed.isfinite().all(), changed, self.weights))


class EntropyWeights(nn.Module):
    """lambda [E] of Eq. 7: fixed or, beyond the paper, aimed at a `variation` of weights.

    The last of `weights` counts for the remaining experts.

    A router settles where the equilibrium lambda, gain over spread of `losses.routing_gain`,
    equals lambda. As long as the weights are nearly uniform, the gain grows with their variation,
    and the spread with its square. So expert 0's variation times the equilibrium lambda is roughly
    constant, and dividing this product by the wanted variation gives the lambda to set, for all
    experts. Both factors are running means over about ten steps.
    """

    def __init__(self, weights: list[float], experts: int, variation: float | None = None):
        super().__init__()
        weights = weights + weights[-1:] * (experts - len(weights))
        self.register_buffer("weights", torch.tensor(weights))      # [E]
        self.register_buffer("means", torch.zeros(2))      # of variation and equilibrium lambda
        self.register_buffer("steps", torch.zeros(()))
        self.variation = variation
        self.collected = []      # of each micro-batch: variation, gain, spread

    def collect(self, metrics: dict[str, Tensor]):
        """Keeps what `update` needs of a micro-batch; removes gain and spread from `metrics`."""
        gain = metrics.pop("routing_gain")
        spread = metrics.pop("routing_spread")
        self.collected.append(torch.stack([metrics["dispatch_cv"][0], gain, spread]))

    def update(self) -> dict[str, Tensor]:
        """Sets lambda for the next step -> metrics of this one: lambda, equilibrium lambda.

        Gain and spread are averaged over micro-batches and processes before they are divided:
        the ratio does not depend on how many there are.
        """
        variation, gain, spread = batch_mean(self.collected)
        new = torch.stack([variation, gain / spread])
        metrics = {"lambda": self.weights.clone(), "equilibrium_lambda": new[1]}
        if self.variation:
            finite = new.isfinite().all()
            self.steps += finite
            # the plain mean of the first ten steps, and then a running mean
            means = self.means.lerp(new, (1 / self.steps).clamp_min(0.1))
            self.means.copy_(torch.where(finite, means, self.means))
            weight = self.means.prod() / self.variation
            # a new router's equilibrium lambda can be negative; any small positive number will do
            weight = weight.clamp_min(1e-4)
            self.weights.copy_(torch.where(finite, weight, self.weights))
        return metrics


def batch_mean(collected: list[Tensor]) -> Tensor:
    """The mean over micro-batches and processes. Empties the list."""
    mean = torch.stack(collected).mean(0)
    collected.clear()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
