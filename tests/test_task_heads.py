"""All task heads: inputs of their networks, frozen biLMs, padding, saving, loading, learning, errors.

Each head is compared with its mixes in loops, with given layers, with each row alone, and with what was saved.
"""

import json
import re

import pytest
import torch
from head_models import (
    HEADS,
    NAMES,
    PLACEMENTS,
    SPANS,
    aligned,
    batch_of,
    check_weights_on_disk,
    every_class,
    every_head,
    every_head_on_elmo,
    every_paper_network,
    fails,
    logits_of,
    make_batch,
    make_config,
    make_model,
    make_network,
    make_network_inputs,
    mixed,
    read_by,
    row_of,
    run_network,
    stirred,
    targets_of,
    text_of,
)
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from modeling_elmo import (
    ELMoConfig,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
)
from modeling_elmo.heads import task_model
from modeling_elmo.heads.classifier import BiattentiveClassifier, ESIMClassifier
from modeling_elmo.heads.reader import SpanReader
from modeling_elmo.heads.recurrence import VariationalDropout
from modeling_elmo.inputs import pad

# Inputs of the networks


def network_inputs(model, batch):
    """The input of a head's network, and the ELMo vectors for its output."""
    mask = batch["attention_mask"].bool()
    if isinstance(model, (ELMoForTokenClassification, ELMoForSemanticRoleLabeling)):
        (tokens, texts, *_), (output,) = read_by(model, model.encoder, batch), read_by(model, model.classifier, batch)
        tokens, output = (
            texts.unpack(tokens, len(tokens))[:, : model.input_size],
            output[:, model.encoder.output_size :],
        )
        output = texts.unpack(output, len(output)) if isinstance(model, ELMoForTokenClassification) else output
    else:
        network = model.reader if isinstance(model, ELMoForQuestionAnswering) else model.classifier
        tokens, *_, output = read_by(model, network, batch)
    return pad(tokens, mask), None if output is None else pad(output, mask)


@every_paper_network
@pytest.mark.parametrize("place", ["input", "output", "both"])
def test_networks_read_word_vectors_and_elmo(cls, options, place):
    """`[x_k; ELMo_k]` (section 3.3), and ELMo at the output with a mix of its own (section 5.2)."""
    model = stirred(make_model(cls, **options, **PLACEMENTS[place]))
    batch = batch_of(model, side="left")
    tokens, output = network_inputs(model, batch)
    layers, mask = model.elmo(**text_of(model, batch)).hidden_states, batch["attention_mask"].bool()
    expected = [pad(model.token_features(batch["character_ids"], batch["input_ids"], mask), mask)]
    if place != "output":
        expected.append(mixed(layers, model.input_mix))
    assert_close(tokens, torch.cat(expected, -1))
    assert tokens.shape[-1] == 4 + 5 + 14 * (place != "output")
    if place == "input":
        assert model.output_mix is None and (output is None or not output.numel())
    else:
        assert_close(output, mixed(layers, model.output_mix))
    assert list(model.mixes()) == [*["input"] * (place != "output"), *["output"] * (place != "input")]
    if place == "both":
        assert not torch.equal(model.input_mix.weights, model.output_mix.weights)


@every_paper_network
@pytest.mark.parametrize("rates", [{"elmo_dropout": 0.5}, {"task_dropout": 0.5}], ids=["elmo", "task"])
def test_elmo_and_word_vectors_have_separate_dropout(cls, options, rates):
    words_alone = {"task_word_embedding_size": 32, "task_char_cnn_filters": []}  # features that are never 0
    model = stirred(make_model(cls, **{**options, "elmo_placement": "both", **words_alone, **rates}))
    batch = batch_of(model)

    def parts():
        """Those that keep all values, and those that drop some."""
        tokens, output = network_inputs(model, batch)
        words, elmo = tokens[..., :32], torch.cat([tokens[..., 32:], output], -1)
        return (words, elmo) if "elmo_dropout" in rates else (elmo, words)

    kept, whole = parts()
    model.train()
    still_kept, dropped = parts()
    assert torch.equal(still_kept, kept)
    is_zero = (dropped == 0) & (whole != 0)
    assert_close(dropped[~is_zero], 2 * whole[~is_zero])
    chosen = is_zero[0, : batch["attention_mask"][0].sum()]
    steady = (chosen == chosen[0]).all(0)  # the same mask for all words of a row
    assert steady.all() if "task_dropout" in rates else not steady.all()
    assert 0.2 < chosen.float().mean() < 0.8


@every_paper_network
def test_a_baseline_has_no_bilm(cls, options):
    model = make_model(cls, **options, use_elmo=False)
    batch = batch_of(model)
    expected = model(**batch)
    assert not [name for name, _ in model.named_parameters() if "elmo" in name or "mix" in name]
    assert not model.mixes() and expected.hidden_states is None
    bilm = {"projection_size": 3, "num_hidden_layers": 1, "char_cnn_filters": [[1, 2]]}
    other = make_model(cls, 1, **options, **bilm, use_elmo=False)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(other(**batch)), logits_of(expected))


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
        assert_close(model(input_ids=words).logits, alone)
        bare = make_model(cls, **options, task_word_embedding_size=0)
        assert bare.token_features is None and bare(input_ids=words).logits.isfinite().all()


# Precomputed layers, and the frozen biLM


@every_head_on_elmo
@pytest.mark.parametrize("side", ["right", "left"])
def test_given_layers_equal_computed_layers(cls, options, side, monkeypatch):
    model = stirred(make_model(cls, **options)).train()
    batch = batch_of(model, side=side, extra=1)
    targets = targets_of(model, batch)
    computed = model(**batch, **targets, output_hidden_states=True)
    computed.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    monkeypatch.setattr(model.elmo, "forward", None)  # calling it raises an error
    layers = torch.stack(computed.hidden_states, 1)
    given = model(**batch, **targets, elmo_hidden_states=layers)
    given.loss.backward()
    assert_close(logits_of(given), logits_of(computed))
    assert_close(given.loss, computed.loss)
    for name, gradient in gradients.items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name)


@every_head
def test_every_parameter_that_learns_gets_a_gradient(cls, options):
    """Whatever labels and words a batch has: DistributedDataParallel waits for the gradient of each parameter."""
    for freeze in (False, True):
        model = stirred(make_model(cls, **options, freeze_bilm=freeze)).train()
        batch = batch_of(model)
        targets = targets_of(model, batch)
        model(**batch, **targets).loss.backward()
        for name, parameter in model.named_parameters():
            learns = not (freeze and name.startswith("elmo."))
            assert parameter.requires_grad == learns, name
            assert (parameter.grad is not None and parameter.grad.any()) == learns, name
    padding = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}
    unknown = {name: torch.full_like(tensor, -100) for name, tensor in targets.items()}
    single = [batch | {name: targets[name]} for name in targets if "positions" not in name]
    for given in (padding | unknown, *single):
        model.zero_grad()
        model(**given).loss.backward()
        learned = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert not [name for name, grad in learned.items() if grad is None or not grad.isfinite().all()]


@pytest.mark.parametrize("name", [name for name in HEADS if name.endswith(("-both", "-between", "-linear"))])
def test_weights_on_disk(name, tmp_path):
    cls, options = HEADS[name]
    model = aligned(stirred(make_model(cls, **options, scalar_mix_l2=0.1)))
    batch = batch_of(model)
    batch |= targets_of(model, batch)

    def call(each):
        return [dict(each(**batch)), {place: mix.layer_weights() for place, mix in each.mixes().items()}]

    check_weights_on_disk(model, call, tmp_path)


@pytest.mark.parametrize("options", [{}, {"task_word_embedding_size": 0}])
@pytest.mark.parametrize("is_baseline", [False, True])
@every_class
def test_vectors_may_be_replaced(cls, options, is_baseline):
    model = make_model(cls, **options, use_elmo=not is_baseline, freeze_word_embeddings=True)
    batch, old = batch_of(model), model.get_input_embeddings()
    before, new = logits_of(model(**batch)), torch.nn.Embedding(*old.weight.shape)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new and not torch.equal(logits_of(model(**batch)), before)
    is_frozen = not is_baseline or new is model.token_features.word_embeddings
    assert new.weight.requires_grad != is_frozen


@pytest.mark.parametrize(
    ("cls", "options", "lost"),
    [
        (ELMoForTokenClassification, {}, "CRF"),
        (ELMoForTokenClassification, {"head": "linear", "scalar_mix_l2": 0.1}, "scalar_mix_l2"),
        (ELMoForTokenClassification, {"head": "linear"}, None),
        (ELMoForSequenceClassification, {"problem_type": "multi_label_classification"}, None),
        (ELMoForSequenceClassification, {"num_labels": 1}, None),
        (ELMoForSequenceClassification, {"num_labels": 1, "scalar_mix_l2": 0.1}, "scalar_mix_l2"),
        (ELMoForSemanticRoleLabeling, {}, "roles"),
    ],
)
def test_training_without_labels_is_told_once_per_model(cls, options, lost, warnings_of_transformers):
    """If only its own loss trains a part of the model: without Trainer, another loss of `logits` may be meant."""
    for number in range(2):
        model = make_model(cls, **options)
        batch = batch_of(model)
        with torch.no_grad():
            model.train()(**batch)
        model.eval()(**batch)
        assert len(warnings_of_transformers.messages) == number * bool(lost)
        for _ in range(2):
            model.train()(**batch)
        assert len(warnings_of_transformers.messages) == (number + 1) * bool(lost)
    for message in warnings_of_transformers.messages:
        assert lost in message and "Trainer" not in message
        assert "Pass them, unless you mean to train with another loss of `logits`." in message


def test_replicas_tell_what_their_model_tells(warnings_of_transformers):
    """`nn.DataParallel` makes new ones in every step."""
    model = make_model(ELMoForTokenClassification).train()
    for replica in (model._replicate_for_data_parallel(), model._replicate_for_data_parallel()):
        replica._warn_without_labels("the CRF")
    assert len(warnings_of_transformers.messages) == 1


@every_head_on_elmo
def test_a_frozen_bilm_is_the_same_in_training(cls, options):
    model = make_model(cls, **options, dropout=0.5)
    batch = batch_of(model)
    still = model.eval()(**batch, output_hidden_states=True)
    moving = model.train()(**batch, output_hidden_states=True)
    assert all(map(torch.equal, still.hidden_states, moving.hidden_states))
    loose = make_model(cls, **options, dropout=0.5, freeze_bilm=False).train()(**batch, output_hidden_states=True)
    assert not torch.equal(loose.hidden_states[-1], still.hidden_states[-1])
    assert model(**batch).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(**batch).hidden_states) == 3


@every_class
@pytest.mark.parametrize("freeze", [True, False])
def test_loading_freezes_as_configured(cls, freeze, tmp_path):
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


@every_head
def test_special_words_with_one_id_are_refused_by_heads_that_leave_out_markers(cls, options):
    """Others ignore the ids, and all ignore `tie_word_embeddings`: tools for all models set both."""
    model = make_model(cls, **options)
    same = make_model(cls, **options, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True)
    batch = batch_of(model)
    if isinstance(model, ELMoForSequenceClassification) or getattr(model, "crf", "a CRF") is None:
        assert torch.equal(logits_of(same(**batch)), logits_of(model(**batch)))
    else:
        fails("'bos_token_id': 0, 'eos_token_id': 0, .*; pass different ids, those of the tokenizer", same, **batch)


# The same text, the same answer


@every_head
@pytest.mark.parametrize("side, number", [("right", 0), ("left", 4)])
def test_padding_and_neighbors_change_nothing(cls, options, side, number):
    """One of the neighbors is a row of padding."""
    model = stirred(make_model(cls, **options), std=0.3)
    batch = batch_of(model, side=side, extra=2)
    targets = targets_of(model, batch)

    def filled(tensor, value=0):
        return torch.cat([tensor[:number], torch.full_like(tensor[:1], value), tensor[number:]])

    padded = {name: filled(tensor) for name, tensor in batch.items()}
    together = model(**padded, **{name: filled(tensor, -100) for name, tensor in targets.items()})
    assert logits_of(together).isfinite().all()
    if not isinstance(getattr(model, "crf", None), torch.nn.Module):  # a CRF's loss is a mean over all rows
        assert_close(together.loss, model(**batch, **targets).loss)
    together.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    for row in {*range(5)} - {number}:
        alone, real = model(**row_of(padded, row)), padded["attention_mask"][row].bool()
        logits = logits_of(together)[row]
        logits = logits if cls is ELMoForSequenceClassification else logits[real]
        assert_close(logits, logits_of(alone)[0], atol=1e-5, rtol=1e-5)
        if "predictions" in together:
            assert torch.equal(together.predictions[row][real], alone.predictions[0])
            assert (together.predictions[row][~real] == -100).all()


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
    assert torch.equal(logits_of(aligned(again)(**batch)), logits_of(model(**batch)))


@every_head_on_elmo
def test_a_head_on_a_bilms_folder_is_initialized_as_a_new_one(cls, options, tmp_path):
    sizes = {"task_hidden_size": 20, "task_word_embedding_size": 16, "task_char_cnn_filters": [[3, 16]]}
    bilm = make_model(ELMoModel)
    bilm.save_pretrained(tmp_path)
    torch.full((1 << 20,), torch.nan)  # memory that will be reused
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
    for size, use_elmo in ((8, True), (20, False)):
        model = make_model(cls, freeze_word_embeddings=True, use_elmo=use_elmo)
        table = model.token_features.word_embeddings.weight.detach().clone()
        model.resize_token_embeddings(size)
        resized = model.token_features.word_embeddings
        assert model.config.vocab_size == resized.num_embeddings == size and not resized.weight.requires_grad
        assert torch.equal(resized.weight[:12], table[:size])
        assert_close(resized.weight[12:], table.mean(0).expand(max(0, size - 12), 4))
        model.save_pretrained(tmp_path)
        batch = batch_of(model)
        again = aligned(cls.from_pretrained(tmp_path))
        assert torch.equal(logits_of(again(**batch)), logits_of(aligned(model)(**batch)))


# Errors


@every_class
def test_given_layers_must_fit(cls):
    model = make_model(cls)
    batch = batch_of(model)
    rows, time = batch["input_ids"].shape
    layers = torch.zeros(rows, 3, time, 14)
    for wrong in (layers[:, :2], layers[:, :, 1:], layers[1:], layers[:, 0]):
        message = f"`elmo_hidden_states` has shape {tuple(wrong.shape)}; pass shape {(rows, 3, time, 14)}"
        fails(re.escape(message), model, **batch, elmo_hidden_states=wrong)
    fails("`elmo_hidden_states` has dtype torch.int64", model, **batch, elmo_hidden_states=layers.long())
    for options in ({"freeze_bilm": False}, {"use_elmo": False}):
        fails("need a frozen biLM", make_model(cls, **options), **batch, elmo_hidden_states=layers)


@every_head
def test_labels_are_integers_that_fit(cls, options):
    model = make_model(cls, **options)
    batch = batch_of(model)
    targets = targets_of(model, batch)
    expected = model(**batch, **targets).loss
    for dtype in (torch.int8, torch.int32):
        assert torch.equal(model(**batch, **{name: ids.to(dtype) for name, ids in targets.items()}).loss, expected)
    for name, ids in targets.items():
        fails(f"`{name}` has dtype torch.bool", model, **batch, **{**targets, name: ids.bool()})
        fails(f"`{name}` has shape .*; pass shape", model, **batch, **{**targets, name: ids[:2]})
        fails(f"`{name}` ", model, **batch, **{**targets, name: ids + 99})


LINEAR_HEADS = [HEADS[name] for name in HEADS if name.endswith("linear")]
PLACES = [
    (ELMoForTokenClassification, {}, "input"),
    (ELMoForSequenceClassification, {}, "input"),
    (ELMoForSequenceClassification, {"classifier": "esim"}, "input"),
    (ELMoForQuestionAnswering, {}, "both"),
    (ELMoForSemanticRoleLabeling, {}, "input"),
    *((cls, options, "input") for cls, options in LINEAR_HEADS),
    *((ELMoForQuestionAnswering, PLACEMENTS[place], place) for place in ("input", "output", "both")),
    (ELMoForTokenClassification, PLACEMENTS["both"], "both"),
]


@pytest.mark.parametrize("cls, options, expected", PLACES)
def test_each_class_has_a_default_placement(cls, options, expected, tmp_path):
    """A named placement wins. Otherwise the folder keeps `None`, so that another head on it has its own default."""
    model = make_model(cls, **options)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["elmo_placement"]
    assert saved == model.config.elmo_placement == options.get("elmo_placement")
    for each in (model, cls.from_pretrained(tmp_path)):
        assert cls.resolve_elmo_placement(each.config) == expected
        assert list(each.mixes()) == (["input", "output"] if expected == "both" else [expected])
    if (cls, options) in LINEAR_HEADS:
        for used, placement in ((False, None), (True, "both")):
            config = make_config(**options, use_elmo=used, elmo_placement=placement)
            fails(f"use_elmo={used} and elmo_placement={placement!r}", cls.resolve_elmo_placement, config)


def test_torch_compile_compiles_a_linear_head_once():
    """Later shapes need no other graph, because the biLM in it is not compiled."""
    graphs, counts = [], []
    model = ELMoForTokenClassification(ELMoConfig.from_preset("tiny", head="linear", num_labels=7)).eval()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=True)
    for shape in ((2, 3), (4, 9), (3, 2), (6, 5)):
        characters = torch.randint(1, 262, (*shape, 50))
        with torch.no_grad():
            assert_close(compiled(character_ids=characters).logits, model(character_ids=characters).logits)
        counts.append(len(graphs))
    assert counts[0] > 0 and set(counts) == {counts[0]}


@every_head
def test_rows_that_are_too_long(cls, options, monkeypatch):
    model = make_model(cls, **options)
    batch = batch_of(model)
    length = batch["attention_mask"].shape[1]
    monkeypatch.setattr(task_model, "LONGEST_ROW", length - 1)
    fails(f"row has {length} tokens. Heads read up to {length - 1}: split it", model, **batch)


# Networks without their models

# Of pooled vectors; of sequences: a reader's are question and context, the inputs of three biGRUs, self-attention.
DROPOUTS = {BiattentiveClassifier: (3, 1), ESIMClassifier: (2, 1), SpanReader: (0, 6)}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_acts_in_training_alone_and_alike_at_all_words(kind):
    network, inputs, pooled, masks = make_network(kind), make_network_inputs(SPANS), [], []
    assert_close(run_network(network, *inputs), run_network(network, *inputs))
    for module in network.modules():
        if isinstance(module, VariationalDropout):
            module.register_forward_hook(lambda _, x, y: masks.append((*x, y)))
        elif isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, x, y: pooled.append((y == 0).any()))
    run_network(network.train(), *inputs)
    assert (len(pooled), len(masks)) == DROPOUTS[kind] and all(pooled)
    for before, text, after in masks:
        is_kept = torch.stack([(after[text == number] != 0).any(0) for number in range(int(text.max()) + 1)])
        assert_close(after, 2 * before * is_kept[text])
        assert (before != 0)[~is_kept[text]].any()


@pytest.mark.parametrize("kind", DROPOUTS)
def test_initialization_fills_linear_layers_and_leaves_the_rest(kind):
    network = make_network(kind)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    loaded, weight = next((name, each) for name, each in network.named_parameters() if ".layers." not in name)
    weight._is_hf_initialized = True  # loading marks parameters of a checkpoint in this way
    network.initialize_parameters()
    for name, parameter in network.named_parameters():
        if ".layers." in name or name == loaded:
            assert_close(parameter.detach(), before[name])
        elif name.endswith("bias"):
            assert not parameter.any()
        elif name.endswith("product"):
            assert (parameter == 0.25).all()
        else:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0.5 * bound < parameter.abs().max() <= bound


AUTO_CLASSES = {
    ELMoForTokenClassification: AutoModelForTokenClassification,
    ELMoForSequenceClassification: AutoModelForSequenceClassification,
    ELMoForSemanticRoleLabeling: ELMoForSemanticRoleLabeling,
}
LABELED = {name: head for name, head in HEADS.items() if head[0] in AUTO_CLASSES}


@pytest.mark.parametrize("cls, options", LABELED.values(), ids=LABELED)
def test_chosen_labels_keep_their_weights(cls, options, tmp_path, warnings_of_transformers):
    """New rows, and in a CRF new columns, are as in a new head."""
    model = stirred(make_model(cls, **options, id2label=dict(enumerate(["O", "B-X", "I-X"]))))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    labels = ["B-Y", "B-X", "O", "I-Y"]
    new_head = make_model(cls, 1, **options, id2label=dict(enumerate(labels)))
    for auto_class in (cls, AUTO_CLASSES[cls]):
        found = auto_class.from_pretrained(tmp_path, id2label=dict(enumerate(labels))).eval()
        assert type(found) is cls and found.label_names() == tuple(labels)
        assert found.config.label2id == {name: number for number, name in enumerate(labels)}
        changed = []
        for name, value in found.state_dict().items():
            old = before[name]
            if value.shape == old.shape:
                assert value.equal(old)
                continue
            changed.append(name)
            assert value.shape == new_head.state_dict()[name].shape
            kept, new, expected = value[[1, 2]], value[[0, 3]], old[[1, 0]]
            if "transitions" in name:
                new = torch.cat([new.flatten(), kept[:, [0, 3]].flatten()])
                kept, expected = kept[:, [1, 2]], expected[:, [1, 0]]
            assert kept.equal(expected)
            if "bias" in name:
                assert not new.any()
            else:
                assert new.abs().max() <= 2 * new_head.state_dict()[name].abs().max() and new.abs().min() > 0
        assert 2 <= len(changed) <= 5
        assert logits_of(found(**batch_of(found))).shape[-1] == 4
    told = f"{cls.__name__} keeps 2 labels; new, and not trained: B-Y, I-Y; left out: I-X."
    assert warnings_of_transformers.text.count(told) == 2


def test_labels_without_names_take_those_of_the_head(tmp_path):
    make_model(ELMoForTokenClassification).save_pretrained(tmp_path)
    more = ELMoForTokenClassification.from_pretrained(pretrained_model_name_or_path=tmp_path, num_labels=7)
    assert more.label_names() == (*NAMES, "LABEL_5", "LABEL_6")
    assert ELMoForTokenClassification.from_pretrained(tmp_path, num_labels=2).label_names() == tuple(NAMES[:2])
    new = ELMoForTokenClassification.from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True)
    assert new.label_names() == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_labels_that_cannot_be_chosen(tmp_path):
    tagger, reader = make_model(ELMoForTokenClassification), make_model(ELMoForQuestionAnswering)
    fails("The labels are \\['A', 'A'\\]; pass one or more, each once", tagger.choose_labels, ["A", "A"])
    fails("The labels are \\[\\]", tagger.choose_labels, [])
    fails("This ELMoForQuestionAnswering has no labels to choose", reader.choose_labels, ["A"])
    number = make_model(ELMoForSequenceClassification, num_labels=1, problem_type="regression")
    fails("has no labels to choose", number.choose_labels, ["A"])
    roles = make_model(ELMoForSemanticRoleLabeling)
    fails("The label 'I-Z' is not BIO", roles.choose_labels, ["O", "I-Z"])
