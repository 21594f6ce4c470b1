"""The head for semantic roles: losses, marks of predicates, shared passes of the biLM, classes and folders, errors."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from head_models import NAMES, fails, make_batch, make_config, make_model, marked, read_by, stirred, targets_of
from torch.testing import assert_close
from transformers import AutoModelForTokenClassification

from modeling_elmo import (
    ELMoConfig,
    ELMoForSemanticRoleLabeling,
    ELMoForTokenClassification,
    ELMoModel,
)
from modeling_elmo.heads.crf import decode_labels

every_kind = pytest.mark.parametrize("options", [{"task_num_layers": 3}, {"head": "linear"}], ids=["paper", "linear"])
ROLES = "modeling_elmo.ELMoForSemanticRoleLabeling"


def make_roles(**options):
    return stirred(make_model(ELMoForSemanticRoleLabeling, **{"task_num_layers": 3, **options}))


# The loss


@every_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_is_the_sum_of_two_means_and_the_penalty(options, side):
    model = make_roles(**options, scalar_mix_l2=0.3)
    batch = marked(make_batch(model.config, side=side, extra=1))
    targets = targets_of(model, batch)
    targets["labels"][0, -3:] = -100
    targets["predicate_labels"][3] = -100
    output = model.train()(**batch, **targets)
    known = targets["labels"] != -100
    roles = F.nll_loss(output.logits[known], targets["labels"][known])
    assert_close(output.logits.exp().sum(-1), torch.ones(known.shape))
    known = targets["predicate_labels"] != -100
    chances = output.predicate_logits[known].sigmoid()
    predicates = F.binary_cross_entropy(chances, targets["predicate_labels"][known].float())
    penalty = 0.3 * model.input_mix.weights.square().sum()
    assert_close(output.loss, roles + predicates + penalty)
    for name, part in (("labels", roles), ("predicate_labels", predicates)):
        assert_close(model(**batch, **{name: targets[name]}).loss, part + penalty)
    assert model(**batch).loss is None


def test_batches_of_a_run_share_its_number_of_labels():
    model = make_roles(scalar_mix_l2=0.5)
    batch = marked(make_batch(model.config, [6, 2, 4, 1]))
    targets = targets_of(model, batch)
    whole = model(**batch, **targets).loss
    parts = ({name: tensor[rows] for name, tensor in (batch | targets).items()} for rows in (slice(1), slice(1, 4)))
    assert_close(sum(model(**part, num_items_in_batch=13).loss for part in parts), whole)


@every_kind
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_without_known_labels_only_the_penalty_remains(options, count):
    model = make_roles(**options, scalar_mix_l2=0.5)
    batch = marked(make_batch(model.config))
    unknown = torch.full_like(batch["input_ids"], -100)
    loss = model(**batch, labels=unknown, predicate_labels=unknown, num_items_in_batch=count).loss
    assert_close(loss, model.penalty())
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "mix.weights" not in name:
            assert not parameter.grad.any(), name  # NaN would be true


# Marks, predicates and predictions


@pytest.mark.parametrize(
    "options", [{}, {"head": "linear"}, {"elmo_placement": "output"}], ids=["paper", "linear", "output"]
)
@pytest.mark.parametrize("freeze", [True, False])
def test_the_bilm_and_the_search_for_predicates_read_no_marks(options, freeze):
    model = make_roles(**options, freeze_bilm=freeze)
    batch = make_batch(model.config, [4, 5, 3])
    rows = [
        model(**inputs, output_hidden_states=True)
        for inputs in (batch, marked(batch), {**batch, "token_type_ids": marked(batch)["token_type_ids"].roll(1, 1)})
    ]
    texts = model.elmo(**batch).hidden_states
    for output in rows:
        assert all(map(torch.equal, output.hidden_states, texts))
        assert_close(output.predicate_logits, rows[0].predicate_logits)
    words = batch["input_ids"] >= 4
    assert (rows[0].logits - rows[1].logits)[words].abs().max() > 1e-3
    assert (rows[2].logits - rows[1].logits)[words].abs().max() > 1e-3


def test_the_network_reads_a_vector_of_the_mark():
    model = make_roles()
    batch = marked(make_batch(model.config))
    tokens, texts = read_by(model, model.encoder, batch)
    marks = batch["token_type_ids"][batch["attention_mask"].bool()]
    assert torch.equal(tokens[:, model.input_size :], model.mark_embedding.weight[texts.pack(marks)])
    assert torch.equal(tokens[:, : model.input_size], read_by(model, model.predicate_encoder, batch)[0])
    assert model.mark_embedding.weight.shape == (2, 100) and len(tokens) == len(marks)


@pytest.mark.parametrize("place", ["output", "both"])
def test_elmo_at_the_output_joins_both_outputs(place):
    model = make_roles(elmo_placement=place)
    batch = marked(make_batch(model.config))
    (roles,), (predicates,) = (read_by(model, part, batch) for part in (model.classifier, model.predicate_classifier))
    assert torch.equal(roles[..., 5:], predicates[..., 2:]) and roles.shape[-1] == 5 + 14


@every_kind
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_predictions_are_the_best_bio_sequence_of_the_words(options, side, dtype):
    model = make_roles(**options).to(dtype)
    batch = marked(make_batch(model.config, [4, 0, 1, 3, 6, 6, 6, 6], side=side))
    words = batch["input_ids"] >= 4
    output = model(**batch)
    assert torch.equal(output.predictions == -100, ~words)
    assert torch.equal(output.predicate_logits <= -1e4, ~words) and output.predicate_logits.sigmoid()[~words].sum() == 0
    assert output.logits.isfinite().all() and output.predicate_logits.isfinite().all()
    for row, real in enumerate(words):
        alone = decode_labels(output.logits[row, real][None], real[real][None], tuple(NAMES))
        assert torch.equal(output.predictions[row, real], alone[0])
    assert (output.logits.argmax(-1) != output.predictions)[words].any()  # the constraints forbid some
    assert model.train()(**batch).predictions is None


# One pass of the biLM for all predicates of a text


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("words", [{}, {"word_embedding_size": 3}, {"char_vocab_size": 0, "word_embedding_size": 7}])
def test_equal_rows_are_computed_once(words, side):
    """The vectors are exactly those of a batch with each text once. A biLM that learns reads every row."""
    model = make_roles(**words).train()
    texts = make_batch(make_config(), [5, 2, 4, 4], side=side)
    texts["input_ids"][3], texts["character_ids"][3] = texts["input_ids"][2], texts["character_ids"][2]
    texts["attention_mask"][3, 3] = 0  # the last two differ only in their masks
    if words.get("char_vocab_size") == 0:
        del texts["character_ids"]
    rows = [0, 1, 2, 0, 2, 3, 0, 2]
    batch = {name: tensor[rows] for name, tensor in texts.items()}
    predicates = (batch["input_ids"] >= 4).byte().argmax(1) + torch.tensor([0, 0, 0, 1, 1, 0, 2, 2])
    batch["token_type_ids"] = F.one_hot(predicates, batch["input_ids"].shape[1])
    expected = model.elmo(**texts).hidden_states
    with patch.object(model.elmo, "forward", wraps=model.elmo.forward) as read:
        output = model(**batch, output_hidden_states=True)
        assert read.call_count == 1 and torch.equal(read.call_args.args[1], texts["input_ids"])
        model.elmo.frozen = False
        model(**batch)
        assert torch.equal(read.call_args.args[1], batch["input_ids"])
    for found, text in zip(output.hidden_states, expected, strict=True):
        assert torch.equal(found, text[rows])


# Classes, folders, defaults


def test_the_sizes_of_the_paper():
    config = ELMoConfig.from_preset("tiny", id2label=dict(enumerate(NAMES)))
    model = ELMoForSemanticRoleLabeling(config)
    assert len(model.encoder.layers) == 8 and model.encoder.output_size == 300
    assert {layer.dropout for layer in model.encoder.layers} == {0.1} and model.feature_dropout.rate == 0.1
    assert model.predicate_encoder.output_size == 2 * 100 and list(model.mixes()) == ["input"]
    assert model.encoder.layers[0].input_linear.in_features == 32 + 128 + 100


def test_a_folder_names_its_class_for_token_classification(tmp_path):
    """Through the package; `test_remote_code.py` tests the folder's own code."""
    make_roles().save_pretrained(tmp_path)
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        model = AutoModelForTokenClassification.from_pretrained(tmp_path, **options)
        assert type(model) is ELMoForSemanticRoleLabeling
    model.save_pretrained(tmp_path)
    config = ELMoConfig.from_pretrained(tmp_path)
    assert config.auto_map["AutoModelForTokenClassification"] == ROLES
    config.auto_map["AutoModelForTokenClassification"] = f"someone/elmo--{ROLES}"
    for cls in (ELMoForTokenClassification, ELMoModel):  # another class on its folder does not keep the name
        model = cls.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
        model.save_pretrained(tmp_path / "other")
        assert ELMoConfig.from_pretrained(tmp_path / "other").auto_map == ELMoConfig().auto_map_of_folder()
        assert type(AutoModelForTokenClassification.from_pretrained(tmp_path / "other")) is ELMoForTokenClassification


# Errors


def changed(tensor, row, position, value):
    tensor = tensor.clone()
    tensor[row, position] = value
    return tensor


def test_inputs_that_are_refused():
    model = make_roles(head="linear")
    batch = marked(make_batch(model.config, [4, 0, 3]))
    batch |= targets_of(model, batch)
    types, roles, predicates = batch["token_type_ids"], batch["labels"], batch["predicate_labels"]
    fails("`labels` .*no predicate: row 0, position 1", model, **batch | {"token_type_ids": None})
    unmarked = changed(types, 2, slice(None), 0)
    fails("`labels` .*no predicate: row 2, position 1", model, **batch | {"token_type_ids": unmarked})
    unlabeled = {"token_type_ids": unmarked, "labels": changed(roles, 2, slice(None), -100)}
    assert model(**batch | unlabeled).loss.isfinite()
    for name, value, shown in (
        ("token_type_ids", changed(types, 2, 3, 1), "a second predicate: row 2, position 3"),
        ("token_type_ids", changed(types, 0, 3, 2), "other than 0 and 1: row 0, position 3"),
        ("token_type_ids", changed(types, 1, 0, 1), "where there is no word: row 1, position 0"),
        ("token_type_ids", types[:, :2], r"shape \(3, 2\); pass shape \(3, 6\)"),
        ("token_type_ids", types.float(), "dtype torch.float32"),
        ("labels", roles[:, :2], r"shape \(3, 2\); pass shape \(3, 6\)"),
        ("labels", changed(roles, 2, 5, 0), "where there is no word: row 2, position 5"),
        ("labels", roles.to(torch.uint8), "ids from . to 156, .*0 to 4"),  # -100 becomes 156
        ("predicate_labels", changed(predicates, 2, 2, 2), "other than 0, 1, -100: row 2, position 2"),
    ):
        fails(f"`{name}` .*{shown}", model, **batch | {name: value})
    nameless = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
    fails("<S> and </S> .*pass them", model, **nameless)
    assert (model(inputs_embeds=torch.randn(2, 4, 7)).predictions >= 0).all()  # all positions are words
    for names, shown in ((["LABEL_0", "LABEL_1"], "LABEL_0"), ([*NAMES[:4], "NOUN"], "'NOUN' is not BIO")):
        fails(shown, make_model, ELMoForSemanticRoleLabeling, id2label=dict(enumerate(names)))
        model.config.id2label = dict(enumerate(names))
        fails(shown, model, **make_batch(make_config()))


@every_kind
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_batches_without_rows_or_words(options, shape):
    model = make_roles(**options)
    batch = {name: tensor[: shape[0], : shape[1]] for name, tensor in marked(make_batch(model.config)).items()}
    batch["token_type_ids"] = torch.zeros_like(batch["token_type_ids"])
    labels = torch.full_like(batch["input_ids"], -100)
    output = model(**batch, labels=labels, predicate_labels=labels)
    assert output.predictions.shape == output.predicate_logits.shape == shape and output.loss == 0
