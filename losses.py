"""The losses of ExPLoRe: the objectives, the coupling of losses and router, Eq. 8. Needs nothing but torch.

Shapes: B images, N patches, T tokens of the student with [CLS] first, E experts, D features, K objectives.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1) against the teacher's layer-normalized features.

    pred [B, N, D], target [B, N, D] -> [B, N], the mean over features.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine of student's and teacher's [CLS]. pred [B, D], target [B, D] -> scalar"""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2: row by row, each as (channel, y, x)."""
    b, c, h, w = images.shape
    x = images.view(b, c, h // patch_size, patch_size, w // patch_size, patch_size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * patch_size ** 2)


def pixel_loss(pred: Tensor, images: Tensor, patch_size: int) -> Tensor:
    """Eq. 3 before the mean over patches: squared error against patches of zero mean and unit variance.

    pred [B, N, P], images [B, 3, H, W] -> [B, N], the *mean* over a patch's pixels: the paper prints the sum,
    but its weights 1, 0.1 and 0.01 are for the mean. The variance is unbiased, plus 1e-6.
    """
    target = patchify(images, patch_size)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    return (pred - target).square().mean(-1)


def routed_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches, then the mean over images.

    loss [B, N], weight [B, N] >= 0 -> scalar. Where `weight` is an expert's dispatch weights, its gradient
    teaches the router: a patch whose loss is above its image's weighted mean loses weight, one below gains.
    Dividing by the sum keeps the router from shrinking all weights to make the loss small. An image whose
    weights are all zero counts as zero.
    """
    return ((weight * loss).sum(1) / weight.sum(1).clamp_min(torch.finfo(weight.dtype).tiny)).mean()


def patch_weights(routing, expert: int, source: str = "dispatch", detach: bool = False) -> Tensor:
    """The coupling: how much each of the student's patches counts in the loss of `expert`. -> [B, T - 1]

    `routing` has a block's `dispatch` and `combine` [B, T, E]; `source` names one of them, or "uniform".
    Detached weights still weight the loss, but it sends the router no gradient through them: the paper's main
    ablation. The router then learns from the experts' outputs and the entropy alone.
    """
    if source == "uniform":
        return torch.ones_like(routing.dispatch[:, 1:, 0])
    weight = getattr(routing, source)[:, 1:, expert]                          # [CLS] has no patch loss
    weight = weight + 1e-30      # where [CLS] has all the weight, the others underflow: then they are equal
    return weight.detach() if detach else weight


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: entropy in nats of each expert's distribution over tokens, averaged over images.

    dispatch [B, T, E], sums to 1 over T -> [E]; ln(T) is uniform, 0 is all weight on one token. The paper's
    ablation takes the same sum over combine weights.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()          # 0 log 0 = 0, finite gradient
    return -(dispatch * log).sum(1).mean(0)


def variation(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, averaged over images. [B, N, E] -> [E]; 0 is uniform."""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation, over experts, of their total combine weight. [B, T, E] -> scalar

    The paper names dispatch weights; their total is 1 for every expert and image: nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


OBJECTIVES = {
    # name: per-patch loss or scalar; the patches that it is on in sparse and in dense encoding; the expert
    # that weights them. `p` is the student's Prediction, `t` the teacher's tokens, as many as the student's.
    # In sparse encoding, a loss on visible patches is [B, V], one on masked patches [B, N]
    "token": (lambda p, t, images: token_loss(p.tokens[:, 1:].float(), t[:, 1:]), ("visible", "masked"), 0),
    "cls": (lambda p, t, images: cls_loss(p.tokens[:, 0].float(), t[:, 0]), None, None),
    "pixel": (lambda p, t, images: pixel_loss(p.pixels.float(), images, math.isqrt(p.pixels.shape[-1] // 3)),
              ("masked", "masked"), 1),
}


def objectives(pred, targets: Tensor, images: Tensor, mask: Tensor, ids_keep: Tensor | None = None, *,
               names=("token", "cls"), loss_block=None, loss_weights="dispatch", detach=False,
               entropy_weights: Tensor | float = 5.0, entropy_on="dispatch", importance_weight=0.0):
    """Eq. 8 -> (terms [K]: the losses without their weights w; the regularizers' sum; detached metrics).

    pred: the student's Prediction. targets [B, 1 + N, D]: the teacher's tokens of the whole image. images
    [B, 3, S, S] in [0, 1]. mask [B, N], True where masked. ids_keep [B, V]: the patches that a sparse student
    saw, in the order of its tokens; None for a dense one. `loss_block`: the MoE block whose weights count, or
    several, which are averaged (default: the last one). `entropy_weights`: lambda of Eq. 7, a scalar or [E].
    Without experts, a loss is the plain mean over its patches.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(f"targets have {targets.shape[1]} tokens, but [CLS] and {mask.shape[1]} patches "
                         f"need {1 + mask.shape[1]}: leave out registers")
    sparse, targets = ids_keep is not None, targets.float()
    if sparse:
        seen = F.pad(ids_keep + 1, (1, 0))[..., None]                         # [CLS], the visible patches
        targets = targets.gather(1, seen.expand(-1, -1, targets.shape[-1]))
    blocks = [max(pred.routing, default=0)] if loss_block is None else loss_block
    blocks = [blocks] if isinstance(blocks, int) else blocks
    routings = [pred.routing[block] for block in blocks] if pred.routing else []

    terms, metrics = {}, {}
    for name in names:
        per_patch, patch_sets, expert = OBJECTIVES[name]
        terms[name] = loss = per_patch(pred, targets, images)
        if patch_sets is None:
            continue
        patch_set = patch_sets[0 if sparse else 1]
        if patch_set == "masked":
            chosen = mask.to(loss.dtype)                                      # 1 where the loss counts
        else:
            chosen = torch.ones_like(loss) if sparse else (~mask).to(loss.dtype)
        terms[name] = metrics[f"{name}_unweighted"] = routed_mean(loss, chosen)
        if routings and not (sparse and patch_set == "masked"):               # where they have no token
            weight = torch.stack([patch_weights(r, expert, loss_weights, detach) for r in routings]).mean(0)
            if loss_weights == "combine":                                     # not normalized: all can vanish
                terms[name] = routed_mean(weight * loss, chosen)
            else:
                terms[name] = routed_mean(loss, weight * chosen)
        metrics[f"{name}_ratio"] = terms[name] / metrics[f"{name}_unweighted"]

    regularizer = targets.new_zeros(())
    if routings:
        dispatch = torch.stack([routing.dispatch for routing in routings])            # [blocks, B, T, E]
        combine = torch.stack([routing.combine for routing in routings])
        entropy = dispatch_entropy((combine if entropy_on == "combine" else dispatch).flatten(0, 1))
        regularizer = metrics["entropy_loss"] = -(entropy_weights * entropy).sum()    # Eq. 7
        if importance_weight:
            metrics["importance_loss"] = torch.stack([importance_loss(block) for block in combine]).mean()
            regularizer = regularizer + importance_weight * metrics["importance_loss"]
        metrics["entropy"] = dispatch_entropy(dispatch.flatten(0, 1))
        metrics["dispatch_cv"] = variation(dispatch.mean(0)[:, 1:])
        metrics["cls_share"] = dispatch[:, :, 0].mean((0, 1))
    return torch.stack([*terms.values()]), regularizer, {k: v.detach() for k, v in (metrics | terms).items()}


# --------------------------------------------------------- global balancing of objectives, the baselines

class Static(nn.Module):
    """Fixed weights [K] of the objectives: 1, w_cls, w_pixel."""

    def __init__(self, weights: Tensor):
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, step: int, terms: Tensor) -> Tensor:
        """The weights [K] of the losses `terms` [K]; called for each micro-batch of a step."""
        return self.weights

    def update(self):
        """Called at the end of a step."""


class RandomLossWeighting(Static):
    """RLW: the softmax of normals drawn by (seed, step): the same in every process and when resumed."""

    def __init__(self, weights: Tensor, seed: int):
        super().__init__(weights)
        self.seed = seed

    def forward(self, step: int, terms: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self.weights.copy_(torch.randn(len(terms), generator=generator).softmax(0), non_blocking=True)


class GradNorm(Static):
    """GradNorm: weights [K], learned so that all objectives train at like rates.

    With G_k the norm of objective k's weighted gradient at the `shared` layer, and r_k its loss relative to
    its first, divided by the mean of that over objectives, each weight descends on
    |G_k - mean(G) r_k ** alpha|, the target held fixed; then the weights are renormalized to sum to K.
    """

    def __init__(self, weights: Tensor, shared: nn.Module, alpha: float, lr: float, scaler):
        super().__init__(torch.ones_like(weights))
        self.register_buffer("first", torch.zeros_like(weights))
        self.shared, self.alpha, self.lr, self.scaler = [*shared.parameters()], alpha, lr, scaler
        self.collected = []                                                 # [K, loss and gradient] each

    def forward(self, step: int, terms: Tensor) -> Tensor:
        scale = self.scaler.scale(torch.ones_like(terms[0]))                # FP16 would lose small gradients
        rows = [(scale * term.detach(), *torch.autograd.grad(scale * term, self.shared, retain_graph=True))
                for term in terms]
        rows = [torch.cat([part.flatten() for part in row]) for row in rows]
        self.collected.append(torch.stack(rows) / scale)
        return self.weights

    def update(self):
        means = torch.stack(self.collected).mean(0)                         # over the whole batch
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        losses, norms, self.collected = means[:, 0], means[:, 1:].norm(dim=1), []
        unknown = (self.first == 0) & losses.isfinite()
        self.first.copy_(torch.where(unknown, losses, self.first))
        rate, weighted = losses / self.first, self.weights * norms
        target = weighted.mean() * (rate / rate.mean()) ** self.alpha
        stepped = (self.weights - self.lr * torch.sign(weighted - target) * norms).clamp_min(1e-3)
        stepped = stepped * len(stepped) / stepped.sum()
        self.weights.copy_(torch.where(stepped.isfinite().all(), stepped, self.weights))
