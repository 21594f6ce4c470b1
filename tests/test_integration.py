"""Stock pipelines, collators and Trainer of transformers with ELMo."""

import copy

import numpy as np
import pytest
import torch
from bilm_models import make_tokenizer
from errors import refused
from head_models import HEADS, batch_of, make_batch, make_model, targets_of
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

from modeling_elmo import (
    ELMoConfig,
    ELMoForCausalLM,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
)

SENTENCE = "He is in (London), Paris."
WORDS = ["He", "is", "in", "(", "London", ")", ",", "Paris", "."]
LABELS = {0: "O", 1: "B-LOC"}
QUIET = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def tiny_config(tokenizer, **options):
    """Without dropout."""
    rates = {"dropout": 0.0, "elmo_dropout": 0.0, "task_dropout": 0.0}
    return ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), **rates, **{"task_hidden_size": 6, **options})


@pytest.fixture(scope="module", params=[WORDS, ["He", "Paris"]], ids=["known", "unknown"])
def tagger(request):
    """A linear tagger, fitted by least squares, that finds the two places, with known and with unknown words."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(*request.param)
    model = ELMoForTokenClassification(tiny_config(tokenizer, head="linear", id2label=LABELS)).eval()
    inputs = tokenizer(WORDS, is_split_into_words=True, return_tensors="pt")
    targets = torch.tensor([word in ("London", "Paris") for word in ["<S>", *WORDS, "</S>"]])
    with torch.no_grad():
        vectors = model.read(inputs["character_ids"], None, None, None, None, None).tokens_ND
        logits = 10 * torch.nn.functional.one_hot(targets.long()).float()
        model.classifier.weight.copy_(torch.linalg.lstsq(vectors, logits).solution.T)
        model.classifier.bias.zero_()
    return pipeline("token-classification", model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_pipeline_groups_entities_beside_punctuation(tagger, strategy):
    raw = tagger(SENTENCE, aggregation_strategy=strategy)
    (given,) = tagger(WORDS, is_split_into_words=True, aggregation_strategy=strategy)
    for text, found in ((SENTENCE, raw), (" ".join(WORDS), given)):
        groups = [(group["entity_group"], group["word"], text[group["start"] : group["end"]]) for group in found]
        assert groups == [("LOC", "London", "London"), ("LOC", "Paris", "Paris")]
        assert all(group["score"] > 0.99 for group in found)


def test_pipeline_groups_entities_beside_typographic_signs():
    """Tokens and texts have different lengths there, which only the strategy "simple" does not read."""
    tokenizer = make_tokenizer("Anna", "--", "...", plain_signs=True)
    model = ELMoForTokenClassification(tiny_config(tokenizer, head="linear", id2label=LABELS)).eval()
    tagger = pipeline("token-classification", model=model, tokenizer=tokenizer)
    text = "Anna— Anna…"

    def label_names(module, arguments, options, output):
        output["logits"] = 9.0 * torch.nn.functional.one_hot((options["input_ids"] == 4).long())
        return output

    model.register_forward_hook(label_names, with_kwargs=True)
    groups = tagger(text, aggregation_strategy="simple")
    assert [(group["word"], group["start"], group["end"]) for group in groups] == [("Anna", 0, 4), ("Anna", 6, 10)]


def test_pipeline_labels_the_best_sequence_of_a_crf():
    tokenizer = make_tokenizer(*WORDS)
    names = ["O", "B-LOC", "I-LOC"]
    torch.manual_seed(3)
    model = ELMoForTokenClassification(tiny_config(tokenizer, id2label=dict(enumerate(names)))).eval()
    with torch.no_grad():
        for parameter in [*model.crf.parameters(), *model.classifier.parameters()]:
            parameter.normal_()
    predictions = model(**tokenizer(SENTENCE, return_tensors="pt")).predictions[0, 1:-1].tolist()
    found = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])(SENTENCE)
    assert [entity["entity"] for entity in found] == [names[label] for label in predictions]
    assert len(set(predictions)) == 3


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_feature_extraction_pipeline_gives_the_top_layer(batch_size):
    tokenizer = make_tokenizer(*WORDS)
    torch.manual_seed(0)
    model = ELMoModel(tiny_config(tokenizer)).eval()
    texts = [SENTENCE, "Paris", "He is", "in"]
    found = pipeline("feature-extraction", model=model, tokenizer=tokenizer, batch_size=batch_size)(texts)
    for text, vectors in zip(texts, found, strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state.detach().numpy()
        np.testing.assert_allclose(np.array(vectors)[:, : expected.shape[1]], expected, atol=1e-6)


@pytest.mark.parametrize("options", [{"head": "linear"}, {"classifier": "bcn"}, {"classifier": "esim"}])
def test_zero_shot_pipeline_reads_pairs(options):
    """The pipeline passes only `tokenizer.model_input_names` to the model."""
    tokenizer = make_tokenizer(*WORDS)
    ids = {"contradiction": 0, "neutral": 1, "entailment": 2}
    names = {"label2id": ids, "id2label": {index: name for name, index in ids.items()}}
    torch.manual_seed(0)
    model = ELMoForSequenceClassification(tiny_config(tokenizer, **names, **options)).eval()
    classify = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    found = classify(SENTENCE, candidate_labels=["Paris", "He"], multi_label=True, hypothesis_template="in {}")
    scores = dict(zip(found["labels"], found["scores"], strict=True))
    for label in ("Paris", "He"):
        logits = model(**tokenizer(SENTENCE, f"in {label}", return_tensors="pt")).logits[0, [0, 2]]
        assert scores[label] == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-6)


TRAINED = {
    "language_model": (ELMoForPreTraining, {}),
    "causal": (ELMoForCausalLM, {}),
    "tagger": HEADS["tagger-both"],
    "tagger_linear": HEADS["tagger-linear"],
    "bcn": HEADS["bcn-input"],
    "esim": HEADS["esim-output"],
    "linear": HEADS["sequence-linear"],
    "reader": HEADS["reader-both"],
    "roles": HEADS["roles-both"],
}
every_model = pytest.mark.parametrize("model_class, options", TRAINED.values(), ids=TRAINED)


def training_setup(model_class, options):
    """A model, unpadded examples with labels, and the stock collator for them."""
    model = make_model(model_class, **{"freeze_bilm": False, "scalar_mix_l2": 0.1, **options})
    tokenizer = ELMoTokenizer(max_word_length=model.config.max_word_length)
    is_language_model = model_class in (ELMoForPreTraining, ELMoForCausalLM)
    batch = make_batch(model.config) if is_language_model else batch_of(model)
    batch |= {} if is_language_model else targets_of(model, batch)
    features = []
    for row, mask in enumerate(batch["attention_mask"].bool()):
        values = {name: tensor[row] for name, tensor in batch.items()}
        features.append({name: (each[mask] if each.dim() else each).tolist() for name, each in values.items()})
    if is_language_model:
        return model, features, DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if model_class is ELMoForSemanticRoleLabeling:
        return model, features, lambda rows: padded_roles(tokenizer, rows)
    is_tagger = model_class is ELMoForTokenClassification
    return model, features, (DataCollatorForTokenClassification if is_tagger else DataCollatorWithPadding)(tokenizer)


def padded_roles(tokenizer, rows):
    """The stock collator, and the second kind of labels, which it does not know."""
    others = [{name: value for name, value in row.items() if name != "predicate_labels"} for row in rows]
    batch = DataCollatorForTokenClassification(tokenizer)(others)
    labels = [torch.tensor(row["predicate_labels"]) for row in rows]
    return {**batch, "predicate_labels": pad_sequence(labels, batch_first=True, padding_value=-100)}


@every_model
def test_trainer_steps_along_the_gradient_of_the_whole_batch(model_class, options, tmp_path):
    """One step of plain SGD with rate 1: 2 times 2 rows of different lengths."""
    model, features, collator = training_setup(model_class, options)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(**collator(features)).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}  # none backward, if causal
    model.zero_grad()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    arguments = TrainingArguments(tmp_path, **sizes, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **QUIET)
    Trainer(model, arguments, data_collator=collator, train_dataset=features).train()
    for name, parameter in model.named_parameters():
        change, gradient = before[name] - parameter, gradients[name]
        expected = torch.zeros_like(change) if gradient is None else gradient
        assert_close(change, expected, rtol=1e-4, atol=1e-6, msg=name)


class LossOfAnotherTrainer(Trainer):
    """As those of sentence-transformers, which takes the labels away on purpose."""

    def compute_loss(self, model, inputs, **_):
        labels = inputs.pop("labels")
        return model(**inputs).logits.flatten()[: labels.numel()].square().sum()


@pytest.mark.parametrize(
    "model_class, options, lost",
    [
        (ELMoForTokenClassification, {}, "the CRF is not trained"),
        (ELMoForSequenceClassification, {"num_labels": 1}, "its own loss is not trained"),
        (ELMoForCausalLM, {}, "receives no `labels` in training"),
    ],
)
def test_an_option_for_which_trainer_takes_labels_is_named(
    model_class, options, lost, tmp_path, warnings_of_transformers
):
    """No option that was not passed is named, and nothing is told of a single score with another loss."""
    row = {"input_ids": torch.tensor([1, 3, 4, 2]), "character_ids": torch.full((4, 50), 5)}
    row["labels"] = torch.tensor(0) if "num_labels" in options else torch.tensor([-100, 1, 1, -100])

    def train(trainer_class=Trainer, smoothing=0.0, **more):
        warnings_of_transformers.clear()
        model = model_class(ELMoConfig.from_preset("tiny", vocab_size=8, **options))
        arguments = TrainingArguments(tmp_path, label_smoothing_factor=smoothing, max_steps=1, **QUIET)
        trainer_class(model, arguments, train_dataset=[row] * 2, **more).train()
        return [message for message in warnings_of_transformers.messages if "receives no `labels`" in message]

    def own_loss(outputs, labels, **_):
        return outputs.logits.square().sum()

    (message,) = train(smoothing=0.1)
    assert lost in message and "label_smoothing_factor" in message and "compute_loss_func" not in message
    (message,) = train(compute_loss_func=own_loss)
    assert lost in message and "label_smoothing_factor" not in message
    assert ("compute_loss_func" in message) == (model_class is not ELMoForCausalLM)
    messages = train(LossOfAnotherTrainer)
    assert len(messages) == (model_class is not ELMoForSequenceClassification)
    assert not any("label_smoothing_factor" in each or "compute_loss_func" in each for each in messages)
    assert not train()


def test_label_smoothing_of_a_language_model_is_refused(tmp_path):
    config = ELMoConfig.from_preset("tiny", vocab_size=8)
    row = {"input_ids": torch.tensor([1, 3, 4, 2]), "character_ids": torch.full((4, 50), 5)}
    rows = [{**row, "labels": row["input_ids"]}] * 2
    model = ELMoForPreTraining(config)
    with refused("no `logits`, which Trainer's `label_smoothing_factor` reads; leave it out", KeyError):
        arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, max_steps=1, **QUIET)
        Trainer(model, arguments, train_dataset=rows).train()
    with refused("has losses and no `logits`; call `score` or `predict_words`", KeyError):
        model(**{name: tensor[None] for name, tensor in row.items()})["logits"]


@every_model
def test_trainer_evaluates_the_loss_and_gathers_only_logits(model_class, options, tmp_path):
    model, features, collator = training_setup(model_class, options)
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=3, **QUIET)
    model.config.output_hidden_states = True
    found = Trainer(model, arguments, data_collator=collator, eval_dataset=features).predict(features)
    assert np.isfinite(found.metrics["test_loss"])
    if model_class is ELMoForQuestionAnswering:
        assert [side.shape for side in found.predictions] == [(4, max(len(each["input_ids"]) for each in features))] * 2
    elif model_class is ELMoForSemanticRoleLabeling:
        logits, predicates = found.predictions
        assert logits.shape == (*predicates.shape, 5) and len(predicates) == 4
    elif model_class is ELMoForCausalLM:
        assert found.predictions.shape[:2] == (4, max(len(each["input_ids"]) for each in features))
    elif model_class is not ELMoForPreTraining:
        assert isinstance(found.predictions, np.ndarray) and found.predictions.shape[-1] == 5


def attributed(head):
    """A classifier in float64 whose answers differ, and two sentences."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(*WORDS)
    options = {"head": head, "classifier": "linear" if head == "linear" else "bcn", "num_labels": 2}
    model = ELMoForSequenceClassification(tiny_config(tokenizer, **options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model, dict(tokenizer(["He is in London.", "Paris"], padding=True, return_tensors="pt"))


@pytest.mark.parametrize("head, given", [("linear", "inputs_embeds"), *((h, "layers") for h in ("linear", "paper"))])
def test_integrated_gradients_of_vectors_are_complete(head, given):
    """Their sum is the difference of the outputs (Sundararajan et al. 2017, proposition 1), by the midpoint rule."""
    model, batch = attributed(head)
    with torch.no_grad():
        if given == "inputs_embeds":
            vectors = model.elmo.encode_words(batch["character_ids"])
            options = {"attention_mask": batch["attention_mask"]}
        else:
            given, vectors = "elmo_hidden_states", torch.stack(model.elmo(**batch).hidden_states, dim=1)
            options = batch
        answers = [model(**options, **{given: scale * vectors}).logits[:, 1] for scale in (1, 0)]
        assert_close(answers[0], model(**batch).logits[:, 1])
    total = torch.zeros_like(vectors)
    for step in range(200):
        point = ((step + 0.5) / 200 * vectors).requires_grad_()
        total += torch.autograd.grad(model(**options, **{given: point}).logits[:, 1].sum(), point)[0]
    difference = answers[0] - answers[1]
    assert difference.abs().min() > 0.01
    assert_close((vectors * total / 200).flatten(1).sum(1), difference, rtol=1e-3, atol=0)


@pytest.mark.parametrize("head", ["linear", "paper"])
def test_integrated_gradients_of_captum_are_complete(head):
    """A network of its own reads the characters too, so both encoders are layers."""
    captum_attr = pytest.importorskip("captum.attr", reason="captum computes the attributions")
    model, batch = attributed(head)
    names = ["character_ids", "input_ids", "attention_mask"]
    characters, *others = (batch[name] for name in names)
    without = torch.where(characters > 0, 261, 0)

    def answer(*inputs):
        return model(**dict(zip(names, inputs, strict=True))).logits

    encoders = [part.char_encoder for part in (model.elmo, model.token_features) if part is not None]
    method = captum_attr.LayerIntegratedGradients(answer, encoders)
    found = method.attribute(characters, without, target=1, additional_forward_args=tuple(others), n_steps=200)
    found = found if isinstance(found, (list, tuple)) else [found]
    difference = (answer(characters, *others) - answer(without, *others))[:, 1]
    assert len(found) == len(encoders) and difference.abs().min() > 0.01
    assert_close(sum(part.flatten(1).sum(1) for part in found), difference, rtol=1e-2, atol=0)


@pytest.mark.parametrize("freeze_bilm", [True, False])
def test_adapters_of_peft(freeze_bilm, tmp_path):
    """LoRA as in docs/fine_tuning.md: an adapted biLM is one whose weights are `W + alpha / r * B @ A`."""
    peft = pytest.importorskip("peft")
    model, features, collator = training_setup(ELMoForTokenClassification, {"freeze_bilm": freeze_bilm})
    original = copy.deepcopy(model.elmo.state_dict())
    lora = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["input_linear", "state_linear", "projection"])
    model.elmo = peft.get_peft_model(model.elmo, lora)
    arguments = TrainingArguments(tmp_path / "run", max_steps=5, learning_rate=0.1, **QUIET)
    Trainer(model, arguments, data_collator=collator, train_dataset=features).train()
    weights, batch = model.elmo.state_dict(), collator(features)
    trained = model.eval()(**batch).logits

    model.elmo = model.elmo.merge_and_unload()
    model.save_pretrained(tmp_path / "tagger")
    loaded = ELMoForTokenClassification.from_pretrained(tmp_path / "tagger")
    assert_close(loaded(**batch).logits, trained, rtol=1e-4, atol=1e-5)
    changed = 0
    for name, weight in original.items():
        matrix = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{matrix}.lora_A.default.weight" in weights:
            change = 3 * weights[f"{matrix}.lora_B.default.weight"] @ weights[f"{matrix}.lora_A.default.weight"]
            assert change.abs().max() > 1e-3, name  # it was trained
            expected, changed = weight + change, changed + 1
        assert_close(loaded.elmo.state_dict()[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    assert changed == 2 * model.config.num_hidden_layers * 3
