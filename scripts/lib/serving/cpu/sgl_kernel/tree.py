"""The tree of draft tokens of a request, and which of its branches the target confirms.

Legend: B requests, Q nodes of each tree (the root is the last verified token), S steps plus one. A tree is written as `next_token` [B, Q],
the first child of a node, and `next_sibling` [B, Q]; -1 is none.
"""

# ruff: noqa: PLR0913, PLR0917
# The arguments are SGLang's.

import torch

QLEN_ONLY = 1  # the kind of mask that the CPU path asks for: Q x Q, without the tokens before the tree


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    q: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask [B, Q, Q], positions [B, Q] and links [B, Q] of the trees of the drafts chosen in `selected_index` [B, Q-1]."""
    assert int(tree_mask_mode) == QLEN_ONLY
    selected, listed = selected_index.tolist(), parent_list.tolist()
    mask = torch.zeros((len(selected), q, q), dtype=torch.bool)
    depths = torch.zeros((len(selected), q), dtype=torch.int64)
    first, sibling = ([[-1] * q for _ in selected] for _ in range(2))
    for row, drafts in enumerate(selected):
        parents = parents_of(drafts, listed[row] if listed else [], topk)
        for node in range(q - 1, 0, -1):
            sibling[row][node], first[row][parents[node]] = first[row][parents[node]], node
        for node in range(q):
            line = ancestors(node, parents)
            mask[row, node, line] = True
            depths[row, node] = len(line) - 1
    places = seq_lens.to(torch.int64)[:, None] + depths
    tree_mask.view(-1)[: mask.numel()] = mask.view(-1).to(tree_mask.dtype)
    positions.view(-1)[: places.numel()] = places.view(-1).to(positions.dtype)
    retrieve_index.view(-1).copy_(torch.arange(len(selected) * q).to(retrieve_index.dtype))
    retrieve_next_token.copy_(torch.tensor(first, dtype=retrieve_next_token.dtype).view_as(retrieve_next_token))
    retrieve_next_sibling.copy_(torch.tensor(sibling, dtype=retrieve_next_sibling.dtype).view_as(retrieve_next_sibling))


def parents_of(drafts: list[int], listed: list[int], topk: int) -> list[int]:
    """Parent node of every node of one tree; the root 0 is its own. `listed` gives the draft above each group of `topk`."""
    node_of: dict[int, int] = {}
    for node, draft in enumerate(drafts, 1):
        node_of.setdefault(draft, node)
    return [0] + [node_of.get(listed[draft // topk], 0) if draft >= topk else 0 for draft in drafts]


def ancestors(node: int, parents: list[int]) -> list[int]:
    """`node` and all nodes above it, the root last."""
    line = [node]
    while line[-1]:
        line.append(parents[line[-1]])
    return line


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree of `candidates` [B, Q] along the target's own choices `target_predict` [B x Q].

    Fills `accept_index` [B, S] with the nodes of the walk, `accept_token_num` [B] with its length without the root, and `predicts` with the
    target's token at each of them, the bonus token included.
    """
    drafts, indexes = candidates.tolist(), retrive_index.tolist()
    first, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    for row in range(len(drafts)):
        last = indexes[row][0]
        accept_index[row, 0] = last
        accepted, node = 0, 0
        for _ in range(1, accept_index.shape[1]):
            node = first[row][node]
            while node != -1 and drafts[row][node] != wanted[last]:
                node = sibling[row][node]
            if node == -1:
                break
            predicts[last] = wanted[last]
            accepted += 1
            last = indexes[row][node]
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = wanted[last]


def fill_bonus_tokens_cpu(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int) -> None:
    """The last accepted token of each request, [B], out of `accept_tokens` [B, accept_stride]."""
    places = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[places].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor) -> None:
    """The slots of the accepted nodes (`accept_index` above -1), end to end."""
    nodes = accept_index.reshape(-1)
    nodes = nodes[nodes > -1].to(torch.int64)
    accept_out_cache_loc[: nodes.numel()] = out_cache_loc[nodes].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's ids by one to the left, as a drafter takes them, and put its next token `topk_index` [B] at the end or where
    `select_index` [B] says.
    """
    following = topk_index.reshape(-1).tolist()
    places = None if select_index is None else select_index.reshape(-1).tolist()
    for row, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=False)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            input_ids[places[row] if places else start + length - 1] = following[row]
