"""The task heads: what they compute, beside definitions in loops, and what they promise to those who train them."""

import math
import re
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from modeling_elmo import (
    ELMoConfig,
    ELMoForQuestionAnswering,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
)

SENTENCES = Path(__file__).parent / "fixtures" / "text" / "en.txt"
NAMES = ["O", "B-X", "I-X", "B-Y", "I-Y"]
WORDS = [4, 0, 1, 3]  # in each row, between two markers
PAIRS = [(2, 3), (4, 1), (1, 1), (3, 5)]
PLACEMENTS = {
    "input": {},
    "output": {"elmo_placement": "output"},
    "both": {"elmo_placement": "both"},
    "no_elmo": {"use_elmo": False},
}
NETWORKS = {
    "tagger": (ELMoForTokenClassification, {}),
    "bcn": (ELMoForSequenceClassification, {"classifier": "bcn"}),
    "esim": (ELMoForSequenceClassification, {"classifier": "esim"}),
    "reader": (ELMoForQuestionAnswering, {}),
}
HEADS = {
    f"{name}-{place}": (cls, {**network, **placement})
    for name, (cls, network) in NETWORKS.items()
    for place, placement in PLACEMENTS.items()
}
HEADS["tagger-linear"] = ELMoForTokenClassification, {"head": "linear"}
HEADS["sequence-linear"] = ELMoForSequenceClassification, {"head": "linear"}
HEADS["reader-linear"] = ELMoForQuestionAnswering, {"head": "linear"}
HEADS["sequence-paper-linear"] = ELMoForSequenceClassification, {"classifier": "linear"}
every_head = pytest.mark.parametrize("cls, options", HEADS.values(), ids=HEADS)
every_head_on_elmo = pytest.mark.parametrize(
    "cls, options",
    [head for head in HEADS.values() if head[1].get("use_elmo", True)],
    ids=[name for name, head in HEADS.items() if head[1].get("use_elmo", True)],
)
every_class = pytest.mark.parametrize(
    "cls", [ELMoForTokenClassification, ELMoForSequenceClassification, ELMoForQuestionAnswering]
)


def make_config(**overrides):
    """Without dropout."""
    sizes = {"char_cnn_filters": [[1, 3], [2, 5]], "max_word_length": 9, "char_vocab_size": 30, "vocab_size": 12}
    sizes |= {"lstm_hidden_size": 21, "projection_size": 7, "dropout": 0.0, "elmo_dropout": 0.0, "task_dropout": 0.0}
    sizes |= {"task_hidden_size": 5, "task_word_embedding_size": 4, "task_char_embedding_size": 3}
    sizes |= {"task_char_cnn_filters": [[2, 3], [3, 2]]}
    if not {"num_labels", "id2label"} & overrides.keys():
        sizes["id2label"] = dict(enumerate(NAMES))
    return ELMoConfig.from_preset("tiny", **{**sizes, **overrides})


def make_model(cls, seed=0, **overrides):
    torch.manual_seed(seed)
    return cls(make_config(**overrides)).eval()


def make_batch(config, rows=WORDS, side="right", extra=0):
    """Random words, each with its spelling, between markers; two numbers for a row make it a pair."""
    generator = torch.Generator().manual_seed(0)
    spelling = torch.randint(
        1, config.char_vocab_size, (config.vocab_size, config.max_word_length), generator=generator
    )
    spelling[config.pad_token_id] = 0
    ids, types = [], []
    for row in rows:
        counts = row if isinstance(row, tuple) else (row,)
        texts = [[1, *torch.randint(4, config.vocab_size, (n,), generator=generator).tolist(), 2] for n in counts]
        ids.append([word for text in texts for word in text])
        types.append([number for number, text in enumerate(texts) for _ in text])
    time = extra + max(map(len, ids))

    def padded(rows):
        rows = [torch.tensor(row) for row in rows]
        before = [(time - len(row)) * (side == "left") for row in rows]
        return torch.stack([F.pad(row, (n, time - len(row) - n)) for row, n in zip(rows, before, strict=True)])

    batch = {"input_ids": padded(ids), "attention_mask": padded([[1] * len(row) for row in ids])}
    batch["character_ids"] = spelling[batch["input_ids"]]
    return batch | ({"token_type_ids": padded(types)} if any(map(any, types)) else {})


def batch_of(model, **options):
    """Pairs for the networks that compare, else single texts."""
    is_tagger = isinstance(model, ELMoForTokenClassification)
    return make_batch(model.config, WORDS if is_tagger else PAIRS, **options)


def targets_of(model, batch):
    if isinstance(model, ELMoForQuestionAnswering):  # the last word, the first, none
        words = (batch["token_type_ids"] == 1) & (batch["input_ids"] >= 4)
        first, last = (places.byte().argmax(1) for places in (words, (words.cumsum(1) == words.sum(1, True)) & words))
        last[2] = first[2] = batch["attention_mask"][2].argmax()
        return {"start_positions": first, "end_positions": last}
    if isinstance(model, ELMoForTokenClassification):
        return {"labels": (batch["input_ids"] % model.num_labels).masked_fill(batch["input_ids"] < 4, -100)}
    return {"labels": torch.arange(len(batch["input_ids"])) % model.num_labels}


def logits_of(output):
    """Those of starts and ends side by side."""
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)


def row_of(batch, number):
    """One row, without its padding."""
    real = batch["attention_mask"][number].bool()
    return {name: tensor[number][real][None] for name, tensor in batch.items()}


def stirred(model, std=1.0, seed=0):
    """With layer weights, a CRF and an output layer that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_output = name.startswith(("classifier.", "qa_outputs.", "reader.")) and "layers" not in name
            if "crf." in name or "_mix." in name or is_output:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


# The tagger


def is_bio(names):
    return all(not name.startswith("I-") or before[1:] == name[1:] for before, name in pairwise(["O", *names]))


def chains(crf, emissions_NK, names=None):
    """Every sequence of labels and its score; under the rules of BIO if names are given."""
    start, transitions, end = (p.detach().double().tolist() for p in (crf.start, crf.transitions, crf.end))
    scores, found = emissions_NK.double().tolist(), {}
    for labels in product(range(len(start)), repeat=len(scores)):
        if names is None or is_bio([names[label] for label in labels]):
            score = sum(scores[place][label] for place, label in enumerate(labels))
            score += sum(transitions[a][b] for a, b in pairwise(labels))
            found[labels] = score + (start[labels[0]] + end[labels[-1]] if labels else 0)
    return found


def log_sum(scores):
    return torch.tensor(list(scores), dtype=torch.float64).logsumexp(0).item()


def marginals(found, length, num_labels):
    """`(length, num_labels)` probabilities."""
    total = log_sum(found.values())
    table = torch.zeros(length, num_labels)
    for labels, score in found.items():
        for place, label in enumerate(labels):
            table[place, label] += math.exp(score - total)
    return table


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("names", [NAMES, ["O", "X", "I-X", "Y", "Z"]], ids=["bio", "free"])
def test_tagger_finds_the_best_chain_of_the_words(names, side):
    model = stirred(make_model(ELMoForTokenClassification, id2label=dict(enumerate(names))), std=0.7, seed=4)
    batch = make_batch(model.config, [*WORDS, 4, 4, 4], side=side)
    with torch.no_grad():
        emissions = model.train()(**batch)
        found = model.eval()(**batch)
    assert emissions.predictions is None and emissions.logits.shape == found.logits.shape
    shares = found.logits.softmax(-1)
    torch.testing.assert_close(found.logits.exp(), shares)  # already a distribution
    words = batch["input_ids"] >= 4
    assert (found.predictions[~words] == -100).all() and (found.predictions[words] >= 0).all()
    swaps = forbidden = 0
    for row, words_T in enumerate(words):
        every = chains(model.crf, emissions.logits[row, words_T], names if names is NAMES else None)
        best = max(every, key=every.__getitem__)
        assert found.predictions[row, words_T].tolist() == list(best)
        assert found.logits[row, words_T].argmax(-1).tolist() == list(best)
        expected = marginals(every, len(best), len(names))
        for table, label in zip(expected, best, strict=True):
            likeliest = int(table.argmax())
            swaps += likeliest != label
            table[[label, likeliest]] = table[[likeliest, label]]
        torch.testing.assert_close(shares[row, words_T], expected, atol=1e-5, rtol=1e-4)
        free = chains(model.crf, emissions.logits[row, words_T])
        forbidden += max(free, key=free.__getitem__) != best
    assert swaps and bool(forbidden) == (names is NAMES)  # the batch holds what is to be tested


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_tagger_is_that_of_its_chains(side):
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="both", scalar_mix_l2=0.3))
    batch = make_batch(model.config, side=side)
    labels = targets_of(model, batch)["labels"]
    labels[0, (batch["input_ids"][0] >= 4).nonzero()[1]] = -100  # a word of unknown label
    emissions, losses = model.train()(**batch).logits, []
    for row, words_T in enumerate(batch["input_ids"] >= 4):
        every, given = chains(model.crf, emissions[row, words_T]), labels[row, words_T].tolist()
        agreeing = [
            score
            for chain, score in every.items()
            if all(known in (-100, label) for known, label in zip(given, chain, strict=True))
        ]
        assert len(agreeing) == (5 if row == 0 else 1)
        losses.append(log_sum(every.values()) - log_sum(agreeing))
    penalty = 0.3 * (model.input_mix.weights.square().sum() + model.output_mix.weights.square().sum()).item()
    for mode in (True, False):
        assert model.train(mode)(**batch, labels=labels).loss.item() == pytest.approx(
            sum(losses) / len(losses) + penalty, rel=1e-5
        )
    labels = labels.where(batch["input_ids"] >= 4, 3)  # what stands at markers and at padding does not matter
    assert model(**batch, labels=labels).loss.item() == pytest.approx(sum(losses) / len(losses) + penalty, rel=1e-5)


def test_a_linear_tagger_divides_by_the_given_count():
    model = make_model(ELMoForTokenClassification, head="linear", scalar_mix_l2=0.5)
    with torch.no_grad():
        model.input_mix.weights.fill_(1.0)
    batch = make_batch(model.config, [6, 2, 4, 1])
    labels = targets_of(model, batch)["labels"]
    whole = model(**batch, labels=labels).loss
    count = (labels != -100).sum()
    halves = [
        model(**{k: v[rows] for k, v in batch.items()}, labels=labels[rows], num_items_in_batch=count).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(halves), whole)
    output = model(**batch)
    assert output.predictions is None
    expected = F.cross_entropy(output.logits[labels != -100], labels[labels != -100]) + 0.5 * 3
    torch.testing.assert_close(whole, expected)


def test_a_linear_classifier_averages_real_tokens():
    model = make_model(ELMoForSequenceClassification, head="linear")
    batch = make_batch(model.config)
    vectors = mixed(model.elmo(**batch).hidden_states, model.input_mix)
    for row, real in enumerate(batch["attention_mask"].bool()):
        torch.testing.assert_close(model(**batch).logits[row], model.classifier(vectors[row, real].mean(0)))


# What the networks read


def mixed(layers, mix):
    """Equation 1."""
    shares = mix.weights.detach().exp() / mix.weights.detach().exp().sum()
    return mix.gamma.detach() * sum(share * layer for share, layer in zip(shares, layers, strict=True))


def read_by(model, module, batch):
    """The arguments of a module when the model reads the batch."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return seen[0]


def network_inputs(model, batch):
    """What stands at the input of a head's network, and last at its output."""
    if isinstance(model, ELMoForTokenClassification):
        (tokens, _), (output,) = read_by(model, model.encoder, batch), read_by(model, model.classifier, batch)
        return tokens, output[..., model.encoder.output_size :]
    network = model.reader if isinstance(model, ELMoForQuestionAnswering) else model.classifier
    tokens, _, _, output = read_by(model, network, batch)
    return tokens, output


@pytest.mark.parametrize("cls, options", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("place", ["input", "output", "both"])
def test_networks_read_word_vectors_beside_elmo(cls, options, place):
    """`[x_k; ELMo_k]` (section 3.3), and ELMo at the output with a mix of its own (section 5.2)."""
    model = stirred(make_model(cls, **options, **PLACEMENTS[place]))
    batch = batch_of(model, side="left")
    tokens, output = network_inputs(model, batch)
    layers, mask = model.elmo(**batch).hidden_states, batch["attention_mask"].bool()
    expected = [model.token_features(batch["character_ids"], batch["input_ids"], mask)]
    if place != "output":
        expected.append(mixed(layers, model.input_mix))
    torch.testing.assert_close(tokens, torch.cat(expected, -1))
    assert tokens.shape[-1] == 4 + 5 + 14 * (place != "output")
    if place == "input":
        assert model.output_mix is None and (output is None or not output.numel())
    else:
        torch.testing.assert_close(output, mixed(layers, model.output_mix))
    assert list(model.mixes()) == [*["input"] * (place != "output"), *["output"] * (place != "input")]
    if place == "both":
        assert not torch.equal(model.input_mix.weights, model.output_mix.weights)


@pytest.mark.parametrize("cls, options", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("rates", [{"elmo_dropout": 0.5}, {"task_dropout": 0.5}], ids=["elmo", "task"])
def test_elmo_and_word_vectors_have_a_dropout_each(cls, options, rates):
    words_alone = {"task_word_embedding_size": 32, "task_char_cnn_filters": []}  # features that are never 0
    model = stirred(make_model(cls, **{**options, "elmo_placement": "both", **words_alone, **rates}))
    batch = batch_of(model)
    before, before_output = network_inputs(model, batch)
    after, after_output = network_inputs(model.train(), batch)
    torch.testing.assert_close(network_inputs(model.eval(), batch)[0], before)
    words, elmo = (after[..., :32], before[..., :32]), (after[..., 32:], before[..., 32:])
    dropped, kept = (elmo, words) if "elmo_dropout" in rates else (words, elmo)
    assert torch.equal(*kept)
    if "elmo_dropout" in rates:
        dropped = [torch.cat(tensors, -1) for tensors in zip(dropped, (after_output, before_output), strict=True)]
    else:
        assert torch.equal(after_output, before_output)
    is_zero = dropped[0] == 0
    torch.testing.assert_close(dropped[0][~is_zero], 2 * dropped[1][~is_zero])
    chosen = is_zero[0, : batch["attention_mask"][0].sum()]
    steady = (chosen == chosen[0]).all(0)  # one mask for all words of a row
    assert steady.all() if "task_dropout" in rates else not steady.all()
    assert 0.2 < chosen.float().mean() < 0.8


@pytest.mark.parametrize("network", NETWORKS)
def test_a_baseline_has_no_bilm(network, tmp_path):
    cls, options = NETWORKS[network]
    model = make_model(cls, **options, use_elmo=False)
    batch = batch_of(model)
    expected = model(**batch)
    assert not [name for name, _ in model.named_parameters() if "elmo" in name or "mix" in name]
    assert not model.mixes() and expected.hidden_states is None
    model.save_pretrained(tmp_path)
    again, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    bilm = {"projection_size": 3, "num_hidden_layers": 1, "char_cnn_filters": [[1, 2]]}
    other = make_model(cls, 1, **options, **bilm, use_elmo=False)
    other.load_state_dict(model.state_dict())
    for same in (again, other):
        torch.testing.assert_close(logits_of(same(**batch)), logits_of(expected), rtol=0, atol=0)
    words = make_model(cls, **options, use_elmo=False, task_char_cnn_filters=[])
    assert words.get_input_embeddings() is words.token_features.word_embeddings
    characters = make_model(cls, **options, use_elmo=False, task_word_embedding_size=0)
    assert characters.get_input_embeddings() is characters.token_features.char_encoder.char_embeddings
    for model in (words, characters):
        assert logits_of(model(**batch)).shape == logits_of(expected).shape


def test_a_baseline_of_a_bilms_folder_reads_nothing_of_it(tmp_path):
    ELMoModel(make_config()).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model, info = ELMoForTokenClassification.from_pretrained(tmp_path, use_elmo=False, output_loading_info=True)
    assert info["missing_keys"] == {name for name, _ in model.named_parameters()}
    assert not hasattr(model, "elmo") and model(**make_batch(model.config)).logits.isfinite().all()


def test_a_word_level_bilm_has_heads_too():
    options = {"char_vocab_size": 0, "word_embedding_size": 7}
    words = make_batch(make_config())["input_ids"]
    for cls in (ELMoForTokenClassification, ELMoForSequenceClassification):
        model = make_model(cls, **options)
        assert model.token_features.char_encoder is None and model.input_size == 4 + 14
        alone = torch.stack([model(input_ids=row[None]).logits[0] for row in words])
        torch.testing.assert_close(model(input_ids=words).logits, alone)
        bare = make_model(cls, **options, task_word_embedding_size=0)
        assert bare.token_features is None and bare(input_ids=words).logits.isfinite().all()


# Precomputed layers, and the frozen biLM


@every_head_on_elmo
@pytest.mark.parametrize("side", ["right", "left"])
def test_given_layers_are_as_good_as_computed_ones(cls, options, side, monkeypatch):
    model = stirred(make_model(cls, **options)).train()
    batch = batch_of(model, side=side, extra=1)
    targets = targets_of(model, batch)
    computed = model(**batch, **targets, output_hidden_states=True)
    computed.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    monkeypatch.setattr(model.elmo, "forward", None)  # called, it would raise
    layers = torch.stack(computed.hidden_states, 1)
    given = model(**batch, **targets, elmo_hidden_states=layers)
    given.loss.backward()
    torch.testing.assert_close(logits_of(given), logits_of(computed))
    torch.testing.assert_close(given.loss, computed.loss)
    assert len(gradients) == len(list(model.mixes())) * 2 + len(
        [name for name, _ in model.named_parameters() if not name.startswith("elmo.") and "_mix" not in name]
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, msg=name)


@every_head
def test_every_parameter_that_learns_gets_a_gradient(cls, options):
    for freeze in (True, False):
        model = stirred(make_model(cls, **options, freeze_bilm=freeze)).train()
        batch = batch_of(model)
        model(**batch, **targets_of(model, batch)).loss.backward()
        for name, parameter in model.named_parameters():
            learns = not (freeze and name.startswith("elmo."))
            assert parameter.requires_grad == learns, name
            assert (parameter.grad is not None and parameter.grad.any()) == learns, name


@every_head_on_elmo
def test_a_frozen_bilm_is_the_same_in_training(cls, options):
    model = make_model(cls, **options, dropout=0.5)
    batch = batch_of(model)
    still = model.eval()(**batch, output_hidden_states=True)
    moving = model.train()(**batch, output_hidden_states=True)
    assert all(map(torch.equal, still.hidden_states, moving.hidden_states))
    if cls is not ELMoForTokenClassification or options.get("head") == "linear":  # else logits are other things
        assert torch.equal(logits_of(still), logits_of(moving))
    loose = make_model(cls, **options, dropout=0.5, freeze_bilm=False).train()(**batch, output_hidden_states=True)
    assert not torch.equal(loose.hidden_states[-1], still.hidden_states[-1])
    assert model(**batch).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(**batch).hidden_states) == 3


@every_class
@pytest.mark.parametrize("freeze", [True, False])
def test_loading_keeps_frozen_what_was_to_be(cls, freeze, tmp_path):
    make_model(ELMoModel).save_pretrained(tmp_path)
    options = {"freeze_bilm": freeze, "freeze_word_embeddings": freeze}
    for folder, overrides in ((tmp_path, options), (tmp_path / "head", {})):
        model, info = cls.from_pretrained(folder, **overrides, output_loading_info=True)
        model.save_pretrained(tmp_path / "head")
        assert not info["mismatched_keys"]
        model.train()
        assert model.elmo.training is not freeze and model.token_features.training
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        elmo = {f"elmo.{name}" for name, _ in model.elmo.named_parameters()}
        assert frozen == (elmo | {"token_features.word_embeddings.weight"} if freeze else set())


# The same text, the same answer


@every_head
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_neighbours_change_nothing(cls, options, side):
    model = stirred(make_model(cls, **options), std=0.3)
    batch = batch_of(model, side=side, extra=2)
    with torch.no_grad():
        together = model(**batch)
        for row, real in enumerate(batch["attention_mask"].bool()):
            alone = model(**row_of(batch, row))
            logits = logits_of(together)[row]
            logits = logits if cls is ELMoForSequenceClassification else logits[real]
            torch.testing.assert_close(logits, logits_of(alone)[0], atol=1e-5, rtol=1e-5)
            if cls is ELMoForTokenClassification and together.predictions is not None:
                assert torch.equal(together.predictions[row][real], alone.predictions[0])
                assert (together.predictions[row][~real] == -100).all()


@pytest.mark.parametrize("network", ["bcn", "esim"])
def test_pairs_may_change_their_order(network):
    cls, options = NETWORKS[network]
    model = make_model(cls, **options, elmo_placement="both")
    batch = make_batch(model.config, PAIRS)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        logits = model(**batch).logits
        swapped = model(**{name: tensor[order] for name, tensor in batch.items()}).logits
    torch.testing.assert_close(swapped, logits[order], atol=1e-5, rtol=1e-5)
    assert logits.std(0).min() > 1e-3  # they do differ


def test_single_texts_and_pairs_in_one_batch():
    model = make_model(ELMoForSequenceClassification, elmo_placement="both")
    batch = make_batch(model.config, [3, (2, 2), 5, (1, 4)])
    with torch.no_grad():
        together = model(**batch).logits
        for row in range(4):
            alone = row_of(batch, row)
            torch.testing.assert_close(model(**alone).logits[0], together[row], atol=1e-5, rtol=1e-5)
            if not alone["token_type_ids"].any():
                del alone["token_type_ids"]
                torch.testing.assert_close(model(**alone).logits[0], together[row], atol=1e-5, rtol=1e-5)


# Losses of whole texts


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head[0] is ELMoForSequenceClassification])
@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_losses_are_those_of_torch(name, problem):
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
    torch.testing.assert_close(output.loss, loss(output.logits, targets) + penalty)
    assert model.config.problem_type == problem


# Saving and loading


@every_head
def test_saving_and_loading_keeps_every_value(cls, options, tmp_path):
    model = stirred(make_model(cls, **options))
    model.save_pretrained(tmp_path)
    again, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    batch = batch_of(model)
    assert torch.equal(logits_of(again(**batch)), logits_of(model(**batch)))


@every_head_on_elmo
def test_a_head_on_a_bilms_folder_is_initialised_as_a_new_one(cls, options, tmp_path):
    sizes = {"task_hidden_size": 20, "task_word_embedding_size": 16, "task_char_cnn_filters": [[3, 16]]}
    bilm = make_model(ELMoModel)
    bilm.save_pretrained(tmp_path)
    torch.full((1 << 20,), torch.nan)  # memory that is handed out again
    model, info = cls.from_pretrained(tmp_path, **options, **sizes, output_loading_info=True)
    new = make_model(cls, 1, **options, **sizes)
    own = {name for name, _ in model.named_parameters() if not name.startswith("elmo.")}
    assert info["missing_keys"] == own and not info["unexpected_keys"] and not list(model.buffers())
    for name, parameter in model.named_parameters():
        other = new.get_parameter(name)
        if name not in own:
            assert torch.equal(parameter, bilm.get_parameter(name.removeprefix("elmo."))), name
        elif other.unique().numel() <= 2:  # constants: biases, mixes
            assert torch.equal(parameter, other), name
        else:
            wide = parameter.numel() > 200
            assert 0.6 < parameter.std() / other.std() < 1.6 or not wide, name
            assert parameter.abs().max() < 2.5 * other.abs().max() and parameter.std() > 0, name
            assert not torch.equal(parameter, other), name


@every_class
def test_resizing_keeps_the_word_vectors_that_remain(cls, tmp_path):
    for size in (8, 20):
        model = make_model(cls, freeze_word_embeddings=True)
        table = model.token_features.word_embeddings.weight.detach().clone()
        others = {name: p.clone() for name, p in model.named_parameters() if "word_embeddings" not in name}
        model.resize_token_embeddings(size)
        resized = model.token_features.word_embeddings
        assert model.config.vocab_size == resized.num_embeddings == size and not resized.weight.requires_grad
        assert torch.equal(resized.weight[:12], table[:size])
        torch.testing.assert_close(resized.weight[12:], table.mean(0).expand(max(0, size - 12), 4))
        for name, parameter in others.items():
            assert torch.equal(model.get_parameter(name), parameter), name
        model.save_pretrained(tmp_path)
        batch = batch_of(model)
        assert torch.equal(logits_of(cls.from_pretrained(tmp_path)(**batch)), logits_of(model(**batch)))


# The reader of contexts


def plain_loss(model, output, targets):
    """Of each row the mean of two cross-entropies over the places where an answer may be, and the penalty."""
    losses = [
        -logits[target].item() + math.log(sum(math.exp(logit) for logit in logits.tolist() if logit > -1e30))
        for side, name in ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        for logits, target in zip(side, targets[name], strict=True)
    ]
    return sum(losses) / len(losses) + sum(
        model.config.scalar_mix_l2 * m.weights.square().sum().item() for m in model.mixes().values()
    )


@pytest.mark.parametrize("head", ["paper", "linear"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_answers_stand_at_words_of_the_context_or_at_the_first_token(head, side):
    model = stirred(make_model(ELMoForQuestionAnswering, head=head, scalar_mix_l2=0.2))
    batch = batch_of(model, side=side, extra=2)
    targets = targets_of(model, batch)
    with torch.no_grad():
        output = model(**batch, **targets)
    context = (batch["token_type_ids"] == 1) & (batch["input_ids"] >= 4)
    first = batch["attention_mask"].cumsum(1).eq(1) & batch["attention_mask"].bool()
    assert (first.sum(1) == 1).all() and (targets["start_positions"] != targets["end_positions"]).any()
    for logits in (output.start_logits, output.end_logits):
        assert torch.equal(logits > -1e30, context | first) and logits.isfinite().all()
        assert (logits.softmax(1)[~(context | first)] == 0).all()
    assert output.loss.item() == pytest.approx(plain_loss(model, output, targets), rel=1e-5)
    if head == "paper":  # that there is no answer has one score, not two
        assert torch.equal(output.start_logits[first], output.end_logits[first])


def test_a_question_changes_no_vector_of_the_context():
    model = stirred(make_model(ELMoForQuestionAnswering))
    first, second = (make_batch(model.config, [(words, 4)]) for words in (3, 5))
    for name, context in first.items():  # the same context after another question
        second[name][0, -6:] = context[0, -6:]
    layers = [model(**batch, output_hidden_states=True).hidden_states for batch in (first, second)]
    for one, other in zip(*layers, strict=True):
        torch.testing.assert_close(one[0, -6:], other[0, -6:], rtol=0, atol=1e-6)
    states = [read_by(model, model.reader.attention, batch) for batch in (first, second)]
    torch.testing.assert_close(states[0][0][0, -6:], states[1][0][0, -6:], rtol=0, atol=1e-6)
    logits = [model(**batch).start_logits[0, -5:-1] for batch in (first, second)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_readers_say_what_is_wrong():
    model = make_model(ELMoForQuestionAnswering)
    batch = make_batch(model.config, [(2, 3), (1, 2)])
    places = torch.tensor([5, 4])
    fails("Pass `start_positions` and `end_positions` together", model, **batch, start_positions=places)
    for wrong in (1, 3, 8):  # the question, a marker of it, the last marker
        positions = {"start_positions": torch.tensor([wrong, 4]), "end_positions": places}
        fails(
            f"`start_positions` is {wrong} in row 0, where no word of the context stands; pass",
            model,
            **batch,
            **positions,
        )
    outside = {"start_positions": places, "end_positions": torch.tensor([5, 9])}
    fails("`end_positions` holds ids from 5 to 9, but this model knows 0 to 8", model, **batch, **outside)
    column = {"start_positions": places[:, None], "end_positions": places}
    fails(r"`start_positions` has shape \(2, 1\); pass shape \(2\)", model, **batch, **column)
    types = batch.pop("token_type_ids")
    fails(r"pass the `token_type_ids` of tokenizer\(question, context\)", model, **batch)
    del batch["input_ids"]
    fails("This head has word vectors: pass `input_ids`", model, **batch, token_type_ids=types)
    bare = make_model(ELMoForQuestionAnswering, task_word_embedding_size=0, task_char_cnn_filters=[])
    fails("tells the markers by `input_ids`; pass them beside", bare, **batch, token_type_ids=types)


# Learning


def real_examples(task):
    """32 lines of a book with labels that no single word gives away.

    tags: chunks of words whose right neighbour is shorter, by whether they start with a capital; texts: arbitrary;
    pairs: whether the second is how the first goes on.
    """
    lines = [line.split() for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if len(line) >= 12][:32]
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", *sorted({word for line in lines for word in line[:9]})])
    if task == "tags":
        texts = [(line[:5],) for line in lines]
        labels = torch.tensor([[-100, *map(NAMES.index, chunk_tags(line[:6])), -100] for line in lines])
    else:
        labels = torch.randint(2, (32,), generator=torch.Generator().manual_seed(0))
        texts = [(line[:5],) for line in lines]
    if task == "pairs":
        ends = [lines[place if is_true else place - 1][6:9] for place, is_true in enumerate(labels.tolist())]
        texts = [(line[:6], end) for line, end in zip(lines, ends, strict=True)]
    batch = tokenizer(*zip(*texts, strict=True), is_split_into_words=True, padding=True, return_tensors="pt")
    return batch, labels, len(tokenizer)


def chunk_tags(words):
    """A tag for each word but the last."""
    kinds = [("XY"[word[0].isupper()] if len(after) < len(word) else "") for word, after in pairwise(words)]
    return [f"{'I' if kind == before else 'B'}-{kind}" if kind else "O" for before, kind in pairwise(["", *kinds])]


def learn(cls, task, steps, **options):
    """The trained model, what it says of its own training data, and what is right."""
    batch, labels, vocab_size = real_examples(task)
    names = dict(enumerate(NAMES if task == "tags" else ["no", "yes"]))
    sizes = {"task_hidden_size": 16, "task_word_embedding_size": 8, "vocab_size": vocab_size, "id2label": names}
    torch.manual_seed(0)
    config = ELMoConfig.from_preset("tiny", **{**sizes, "elmo_dropout": 0.0, "task_dropout": 0.0, **options})
    model = cls(config).train()
    with torch.no_grad():
        layers = torch.stack(model.elmo(**batch).hidden_states, 1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch, labels=labels, elmo_hidden_states=layers).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return model, model.eval()(**batch).logits.argmax(-1), labels


@pytest.mark.parametrize(
    "cls, task, steps, options",
    [
        (ELMoForTokenClassification, "tags", 90, {"task_hidden_size": 32, "task_num_layers": 1}),
        (ELMoForTokenClassification, "tags", 350, {"head": "linear", "scalar_mix_layer_norm": "token"}),
        (ELMoForSequenceClassification, "texts", 40, {"classifier": "bcn"}),
        (ELMoForSequenceClassification, "texts", 350, {"head": "linear"}),
        (ELMoForSequenceClassification, "pairs", 30, {"classifier": "bcn"}),
        (ELMoForSequenceClassification, "pairs", 20, {"classifier": "esim"}),
    ],
    ids=["tags-crf", "tags-linear", "texts-bcn", "texts-linear", "pairs-bcn", "pairs-esim"],
)
def test_heads_learn_real_examples_by_heart(cls, task, steps, options):
    if options.get("head") == "linear":
        options = {**options, "projection_size": 128}  # as many features as it takes to tell the examples apart
    _, found, labels = learn(cls, task, steps, **options)
    asked = labels != -100
    assert (found == labels)[asked].float().mean() == 1.0
    assert labels[asked].bincount().max() < 0.7 * asked.sum()  # one answer for all is no solution


def test_a_large_lambda_keeps_the_layer_weights_together():
    weights = {}
    for l2 in (1.0, 0.001):
        options = {"head": "linear", "projection_size": 128, "scalar_mix_l2": l2}
        model, *_ = learn(ELMoForTokenClassification, "tags", 60, **options)
        weights[l2] = model.input_mix.layer_weights()
    assert (weights[1.0] - 1 / 3).abs().max() < 0.05 and (weights[0.001] - 1 / 3).abs().max() > 0.15


# What is refused


def fails(message, model, *args, **kwargs):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        model(*args, **kwargs)


@every_head_on_elmo
def test_given_layers_must_fit(cls, options):
    model = make_model(cls, **options)
    batch = batch_of(model)
    shape = model(**batch, output_hidden_states=True).hidden_states[0].shape
    layers = torch.zeros(shape[0], 3, *shape[1:])
    rows, time = shape[:2]
    expected = rf"pass shape \({rows}, 3, {time}, 14\)"
    for wrong in (layers[:, :2], layers[:, :, 1:], layers[..., 1:], layers[1:], layers[:, 0]):
        received = re.escape(str(tuple(wrong.shape)))
        fails(f"`elmo_hidden_states` has shape {received}; {expected}", model, **batch, elmo_hidden_states=wrong)
    model = make_model(cls, **options, freeze_bilm=False)
    fails(
        "are a frozen biLM's, but use_elmo=True and freeze_bilm=False; leave them out, or set both",
        model,
        **batch,
        elmo_hidden_states=layers,
    )
    if options.get("head") != "linear" and options.get("classifier") != "linear":
        model = make_model(cls, **{**options, "use_elmo": False})
        fails("but use_elmo=False and freeze_bilm=True", model, **batch, elmo_hidden_states=layers)


def test_taggers_say_what_they_lack():
    model = make_model(ELMoForTokenClassification)
    batch = make_batch(model.config)
    words = batch["input_ids"]
    nameless = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
    fails("This head has word vectors: pass `input_ids` beside `character_ids`", model, **nameless)
    fails(
        "`input_ids` holds ids from 12 to 12, but this model knows 0 to 11",
        model,
        **{**batch, "input_ids": words * 0 + 12},
    )
    fails(
        "`labels` holds ids from 5 to 5, but this model knows 0 to 4.*num_labels", model, **batch, labels=words * 0 + 5
    )
    fails(r"`labels` has shape \(4, 2\); pass shape \(4, 6\)", model, **batch, labels=words[:, :2])
    vectors = torch.zeros(*words.shape, 7)
    fails("`inputs_embeds` are the biLM's; this head reads words of its own too", model, inputs_embeds=vectors)
    bare = make_model(ELMoForTokenClassification, task_word_embedding_size=0, task_char_cnn_filters=[])
    fails("runs over words and tells the markers by `input_ids`; pass them beside", bare, **nameless)
    assert (bare(inputs_embeds=vectors).predictions >= 0).all()  # which hold no markers
    linear = make_model(ELMoForTokenClassification, head="linear")
    torch.testing.assert_close(linear(**nameless).logits, linear(**batch).logits)
    assert linear(inputs_embeds=vectors).logits.shape == (*words.shape, 5)


def test_classifiers_say_what_they_lack():
    model = make_model(ELMoForSequenceClassification, classifier="esim")
    batch = make_batch(model.config, [(2, 3), 4, (1, 2)])
    advice = "Pass pairs, as .*`token_type_ids`, or use classifier='bcn'"
    fails(f"ESIM compares two texts, but row 1 holds one. {advice}", model, **batch)
    del batch["token_type_ids"]
    fails(f"but row 0 holds one. {advice}", model, **batch)
    vectors = torch.zeros(*batch["input_ids"].shape, 7)
    fails("this head reads words of its own too", model, inputs_embeds=vectors)
    del batch["input_ids"]
    fails("This head has word vectors: pass `input_ids`", model, **batch)


def test_classifiers_say_what_they_cannot_read():
    model = make_model(ELMoForSequenceClassification, num_labels=3)
    inputs = make_batch(model.config, PAIRS)
    wrong = inputs["token_type_ids"].clone()
    wrong[0, 1] = 2
    with pytest.raises(ValueError, match="`token_type_ids` hold values from 0 to 2; pass 0 at the first text"):
        model(**{**inputs, "token_type_ids": wrong})
    with pytest.raises(ValueError, match="`labels` holds ids from -1 to 2.*leave out what has no label"):
        model(**inputs, labels=torch.tensor([-1, 0, 1, 2]))
    baseline = make_model(ELMoForSequenceClassification, use_elmo=False)
    characters = inputs["character_ids"].clone()
    characters[0, 1, 1] = 30
    with pytest.raises(ValueError, match="`character_ids` holds ids from .* to 30, but this model knows 0 to 29"):
        baseline(**{**inputs, "character_ids": characters})


def test_a_text_of_type_1_is_a_single_text():
    model = make_model(ELMoForSequenceClassification)
    inputs = make_batch(model.config, WORDS)
    expected = model(**inputs).logits
    ones = torch.ones_like(inputs["input_ids"])
    torch.testing.assert_close(model(**{**inputs, "token_type_ids": ones}).logits, expected)


def test_batches_without_rows_or_words():
    for options in ({}, {"classifier": "esim"}, {"head": "linear", "task_word_embedding_size": 0}):
        model = make_model(ELMoForSequenceClassification, **options)
        inputs = {name: rows[:0] for name, rows in make_batch(model.config, PAIRS).items()}
        assert model(**inputs).logits.shape == (0, len(NAMES))
    single = make_model(ELMoForSequenceClassification)
    inputs = {name: rows[:, :0] for name, rows in make_batch(single.config, WORDS).items()}
    assert single(**inputs).logits.isfinite().all()


def test_names_of_labels_that_are_not_there():
    model = make_model(ELMoForTokenClassification)
    model.config.id2label = {str(number): name for number, name in enumerate(NAMES)}
    with pytest.raises(ValueError, match="`config.id2label` is .*pass a name for each id from 0 to 4"):
        model(**make_batch(model.config, WORDS))


def test_a_linear_head_needs_elmo_at_its_input():
    for placement in ({"use_elmo": False}, {"elmo_placement": "output"}, {"elmo_placement": "both"}):
        fails(
            "A linear head is a layer on ELMo, at its input; pass head='paper', classifier='bcn'",
            make_model,
            ELMoForSequenceClassification,
            classifier="linear",
            **placement,
        )
        assert make_model(ELMoForTokenClassification, classifier="linear", **placement).crf is not None
    config = make_config(head="linear")
    config.use_elmo = False
    fails("The linear head is a layer on ELMo, at its input; got use_elmo=False", ELMoForTokenClassification, config)
