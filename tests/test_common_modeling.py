"""transformers' common model tests on every ELMo class, with characters and word-level.

They are in transformers' source distribution: `make test-common` fetches it and runs this file with
TRANSFORMERS_TESTS=path/to/transformers-x.y.z/tests; without it, the file is skipped.
"""

import importlib
import os
import sys
import types
import unittest

import pytest
import torch

from modeling_elmo import (
    ELMoConfig,
    ELMoForCoreferenceResolution,
    ELMoForPreTraining,
    ELMoForQuestionAnswering,
    ELMoForSemanticRoleLabeling,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoModel,
)

FOLDER = os.environ.get("TRANSFORMERS_TESTS")
if FOLDER is None:
    pytest.skip("transformers' common tests: run `make test-common`, which fetches them", allow_module_level=True)

# Two modules that the source distribution lacks. ELMo's exports are in test_export.py, and it generates no text.
LEFT_OUT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
# The tests find the task and the labels of a class by its name, and skip unknown names.
NAMES = {
    "MODEL_MAPPING_NAMES": "ELMoModel",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "ELMoForTokenClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "ELMoForSequenceClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "ELMoForQuestionAnswering",
}


def common_tests(folder):
    """transformers' `tests/test_modeling_common.py`, extended with the ELMo classes."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    for name, mixin in LEFT_OUT.items():
        stub = types.ModuleType(f"transformers_tests.{name}")
        setattr(stub, mixin, type(mixin, (), {}))
        sys.modules[stub.__name__] = stub
    module = importlib.import_module("transformers_tests.test_modeling_common")
    for mapping, class_name in NAMES.items():
        setattr(module, mapping, {**getattr(module, mapping), "elmo": class_name})
    return module


class CharacterModels:
    """A small configuration and a batch, with the attributes that the common tests read."""

    batch_size, seq_length, num_hidden_layers, hidden_size, is_training = 3, 7, 2, 16, True
    sizes = {"char_embedding_size": 4, "char_cnn_filters": [[1, 4], [2, 8]], "max_word_length": 10}
    sizes |= {"task_word_embedding_size": 5, "task_char_embedding_size": 4, "task_char_cnn_filters": [[2, 6]]}

    def get_config(self):
        return ELMoConfig(
            vocab_size=30,
            projection_size=self.hidden_size // 2,
            lstm_hidden_size=12,
            num_hidden_layers=self.num_hidden_layers,
            dropout=0.0,
            elmo_dropout=0.0,
            task_hidden_size=6,
            task_num_layers=2,
            task_dropout=0.0,
            id2label={0: "O", 1: "B-X"},
            freeze_bilm=False,
            **self.sizes,
        )

    def prepare_config_and_inputs_for_common(self):
        torch.manual_seed(0)
        config = self.get_config()
        words = torch.randint(4, config.vocab_size, (self.batch_size, self.seq_length))
        inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
        if config.char_vocab_size:
            shape = (*words.shape, config.max_word_length)
            inputs["character_ids"] = torch.randint(1, config.char_vocab_size, shape)
        return config, inputs


class WordLevelModels(CharacterModels):
    sizes = {"char_vocab_size": 0, "word_embedding_size": CharacterModels.hidden_size // 2}


class CommonTests(common_tests(FOLDER).ModelTesterMixin):
    # the last two: some tests stop at the first class without `inputs_embeds`
    all_model_classes = (
        ELMoModel,
        ELMoForTokenClassification,
        ELMoForSequenceClassification,
        ELMoForQuestionAnswering,
        ELMoForSemanticRoleLabeling,
        ELMoForPreTraining,
        ELMoForCoreferenceResolution,
    )
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = self.models()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        places = torch.arange(self.model_tester.seq_length).expand_as(inputs["input_ids"])
        if return_labels and model_class is ELMoForPreTraining:
            inputs["labels"] = inputs["input_ids"]
        if model_class is ELMoForSemanticRoleLabeling:
            inputs["token_type_ids"] = (places == 2).long()
            if return_labels:
                inputs["labels"] = inputs["predicate_labels"] = inputs["input_ids"] % 2
        if model_class is ELMoForCoreferenceResolution and return_labels:
            inputs["mentions"] = torch.tensor([[0, 2, 3, 0], [1, 2, 2, 0]])
        if model_class is ELMoForQuestionAnswering:  # two words of a question, and a context
            inputs["token_type_ids"] = (places > 1).long()
        return inputs

    def test_batching_equivalence(self, *args, **options):
        """Not of coreference resolution: the rows of its batch are one document."""
        self.all_model_classes = self.all_model_classes[:-1]
        super().test_batching_equivalence(*args, **options)

    def test_retain_grad_hidden_states_attentions(self):
        """Gradients reach the layers through the mix, not through the top layer's output."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        outputs = ELMoModel(config)(**inputs)
        for layer in outputs.hidden_states:
            layer.retain_grad()
        outputs.elmo_embeddings.flatten()[0].backward()
        assert all(layer.grad.any() for layer in outputs.hidden_states)

    @unittest.skip("vocab_size resizes the softmax, never the character table: tests/test_modeling_elmo.py")
    def test_resize_tokens_embeddings(self):
        pass

    @unittest.skip("expects an error for other labels, which keep their weights here: tests/test_task_heads.py")
    def test_can_load_ignoring_mismatched_shapes(self):
        pass

    @unittest.skip("makes the mismatch by vocab_size, which shapes no weight of a classifier")
    def test_load_with_mismatched_shapes(self):
        pass


class CharacterModelsTest(CommonTests, unittest.TestCase):
    models = CharacterModels

    def test_inputs_embeds(self):
        """`inputs_embeds` are vectors of words, which `get_input_embeddings()`, a table of characters, cannot give."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.head = "linear"  # the paper's heads also read words themselves
        characters = inputs["character_ids"]
        for model_class in self.all_model_classes[:-2]:
            model = model_class(config).eval()
            vectors = model.base_model.encode_words(characters.flatten(0, 1)).unflatten(0, characters.shape[:2])
            given = self._prepare_for_class(inputs, model_class)
            types = {"token_type_ids": given["token_type_ids"]} if "token_type_ids" in given else {}
            torch.testing.assert_close(model(inputs_embeds=vectors, **types)[0], model(**given)[0])

    @unittest.skip("the test above compares the two")
    def test_inputs_embeds_matches_input_ids(self):
        pass


class WordLevelModelsTest(CommonTests, unittest.TestCase):
    models = WordLevelModels
