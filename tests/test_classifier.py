"""BCN and ESIM against the papers' formulas in loops over rows and words; losses against torch's; errors."""

import pytest
import torch
import torch.nn.functional as F
from errors import refused
from head_models import (
    ELMO,
    HEADS,
    LABELS,
    NAMES,
    PAIRS,
    WORDS,
    batch_of,
    fails,
    make_batch,
    make_model,
    make_network,
    make_network_inputs,
    mixed,
    row_of,
    run_network,
    stirred,
)
from torch.testing import assert_close

from modeling_elmo import ELMoForSequenceClassification
from modeling_elmo.heads.classifier import BiattentiveClassifier, ESIMClassifier

CLASSIFIERS = [BiattentiveClassifier, ESIMClassifier]
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


def gradients(classifier, logits):
    classifier.zero_grad()
    logits.sin().sum().backward()
    return [parameter.grad.clone() for parameter in classifier.parameters()]


# The formulas


def bilstm(lstm, words):
    return list(lstm.layers[0](torch.stack(words))[0]) if words else []


def attended(query, words, zeros):
    """The words, weighted by a softmax of their products with the query."""
    powers = [(query @ word).exp() for word in words]
    return sum((power / sum(powers) * word for power, word in zip(powers, words, strict=True)), zeros)


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
            context = attended(word, other, torch.zeros_like(word))
            compared.append(torch.cat([word, word - context, word * context]))
        words = bilstm(model.integrator, compared)
        attentive = attended(model.attention.weight[0], words, zeros)
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
            aligned = attended(word, other, torch.zeros_like(word))
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
@pytest.mark.parametrize("layout, elmo", [(LAYOUT, ELMO), (LAYOUT[:, :7], 0), (EMPTY, ELMO), (EMPTY[2:3], ELMO)])
def test_logits_and_gradients_equal_the_formulas(kind, layout, elmo):
    classifier = make_network(kind, elmo)
    ours, theirs = (as_list(make_network_inputs(layout, elmo)) for _ in range(2))
    logits, expected = run_network(classifier, *ours), plain_logits(classifier, *theirs)
    assert logits.shape == (len(layout), LABELS)
    assert_close(logits, expected)
    if (layout != 0).any():
        assert_close(gradients(classifier, logits), gradients(classifier, expected))
        assert_close(ours[0].grad, theirs[0].grad)
        if elmo:
            assert_close(ours[3].grad, theirs[3].grad)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_single_text_is_compared_with_itself_and_computed_once(kind):
    classifier, (inputs, first, second, elmo) = make_network(kind), make_network_inputs(LAYOUT)
    mask, read = first | second, []
    classifier.encoder.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    logits = run_network(classifier, inputs, mask, mask, elmo)
    assert_close(logits, run_network(classifier, inputs, mask, mask.clone(), elmo))
    assert_close(logits, plain_logits(classifier, inputs, mask, mask, elmo))
    assert read == [mask.sum(), 2 * mask.sum()]


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head[0] is ELMoForSequenceClassification])
@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_losses_equal_torch(name, problem):
    cls, options = HEADS[name]
    model = stirred(make_model(cls, **options, scalar_mix_l2=0.2, num_labels=1 if problem == "regression" else 5))
    batch = batch_of(model)
    targets, loss = {
        "regression": (torch.randn(4), lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        "single_label_classification": (torch.tensor([0, 3, 1, 4]), F.cross_entropy),
        "multi_label_classification": (torch.rand(4, 5).round(), F.binary_cross_entropy_with_logits),
    }[problem]
    penalty = 0.2 * sum(mix.weights.square().sum() for mix in model.mixes().values())
    output = model(**batch, labels=targets)
    assert_close(output.loss, loss(output.logits, targets) + penalty)
    assert model.config.problem_type == problem
    if options.get("head") == "linear":
        real = batch["attention_mask"].bool()
        vectors = mixed(model.elmo(**batch).hidden_states, model.input_mix)
        means = torch.stack([vectors[row, real[row]].mean(0) for row in range(4)])
        assert_close(output.logits, model.classifier(means))


def test_single_texts_and_pairs_in_one_batch():
    """A text of type 1, or without a type, is a single text. ESIM compares two."""
    model = make_model(ELMoForSequenceClassification, elmo_placement="both")
    batch = make_batch(model.config, [3, (2, 2), 5, (1, 4)])
    with torch.no_grad():
        together = model(**batch).logits
        for row in range(4):
            alone = row_of(batch, row)
            kinds = [alone["token_type_ids"]]
            kinds += [] if kinds[0].any() else [None, torch.ones_like(kinds[0])]
            for types in kinds:
                logits = model(**{**alone, "token_type_ids": types}).logits[0]
                assert_close(logits, together[row], atol=1e-5, rtol=1e-5)
    fails("row 0 has one", make_model(ELMoForSequenceClassification, classifier="esim"), **batch)


def test_batches_without_rows_or_words():
    for options in ({}, {"classifier": "esim"}, {"head": "linear", "task_word_embedding_size": 0}):
        model = make_model(ELMoForSequenceClassification, **options)
        inputs = {name: rows[:0] for name, rows in make_batch(model.config, PAIRS).items()}
        assert model(**inputs).logits.shape == (0, len(NAMES))
    single = make_model(ELMoForSequenceClassification)
    inputs = {name: rows[:, :0] for name, rows in make_batch(single.config, WORDS).items()}
    assert single(**inputs).logits.isfinite().all()


def test_errors_of_classifiers():
    model = make_model(ELMoForSequenceClassification, num_labels=3)
    batch = make_batch(model.config, PAIRS)
    types = batch["token_type_ids"] + (torch.arange(batch["input_ids"].shape[1]) == 1)
    fails("`token_type_ids` has values from 0 to 2", model, **{**batch, "token_type_ids": 2 * types.clamp(max=1)})
    fails("`labels` has ids from -1 to 2.*remove rows", model, **batch, labels=torch.tensor([-1, 0, 1, 2]))
    several = make_model(ELMoForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    fails(r"`labels` has shape \(4,\); pass shape \(4, 3\)", several, **batch, labels=torch.zeros(4))
    number = make_model(ELMoForSequenceClassification, num_labels=1)
    losses = [number(**batch, labels=torch.arange(4).to(dtype)).loss for dtype in (torch.int64, torch.float32)]
    assert losses[0] == losses[1]
    with refused("`labels` is a list; pass a tensor", TypeError):
        model(**batch, labels=[0, 1, 2, 0])
    baseline = make_model(ELMoForSequenceClassification, use_elmo=False)
    outside = {**batch, "character_ids": batch["character_ids"] * 30}
    fails("`character_ids` has ids from .* to 870", baseline, **outside)
