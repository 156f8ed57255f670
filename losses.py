"""The objectives of ExPLoRe and the routed mean that couples them to the router. Needs nothing but torch.

Shapes: B images, N patches (those that a loss lives on), T tokens with [CLS] first, E experts, D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1) against the teacher's layer-normalized features.

    pred [B, N, D], target [B, N, D] -> [B, N], the mean over features.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine between student's and teacher's [CLS]. pred [B, D], target [B, D] -> scalar."""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def routed_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches, then the mean over images.

    loss [B, N], weight [B, N] >= 0 -> scalar. Where `weight` is an expert's dispatch weights, its gradient is what
    teaches the router: a patch whose loss is above its image's weighted mean loses weight, one below it gains.
    Dividing by the sum is what keeps the router from shrinking all weights to make the loss small.
    """
    return ((weight * loss).sum(1) / weight.sum(1)).mean()


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: entropy in nats of each expert's distribution over tokens, averaged over images.

    dispatch [B, T, E], sums to 1 over T -> [E]; ln(T) is uniform, 0 is all weight on one token.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()   # 0 log 0 = 0, with a finite gradient
    return -(dispatch * log).sum(1).mean(0)


def variation(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, averaged over images: 0 is uniform. dispatch [B, N, E] -> [E]."""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)
