"""Softmaxes of what is allowed against those of each line; texts without padding, in groups of pairs."""

import pytest
import torch
from torch.testing import assert_close

from modeling_elmo.heads.packed_texts import PackedTexts, masked_softmax


@pytest.mark.parametrize("dim", [0, 1])
def test_masked_softmax_is_one_of_what_is_allowed(dim):
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    scores = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = masked_softmax(scores, mask, dim)
    for line, given, allowed in zip(*(each.movedim(dim, -1) for each in (found, scores, mask)), strict=True):
        assert_close(line[allowed], given[allowed].softmax(0))
        assert not line[~allowed].any()
    assert torch.autograd.gradcheck(lambda scores: masked_softmax(scores, mask, dim), scores)
    with torch.autograd.set_detect_anomaly(True):  # raises at NaN inside the backward pass
        found.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_softmax_broadcasts_and_ignores_what_is_masked(dtype):
    scores = torch.tensor([[[-3e4, -3e4, torch.nan], [2.0, 1.0, 6e4]]], dtype=dtype).requires_grad_()
    found = masked_softmax(scores, torch.tensor([[True, True, False]])[:, None], -1)
    expected = torch.tensor([[[0.5, 0.5, 0.0], [0.7311, 0.2689, 0.0]]], dtype=dtype)
    assert_close(found, expected, atol=2e-3 if dtype == torch.bfloat16 else 1e-3, rtol=0)
    found.square().sum().backward()
    assert scores.grad.isfinite().all() and not scores.grad[..., 2].any()


def test_pairs_are_grouped_by_length():
    """A long text does not pad the short ones, whatever the order; all pairs come once, beside the right partner."""
    lengths = torch.tensor([3, 0, 500, 4, 3, 0, 5, 2])
    mask = torch.arange(500) < lengths[:, None]
    texts, x = PackedTexts(mask, mask), torch.arange(1.0, 1 + int(lengths.sum()))[:, None]
    padded, found = 0, []
    for own, other in texts.pairs(texts, 4):
        padded += own.mask_RL.numel() * other.mask_RL.shape[1]
        sums = other.read(texts.pack(x)).sum((1, 2))
        found.append((own, own.read(texts.pack(x)) * 0 + sums[:, None, None]))
    real = (lengths * lengths.roll(4).clamp(min=1)).sum()
    assert padded < 2 * real + 2**14
    starts = [0, *lengths.cumsum(0).tolist()]
    totals = [x[begin:end].sum() for begin, end in zip(starts, starts[1:], strict=False)]
    expected = torch.stack(totals).roll(-4).repeat_interleave(lengths)
    assert_close(texts.unpack(texts.join(found), len(x))[:, 0], expected)
