"""The weights of whole terms of the loss: w of the objectives (Eq. 8), lambda of Eq. 7.

Needs nothing but torch. w is fixed, or follows one of the paper's baselines, GradNorm and RLW.
lambda is fixed, or follows the spread of the losses. All have three methods of the same names:
`forward` gives the values of a step (w from the step's number, lambda from the step's w), `observe`
sees what each micro-batch of the step gave, and `update` ends the step: what learns, learns there.
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
        means = batch_mean(self.observed)
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


class Lambda(nn.Module):
    """lambda [L] of Eq. 7: fixed or, beyond the paper, w * std(loss) / `variation`.

    L is the length of `follows`. Entry i is for expert i. Softmin uses the same entries, 0 for the
    token loss and 1 for the pixel loss, even if there are fewer experts.

    lambdas: at most L values; the last one is repeated for the remaining entries. With
    `variation`, they serve only until a step has a finite std. follows: for each entry, the
    objective whose std and w set it, if there is a `variation`. times_w: whether lambda has the
    factor w. A router balances w * loss (Eq. 8) against lambda * entropy (Eq. 7), so it is True for
    a router. Softmin computes exp(-loss / lambda) from the loss without w, so it is False there.

    Softmin's weights are proportional to exp(-loss / lambda). With `variation`, their coefficient
    of variation is therefore about `variation`, as long as that is well below 1. A router learns
    such weights for w * loss, but lags behind, and its weights vary less. In dense encoding, lambda
    acts like a smaller one: if the masked patches have a share m < 1 of an expert's weight, Eq. 5
    divides their weights by m, but Eq. 6 counts the entropy of the divided weights only m times. So
    lambda acts on these patches like m * lambda.
    """

    def __init__(self, lambdas: list[float], follows: list[str], objectives: list[str],
                 variation: float | None = None, times_w: bool = True):
        super().__init__()
        lambdas = lambdas + lambdas[-1:] * (len(follows) - len(lambdas))
        index = [objectives.index(name) for name in follows]
        self.register_buffer("lambdas", torch.tensor(lambdas), persistent=False)      # [L]
        self.register_buffer("index", torch.tensor(index), persistent=False)          # [L]
        self.register_buffer("std", torch.zeros(len(follows)))      # [L], a running mean
        self.register_buffer("steps", torch.zeros(()))              # how many are in that mean
        self.follows, self.variation, self.times_w = follows, variation, times_w
        self.observed = []      # of each micro-batch, [L]

    def forward(self, w: Tensor) -> Tensor:
        """w [K] of this step -> lambda [L]"""
        if not self.variation:
            return self.lambdas
        aimed = self.std / self.variation
        if self.times_w:
            aimed = aimed * w[self.index]
        # above 0, because softmin divides by it
        aimed = aimed.clamp_min(torch.finfo(aimed.dtype).tiny)
        return torch.where(self.steps > 0, aimed, self.lambdas)

    def observe(self, metrics: dict[str, Tensor]):
        """The metrics of a micro-batch, from `explore_losses`."""
        if self.variation:
            self.observed.append(torch.stack([metrics[f"{name}_std"] for name in self.follows]))

    def update(self):
        if not self.variation:
            return
        new = batch_mean(self.observed)
        finite = new.isfinite().all()
        self.steps += finite
        # The plain mean of the first ten finite steps, and then an exponential one with a rate of
        # 0.1. Until a step is finite, the rate is 1 / 0, and the mean is not used.
        mean = self.std.lerp(new, (1 / self.steps).clamp_min(0.1))
        self.std.copy_(torch.where(finite, mean, self.std))


def batch_mean(observed: list[Tensor]) -> Tensor:
    """The mean over micro-batches and processes. Empties the list."""
    mean = torch.stack(observed).mean(0)
    observed.clear()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
