"""The paper's network for question answering: BiDAF with self-attention (Clark and Gardner 2017).

Shape suffixes: B batch; T time, question and context in one row; D width of the words; E width of an encoded word; H
width of a biGRU's output.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .elmo_backends import fast_linear
from .elmo_head_layers import TaskGRU, VariationalDropout, masked_softmax

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
        input_size: width of the word vectors, ELMo included.
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
        for module in self.modules():
            if isinstance(module, TrilinearAttention):
                init.constant_(module.product, FIRST_PRODUCT)
            elif isinstance(module, nn.Linear):
                init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    init.zeros_(module.bias)
