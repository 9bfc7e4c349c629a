"""What SGLang's NGRAM asks of this package by its full name: the links of the trees that it found in the text so far.

Legend: B requests, Q nodes of each tree, of which node 0 is the last verified token.
"""

# ruff: noqa: PLR0913, PLR0917
# The arguments are SGLang's.

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Fill positions [B x Q] and links [B, Q] from `tree_mask` [B x Q x Q], whose rows mark a node's ancestors and itself."""
    count = batch_size * draft_token_num
    masks = tree_mask.view(-1)[: count * draft_token_num].view(batch_size, draft_token_num, draft_token_num)
    above = masks.bool() & torch.ones(draft_token_num, draft_token_num, dtype=torch.bool).tril(-1)
    places = verified_seq_len[:batch_size].to(torch.int64)[:, None] + above.sum(-1)
    first, sibling = ([[-1] * draft_token_num for _ in range(batch_size)] for _ in range(2))
    for row, tree in enumerate(above.tolist()):
        for node in range(draft_token_num - 1, 0, -1):  # the last one first, so that a node's first child is written last
            parents = [other for other in range(node) if tree[node][other]]
            if parents:
                sibling[row][node], first[row][parents[-1]] = first[row][parents[-1]], node
    positions.view(-1)[:count] = places.view(-1).to(positions.dtype)
    retrieve_index.view(-1)[:count] = torch.arange(count).to(retrieve_index.dtype)
    retrieve_next_token.view(-1)[:count] = torch.tensor(first).view(-1).to(retrieve_next_token.dtype)
    retrieve_next_sibling.view(-1)[:count] = torch.tensor(sibling).view(-1).to(retrieve_next_sibling.dtype)
