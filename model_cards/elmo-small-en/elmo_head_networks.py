"""The paper's networks for sentiment (BCN), textual entailment (ESIM) and questions (BiDAF with self-attention).

Shape suffixes: B batch; T time, for questions that of question and context in one row; S texts, the first texts of all
rows, then the second texts of all rows (S = 2 B; with single texts only, S = B and each text is compared with itself);
D width of the words that a biRNN reads; H width of its output; E width of an encoded word; P width of a pooled text; J
width of both pooled texts.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_backends import fast_linear
from .elmo_head_layers import TaskGRU, TaskLSTM, VariationalDropout, glorot_, masked_softmax


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
        """As `BiattentiveClassifier.forward`."""
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


FIRST_PRODUCT = 0.25  # equal words attract each other from the start; random signs take epochs to do so


class TrilinearAttention(nn.Module):
    """`a_ij = w_1 . x_i + w_2 . y_j + w_3 . (x_i * y_j)` (Seo et al. 2017, equation 1)."""

    def __init__(self, size: int):
        super().__init__()
        self.own = nn.Linear(size, 1, bias=False)
        self.other = nn.Linear(size, 1, bias=False)
        self.product = nn.Parameter(torch.empty(size))

    def forward(self, x_BTE: Tensor, y_BTE: Tensor) -> Tensor:
        """Scores `(batch, time of x, time of y)`."""
        products_BTT = (x_BTE * self.product) @ y_BTE.transpose(1, 2)
        return self.own(x_BTE) + self.other(y_BTE).transpose(1, 2) + products_BTT


class SpanReader(nn.Module):
    """Scores each word of the context as the first and as the last word of the answer.

        h = biGRU(context), q = biGRU(question), the same                                             contextual GRU
        c_i = sum_j softmax_j(a_ij) q_j;  q_c = sum_i softmax_i(max_j a_ij) h_i                       bi-attention
        x_i = relu(W [h_i; c_i; h_i * c_i; q_c * c_i] + b)
        s = biGRU(x);  s_i' = sum_j softmax_j(a'_ij, i != j) s_j                                      self-attention
        z_i = x_i + relu(W' [s_i; s_i'; s_i * s_i'] + b')
        start = w_s . biGRU(z);  end = w_e . biGRU([biGRU(z); z])                                     prediction
        none = w_0 . relu(W_0 [start states; end states; z] + b_0)                                    no answer

    (sections 2 and 4 of Clark and Gardner 2017). The score of no answer reads the three vectors pooled over the
    context: the first two with the softmax of the starts and of the ends, the third with a softmax of its own.

    Args:
        hidden_size: width of each direction of the biGRUs. The linear layers have twice this width (supplement A.3 of
            the ELMo paper: 90 and 180).
        dropout: rate of variational dropout on the inputs of biGRUs and attentions. The words are dropped out before.
        output_elmo_size: width of the ELMo vectors that are concatenated to the encoded words. 0: none.
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float, output_elmo_size: int = 0):
        super().__init__()
        width, encoded = 2 * hidden_size, 2 * hidden_size + output_elmo_size
        self.output_elmo_size = output_elmo_size
        self.dropout = VariationalDropout(dropout)
        self.encoder = TaskGRU(input_size, hidden_size)
        self.attention = TrilinearAttention(encoded)
        self.attended = nn.Linear(4 * encoded, width)
        self.self_encoder = TaskGRU(width, hidden_size)
        self.self_attention = TrilinearAttention(width)
        self.self_attended = nn.Linear(3 * width, width)
        self.start_encoder = TaskGRU(width, hidden_size)
        self.start = nn.Linear(width, 1)
        self.end_encoder = TaskGRU(2 * width, hidden_size)
        self.end = nn.Linear(width, 1)
        self.pooling = nn.Linear(width, 1, bias=False)
        self.none_hidden = nn.Linear(3 * width, hidden_size)
        self.none = nn.Linear(hidden_size, 1)

    def forward(
        self, inputs_BTD: Tensor, question_BT: Tensor, context_BT: Tensor, elmo_BTE: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of starts and ends `(batch, time)`, valid only in the context, and of no answer `(batch,)`.

        Args:
            inputs_BTD: `(batch, time, input_size)`.
            question_BT, context_BT: `(batch, time)` bool, the words of each.
            elmo_BTE: `(batch, time, output_elmo_size)`.
        """
        question_BTE, context_BTE = (
            self._encoded(inputs_BTD, mask_BT, elmo_BTE) for mask_BT in (question_BT, context_BT)
        )
        read_BTH = self._attend(context_BTE, question_BTE, context_BT, question_BT)
        read_BTH = read_BTH + self._attend_to_itself(read_BTH, context_BT)
        start_BTH = self.start_encoder(self.dropout(read_BTH), context_BT)
        end_BTH = self.end_encoder(self.dropout(torch.cat([start_BTH, read_BTH], -1)), context_BT)
        start_BT, end_BT = self.start(start_BTH).squeeze(-1), self.end(end_BTH).squeeze(-1)
        scores = (start_BT, end_BT, self.pooling(read_BTH).squeeze(-1))
        pooled = [
            (masked_softmax(scores_BT, context_BT, 1)[..., None] * states_BTH).sum(1)
            for scores_BT, states_BTH in zip(scores, (start_BTH, end_BTH, read_BTH), strict=True)
        ]
        none_B = self.none(self.none_hidden(torch.cat(pooled, -1)).relu()).squeeze(-1)
        return start_BT, end_BT, none_B

    def _encoded(self, words_BTD: Tensor, mask_BT: Tensor, elmo_BTE: Tensor | None) -> Tensor:
        encoded_BTE = self.dropout(self.encoder(words_BTD, mask_BT))
        if elmo_BTE is not None:
            encoded_BTE = torch.cat([encoded_BTE, elmo_BTE.masked_fill(~mask_BT[..., None], 0)], -1)
        return encoded_BTE

    def _attend(self, context_BTE: Tensor, question_BTE: Tensor, context_BT: Tensor, question_BT: Tensor) -> Tensor:
        scores_BTT = self.attention(context_BTE, question_BTE)
        both_BTT = context_BT[:, :, None] & question_BT[:, None]
        attended_BTE = masked_softmax(scores_BTT, both_BTT, -1) @ question_BTE
        highest_BT = scores_BTT.masked_fill(~both_BTT, torch.finfo(scores_BTT.dtype).min).amax(-1)
        summary_BE = (masked_softmax(highest_BT, context_BT, 1)[..., None] * context_BTE).sum(1)
        joined = [context_BTE, attended_BTE, context_BTE * attended_BTE, summary_BE[:, None] * attended_BTE]
        return fast_linear(self.attended, torch.cat(joined, -1)).relu().masked_fill(~context_BT[..., None], 0)

    def _attend_to_itself(self, read_BTH: Tensor, context_BT: Tensor) -> Tensor:
        states_BTH = self.dropout(self.self_encoder(self.dropout(read_BTH), context_BT))
        others_TT = ~torch.eye(context_BT.shape[1], dtype=torch.bool, device=context_BT.device)
        both_BTT = context_BT[:, :, None] & context_BT[:, None] & others_TT
        attended_BTH = masked_softmax(self.self_attention(states_BTH, states_BTH), both_BTT, -1) @ states_BTH
        joined_BTJ = torch.cat([states_BTH, attended_BTH, states_BTH * attended_BTH], -1)
        return fast_linear(self.self_attended, joined_BTJ).relu().masked_fill(~context_BT[..., None], 0)

    def reset_parameters(self):
        """Glorot-uniform linear layers, biases 0, products of attentions at 0.25. The biGRUs initialise themselves."""
        glorot_(self)
        for module in self.modules():
            if isinstance(module, TrilinearAttention):
                init.constant_(module.product, FIRST_PRODUCT)
