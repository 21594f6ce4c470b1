"""Classes of texts and of pairs: BCN (sentiment, section 4), ESIM (entailment), or a linear layer on the mean.

Only real tokens have vectors. Where each token attends to those of another text, texts of similar length are
computed together, with padding.

Shape suffixes: B rows; N real tokens of the batch; M packed tokens of texts; S texts, the first texts of all rows, then
the second texts of all rows (S = 2 B; with single texts only, S = B and each text is compared with itself); R texts of
a group, L their longest; D width of the words that a biRNN reads; H width of its output; E width of an encoded word; P
width of a pooled text; J width of both pooled texts.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from ..configuration_elmo import ELMoConfig
from ..inputs import NO_LABEL, check_ids, check_range, check_shape
from ..kernels.products import fast_linear
from .packed_texts import PackedTexts, Places, masked_softmax, with_elmo
from .recurrence import TaskLSTM, VariationalDropout, glorot_
from .task_model import ELMoTaskModel, is_second, reads_batch, row_numbers


class TextPairClassifier(nn.Module):
    """Common part of both classifiers: the biLSTM that encodes each text, and ELMo at its output.

    Dropout is variational on sequences and ordinary on pooled vectors.
    """

    def __init__(self, encoder_size: int, hidden_size: int, dropout: float, output_elmo_size: int):
        super().__init__()
        self.encoder = TaskLSTM(encoder_size, hidden_size)
        self.encoded_size = self.encoder.output_size + output_elmo_size
        self.sequence_dropout = VariationalDropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def encode(self, inputs_ND: Tensor, texts: PackedTexts, elmo_NE: Tensor | None) -> Tensor:
        """The encoded texts, `(packed tokens, encoded_size)`."""
        encoded_MH = self.encoder(texts.pack(inputs_ND), texts)
        return with_elmo(encoded_MH, texts, elmo_NE)  # section 5.2 of the ELMo paper

    def initialize_parameters(self):
        """Glorot-uniform linear layers, biases 0. The biLSTMs initialize themselves."""
        glorot_(self)


class BiattentiveClassifier(TextPairClassifier):
    """The biattentive classification network, BCN (McCann et al. 2017, section 5).

        x_i = biLSTM(relu(W w_i + b)), y_j likewise                                  encoding
        A = X Y^T;  C_y = softmax over j of A_ij, times Y;  C_x likewise             biattention
        X|y = biLSTM([X; X - C_y; X * C_y]), Y|x likewise with C_x                   integration
        [max; mean; min; softmax(X|y v)^T X|y], the same of Y|x                      pooling
        relu, relu, linear                                                           output

    A single text attends to itself, and its pooled vector is used twice. Two changes: the paper has an integrating
    biLSTM for each side, while here both sides share one, so that the two sides of a single text are equal; the paper
    has three batch-normalized maxout layers, while here two ReLU layers, each a fourth as wide as its input, precede a
    linear layer. The attentive pooling has no bias, because the softmax cancels it.

    Args:
        hidden_size: width of the first layer and of each direction of the biLSTMs.
        dropout: dropout rate before the integration and before each output layer. The inputs are dropped out before.
        output_elmo_size: width of the ELMo vectors that are concatenated to the encoded texts. 0: none.
    """

    def __init__(self, input_size: int, hidden_size: int, num_labels: int, dropout: float, output_elmo_size: int = 0):
        super().__init__(hidden_size, hidden_size, dropout, output_elmo_size)
        self.feedforward = nn.Linear(input_size, hidden_size)
        self.integrator = TaskLSTM(3 * self.encoded_size, hidden_size)
        self.attention = nn.Linear(2 * hidden_size, 1, bias=False)
        self.joint = nn.ModuleList(
            [nn.Linear(16 * hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)]
        )
        self.output = nn.Linear(hidden_size, num_labels)

    def forward(self, inputs_ND: Tensor, texts: PackedTexts, rows: int, elmo_NE: Tensor | None = None) -> Tensor:
        """Logits `(batch, num_labels)`.

        Args:
            inputs_ND: `(tokens, input_size)`.
            texts: the first texts of all rows, then the second texts; or a single text of each row.
            rows: the number of rows.
            elmo_NE: `(tokens, output_elmo_size)`.
        """
        words_NH = fast_linear(self.feedforward, inputs_ND).relu()
        texts_ME = self.encode(words_NH, texts, elmo_NE)
        context_ME = attend_to_other(texts_ME, texts, rows)
        compared = torch.cat([texts_ME, texts_ME - context_ME, texts_ME * context_ME], -1)
        compared = self.sequence_dropout(compared, texts.text_N)
        integrated_MH = self.integrator(compared, texts)
        pooled_SP = self._pool(integrated_MH, texts)
        joint_BJ = both_texts(pooled_SP, rows)
        for linear in cast(Iterable[nn.Linear], self.joint):
            joint_BJ = fast_linear(linear, self.dropout(joint_BJ)).relu()
        return self.output(self.dropout(joint_BJ))

    def _pool(self, integrated_MH: Tensor, texts: PackedTexts) -> Tensor:
        weights_M1 = texts.softmax(self.attention(integrated_MH))
        attentive_SH = texts.sum(weights_M1 * integrated_MH)
        greatest_SH = texts.max(integrated_MH)
        mean_SH = texts.mean(integrated_MH)
        least_SH = -texts.max(-integrated_MH)
        return torch.cat([greatest_SH, mean_SH, least_SH, attentive_SH], 1)


class ESIMClassifier(TextPairClassifier):
    """The enhanced sequential inference model, ESIM (Chen et al. 2017, section 3 without its trees).

        a_i = biLSTM(premise)_i, b_j = biLSTM(hypothesis)_j                          (1), (2)
        e_ij = a_i . b_j;  a~_i = sum_j softmax_j(e_ij) b_j;  b~_j likewise          (11) to (13)
        m_a = [a; a~; a - a~; a * a~], m_b likewise                                  (14), (15)
        v_a = biLSTM(relu(W m_a + b)), v_b likewise                                  (16), (17)
        v = [mean v_a; max v_a; mean v_b; max v_b]                                   (18) to (20)
        linear, tanh, linear                                                         output

    Both sides share all parameters. A single text is aligned with itself, and its pooled vector is used twice.

    Args:
        hidden_size: width of each direction of the biLSTMs and of the layers between them.
        dropout: dropout rate before the second biLSTM and before each output layer. The inputs are dropped out before.
    """

    def __init__(self, input_size: int, hidden_size: int, num_labels: int, dropout: float, output_elmo_size: int = 0):
        super().__init__(input_size, hidden_size, dropout, output_elmo_size)
        self.projection = nn.Linear(4 * self.encoded_size, hidden_size)
        self.composition = TaskLSTM(hidden_size, hidden_size)
        self.joint = nn.Linear(8 * hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, num_labels)

    def forward(self, inputs_ND: Tensor, texts: PackedTexts, rows: int, elmo_NE: Tensor | None = None) -> Tensor:
        """As `BiattentiveClassifier.forward`."""
        texts_ME = self.encode(inputs_ND, texts, elmo_NE)
        aligned_ME = attend_to_other(texts_ME, texts, rows)
        enhanced = torch.cat([texts_ME, aligned_ME, texts_ME - aligned_ME, texts_ME * aligned_ME], -1)
        projected_MH = fast_linear(self.projection, enhanced).relu()
        projected_MH = self.sequence_dropout(projected_MH, texts.text_N)
        composed_MH = self.composition(projected_MH, texts)
        mean_SH = texts.mean(composed_MH)
        greatest_SH = texts.max(composed_MH)
        pooled_SP = torch.cat([mean_SH, greatest_SH], 1)
        joint_BJ = self.dropout(both_texts(pooled_SP, rows))
        joint_BJ = fast_linear(self.joint, joint_BJ).tanh()
        return self.output(self.dropout(joint_BJ))


def attend_to_other(texts_ME: Tensor, texts: PackedTexts, rows: int) -> Tensor:
    """Attention from each word to the row's other text, weighted by a softmax of dot products.

    Zeros where the other text is empty.

    Args:
        texts_ME: `(packed tokens, width)`.
        rows: B. The other text of `s` is `(s + B) % S`.
    """

    def attention(text: Places, other: Places) -> Tensor:
        text_RLE = text.read(texts_ME)
        other_RLE = other.read(texts_ME)
        affinity_RLL = text_RLE @ other_RLE.transpose(1, 2)
        return masked_softmax(affinity_RLL, other.mask_RL[:, None], -1) @ other_RLE

    return texts.attend(texts, attention, rows)


def both_texts(pooled_SP: Tensor, rows: int) -> Tensor:
    """The pooled vectors of both texts of each row, concatenated: `(B, 2 P)`. A single text is used twice."""
    return torch.cat([pooled_SP[:rows], pooled_SP[-rows:]], 1)


class ELMoForSequenceClassification(ELMoTaskModel):
    """Predicts a label, several labels, or a number for each row, which has one text or two.

    `config.classifier` selects the network: `"bcn"`, the biattentive classification network (McCann et al. 2017), in
    which a single text attends to itself; `"esim"` (Chen et al. 2017), for pairs; `"linear"`, a linear layer on the
    mean of the mix.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        if self.is_linear:
            self.classifier: nn.Module = nn.Linear(self.input_size, config.num_labels)
        else:
            network_class = {"bcn": BiattentiveClassifier, "esim": ESIMClassifier}[config.classifier]
            sizes = (self.input_size, self.task_hidden_size, config.num_labels, self.task_dropout)
            self.classifier = network_class(*sizes, output_elmo_size=self.output_elmo_size)
        self.post_init()

    @classmethod
    def network_name(cls, config: ELMoConfig) -> str:
        return "linear" if config.head == "linear" else config.classifier

    def label_layers(self) -> list[Any]:
        return [self.classifier if self.is_linear else self.classifier.output]

    def _init_labels(self, layer: nn.Module):
        if self.is_linear:
            super()._init_labels(layer)
        else:
            glorot_(layer)

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Computes logits `(batch, num_labels)`, and the loss of `config.problem_type` if `labels` are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`.
            token_type_ids: `(batch, time)`, 0 at the first text and 1 at the second. The biLM reads them separately.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            labels: `(batch,)` label ids or regression targets, or `(batch, num_labels)`.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        batch = inputs.mask_BT.shape[0]
        if self.is_linear:
            zeros_BD = inputs.tokens_ND.new_zeros(batch, inputs.tokens_ND.shape[1])
            sums_BD = zeros_BD.index_add(0, row_numbers(inputs.mask_BT), inputs.tokens_ND)
            counts_B1 = inputs.mask_BT.sum(1, keepdim=True)
            logits = self.classifier(sums_BD / counts_B1.clamp(min=1))
        else:
            texts = PackedTexts(self._texts(inputs.mask_BT, token_type_ids), inputs.mask_BT)
            logits = self.classifier(inputs.tokens_ND, texts, batch, inputs.output_NE)
        if labels is None:
            may_be_single = self.config.problem_type in (None, "single_label_classification")
            is_smoothed = may_be_single and self.num_labels > 1
            self._warn_without_labels(None, None if is_smoothed else "its own loss")
        return SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels),
            logits=logits,
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of `config.problem_type`. If it is `None`, the shape of the labels decides."""
        kind = self.config.problem_type
        is_row = isinstance(labels, Tensor) and labels.dim() == 1
        if kind == "single_label_classification" or kind is None and is_row and self.num_labels > 1:
            check_ids("labels", labels, (len(logits),))
            labels = labels.long()
            is_known = labels != NO_LABEL
            advice = "load it with num_labels=..., or remove rows without a label (-1)"
            check_range("labels", labels[is_known], self.num_labels, advice)
            count = is_known.sum().clamp(min=1)
            return self.loss_function(labels, logits, self.config, num_items_in_batch=count) + self.penalty()
        is_number = is_row and self.num_labels == 1
        needed = (len(logits),) if is_number else tuple(logits.shape)
        check_shape("labels", labels, needed)
        if not labels.is_floating_point():
            labels = labels.to(logits.dtype)
        return self.loss_function(labels, logits, self.config) + self.penalty()

    def _texts(self, mask_BT: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """The masks of all first texts, then of all second texts, `(2 * batch, time)`. A single text counts as both.

        If all rows have a single text, each is there once.
        """
        second_BT = torch.zeros_like(mask_BT) if token_type_ids is None else is_second(token_type_ids, mask_BT)
        has_first_B = (mask_BT & ~second_BT).any(1)
        single_B = ~(has_first_B & second_BT.any(1))
        alone_B = single_B & mask_BT.any(1)  # a row of padding has no text
        if alone_B.any() and self.config.classifier == "esim":
            row = int(alone_B.nonzero()[0])
            raise ValueError(
                f"ESIM compares two texts, but row {row} has one. Pass pairs with their `token_type_ids`, as "
                "tokenizer(premises, hypotheses) returns them, or use classifier='bcn'."
            )
        if single_B.all():
            return mask_BT
        single_BT = mask_BT & single_B[:, None]
        return torch.cat([single_BT | (mask_BT & ~second_BT), single_BT | second_BT])
