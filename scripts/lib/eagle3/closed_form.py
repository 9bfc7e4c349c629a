"""A start that needs no training: the best linear drafter, solved from stored states and written into the network.

The target's next state is regressed on what a slot sees, its three states a and the embedding e of the next token:
final ~ F a + M e. `fc` becomes F. M has to go through attention: some heads are set to look at their own token, their
values read e, and their outputs write the best approximation of M that their width allows.

Shapes: n samples, H hidden size, E head size, G key/value heads, R rank of the embedding's part, V target vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.eagle3.model import Drafter

RIDGE = 0.05  # penalty relative to the mean square of a feature
SELF_SCORE = 16.0  # how far attention prefers the own token, in logits
SAMPLES_PER_FEATURE = 32  # more do not move the solution


@dataclass(frozen=True)
class Sample:
    """Slots of one row: states `aux` [n, 3, H], `next_tokens` i64[n], and the target's state `final` [n, H] one token later."""

    aux: Tensor
    next_tokens: Tensor
    final: Tensor


@dataclass(frozen=True)
class Moments:
    """Sums over samples of x x^T [4H, 4H] and x y^T [4H, H]: x is [scaled states; normed embedding], y the goal before the last norm."""

    gram: Tensor
    cross: Tensor
    count: int

    def solve(self, features: slice, cross: Tensor) -> Tensor:
        """Ridge solution of `features` for the sums `cross` of the same rows."""
        gram = self.gram[features, features]
        return torch.linalg.solve(gram + RIDGE * self.count * torch.eye(len(gram), device=gram.device), cross)


def closed_form_start(drafter: Drafter, embedding: Tensor, samples: Iterable[Sample]) -> None:
    """Write the best linear drafter for `samples` into `drafter`, whose norm and head are the target's; computed where it lies.

    `embedding` [V, H] is the target's. The feed-forward block, the remaining heads and all further layers keep their weights but start
    silent, so that training begins at the linear drafter.
    """
    size = drafter.config.hidden_size
    states, tokens = slice(0, 3 * size), slice(3 * size, 4 * size)
    used = enough(samples, wanted_slots(size))
    scale = torch.cat([mean_square(drafter, used, place) for place in range(3)]).sqrt().to(drafter.fc.weight.device)
    goal = scale[-size:].square().mean().sqrt() / drafter.norm.weight.detach()
    moments = measure(drafter, embedding, used, scale, goal)
    whole = moments.solve(slice(0, 4 * size), moments.cross)
    rank = max(drafter.config.num_key_value_heads - 1, 1) * drafter.config.head_dim
    read, write = low_rank(whole[tokens], moments.gram[tokens, tokens] / moments.count, min(rank, size))
    fc = moments.solve(states, moments.cross[states] - moments.gram[states, tokens] @ read @ write)
    with torch.no_grad():
        drafter.fc.weight.copy_((fc / scale[:, None]).T)
        look_at_own_token(drafter, embedding, read, write)


def wanted_slots(hidden_size: int) -> int:
    """How many slots the start is solved from, if there are as many."""
    return SAMPLES_PER_FEATURE * 4 * hidden_size


def enough(samples: Iterable[Sample], slots: int) -> list[Sample]:
    """The first of `samples` that together hold `slots` or more; no further ones are asked for."""
    used, count = [], 0
    for sample in samples:
        used.append(sample)
        count += len(sample.aux)
        if count >= slots:
            break
    return used


def mean_square(drafter: Drafter, samples: Sequence[Sample], place: int) -> Tensor:
    """Mean square [H] of what `fc` sees of the states at the boundary in `place`; one at a time, as all would fill the memory."""
    return torch.cat([seen(drafter, sample.aux[:, place]) for sample in samples]).square_().mean(0)


def seen(drafter: Drafter, aux: Tensor) -> Tensor:
    """What `fc` sees of states `aux` [n, …, H], in float32: with `fc_norm`, whose weights are one at the start, their normed form."""
    aux = aux.float()
    return functional.rms_norm(aux, aux.shape[-1:], eps=drafter.config.rms_norm_eps) if drafter.config.fc_norm else aux


def measure(drafter: Drafter, embedding: Tensor, samples: Sequence[Sample], scale: Tensor, goal: Tensor) -> Moments:
    """Moments of `samples`: states over `scale` [3H], and `final` times `goal` [H], which undoes the last norm's weight."""
    size = drafter.config.hidden_size
    device = goal.device
    gram, cross, count = torch.zeros(4 * size, 4 * size, device=device), torch.zeros(4 * size, size, device=device), 0
    for sample in samples:
        normed = functional.rms_norm(embedding[sample.next_tokens].to(device).float(), (size,), eps=drafter.config.rms_norm_eps)
        features = torch.cat([seen(drafter, sample.aux.to(device)).flatten(1) / scale, normed], 1)
        gram.addmm_(features.T, features)
        cross.addmm_(features.T, sample.final.to(device).float() * goal)
        count += len(features)
    return Moments(gram, cross, count)


def low_rank(weights: Tensor, second_moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`read` [H, R] and `write` [R, H] whose product is nearest to `weights` [H, H] on inputs of `second_moment` [H, H]."""
    size = len(weights)
    root = torch.linalg.cholesky(second_moment + 1e-3 * torch.eye(size, device=weights.device))
    left, values, right = torch.linalg.svd(root.T @ weights, full_matrices=False)
    read = torch.linalg.solve(root.T, left[:, :rank] * values[:rank].sqrt())
    return read, values[:rank].sqrt()[:, None] * right[:rank]


def look_at_own_token(drafter: Drafter, embedding: Tensor, read: Tensor, write: Tensor) -> None:
    """Set heads of the first layer to attend to their own token and to add e @ `read` @ `write`; silence what else the layers add.

    Queries and keys are one random projection of the embedding, so that their product is largest for the same token,
    and among equal tokens rotary position makes it largest for the own one.
    """
    attention, config = drafter.midlayer.self_attn, drafter.config
    size, width = config.hidden_size, config.head_dim
    shared = config.num_attention_heads // config.num_key_value_heads
    probe = own_token_probe(embedding, width, config.rms_norm_eps).to(read.device)
    drafter.midlayer.input_layernorm.weight.fill_(1.0)
    for layer in drafter.decoder:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    for group in range(-(-read.shape[1] // width)):
        part = slice(group * width, min((group + 1) * width, read.shape[1]))
        keys, queries = slice(group * width, (group + 1) * width), slice(group * shared * width, (group + 1) * shared * width)
        attention.k_proj.weight[keys] = functional.pad(probe, (0, size))
        attention.q_proj.weight[queries] = functional.pad(probe.repeat(shared, 1), (0, size))
        attention.v_proj.weight[part] = functional.pad(read[:, part].T, (0, size))
        first = group * shared * width
        attention.o_proj.weight[:, first : first + part.stop - part.start] = write[part].T


def own_token_probe(embedding: Tensor, width: int, eps: float) -> Tensor:
    """A projection [E, H] of normed embeddings, their mean taken out, that scores a token against itself with `SELF_SCORE`."""
    size = embedding.shape[1]
    normed = functional.rms_norm(embedding.float(), (size,), eps=eps)
    mean = functional.normalize(normed.mean(0), dim=0)
    probe = torch.linalg.qr(torch.randn(size, width, generator=torch.Generator().manual_seed(0)))[0].T
    probe = probe - (probe @ mean)[:, None] * mean
    typical = (normed @ probe.T).square().sum(1).mean()
    return probe * (SELF_SCORE * width**0.5 / typical).sqrt()
