"""The losses of ExPLoRe: what each patch costs, and how much it counts (Eq. 1 to 7).

Needs nothing but torch. `explore_losses` computes the terms of Eq. 8 in three steps: score,
couple, regularize. The caller multiplies them by their weights w and adds them up.

Shapes: B images, N patches, V of them visible, T tokens of the student with [CLS] first, E
experts, D features, K objectives. Where a function takes [B, N], the patches may also be the
V visible ones alone, as they are in sparse encoding.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
    """Eq. 2: one minus the cosine of two [CLS] tokens, [B, D] each -> scalar"""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2 as (channel, y, x)"""
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2).contiguous()


def pixel_loss(pred: Tensor, images: Tensor) -> Tensor:
    """Eq. 3 before the mean over patches: squared error, *mean* over pixels.

    pred [B, N, P], images [B, 3, H, W] -> [B, N]; P = 3 * patch_size ** 2 says the size of the
    patches. Target patches have zero mean and unit variance (unbiased, plus 1e-6). The paper
    prints the sum over pixels, but its weights 1, 0.1 and 0.01 are for the mean.
    """
    target = patchify(images, math.isqrt(pred.shape[-1] // 3))
    std = (target.var(-1, keepdim=True) + 1e-6).sqrt()
    target = (target - target.mean(-1, keepdim=True)) / std
    return (pred - target).square().mean(-1)


def routed_mean(patch_loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches.

    patch_loss [B, N], weight [B, N] >= 0 -> scalar, the mean over images. In each image, at
    least one weight must be above zero. Dispatch weights learn from it: a patch whose loss is
    above its image's weighted mean loses weight, and one whose loss is below gains. Dividing
    by the sum keeps the router from shrinking all weights to make the loss small.
    """
    return ((weight * patch_loss).sum(1) / weight.sum(1)).mean()


def patch_weights(dispatch: Tensor, expert: int, detach: bool = False, prefix: int = 1) -> Tensor:
    """The coupling: how much each patch counts in the loss that `expert` weights.

    dispatch [B, T, E] -> weights [B, T - prefix], without the first `prefix` tokens, such as
    [CLS] and registers, which have no patch loss. Detached weights still weight the loss, but
    the router gets no gradient from it: this is the paper's main ablation. Another ablation
    passes combine weights.
    """
    # 1e-30 avoids 0 / 0 when all weight is on [CLS]: the patches then count alike. It is far
    # below any weight that matters, and far above the smallest float32, 1e-38.
    weight = dispatch[:, prefix:, expert] + 1e-30
    return weight.detach() if detach else weight


@torch.no_grad()
def softmin_weights(patch_loss: Tensor, selected: Tensor, lambda_: Tensor | float) -> Tensor:
    """exp(-loss / lambda): the weights that a router approximates, without a router.

    patch_loss [B, N], selected [B, N], which is 1 for the patches that count and else 0, and
    lambda > 0 in the unit of the loss -> weights [B, N], 0 where not selected. Patches whose
    losses differ by lambda differ in weight by a factor of e.

    For one image, Eq. 5 and 7 are sum(p * loss) - lambda * H(p), where p are weights that sum
    to 1 over the patches. Of all p, these have the smallest value, which is, up to a constant,
    -lambda * log(mean(exp(-loss / lambda))): a tilted loss with negative tilt. Weighting by
    constants gives it the right gradient. With a gradient of their own, these weights would
    raise the losses that are above the weighted mean by more than lambda.
    """
    # relative to the smallest loss that counts, whose weight is 1: no image's weights underflow
    smallest = patch_loss.masked_fill(selected == 0, math.inf).amin(1, keepdim=True)
    return selected * ((smallest - patch_loss).clamp_max(0) / lambda_).exp()


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: the entropy in nats of each expert's weights over all tokens, [CLS] included.

    dispatch [B, T, E], which sums to 1 over T -> [E], the mean over images. The entropy is
    ln(T) for uniform weights, and 0 if one token has all. In an ablation of the paper, the same
    sum is taken over combine weights.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()     # 0 log 0 = 0
    return -(dispatch * log).sum(1).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' total combine weights.

    combine [B, T, E] -> scalar. The paper names dispatch weights, but their total is 1 for
    every expert and image, so there would be nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def dispatch_cv(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, mean over images: [B, N, E] -> [E]"""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def patch_std(patch_loss: Tensor, selected: Tensor) -> Tensor:
    """Standard deviation over each image's selected patches, mean over images: [B, N] -> scalar"""
    count = selected.sum(1, keepdim=True)
    mean = (selected * patch_loss).sum(1, keepdim=True) / count
    variance = (selected * (patch_loss - mean).square()).sum(1, keepdim=True) / count
    return variance.sqrt().mean()


class Score(NamedTuple):
    """What the patches cost by one objective, and whose weights they get."""
    patch_loss: Tensor      # [B, N]
    selected: Tensor        # [B, N]: 1 for the patches that count, else 0
    expert: int             # weights them with its dispatch weights, or with its lambda
    routed: bool            # whether a router sees these patches


def couple(score: Score, weight: Tensor, even: float | None = None
           ) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 5: the mean of a patch loss over the selected patches, weighted -> (loss, metrics)

    weight [B, N]. Combine weights are not divided by their sum: with them, the router can make
    the loss vanish, which the paper's ablation shows. For them, `even` is the value that all
    have if the router prefers no expert, 1 / E.
    """
    patch_loss, selected, _, _ = score
    if even is None:
        loss = routed_mean(patch_loss, weight * selected)
    else:
        loss = routed_mean(weight * patch_loss, selected)
    with torch.no_grad():
        unweighted = routed_mean(patch_loss, selected)
        metrics = {"unweighted": unweighted,
                   "ratio": loss / (unweighted if even is None else even * unweighted),
                   "std": patch_std(patch_loss, selected)}
    return loss, metrics


def regularize(router: dict[str, Tensor], lambdas: Tensor, entropy_on: str,
               importance_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 7 and the importance loss, which see the router alone -> (their sum, metrics)

    router: see `stack_routings`. lambdas [E].
    """
    entropy = dispatch_entropy(router["dispatch"].flatten(0, 1))
    on_combine = entropy_on == "combine"      # an ablation
    regularized = dispatch_entropy(router["combine"].flatten(0, 1)) if on_combine else entropy
    entropy_loss = -(lambdas * regularized).sum()
    metrics = {"entropy_loss": entropy_loss, "entropy": entropy}
    if not importance_weight:
        return entropy_loss, metrics
    importance = torch.stack([importance_loss(each) for each in router["combine"]]).mean()
    metrics["importance_loss"] = importance
    return entropy_loss + importance_weight * importance, metrics


def stack_routings(pred, loss_block: int | Sequence[int] | None) -> dict[str, Tensor]:
    """The weights of the blocks that weight the losses: "dispatch" and "combine", each
    [blocks, B, T, E]. Without a router, the dict is empty.
    """
    if loss_block is not None:
        blocks = [loss_block] if isinstance(loss_block, int) else loss_block
        routings = [pred.routing[block] for block in blocks]
    elif pred.loss_routing is not None:
        routings = [pred.loss_routing]
    elif pred.routing:
        routings = [pred.routing[max(pred.routing)]]      # the keys are numbers of blocks
    else:
        return {}
    return {"dispatch": torch.stack([routing.dispatch for routing in routings]),
            "combine": torch.stack([routing.combine for routing in routings])}


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *,
                   objectives: Sequence[str] = ("token", "cls"),
                   loss_block: int | Sequence[int] | None = None,
                   loss_weights: str = "dispatch", detach: bool = False,
                   lambdas: Tensor | float = 5.0, entropy_on: str = "dispatch",
                   importance_weight: float = 0.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The terms of Eq. 8 -> (losses [K], regularizer, metrics).

    The losses are in the order of `objectives` ("token", "cls", "pixel"). Metrics are detached.

    pred: the student's `Prediction`, or any object with its fields. targets [B, 1 + N, D]: the
    teacher's tokens of the whole image. images [B, 3, S, S] in [0, 1]. mask bool [B, N], True
    where masked. `loss_block`: the block whose router weights the losses and is regularized, or
    several, over which both are averaged (default: the loss router, if there is one, else the
    last MoE block). `loss_weights`: "dispatch", "combine", "uniform" (no weights) or "softmin",
    see `softmin_weights`. `lambdas`: lambda of each expert in Eq. 7, [E], or one for all. With
    softmin, the token loss has the lambda of expert 0, and the pixel loss that of expert 1, even
    without experts. Without a router, other losses are plain means over their patches. In dense
    encoding, the pixel loss needs two experts. Raises ValueError if targets do not have 1 + N
    tokens.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(
            f"targets have {targets.shape[1]} tokens, but [CLS] and {mask.shape[1]} "
            f"patches need {1 + mask.shape[1]}: leave out registers")

    # Score: what each patch costs, which patches count, and which expert weights them.
    dense = pred.ids_keep is None
    tokens = pred.tokens.float()
    targets = targets.float()
    masked = mask.float()
    patch_targets = targets[:, 1:]
    if dense:      # the token loss is on what the student does not see
        selected = masked
    else:          # on what it sees
        patch_targets = patch_targets.take_along_dim(pred.ids_keep[..., None], dim=1)
        selected = torch.ones_like(pred.ids_keep, dtype=masked.dtype)
    scores = {}
    losses = {}
    if "token" in objectives:
        loss = token_loss(tokens[:, 1:], patch_targets)
        scores["token"] = Score(loss, selected, expert=0, routed=True)
    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])
    if "pixel" in objectives:
        # in sparse encoding, no router sees the masked patches
        loss = pixel_loss(pred.pixels.float(), images)
        scores["pixel"] = Score(loss, masked, expert=1, routed=dense)

    # Couple (Eq. 5): the mean of each patch loss, weighted by its expert.
    router = stack_routings(pred, loss_block)
    experts = router["dispatch"].shape[-1] if router else 0
    lambdas = lambdas * targets.new_ones(max(2, experts))      # [E], also if there is one for all
    weights = None
    even = None
    if router and loss_weights not in ("uniform", "softmin"):
        weights = router[loss_weights].mean(0)                 # [B, T, E]
        even = 1 / experts if loss_weights == "combine" else None
    metrics = {}
    for name, score in scores.items():
        if loss_weights == "softmin":
            weight = softmin_weights(score.patch_loss, score.selected, lambdas[score.expert])
        elif weights is not None and score.routed:
            weight = patch_weights(weights, score.expert, detach)
        else:
            losses[name] = routed_mean(score.patch_loss, score.selected)
            continue
        losses[name], more = couple(score, weight, even)
        metrics |= {f"{name}_{key}": value for key, value in more.items()}

    # Regularize (Eq. 6 and 7): keep the weights of each expert even.
    regularizer = targets.new_zeros(())
    if router:
        regularizer, more = regularize(router, lambdas[:experts], entropy_on, importance_weight)
        metrics |= more
        with torch.no_grad():
            # of the mean over blocks, because that is what weights the losses
            metrics["dispatch_cv"] = dispatch_cv(router["dispatch"].mean(0)[:, 1:])
            metrics["cls_share"] = router["dispatch"][:, :, 0].mean((0, 1))

    metrics = {name: value.detach() for name, value in (metrics | losses).items()}
    return torch.stack([losses[name] for name in objectives]), regularizer, metrics
