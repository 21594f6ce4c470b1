"""The CRF against all paths of short rows and against pytorch-crf; constraints against tables written by hand."""

import itertools
import math
import re

import pytest
import torch
from bilm_models import seeded
from errors import refused
from torch.testing import assert_close

from modeling_elmo.heads.crf import Constraints, LinearChainCRF, bio_constraints, decode_labels

BIO = ("O", "B-X", "I-X", "B-Y", "I-Y")
BIOES = ("O", "B-X", "I-X", "E-X", "S-X", "S-Y")
# Gaps, padding on either side, one position, all; at random; none.
MASK = torch.tensor(
    [[1] * 5, [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]
).bool()
MASK = torch.cat([MASK, torch.rand(4, 5, generator=seeded()) < 0.6, torch.zeros(1, 5).bool()])
# No 2 at the start, no 1 after 0, no 0 after 0, no 1 at the end: every row has an allowed path.
ALLOWED = Constraints(
    torch.tensor([True, True, False]),
    torch.tensor([[False, False, True], [True, True, True], [True, True, True]]),
    torch.tensor([True, False, True]),
)


def make_crf(num_labels, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    crf = LinearChainCRF(num_labels).to(dtype)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    return crf


def make_batch(num_labels, mask=MASK, seed=1, dtype=torch.float64):
    """Emissions and labels, which are NaN and invalid at masked positions."""
    generator = seeded(seed)
    emissions = 2 * torch.randn(*mask.shape, num_labels, generator=generator, dtype=dtype)
    labels = torch.randint(num_labels, mask.shape, generator=generator)
    return emissions.masked_fill(~mask[..., None], math.nan), labels.masked_fill(~mask, 10**6)


def all_paths(crf, emissions, mask, allowed=None):
    """For each row its unmasked positions, and the score of each path, term by term."""
    start, transitions, end = (p.tolist() for p in (crf.start, crf.transitions, crf.end))
    for row, row_mask in zip(emissions.tolist(), mask.tolist(), strict=True):
        places = [place for place, real in enumerate(row_mask) if real]
        scores = {}
        for path in itertools.product(range(len(start)), repeat=len(places)):
            pairs = list(itertools.pairwise(path))
            if allowed is not None and not is_allowed(path, allowed):
                continue
            score = sum(row[place][label] for place, label in zip(places, path, strict=True))
            score += sum(transitions[a][b] for a, b in pairs)
            scores[path] = score + start[path[0]] + end[path[-1]] if path else score
        yield places, scores


def is_allowed(path, allowed):
    if not path:
        return True
    pairs = all(allowed.transitions[pair] for pair in itertools.pairwise(path))
    return bool(pairs and allowed.start[path[0]] and allowed.end[path[-1]])


def log_sum(scores):
    return math.log(math.fsum(map(math.exp, scores)))


@pytest.mark.parametrize("num_labels, unknown", [(1, 0.4), (3, 0.0), (4, 0.4), (3, 1.0)])
def test_likelihood_sums_the_paths_that_agree(num_labels, unknown):
    crf, (emissions, labels) = make_crf(num_labels), make_batch(num_labels)
    labels[torch.rand(labels.shape, generator=seeded(2)) < unknown] = -100
    expected = []
    for row, (places, scores) in zip(labels.tolist(), all_paths(crf, emissions, MASK), strict=True):
        known = [(i, row[place]) for i, place in enumerate(places) if row[place] != -100]
        agreeing = [score for path, score in scores.items() if all(path[i] == label for i, label in known)]
        expected.append(log_sum(agreeing) - log_sum(scores.values()))
    found = crf.log_likelihood(emissions, labels, MASK)
    assert_close(found, found.new_tensor(expected), atol=1e-12, rtol=1e-12)
    assert found[-1] == 0  # the row without positions, exactly
    assert num_labels == 1 or unknown == 1 or (found[:-1] < -0.01).any()


@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["free", "constrained"])
def test_marginals_sum_the_paths_through_a_label(allowed):
    crf, (emissions, _) = make_crf(3), make_batch(3)
    expected = torch.full_like(emissions, 1 / 3)
    for row, (places, scores) in zip(expected, all_paths(crf, emissions, MASK, allowed), strict=True):
        for (i, place), label in itertools.product(enumerate(places), range(3)):
            through = [score for path, score in scores.items() if path[i] == label]
            row[place, label] = math.exp(log_sum(through) - log_sum(scores.values())) if through else 0
    found = crf.decode(emissions, MASK, allowed)[1]
    assert_close(found.exp(), expected, atol=1e-12, rtol=1e-12)
    assert found.isfinite().all()
    assert allowed is None or (expected == 0).sum() > 6  # some positions are constrained


@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["free", "constrained"])
def test_decoded_path_is_the_best_of_all(allowed):
    crf, (emissions, _) = make_crf(3), make_batch(3)
    expected = torch.full(MASK.shape, -100)
    for row, (places, scores) in zip(expected, all_paths(crf, emissions, MASK, allowed), strict=True):
        row[places] = torch.tensor(max(scores, key=scores.__getitem__), dtype=torch.long)
    found = crf.decode(emissions.requires_grad_(), MASK, allowed)[0]
    assert torch.equal(found, expected)


def test_equals_pytorch_crf():
    dtype = torch.float64
    theirs, mine = pytest.importorskip("torchcrf").CRF(5, batch_first=True).to(dtype), LinearChainCRF(5).to(dtype)
    pairs = [(mine.start, theirs.start_transitions), (mine.end, theirs.end_transitions)]
    pairs.append((mine.transitions, theirs.transitions))
    for own, other in pairs:
        torch.nn.init.normal_(other, generator=seeded(own.dim()))
        own.data.copy_(other.data)
    mask = torch.arange(9) < torch.tensor([9, 1, 4, 6])[:, None]
    emissions = torch.randn(4, 9, 5, generator=seeded(3), dtype=dtype)
    labels = torch.randint(5, mask.shape, generator=seeded(4))
    inputs = [emissions.clone().requires_grad_() for _ in range(2)]
    found = mine.log_likelihood(inputs[0], labels, mask)
    expected = theirs(inputs[1], labels, mask, reduction="none")
    assert_close(found, expected)
    weights = torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=dtype)
    own = torch.autograd.grad(found @ weights, [inputs[0], *(own for own, _ in pairs)])
    other = torch.autograd.grad(expected @ weights, [inputs[1], *(other for _, other in pairs)])
    assert_close(own, other)
    decoded = [row[row != -100].tolist() for row in mine.decode(emissions, mask)[0]]
    assert decoded == theirs.decode(emissions, mask)


def test_gradients_are_those_of_differences():
    crf, (emissions, labels) = make_crf(3), make_batch(3)
    labels[0, 1] = labels[3, 2] = -100

    def run(emissions, *_):  # the parameters, which gradcheck changes in place
        return crf.log_likelihood(emissions, labels, MASK), crf.decode(emissions, MASK, ALLOWED)[1].exp()

    assert torch.autograd.gradcheck(run, [emissions.nan_to_num().requires_grad_(), *crf.parameters()])


def test_marginals_are_distributions_in_long_rows():
    crf = make_crf(5, dtype=torch.float32)
    mask = torch.rand(2, 400, generator=seeded()) < 0.9
    emissions, _ = make_batch(5, mask, dtype=torch.float32)
    for allowed in (None, bio_constraints(BIO)):
        found = crf.decode(emissions, mask, allowed)[1]
        assert_close(found.exp().sum(-1), torch.ones(2, 400), atol=1e-6, rtol=0)
        exact = crf.double().decode(emissions.double(), mask, allowed)[1].float()
        assert_close(found.exp(), exact.exp(), atol=2e-5, rtol=0)
        crf.float()
    assert_close(found[~mask], torch.full_like(found[~mask], -math.log(5)))


@pytest.mark.parametrize("allowed", [None, bio_constraints(BIO)], ids=["free", "constrained"])
def test_extreme_emissions_stay_finite(allowed):
    crf, (emissions, labels) = make_crf(5, dtype=torch.float32), make_batch(5, dtype=torch.float32)
    emissions = (1e4 * emissions).requires_grad_()
    for found in (crf.log_likelihood(emissions, labels, MASK), crf.decode(emissions, MASK, allowed)[1].exp()):
        gradients = torch.autograd.grad(found.sum() + found.square().sum(), [emissions, *crf.parameters()])
        assert all(tensor.isfinite().all() for tensor in (found, *gradients))
    with torch.no_grad():
        emissions[..., [2, 4]] += 1e6  # of I-X and I-Y, which cannot start
    for row in crf.decode(emissions, MASK, bio_constraints(BIO))[0]:
        assert is_allowed(row[row != -100].tolist(), bio_constraints(BIO))
    firsts = crf.decode(emissions, MASK, bio_constraints(BIO))[1].exp()[0, 0]
    assert not firsts[[2, 4]].any()


def test_certain_rows_keep_their_precision():
    """The loss of a well-trained model is a small difference of large sums, which must stay precise."""
    crf, mask = make_crf(5, dtype=torch.float32), torch.ones(1, 300, dtype=torch.bool)
    labels = torch.randint(5, mask.shape, generator=seeded())
    emissions = 1000 + 22 * torch.nn.functional.one_hot(labels, 5).float()
    torch.nn.init.zeros_(crf.transitions)
    found = crf.log_likelihood(emissions, labels, mask)
    exact = crf.double().log_likelihood(emissions.double(), labels, mask).float()
    assert_close(found, exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    crf, (emissions, labels) = make_crf(4, dtype=dtype), make_batch(4, dtype=dtype)
    found = crf.log_likelihood(emissions, labels, MASK), crf.decode(emissions, MASK)[1]
    decoded = crf.decode(emissions, MASK)[0]
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = crf.float().log_likelihood(emissions.float(), labels, MASK)
    expected = crf.log_likelihood(emissions.float(), labels, MASK), crf.decode(emissions.float(), MASK)[1]
    for one, two in zip((*found, under_autocast), (*expected, expected[0]), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two)
    assert torch.equal(decoded, crf.decode(emissions.float(), MASK)[0])


def table(text):
    return torch.tensor([[mark == "1" for mark in row] for row in text.split()])


HAND = {
    # each row: the labels that may follow
    BIO: ("11010", "11010 11110 11110 11011 11011", "11111"),
    BIOES: ("110011", "110011 001100 001100 110011 110011 110011", "100111"),
    ("U-X", "L-X", "I-X", "O", "B-X"): ("10011", "10011 10011 01100 10011 01100", "11010"),
    ("B-X", "M-X", "E-X", "S-X", "O"): ("10011", "01100 01100 10011 10011 10011", "00111"),
    ("O", "B-X", "E-X"): ("110", "110 001 110", "101"),
    ("I-a-b", "B-a-b", "I-b", "B-b"): ("0101", "1101 1101 0111 0111", "1111"),
    ("B-X", "I-X"): ("10", "11 11", "11"),
}


@pytest.mark.parametrize("labels", HAND, ids="/".join)
def test_constraints_equal_tables_by_hand(labels):
    start, transitions, end = HAND[labels]
    found = bio_constraints(labels)
    assert torch.equal(found.start, table(start)[0])
    assert torch.equal(found.transitions, table(transitions))
    assert torch.equal(found.end, table(end)[0])


NO_SCHEME = ["B-X I-X O NOUN", "B- I- O", "O B-X B-Y", "O I-X I-Y B-Y", "O S-X U-Y", "O B-X I-X S-X", "B-X I-X E-X", ""]


@pytest.mark.parametrize("labels", NO_SCHEME)
def test_names_of_no_scheme_are_not_constrained(labels):
    assert bio_constraints(tuple(labels.split())) is None


def best_of_all(log_probs, mask, names):
    """The best BIO sequence of each row among all sequences."""
    found = torch.full(mask.shape, -100)
    for row, (scores, real) in enumerate(zip(log_probs.tolist(), mask, strict=True)):
        places = real.nonzero().flatten().tolist()
        texts = {}
        for path in itertools.product(range(len(names)), repeat=len(places)):
            text = "".join(names[label] + " " for label in path)
            if re.fullmatch(r"(?:O |B-(\w) (I-\1 )*)*", text):
                texts[path] = sum(scores[place][label] for place, label in zip(places, path, strict=True))
        found[row, places] = torch.tensor(max(texts, key=texts.__getitem__), dtype=torch.long)
    return found


@pytest.mark.parametrize("names", [BIO, ("I-Y", "B-X", "O", "B-Y"), ("O", "B-X", "B-Y"), ("O",)], ids="/".join)
def test_decoded_labels_are_the_best_of_all(names):
    for dtype in (torch.float64, torch.float16):
        log_probs = make_batch(len(names))[0].log_softmax(-1).to(dtype)
        expected = best_of_all(log_probs.double(), MASK, names)
        assert torch.equal(decode_labels(log_probs, MASK, names), expected)


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min, -1e4])
def test_impossible_labels_are_better_than_forbidden_sequences(lowest):
    """Everywhere but at the last word, the scores say I-X, which may not come first."""
    log_probs = torch.full((1, 4, 5), lowest)
    log_probs[..., 2] = 0.0
    log_probs[0, 3, :] = torch.tensor([0.5, 0.1, 0.2, 0.1, 0.1]).log()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert decode_labels(log_probs.to(dtype), torch.ones(1, 4).bool(), BIO).tolist() == [[1, 2, 2, 0]]


@pytest.mark.parametrize(
    "names, message",
    [(("O", "B-X", "NOUN"), "'NOUN'"), (("O", "B-X", "I-Y"), "'I-Y'"), (("O", "B-X"), "3 labels, but 2 names")],
)
def test_names_that_cannot_be_decoded(names, message):
    with refused(message):
        decode_labels(torch.zeros(1, 2, 3), torch.ones(1, 2).bool(), names)


def test_constraints_are_on_the_cpu_whatever_the_default_device():
    bio_constraints.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        allowed = bio_constraints(BIO)
    assert {tensor.device.type for tensor in allowed} == {"cpu"}
    crf, (emissions, _) = make_crf(5), make_batch(5)
    crf.decode(emissions, MASK, allowed)[1][MASK].exp().square().sum().backward()
    assert all(parameter.grad.any() for parameter in crf.parameters())


def test_parameters_start_uniform_and_loaded_ones_stay():
    crf = LinearChainCRF(40)
    torch.nn.init.constant_(crf.end, 3.0)
    crf.end._is_hf_initialized = True
    crf.initialize_parameters()
    assert (crf.end == 3).all()
    for parameter in (crf.transitions, crf.start):
        assert -0.1 <= parameter.min() < -0.08 and 0.08 < parameter.max() <= 0.1


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batches(shape):
    crf, mask = make_crf(4), torch.ones(shape, dtype=torch.bool)
    emissions, labels = make_batch(4, mask)
    assert crf.log_likelihood(emissions, labels, mask).tolist() == [0.0] * shape[0]
    assert crf.decode(emissions, mask)[0].shape == shape
    assert crf.decode(emissions, mask)[1].shape == (*shape, 4)
    with refused("`num_labels` is 0; pass 1 or more"):
        LinearChainCRF(0)
