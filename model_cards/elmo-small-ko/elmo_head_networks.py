"""The paper's networks for sentiment (BCN), textual entailment (ESIM) and questions (BiDAF with self-attention).

All vectors are of real tokens only. Where each token attends to those of another text, texts of similar length are
computed together, with padding.

Shape suffixes: B batch; N real tokens of the batch; M packed tokens of texts; S texts, the first texts of all rows,
then the second texts of all rows (S = 2 B; with single texts only, S = B and each text is compared with itself); R
texts of a group, L their longest; D width of the words that a biRNN reads; H width of its output; E width of an encoded
word; P width of a pooled text; J width of both pooled texts.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_backends import fast_linear
from .elmo_head_layers import PackedTexts, TaskGRU, TaskLSTM, VariationalDropout, glorot_, masked_softmax


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
        encoded_ME = self.encoder(texts.pack(inputs_ND), texts)
        # section 5.2 of the ELMo paper
        return encoded_ME if elmo_NE is None else torch.cat([encoded_ME, texts.pack(elmo_NE)], -1)

    def reset_parameters(self):
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
        texts_ME = self.encode(fast_linear(self.feedforward, inputs_ND).relu(), texts, elmo_NE)
        context_ME = attend_to_other(texts_ME, texts, rows)
        compared = torch.cat([texts_ME, texts_ME - context_ME, texts_ME * context_ME], -1)
        integrated_MH = self.integrator(self.sequence_dropout(compared, texts.text_N), texts)
        joint_BJ = both_texts(self._pool(integrated_MH, texts), rows)
        for linear in cast(Iterable[nn.Linear], self.joint):
            joint_BJ = fast_linear(linear, self.dropout(joint_BJ)).relu()
        return self.output(self.dropout(joint_BJ))

    def _pool(self, integrated_MH: Tensor, texts: PackedTexts) -> Tensor:
        attentive_SH = texts.sum(texts.softmax(self.attention(integrated_MH)) * integrated_MH)
        least_SH = -texts.max(-integrated_MH)
        return torch.cat([texts.max(integrated_MH), texts.mean(integrated_MH), least_SH, attentive_SH], 1)


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
        composed_MH = self.composition(self.sequence_dropout(projected_MH, texts.text_N), texts)
        pooled_SP = torch.cat([texts.mean(composed_MH), texts.max(composed_MH)], 1)
        joint_BJ = fast_linear(self.joint, self.dropout(both_texts(pooled_SP, rows))).tanh()
        return self.output(self.dropout(joint_BJ))


def attend_to_other(texts_ME: Tensor, texts: PackedTexts, rows: int) -> Tensor:
    """Attention from each word to the row's other text, weighted by a softmax of dot products.

    Zeros where the other text is empty.

    Args:
        texts_ME: `(packed tokens, width)`.
        rows: B. The other text of `s` is `(s + B) % S`.
    """
    found = []
    for own, other in texts.pairs(texts, rows):
        own_RLE, other_RLE = own.read(texts_ME), other.read(texts_ME)
        affinity_RLL = own_RLE @ other_RLE.transpose(1, 2)
        found.append((own, masked_softmax(affinity_RLL, other.mask_RL[:, None], -1) @ other_RLE))
    return texts.join(found)


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

    def forward(self, x_RLE: Tensor, y_RLE: Tensor) -> Tensor:
        """Scores `(texts, length of x, length of y)`."""
        products_RLL = (x_RLE * self.product) @ y_RLE.transpose(1, 2)
        return self.own(x_RLE) + self.other(y_RLE).transpose(1, 2) + products_RLL


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
        self, inputs_ND: Tensor, questions: PackedTexts, contexts: PackedTexts, elmo_NE: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of starts and ends `(packed tokens of the contexts,)`, and of no answer `(batch,)`.

        Args:
            inputs_ND: `(tokens, input_size)`.
            questions, contexts: the words of each, a text in each row.
            elmo_NE: `(tokens, output_elmo_size)`.
        """
        question_ME, context_ME = (self._encoded(inputs_ND, texts, elmo_NE) for texts in (questions, contexts))
        read_MH = self._attend(context_ME, contexts, question_ME, questions)
        read_MH = read_MH + self._attend_to_itself(read_MH, contexts)
        start_MH = self.start_encoder(self.dropout(read_MH, contexts.text_N), contexts)
        end_MH = self.end_encoder(self.dropout(torch.cat([start_MH, read_MH], -1), contexts.text_N), contexts)
        start_M1, end_M1 = self.start(start_MH), self.end(end_MH)
        scores = (start_M1, end_M1, self.pooling(read_MH))
        pooled = [
            contexts.sum(contexts.softmax(scores_M1) * states_MH)
            for scores_M1, states_MH in zip(scores, (start_MH, end_MH, read_MH), strict=True)
        ]
        none_B = self.none(self.none_hidden(torch.cat(pooled, -1)).relu()).squeeze(-1)
        return start_M1.squeeze(-1), end_M1.squeeze(-1), none_B

    def _encoded(self, words_ND: Tensor, texts: PackedTexts, elmo_NE: Tensor | None) -> Tensor:
        encoded_ME = self.dropout(self.encoder(texts.pack(words_ND), texts), texts.text_N)
        return encoded_ME if elmo_NE is None else torch.cat([encoded_ME, texts.pack(elmo_NE)], -1)

    def _attend(self, context_ME: Tensor, contexts: PackedTexts, question_ME: Tensor, questions: PackedTexts) -> Tensor:
        found = []
        for context, question in contexts.pairs(questions):
            question_RLE, words_R1L = question.read(question_ME), question.mask_RL[:, None]
            scores_RLL = self.attention(context.read(context_ME), question_RLE)
            attended_RLE = masked_softmax(scores_RLL, words_R1L, -1) @ question_RLE
            highest_RL = scores_RLL.masked_fill(~words_R1L, torch.finfo(scores_RLL.dtype).min).amax(-1)
            found.append((context, torch.cat([attended_RLE, highest_RL[..., None]], -1)))
        attended_ME, highest_M1 = contexts.join(found).split([context_ME.shape[1], 1], -1)
        summary_SE = contexts.sum(contexts.softmax(highest_M1) * context_ME)
        summary_ME = summary_SE.index_select(0, contexts.text_N)
        joined = [context_ME, attended_ME, context_ME * attended_ME, summary_ME * attended_ME]
        return fast_linear(self.attended, torch.cat(joined, -1)).relu()

    def _attend_to_itself(self, read_MH: Tensor, contexts: PackedTexts) -> Tensor:
        states_MH = self.self_encoder(self.dropout(read_MH, contexts.text_N), contexts)
        states_MH = self.dropout(states_MH, contexts.text_N)
        found = []
        for context, _ in contexts.pairs(contexts):
            states_RLH = context.read(states_MH)
            others_LL = ~torch.eye(context.mask_RL.shape[1], device=read_MH.device).bool()
            scores_RLL = self.self_attention(states_RLH, states_RLH)
            allowed_RLL = context.mask_RL[:, None] & others_LL
            found.append((context, masked_softmax(scores_RLL, allowed_RLL, -1) @ states_RLH))
        attended_MH = contexts.join(found)
        joined_MJ = torch.cat([states_MH, attended_MH, states_MH * attended_MH], -1)
        return fast_linear(self.self_attended, joined_MJ).relu()

    def reset_parameters(self):
        """Glorot-uniform linear layers, biases 0, products of attentions at 0.25. The biGRUs initialize themselves."""
        glorot_(self)
        for module in self.modules():
            if isinstance(module, TrilinearAttention):
                init.constant_(module.product, FIRST_PRODUCT)
