"""The losses of ExPLoRe: what each patch costs, and how much it counts.

Needs nothing but torch. `explore_losses` computes the losses of Eq. 8, and what regularizes
routers, in three steps: score (Eq. 1 to 3), couple (Eq. 5), regularize (Eq. 6 and 7). The caller
multiplies the losses by their weights w, and adds them and the regularizer. The printed Eq. 8
divides a weighted loss by the number of patches; here, it is divided by the sum of the weights, as
in Eq. 5.

Shapes: B images, N patches, V of them visible, T tokens of the student with [CLS] first, E
experts, D features, K objectives. Patch losses and weights are [B, N], or [B, V] where they
are of the visible patches alone, as those of the token loss are in sparse encoding.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1), mean over features.

    Eq. 1 is printed for masked patches. In sparse encoding, the loss is on visible ones (Eq. 5).

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
    prints the sum over pixels; its values of w_pixel, 1, 0.1 and 0.01, fit the mean.
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


def patch_weights(weights: Tensor, expert: int, detach: bool = False, prefix: int = 1) -> Tensor:
    """The coupling: how much each patch counts in the loss that belongs to `expert`.

    weights [B, T, E], a router's dispatch weights or, in an ablation of the paper, its
    combine weights -> weights [B, T - prefix], without the first `prefix` tokens, such as [CLS] and
    registers, which have no patch loss. Detached weights still weight the loss, but send the
    router no gradient: this is the paper's main ablation. The router of a SoftMoE then learns from
    the experts' outputs and from the regularizer. The loss router of `model.Explore`, which has no
    MLPs, then learns from the regularizer alone.
    """
    # 1e-30 avoids 0 / 0 when [CLS], for example, has all the weight: the selected patches then
    # count alike. It is far below any weight that matters, and far above the smallest normal
    # float32, 1e-38.
    weight = weights[:, prefix:, expert] + 1e-30
    return weight.detach() if detach else weight


@torch.no_grad()
def softmin_weights(patch_loss: Tensor, selected: Tensor, lambda_: Tensor | float) -> Tensor:
    """exp(-loss / lambda): the weights that a router approximates, without a router.

    patch_loss [B, N], selected [B, N], which is 1 for the patches that count and else 0, and
    lambda > 0 in the unit of the loss -> weights [B, N], 0 where not selected. Patches whose
    losses differ by lambda differ in weight by a factor of e.

    In each image, the weights divided by their sum are the p with sum(p) = 1 that minimizes
    sum(p * loss) - lambda * H(p), where H is the entropy. This expression is Eq. 5 plus Eq. 7 for
    an ideal router, which can give the selected patches any weights, while all other tokens have
    the weight 0. The minimum is -lambda * log(mean(exp(-loss / lambda))) up to a constant: a tilted
    loss with negative tilt.

    The weights have no gradient. With one, the gradient of Eq. 5 with respect to a patch's loss
    would be p * (1 - (loss - mean) / lambda), where mean is the weighted one. Training would raise
    each loss that exceeds this mean by more than lambda.
    """
    # Losses are relative to the smallest selected one, whose weight is 1, so the weights cannot all
    # underflow. The loss of an unselected patch may be smaller still. Without the clamp, its
    # exponential could overflow, and 0 * inf is NaN.
    smallest = patch_loss.masked_fill(selected == 0, math.inf).amin(1, keepdim=True)
    return selected * ((smallest - patch_loss).clamp_max(0) / lambda_).exp()


def dispatch_entropy(weights: Tensor) -> Tensor:
    """Eq. 6: the entropy in nats of each expert's weights over all tokens, [CLS] included.

    weights [B, T, E] -> [E], the mean over images. Dispatch weights sum to 1 over tokens: their
    entropy is ln(T) if they are uniform, and 0 if one token has all. In an ablation of the paper,
    the same sum is taken over combine weights.
    """
    log = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()     # 0 log 0 = 0
    return -(weights * log).sum(1).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' total combine weights.

    combine [B, T, E] -> scalar, over all images of the micro-batch. The paper names
    dispatch weights, but their total is 1 for every expert and image, so there would be
    nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def dispatch_cv(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, mean over images: [B, N, E] -> [E]"""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


@torch.no_grad()
def patch_std(patch_loss: Tensor, selected: Tensor) -> Tensor:
    """Standard deviation over each image's selected patches, mean over images: [B, N] -> scalar

    It has no gradient, which would be NaN where an image has a single selected patch.
    """
    count = selected.sum(1, keepdim=True)
    mean = (selected * patch_loss).sum(1, keepdim=True) / count
    variance = (selected * (patch_loss - mean).square()).sum(1, keepdim=True) / count
    return variance.sqrt().mean()


class Score(NamedTuple):
    """The patch losses of one objective, and what weights them."""
    patch_loss: Tensor      # [B, N]
    selected: Tensor        # [B, N]: 1 for the patches that count, else 0
    expert: int             # the expert whose weights or, with softmin, whose lambda it uses
    routable: bool          # whether its patches are among the encoder's tokens


def couple(score: Score, weight: Tensor, normalize: bool = True, neutral: float = 1.0
           ) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 5: the mean of a patch loss over the selected patches, weighted -> (loss, metrics)

    weight [B, N]. Metrics: the unweighted loss, the ratio of the weighted to the unweighted loss,
    and the standard deviation of the patch losses. In the paper's ablation with combine weights,
    `normalize` is False: the loss is the plain mean of weight times loss, which a router can make
    vanish. There, `neutral` is 1 / E, the weight of each patch if the router prefers no expert. The
    ratio is divided by it, so that without a preference it is 1 here, too.
    """
    if normalize:
        loss = routed_mean(score.patch_loss, weight * score.selected)
    else:
        loss = routed_mean(weight * score.patch_loss, score.selected)
    with torch.no_grad():
        unweighted = routed_mean(score.patch_loss, score.selected)
        metrics = {"unweighted": unweighted, "ratio": loss / (unweighted * neutral),
                   "std": patch_std(score.patch_loss, score.selected)}
    return loss, metrics


def regularize(routing: dict[str, Tensor], lambdas: Tensor, entropy_on: str,
               importance_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 7 and the importance loss, which use the routing weights alone -> (their sum, metrics)

    routing: see `stack_routings`. lambdas [E].
    """
    # flatten(0, 1): [blocks, B, T, E] -> [blocks * B, T, E], so the mean is over blocks, too
    entropy = dispatch_entropy(routing["dispatch"].flatten(0, 1))
    regularized = entropy
    if entropy_on == "combine":      # an ablation
        regularized = dispatch_entropy(routing["combine"].flatten(0, 1))
    entropy_loss = -(lambdas * regularized).sum()
    metrics = {"entropy_loss": entropy_loss, "entropy": entropy}
    if not importance_weight:
        return entropy_loss, metrics
    importance = torch.stack([importance_loss(each) for each in routing["combine"]]).mean()
    metrics["importance_loss"] = importance
    return entropy_loss + importance_weight * importance, metrics


def stack_routings(pred, loss_block: int | Sequence[int] | None) -> dict[str, Tensor]:
    """Stacks the routings of Eq. 5 to 7: those of `loss_block`, if given, else that of the loss
    router, if there is one, else that of the last MoE block.

    -> {"dispatch": [blocks, B, T, E], "combine": [blocks, B, T, E]}, empty without a router
    """
    if loss_block is not None:
        blocks = [loss_block] if isinstance(loss_block, int) else loss_block
        routings = [pred.routing[block] for block in blocks]
    elif pred.loss_routing is not None:
        routings = [pred.loss_routing]
    elif pred.routing:
        routings = [pred.routing[max(pred.routing)]]      # the keys are indices of blocks
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
    """The losses of Eq. 8, and what regularizes routers -> (losses [K], regularizer, metrics).

    The losses are in the order of `objectives` ("token", "cls", "pixel"). The regularizer is Eq. 7,
    plus `importance_weight` times the importance loss. Metrics are detached: each loss by its name;
    of each weighted loss, also NAME_unweighted, NAME_ratio and NAME_std, such as token_std; with a
    router, entropy and dispatch_cv of its dispatch weights, cls_share (the weight on [CLS]),
    entropy_loss and, if importance_weight is not 0, importance_loss.

    pred: the student's `Prediction`, or any object with its fields. targets [B, 1 + N, D]: the
    teacher's tokens of the whole image. images [B, 3, S, S] in [0, 1]. mask bool [B, N], True
    where masked. `loss_block`: the block whose router gives the weights and is regularized, or
    several: their weights are averaged, and so are their regularizers (default: see
    `stack_routings`). `loss_weights` is
      "dispatch"  the router's dispatch weights: expert 0's for the token loss and, in dense
                  encoding, expert 1's for the pixel loss;
      "combine"   the same with combine weights, not normalized;
      "softmin"   `softmin_weights`, with the lambda of expert 0 for the token loss and that of
                  expert 1 for the pixel loss, even without experts;
      "uniform"   none.
    A patch loss without weights is the plain mean over its patches. `detach`: see `patch_weights`.
    `lambdas`: lambda of each expert in Eq. 7, or one for all. `entropy_on`: the weights of Eq. 6,
    "dispatch" or, in an ablation, "combine". Raises ValueError if targets do not have 1 + N tokens.
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
        scores["token"] = Score(loss, selected, expert=0, routable=True)
    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])
    if "pixel" in objectives:
        loss = pixel_loss(pred.pixels.float(), images)
        # in sparse encoding, a router does not see the masked patches
        scores["pixel"] = Score(loss, masked, expert=1, routable=dense)

    # Couple (Eq. 5): the mean of each patch loss, weighted by its expert.
    routing = stack_routings(pred, loss_block)
    experts = routing["dispatch"].shape[-1] if routing else 0
    # A single lambda is broadcast to all experts, and to two entries at least: softmin takes those
    # of experts 0 and 1, even if there are no such experts.
    lambdas = lambdas + targets.new_zeros(max(2, experts))
    normalize = loss_weights != "combine"
    metrics = {}
    for name, score in scores.items():
        if loss_weights == "softmin":
            weight = softmin_weights(score.patch_loss, score.selected, lambdas[score.expert])
        elif routing and score.routable and loss_weights != "uniform":
            # the mean over blocks, [B, T, E]
            weight = patch_weights(routing[loss_weights].mean(0), score.expert, detach)
        else:
            losses[name] = routed_mean(score.patch_loss, score.selected)
            continue
        losses[name], more = couple(score, weight, normalize, 1 if normalize else 1 / experts)
        metrics |= {f"{name}_{key}": value for key, value in more.items()}

    # Regularize (Eq. 6 and 7): pull the weights of each expert towards uniform ones.
    regularizer = targets.new_zeros(())
    if routing:
        regularizer, more = regularize(routing, lambdas[:experts], entropy_on, importance_weight)
        metrics |= more
        with torch.no_grad():
            # first the mean over blocks, then the variation over all patches that the router sees
            metrics["dispatch_cv"] = dispatch_cv(routing["dispatch"].mean(0)[:, 1:])
            metrics["cls_share"] = routing["dispatch"][:, :, 0].mean((0, 1))

    metrics = {name: value.detach() for name, value in (metrics | losses).items()}
    return torch.stack([losses[name] for name in objectives]), regularizer, metrics
