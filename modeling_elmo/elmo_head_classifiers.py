"""Classifiers of one text or two: the paper's networks for sentiment and textual entailment.

Shape suffixes: B batch; T time; S texts, the first texts of all rows, then the second texts of all rows (S = 2 B; with
single texts only, S = B and each text is compared with itself); D width of the words that a biLSTM reads; H width of
its output; E width of an encoded word; P width of a pooled text; J width of both pooled texts.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_backends import fast_linear
from .elmo_head_layers import TaskLSTM, VariationalDropout, masked_softmax


class TextPairClassifier(nn.Module):
    """Common part of both classifiers: the biLSTM that encodes each text, and ELMo at its output.

    Args:
        encoder_size: width of the biLSTM's input.
        hidden_size: width of one direction of the biLSTM.
        dropout: dropout rate, variational on sequences and ordinary on pooled vectors.
        output_elmo_size: width of the ELMo vectors at the output. 0: none.
    """

    def __init__(self, encoder_size: int, hidden_size: int, dropout: float, output_elmo_size: int):
        super().__init__()
        self.encoder = TaskLSTM(encoder_size, hidden_size)
        self.encoded_size = self.encoder.output_size + output_elmo_size
        self.sequence_dropout = VariationalDropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def encode(
        self, inputs_BTD: Tensor, first_BT: Tensor, second_BT: Tensor, elmo_BTE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The encoded texts `(S, time, encoded_size)`, zeros at padding, and their mask `(S, time)`."""
        texts = 1 if second_BT is first_BT else 2
        mask_ST = torch.cat([first_BT, second_BT][:texts])
        encoded_STE = self.encoder(inputs_BTD.repeat(texts, 1, 1), mask_ST)
        if elmo_BTE is None:
            return encoded_STE, mask_ST
        elmo_STE = elmo_BTE.repeat(texts, 1, 1).masked_fill(~mask_ST[..., None], 0)
        return torch.cat([encoded_STE, elmo_STE], -1), mask_ST  # section 5.2 of the ELMo paper

    def reset_parameters(self):
        """Glorot-uniform linear layers, biases 0. The biLSTMs initialise themselves."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    init.zeros_(module.bias)


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
        input_size: width of the word vectors, with ELMo.
        hidden_size: width of the first layer and of each direction of the biLSTMs.
        num_labels: number of logits.
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

    def forward(
        self, inputs_BTD: Tensor, first_BT: Tensor, second_BT: Tensor, elmo_BTE: Tensor | None = None
    ) -> Tensor:
        """Logits `(batch, num_labels)`.

        Args:
            inputs_BTD: `(batch, time, input_size)`.
            first_BT, second_BT: `(batch, time)` bool, the masks of each row's texts. For single texts pass the same
                tensor twice: then nothing is computed twice.
            elmo_BTE: `(batch, time, output_elmo_size)`.
        """
        words_BTD = fast_linear(self.feedforward, inputs_BTD).relu()
        texts_STE, mask_ST = self.encode(words_BTD, first_BT, second_BT, elmo_BTE)
        context_STE = attend_to_other(texts_STE, mask_ST, len(inputs_BTD))
        compared = torch.cat([texts_STE, texts_STE - context_STE, texts_STE * context_STE], -1)
        integrated_STH = self.integrator(self.sequence_dropout(compared), mask_ST)
        joint_BJ = both_texts(self._pool(integrated_STH, mask_ST), len(inputs_BTD))
        for linear in cast(Iterable[nn.Linear], self.joint):
            joint_BJ = fast_linear(linear, self.dropout(joint_BJ)).relu()
        return self.output(self.dropout(joint_BJ))

    def _pool(self, integrated_STH: Tensor, mask_ST: Tensor) -> Tensor:
        largest_SH, least_SH = masked_max(integrated_STH, mask_ST), -masked_max(-integrated_STH, mask_ST)
        shares_ST1 = masked_softmax(self.attention(integrated_STH), mask_ST[..., None], 1)
        attentive_SH = (shares_ST1 * integrated_STH).sum(1)
        return torch.cat([largest_SH, masked_mean(integrated_STH, mask_ST), least_SH, attentive_SH], 1)


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
        input_size, num_labels, output_elmo_size: as in `BiattentiveClassifier`.
        hidden_size: width of each direction of the biLSTMs and of the layers between them.
        dropout: dropout rate before the second biLSTM and before each output layer. The inputs are dropped out before.
    """

    def __init__(self, input_size: int, hidden_size: int, num_labels: int, dropout: float, output_elmo_size: int = 0):
        super().__init__(input_size, hidden_size, dropout, output_elmo_size)
        self.projection = nn.Linear(4 * self.encoded_size, hidden_size)
        self.composition = TaskLSTM(hidden_size, hidden_size)
        self.joint = nn.Linear(8 * hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, num_labels)

    def forward(
        self, inputs_BTD: Tensor, first_BT: Tensor, second_BT: Tensor, elmo_BTE: Tensor | None = None
    ) -> Tensor:
        """Logits `(batch, num_labels)`. Arguments as in `BiattentiveClassifier.forward`."""
        texts_STE, mask_ST = self.encode(inputs_BTD, first_BT, second_BT, elmo_BTE)
        aligned_STE = attend_to_other(texts_STE, mask_ST, len(inputs_BTD))
        enhanced = torch.cat([texts_STE, aligned_STE, texts_STE - aligned_STE, texts_STE * aligned_STE], -1)
        projected_STH = fast_linear(self.projection, enhanced).relu()
        composed_STH = self.composition(self.sequence_dropout(projected_STH), mask_ST)
        pooled_SP = torch.cat([masked_mean(composed_STH, mask_ST), masked_max(composed_STH, mask_ST)], 1)
        joint_BJ = fast_linear(self.joint, self.dropout(both_texts(pooled_SP, len(inputs_BTD)))).tanh()
        return self.output(self.dropout(joint_BJ))


def attend_to_other(texts_STE: Tensor, mask_ST: Tensor, rows: int) -> Tensor:
    """Attention from each word to the row's other text, weighted by a softmax of dot products.

    Zeros at padding, and where the other text is empty.

    Args:
        texts_STE: `(S, time, width)`.
        mask_ST: `(S, time)` bool.
        rows: B. The other text of `s` is `(s + B) % S`.
    """
    others_STE, others_ST = texts_STE.roll(rows, 0), mask_ST.roll(rows, 0)
    affinity_STT = texts_STE @ others_STE.transpose(1, 2)
    return masked_softmax(affinity_STT, mask_ST[:, :, None] & others_ST[:, None], -1) @ others_STE


def masked_max(states_STH: Tensor, mask_ST: Tensor) -> Tensor:
    """The maximum `(S, H)` over the words of each text; 0 for an empty text."""
    if not mask_ST.shape[1]:
        return states_STH.sum(1)
    largest_SH = states_STH.masked_fill(~mask_ST[..., None], -torch.inf).amax(1)
    return largest_SH.masked_fill(~mask_ST.any(1, keepdim=True), 0)


def masked_mean(states_STH: Tensor, mask_ST: Tensor) -> Tensor:
    """The mean `(S, H)` over the words of each text; 0 for an empty text."""
    total_SH = states_STH.masked_fill(~mask_ST[..., None], 0).sum(1)
    return total_SH / mask_ST.sum(1, keepdim=True).clamp(min=1)


def both_texts(pooled_SP: Tensor, rows: int) -> Tensor:
    """The pooled vectors of both texts of each row, concatenated: `(B, 2 P)`. A single text is used twice."""
    return torch.cat([pooled_SP[:rows], pooled_SP[-rows:]], 1)
