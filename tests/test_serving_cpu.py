"""The stand-ins for SGLang's compiled CPU kernels against plain definitions."""

import sys
from pathlib import Path

import pytest
import torch

from scripts.lib.serving.launch import CPU_FOLDER

HEADS, KEY_HEADS, SIZE = 4, 2, 8
LENGTHS = [5, 3]


@pytest.fixture(scope="module")
def kernels():
    """The stand-in as SGLang's processes import it."""
    sys.path.insert(0, str(CPU_FOLDER))
    try:
        import sgl_kernel

        yield sgl_kernel
    finally:
        sys.path.remove(str(CPU_FOLDER))


@pytest.fixture
def cache():
    """Buffers of 32 slots; two requests in rows 1 and 0 of the pool, whose slots are shuffled."""
    torch.manual_seed(0)
    slots = torch.randperm(32)
    return {
        "k": torch.randn(32, KEY_HEADS, SIZE),
        "v": torch.randn(32, KEY_HEADS, SIZE),
        "req_to_token": slots.view(2, 16).to(torch.int32),
        "rows": torch.tensor([1, 0]),
        "lengths": torch.tensor(LENGTHS),
    }


def attention(query, keys, values, seen):
    """Plain attention of one query [H, D] over keys and values [L, K, D], of which `seen` [L] says which it sees."""
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        scores = (keys[:, shared] @ query[head] / SIZE**0.5).masked_fill(~seen, -torch.inf)
        out.append(torch.softmax(scores, 0) @ values[:, shared])
    return torch.stack(out)


@pytest.mark.parametrize("window", [-1, 2])
def test_decode_attention(kernels, cache, window):
    query, new_k, new_v = torch.randn(2, HEADS, SIZE), torch.randn(2, KEY_HEADS, SIZE), torch.randn(2, KEY_HEADS, SIZE)
    places = torch.stack([cache["req_to_token"][row, length - 1] for row, length in zip([1, 0], LENGTHS, strict=True)]).long()
    out = torch.empty(2, HEADS, SIZE)
    kernels.decode_attention_cpu(
        *(query, cache["k"], cache["v"], 1.0, 1.0, out, new_k, new_v, places, None),
        *(cache["req_to_token"], cache["rows"], cache["lengths"], SIZE**-0.5, 0.0, False, window),
    )
    for index, (row, length) in enumerate(zip([1, 0], LENGTHS, strict=True)):
        slots = cache["req_to_token"][row, :length].long()
        assert torch.equal(cache["k"][slots[-1]], new_k[index]), "the new token's key is stored"
        seen = torch.arange(length) >= (length - window if window > 0 else 0)
        torch.testing.assert_close(out[index], attention(query[index], cache["k"][slots], cache["v"][slots], seen))


@pytest.mark.parametrize("tree", [False, True])
def test_extend_attention(kernels, cache, tree):
    new = [3, 2]
    query = torch.randn(sum(new), HEADS, SIZE)
    # In a tree, the second and third drafts of the first request are siblings.
    masks = [torch.ones(n, n).tril().bool() for n in new]
    if tree:
        masks[0][2, 1] = False
    out = torch.empty(sum(new), HEADS, SIZE)
    kernels.extend_attention_cpu(
        *(query, None, None, out, cache["k"], cache["v"], 1.0, 1.0, cache["req_to_token"], cache["rows"], cache["lengths"]),
        *(torch.tensor(new), torch.tensor([0, 3]), max(new), SIZE**-0.5, 0.0, False, -1),
        tree_mask=torch.cat([mask.flatten() for mask in masks]) if tree else None,
    )
    start = 0
    for row, length, mask in zip([1, 0], LENGTHS, masks, strict=True):
        slots = cache["req_to_token"][row, :length].long()
        for place in range(len(mask)):
            seen = torch.cat([torch.ones(length - len(mask)).bool(), mask[place]])
            torch.testing.assert_close(out[start + place], attention(query[start + place], cache["k"][slots], cache["v"][slots], seen))
        start += len(mask)


def built(kernels, parents, selected, topk):
    """Mask, positions and links of one tree behind 10 tokens."""
    q = len(selected) + 1
    mask, positions = torch.zeros(q * q, dtype=torch.bool), torch.zeros(q, dtype=torch.int64)
    links = [torch.full((1, q), -7) for _ in range(3)]
    kernels.build_tree_kernel_efficient_cpu(
        *(torch.tensor([parents]), torch.tensor([selected]), torch.tensor([10]), mask, positions, *links, topk, 3, q, 1)
    )
    return mask.view(q, q), positions.tolist(), links


def test_a_chain_is_verified_up_to_the_first_wrong_draft(kernels):
    mask, positions, (index, following, sibling) = built(kernels, [-1, 0, 1], [0, 1, 2], topk=1)
    assert torch.equal(mask, torch.ones(4, 4).tril().bool())
    assert positions == [10, 11, 12, 13]
    predicts, accepted, number = torch.zeros(4, dtype=torch.int64), torch.full((1, 4), -1), torch.zeros(1, dtype=torch.int64)
    drafts, wanted = torch.tensor([[50, 51, 52, 99]]), torch.tensor([51, 52, 53, 54])
    kernels.verify_tree_greedy_cpu(predicts, accepted, number, drafts, index, following, sibling, wanted)
    assert (number.tolist(), accepted.tolist(), predicts[:3].tolist()) == ([2], [[0, 1, 2, -1]], [51, 52, 53])


def test_a_tree_takes_the_branch_that_the_target_takes(kernels):
    # Two drafts behind the root; behind the second of them, two more.
    mask, positions, (index, following, sibling) = built(kernels, [-1, 0, 1], [0, 1, 4, 5], topk=2)
    assert positions == [10, 11, 11, 12, 12]
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]
    predicts, accepted, number = torch.zeros(5, dtype=torch.int64), torch.full((1, 3), -1), torch.zeros(1, dtype=torch.int64)
    drafts, wanted = torch.tensor([[50, 60, 61, 70, 71]]), torch.tensor([61, 0, 71, 0, 80])
    kernels.verify_tree_greedy_cpu(predicts, accepted, number, drafts, index, following, sibling, wanted)
    assert (number.tolist(), accepted.tolist()) == ([2], [[0, 2, 4]])
    assert predicts[[0, 2, 4]].tolist() == [61, 71, 80]


def test_ngrams_trees_come_as_masks_alone(kernels):
    from sgl_kernel.speculative import reconstruct_indices_from_tree_mask

    trees = [built(kernels, [-1, 0, 1], drafts, topk=2) for drafts in ([0, 1, 4, 5], [0, 1, 2, 3])]
    places, links = torch.zeros(10, dtype=torch.int64), [torch.full((2, 5), -7) for _ in range(3)]
    reconstruct_indices_from_tree_mask(torch.stack([mask for mask, *_ in trees]).flatten(), torch.tensor([10, 10]), places, *links, 2, 5)
    assert places.tolist() == [*trees[0][1], *trees[1][1]]
    assert links[0].flatten().tolist() == list(range(10))
    for found, kind in zip(links[1:], (1, 2), strict=True):
        assert found.tolist() == [tree[2][kind][0].tolist() for tree in trees]


def test_slots_of_draft_branches(kernels):
    pool = torch.arange(32, dtype=torch.int32).view(2, 16)
    table = kernels.build_draft_decode_metadata_cpu(pool, torch.tensor([1]), torch.tensor([3]), 2, 2, 16)
    assert table[:, :5].tolist() == [[16, 17, 18, 19, 20], [16, 17, 18, 21, 22]]
    slots = torch.zeros(4, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1]), pool, torch.tensor([3]), slots, 16, 2, 2)
    assert slots.tolist() == [19, 20, 21, 22]
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([1, 0]), pool, torch.tensor([2, 0]), torch.tensor([4, 1]), torch.tensor([7, 8, 9]), 16
    )
    assert (pool[1, 2:4].tolist(), int(pool[0, 0])) == ([7, 8], 9)


def test_cache_rows_move_also_onto_each_other(kernels):
    buffer = torch.arange(12.0).view(4, 3)
    kernels.copy_all_layer_kv_cache_cpu(torch.tensor([buffer.data_ptr()]), torch.tensor([12]), torch.tensor([1, 0]), torch.tensor([0, 1]))
    assert buffer[:2].tolist() == [[3, 4, 5], [0, 1, 2]]


def test_ids_are_shifted_for_the_drafter(kernels):
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernels.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[90], [91]]))
    assert ids.tolist() == [2, 3, 90, 5, 91]


def test_what_is_accepted_is_gathered(kernels):
    bonus = torch.zeros(2, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]
    places = torch.zeros(3, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([10, 11, 12, 13]), places)
    assert places.tolist() == [10, 12, 13]


def test_a_kernel_that_is_not_there_says_so_when_called(kernels):
    with pytest.raises(NotImplementedError, match="stand-in of SGLang's kernels has no fused_experts_cpu: serve this model on a GPU"):
        kernels.fused_experts_cpu()


def test_the_stand_ins_are_where_the_server_looks(kernels):
    assert Path(kernels.__file__).is_relative_to(CPU_FOLDER)
