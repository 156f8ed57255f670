"""The objectives of ExPLoRe and the routed mean that couples them to the router. Needs nothing but torch.

Shapes: B images, N patches (those that a loss lives on), T tokens with [CLS] first, E experts, D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1) against the teacher's layer-normalized features.

    pred [B, N, D], target [B, N, D] -> [B, N], the mean over features.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine between student's and teacher's [CLS]. pred [B, D], target [B, D] -> scalar."""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2: the patches row by row, each as (channel, y, x)."""
    b, c, h, w = images.shape
    x = images.view(b, c, h // patch_size, patch_size, w // patch_size, patch_size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * patch_size ** 2)


def pixel_loss(pred: Tensor, images: Tensor, patch_size: int) -> Tensor:
    """Eq. 3 before the mean over patches: squared error against patches of zero mean and unit variance.

    pred [B, N, P], images [B, 3, H, W] -> [B, N], the *mean* over a patch's pixels: the paper prints the sum, but its
    weights 1, 0.1 and 0.01 are for the mean. The variance is the unbiased one, plus 1e-6.
    """
    target = patchify(images, patch_size)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    return (pred - target).square().mean(-1)


def routed_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches, then the mean over images.

    loss [B, N], weight [B, N] >= 0 -> scalar. Where `weight` is an expert's dispatch weights, its gradient is what
    teaches the router: a patch whose loss is above its image's weighted mean loses weight, one below it gains.
    Dividing by the sum is what keeps the router from shrinking all weights to make the loss small.
    """
    return ((weight * loss).sum(1) / weight.sum(1)).mean()


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: entropy in nats of each expert's distribution over tokens, averaged over images.

    dispatch [B, T, E], sums to 1 over T -> [E]; ln(T) is uniform, 0 is all weight on one token. The paper's ablation
    takes the same sum over combine weights.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()   # 0 log 0 = 0, with a finite gradient
    return -(dispatch * log).sum(1).mean(0)


def variation(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, averaged over images: 0 is uniform. dispatch [B, N, E] -> [E]."""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation, over experts, of their total combine weight in the batch. [B, T, E] -> scalar.

    The paper names dispatch weights; their total is 1 for every expert and image, which leaves nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


# ------------------------------------------------------------------------------------- global balancing, the baselines

def random_loss_weights(objectives: int, seed: int, step: int) -> Tensor:
    """RLW: the softmax of fresh normals, a function of (seed, step): the same in every process and when resumed. -> [K]"""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randn(objectives, generator=generator).softmax(0)


class GradNorm:
    """GradNorm: weights [K] for K objectives, learned so that all of them train at like rates.

    With G_k the norm of objective k's weighted gradient at the last shared layer (`gradients_at`), and r_k its loss relative to its first,
    divided by the mean of that over objectives, each weight descends on | G_k - mean(G) * r_k ** alpha |, the target
    held fixed; then the weights are renormalized to sum to K. `state` holds tensors alone: it goes into the checkpoint.
    """

    def __init__(self, objectives: int, alpha: float, lr: float, device: torch.device | str = "cpu"):
        self.alpha, self.lr = alpha, lr
        self.state = {"weights": torch.ones(objectives, device=device), "first": torch.zeros(objectives, device=device)}

    @property
    def weights(self) -> Tensor:
        return self.state["weights"]

    def update(self, losses: Tensor, norms: Tensor):
        """losses [K], and norms [K] of the *unweighted* losses' gradients, both of the whole batch."""
        weights, first = self.state["weights"], self.state["first"]
        first.copy_(torch.where(first == 0, losses, first))
        rate = losses / first
        weighted = weights * norms
        target = weighted.mean() * (rate / rate.mean()) ** self.alpha
        stepped = (weights - self.lr * torch.sign(weighted - target) * norms).clamp_min(1e-3)
        stepped = stepped * len(stepped) / stepped.sum()
        weights.copy_(torch.where(stepped.isfinite().all(), stepped, weights))       # as for the update itself


def gradients_at(layer: nn.Module, losses: Tensor, scale: Tensor) -> Tensor:
    """The gradient of each of the losses [K] with respect to all of a layer's parameters -> [K, numbers in them].

    Taken at `scale` times the losses, so that FP16 does not lose the small ones. The graph stays for the backward pass.
    """
    grads = [torch.autograd.grad(loss * scale, list(layer.parameters()), retain_graph=True) for loss in losses.unbind()]
    return torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads]) / scale
