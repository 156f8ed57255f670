"""The losses of ExPLoRe: each objective, how a router weights it, and their total (Eq. 8).

Needs nothing but torch. Shapes: B images, N patches, V of them visible, T
tokens of the student with [CLS] first, E experts, D features, K objectives.
Where a function takes [B, N], the patches may also be the V visible ones alone,
as they are in sparse encoding.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1), mean over features.

    pred [B, N, D], target [B, N, D] -> [B, N]; targets are layer-normalized here.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine of two [CLS], [B, D] each -> scalar"""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2 as (channel, y, x)"""
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2).contiguous()


def pixel_loss(pred: Tensor, images: Tensor, patch_size: int) -> Tensor:
    """Eq. 3 before the mean over patches: squared error, *mean* over pixels.

    pred [B, N, P], images [B, 3, H, W] -> [B, N]. Target patches have zero mean
    and unit variance (unbiased, plus 1e-6). The paper prints the sum over pixels,
    but its weights 1, 0.1 and 0.01 are for the mean.
    """
    target = patchify(images, patch_size)
    std = (target.var(-1, keepdim=True) + 1e-6).sqrt()
    target = (target - target.mean(-1, keepdim=True)) / std
    return (pred - target).square().mean(-1)


def routed_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches.

    loss [B, N], weight [B, N] >= 0 -> scalar, the mean over images. Dispatch
    weights learn from it: a patch whose loss is above its image's weighted mean
    loses weight, and one whose loss is below gains. Dividing by the sum keeps the
    router from shrinking all weights to make the loss small. An image whose weights
    are all zero contributes zero.
    """
    total = weight.sum(1).clamp_min(torch.finfo(weight.dtype).tiny)
    return ((weight * loss).sum(1) / total).mean()


def patch_weights(routing, expert: int, source: str = "dispatch",
                  detach: bool = False, prefix: int = 1) -> Tensor:
    """The coupling: how much a student's patch counts in the loss of `expert`.

    `routing` is a block's Routing: `dispatch` and `combine` [B, T, E]. `source` names
    one of them, or is "uniform" for ones. Returns weights [B, T - prefix], without
    the first `prefix` tokens, such as [CLS] and registers, which have no patch loss.
    Detached weights still weight the loss, but the router gets no gradient from it:
    this is the paper's main ablation.
    """
    if source == "uniform":
        return torch.ones_like(routing.dispatch[:, prefix:, 0])
    weight = getattr(routing, source)[:, prefix:, expert]
    # If all weight is on [CLS], the patches count alike. Without this, routed_mean
    # would be 0, and the router could escape the loss. It is far below any weight
    # that matters, and far above the smallest float32, 1e-38.
    weight = weight + 1e-30
    return weight.detach() if detach else weight


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: entropy in nats of each expert's distribution over tokens.

    dispatch [B, T, E], which sums to 1 over T -> [E], the mean over images. The
    entropy is ln(T) for uniform weights, and 0 if one token has all. The paper's
    ablation takes the same sum over combine weights.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()     # 0 log 0 = 0
    return -(dispatch * log).sum(1).mean(0)


def variation(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, mean over images: [B, N, E] -> [E]"""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def routing_gain(dispatch: Tensor, loss: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """How much the weights lower the loss (gain), and how uneven they are (spread).

    dispatch [B, N, E] of the student's patches, loss [B, N] of each patch for
    expert 0, selected [B, N]: 1 for patches that the loss is on, else 0 -> gain, the
    plain mean of the loss minus its weighted mean, and spread, the squared
    coefficient of variation of the weights, summed over experts. Both are means over
    images.

    gain / spread is the equilibrium lambda: the one for which the present weights
    are the best. Let v be an image's weights divided by their mean, and let k scale
    how far they are from 1. The entropy of nearly uniform weights is a constant
    minus var(v) / 2, so Eq. 8 as a function of k is a constant plus
    k cov(v of expert 0, loss) + lambda k^2 / 2 (sum over experts of var(v)).
    It is smallest at k = 1 if lambda is -cov / (sum of var), and the gain is -cov.
    This neglects [CLS], and assumes one lambda for all experts and no other routed
    loss. Average gain and spread over micro-batches before you divide.
    """
    gain = routed_mean(loss, selected) - routed_mean(loss, dispatch[..., 0] * selected)
    spread = (dispatch.var(1, unbiased=False) / dispatch.mean(1).square()).sum(-1)
    return gain, spread.mean()


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' total combine weights.

    combine [B, T, E] -> scalar. The paper names dispatch weights, but their total is
    1 for every expert and image, so there would be nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def regularize(dispatch: Tensor, combine: Tensor, entropy_weights: Tensor | float,
               entropy_on: str, importance_weight: float
               ) -> tuple[Tensor, dict[str, Tensor]]:
    """The terms of Eq. 8 that see the router alone -> (their sum, metrics).

    dispatch and combine [blocks, B, T, E]; the other arguments: see `explore_losses`.
    """
    weights = dispatch if entropy_on == "dispatch" else combine
    entropy = dispatch_entropy(weights.flatten(0, 1))
    entropy_loss = -(entropy_weights * entropy).sum()              # Eq. 7
    metrics = {"entropy_loss": entropy_loss,
               "entropy": dispatch_entropy(dispatch.flatten(0, 1)),
               # of the mean over blocks, because that is what weights the losses
               "dispatch_cv": variation(dispatch.mean(0)[:, 1:]),
               "cls_share": dispatch[:, :, 0].mean((0, 1))}
    if not importance_weight:
        return entropy_loss, metrics
    importance = torch.stack([importance_loss(each) for each in combine]).mean()
    metrics["importance_loss"] = importance
    return entropy_loss + importance_weight * importance, metrics


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *,
                   objectives: Sequence[str] = ("token", "cls"),
                   loss_block: int | list[int] | None = None,
                   loss_weights: str = "dispatch", detach: bool = False,
                   entropy_weights: Tensor | float = 5.0,
                   entropy_on: str = "dispatch", importance_weight: float = 0.0
                   ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The terms of Eq. 8 -> (losses [K], regularizer, metrics).

    The losses are in the order of `objectives` ("token", "cls", "pixel"), and the
    caller multiplies them by their weights w of Eq. 8. Metrics are detached.

    pred: the student's `Prediction`, or any object with its fields. targets
    [B, 1 + N, D]: the teacher's tokens of the whole image. images [B, 3, S, S] in
    [0, 1]. mask bool [B, N], True where masked. `loss_block`: the block whose router
    weights the losses and is regularized, or several, over which both are averaged
    (default: the loss router, if there is one, else the last MoE block).
    `entropy_weights`: lambda of Eq. 7, a scalar or [E]. Without experts, a loss is
    the plain mean over its patches. In dense encoding, the pixel loss needs two
    experts. Raises ValueError if targets do not have 1 + N tokens.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(
            f"targets have {targets.shape[1]} tokens, but [CLS] and {mask.shape[1]} "
            f"patches need {1 + mask.shape[1]}: leave out registers")
    routings = []
    if pred.routing:
        if loss_block is None:
            loss_block = max(pred.routing)      # the keys are numbers of blocks
        blocks = [loss_block] if isinstance(loss_block, int) else loss_block
        routings = [pred.routing[block] for block in blocks]
        # [blocks, B, T, E]
        dispatch = torch.stack([routing.dispatch for routing in routings])
        combine = torch.stack([routing.combine for routing in routings])
    losses = {}
    metrics = {}

    def couple(name: str, loss: Tensor, selected: Tensor, expert: int | None):
        """Puts the mean of `loss` [B, N] over patches into losses and metrics.

        It is weighted by the weights of `expert`, if that is not None. `selected`
        [B, N] is 1 for the patches that count, else 0.
        """
        plain = routed_mean(loss, selected)      # all weights are equal
        if not routings or expert is None:
            losses[name] = plain
            return
        weight = torch.stack([patch_weights(routing, expert, loss_weights, detach)
                              for routing in routings]).mean(0)
        if loss_weights == "combine":
            # The paper's ablation does not divide by the sum of the weights, so the
            # router can make the loss vanish. Over E experts, they are 1 / E on average.
            losses[name] = routed_mean(weight * loss, selected)
            neutral = plain / combine.shape[-1]
        else:
            losses[name] = routed_mean(loss, weight * selected)
            neutral = plain
        metrics[f"{name}_unweighted"] = plain
        metrics[f"{name}_ratio"] = losses[name] / neutral

    dense = pred.ids_keep is None
    tokens = pred.tokens.float()
    targets = targets.float()
    patch_targets = targets[:, 1:]
    masked = mask.float()      # [B, N]
    if dense:      # the token loss is on what the student does not see
        selected = masked
    else:          # on what it sees
        index = pred.ids_keep[..., None].expand(-1, -1, targets.shape[-1])
        patch_targets = patch_targets.gather(1, index)      # [B, V, D]
        selected = torch.ones_like(pred.ids_keep, dtype=masked.dtype)

    if "token" in objectives:
        loss = token_loss(tokens[:, 1:], patch_targets)
        couple("token", loss, selected, expert=0)
        if routings:
            metrics["routing_gain"], metrics["routing_spread"] = routing_gain(
                dispatch.mean(0)[:, 1:], loss, selected)

    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])

    if "pixel" in objectives:
        patch_size = math.isqrt(pred.pixels.shape[-1] // 3)
        loss = pixel_loss(pred.pixels.float(), images, patch_size)
        # in sparse encoding, the router does not see the masked patches
        couple("pixel", loss, masked, expert=1 if dense else None)

    metrics |= losses
    regularizer = targets.new_zeros(())
    if routings:
        regularizer, more = regularize(dispatch, combine, entropy_weights, entropy_on,
                                       importance_weight)
        metrics |= more
    metrics = {name: value.detach() for name, value in metrics.items()}
    return (torch.stack([losses[name] for name in objectives]), regularizer,
            metrics)
