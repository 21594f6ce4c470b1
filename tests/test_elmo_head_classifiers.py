"""The classifiers against the papers' formulas in loops over rows and words, without masks and padding."""

import math

import pytest
import torch

from modeling_elmo.elmo_head_classifiers import (
    BiattentiveClassifier,
    ESIMClassifier,
    attend_to_other,
    masked_max,
    masked_mean,
)

CLASSIFIERS = [BiattentiveClassifier, ESIMClassifier]
WIDTH, ELMO, LABELS = 5, 4, 3

# 1 and 2: words of the first and the second text; 0: padding
LAYOUT = torch.tensor(
    [
        [1, 1, 1, 1, 2, 2, 2, 0, 0],
        [0, 0, 0, 1, 1, 2, 2, 2, 2],  # left padding
        [0, 1, 0, 1, 2, 0, 0, 2, 0],  # gaps
        [2, 1, 1, 0, 2, 0, 1, 2, 2],  # interleaved
        [1, 2, 0, 0, 0, 0, 0, 0, 0],
    ]
)
EMPTY = torch.tensor([[1, 1, 0], [0, 2, 2], [0, 0, 0], [1, 1, 2]])


def make_classifier(kind, elmo=ELMO, dropout=0.5):
    torch.manual_seed(0)
    classifier = kind(WIDTH, 6, LABELS, dropout, elmo).double().eval()
    for parameter in classifier.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return classifier


def make_inputs(layout=LAYOUT, elmo=ELMO, garbage=1e3):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(*layout.shape, WIDTH + elmo, generator=generator, dtype=torch.float64)
    inputs[layout == 0] = garbage
    return inputs[..., :WIDTH], layout == 1, layout == 2, inputs[..., WIDTH:] if elmo else None


def gradients(classifier, logits):
    classifier.zero_grad()
    logits.sin().sum().backward()
    return [parameter.grad.clone() for parameter in classifier.parameters()]


# The formulas


def bilstm(lstm, words):
    return list(lstm.layers[0](torch.stack(words))[0]) if words else []


def softmax(scores):
    powers = [math.exp(score) for score in scores] if not torch.is_tensor(scores) else scores.exp()
    return [power / sum(powers) for power in powers]


def summary(word, others):
    """Attention of one word to the other text."""
    if not others:
        return torch.zeros_like(word)
    weights = softmax(torch.stack([word @ other for other in others]))
    return sum(weight * other for weight, other in zip(weights, others, strict=True))


def maximum(words, like):
    return torch.stack([max(values) for values in zip(*words, strict=True)]) if words else like


def mean(words, like):
    return sum(words) / len(words) if words else like


def with_elmo(words, elmo):
    return [torch.cat(pair) for pair in zip(words, elmo, strict=True)] if len(elmo) else words


def plain_biattentive(model, x, y, x_elmo, y_elmo):
    zeros = torch.zeros(model.integrator.output_size, dtype=torch.float64)
    x, y = ([model.feedforward(word).relu() for word in text] for text in (x, y))
    x = with_elmo(bilstm(model.encoder, x), x_elmo)
    y = with_elmo(bilstm(model.encoder, y), y_elmo)
    pooled = []
    for text, other in ((x, y), (y, x)):
        compared = []
        for word in text:
            context = summary(word, other)
            compared.append(torch.cat([word, word - context, word * context]))
        words = bilstm(model.integrator, compared)
        weights = softmax(torch.stack([word @ model.attention.weight[0] for word in words])) if words else []
        attentive = sum((weight * word for weight, word in zip(weights, words, strict=True)), zeros)
        minimum = -maximum([-word for word in words], zeros)
        pooled += [maximum(words, zeros), mean(words, zeros), minimum, attentive]
    first, second = model.joint
    return model.output(second(first(torch.cat(pooled)).relu()).relu())


def plain_esim(model, a, b, a_elmo, b_elmo):
    zeros = torch.zeros(model.composition.output_size, dtype=torch.float64)
    a, b = with_elmo(bilstm(model.encoder, a), a_elmo), with_elmo(bilstm(model.encoder, b), b_elmo)
    pooled = []
    for text, other in ((a, b), (b, a)):
        local = []
        for word in text:
            aligned = summary(word, other)
            local.append(model.projection(torch.cat([word, aligned, word - aligned, word * aligned])).relu())
        words = bilstm(model.composition, local)
        pooled += [mean(words, zeros), maximum(words, zeros)]
    return model.output(model.joint(torch.cat(pooled)).tanh())


PLAIN = {BiattentiveClassifier: plain_biattentive, ESIMClassifier: plain_esim}


def plain_logits(classifier, inputs, first, second, elmo):
    plain, rows = PLAIN[type(classifier)], []
    for row in range(len(inputs)):
        texts = [list(inputs[row, mask[row]]) for mask in (first, second)]
        elmos = [[] if elmo is None else list(elmo[row, mask[row]]) for mask in (first, second)]
        rows.append(plain(classifier, *texts, *elmos))
    return torch.stack(rows)


def as_list(tensors):
    return [None if tensor is None else tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT[:, :7], EMPTY, EMPTY[2:3]], ids=["pairs", "cut", "empty", "nothing"])
@pytest.mark.parametrize("elmo", [0, ELMO])
def test_logits_and_gradients_are_those_of_the_formulas(kind, layout, elmo):
    classifier = make_classifier(kind, elmo)
    ours, theirs = (as_list(make_inputs(layout, elmo)) for _ in range(2))
    logits, expected = classifier(*ours), plain_logits(classifier, *theirs)
    assert logits.shape == (len(layout), LABELS)
    torch.testing.assert_close(logits, expected)
    if (layout != 0).any():
        for mine, yours in zip(gradients(classifier, logits), gradients(classifier, expected), strict=True):
            torch.testing.assert_close(mine, yours)
        torch.testing.assert_close(ours[0].grad, theirs[0].grad)
        if elmo:
            torch.testing.assert_close(ours[3].grad, theirs[3].grad)


def test_contexts_are_those_of_the_matrix_formulas():
    """Column-wise softmax of A = X Y^T and of its transpose, as the papers write it."""
    words = make_inputs(garbage=0.0)[0]
    texts, mask = torch.cat([words, words]), torch.cat([LAYOUT == 1, LAYOUT == 2])
    contexts = attend_to_other(texts, mask, len(LAYOUT))
    assert not contexts[~mask].any()
    for row in range(len(LAYOUT)):
        x, y = words[row, LAYOUT[row] == 1], words[row, LAYOUT[row] == 2]
        affinity = x @ y.t()
        of_x = torch.stack([sum(w * word for w, word in zip(softmax(c), x, strict=True)) for c in affinity.t()])
        of_y = torch.stack([sum(w * word for w, word in zip(softmax(c), y, strict=True)) for c in affinity])
        torch.testing.assert_close(contexts[row, LAYOUT[row] == 1], of_y)
        torch.testing.assert_close(contexts[row + len(LAYOUT), LAYOUT[row] == 2], of_x)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_encoded_texts_are_zeros_where_they_have_no_word(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind, dropout=0.0), make_inputs()
    words = inputs if kind is ESIMClassifier else classifier.feedforward(inputs)
    texts, mask = classifier.encode(words, first, second, elmo)
    assert torch.equal(mask, torch.cat([first, second])) and texts.shape == (10, 9, 12 + ELMO)
    assert not texts[~mask].any()
    torch.testing.assert_close(texts[mask][:, 12:], torch.cat([elmo[first], elmo[second]]))


def test_pools_are_over_real_positions():
    states, mask = make_inputs(EMPTY, garbage=1e3)[0], EMPTY == 1
    largest, average = masked_max(states, mask), masked_mean(states, mask)
    for row in (0, 3):
        torch.testing.assert_close(largest[row], states[row, mask[row]].max(0).values)
        torch.testing.assert_close(average[row], states[row, mask[row]].mean(0))
    assert not largest[1:3].any() and not average[1:3].any()


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_the_content_of_padding_does_not_matter(kind):
    classifier = make_classifier(kind)
    logits = [classifier(*make_inputs(garbage=garbage)) for garbage in (0.0, 1e3, -1e3)]
    found = [gradients(classifier, each) for each in logits]
    for i in (1, 2):
        torch.testing.assert_close(logits[i], logits[0], rtol=0, atol=0)
        torch.testing.assert_close(found[i], found[0])


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_row_is_the_same_in_every_batch(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind), make_inputs()
    together = classifier(inputs, first, second, elmo)
    for row in range(len(inputs)):
        alone = slice(row, row + 1)
        torch.testing.assert_close(
            classifier(inputs[alone], first[alone], second[alone], elmo[alone])[0], together[row]
        )


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_single_text_is_its_own_other_one_and_is_computed_once(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind), make_inputs()
    mask, read = first | second, []
    classifier.encoder.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    logits = classifier(inputs, mask, mask, elmo)
    torch.testing.assert_close(logits, classifier(inputs, mask, mask.clone(), elmo))
    torch.testing.assert_close(logits, plain_logits(classifier, inputs, mask, mask, elmo))
    assert read == [len(inputs), 2 * len(inputs)]


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_the_texts_may_come_in_either_order(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind), make_inputs()
    swapped = classifier(inputs, second, first, elmo)
    torch.testing.assert_close(swapped, plain_logits(classifier, inputs, second, first, elmo))
    assert not torch.allclose(swapped, classifier(inputs, first, second, elmo))


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_masks_of_integers_serve(kind):
    classifier, (inputs, first, second, elmo) = make_classifier(kind), make_inputs()
    expected = classifier(inputs, first, second, elmo)
    torch.testing.assert_close(classifier(inputs, first.long(), second.long(), elmo), expected)


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("training", [False, True])
def test_gradients_reach_every_parameter(kind, training):
    classifier = make_classifier(kind, dropout=0.2).train(training)
    for grad, (name, _) in zip(
        gradients(classifier, classifier(*make_inputs())), classifier.named_parameters(), strict=True
    ):
        assert grad.isfinite().all() and grad.any(), name


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_dropout_acts_in_training_alone(kind):
    classifier, inputs = make_classifier(kind), make_inputs()
    torch.testing.assert_close(classifier(*inputs), classifier(*inputs))
    classifier.train()
    assert not torch.allclose(classifier(*inputs), classifier(*inputs))
    masks = []
    classifier.sequence_dropout.register_forward_hook(lambda _, x, y: masks.append((x[0], y)))
    pooled = []
    classifier.dropout.register_forward_hook(lambda _, x, y: pooled.append((y == 0).any()))
    classifier(*inputs)
    ((before, after),) = masks
    is_kept = (after != 0).any(1, keepdim=True)  # the same mask at all time steps
    torch.testing.assert_close(after, 2 * before * is_kept)
    assert (before != 0).any(1)[~is_kept[:, 0]].any()
    assert len(pooled) == (3 if kind is BiattentiveClassifier else 2) and all(pooled)
    plain = make_classifier(kind, dropout=0.0).train()
    torch.testing.assert_close(plain(*inputs), plain(*inputs))


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_initialisation_fills_linear_layers_and_leaves_the_rest(kind):
    classifier = make_classifier(kind)
    before = {name: parameter.detach().clone() for name, parameter in classifier.named_parameters()}
    classifier.output.weight._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    classifier.reset_parameters()
    for name, parameter in classifier.named_parameters():
        if ".layers." in name or name == "output.weight":
            torch.testing.assert_close(parameter.detach(), before[name])
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.7 * bound < parameter.abs().max() <= bound and len(parameter.unique()) == parameter.numel()
